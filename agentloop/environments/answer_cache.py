"""Answers of a model that are remembered: what is equal is asked once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import anyio

__all__ = ["AnswerCache"]

T = TypeVar("T")


class AnswerCache(Generic[T]):
    """Answers by key, in memory. A subclass may keep them in a file as well."""

    def __init__(self, max_cached: int) -> None:
        """
        Args:
            max_cached: number of answers to remember; the least recently used one is forgotten.
        """
        self._max_cached = max_cached
        self._answers: OrderedDict[str, T] = OrderedDict()
        self._asking: dict[str, anyio.Lock] = {}

    async def get(self, key: str, ask: Callable[[], Awaitable[T]]) -> T:
        """Return the answer to a key, asking for it if it is not known.

        Others that want the same key wait meanwhile; if asking fails or is cancelled, the next of
        them asks. An empty answer is not remembered. Raises what `ask` raises.
        """
        lock = self._asking.setdefault(key, anyio.Lock())
        try:
            async with lock:  # no deadline: each answer has one
                if (answer := self._answers.get(key)) is not None:
                    self._answers.move_to_end(key)
                    return answer
                if (answer := await self._load(key)) is None:
                    answer = await ask()
                    if not answer:  # an empty answer may have been an accident
                        return answer
                    await self._store(key, answer)
                self._remember(key, answer)
                return answer
        finally:
            if not lock.locked():
                self._asking.pop(key, None)

    async def _load(self, key: str) -> T | None:
        """Return an answer that is kept elsewhere, or None."""
        return None

    async def _store(self, key: str, answer: T) -> None:
        """Keep an answer elsewhere as well."""

    def _remember(self, key: str, answer: T) -> None:
        self._answers[key] = answer
        while len(self._answers) > self._max_cached:
            self._answers.popitem(last=False)
