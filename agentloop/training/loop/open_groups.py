"""Keep in the run's journal what open groups have rolled out so far (rollouts/open_group.py)."""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import anyio

from agentloop.errors import RunFolderError
from agentloop.plain_json import dumps, loads
from agentloop.rollouts.open_group import OpenGroupRow

# Journals of the same format that were written earlier lack the table.
SCHEMA = """
CREATE TABLE IF NOT EXISTS kept (
    number INTEGER NOT NULL,
    conversation TEXT NOT NULL,
    turn INTEGER NOT NULL,
    value BLOB NOT NULL,
    PRIMARY KEY (number, conversation, turn)
) STRICT;
DELETE FROM kept WHERE number NOT IN (SELECT number FROM groups WHERE state = 'open');
"""
_LEVEL = 1  # of compression: the fastest

T = TypeVar("T")


@dataclass(slots=True)
class _Batch:
    """Rows that are written in one transaction."""

    rows: list[tuple[int, str, int, object]] = field(default_factory=list)
    has_rows: anyio.Event = field(default_factory=anyio.Event)
    is_over: anyio.Event = field(default_factory=anyio.Event)
    error: RunFolderError | None = None


class Transact(Protocol):
    """Runs work in a transaction of the journal."""

    async def __call__(self, work: Callable[[sqlite3.Connection], T]) -> T: ...


class OpenGroups:
    """Rows of open groups, which are dropped when their groups end."""

    def __init__(self, transact: Transact) -> None:
        self._transact = transact
        self._batch = _Batch()

    async def write(self) -> None:
        """Write rows until cancelled, all that have come since the last transaction in the next.

        It is a task of its own: those that wait for their rows may be environments, and are
        cancelled at any moment.
        """
        while True:
            await self._batch.has_rows.wait()  # no deadline: until there are rows
            batch, self._batch = self._batch, _Batch()

            def work(db: sqlite3.Connection, batch: _Batch = batch) -> None:
                rows = [(*key, zlib.compress(dumps(value), _LEVEL)) for *key, value in batch.rows]
                db.executemany("INSERT OR REPLACE INTO kept VALUES (?, ?, ?, ?)", rows)

            try:
                await self._transact(work)
            except RunFolderError as error:
                batch.error = error
            batch.is_over.set()

    async def add(self, number: int, conversation: str, turn: int, value: object) -> None:
        """Keep a row of an open group durably, in place of an earlier one.

        Raises:
            RunFolderError: it cannot be written.
        """
        batch = self._batch
        batch.rows.append((number, conversation, turn, value))
        batch.has_rows.set()
        await batch.is_over.wait()  # no deadline: each transaction has one
        if batch.error is not None:
            raise RunFolderError(str(batch.error)) from batch.error

    async def of_group(self, number: int) -> list[OpenGroupRow]:
        """Return the rows of a group, in the order of their turns."""
        query = "SELECT conversation, turn, value FROM kept WHERE number = ? ORDER BY 1, 2"

        def work(db: sqlite3.Connection) -> list[OpenGroupRow]:
            rows = db.execute(query, (number,)).fetchall()
            return [(key, turn, loads(zlib.decompress(value))) for key, turn, value in rows]

        return await self._transact(work)

    async def conversations(self) -> list[tuple[int, str, bool]]:
        """Return the group and the id of each conversation of which something was kept, and
        whether it is a rollout that has ended."""
        query = "SELECT number, conversation, min(turn) < 0 FROM kept GROUP BY 1, 2"
        return await self._transact(lambda db: db.execute(query).fetchall())


def drop(db: sqlite3.Connection, number: object) -> None:
    """Drop the rows of a group."""
    db.execute("DELETE FROM kept WHERE number = ?", (number,))
