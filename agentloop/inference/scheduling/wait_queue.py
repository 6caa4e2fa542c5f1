"""Pure: the queue of requests that wait for KV capacity.

    a turn ──enter──> waiting ──place, in order──> a server
                         └──leave (cancelled, timed out)

Turns whose context is still cached go first; then those that lost it, the smallest first, because
many small ones can run side by side and cost little to compute again; then first turns. A second of
waiting counts as `TOKENS_PER_S` tokens, so that small ones that keep coming hold up none for ever.
Otherwise groups go in the order of their start; within a group the longest expected request goes
first, because the group is done when its last one ends. A request that does not fit may be
overtaken by smaller ones, but not forever: once it has waited for `STARVATION_THRESHOLD_S`,
requests behind it wait until enough capacity has become free.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Generic, TypeVar

STARVATION_THRESHOLD_S = 10.0
TOKENS_PER_S = 10.0  # of a turn that lost its context; more made bench.router's batches slower

T = TypeVar("T")
_Priority = tuple[int, int, float, float, str]


class Stage(IntEnum):
    """State of the trajectory of a request; the first goes first."""

    MOVED = 0  # a turn that has begun on a server that failed
    CACHED = 1  # a trajectory whose context is kept in a cache
    PAUSED = 2  # a trajectory that would have to be computed again
    NEW = 3


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """A queued request. `order` is its group's number, `expected` its expected length in tokens."""

    name: str
    order: int
    expected: int
    since_s: float
    request: T
    stage: Stage = Stage.NEW

    @property
    def priority(self) -> _Priority:
        """Sort key; the smallest goes first."""
        if self.stage is Stage.PAUSED:
            return (self.stage, 0, self.expected + TOKENS_PER_S * self.since_s, 0.0, self.name)
        return (self.stage, self.order, -self.expected, self.since_s, self.name)


class WaitQueue(Generic[T]):
    """A priority queue; only `place` removes requests that were placed."""

    def __init__(
        self, *, starvation_threshold_s: float = STARVATION_THRESHOLD_S, max_overtaken: int = 8
    ) -> None:
        """`max_overtaken` bounds the requests tried per call that do not fit, and so the work."""
        self._starvation_threshold_s = starvation_threshold_s
        self._max_overtaken = max_overtaken
        self._priorities: list[_Priority] = []
        self._waiting: dict[str, Waiting[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting[T]]:
        """Iterate over the requests in order."""
        return (self._waiting[priority[-1]] for priority in self._priorities)

    def enter(self, waiting: Waiting[T]) -> None:
        """Add a request.

        Raises:
            ValueError: A request of that name is already waiting.
        """
        if waiting.name in self._waiting:
            raise ValueError(f"{waiting.name} is already waiting")
        self._waiting[waiting.name] = waiting
        insort(self._priorities, waiting.priority)

    def leave(self, name: str) -> bool:
        """Remove a request that was cancelled or placed; return whether it was waiting."""
        waiting = self._waiting.pop(name, None)
        if waiting is None:
            return False
        del self._priorities[bisect_left(self._priorities, waiting.priority)]
        return True

    def pause(self, is_cached: Callable[[T], bool]) -> None:
        """Let those whose context is no longer cached wait among the paused ones."""
        lost = [
            waiting
            for waiting in self._waiting.values()
            if waiting.stage is Stage.CACHED and not is_cached(waiting.request)
        ]
        for waiting in lost:
            self.leave(waiting.name)
            self.enter(replace(waiting, stage=Stage.PAUSED))

    def place(self, now_s: float, try_to_place: Callable[[Waiting[T]], bool]) -> None:
        """Try to place the requests in order.

        `try_to_place` reserves capacity and returns True, or returns False.
        """
        num_stuck = index = 0
        while index < len(self._priorities):
            waiting = self._waiting[self._priorities[index][-1]]
            if try_to_place(waiting):
                self.leave(waiting.name)
                continue
            num_stuck += 1
            index += 1
            if (
                num_stuck >= self._max_overtaken
                or now_s - waiting.since_s >= self._starvation_threshold_s
            ):
                break
