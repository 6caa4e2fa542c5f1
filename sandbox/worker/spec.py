"""What the supervisor asked for."""

from __future__ import annotations

import os
from typing import Any

from sandbox.worker.kernel import count_own_processes


class Spec:
    """The settings of a worker, as given (a JSON object); sandbox/backend.py has their sources."""

    def __init__(self, given: dict[str, Any]) -> None:
        self.scratch: str = given["scratch"]
        self.levels: list[list[str]] = given.get("levels", [[]])
        self.num_lanes: int = given["lanes"]
        self.ready: int = given.get("ready", 2)
        self.uid_base: int | None = given.get("uid_base")
        self.keep_bytes: int = given.get("keep_output_bytes", 64 * 1024)
        self.max_output_bytes: int = given.get("max_output_bytes", 1 << 20)
        self.memory_bytes: int = given.get("memory_bytes", 512 << 20)  # the most of one call
        self.worker_bytes: int = given.get("worker_bytes", 4 << 30)  # of all together
        #: Its memory cgroup is the worker's alone, limited to worker_bytes.
        self.own_cgroup: bool = given.get("own_cgroup", False)
        self.file_bytes: int = given.get("file_bytes", 32 << 20)
        self.processes: int = given.get("processes", 32)
        self.layers: dict[str, str] = given.get("layers", {})
        #: How everything of a call dies: by its "uid", with its "pidns", by a walk of its "tree".
        self.kill_by: str = given.get("kill_by", "auto")
        #: The front may read every process's memory maps; set when it starts.
        self.traces = False
        #: The front is pid 1: with it everything ends.
        self.own_pids = os.getpid() == 1
        # Processes of the same uid that aren't the call's: in a user namespace those of the
        # worker, elsewhere all that the user happens to run.
        self.others = 2 * self.num_lanes + 16
        if self.kill_by == "auto":
            self.others += 256 + count_own_processes()

    def lane_dir(self, lane: int) -> str:
        return f"{self.scratch}/{lane}"

    def lane_uid(self, lane: int) -> int:
        assert self.uid_base is not None
        return self.uid_base + lane

    def lane_of(self, uid: int) -> int | None:
        """The inverse of lane_uid; None for a uid that is no lane's."""
        assert self.uid_base is not None
        return uid - self.uid_base if 0 <= uid - self.uid_base < self.num_lanes else None

    @property
    def spare_uid(self) -> int:
        """A uid of our range that no process has but the front, for the time of a signal."""
        assert self.uid_base is not None
        return self.uid_base + self.num_lanes
