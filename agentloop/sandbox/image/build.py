"""Build the image: a base, which is Python on Debian, and packages on top of it.

    base:      pulled from a registry, or made from system packages by mmdebstrap ──┐
    packages:  wheels, which this machine's pip fetches for the base's Python ──────┴── Dockerfile

Either base gets the same packages: those of requirements.txt, by their hashes, and whatever else is
asked for. As pip runs here, its mirrors, proxies and certificates hold, but no constraints, which
were meant for another installation. The engine needs no network. `mmdebstrap` needs no registry: it
makes a small Debian or Ubuntu from the package sources that this machine uses. An older release's
sources also serve a newer release, whose Python has immortal objects: a call costs a third less
with it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import aiodocker
import aiohttp
import anyio

from agentloop.child_environment import for_pip, for_system
from agentloop.sandbox.engine import what_it_said
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.settings import split_packages

Progress = Callable[[str], None]

IMAGE_NAME = "agentloop-sandbox"
BASE_NAME = "agentloop-sandbox-base"
DOCKERFILE = Path(__file__).with_name("Dockerfile")
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
SYSTEM_PACKAGES = ("python3",)
INSTALL = "apt-get update && apt-get install -y --no-install-recommends"  # into a pulled base
# What to take instead of an old release.
NEWER = {"bullseye": "trixie", "bookworm": "trixie", "focal": "noble", "jammy": "noble"}
LEFT_OUT = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
PULL_TIMEOUT_S = 120.0
PIP_TIMEOUT_S = 900.0
BUILD_TIMEOUT_S = 1800.0
CONFIG_TIMEOUT_S = 60.0
NUM_LAST_LINES = 15  # of a failed build
WITHOUT_IMAGE = (
    "`python -m agentloop.sandbox.image build` tries again; without an image, calls can run in "
    "local processes: sandbox.backend=process"
)

DESCRIBE = """
import json, platform, sys, sysconfig
print(json.dumps({
    "python": "%d.%d" % sys.version_info[:2], "machine": platform.machine(),
    "glibc": platform.libc_ver()[1], "target": sysconfig.get_path("purelib"),
}))
"""


def image_tag(packages: Sequence[str] = ()) -> str:
    """Name and tag of the image that the present recipe makes with these packages added."""
    wheels, debian = split_packages(packages)
    recipe = DOCKERFILE.read_bytes() + REQUIREMENTS.read_bytes() + _base_recipe(debian)
    return f"{IMAGE_NAME}:{_short_hash(recipe + repr(wheels).encode())}"


def _base_recipe(debian: Sequence[str]) -> bytes:
    return repr(((*SYSTEM_PACKAGES, *debian), NEWER, LEFT_OUT)).encode()


def _short_hash(recipe: bytes) -> str:
    return hashlib.sha256(recipe).hexdigest()[:12]


async def ensure_image(
    docker: aiodocker.Docker, image: str, progress: Progress, packages: Sequence[str] = ()
) -> str:
    """`image`, or the project's own if that is empty: built now where the engine lacks it."""
    name = image or image_tag(packages)
    if await has_image(docker, name):
        return name
    if image:
        raise SandboxUnavailable(f"the engine has no image {image!r}; pull or build it first")
    await build_image(docker, progress, packages=packages)
    return name


async def has_image(docker: aiodocker.Docker, name: str) -> bool:
    """Return whether the engine has the image, by its name and tag."""
    try:
        await docker.images.inspect(name)
    except aiodocker.DockerError as error:
        if error.status == 404:
            return False
        raise
    return True


async def build_image(
    docker: aiodocker.Docker,
    progress: Progress,
    *,
    packages: Sequence[str] = (),
    base: str = "",
) -> None:
    """Make the image on `base`, by default the Dockerfile's or else one from system packages.

    Raises:
        SandboxUnavailable: there is no base; the message says what to install.
    """
    name, (wheels, debian) = image_tag(packages), split_packages(packages)
    default, added = _dockerfile_base(), ""
    if await _can_pull(docker, base or default, progress):
        base = base or default
        if debian:
            added = f"RUN {INSTALL} {' '.join(debian)}\n"
    elif base:
        raise SandboxUnavailable(f"the base image {base} can't be pulled")
    else:
        base = await _system_base(docker, progress, debian)
    python = await _python_of(docker, base)
    with tempfile.TemporaryDirectory() as folder:
        names = ", ".join([*_pinned(), *wheels])
        progress(f"Sandbox image, step 2 of 3: fetching {names}")
        await _fetch(python, wheels, Path(folder))
        progress("Sandbox image, step 3 of 3: building it")
        await _build(docker, base, python, Path(folder), added, name)
    progress(f"The sandbox image is ready: {name}")


def _dockerfile_base() -> str:
    match = re.search(r"^ARG BASE=(\S+)$", DOCKERFILE.read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


async def _can_pull(docker: aiodocker.Docker, base: str, progress: Progress) -> bool:
    if await has_image(docker, base):
        return True
    progress(f"Sandbox image, step 1 of 3, needed once: pulling {base}")
    try:
        with anyio.fail_after(PULL_TIMEOUT_S):
            await docker.images.pull(base)
    except (aiodocker.DockerError, aiohttp.ClientError, TimeoutError) as error:
        progress(f"{base} cannot be pulled ({what_it_said(error)[:200] or 'too slow'})")
        return False
    return True


async def _system_base(docker: aiodocker.Docker, progress: Progress, debian: Sequence[str]) -> str:
    """A base from system packages; the one that was made before, if it is there."""
    name = f"{BASE_NAME}:{_short_hash(_base_recipe(debian))}"
    if await has_image(docker, name):
        return name
    commands = await anyio.to_thread.run_sync(_mmdebstrap_commands, debian)
    progress(
        "Sandbox image, step 1 of 3, needed once: making a base from system packages, which takes "
        "about a minute"
    )
    for command in commands:
        with tempfile.TemporaryFile() as rootfs:
            failure = await _run(command, BUILD_TIMEOUT_S, for_system(), rootfs)
            if failure is None:
                rootfs.seek(0)
                await _import(docker, name, rootfs)
                return name
        progress(f"mmdebstrap failed: {failure}")
    raise SandboxUnavailable(f"mmdebstrap failed:\n{failure}\n{WITHOUT_IMAGE}")


def _mmdebstrap_commands(debian: Sequence[str]) -> list[list[str]]:
    """mmdebstrap to standard output, with this machine's package sources: first of a newer release
    where the machine's is old, then of its own."""
    if shutil.which("mmdebstrap") is None:
        raise SandboxUnavailable(
            "the sandbox image needs either a registry (to pull the base of its Dockerfile) or "
            "mmdebstrap: apt install mmdebstrap. Without an image, calls can run in local "
            "processes: backend=process"
        )
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    names = ("sources.list", "sources.list.d/debian.sources", "sources.list.d/ubuntu.sources")
    sources = [str(path) for name in names if (path := Path("/etc/apt", name)).is_file()]
    if not suite or not sources:
        raise SandboxUnavailable("mmdebstrap needs a Debian or Ubuntu with its package sources")
    include = f"--include={','.join([*SYSTEM_PACKAGES, *debian])}"
    exclude = [f"--dpkgopt=path-exclude={pattern}" for pattern in LEFT_OUT]
    start = ["mmdebstrap", "--quiet", "--variant=minbase", include]
    commands = [[*start, *exclude, suite, "-", *sources]]
    if suite in NEWER and (uris := _package_uris(suite)):
        newer = [f"deb {uri} {NEWER[suite]} main" for uri in uris]
        commands.insert(0, [*start, *exclude, NEWER[suite], "-", *newer])
    return commands


def _package_uris(suite: str) -> list[str]:
    """Return the addresses from which apt gets the main packages of the release."""
    targets = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)"],
        capture_output=True, text=True, timeout=30, env=for_system(),
    )  # fmt: skip
    rows = {tuple(line.split()) for line in targets.stdout.splitlines()}
    return sorted(row[2] for row in rows if row[:2] == (suite, "main"))


async def _import(docker: aiodocker.Docker, name: str, rootfs: IO[bytes]) -> None:
    repository, tag = name.split(":")
    # aiodocker has no call for this endpoint of the Engine.
    async with docker._query(
        "images/create",
        "POST",
        params={"fromSrc": "-", "repo": repository, "tag": tag},
        data=rootfs,
        timeout=aiohttp.ClientTimeout(total=BUILD_TIMEOUT_S),
    ) as response:
        await response.read()  # no deadline: the request has one


async def _run(
    command: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str],
    stdout: IO[bytes] | int = subprocess.DEVNULL,
) -> str | None:
    """Run a command; return its last messages if it failed, or was too slow, else None."""
    try:
        with anyio.fail_after(timeout_s):
            process = await anyio.run_process(
                command,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                check=False,
                env=environment,
            )
    except TimeoutError:
        return f"it took longer than {timeout_s:g} s"
    if process.returncode == 0:
        return None
    lines = process.stderr.decode(errors="replace").strip().splitlines()
    return "\n".join(lines[-NUM_LAST_LINES:]) or f"exit status {process.returncode}"


@dataclass(frozen=True)
class Python:
    """The Python of a base, as it describes itself."""

    python: str  # its version, such as 3.13
    machine: str  # x86_64, aarch64
    glibc: str  # its version, such as 2.41; empty for another C library
    target: str  # the folder of its packages

    def platforms(self) -> list[str]:
        """The tags of wheels that run on it, best first."""
        newest = int(self.glibc.partition(".")[2])
        tags = [f"manylinux_2_{minor}" for minor in range(newest, 16, -1)]
        return [f"{tag}_{self.machine}" for tag in [*tags, "manylinux2014"]]


async def _python_of(docker: aiodocker.Docker, base: str) -> Python:
    config = {
        "Image": base,
        "Entrypoint": ["python3", "-c", DESCRIBE],
        "Cmd": [],
        "HostConfig": {"NetworkMode": "none"},
    }
    container = await docker.containers.create(config)
    try:
        with anyio.fail_after(60):
            await container.start()
            await container.wait()
            output = "".join(await container.log(stdout=True, stderr=True))
    finally:
        with anyio.move_on_after(10, shield=True):
            await container.delete(force=True, v=True)
    try:
        python = Python(**json.loads(output))
    except (ValueError, TypeError) as error:
        raise SandboxUnavailable(f"the base image {base} has no python3: {output}") from error
    if not python.glibc:
        raise SandboxUnavailable(f"the base image {base} is not one of Debian's kind (no glibc)")
    return python


async def _fetch(python: Python, packages: Sequence[str], folder: Path) -> None:
    """Install wheels into a folder. Where both want a package, it is there already as the first
    came: that is ours, and the others are held to its version."""
    target = ["--target", str(folder / "site"), "--python-version", python.python]
    for tag in python.platforms():
        target += ["--platform", tag]
    await _pip([*target, "--require-hashes", "--requirement", str(REQUIREMENTS)], "its packages")
    if packages:
        pinned = folder / "constraints.txt"
        pinned.write_text("\n".join(_pinned()))
        await _pip([*target, "--constraint", str(pinned), *packages], ", ".join(packages))


def _pinned() -> list[str]:
    """Return the requirements of the image, such as numpy==2.3.5."""
    return re.findall(r"^\S+==\S+", REQUIREMENTS.read_text(), re.M)


async def _pip(arguments: list[str], packages: str) -> None:
    pip = await anyio.to_thread.run_sync(_find_pip)
    command = [
        *(*pip, "install", "--quiet", "--no-input", "--no-compile", "--only-binary=:all:"),
        *("--disable-pip-version-check", "--root-user-action=ignore", *arguments),
    ]
    environment = for_pip(await _configuration(pip))
    if failure := await _run(command, PIP_TIMEOUT_S, environment):
        raise SandboxUnavailable(
            f"pip can't fetch {packages} for the sandbox image:\n{failure}\n"
            f"`pip config list` shows from where it fetches. {WITHOUT_IMAGE}"
        )


async def _configuration(pip: Sequence[str]) -> str:
    """Return pip's settings, from its files and the environment, as it prints them."""
    # With `user = true` in a file, older versions of pip would list the user's file alone.
    environment = os.environ | {"PIP_USER": "0"}
    with anyio.fail_after(CONFIG_TIMEOUT_S):
        listed = await anyio.run_process([*pip, "config", "list"], env=environment, check=False)
    if listed.returncode:
        error = listed.stderr.decode(errors="replace").strip()
        raise SandboxUnavailable(f"pip can't read its configuration:\n{error}\n{WITHOUT_IMAGE}")
    return listed.stdout.decode()


def _find_pip() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip"]
    if path := shutil.which("pip") or shutil.which("pip3"):
        return [path]
    raise SandboxUnavailable(
        "the sandbox image's packages are fetched by pip, which is not installed: "
        f"{sys.executable} -m ensurepip"
    )


async def _build(
    docker: aiodocker.Docker, base: str, python: Python, folder: Path, added: str, name: str
) -> None:
    with tempfile.TemporaryFile() as context:
        await anyio.to_thread.run_sync(_pack, folder, added, context)
        try:
            await run_build(docker, context, name, {"BASE": base, "TARGET": python.target})
        except SandboxUnavailable as error:
            raise SandboxUnavailable(f"{error}\n{WITHOUT_IMAGE}") from error


async def run_build(
    docker: aiodocker.Docker,
    context: IO[bytes],
    name: str,
    arguments: Mapping[str, str],
    timeout_s: float = BUILD_TIMEOUT_S,
    *,
    label: str = "",
) -> None:
    """Build an image from a tar with a Dockerfile.

    Raises:
        SandboxUnavailable: a step failed; the message ends with its last lines.
    """
    lines: deque[str] = deque(maxlen=NUM_LAST_LINES)
    try:
        with anyio.fail_after(timeout_s):
            steps = docker.images.build(
                fileobj=context,
                encoding="identity",
                tag=name,
                buildargs=dict(arguments),
                labels={label: ""} if label else None,
                stream=True,
                timeout=None,
            )
            async for step in steps:  # no deadline here: it is above
                lines.extend(step.get("stream", "").splitlines())
                if "error" in step:
                    lines.append(step["error"])
                    raise SandboxUnavailable("\n".join(filter(None, lines)))
    except (SandboxUnavailable, TimeoutError, aiodocker.DockerError) as error:
        reason = what_it_said(error) or f"it took longer than {timeout_s:g} s"
        raise SandboxUnavailable(f"the image {name} could not be built:\n{reason}") from error


def _pack(folder: Path, added: str, context: IO[bytes]) -> None:
    """The Dockerfile, with lines added, and the packages, owned by root."""
    (folder / "Dockerfile").write_text(DOCKERFILE.read_text() + added)

    def by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.mode |= 0o755 if info.isdir() else 0o444
        return info

    with tarfile.open(fileobj=context, mode="w") as tar:
        tar.add(folder / "Dockerfile", "Dockerfile", filter=by_root)
        tar.add(folder / "site", "site", filter=by_root)
    context.seek(0)
