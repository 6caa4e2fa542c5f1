"""Build the image: from the Dockerfile where its base can be pulled, else from system packages.

The second way needs no registry: `mmdebstrap` makes a small Debian or Ubuntu from the package
sources that this machine uses, and the engine imports it as an image. An older Debian's sources
also serve a newer release, whose Python has immortal objects: a call costs a third less with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import subprocess
import tarfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Literal

import aiodocker
import aiohttp
import anyio
import anyio.abc

from sandbox.errors import SandboxUnavailable

Progress = Callable[[str], None]
Method = Literal["auto", "dockerfile", "mmdebstrap"]

IMAGE_NAME = "agentloop-sandbox"
DOCKERFILE = Path(__file__).with_name("Dockerfile")
PACKAGES = ("python3", "python3-numpy", "python3-sympy")
NEWER = {"bullseye": "trixie", "bookworm": "trixie"}  # what to take instead of an old release
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
PULL_TIMEOUT_S = 120.0
BUILD_TIMEOUT_S = 1800.0


def image_tag() -> str:
    """Name and tag of the image that the present recipe makes."""
    recipe = DOCKERFILE.read_bytes() + repr((PACKAGES, NEWER, LEFT_OUT)).encode()
    return f"{IMAGE_NAME}:{hashlib.sha256(recipe).hexdigest()[:12]}"


async def ensure_image(docker: aiodocker.Docker, image: str, progress: Progress) -> str:
    """`image`, or the project's own if that is empty: built now where the engine lacks it."""
    name = image or image_tag()
    if await has_image(docker, name):
        return name
    if image:
        raise SandboxUnavailable(f"the engine has no image {image!r}; pull or build it first")
    await build_image(docker, progress)
    return name


async def has_image(docker: aiodocker.Docker, name: str) -> bool:
    try:
        await docker.images.inspect(name)
    except aiodocker.DockerError as error:
        if error.status == 404:
            return False
        raise
    return True


async def build_image(
    docker: aiodocker.Docker, progress: Progress, method: Method = "auto"
) -> None:
    """Make the image. Raises SandboxUnavailable that says what to install where none of the ways
    is open."""
    if method != "mmdebstrap" and await _can_pull_base(docker, progress):
        await _build_dockerfile(docker, progress)
    elif method != "dockerfile":
        await _build_mmdebstrap(docker, progress)
    else:
        raise SandboxUnavailable("the base image of the Dockerfile can't be pulled")
    progress(f"The sandbox image is ready: {image_tag()}")


async def _can_pull_base(docker: aiodocker.Docker, progress: Progress) -> bool:
    base = DOCKERFILE.read_text().split()[1]
    if await has_image(docker, base):
        return True
    progress(f"Pulling {base} ...")
    try:
        with anyio.fail_after(PULL_TIMEOUT_S):
            await docker.images.pull(base)
    except (aiodocker.DockerError, aiohttp.ClientError, TimeoutError) as error:
        progress(f"It can't be pulled here ({str(error)[:200] or 'too slow'}).")
        return False
    return True


async def _build_dockerfile(docker: aiodocker.Docker, progress: Progress) -> None:
    progress("Building the sandbox image from its Dockerfile (minutes) ...")
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as tar:
        tar.add(DOCKERFILE, "Dockerfile")
    context.seek(0)
    with anyio.fail_after(BUILD_TIMEOUT_S):
        steps = docker.images.build(
            fileobj=context, encoding="identity", tag=image_tag(), stream=True, timeout=None
        )
        async for step in steps:
            if "error" in step:
                raise SandboxUnavailable(f"the image could not be built: {step['error']}")
            if line := step.get("stream", "").strip():
                progress(line)


def _mmdebstrap_commands() -> list[list[str]]:
    """mmdebstrap to standard output, with this machine's package sources: first of a newer release
    where the machine's is old, then of its own."""
    if shutil.which("mmdebstrap") is None:
        raise SandboxUnavailable(
            "the sandbox image needs either a registry (to pull the base of its Dockerfile) or "
            "mmdebstrap: apt install mmdebstrap"
        )
    release = dict(
        line.split("=", 1)
        for line in Path("/etc/os-release").read_text().splitlines()
        if "=" in line
    )
    suite = release.get("VERSION_CODENAME", "").strip('"')
    names = ("sources.list", "sources.list.d/debian.sources", "sources.list.d/ubuntu.sources")
    sources = [str(path) for name in names if (path := Path("/etc/apt", name)).is_file()]
    if not suite or not sources:
        raise SandboxUnavailable("mmdebstrap needs a Debian or Ubuntu with its package sources")
    exclude = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    start = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={','.join(PACKAGES)}"]
    commands = [[*start, *exclude, suite, "-", *sources]]
    if suite in NEWER and (uris := _package_uris(suite)):
        newer = [f"deb {uri} {NEWER[suite]} main" for uri in uris]
        commands.insert(0, [*start, *exclude, NEWER[suite], "-", *newer])
    return commands


def _package_uris(suite: str) -> list[str]:
    """Where apt gets the main packages of the release from."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)"],
        capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    rows = {tuple(line.split()) for line in listed.stdout.splitlines()}
    return sorted(row[2] for row in rows if row[:2] == (suite, "main"))


async def _build_mmdebstrap(docker: aiodocker.Docker, progress: Progress) -> None:
    commands = await anyio.to_thread.run_sync(_mmdebstrap_commands)
    progress("Building the sandbox image from system packages (a minute or two) ...")
    for command in commands:
        said = await _import_output(docker, command, progress)
        if said is None:
            return
        progress(f"mmdebstrap failed: {said[-500:]}")
    raise SandboxUnavailable(f"mmdebstrap failed: {said}")


async def _import_output(
    docker: aiodocker.Docker, command: list[str], progress: Progress
) -> str | None:
    """Run the command and import the root that it writes; what it said if it fails, else None."""
    process = await anyio.open_process(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    assert process.stderr is not None
    said = bytearray()

    async def listen(stream: anyio.abc.ByteReceiveStream) -> None:
        async for chunk in stream:  # no deadline: _import_output has one
            said.extend(chunk[-4000:])

    try:
        with anyio.fail_after(BUILD_TIMEOUT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(listen, process.stderr)
                await _import(docker, _rootfs(process, progress))
                status = await process.wait()
    except TimeoutError as error:
        raise SandboxUnavailable("mmdebstrap took too long") from error
    finally:
        if process.returncode is None:
            process.kill()
        with anyio.CancelScope(shield=True), anyio.move_on_after(10):
            await process.aclose()
    if status == 0:
        return None
    with contextlib.suppress(aiodocker.DockerError):  # half of it, if anything
        await docker.images.delete(image_tag(), force=True)
    return said.decode(errors="replace")[-1000:]


async def _rootfs(process: anyio.abc.Process, progress: Progress) -> AsyncIterator[bytes]:
    assert process.stdout is not None
    num_bytes, told = 0, 0
    async for chunk in process.stdout:  # no deadline: _import_output has one
        num_bytes += len(chunk)
        if num_bytes - told >= 100_000_000:
            told = num_bytes
            progress(f"... {num_bytes // 1_000_000} MB")
        yield chunk


async def _import(docker: aiodocker.Docker, rootfs: AsyncIterator[bytes]) -> None:
    name, tag = image_tag().split(":")
    # aiodocker has no call for this endpoint of the Engine.
    async with docker._query(
        "images/create",
        "POST",
        params={"fromSrc": "-", "repo": name, "tag": tag},
        data=rootfs,
        timeout=aiohttp.ClientTimeout(total=BUILD_TIMEOUT_S),
    ) as response:
        await response.read()  # no deadline: the request has one
