"""Cgroups of local workers, one for each, below the pool's own: limits around the pool hold.

Version 1 needs root. Version 2 needs root or a delegated cgroup, and that the pool's processes are
alone in their cgroup: they move to one below it, since a cgroup has either processes or children.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import resource
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentloop.sandbox.owner import PREFIX, is_dead, own_tag
from agentloop.sandbox.worker.counters import FILES
from agentloop.sandbox.worker.kernel import count_own_processes

MOUNTS = Path("/proc/self/mounts")
MEMBERSHIP = Path("/proc/self/cgroup")
V1_CONTROLLERS = ("memory", "pids", "cpu", "cpuacct")
V2_CONTROLLERS = ("memory", "pids")  # version 2 counts processor time without a controller
POOL = "agentloop-pool"  # where the pool's own processes are, in version 2
PERIOD_US = 100_000
REMOVE_TIMEOUT_S = 5.0


class NoCgroup(Exception):
    """Raised where no cgroup can be created; the message is the reason."""


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of a worker.

    Attributes:
        paths: the cgroup's directories by controller; in version 2 they are one.
    """

    paths: Mapping[str, Path]
    is_v2: bool

    def limit_memory(self, num_bytes: int) -> None:
        """Limit the memory of all processes together, without swap. Raises OSError.

        A limit below what they hold already is refused. The kernel would do that only in version 1.
        """
        path = self.paths["memory"]
        if self.is_v2:
            if int((path / "memory.current").read_text()) > num_bytes:
                raise OSError(errno.EBUSY, "the processes hold more memory than the new limit")
            _write(path / "memory.max", num_bytes)
            _write_optional(path / "memory.swap.max", 0)
            return
        # The limit with swap may at no time be below the one without.
        files = [path / "memory.limit_in_bytes", path / "memory.memsw.limit_in_bytes"]
        for file in files if num_bytes < int(files[0].read_text()) else reversed(files):
            (_write_optional if "memsw" in file.name else _write)(file, num_bytes)

    def limit_processes(self, number: int) -> None:
        _write(self.paths["pids"] / "pids.max", number)

    def limit_cpu(self, num_processors: int) -> None:
        """Limit the processor time, where the kernel has such limits and this cgroup has them."""
        path = self.paths["cpu"]
        if self.is_v2:
            _write_optional(path / "cpu.max", f"{num_processors * PERIOD_US} {PERIOD_US}")
        else:
            _write_optional(path / "cpu.cfs_quota_us", num_processors * PERIOD_US)

    @property
    def counters(self) -> dict[str, str]:
        """The files of the counters that a worker reads, by name."""
        files = {
            name: self.paths["cpuacct" if name == "cpu" else "memory"]
            / versions[0 if self.is_v2 else 1].rpartition("/")[2]
            for name, versions in FILES.items()
        }
        return {name: str(file) for name, file in files.items() if file.is_file()}

    @property
    def entries(self) -> list[str]:
        """The files that a process writes 0 to in order to enter."""
        return [str(path / "cgroup.procs") for path in dict.fromkeys(self.paths.values())]

    def remove(self) -> None:
        """Kill all processes, and remove the cgroup once they are gone."""
        with contextlib.suppress(OSError, KeyError):  # some of its directories may be gone
            self.limit_processes(0)  # no fork outruns this
        give_up = time.monotonic() + REMOVE_TIMEOUT_S
        for path in dict.fromkeys(self.paths.values()):
            while path.exists() and time.monotonic() < give_up:
                with contextlib.suppress(OSError):
                    self._kill_all(path)
                    path.rmdir()
                    break
                time.sleep(0.01)

    def _kill_all(self, path: Path) -> None:
        if (path / "cgroup.kill").exists():
            _write(path / "cgroup.kill", 1)
            return
        for pid in (path / "cgroup.procs").read_text().split():
            with contextlib.suppress(OSError):
                os.kill(int(pid), 9)


def new_cgroup() -> Cgroup:
    """Create a cgroup below our own; whoever calls removes it.

    Raises:
        NoCgroup: none can be created.
    """
    parents, is_v2 = _own_paths()
    name = f"{PREFIX}{own_tag()}-{secrets.token_hex(3)}"
    cgroup = Cgroup({controller: path / name for controller, path in parents.items()}, is_v2)
    try:
        for path in dict.fromkeys(cgroup.paths.values()):
            path.mkdir()
    except OSError as error:
        cgroup.remove()
        raise NoCgroup(f"{error.filename}: {error.strerror}") from error
    return cgroup


def reap_cgroups() -> None:
    """Remove this user's cgroups whose owners are dead, wherever they are: a pool may have been
    started in another service or scope than the one before it."""
    try:
        mounts = _mounts()
        _, is_v2 = _own_paths(prepare=False)
    except (NoCgroup, OSError):
        return
    found: dict[str, dict[str, Path]] = {}
    for controller in ("2",) if is_v2 else V1_CONTROLLERS:
        for path in _find_workers(mounts[controller]):
            names = V1_CONTROLLERS if is_v2 else (controller,)
            found.setdefault(path.name, {}).update(dict.fromkeys(names, path))
    for name, paths in found.items():
        if is_dead(name.removeprefix(PREFIX).rpartition("-")[0]):
            Cgroup(paths, is_v2).remove()


def _find_workers(top: Path) -> Iterator[Path]:
    """Yield the cgroups of workers of this user below a directory."""
    for folder, names, _ in os.walk(top):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(OSError):  # its owner has removed it
                if name.startswith(PREFIX) and path.stat().st_uid == os.getuid():
                    yield path


def free_processes() -> float:
    """Return how many more processes the cgroups around us, and the limit of this user, allow."""
    free = math.inf
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if os.getuid() != 0 and limit != resource.RLIM_INFINITY:
        free = limit - count_own_processes()
    with contextlib.suppress(NoCgroup, OSError):
        path = _own_paths(prepare=False)[0]["pids"]
        while (path / "pids.max").exists():
            free = min(free, _number(path / "pids.max") - _number(path / "pids.current"))
            path = path.parent
    return free


def _own_paths(prepare: bool = True) -> tuple[dict[str, Path], bool]:
    """Return our own cgroup by controller, and whether it is of version 2."""
    mounts = _mounts()
    member: dict[str, str] = {}
    for line in MEMBERSHIP.read_text().splitlines():
        _, names, path = line.split(":", 2)
        member.update(dict.fromkeys(names.split(",") if names else ["2"], path.lstrip("/")))
    if all(name in mounts and name in member for name in V1_CONTROLLERS):
        return {name: _visible(mounts[name], member[name]) for name in V1_CONTROLLERS}, False
    if "2" not in mounts or "2" not in member:
        raise NoCgroup("no cgroups are mounted here")
    top = _visible(mounts["2"], member["2"])
    if top.name == POOL:
        top = top.parent
    if prepare:
        _enable_controllers(top)
    return dict.fromkeys(V1_CONTROLLERS, top), True


def _mounts() -> dict[str, Path]:
    """Return where cgroups are mounted, by controller of version 1; that of version 2 is "2"."""
    mounts: dict[str, Path] = {}
    for line in MOUNTS.read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        mounted = ["2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        mounts.update(dict.fromkeys(mounted, Path(where)))
    return mounts


def _visible(mount: Path, path: str) -> Path:
    """Return a cgroup's directory. In a container its own one may be all that is mounted."""
    return mount / path if (mount / path).exists() else mount


def _enable_controllers(top: Path) -> None:
    """Let cgroups below this one have controllers: its own processes move to one of them.

    Raises:
        NoCgroup: a controller is missing, or this user may not.
    """
    try:
        available = (top / "cgroup.controllers").read_text().split()
        if missing := set(V2_CONTROLLERS) - set(available):
            raise NoCgroup(f"{top} has no controller {', '.join(sorted(missing))}")
        wanted = [name for name in (*V2_CONTROLLERS, "cpu") if name in available]
        if set(wanted) <= set((top / "cgroup.subtree_control").read_text().split()):
            return
        (top / POOL).mkdir(exist_ok=True)
        for pid in (top / "cgroup.procs").read_text().split():
            _write(top / POOL / "cgroup.procs", int(pid))
        (top / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in wanted))
    except OSError as error:
        raise NoCgroup(f"{error.filename}: {error.strerror}") from error


def _number(path: Path) -> float:
    return float(path.read_text().strip().replace("max", "inf"))


def _write(path: Path, value: int | str) -> None:
    with open(path, "r+") as file:  # never creates one
        file.write(str(value))


def _write_optional(path: Path, value: int | str) -> None:
    """Write to a file that not every kernel has, such as one without accounting of swap."""
    with contextlib.suppress(FileNotFoundError):
        _write(path, value)
