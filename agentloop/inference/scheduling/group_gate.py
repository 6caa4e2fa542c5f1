"""Backpressure on groups of rollouts: no more at a time than the KV caches will hold.

    task source ──wait_for_capacity──> next task ──group──> its siblings start, all at once
                                          ▲                    │ grow, end
                                          └──── admission.py ──┘ (and the servers' reports)

A source is asked for a task only when another group may start, so that backpressure reaches it. How
many may start is decided by pure code (admission.py); this module keeps the queue.

A rollout may have several conversations, `ROLLOUT`, `ROLLOUT+1`, `ROLLOUT+opponent`, ...: it holds
the tokens of all that have not ended, and ends when whoever runs the group says so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from agentloop.inference.scheduling.admission import Admission
from agentloop.trajectory import rollout_of


@dataclass(frozen=True, slots=True)
class AdmittedGroup:
    """A group that was admitted.

    Attributes:
        keys: the names that its rollouts must have.
        end: called with the name of a rollout of several conversations when it has ended, and with
            whether it ended normally.
    """

    name: str
    keys: tuple[str, ...]
    end: Callable[[str, bool], None] = lambda key, is_complete: None


@dataclass(slots=True)
class _Waiting:
    name: str
    size: int
    num_prompt: int
    since_s: float
    keys: tuple[str, ...] = ()  # empty: only waits until a group could start
    is_single: bool = True
    admitted: anyio.Event = field(default_factory=anyio.Event)


class GroupGate:
    """A first-come, first-served queue of groups."""

    def __init__(
        self,
        admission: Admission,
        *,
        capacity: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`capacity` returns the KV tokens of all available servers."""
        self._admission = admission
        self._capacity = capacity
        self._clock = clock
        self._waiting: deque[_Waiting] = deque()
        self._names: set[str] = set()  # of groups that wait or are in flight
        self._num_tokens: dict[str, int] = {}  # by rollout, without the group's prompt
        # Of rollouts of several conversations, by conversation; of others None.
        self._conversations: dict[str, dict[str, int] | None] = {}
        # Tokens of the prompt that siblings of several conversations shared last.
        self._num_shared = 0

    async def wait_for_capacity(self, size: int) -> None:
        """Wait until another group of `size` rollouts may start, judged without its prompt.

        There is no deadline: the groups in flight have theirs.
        """
        await self._wait(_Waiting("the next task", size, 0, self._clock()))

    @asynccontextmanager
    async def group(
        self, name: str, size: int, num_prompt: int, *, is_single: bool = True
    ) -> AsyncIterator[AdmittedGroup]:
        """Keep a group in flight within this context; entering it waits until the group may start.

        Args:
            is_single: whether each rollout is one conversation and ends with it.

        Raises:
            ValueError: A group of that name is waiting or in flight.
        """
        if name in self._names:
            raise ValueError(f"a group {name!r} is already in flight")
        keys = tuple(f"{name}.{index}" for index in range(size))
        self._names.add(name)
        try:
            await self._wait(_Waiting(name, size, num_prompt, self._clock(), keys, is_single))
            try:
                yield AdmittedGroup(name, keys, self._end)
            finally:
                self._leave(keys)
        finally:
            self._names.discard(name)

    def record_length(self, key: str, num_tokens: int, num_shared: int = 0) -> None:
        """Record that a conversation holds `num_tokens` besides its group's prompt of `num_shared`;
        ignored if unknown."""
        rollout = key if key in self._num_tokens else rollout_of(key)  # called for each frame
        before = self._num_tokens.get(rollout)
        if before is None:
            return
        if (conversations := self._conversations[rollout]) is not None:
            self._num_shared = num_shared or self._num_shared
            conversations[key] = num_tokens
            num_tokens = sum(conversations.values())
        if num_tokens > before:
            self._num_tokens[rollout] = num_tokens
            self._admission.forecast.grow(rollout, num_tokens - before)

    def end_conversation(self, key: str, *, is_complete: bool) -> None:
        """Record that a conversation ended; its length counts only if it ended normally
        (`is_complete`)."""
        conversations = self._conversations.get(rollout_of(key))
        if conversations is not None:
            conversations.pop(key, None)
        else:
            self._end(key, is_complete)

    def _end(self, rollout: str, is_complete: bool) -> None:
        if self._num_tokens.pop(rollout, None) is not None:
            del self._conversations[rollout]
            self._admission.forecast.end(rollout, is_complete=is_complete)
            self.admit()

    def admit(self) -> None:
        """Admit waiting groups that fit, in order; call it when capacity may have increased."""
        while self._waiting:
            first = self._waiting[0]
            num_prompt = first.num_prompt if first.is_single else self._num_shared
            if not self._admission.may_start(self._capacity(), first.size, num_prompt):
                return
            self._waiting.popleft()
            if first.keys:
                self._admission.start()
            for key in first.keys:
                self._admission.forecast.start(key)
                self._num_tokens[key] = 0
                self._conversations[key] = None if first.is_single else {}
            first.admitted.set()

    def observe(self, now_s: float, num_retracted: int, reported_s: float) -> None:
        """Pass the servers' reports to `Admission.observe` and admit groups that fit now."""
        self._admission.observe(now_s, num_retracted, reported_s)
        self.admit()

    def waits(self) -> list[tuple[str, float, str]]:
        """Return the waiting groups in order: name, seconds waited, and reason."""
        now_s = self._clock()
        reason = f"the {self._admission.num_in_flight} groups in flight will need all KV capacity"
        return [(waiting.name, now_s - waiting.since_s, reason) for waiting in self._waiting]

    async def _wait(self, waiting: _Waiting) -> None:
        self._waiting.append(waiting)
        self.admit()
        try:
            await waiting.admitted.wait()  # no deadline: another group ends, and that has one
        except BaseException:
            if not waiting.admitted.is_set():
                self._waiting.remove(waiting)
            elif waiting.keys:  # it has just been admitted
                self._leave(waiting.keys)
            self.admit()
            raise

    def _leave(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            self._end(key, is_complete=False)
        self._admission.end()
        self.admit()
