"""Cgroups of version 2 over a directory that looks like one, and what counters say of a call."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agentloop.sandbox import cgroup
from agentloop.sandbox.cgroup import NoCgroup, free_processes, new_cgroup, reap_cgroups
from agentloop.sandbox.owner import PREFIX, own_tag
from agentloop.sandbox.worker.counters import CgroupCounters, open_counters

LIMITS = {
    "memory.current": "1000", "memory.max": "max", "memory.swap.max": "max",
    "pids.max": "max", "cpu.max": "max 100000", "cgroup.procs": "",
}  # fmt: skip


@pytest.fixture
def top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of this process's cgroup of version 2."""
    root = tmp_path / "cgroup"
    top = root / "user.slice"
    top.mkdir(parents=True)
    write(top, "cgroup.controllers", "cpu memory pids")
    write(top, "cgroup.subtree_control", "")
    write(top, "cgroup.procs", "")
    write(tmp_path, "mounts", f"cgroup2 {root} cgroup2 rw 0 0\n")
    write(tmp_path, "membership", "0::/user.slice\n")
    monkeypatch.setattr(cgroup, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    return top


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def read(folder: Path, name: str) -> str:
    return (folder / name).read_text()


def test_controllers_are_enabled_for_the_cgroups_of_workers(top: Path) -> None:
    new_cgroup()
    assert set(read(top, "cgroup.subtree_control").split()) == {"+memory", "+pids", "+cpu"}
    assert (top / cgroup.POOL).is_dir()


def test_limits_of_a_worker_are_written(top: Path) -> None:
    made = new_cgroup()
    folder = made.paths["memory"]
    for name, text in LIMITS.items():
        write(folder, name, text)
    made.limit_memory(1 << 30)
    made.limit_processes(40)
    made.limit_cpu(1)
    assert read(folder, "memory.max") == str(1 << 30)
    assert read(folder, "memory.swap.max").startswith("0")
    assert read(folder, "pids.max").startswith("40")
    assert read(folder, "cpu.max") == "100000 100000"
    assert made.entries == [str(folder / "cgroup.procs")]
    with pytest.raises(OSError, match="hold more memory"):
        made.limit_memory(10)
    assert read(folder, "memory.max") == str(1 << 30)


def test_processor_time_is_not_limited_without_its_controller(top: Path) -> None:
    write(top, "cgroup.controllers", "memory pids")
    new_cgroup().limit_cpu(1)
    assert set(read(top, "cgroup.subtree_control").split()) == {"+memory", "+pids"}


def test_missing_controller_is_named(top: Path) -> None:
    write(top, "cgroup.controllers", "cpu memory")
    with pytest.raises(NoCgroup, match="no controller pids"):
        new_cgroup()


def test_without_mounted_cgroups_none_is_created(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "MOUNTS", Path(os.devnull))
    with pytest.raises(NoCgroup, match="no cgroups are mounted"):
        new_cgroup()
    assert free_processes() == float("inf")
    reap_cgroups()


def test_tightest_limit_on_processes_around_the_pool_counts(top: Path) -> None:
    write(top, "pids.max", "max\n")
    write(top, "pids.current", "7\n")
    assert free_processes() == float("inf")
    write(top.parent, "pids.max", "100\n")
    write(top.parent, "pids.current", "60\n")
    assert free_processes() == 40


def test_cgroups_of_dead_owners_are_removed(top: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroup.Cgroup, "_kill_all", lambda self, path: None)
    pid, start, namespace = own_tag().split("-")
    dead, alive = top / f"{PREFIX}{pid}-{int(start) + 1}-{namespace}-x", new_cgroup().paths["pids"]
    dead.mkdir()
    reap_cgroups()
    assert not dead.exists()
    assert alive.exists()


def test_cgroups_are_removed_wherever_a_dead_owner_has_been(
    top: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup.Cgroup, "_kill_all", lambda self, path: None)
    pid, start, namespace = own_tag().split("-")
    dead = top.parent / "other.scope" / f"{PREFIX}{pid}-{int(start) + 1}-{namespace}-x"
    alive = top.parent / "other.scope" / f"{PREFIX}{own_tag()}-x"
    for path in (dead, alive):
        path.mkdir(parents=True)
    reap_cgroups()
    assert not dead.exists()
    assert alive.exists()


HOPS = """
import os, sys
for path in sys.argv[1:]:
    with open(path, "w") as file:
        file.write("0")
while True:  # it is never the same process for long
    if os.fork():
        os._exit(0)
    os.setsid()
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root may create cgroups here")
def test_no_process_of_a_cgroup_outruns_its_end() -> None:
    try:
        made = new_cgroup()
    except NoCgroup as error:
        pytest.skip(str(error))
    subprocess.run([sys.executable, "-S", "-c", HOPS, *made.entries], check=True)
    made.remove()
    assert not any(path.exists() for path in made.paths.values())


def counters(root: Path, *, kills: int, refusals: int) -> CgroupCounters:
    for name, text in {
        "memory.current": "5000\n",
        "memory.stat": "anon 1000\nactive_file 200\ninactive_file 300\nslab_reclaimable 400\n",
        "memory.events": f"oom {refusals}\noom_kill {kills}\n",
        "cpu.stat": "usage_usec 1500000\nuser_usec 1\n",
    }.items():
        write(root, name, text)
    return CgroupCounters(open_counters(str(root)))


def test_memory_that_stays_is_what_the_kernel_cannot_free(tmp_path: Path) -> None:
    assert counters(tmp_path, kills=0, refusals=0).kept_bytes() == 5000 - 900


def test_processor_time_counts_from_the_start_of_a_call(tmp_path: Path) -> None:
    counted = counters(tmp_path, kills=0, refusals=0)
    write(tmp_path, "cpu.stat", "usage_usec 4000000\nuser_usec 1\n")
    assert counted.cpu_s() == 2.5
    counted.start()
    assert counted.cpu_s() == 0


@pytest.mark.parametrize(
    ("kills", "refusals", "verdict"),
    [(3, 9, None), (3, 10, None), (4, 10, "oom"), (4, 9, "sandbox_error")],
)
def test_kill_is_the_calls_own_if_its_limit_was_reached(
    tmp_path: Path, kills: int, refusals: int, verdict: str | None
) -> None:
    counted = counters(tmp_path, kills=3, refusals=9)
    write(tmp_path, "memory.events", f"oom {refusals}\noom_kill {kills}\n")
    assert counted.oom_verdict() == verdict


@pytest.mark.parametrize(
    ("kills", "during", "at_rest"), [(3, False, "ended"), (4, True, "sandbox_error")]
)
def test_without_a_cgroup_the_kills_of_the_machine_tell(
    tmp_path: Path, kills: int, during: bool, at_rest: str
) -> None:
    write(tmp_path, "vmstat", "oom_kill 3\n")
    counted = CgroupCounters({"oom": os.open(tmp_path / "vmstat", os.O_RDONLY)})
    write(tmp_path, "vmstat", f"oom_kill {kills}\n")
    assert counted.oom_verdict() is None
    assert counted.may_be_oom(signal.SIGKILL) is during
    assert counted.may_be_oom(signal.SIGTERM) is False
    assert counted.rest_verdict(signal.SIGKILL) == at_rest


def version_1(root: Path, *, flags: int) -> CgroupCounters:
    (root / "memory").mkdir()
    for name, text in {
        "usage_in_bytes": "0", "oom_control": "oom_kill 0\n",
        "max_usage_in_bytes": "9", "limit_in_bytes": str(8 + (4 << 20)),
    }.items():  # fmt: skip
        write(root, f"memory/memory.{name}", text)
    fds = open_counters(str(root))
    os.close(fds["peak"])
    return CgroupCounters(fds | {"peak": os.open(root / "memory/memory.max_usage_in_bytes", flags)})


def test_peak_of_an_earlier_call_is_not_the_next_ones(tmp_path: Path) -> None:
    counted = version_1(tmp_path, flags=os.O_RDWR)
    write(tmp_path, "memory/memory.oom_control", "oom_kill 1\n")
    assert counted.oom_verdict() == "sandbox_error"
    write(tmp_path, "memory/memory.max_usage_in_bytes", "9")
    assert counted.oom_verdict() == "oom"
    assert not counted.is_spent()


def test_worker_is_spent_if_its_peak_stays(tmp_path: Path) -> None:
    counted = version_1(tmp_path, flags=os.O_RDONLY)
    assert counted.is_spent()
    write(tmp_path, "memory/memory.max_usage_in_bytes", "7")
    assert not counted.is_spent()
