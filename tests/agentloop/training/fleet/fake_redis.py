"""The commands of Redis that a fleet's runtime uses, in memory and without a clock."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.lowlevel

from agentloop.aio import Signal

__all__ = ["FakeRedis"]


@dataclass
class Pending:
    """An entry of a stream that a consumer has taken."""

    consumer: str
    idle_ms: int = 0
    times: int = 1


class FakeRedis:
    """A Redis whose entries become idle only when a client says so.

    Attributes:
        errors: raised by the next commands, one each.
        may_set: `set` waits for it, if it is not None.
    """

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.sets: dict[str, set[str]] = {}
        self.streams: dict[str, dict[bytes, dict[bytes, bytes]]] = {}
        self.pending: dict[bytes, Pending] = {}
        self.errors: deque[Exception] = deque()
        self.may_set: anyio.Event | None = None
        self._added = Signal()
        self._num_added = 0

    async def _begin(self) -> None:
        await anyio.lowlevel.checkpoint()
        if self.errors:
            raise self.errors.popleft()

    async def get(self, name: str) -> bytes | None:
        await self._begin()
        return self.values.get(name)

    async def set(self, name: str, value: bytes, *, px: int) -> None:
        await self._begin()
        if self.may_set is not None:
            await self.may_set.wait()
        self.values[name] = value

    async def delete(self, *names: str) -> None:
        await self._begin()
        for name in names:
            self.values.pop(name, None)

    async def sadd(self, name: str, member: str) -> None:
        await self._begin()
        self.sets.setdefault(name, set()).add(member)

    async def srem(self, name: str, member: str) -> None:
        await self._begin()
        self.sets[name].discard(member)

    async def xgroup_create(self, stream: str, group: str, *, id: str, mkstream: bool) -> None:
        await self._begin()
        self.streams.setdefault(stream, {})

    async def xadd(self, stream: str, fields: dict[str, bytes]) -> bytes:
        await self._begin()
        self._num_added += 1
        entry = f"{self._num_added}-0".encode()
        encoded = {name.encode(): value for name, value in fields.items()}
        self.streams.setdefault(stream, {})[entry] = encoded
        self._added.notify()
        return entry

    async def xdel(self, stream: str, *entries: bytes) -> None:
        await self._begin()
        for entry in entries:
            del self.streams[stream][entry]

    async def xack(self, stream: str, group: str, *entries: bytes) -> None:
        await self._begin()
        for entry in entries:
            self.pending.pop(entry, None)

    async def xreadgroup(
        self, group: str, consumer: str, streams: dict[str, str], *, count: int, block: int
    ) -> Any:
        await self._begin()
        ((stream, _),) = streams.items()
        with anyio.move_on_after(block / 1000):
            while not (new := self._new(stream)):
                await self._added.wait()
            self.pending[new[0]] = Pending(consumer)
            return [(stream.encode(), [(new[0], self.streams[stream][new[0]])])]
        return []

    def _new(self, stream: str) -> list[bytes]:
        return [entry for entry in self.streams.get(stream, {}) if entry not in self.pending]

    async def xautoclaim(
        self, stream: str, group: str, consumer: str, idle_ms: int, *, start_id: bytes, count: int
    ) -> Any:
        await self._begin()
        for entry, found in self.pending.items():
            if found.idle_ms >= idle_ms:
                self.pending[entry] = Pending(consumer, times=found.times + 1)
                return b"0-0", [(entry, self.streams[stream][entry])], []
        return b"0-0", [], []

    async def xclaim(
        self,
        stream: str,
        group: str,
        consumer: str,
        min_idle_ms: int,
        entries: list[bytes],
        *,
        idle: int,
        justid: bool,
    ) -> None:
        await self._begin()
        for entry in entries:
            self.pending[entry].idle_ms = idle

    async def xpending_range(
        self, stream: str, group: str, *, min: bytes, max: bytes, count: int, consumername: str = ""
    ) -> Any:
        await self._begin()
        found = self.pending.get(min)
        if found is None or consumername not in ("", found.consumer):
            return []
        return [{"message_id": min, "times_delivered": found.times}]

    @asynccontextmanager
    async def pipeline(self, *, transaction: bool) -> AsyncIterator[_Pipeline]:
        yield _Pipeline(self)


class _Pipeline:
    def __init__(self, redis: FakeRedis) -> None:
        self._redis = redis
        self._commands: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self._commands.append((name, args, kwargs))

    async def execute(self) -> list[Any]:
        return [
            await getattr(self._redis, name)(*args, **kwargs)
            for name, args, kwargs in self._commands
        ]
