"""Find where the time of rollouts goes, and which setting would change it. Pure.

    spans of rollouts, the learner's, of weight syncs ──> Spent ──> seconds by part, a sentence

Rollouts run at the same time, so their seconds are scaled to the seconds in which at least one was
in flight: all parts together are the seconds of the clock. The learner and weight syncs count while
no rollout is in flight; otherwise they hold nothing up.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from agentloop.trajectory import union_s

_WINDOW_S = 60  # of `RecentTime`
_MIN_SHARE = 0.05  # of the window; a smaller part is no bottleneck

CallTimes = tuple[float, float, float]
"""When a call was dispatched, when it began to run and when it ended, in seconds of one clock."""


class Part(StrEnum):
    """A part of the time of rollouts, or of a run between its rollouts."""

    KV = "kv"  # waits for a server with capacity in its KV cache
    PREFILL = "prefill"
    DECODE = "decode"
    QUEUE = "queue"  # its calls wait for slots of the sandbox
    TOOL = "tool"
    REWARD = "reward"
    SYNC = "sync"
    LEARNER = "learner"
    OTHER = "other"  # no rollout is in flight, for another reason


_BETWEEN = (Part.SYNC, Part.LEARNER)
_BY_CALL = (Part.QUEUE, Part.TOOL)
_BY_TURN = (Part.KV, Part.PREFILL, Part.DECODE)


class ServedOn(StrEnum):
    """The hardware of the servers, on which it depends what would make turns faster."""

    CPU = "cpu"  # of this machine: further servers would share its cores
    GPU = "gpu"
    ATTACHED = "attached"  # somebody else started them, with settings that we do not have
    ENDPOINT = "endpoint"  # a service that samples whole messages
    UNKNOWN = "unknown"  # of a run that is on disk: it does not say whether there was a GPU


def served_on(
    servers: Sequence[str], device: str, *, has_accelerator: bool | None = None
) -> ServedOn:
    """Return the hardware of the servers, by the settings `servers` and `server.device`.

    Args:
        has_accelerator: whether device "auto" is an accelerator; None: it is not known.
    """
    if servers:
        return ServedOn.ATTACHED
    if device == "auto":
        if has_accelerator is None:
            return ServedOn.UNKNOWN
        device = "cuda" if has_accelerator else "cpu"
    return ServedOn.CPU if device == "cpu" else ServedOn.GPU


# What happens, and what would change it; None: that depends on the hardware.
_WORDS: dict[Part, tuple[str, str | None]] = {
    Part.KV: ("Rollouts wait for KV cache capacity", None),
    Part.PREFILL: ("Rollouts wait for prefill", None),
    Part.DECODE: ("Rollouts mostly decode", None),
    Part.QUEUE: ("Rollouts wait for sandbox slots", "raise sandbox.workers"),
    Part.TOOL: ("Rollouts wait for their tools to run", "no setting makes a tool faster"),
    Part.REWARD: ("Rollouts wait to be scored", "raise reward.num_workers"),
    Part.SYNC: ("Servers wait for new weights", "set weights.transport=broadcast"),
    Part.LEARNER: ("Servers wait for the learner", "raise loop.max_staleness"),
}
_OR_SHORTER = " or lower budget.max_response_tokens"  # where a turn has reached it
_ON_CPU = {
    Part.KV: "raise server.max_total_tokens",
    Part.PREFILL: "use a smaller model or shorter prompts",
    Part.DECODE: f"use a smaller model{_OR_SHORTER}",
}
_ON_GPU = {
    Part.KV: "raise server.count or server.max_total_tokens",
    Part.PREFILL: "raise server.count, or server.tp_size for a large model",
    Part.DECODE: "raise server.count, or server.tp_size for a large model",
}
_BY_HARDWARE: dict[ServedOn, dict[Part, str]] = {
    ServedOn.CPU: _ON_CPU,
    ServedOn.GPU: _ON_GPU,
    ServedOn.ATTACHED: dict.fromkeys(_BY_TURN, "add one to `servers`"),
    ServedOn.ENDPOINT: dict.fromkeys(_BY_TURN, "raise endpoint.max_concurrent if it has room"),
    ServedOn.UNKNOWN: {
        part: f"on a CPU {_ON_CPU[part]}; on GPUs {_ON_GPU[part]}" for part in _BY_TURN
    },
}


@dataclass
class Spent:
    """Time by part, and the numbers of turns and calls that it was spent on.

    Attributes:
        seconds: seconds by part, summed over all rollouts; also the learner's and weight syncs'.
        busy_s: seconds of the clock in which at least one rollout was in flight.
        window_s: seconds of the clock that this covers.
        num_turns, num_calls: turns and calls that have ended.
        num_truncated: turns that were cut at a limit on tokens.
    """

    seconds: defaultdict[Part, float] = field(default_factory=lambda: defaultdict(float))
    busy_s: float = 0.0
    window_s: float = 0.0
    num_turns: int = 0
    num_calls: int = 0
    num_truncated: int = 0

    def add(self, spent: Spent) -> None:
        """Add the seconds and counts of another, whose window is part of this one's."""
        for part, seconds in spent.seconds.items():
            self.seconds[part] += seconds
        self.busy_s += spent.busy_s
        self.num_turns += spent.num_turns
        self.num_calls += spent.num_calls
        self.num_truncated += spent.num_truncated

    def by_part(self) -> dict[Part, float]:
        """Return the seconds of the clock of each part that took any; their sum is the window."""
        of_rollouts = {p: s for p, s in self.seconds.items() if p not in _BETWEEN and s > 0}
        total = sum(of_rollouts.values())
        busy_s = min(self.busy_s, self.window_s) if total else 0.0
        scaled = {part: seconds * busy_s / total for part, seconds in of_rollouts.items()}
        free_s = self.window_s - busy_s
        between = sum(self.seconds[part] for part in _BETWEEN)
        scale = min(1.0, free_s / between) if between > 0 else 0.0
        scaled |= {part: self.seconds[part] * scale for part in _BETWEEN}
        scaled[Part.OTHER] = free_s - between * scale
        return {part: scaled[part] for part in Part if scaled.get(part, 0.0) > 1e-6}

    def sentence(self, on: ServedOn = ServedOn.UNKNOWN, *, has_slots: bool = True) -> str:
        """Return the largest part, its size and the setting that would change it; "": no part is.

        The size is that of a turn or of a call for parts of which they consist, and otherwise that
        of the whole window.

        Args:
            has_slots: whether the sandbox has slots at all, so that more of them would help.
        """
        by_part = {part: s for part, s in self.by_part().items() if part is not Part.OTHER}
        if not by_part:
            return ""
        largest = max(by_part, key=lambda part: by_part[part])
        if by_part[largest] < _MIN_SHARE * self.window_s:
            return ""
        description, advice = _WORDS[largest]
        advice = advice or _BY_HARDWARE[on][largest]
        if not self.num_truncated:
            advice = advice.replace(_OR_SHORTER, "")
        if largest is Part.QUEUE and not has_slots:
            advice = "no worker of the sandbox is available, see the log"
        for parts, count, noun in (
            (_BY_CALL, self.num_calls, "call"),
            (_BY_TURN, self.num_turns, "turn"),
        ):
            if largest in parts and count:
                total = sum(self.seconds[part] for part in parts)
                size = f"{_of(self.seconds[largest] / count, total / count)} per {noun}"
                break
        else:
            size = _of(by_part[largest], self.window_s)
        return f"{description}: {size}; {advice}"

    def to_dict(
        self, on: ServedOn = ServedOn.UNKNOWN, *, has_slots: bool = True
    ) -> dict[str, object]:
        """Return what the page shows. The arguments are those of `sentence`."""
        return {
            "window_s": round(self.window_s, 3),
            "seconds": {str(part): round(s, 3) for part, s in self.by_part().items()},
            "sentence": self.sentence(on, has_slots=has_slots),
        }


def _of(seconds: float, total: float) -> str:
    """Format a duration and its whole in the same unit: `2.6 of 2.9 s`."""
    if total < 1:
        return f"{1000 * seconds:.0f} of {1000 * total:.0f} ms"
    digits = 1 if total < 100 else 0
    return f"{seconds:.{digits}f} of {total:.{digits}f} s"


def split_tool_time(
    calls: Iterable[CallTimes], start: float, end: float, *, queued_share: float = 0.0
) -> tuple[float, float]:
    """Split a rollout's time at its tools into that in the queue and that in which a tool runs.

    Args:
        calls: the calls that have ended.
        start, end: since when the rollout has been at its tools, and until when.
        queued_share: the queue's share of the time that no call covers, since calls still run.
    """
    within = [(max(start, sent), max(start, started), min(end, at)) for sent, started, at in calls]
    ran_s = union_s((started, at) for _, started, at in within)
    known_s = union_s((sent, at) for sent, _, at in within)
    queued_s = known_s - ran_s + queued_share * max(0.0, end - start - known_s)
    return queued_s, max(0.0, end - start - queued_s)


class RecentTime:
    """The time of the last minute by part, in buckets of a second. Times are of one clock."""

    def __init__(self, start: float) -> None:
        self._start = start
        self._buckets: dict[int, Spent] = {}
        self._open: dict[str, tuple[Part, float]] = {}  # what rollouts are at, and since when
        self._busy_since = start

    def enter(self, key: str, part: Part | None, now_s: float, calls: Iterable[CallTimes]) -> None:
        """Note that a rollout is at another part now; None: at nothing that counts.

        Args:
            calls: the ended calls of its turn, if it has been at its tools.
        """
        was = self._open.get(key)
        if was is not None:
            self._add_rollouts(self._buckets, *was, now_s, calls, 0.0)
        if part is None:
            self._open.pop(key, None)
            if was is not None and not self._open:
                self._spread(self._buckets, self._busy_since, now_s, None)
        else:
            if not self._open:
                self._busy_since = now_s
            self._open[key] = part, now_s

    def add(self, part: Part, start: float, end: float) -> None:
        """Add time at a part that is known only now, such as the learner's."""
        self._spread(self._buckets, start, end, part)

    def count(self, now_s: float, *, turns: int = 0, calls: int = 0, truncated: int = 0) -> None:
        """Count turns and calls that end now, and how many of the turns were truncated."""
        bucket = self._buckets.setdefault(int(now_s), Spent())
        bucket.num_turns += turns
        bucket.num_calls += calls
        bucket.num_truncated += truncated

    def spent(self, now_s: float, *, queued_share: float = 0.0) -> Spent:
        """Return the time of the window that ends now.

        Args:
            queued_share: share of the calls in flight that wait for a slot.
        """
        self._forget(now_s)
        open_: dict[int, Spent] = {}
        for part, since in self._open.values():
            self._add_rollouts(open_, part, since, now_s, (), queued_share)
        if self._open:
            self._spread(open_, self._busy_since, now_s, None)
        first = int(now_s) - _WINDOW_S + 1
        total = Spent(window_s=max(0.0, now_s - max(first, self._start)))
        for second, bucket in (*self._buckets.items(), *open_.items()):
            if second >= first:
                total.add(bucket)
        return total

    def _add_rollouts(
        self,
        buckets: dict[int, Spent],
        part: Part,
        start: float,
        end: float,
        calls: Iterable[CallTimes],
        queued_share: float,
    ) -> None:
        if part is not Part.TOOL:
            self._spread(buckets, start, end, part)
            return
        queued_s, ran_s = split_tool_time(calls, start, end, queued_share=queued_share)
        middle = start + queued_s
        self._spread(buckets, start, middle, Part.QUEUE)
        self._spread(buckets, middle, middle + ran_s, Part.TOOL)

    def _spread(
        self,
        buckets: dict[int, Spent],
        start: float,
        end: float,
        part: Part | None,
    ) -> None:
        """Add a span to the seconds that it touches, as far as they are in the window.

        Args:
            part: part of the time; None: there was a rollout in flight.
        """
        start = max(start, end - _WINDOW_S, self._start)
        while start < end:  # the clock may have gone backwards
            until = min(end, math.floor(start) + 1.0)
            bucket = buckets.setdefault(int(start), Spent())
            if part is None:
                bucket.busy_s += until - start
            else:
                bucket.seconds[part] += until - start
            start = until
        self._forget(end)

    def _forget(self, now_s: float) -> None:
        while self._buckets and (first := next(iter(self._buckets))) <= now_s - _WINDOW_S - 1:
            del self._buckets[first]
