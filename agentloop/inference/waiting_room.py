"""Pure: who waits for KV room, and who goes next.

    a turn ──enter──> waiting ──place, in order──> a server
                         └──leave (cancelled, too late)

The order is that of the groups' starts, and within a group the longest expected first, since the
last one to end decides when the group is done. One that does not fit may be overtaken by smaller
ones, but not for ever: once it has waited for `patience_s`, nobody behind it goes before it does,
until enough room has come together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["Waiting", "WaitingRoom"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[T]):
    """One that waits. `order` is its group's number, `expected` its length in tokens."""

    name: str
    order: int
    expected: int
    since_s: float
    request: T

    @property
    def rank(self) -> tuple[int, int, float, str]:
        """Smaller goes first."""
        return (self.order, -self.expected, self.since_s, self.name)


class WaitingRoom(Generic[T]):
    """Enter, leave, place; nothing is placed but by `place`."""

    def __init__(self, *, patience_s: float = 10.0, max_overtaken: int = 8) -> None:
        """Behind `max_overtaken` that do not fit nobody is tried, which bounds the work."""
        self._patience_s = patience_s
        self._max_overtaken = max_overtaken
        self._ranks: list[tuple[int, int, float, str]] = []
        self._waiting: dict[str, Waiting[T]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Waiting[T]]:
        """In order."""
        return (self._waiting[rank[3]] for rank in self._ranks)

    def enter(self, waiting: Waiting[T]) -> None:
        """Raises ValueError: one of that name waits already."""
        if waiting.name in self._waiting:
            raise ValueError(f"{waiting.name} waits already")
        self._waiting[waiting.name] = waiting
        insort(self._ranks, waiting.rank)

    def leave(self, name: str) -> bool:
        """It was cancelled, or placed; harmless where it does not wait. Whether it did."""
        waiting = self._waiting.pop(name, None)
        if waiting is None:
            return False
        del self._ranks[bisect_left(self._ranks, waiting.rank)]
        return True

    def place(self, now: float, try_to_place: Callable[[Waiting[T]], bool]) -> int:
        """Try them in order; `try_to_place` says whether one went, and has reserved for it then.

        Returns:
            How many went.
        """
        num_placed = num_stuck = index = 0
        while index < len(self._ranks):
            waiting = self._waiting[self._ranks[index][3]]
            if try_to_place(waiting):
                self.leave(waiting.name)
                num_placed += 1
                continue
            num_stuck += 1
            index += 1
            if num_stuck >= self._max_overtaken or now - waiting.since_s >= self._patience_s:
                break
        return num_placed

    def longest_wait_s(self, now: float) -> float:
        """Of the one that is next; 0 if nobody waits."""
        return now - self._waiting[self._ranks[0][3]].since_s if self._ranks else 0.0
