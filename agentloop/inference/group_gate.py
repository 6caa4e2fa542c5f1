"""The gate that groups of rollouts come in by: no more at a time than the KV caches will hold.

    task source ──has_room──> next task ──group──> its siblings start, all at once
                                 ▲                    │ grow, end
                                 └──── admission.py ──┘ (and what servers report)

A source is asked for a task only when one more group may start, so that backpressure reaches it.
How many may start is decided by pure code (admission.py); here it meets those who wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from agentloop.inference.admission import Admission

__all__ = ["Group", "GroupGate"]


@dataclass(frozen=True, slots=True)
class Group:
    """Siblings that were let in: `keys` are the names that their trajectories must have."""

    name: str
    keys: tuple[str, ...]


@dataclass(slots=True)
class _Waiting:
    name: str
    size: int
    num_prompt: int
    since_s: float
    keys: tuple[str, ...] = ()  # none: it only asks whether a group could start
    may_go: anyio.Event = field(default_factory=anyio.Event)


class GroupGate:
    """First come, first served."""

    def __init__(
        self,
        admission: Admission,
        *,
        capacity: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` is that of all servers that take requests, in tokens of KV."""
        self._admission = admission
        self._capacity = capacity
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._names: set[str] = set()  # of those that wait or are in flight
        self._num_tokens: dict[str, int] = {}  # of its own, by the trajectory's key

    async def has_room(self, size: int) -> None:
        """Wait until one more group of `size` rollouts may start, as far as one can tell without
        its prompt. No deadline: the groups in flight have theirs."""
        await self._wait(_Waiting("the next task", size, 0, self._clock()))

    @asynccontextmanager
    async def group(self, name: str, size: int, num_prompt: int) -> AsyncIterator[Group]:
        """A group is in flight within this context; entering waits, as `has_room`.

        Raises:
            ValueError: a group of that name waits or is in flight.
        """
        if name in self._names:
            raise ValueError(f"a group {name!r} is in flight already")
        keys = tuple(f"{name}.{index}" for index in range(size))
        self._names.add(name)
        try:
            await self._wait(_Waiting(name, size, num_prompt, self._clock(), keys))
            try:
                yield Group(name, keys)
            finally:
                self._leave(keys)
        finally:
            self._names.discard(name)

    def reached(self, key: str, num_tokens: int) -> None:
        """A rollout holds `num_tokens` besides its group's prompt. Harmless for others."""
        before = self._num_tokens.get(key)
        if before is not None and num_tokens > before:
            self._num_tokens[key] = num_tokens
            self._admission.forecast.grow(key, num_tokens - before)

    def ended(self, key: str, *, whole: bool) -> None:
        """A rollout ended; `whole` says by itself, so that its length tells something."""
        if self._num_tokens.pop(key, None) is not None:
            self._admission.forecast.end(key, whole=whole)
            self.admit()

    def admit(self) -> None:
        """Let in those who fit, in order: to be called when there may be more capacity."""
        while self._waiting:
            first = self._waiting[0]
            if not self._admission.may_start(self._capacity(), first.size, first.num_prompt):
                return
            self._waiting.popleft()
            if first.keys:
                self._admission.start()
            for key in first.keys:
                self._admission.forecast.start(key)
                self._num_tokens[key] = 0
            first.may_go.set()

    def observe(self, now: float, num_retracted: int, reported_s: float) -> str:
        """As `Admission.observe`."""
        change = self._admission.observe(now, num_retracted, reported_s)
        self.admit()
        return change

    def waits(self) -> list[tuple[str, float, str]]:
        """Who waits at the gate: the group, for how long [s], and why; in order."""
        now = self._clock()
        why = f"{self._admission.num_in_flight} groups in flight will need the KV that there is"
        return [(one.name, now - one.since_s, why) for one in self._waiting]

    async def _wait(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self.admit()
        try:
            await waiting.may_go.wait()  # no deadline: until another group ends, which has its own
        except BaseException:
            if not waiting.may_go.is_set():
                self._waiting.remove(waiting)
            elif waiting.keys:  # it had just been let in
                self._leave(waiting.keys)
            self.admit()
            raise

    def _leave(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            if self._num_tokens.pop(key, None) is not None:
                self._admission.forecast.end(key, whole=False)
        self._admission.end()
        self.admit()
