"""Enforces the limits of calls: their memory, and their share of the processors.

    check (every TICK_S while calls run) ──> memory has grown, or a call runs long ──> census
      a call may hold more than its bound ──> audit, in a helper ──> it does ──> "oom", that call
      the worker as a whole is nearly full ──> the largest resting session, else the largest call
      a call runs in many processes        ──> they get the processor share of one
      a session rests                      ──> what runs on between its cells is stopped

A census costs time for each process in sight, so the next waits for a multiple of what the last
took: all of this stays below a few per cent of a processor, whatever the calls do.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import signal
import struct
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial

from agentloop.sandbox.worker.forked import Forked
from agentloop.sandbox.worker.kernel import PR_SET_PDEATHSIG, prctl
from agentloop.sandbox.worker.lanes import Lanes
from agentloop.sandbox.worker.spec import Spec
from agentloop.sandbox.worker.usage import (
    Gauge,
    Process,
    audit,
    census,
    cpu_s,
    read_process,
    scratch_used,
)

TICK_S = 0.02
RESTING_TICK_S = 1.0  # no call runs, only sessions rest
CENSUS_EVERY_S = 0.25  # while a call runs for longer than that, or a session rests
STEP_BYTES = 32 << 20  # growth that is worth a census
AUDIT_TIMEOUT_S = 2.0
FEW = 4  # processes of a session's cell that share nothing: a lower priority stays with it
MAX_STOLEN_S = 1.0  # of processors, by a session that is stopped: it has itself sent SIGCONT

_TOTAL = struct.Struct("<q")
_LEVEL = math.log(1.25)  # of priority: each has 1.25 times the share of the next


class CallLimits:
    """`due` is the next time to call `check`. `condemn` ends a call for a reason."""

    def __init__(
        self,
        spec: Spec,
        lanes: Lanes,
        zygotes: list[int],
        condemn: Callable[[Forked, str], None],
    ) -> None:
        self.spec = spec
        self.lanes = lanes
        self.condemn = condemn
        self.due = math.inf
        # By level: what a call has from its zygote is not counted when it writes to it.
        self.inherited = [process.anonymous for pid in zygotes if (process := read_process(pid))]
        self.gauge = Gauge(spec.own_cgroup)
        self.base = self.low = self.gauge.read()  # without calls; the least since the last census
        self.census_due = 0.0
        self.busy_until = 0.0  # no census before, however memory grows
        # Bytes in use, as audits have measured them.
        self.totals = mmap.mmap(-1, _TOTAL.size * spec.num_lanes)
        self.audits: dict[int, tuple[int, float]] = {}  # by lane: helper, deadline

    # -- when to look -----------------------------------------------------------------------

    def expect(self, now: float) -> None:
        """A call begins."""
        self.due = min(self.due, now + TICK_S)

    def check(self, now: float, children: dict[int, Forked]) -> None:
        running = [child for child in children.values() if child.call is not None]
        resting = any(child.rests for child in children.values())
        self.due = now + TICK_S if running else now + RESTING_TICK_S if resting else math.inf
        used = self.gauge.read()
        self.low = min(self.low, used)
        grown = used - self.low > STEP_BYTES
        if self.gauge.own:  # a call that has outgrown its bound shows in the sum
            least = min((self.bound(child) for child in running), default=math.inf)
            grown = grown and used - self.base > least
        full = self.gauge.own and used > self.full_at
        long_ago = now - CENSUS_EVERY_S
        slow = resting or any(child.call and child.call.started < long_ago for child in running)
        due = self.busy_until if grown or full else self.census_due if slow else math.inf
        if now >= due:
            self.low = used
            self.look(now, children)
            took = time.monotonic() - now
            self.busy_until = now + 10 * took
            self.census_due = now + max(CENSUS_EVERY_S, 50 * took)

    @property
    def full_at(self) -> int:
        return self.spec.worker_bytes - self.spec.worker_bytes // 8

    def bound(self, child: Forked) -> int:
        most = child.call.memory_bytes if child.call is not None else self.spec.memory_bytes
        return most + self.inherited[child.level]

    # -- what is seen -----------------------------------------------------------------------

    def look(self, now: float, children: dict[int, Forked]) -> None:
        by_lane = self.group(children)
        for lane, processes in by_lane.items():
            child = children[lane]
            if child.rests:
                self.keep_at_rest(child, processes)
            elif child.call is not None:
                self.share_out(child, processes)
            most = sum(process.most for process in processes)
            most += self.in_files(child)
            if most <= self.bound(child):
                child.used = sum(process.anonymous for process in processes)
            elif not child.doomed:
                self.audit(now, child, processes)
        self.end_slow_audits(now)
        if not self.audits:
            self.make_room(children)

    def group(self, children: dict[int, Forked]) -> dict[int, list[Process]]:
        """The processes of each call and session."""
        by_lane: dict[int, list[Process]] = defaultdict(list)
        seen = {process.pid: process for process in census()}
        lanes: dict[int, int | None] = {
            child.pid: lane for lane, child in children.items() if child.pid is not None
        }

        def lane_of(process: Process) -> int | None:
            if self.spec.kill_by == "uid":
                return self.spec.lane_of(process.uid)
            path = []
            at: Process | None = process
            while at is not None and at.pid not in lanes:
                path.append(at.pid)
                at = seen.get(at.parent)
            found = lanes[at.pid] if at is not None else None
            lanes.update(dict.fromkeys(path, found))
            return found

        for process in seen.values():
            lane = lane_of(process)
            child = children.get(lane) if lane is not None else None
            if child is not None and (child.rests or child.call is not None):
                by_lane[child.lane].append(process)
        return by_lane

    # -- memory -----------------------------------------------------------------------------

    def audit(self, now: float, child: Forked, processes: list[Process]) -> None:
        """Let a helper find out what a call really holds. It stands still meanwhile."""
        if child.lane in self.audits or now < child.audit_after:
            return
        pids = [process.pid for process in processes]
        self.lanes.stop(child.lane, pids)
        try:
            helper = self.lanes.start_helper(
                partial(self.audit_in_helper, child, processes),
                partial(self.on_audited, child, now, pids),
            )
        except OSError:  # no process to spare: tried again with the next census
            self.go_on(child, pids)
        else:
            self.audits[child.lane] = helper, now + AUDIT_TIMEOUT_S

    def go_on(self, child: Forked, pids: list[int]) -> None:
        if child.stopped is None:  # else a session that rests, and shall
            self.lanes.resume(child.lane, pids)

    def audit_in_helper(self, child: Forked, processes: list[Process]) -> None:
        if not self.spec.traces:
            self.lanes.see_as(child.lane)
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        total = audit(processes) + self.in_files(child)
        _TOTAL.pack_into(self.totals, _TOTAL.size * child.lane, total)

    def in_files(self, child: Forked) -> int:
        """Bytes in the call's directory, where that is memory."""
        if self.lanes.empty_bytes is None:
            return 0
        if self.spec.view:  # a mount that only the call sees
            return scratch_used(f"/proc/{child.pid}/root{self.spec.scratch}")
        return scratch_used(self.spec.lane_dir(child.lane))

    def on_audited(self, child: Forked, began: float, pids: list[int], status: int) -> None:
        del self.audits[child.lane]
        self.go_on(child, pids)
        now = time.monotonic()
        child.audit_after = now + 10 * (now - began)
        if status == 0 and not child.doomed:
            (child.used,) = _TOTAL.unpack_from(self.totals, _TOTAL.size * child.lane)
            if child.used > self.bound(child):
                self.condemn(child, "oom")

    def end_slow_audits(self, now: float) -> None:
        for helper, deadline in self.audits.values():
            if now > deadline:
                with contextlib.suppress(OSError):
                    os.kill(helper, signal.SIGKILL)

    def make_room(self, children: dict[int, Forked]) -> None:
        """Kill a call if all are within their limits but hold too much together."""
        held = sum(child.used for child in children.values())
        if (self.gauge.read_kept() if self.gauge.own else held) <= self.full_at:
            return
        if any(child.doomed for child in children.values()):  # what it held is not free yet
            return
        inside = (child for child in children.values() if child.rests or child.call is not None)
        largest = max(inside, key=lambda child: (child.rests, child.used), default=None)
        if largest is not None:
            self.condemn(largest, "sandbox_error")

    # -- processors -------------------------------------------------------------------------

    def share_out(self, child: Forked, processes: list[Process]) -> None:
        """Lower the priority of a call with many processes, since the kernel shares by process."""
        num_busy = sum(process.state == "R" for process in processes)
        if num_busy <= (1 if child.session is None else FEW):
            return
        nice = min(19, round(math.log(num_busy) / _LEVEL))
        if nice > child.nice:
            child.nice = nice
            self.lanes.set_nice(child.lane, [process.pid for process in processes], nice)

    def keep_at_rest(self, child: Forked, processes: list[Process]) -> None:
        """Between cells nothing of a session runs. A process that only waits for the next cell
        needn't be stopped for that."""
        awake = [process for process in processes if process.state not in "TtZX"]
        if child.stopped is None:
            alone = len(awake) == 1 and awake[0].num_threads == 1
            if not awake or (alone and awake[0].state == "S"):
                return
            child.stopped = {process.pid: cpu_s(process.pid) for process in processes}
        for process in awake:  # on a busy machine it may take long to heed the signal
            used = cpu_s(process.pid)
            child.stolen_s += max(0.0, used - child.stopped.get(process.pid, 0.0))
            child.stopped[process.pid] = used
        if child.stolen_s > MAX_STOLEN_S:
            self.condemn(child, "killed")
        elif awake:
            self.lanes.stop(child.lane, child.stopped)

    def wake(self, child: Forked) -> None:
        """Resume the session's process for its next cell."""
        if child.stopped is not None:
            self.lanes.resume(child.lane, child.stopped)
            child.stopped, child.stolen_s = None, 0.0
