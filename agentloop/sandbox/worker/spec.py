"""The settings of a worker, as the pool sent them."""

from __future__ import annotations

import os
from typing import Any

from agentloop.sandbox.worker import landlock
from agentloop.sandbox.worker.kernel import count_own_processes

UNHIDDEN = "no: calls can read their names and arguments (hiding them needs Landlock, Linux 5.19)"


class Spec:
    """The settings of a worker, from a JSON object; sandbox/backend.py has their sources."""

    def __init__(self, spec: dict[str, Any]) -> None:
        #: The directory that calls find themselves in.
        self.home: str = spec["home"]
        self.levels: list[list[str]] = spec.get("levels", [[]])
        #: The uid of calls; the next one is used by nobody but the server, to send signals.
        self.uid: int | None = spec.get("uid")
        #: Output of a call that does not set its own limit, before it ends with output_limit.
        self.max_output_bytes = 1 << 20
        self.memory_bytes: int = spec.get("memory_bytes", 512 << 20)
        self.file_bytes: int = spec.get("file_bytes", 32 << 20)
        self.processes: int = spec.get("processes", 32)
        #: Descriptors of the cgroup's counters, by name; None: they are below /sys/fs/cgroup.
        self.counters: dict[str, int] | None = spec.get("counters")
        #: The cgroup limits the number of processes.
        self.limits_processes: bool = spec.get("limits_processes", False)
        self.layers: dict[str, str] = spec.get("layers", {})
        #: Its /proc shows a call no process but its own.
        self.own_proc: bool = spec.get("own_proc", False)
        #: Calls are confined by landlock.py; not where each sees mounts of its own.
        self.uses_landlock: bool = "view" not in spec and landlock.abi() >= landlock.LEAST_ABI
        hidden = self.own_proc or self.uses_landlock
        self.layers["other calls' processes"] = "hidden" if hidden else UNHIDDEN
        #: How everything of a call is killed: by its "uid", with its "pidns", by a walk of its
        #: "tree".
        self.kill_by: str = spec.get("kill_by", "auto")
        #: Mount options of a call's directory, where each call mounts its own (kernel.own_view).
        self.view: str | None = spec.get("view")
        #: RLIMIT_NPROC counts a call's processes alone, though all have one uid.
        self.counts_apart: bool = spec.get("counts_apart", False)
        #: A descriptor of what calls may open; set by the zygote.
        self.ruleset: int | None = None
        #: The server ends with the process that started it.
        self.dies_with_parent: bool = spec.get("dies_with_parent", False)
        #: The server is pid 1: with it everything ends.
        self.own_pids = os.getpid() == 1
        # Processes of the same uid that aren't the call's: in a user namespace those of the
        # worker, elsewhere all that the user happens to run.
        self.others = 16 + 2 * len(self.levels)
        if self.kill_by == "auto":
            self.others += 256 + count_own_processes()

    @property
    def call_uid(self) -> int:
        assert self.uid is not None
        return self.uid
