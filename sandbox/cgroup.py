"""Cgroups of local workers, one for each, below the pool's own: limits around the pool hold.

Version 1 needs root. Version 2 needs root or a delegated cgroup, and that the pool's processes are
alone in their cgroup: they move to one below it, since a cgroup has either processes or children.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentloop.sandbox.worker.counters import FILES

MOUNTS = Path("/proc/self/mounts")
MEMBERSHIP = Path("/proc/self/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
V1_CONTROLLERS = (*CONTROLLERS, "cpuacct")
POOL = "agentloop-pool"  # where the pool's own processes are, in version 2
PERIOD_US = 100_000
REMOVE_TIMEOUT_S = 5.0


class NoCgroup(Exception):
    """No cgroup can be created here; the message is the reason."""


@dataclass(frozen=True)
class Cgroup:
    """The cgroup of a worker.

    Attributes:
        paths: its directories by controller; in version 2 they are one.
    """

    paths: Mapping[str, Path]
    is_v2: bool

    def limit_memory(self, num_bytes: int) -> None:
        """Limit the memory of all processes together, without swap. Raises OSError.

        A limit below what they hold already is not set: the next cell of a session may ask for
        less than the ones before it have left, and then only what it allocates itself is refused.
        """
        path = self.paths["memory"]
        usage = path / ("memory.current" if self.is_v2 else "memory.usage_in_bytes")
        if int(usage.read_text()) > num_bytes:
            return
        if self.is_v2:
            _write(path / "memory.max", num_bytes)
            _write_optional(path / "memory.swap.max", 0)
            return
        # The limit with swap may at no time be below the one without.
        both = [path / "memory.limit_in_bytes", path / "memory.memsw.limit_in_bytes"]
        for file in both if num_bytes < int(both[0].read_text()) else reversed(both):
            (_write_optional if "memsw" in file.name else _write)(file, num_bytes)
        _write(path / "memory.max_usage_in_bytes", 0)

    def limit_processes(self, number: int) -> None:
        _write(self.paths["pids"] / "pids.max", number)

    def limit_cpu(self, num_processors: int) -> None:
        path = self.paths["cpu"]
        if self.is_v2:
            (path / "cpu.max").write_text(f"{num_processors * PERIOD_US} {PERIOD_US}")
        else:
            _write(path / "cpu.cfs_quota_us", num_processors * PERIOD_US)

    @property
    def counters(self) -> dict[str, str]:
        """The files of the counters that a worker reads, by name."""
        found: dict[str, str] = {}
        for name, files in FILES.items():
            path = self.paths["cpuacct" if name == "cpu" else "memory"]
            file = path / files[0 if self.is_v2 else 1].rpartition("/")[2]
            if file.is_file():
                found[name] = str(file)
        return found

    @property
    def entries(self) -> list[str]:
        """The files that a process writes 0 to in order to enter."""
        return [str(path / "cgroup.procs") for path in dict.fromkeys(self.paths.values())]

    def remove(self) -> None:
        """Kill all processes, and remove the cgroup once they are gone."""
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


@contextmanager
def new_cgroup(name: str) -> Iterator[Cgroup]:
    """Create a cgroup below our own; at the end kill what is in it, and remove it.

    Raises:
        NoCgroup: none can be created.
    """
    made: list[Path] = []
    own, is_v2 = _own_paths()
    unique = f"agentloop-{name}-{secrets.token_hex(3)}"
    paths = {controller: path / unique for controller, path in own.items()}
    cgroup = Cgroup(paths, is_v2)
    try:
        try:
            for path in dict.fromkeys(paths.values()):
                path.mkdir()
                made.append(path)
        except OSError as error:
            raise NoCgroup(f"{error.filename}: {error.strerror}") from error
        yield cgroup
    finally:
        if made:
            cgroup.remove()


def process_limit() -> int | None:
    """Return the number of processes that the cgroups around us allow; None: unlimited."""
    found = None
    with contextlib.suppress(NoCgroup, OSError):
        path = _own_paths(prepare=False)[0]["pids"]
        while (file := path / "pids.max").exists():
            if (text := file.read_text().strip()) != "max":
                found = min(int(text), found or int(text))
            path = path.parent
    return found


def _own_paths(prepare: bool = True) -> tuple[dict[str, Path], bool]:
    """Return our own cgroup by controller, and whether it is of version 2."""
    mounts: dict[str, Path] = {}
    for line in MOUNTS.read_text().splitlines():
        _, where, kind, options, *_ = line.split()
        mounted = ["2"] if kind == "cgroup2" else options.split(",") if kind == "cgroup" else []
        mounts.update(dict.fromkeys(mounted, Path(where)))
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


def _visible(mount: Path, path: str) -> Path:
    """Return a cgroup's directory. In a container its own one may be all that is mounted."""
    return mount / path if (mount / path).exists() else mount


def _enable_controllers(top: Path) -> None:
    try:
        if missing := set(CONTROLLERS) - set((top / "cgroup.controllers").read_text().split()):
            raise NoCgroup(f"{top} has no controller {', '.join(sorted(missing))}")
        if set(CONTROLLERS) <= set((top / "cgroup.subtree_control").read_text().split()):
            return
        (top / POOL).mkdir(exist_ok=True)
        for pid in (top / "cgroup.procs").read_text().split():
            _write(top / POOL / "cgroup.procs", int(pid))
        (top / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in CONTROLLERS))
    except OSError as error:
        raise NoCgroup(f"{error.filename}: {error.strerror}") from error


def _write(path: Path, number: int) -> None:
    path.write_text(str(number))


def _write_optional(path: Path, number: int) -> None:
    """Write to a file that not every kernel has, such as one without accounting of swap."""
    with contextlib.suppress(FileNotFoundError):
        _write(path, number)
