"""The container of a computer: what it may do, its start, and its removal.

It has what a worker's container has (`walls` in container.py: no new privileges, bounds on memory,
processes and processor time, no swap, no log, removed by the engine when its first process ends)
with these differences, since whole programs run in it, as its root if need be:

    root file system  the image's, writable: copy on write, by the engine's storage driver
    capabilities      those with which a root installs packages and changes users; none over the
                      machine, the network or other processes' memory
    system calls      those of a worker, and sockets, terminals, locks and System V's; no other
                      families of sockets than Unix, IP and netlink, no io_uring, bpf, keys or
                      namespaces
    network           loopback alone, and a proxy there if the caller lists hosts (proxy.py); or a
                      network of the engine that the caller names
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import anyio
from aiodocker.containers import DockerContainer
from aiodocker.types import JSONObject
from anyio.abc import ByteStream, SocketListener, TaskGroup

from agentloop.sandbox.backend import read_profile
from agentloop.sandbox.computer import toolbox
from agentloop.sandbox.computer.changes import Change, list_changes
from agentloop.sandbox.computer.channel import ComputerChannel
from agentloop.sandbox.computer.egress import PREFIX, AllowList
from agentloop.sandbox.computer.proxy import (
    ENVIRONMENT,
    PORT,
    EgressProxy,
    GuestSockets,
    serving,
)
from agentloop.sandbox.container import (
    NEVER_ENDED,
    SCRATCH,
    ContainerEngine,
    ImageConfig,
    create_container,
    lose_at_end,
    mount,
    walls,
)
from agentloop.sandbox.errors import SandboxUnavailable
from agentloop.sandbox.owner import removed_at_end
from agentloop.sandbox.settings import PoolSettings

SOCKET_FOLDER = "/run/agentloop/socket"
FOLDER = "/agent"
"""Where a program finds the folder that it is given."""
CAPS = (
    *("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETFCAP", "SETGID", "SETUID", "KILL"),
    *("NET_BIND_SERVICE", "SYS_CHROOT"),
    "SETPCAP",  # of the first process alone (guest.py)
)
# What a computer's programs call and a worker's may not, or only with some arguments.
SYSTEM_CALLS = """
accept accept4 bind listen getsockopt setsockopt socketpair fcntl flock ioctl mmap memfd_create
inotify_init inotify_init1 inotify_add_watch inotify_rm_watch personality chroot mknod mknodat
setfsuid setfsgid setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
io_setup io_submit io_getevents io_pgetevents io_cancel io_destroy ioprio_get ioprio_set
shmget shmat shmdt shmctl semget semop semtimedop semctl msgget msgsnd msgrcv msgctl
mq_open mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr
ptrace process_vm_readv process_vm_writev pidfd_getfd process_mrelease process_madvise
sched_setattr sched_getattr sched_setparam sched_setscheduler sched_rr_get_interval
sync syncfs mlockall munlockall remap_file_pages modify_ldt get_thread_area set_thread_area
restart_syscall fchmodat2 cachestat clock_adjtime adjtimex getpgid swapcontext
"""
SOCKET_FAMILIES = (1, 2, 10, 16)  # Unix, IPv4, IPv6, netlink
ENOSYS = 38


@cache
def read_computer_profile() -> str:
    """Return the seccomp profile of computers, in the Engine's JSON: a worker's, widened."""
    profile = json.loads(read_profile())
    rows = [
        row
        for row in profile["syscalls"]
        if row["names"] in (["clone"], ["clone3"])
        or (row["action"] == "SCMP_ACT_ALLOW" and not row.get("args"))
    ]
    rows.append({"names": SYSTEM_CALLS.split(), "action": "SCMP_ACT_ALLOW"})
    for family in SOCKET_FAMILIES:
        is_family = {"index": 0, "value": family, "op": "SCMP_CMP_EQ"}
        rows.append({"names": ["socket"], "action": "SCMP_ACT_ALLOW", "args": [is_family]})
    # Programs take what a kernel lacks into account, and not what it forbids.
    return json.dumps({**profile, "defaultErrnoRet": ENOSYS, "syscalls": rows})


@dataclass(frozen=True)
class ComputerLimits:
    """The limits of a computer, for all of its processes together.

    Attributes:
        memory_mib: memory; files in memory and what the kernel holds count as well.
        processes: processes and threads.
        cpus: processors' worth of time.
        disk_mib: files written beside the image's. A computer that holds more is ended, which is
            looked for every few seconds.
    """

    memory_mib: int = 2048
    processes: int = 512
    cpus: float = 1.0
    disk_mib: int = 10_240

    def __post_init__(self) -> None:
        for name in ("memory_mib", "processes", "cpus", "disk_mib"):
            least = {"memory_mib": 32, "processes": 8}.get(name, 0.01)
            if getattr(self, name) < least:
                raise ValueError(f"limits: {name}: must be at least {least}")


@dataclass(frozen=True)
class ComputerSpec:
    """The start of a computer. Computers with the same can take each other's place."""

    image: str
    network: str
    limits: ComputerLimits

    def __post_init__(self) -> None:
        if not self.network:  # to the engine, its default network
            raise ValueError("network: '' is none: write none, allow:HOST or an engine's network")
        _ = self.allowed  # raises ValueError

    @property
    def allowed(self) -> AllowList | None:
        """The hosts that it may reach, where they are listed."""
        return AllowList.parse(self.network) if self.network.startswith(PREFIX) else None


@dataclass(frozen=True)
class ProgramSpec(ComputerSpec):
    """The start of a computer for one program (sandbox/program.py), never on a host.

    Attributes:
        folder: a folder of this machine, which is mounted read-only.
    """

    folder: Path | None
    is_read_only: bool


@dataclass(frozen=True, eq=False)
class ComputerMachine:
    """A container with its first process; it is removed when its channel is lost.

    Attributes:
        tasks: the tasks that end with it.
        config: the image's configuration.
        connect: connects to a port of its loopback. Raises OSError, SandboxError.
        listen: listens on a port of its loopback; 0 chooses one. Raises OSError, SandboxError.
        list_changes: returns what differs from the image's files (changes.py).
    """

    spec: ComputerSpec
    channel: ComputerChannel
    tasks: TaskGroup
    name: str
    config: ImageConfig
    connect: Callable[[int], AbstractAsyncContextManager[ByteStream]]
    listen: Callable[[int], Awaitable[SocketListener]]
    list_changes: Callable[[], Awaitable[list[Change]]]


def machine_config(
    spec: ComputerSpec,
    settings: PoolSettings,
    folder: Path,
    tools: Path,
    caps: tuple[str, ...] = (),
) -> JSONObject:
    """Return the container of a computer, in the Engine's words.

    Args:
        caps: further capabilities of the first process.
    """
    limits = spec.limits
    memory, profile = limits.memory_mib << 20, read_computer_profile()
    mounts = [mount(folder, SOCKET_FOLDER), mount(tools, toolbox.INSIDE)]
    own: JSONObject = {}
    if isinstance(spec, ProgramSpec):
        scratch = f"exec,nosuid,nodev,size={memory},mode=1777"
        own = {"ReadonlyRootfs": spec.is_read_only, "Tmpfs": {SCRATCH: scratch}}
        mounts += [mount(spec.folder, FOLDER)] if spec.folder else []
    return {
        "Image": spec.image,
        "Entrypoint": toolbox.command(f"{SOCKET_FOLDER}/computer"),
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "computer",
        "Env": ENVIRONMENT if spec.allowed else [],
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            **walls(settings, memory, limits.processes, f"seccomp={profile}"),
            "ReadonlyRootfs": False,
            # The first process raises the score of all others, and they can't lower it.
            **({"OomScoreAdj": NEVER_ENDED} if caps else {}),
            "CapAdd": [*CAPS, *caps],
            "NanoCpus": int(limits.cpus * 1e9),
            "NetworkMode": "none" if spec.allowed else spec.network,
            "IpcMode": "private",
            "Mounts": mounts,
            **own,
        },
    }


@asynccontextmanager
async def start_machine(
    engine: ContainerEngine,
    settings: PoolSettings,
    spec: ComputerSpec,
    config: ImageConfig,
    tools: Path,
    id: str,
) -> AsyncIterator[ComputerMachine]:
    """Start a container, and wait until its first process has connected.

    Raises:
        SandboxUnavailable: it was not ready in time, or ended.
        aiodocker.DockerError, OSError: the engine refused it.
    """
    channel = ComputerChannel()
    async with AsyncExitStack() as stack:
        outer = stack.enter_context(removed_at_end())  # 0700: keeps everybody on the host out
        stack.callback(channel.lose, "it was closed")
        inner = outer / "socket"
        inner.mkdir(mode=0o755)
        path = inner / "computer"
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        server.setblocking(False)
        server.bind(str(path))
        server.listen(2)
        os.chmod(path, 0o777)
        container_config = machine_config(spec, settings, inner, tools, engine.caps)
        # Created only when its turn has come: where we are killed meanwhile, the engine removes
        # what has been started, and the next pool of this machine the rest.
        async with engine.starting:  # no deadline: each start has one
            container = await stack.enter_async_context(
                create_container(engine, container_config, id, "computer")
            )
            await container.start()
            sockets = await _meet(stack, container, server, channel, settings.start_timeout_s)
        if sockets is None or channel.disconnected.is_set():
            reason = channel.why or "its first process has ended"
            raise SandboxUnavailable(f"a computer of {spec.image} did not start: {reason}")
        server.close()  # before anything else runs inside
        shutil.rmtree(outer)
        listener = await sockets.listen(PORT) if spec.allowed else None
        tasks = await stack.enter_async_context(anyio.create_task_group())
        stack.callback(tasks.cancel_scope.cancel)
        if spec.allowed and listener:
            proxy = EgressProxy(spec.allowed)
            await stack.enter_async_context(serving(tasks, listener, proxy.handle))
        name = f"agentloop-computer-{id}"
        reach = sockets.connect, sockets.listen, partial(list_changes, engine, name)
        yield ComputerMachine(spec, channel, tasks, name, config, *reach)


async def _meet(
    stack: AsyncExitStack,
    container: DockerContainer,
    server: socket.socket,
    channel: ComputerChannel,
    timeout_s: float,
) -> GuestSockets | None:
    """Wait until the first process of a container is ready; return the sockets of its network.

    If the container ends instead, which its connection cannot tell, the channel is lost.
    """
    loop = asyncio.get_running_loop()
    sockets: GuestSockets | None = None

    def lose(why: str) -> None:
        channel.lose(why)
        group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(lose_at_end, container, lose)
        try:
            with anyio.fail_after(timeout_s):
                connection, _ = await loop.sock_accept(server)
                await loop.connect_accepted_socket(lambda: channel, connection)
                sockets = GuestSockets((await loop.sock_accept(server))[0])
                stack.callback(sockets.close)
                await channel.ready_or_lost.wait()
        except TimeoutError:
            channel.lose(f"it was not ready within {timeout_s:g} s")
        except OSError as error:  # out of the task group it would come wrapped
            channel.lose(str(error))
        group.cancel_scope.cancel()
    return sockets
