"""The settings of a worker, as the pool sent them."""

from __future__ import annotations

import os
from typing import Any

from agentloop.sandbox.worker import landlock
from agentloop.sandbox.worker.kernel import count_own_processes

UNHIDDEN = "no: calls can read their names and arguments (hiding them needs Landlock, Linux 5.19)"


class Spec:
    """The settings of a worker, as given (a JSON object); sandbox/backend.py has their sources."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.scratch: str = given["scratch"]
        #: What follows a lane's number, where its file system lies in a closed directory: else its
        #: free space and the size of its root would be for all to read.
        self.inner: str = given.get("inner", "")
        self.levels: list[list[str]] = given.get("levels", [[]])
        self.num_lanes: int = given["lanes"]
        self.ready: int = given.get("ready", 2)
        self.uid_base: int | None = given.get("uid_base")
        self.keep_bytes: int = given.get("keep_output_bytes", 64 * 1024)
        self.max_output_bytes: int = given.get("max_output_bytes", 1 << 20)
        self.memory_bytes: int = given.get("memory_bytes", 512 << 20)  # the most of one call
        self.worker_bytes: int = given.get("worker_bytes", 4 << 30)  # limit of all calls together
        #: Its memory cgroup is the worker's alone, limited to worker_bytes.
        self.own_cgroup: bool = given.get("own_cgroup", False)
        self.file_bytes: int = given.get("file_bytes", 32 << 20)
        self.processes: int = given.get("processes", 32)
        self.layers: dict[str, str] = given.get("layers", {})
        #: Its /proc shows a call no process but its own.
        self.own_proc: bool = given.get("own_proc", False)
        #: Calls are shut in by landlock.py; not where each sees mounts of its own.
        self.uses_landlock: bool = "view" not in given and landlock.abi() >= landlock.LEAST_ABI
        hidden = self.own_proc or self.uses_landlock
        self.layers["other calls' processes"] = "hidden" if hidden else UNHIDDEN
        #: How everything of a call dies: by its "uid", with its "pidns", by a walk of its "tree".
        self.kill_by: str = given.get("kill_by", "auto")
        #: Mount options of a call's directory, where each call mounts its own (kernel.own_view).
        self.view: str | None = given.get("view")
        #: RLIMIT_NPROC counts a call's processes alone, though all have one uid.
        self.counts_apart: bool = given.get("counts_apart", False)
        #: A descriptor of what calls may open; set by the zygote.
        self.ruleset: int | None = None
        #: The server may read every process's memory maps; set when it starts.
        self.traces = False
        #: The server is pid 1: with it everything ends.
        self.own_pids = os.getpid() == 1
        # Processes of the same uid that aren't the call's: in a user namespace those of the
        # worker, elsewhere all that the user happens to run.
        self.others = 2 * self.num_lanes + 16
        if self.kill_by == "auto":
            self.others += 256 + count_own_processes()

    def lane_dir(self, lane: int) -> str:
        return f"{self.scratch}/{lane}{self.inner}"

    def home(self, lane: int) -> str:
        """The directory that the lane's call finds itself in."""
        return self.scratch if self.view else self.lane_dir(lane)

    def lane_uid(self, lane: int) -> int:
        assert self.uid_base is not None
        return self.uid_base + lane

    def lane_of(self, uid: int) -> int | None:
        """The inverse of lane_uid; None for a uid that is no lane's."""
        assert self.uid_base is not None
        return uid - self.uid_base if 0 <= uid - self.uid_base < self.num_lanes else None

    @property
    def spare_uid(self) -> int:
        """A uid of our range that no process has but the server, for the time of a signal."""
        assert self.uid_base is not None
        return self.uid_base + self.num_lanes
