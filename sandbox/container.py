"""Workers in containers, through aiodocker.

A container gets: no network, a read-only root, no capability but the three that the uid switch
needs, no new privileges, no swap, a bound on processes, our own system call filter, no IPC, and
a small tmpfs. Its command carries the worker's source, so nothing of ours is in the image.

The worker connects to a socket in a directory that is mounted for this one purpose. We close the
listener and remove the directory as soon as it has, before the first call: a call finds nothing
to connect to. Where the engine is on another machine, frames travel over the attached standard
streams instead. When the connection ends the worker exits, and the engine removes the container:
also after a kill -9 of ours. What an engine could not remove is reaped by its labels.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import anyio
from aiodocker.containers import DockerContainer

from sandbox.backend import TUNED, next_uid_base, read_profile, read_worker, worker_settings
from sandbox.engine import connect, is_local
from sandbox.errors import SandboxUnavailable
from sandbox.image import ensure_image
from sandbox.link import Link, SocketProtocol, wait_ready
from sandbox.owner import boot_id, is_dead, make_dir, own_tag, reap_dirs
from sandbox.settings import PoolSettings

log = logging.getLogger("sandbox")

LABEL = "agentloop.sandbox"
INSIDE = "/run/agentloop"
LAYERS = {
    "container": "its own root, processes, mounts and IPC (Docker)",
    "network": "none",
    "root": "read-only",
    "uid": "one per call",
    "capabilities": "none in a call",
    "system calls": "own allow list (seccomp)",
    "memory": "cgroup and address space",
    "processes": "cgroup, and a limit per call",
}


def host_config(settings: PoolSettings, socket_dir: Path | None) -> dict[str, Any]:
    """The walls, in the Engine's words."""
    memory = settings.memory_mib << 20
    pids = 64 + settings.processes_per_call * settings.slots_per_worker
    mounts = [
        {"Type": "bind", "Source": str(socket_dir), "Target": INSIDE, "ReadOnly": True}
    ]  # fmt: skip
    return {
        "CapDrop": ["ALL"],
        "CapAdd": ["SETUID", "SETGID", "KILL"],
        "SecurityOpt": ["no-new-privileges", f"seccomp={read_profile()}"],
        "ReadonlyRootfs": True,
        "NetworkMode": "none",
        "IpcMode": "none",
        "PidsLimit": pids + 2 * settings.sessions_per_worker,
        "Memory": memory,
        "MemorySwap": memory,
        "Tmpfs": {"/tmp": f"size={settings.scratch_mib}m,nr_inodes=8k,mode=1777"},
        "LogConfig": {"Type": "none"},
        "AutoRemove": True,
        "Mounts": mounts if socket_dir else [],
    }


class _Engine:
    """A connected engine and how many workers it has."""

    def __init__(self, docker: aiodocker.Docker, local: bool, image: str) -> None:
        self.docker = docker
        self.local = local
        self.image = image
        self.num_workers = 0


class DockerBackend:
    """Starts workers in containers, spread evenly over the engines."""

    name = "docker"
    layers: Mapping[str, str] = LAYERS

    def __init__(self, settings: PoolSettings, engines: list[_Engine]) -> None:
        self._settings = settings
        self._engines = engines

    @asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        engine = min(self._engines, key=lambda e: e.num_workers)
        engine.num_workers += 1
        try:
            open_worker = self._by_socket if engine.local else self._by_attach
            async with open_worker(engine, worker_id) as link:
                yield link
        except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            raise SandboxUnavailable(f"the engine refused a worker: {error}") from error
        finally:
            engine.num_workers -= 1

    @asynccontextmanager
    async def _by_socket(self, engine: _Engine, worker_id: str) -> AsyncIterator[Link]:
        link = Link(worker_id)
        loop = asyncio.get_running_loop()
        protocol = SocketProtocol(link)
        outer = make_dir()  # 0700: keeps everybody on the host out
        inner = outer / "socket"
        inner.mkdir(mode=0o755)
        path = inner / "worker"
        server = await loop.create_unix_server(lambda: protocol, str(path))
        os.chmod(path, 0o777)  # the container's root has no capability to override modes
        try:
            connect_to = f"unix:{INSIDE}/worker"
            async with self._container(engine, worker_id, connect_to, inner):
                await wait_ready(link, self._settings.start_timeout_s)
                server.close()
                shutil.rmtree(outer)
                yield link
        finally:
            server.close()
            protocol.close()
            link.lose("the pool closed it")
            shutil.rmtree(outer, ignore_errors=True)

    @asynccontextmanager
    async def _by_attach(self, engine: _Engine, worker_id: str) -> AsyncIterator[Link]:
        link = Link(worker_id)
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        link.write = outgoing.put_nowait  # bounded by the slots: one frame for each
        async with AsyncExitStack() as stack:
            container = await stack.enter_async_context(
                self._container(engine, worker_id, "stdio:", None, start=False)
            )
            stream = container.attach(stdin=True, stdout=True, stderr=True)
            await stack.enter_async_context(stream)
            group = await stack.enter_async_context(anyio.create_task_group())
            stack.callback(group.cancel_scope.cancel)

            async def write() -> None:
                while True:
                    try:
                        await stream.write_in(await outgoing.get())
                    except (AssertionError, OSError, aiohttp.ClientError):
                        link.lose("its stream is closed")
                        return

            async def read() -> None:
                while (message := await stream.read_out()) is not None:
                    if message.stream == 1:
                        link.feed(message.data)
                link.lose("its stream ended")

            group.start_soon(write)
            group.start_soon(read)
            await container.start()
            await wait_ready(link, self._settings.start_timeout_s)
            try:
                yield link
            finally:
                link.lose("the pool closed it")

    @asynccontextmanager
    async def _container(
        self,
        engine: _Engine,
        worker_id: str,
        connect_to: str,
        socket_dir: Path | None,
        start: bool = True,
    ) -> AsyncIterator[DockerContainer]:
        settings = worker_settings(
            self._settings, connect=connect_to, scratch="/tmp", uid_base=next_uid_base()
        )
        attached = socket_dir is None
        config = {
            "Image": engine.image,
            "Entrypoint": ["python3", "-P", "-s", "-c", read_worker(), json.dumps(settings)],
            "Cmd": [],
            "Env": list(TUNED),
            "User": "0:0",
            "WorkingDir": "/",
            "AttachStdin": attached,
            "AttachStdout": attached,
            "OpenStdin": attached,
            "StdinOnce": attached,
            "Labels": {LABEL: worker_id, f"{LABEL}.owner": own_tag(), f"{LABEL}.boot": boot_id()},
            "HostConfig": host_config(self._settings, socket_dir),
        }
        name = f"agentloop-sandbox-{worker_id}"
        container = await engine.docker.containers.create(config, name=name)
        try:
            if start:
                await container.start()
            yield container
        finally:
            with anyio.CancelScope(shield=True), anyio.move_on_after(10):
                await _remove(container)


async def _remove(container: DockerContainer) -> None:
    try:
        await container.delete(force=True, v=True)
    except aiodocker.DockerError as error:
        if error.status not in (404, 409):  # gone already, or on its way
            log.warning("a container could not be removed: %s", error)
    except (aiohttp.ClientError, OSError) as error:
        log.warning("a container could not be removed: %s", error)


async def reap_containers(docker: aiodocker.Docker, local: bool) -> int:
    """Remove containers whose owner is dead; how many there were."""
    num = 0
    for container in await docker.containers.list(all=True, filters={"label": [LABEL]}):
        labels = container["Labels"]
        same_boot = labels.get(f"{LABEL}.boot") == boot_id()
        # On a shared engine another machine's pids mean nothing to us.
        if (same_boot and is_dead(labels.get(f"{LABEL}.owner", ""))) or (local and not same_boot):
            await _remove(container)
            num += 1
    return num


@asynccontextmanager
async def docker_backend(
    settings: PoolSettings, on_progress: Callable[[str], None]
) -> AsyncIterator[DockerBackend]:
    """Connect to the engines, reap what dead owners left there, see that the image is there.

    Raises SandboxUnavailable where an engine doesn't answer or the image can't be made.
    """
    await anyio.to_thread.run_sync(reap_dirs)
    async with AsyncExitStack() as stack:
        engines = []
        for url in settings.engines or [""]:
            docker = await stack.enter_async_context(connect(url))
            if num := await reap_containers(docker, is_local(url)):
                on_progress(f"Removed {num} containers that a killed process had left.")
            image = await ensure_image(docker, settings.image, on_progress)
            engines.append(_Engine(docker, is_local(url), image))
        yield DockerBackend(settings, engines)
