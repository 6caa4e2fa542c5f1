"""The group queue: what was admitted, what is finished, what was trained on. It survives a kill.

    admit ──> open ──finish──> finished ──lease──> leased to a step ──acknowledge──> trained
                └──give_back──> given back            └ the step is in a checkpoint ┘

A journal in one SQLite file (WAL): each method is a transaction, whole or not at all, and what was
told stays told. The rollouts of a group stand in a file of their own, which is there, in full,
before the journal says so; the journal holds its path and its figures.

A step is leased its groups before the learner hears of them, and they are acknowledged once the
step is in a checkpoint. So a learner that is lost goes on from its last checkpoint with the same
batches in the same order, and no group is ever in two.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio

from agentloop.errors import SettingsError
from agentloop.groups.tasks import Task
from agentloop.plain_json import dumps, loads

__all__ = ["Group", "GroupQueue", "Lease"]

_FORM = 1
_SCHEMA = f"""
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    version INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'open'
        CHECK (state IN ('open', 'finished', 'given back', 'leased', 'trained')),
    path TEXT,
    num_bytes INTEGER NOT NULL DEFAULT 0,
    figures TEXT NOT NULL DEFAULT '{{}}',
    step INTEGER,
    place INTEGER
) STRICT;
CREATE INDEX groups_by_state ON groups (state);
CREATE INDEX groups_by_step ON groups (step);
CREATE TABLE steps (
    step INTEGER PRIMARY KEY,
    notes TEXT NOT NULL,
    result TEXT
) STRICT;
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
PRAGMA user_version = {_FORM};
"""
_BUSY_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    """A task that was admitted.

    Attributes:
        number: the order of admission, from 1 on, over the whole run.
        version: of the weights that were live then.
        path: of the file of its rollouts, relative to the run; none while it is open.
        figures: what is told of it, as it was given to `finish`.
    """

    number: int
    task: Task
    version: int
    path: str | None = None
    num_bytes: int = 0
    figures: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Lease:
    """The batch of a step, in order.

    Attributes:
        notes: what has to be known to do it again.
        result: what came of it; none if it was never heard of.
        replaced: the groups that were given back since the step before.
    """

    step: int
    groups: Sequence[Group]
    notes: Mapping[str, Any]
    result: Mapping[str, Any] | None
    replaced: Sequence[Group] = ()


class GroupQueue:
    """Use `GroupQueue.open(...)`. One task at a time is in the database, in a thread; whoever is
    cancelled meanwhile has either done all of it or nothing."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._lock = anyio.Lock()
        self._num_bytes = 0

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator[GroupQueue]:
        """Make the file, or go on with it.

        Raises:
            SettingsError: it cannot be read or written, or it is of another version of agentloop.
        """
        connection = await anyio.to_thread.run_sync(_connected, path)
        with closing(connection):
            queue = cls(connection, path)
            queue._num_bytes = await queue._do(_bytes_waiting)
            yield queue

    @property
    def num_bytes(self) -> int:
        """Of the files of the groups that are finished, and that no step has been leased yet."""
        return self._num_bytes

    async def admit(self, task: Task, *, version: int, cursor: Mapping[str, Any]) -> Group:
        """The next group; `cursor` is where the source of tasks is after it."""

        def work(db: sqlite3.Connection) -> Group:
            row = (_json(asdict(task)), version)
            found = db.execute("INSERT INTO groups (task, version) VALUES (?, ?)", row).lastrowid
            _note(db, "cursor", cursor)
            assert found is not None
            return Group(found, task, version)

        return await self._do(work)

    async def finish(
        self, number: int, *, path: str | None, num_bytes: int, figures: Mapping[str, Any]
    ) -> None:
        """All its rollouts are in the file at `path`; none: it has none, for it could not be asked.

        Raises:
            ValueError: the group is not open.
        """
        row = (path, num_bytes, _json(figures), number)
        set_ = "state = 'finished', path = ?, num_bytes = ?, figures = ?"
        await self._do(partial(_change, f"{set_} WHERE state = 'open' AND number = ?", row))
        self._num_bytes += num_bytes

    async def give_back(self, number: int, *, path: str | None, figures: Mapping[str, Any]) -> None:
        """It will not be trained on. Raises as `finish`."""
        row = (path, _json(figures), number)
        set_ = "state = 'given back', path = ?, figures = ?"
        await self._do(partial(_change, f"{set_} WHERE state = 'open' AND number = ?", row))

    async def lease(self, step: int, numbers: Sequence[int], notes: Mapping[str, Any]) -> Lease:
        """These groups are the batch of `step`, and of no other.

        Raises:
            ValueError: one of them is not finished, or the step has a batch already.
        """

        def work(db: sqlite3.Connection) -> Lease:
            taken = "step = ?, place = ?, state = 'leased' WHERE state = 'finished' AND number = ?"
            for place, number in enumerate(numbers):
                _change(taken, (step, place, number), db)
            try:
                db.execute("INSERT INTO steps VALUES (?, ?, NULL)", (step, _json(notes)))
            except sqlite3.IntegrityError:
                raise ValueError(f"step {step} has a batch already") from None
            since = "state = 'given back' AND step IS NULL"
            db.execute(f"UPDATE groups SET step = ? WHERE {since}", (step,))
            return _lease(db, step, notes, None)

        lease = await self._do(work)
        self._num_bytes -= sum(group.num_bytes for group in lease.groups)
        return lease

    async def done(self, step: int, result: Mapping[str, Any]) -> None:
        """The learner has done that step. It is still in no checkpoint."""

        def work(db: sqlite3.Connection) -> None:
            row = (_json(result), step)
            db.execute("UPDATE steps SET result = ? WHERE step = ?", row)

        await self._do(work)

    async def acknowledge(self, step: int) -> None:
        """A checkpoint holds that step and all before it."""

        def work(db: sqlite3.Connection) -> None:
            where = "state = 'leased' AND step <= ?"
            db.execute(f"UPDATE groups SET state = 'trained' WHERE {where}", (step,))

        await self._do(work)

    async def rewind(self, step: int) -> list[Lease]:
        """The learner is as it was after `step`: the batches that it has to do again, in order.

        What stood in a later checkpoint is done again as well; what stands in that one is trained
        on, also where nobody came to say so."""

        def work(db: sqlite3.Connection) -> list[Lease]:
            held = "state = 'leased' AND step <= ?"
            db.execute(f"UPDATE groups SET state = 'trained' WHERE {held}", (step,))
            where = "state = 'trained' AND step > ?"
            db.execute(f"UPDATE groups SET state = 'leased' WHERE {where}", (step,))
            steps = "SELECT step, notes, result FROM steps WHERE step > ? ORDER BY step"
            return [
                _lease(db, number, loads(notes), None if result is None else loads(result))
                for number, notes, result in db.execute(steps, (step,)).fetchall()
            ]

        return await self._do(work)

    async def begin_stage(
        self,
        number: int,
        *,
        step: int,
        tasks: Sequence[Mapping[str, Any]] | None,
        cursor: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Note that a stage begins after `step`, with `tasks` of its own, or those of the source
        (None), which came to `cursor` meanwhile. Return the note, which is under `stage NUMBER`
        from now on: `begun`, `tasks`, and for `undo` what was there before: the number of the
        `last` group, and `before`, the cursor."""

        def work(db: sqlite3.Connection) -> dict[str, Any]:
            (last,) = db.execute("SELECT coalesce(max(number), 0) FROM groups").fetchone()
            before = _noted(db, "cursor")
            stage = {"begun": step, "tasks": tasks, "last": last, "before": before}
            _note(db, f"stage {number}", stage)
            _note(db, "cursor", cursor)
            return stage

        return await self._do(work)

    async def undo(self, step: int) -> None:
        """Make what came after `step` undone: all that was rolled out since then was sampled with
        weights that are gone.

        Groups of stages that go on are rolled out anew, also those that were given back. A stage
        that began after `step` begins anew: its groups are forgotten, and so are those of the
        stages after it, and the source of tasks is where it was at its beginning.

        The files of these groups, and what else is to be put aside, are noted as `undone`: whoever
        puts them aside clears that note.
        """

        def work(db: sqlite3.Connection) -> None:
            since = "(state IN ('leased', 'trained', 'given back') AND coalesce(step > ?, TRUE))"
            gone = f"state = 'finished' OR {since}"
            found = db.execute(f"SELECT path FROM groups WHERE path NOT NULL AND ({gone})", (step,))
            undone = {
                "step": step,
                "name": f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
                "files": [path for (path,) in found.fetchall()],
            }
            again = "state = 'open', step = NULL, place = NULL, path = NULL, figures = '{}'"
            db.execute(f"UPDATE groups SET {again}, num_bytes = 0 WHERE {gone}", (step,))
            db.execute("DELETE FROM steps WHERE step > ?", (step,))
            stages = db.execute("SELECT key, value FROM notes WHERE key LIKE 'stage %'").fetchall()
            for key, value in sorted(stages, key=lambda row: _number(row[0]), reverse=True):
                stage = loads(value)
                if stage["begun"] > step:
                    db.execute("DELETE FROM notes WHERE key = ?", (key,))
                    if stage.get("before") is not None:  # by an earlier agentloop it was not noted
                        db.execute("DELETE FROM groups WHERE number > ?", (stage["last"],))
                        _note(db, "cursor", stage["before"])
            _note(db, "undone", undone)

        await self._do(work)
        self._num_bytes = 0

    async def open_groups(self) -> list[Group]:
        """Admitted and neither finished nor given back: after a restart, to be rolled out again."""
        return await self._do(lambda db: _groups(db, "state = 'open' ORDER BY number", ()))

    async def finished_groups(self) -> list[Group]:
        """Finished, and in no batch yet."""
        return await self._do(lambda db: _groups(db, "state = 'finished' ORDER BY number", ()))

    async def reopen(self, numbers: Sequence[int], *, version: int) -> None:
        """These are rolled out anew, with the weights of `version`."""

        def work(db: sqlite3.Connection) -> int:
            again = "state = 'open', version = ?, path = NULL, num_bytes = 0, figures = '{}'"
            where = "WHERE state IN ('open', 'finished') AND number = ?"
            for number in numbers:
                _change(f"{again} {where}", (version, number), db)
            return _bytes_waiting(db)

        self._num_bytes = await self._do(work)

    async def note(self, key: str, value: Any) -> None:
        """Remember something under this name; None: forget it."""
        await self._do(lambda db: _note(db, key, value))

    async def noted(self, key: str) -> Any:
        """What was remembered under this name, such as `cursor`; None: nothing was."""
        return await self._do(lambda db: _noted(db, key))

    async def counts(self) -> dict[str, int]:
        """Groups by their state."""
        query = "SELECT state, count(*) FROM groups GROUP BY state"
        return await self._do(lambda db: dict(db.execute(query).fetchall()))

    async def _do(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """`work` in a transaction. Raises SettingsError: the disk is full, the file is damaged, or
        the like."""

        def transact() -> T:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return work(self._connection)

        async with self._lock:  # no deadline: each transaction has one, _BUSY_S
            try:  # milliseconds, and _BUSY_S at most; cancellation waits for it
                return await anyio.to_thread.run_sync(transact)
            except (sqlite3.Error, json.JSONDecodeError) as error:
                raise SettingsError(f"run.folder: {self._path}: {error}") from error


def _connected(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # nor does a power cut take it back
            (form,) = connection.execute("PRAGMA user_version").fetchone()
            if not form:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            elif form != _FORM:
                raise SettingsError(
                    f"{path}: of another version of agentloop ({form}, not {_FORM})"
                )
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise SettingsError(f"run.folder: {path}: {error}") from error
    return connection


def _change(update: str, row: Sequence[Any], db: sqlite3.Connection) -> None:
    """Of one group, whose number is last in `row`. Raises ValueError: it is in another state."""
    if db.execute(f"UPDATE groups SET {update}", row).rowcount != 1:
        found = db.execute("SELECT state FROM groups WHERE number = ?", row[-1:]).fetchone()
        raise ValueError(f"group {row[-1]} is {found[0] if found else 'not there'}")


def _note(db: sqlite3.Connection, key: str, value: Any) -> None:
    db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, _json(value)))


def _noted(db: sqlite3.Connection, key: str) -> Any:
    row = db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
    return None if row is None else loads(row[0])


def _number(stage: str) -> int:
    """Return the number of a stage from the name of its note: 10 of `stage 10`."""
    return int(stage.split()[1])


def _json(value: Any) -> str:
    """A data set's columns may hold dates and the like, which nobody computes with."""
    return dumps(value).decode()


def _groups(db: sqlite3.Connection, where: str, row: Sequence[Any]) -> list[Group]:
    columns = "number, task, version, path, num_bytes, figures"
    found = db.execute(f"SELECT {columns} FROM groups WHERE {where}", row).fetchall()
    return [
        Group(number, Task(**loads(task)), version, path, num_bytes, loads(figures))
        for number, task, version, path, num_bytes, figures in found
    ]


def _lease(
    db: sqlite3.Connection, step: int, notes: Mapping[str, Any], result: Mapping[str, Any] | None
) -> Lease:
    batch = _groups(db, "step = ? AND state != 'given back' ORDER BY place", (step,))
    replaced = _groups(db, "step = ? AND state = 'given back' ORDER BY number", (step,))
    return Lease(step, batch, notes, result, replaced)


def _bytes_waiting(db: sqlite3.Connection) -> int:
    query = "SELECT coalesce(sum(num_bytes), 0) FROM groups WHERE state = 'finished'"
    return int(db.execute(query).fetchone()[0])
