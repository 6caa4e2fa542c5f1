"""Workers in containers, through aiodocker.

A container runs one call at a time, or owns a session. So the limits that the engine sets on it, on
memory, processes and processors, are those of the call, and what its cgroup counts is the call's.

It gets: no network, a read-only root, no capability but the three that the uid switch needs and one
to fix the OOM score of calls, no new privileges, no swap, our own system call filter, no IPC, and a
small tmpfs. Its command carries the worker's source, so nothing of ours is in the image.

The worker connects to a socket in a directory that is mounted for this one purpose. We close the
listener and remove the directory as soon as it has, before the first call: a call finds nothing
to connect to. Where the engine is on another machine, frames travel over the attached standard
streams instead. When the connection ends the worker exits, and the engine removes the container:
also after a kill -9 of ours. What an engine could not remove is reaped by its labels.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal, TypedDict, cast

import aiodocker
import aiohttp
import anyio
from aiodocker.containers import DockerContainer
from aiodocker.stream import Stream
from aiodocker.types import JSONObject

from agentloop.sandbox.backend import (
    REMAPPED_UIDS,
    TUNED,
    UIDS,
    directory_size,
    greeting,
    max_processes,
    random_uid,
    read_boot,
    read_profile,
    start_bytes,
)
from agentloop.sandbox.engine import connect, is_local, local_engine, what_it_said
from agentloop.sandbox.errors import ProgramUnsupported, SandboxUnavailable
from agentloop.sandbox.image import ensure_image
from agentloop.sandbox.link import Link, SocketProtocol, wait_ready
from agentloop.sandbox.owner import boot_id, is_dead, own_tag, reap_dirs, removed_at_end
from agentloop.sandbox.settings import PoolSettings
from agentloop.sandbox.worker.kernel import CAP_SYS_RESOURCE, can_have_cap

log = logging.getLogger("sandbox")

LABEL = "agentloop.sandbox"
INSIDE = "/run/agentloop"
SCRATCH = "/tmp"
OOM_SCORE_ADJ = 500
NEVER_ENDED = -1000  # the OOM score of a worker's server, where calls can't lower theirs
# To give calls an OOM score that they can't lower. If an engine lacks it itself, its containers
# would not start.
CAPS_HERE = ("SYS_RESOURCE",) if can_have_cap(CAP_SYS_RESOURCE) else ()
CREATE_TIMEOUT_S = 30.0
REMOVE_TIMEOUT_S = 10.0
UPDATE_TIMEOUT_S = 10.0
SWEEP_EVERY_S = 2.0
AVOID_S = 10.0
LAYERS = {
    "container": "separate file system, processes, mounts and IPC (Docker)",
    "network": "isolated",
    "file system": "the image, read-only",
    "uid": "one per container",
    "capabilities": "none in a call",
    "system calls": "allow list (seccomp)",
    "memory": "limited and counted by the container's cgroup",
    "process count": "limited by the container's cgroup",
    "processor time": "one processor per container",
}

Limit = Literal["MemoryLimit", "PidsLimit", "CpuCfsQuota"]
LIMITS: Mapping[str, Limit] = {
    "memory": "MemoryLimit",
    "process count": "PidsLimit",
    "processor time": "CpuCfsQuota",
}
"""Layers that an engine may lack, and what it calls them."""


class ImageConfig(TypedDict, total=False):
    """The fields of an image's configuration that we read."""

    User: str
    WorkingDir: str


class EngineInfo(TypedDict, total=False):
    """The fields of an engine's description of itself that we read."""

    SecurityOptions: list[str] | None
    DockerRootDir: str
    DriverStatus: list[list[str]] | None
    DefaultRuntime: str
    MemoryLimit: bool
    PidsLimit: bool
    CpuCfsQuota: bool


def walls(settings: PoolSettings, memory: int, processes: int, *security: str) -> JSONObject:
    """Return what holds for every container of ours, in the Engine's words.

    Args:
        memory: limit in bytes, of all processes together.
        processes: limit of processes and threads.
        security: further options of security, such as a filter of system calls.
    """
    return {
        **({"Runtime": settings.runtime} if settings.runtime else {}),
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges", *security],
        "ReadonlyRootfs": True,
        "NetworkMode": "none",
        "PidsLimit": processes,
        "Memory": memory,
        "MemorySwap": memory,
        "NanoCpus": 1_000_000_000,
        # Less than a call's 1000: where memory runs out after all, the worker is killed last. It
        # is also the least that a process inside can give itself where scores aren't fixed.
        "OomScoreAdj": OOM_SCORE_ADJ,
        "LogConfig": {"Type": "none"},
        "AutoRemove": True,
    }


def host_config(
    settings: PoolSettings, socket_dir: Path | None, uid: int, caps: tuple[str, ...] = ()
) -> JSONObject:
    """Return the walls of a worker.

    Args:
        uid: the user of its calls.
        caps: capabilities beside those that a worker can't do without.
    """
    limits = start_bytes(settings), max_processes(settings)
    return {
        **walls(settings, *limits, f"seccomp={read_profile()}"),
        # Its zygotes raise theirs. A call that uses up its memory ends neither, as a rule; and what
        # it does end, the server lives to tell.
        **({"OomScoreAdj": NEVER_ENDED} if caps else {}),
        "CapAdd": ["SETUID", "SETGID", "KILL", *caps],
        "IpcMode": "none",
        "Tmpfs": {
            # The container's root owns it, so that no call can close it to the next.
            SCRATCH: f"{directory_size(settings)},uid=0,gid={uid},mode=0770",
            "/dev/pts": "ro,size=4k,mode=0755",  # no terminals
        },
        "Mounts": [mount(socket_dir, INSIDE)] if socket_dir else [],
    }


def mount(source: Path, target: str) -> JSONObject:
    """Return a read-only mount of a file or folder of this machine."""
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": True}


class ContainerEngine:
    """A connected engine, how many workers it has, and what it still has to remove."""

    def __init__(self, docker: aiodocker.Docker, local: bool, image: str, info: EngineInfo) -> None:
        self.docker = docker
        self.local = local
        self.image = image
        options = info.get("SecurityOptions") or []
        # Its uids are few, and not the host's.
        self.remapped = any("userns" in option or "rootless" in option for option in options)
        self.root = str(info.get("DockerRootDir") or "/")
        # Layers hold whole files, and nothing that the kernel alone understands.
        self.has_plain_overlay = ["Native Overlay Diff", "true"] in (info.get("DriverStatus") or [])
        self.default_runtime = info.get("DefaultRuntime") or "the engine's default"
        # Such as one that runs as a user to whom no cgroup was delegated.
        self.missing_limits = [
            layer for layer, limit in LIMITS.items() if not info.get(limit, True)
        ]
        self.caps = CAPS_HERE if local else ()
        self.num_workers = 0
        self.avoid_until = 0.0  # it refused a worker: others first, for a while
        self.left: set[str] = set()  # names of containers that could not be removed yet
        self._changed = anyio.Event()
        # More at a time would all take longer.
        self.starting = anyio.CapacityLimiter(max(2, len(os.sched_getaffinity(0))))

    async def remove(self, name: str) -> None:
        """Remove a container for good. What the engine can't do now, `sweep` does later."""
        problem: str | None = "no answer in time"
        with anyio.move_on_after(REMOVE_TIMEOUT_S, shield=True):
            problem = await remove(self.docker, name)
        if problem is None:
            return
        if not self.left:  # once, however many follow while the engine is away
            log.warning("a container could not be removed, which is tried again: %s", problem)
        self.left.add(name)
        self._changed.set()

    async def sweep(self) -> None:
        """Until cancelled: remove what an engine that was away could not."""
        while True:
            await self._changed.wait()  # no deadline: as long as the pool is open
            self._changed = anyio.Event()
            while self.left:
                await anyio.sleep(SWEEP_EVERY_S)
                await self.sweep_once()

    async def sweep_once(self) -> None:
        for name in list(self.left):
            with anyio.move_on_after(REMOVE_TIMEOUT_S):
                if await remove(self.docker, name) is None:
                    self.left.discard(name)


class DockerBackend:
    """Starts workers in containers, spread evenly over the engines."""

    name = "docker"

    def __init__(self, settings: PoolSettings, engines: list[ContainerEngine]) -> None:
        self.layers: Mapping[str, str] = LAYERS
        self.max_running, self.max_sessions = settings.workers, settings.max_sessions
        self._settings = settings
        self._engines = engines

    @property
    def local_engine(self) -> ContainerEngine | None:
        """The first engine that shares our file system."""
        return next((engine for engine in self._engines if engine.local), None)

    @asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        now_s = anyio.current_time()
        engine = min(self._engines, key=lambda e: (e.avoid_until > now_s, e.num_workers))
        engine.num_workers += 1
        try:
            open_worker = self._by_socket if engine.local else self._by_attach
            uid = random_uid(REMAPPED_UIDS if engine.remapped else UIDS)
            async with open_worker(engine, worker_id, uid) as link:
                self.layers = {
                    **LAYERS,
                    **dict.fromkeys(engine.missing_limits, "no: this engine has no such limit"),
                    "runtime": self._settings.runtime or engine.default_runtime,
                    **link.hello["layers"],
                }
                await link.limit_memory(self._settings.memory_mib << 20)
                yield link
        except SandboxUnavailable:
            engine.avoid_until = anyio.current_time() + AVOID_S
            raise
        except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            engine.avoid_until = anyio.current_time() + AVOID_S
            reason = what_it_said(error)
            raise SandboxUnavailable(f"the engine refused a worker: {reason}") from error
        finally:
            engine.num_workers -= 1

    @asynccontextmanager
    async def _by_socket(
        self, engine: ContainerEngine, worker_id: str, uid: int
    ) -> AsyncIterator[Link]:
        link = Link(worker_id)
        loop = asyncio.get_running_loop()
        protocol = SocketProtocol(link, self._greeting(uid))
        with ExitStack() as stack:
            outer = stack.enter_context(removed_at_end())  # 0700: keeps everybody on the host out
            stack.callback(link.lose, "the pool closed it")
            stack.callback(protocol.close)
            inner = outer / "socket"
            inner.mkdir(mode=0o755)
            path = inner / "worker"
            server = await loop.create_unix_server(lambda: protocol, str(path))
            stack.callback(server.close)
            os.chmod(path, 0o777)  # the container's root has no capability to override modes
            connect_to = f"unix:{INSIDE}/worker"
            async with self._container(engine, link, uid, connect_to, inner) as container:
                async with engine.starting:  # no deadline: each start has one
                    await container.start()
                    await self._come_up(container, link)
                server.close()
                shutil.rmtree(outer)
                yield link

    async def _come_up(self, container: DockerContainer, link: Link) -> None:
        """Until the worker is ready. A container may end before it has connected at all."""
        failed: SandboxUnavailable | None = None
        async with anyio.create_task_group() as group:
            group.start_soon(lose_at_end, container, link.lose)
            try:
                await wait_ready(link, self._settings.start_timeout_s)
            except SandboxUnavailable as error:  # out of the task group it would come wrapped
                failed = error
            group.cancel_scope.cancel()
        if failed is not None:
            raise failed

    def _greeting(self, uid: int) -> bytes:
        return greeting(self._settings, home=SCRATCH, uid=uid, limits_processes=True)

    @asynccontextmanager
    async def _by_attach(
        self, engine: ContainerEngine, worker_id: str, uid: int
    ) -> AsyncIterator[Link]:
        link = Link(worker_id)
        outgoing: asyncio.Queue[bytes] = asyncio.Queue()
        link.write = outgoing.put_nowait  # bounded by the slots: one frame for each
        link.write(self._greeting(uid))
        failed: Exception | None = None
        async with (
            self._container(engine, link, uid, "stdio:", None) as container,
            attach(container) as stream,
            anyio.create_task_group() as group,
        ):

            async def write() -> None:
                try:
                    while True:
                        # no deadline: calls have theirs; a worker that is late is ended
                        await stream.write_in(await outgoing.get())
                except STREAM_ERRORS as error:
                    link.lose(f"its stream is closed ({error!r})")

            async def read() -> None:
                try:
                    # no deadline: as long as the worker lives
                    while (message := await stream.read_out()) is not None:
                        if message.stream == 1:
                            link.feed(message.data)
                    link.lose("its stream ended")
                except STREAM_ERRORS as error:
                    link.lose(f"its stream broke ({error!r})")

            group.start_soon(write)
            group.start_soon(read)
            try:
                async with engine.starting:  # no deadline: each start has one
                    await container.start()
                    await self._come_up(container, link)
                yield link
            except Exception as error:  # out of the task group it would come wrapped
                failed = error
            finally:
                link.lose("the pool closed it")
                group.cancel_scope.cancel()
        if failed is not None:
            raise failed

    @asynccontextmanager
    async def _container(
        self,
        engine: ContainerEngine,
        link: Link,
        uid: int,
        connect_to: str,
        socket_dir: Path | None,
    ) -> AsyncIterator[DockerContainer]:
        by_attach = socket_dir is None
        config = {
            "Image": engine.image,
            "Entrypoint": ["python3", "-P", "-s", "-c", read_boot(), connect_to],
            "Cmd": [],
            "Env": list(TUNED),
            "User": "0:0",
            "WorkingDir": "/",
            "AttachStdin": by_attach,
            "AttachStdout": by_attach,
            "OpenStdin": by_attach,
            "StdinOnce": by_attach,
            "HostConfig": host_config(self._settings, socket_dir, uid, engine.caps),
        }
        async with create_container(engine, config, link.worker_id, "sandbox") as container:
            link.set_memory = partial(set_memory, engine.docker, container)
            yield container


async def inspect_image(docker: aiodocker.Docker, image: str) -> ImageConfig:
    """Return the configuration of an image. Raises ProgramUnsupported if the engine lacks it."""
    try:
        with anyio.fail_after(CREATE_TIMEOUT_S):
            config: ImageConfig | None = (await docker.images.inspect(image))["Config"]
            return config or {}
    except aiodocker.DockerError as error:
        if error.status != 404:
            raise
        raise ProgramUnsupported(
            f"the engine has no image {image!r}: build or pull it first"
        ) from error


@asynccontextmanager
async def create_container(
    engine: ContainerEngine, config: JSONObject, id: str, kind: str
) -> AsyncIterator[DockerContainer]:
    """Create a container, labelled with its owner, and remove it at the end.

    Args:
        id: unique among all containers of an engine.
        kind: part of its name: `agentloop-KIND-ID`.
    """
    if "processor time" in engine.missing_limits:  # it would refuse, not only warn
        host = config["HostConfig"]
        assert isinstance(host, Mapping)
        host = {key: value for key, value in host.items() if key != "NanoCpus"}
        config = {**config, "HostConfig": host}
    labels = {LABEL: id, f"{LABEL}.owner": own_tag(), f"{LABEL}.boot": boot_id()}
    name = f"agentloop-{kind}-{id}"
    made = True
    try:
        # A request that is given up half way may still make a container, later.
        with anyio.fail_after(CREATE_TIMEOUT_S, shield=True):
            container = await engine.docker.containers.create(
                {**config, "Labels": labels}, name=name
            )
        yield container
    except aiodocker.DockerError as error:
        made = not isinstance(error.__cause__, aiohttp.ClientConnectorError)
        raise
    finally:
        if made:
            await engine.remove(name)


async def lose_at_end(container: DockerContainer, lose: Callable[[str], None]) -> None:
    """Wait until a started container ends, and call `lose` with the reason."""
    try:
        # no deadline: who waits for the container has one, and ends this
        status = (await container.wait())["StatusCode"]
        lose(f"its container ended with status {status}")
    except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
        lose(f"its engine went away: {error}")


# What a stream of aiodocker raises where its connection is gone, bare assertions included.
STREAM_ERRORS = (AssertionError, RuntimeError, OSError, aiohttp.ClientError, aiodocker.DockerError)


@asynccontextmanager
async def attach(container: DockerContainer) -> AsyncIterator[Stream]:
    stream = container.attach(stdin=True, stdout=True, stderr=True)
    try:
        await stream.__aenter__()
        yield stream
    finally:
        with contextlib.suppress(*STREAM_ERRORS), anyio.move_on_after(5, shield=True):
            await stream.close()


async def set_memory(docker: aiodocker.Docker, container: DockerContainer, num_bytes: int) -> None:
    """Change the memory limit of a container.

    Raises:
        OSError: the engine refused, such as while the container holds more.
        SandboxUnavailable: the engine failed.
    """
    limits = {"Memory": num_bytes, "MemorySwap": num_bytes}
    try:
        with anyio.fail_after(UPDATE_TIMEOUT_S):
            await docker._query_json(
                f"containers/{container.id}/update", method="POST", data=limits
            )
    except aiodocker.DockerError as error:
        raise OSError(what_it_said(error)) from error
    except (aiohttp.ClientError, OSError) as error:
        reason = what_it_said(error) or "no answer in time"
        raise SandboxUnavailable(f"the engine did not limit a worker's memory: {reason}") from error


async def remove(docker: aiodocker.Docker, name: str) -> str | None:
    """Remove a container and wait until it is gone; else why it isn't. A removal that the engine
    has begun itself (409) may end half way: it counts once the name is unknown."""
    while True:
        try:
            await docker.containers.container(name).delete(force=True, v=True)
        except aiodocker.DockerError as error:
            if error.status == 404:
                return None
            if error.status != 409:
                return str(error)
        except (aiohttp.ClientError, OSError) as error:
            return str(error)
        else:
            return None
        await anyio.sleep(0.05)


async def reap_containers(docker: aiodocker.Docker, local: bool) -> int:
    """Remove containers whose owner is dead; how many there were."""
    num = 0
    for container in await docker.containers.list(all=True, filters={"label": [LABEL]}):
        labels = container["Labels"]
        same_boot = labels.get(f"{LABEL}.boot") == boot_id()
        # On a shared engine another machine's pids mean nothing to us.
        if (same_boot and is_dead(labels.get(f"{LABEL}.owner", ""))) or (local and not same_boot):
            with anyio.move_on_after(REMOVE_TIMEOUT_S):
                if problem := await remove(docker, container.id):
                    log.warning("a dead owner's container could not be removed: %s", problem)
                num += problem is None
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
        urls = settings.engines or [""]
        for url in urls:
            docker = await stack.enter_async_context(
                connect(
                    url,
                    settings.engine_certs,
                    timeout_s=settings.engine_timeout_s,
                    on_progress=on_progress,
                )
            )
            try:
                if num := await reap_containers(docker, is_local(url)):
                    on_progress(f"Removed {num} containers left by a killed process.")
                image = await ensure_image(docker, settings.image, on_progress, settings.packages)
                info = cast(EngineInfo, await docker.system.info())
            except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
                where = url or local_engine()
                reason = what_it_said(error) or "no answer in time"
                raise SandboxUnavailable(
                    f"the Docker Engine at {where} failed: {reason}"
                ) from error
            engines.append(ContainerEngine(docker, is_local(url), image, info))
        group = await stack.enter_async_context(anyio.create_task_group())
        for engine in engines:
            group.start_soon(engine.sweep)
        try:
            yield DockerBackend(settings, engines)
        finally:
            group.cancel_scope.cancel()
            with anyio.move_on_after(REMOVE_TIMEOUT_S, shield=True):
                for engine in engines:
                    await engine.sweep_once()
            if remaining := [name for engine in engines for name in engine.left]:
                log.warning("left for the next start to remove: %s", sorted(remaining))
