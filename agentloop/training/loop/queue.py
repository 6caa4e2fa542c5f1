"""A durable queue of groups: admitted, finished, leased to a training step, trained on.

    admit ──> open ──finish──> finished ──lease──> leased to a step ──acknowledge──> trained
                └──discard────> discarded             └ the step is in a checkpoint ┘

The journal is one SQLite file in WAL mode. Each method is one transaction, which is durable when
the method returns. The rollouts of a group are in a separate file, which is complete before the
journal refers to it; the journal holds its path and its metrics. What an open group has rolled out
so far is kept in the journal itself (rollouts/open_group.py). With a lease, the outcomes of its
groups are recorded, from which the solve rates of tasks follow (curriculum.py).

A step leases its groups before the learner sees them and acknowledges them once the step is in a
checkpoint. After a crash the learner therefore resumes from its last checkpoint with the same
batches in the same order, and no group is in two batches.
"""

from __future__ import annotations

import json
import secrets
import sqlite3
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, TypeVar

import anyio

from agentloop.aio import in_run_thread
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RunFolderError
from agentloop.plain_json import JsonObject, dumps, loads
from agentloop.rollouts.metrics import GroupFigures
from agentloop.training.loop.curriculum import GroupOutcome
from agentloop.training.loop.open_groups import SCHEMA, OpenGroups, drop

_FORMAT = 3
_SCHEMA = f"""
CREATE TABLE groups (
    number INTEGER PRIMARY KEY,
    task TEXT NOT NULL,
    version INTEGER NOT NULL,
    state TEXT NOT NULL DEFAULT 'open'
        CHECK (state IN ('open', 'finished', 'discarded', 'leased', 'trained')),
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
CREATE TABLE outcomes (
    number INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    key TEXT NOT NULL,
    num_solved INTEGER NOT NULL,
    num_rollouts INTEGER NOT NULL,
    is_equal INTEGER NOT NULL
) STRICT;
PRAGMA user_version = {_FORMAT};
"""
_BUSY_S = 10.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """An admitted task.

    Attributes:
        number: Order of admission over the whole run, starting at 1.
        version: Version of the weights that were live at admission.
        path: File of its rollouts, relative to the run folder; None while the group is open.
        figures: Figures of the group, as passed to `finish`.
    """

    number: int
    task: Task
    version: int
    path: str | None = None
    num_bytes: int = 0
    figures: GroupFigures = field(default_factory=GroupFigures)


@dataclass(frozen=True, slots=True)
class StepNotes:
    """Notes that are needed to repeat a step, besides its groups.

    Attributes:
        version: version of the weights that the step starts from.
        stage: number of the stage.
        resets: whether the optimizer is reset before the step.
        learns: whether the step is trained on.
    """

    version: int
    stage: int = 1
    resets: bool = False
    learns: bool = True


@dataclass(frozen=True, slots=True)
class Lease:
    """The batch of a step, in order.

    Attributes:
        notes: Data needed to repeat the step.
        result: Result of the step, or None if it is unknown.
        replaced: Groups that were discarded since the previous step.
        outcomes: Outcomes of both, with the keys of their tasks' solve rates.
    """

    step: int
    groups: Sequence[QueuedGroup]
    notes: StepNotes
    result: Mapping[str, float | None] | None
    replaced: Sequence[QueuedGroup] = ()
    outcomes: Sequence[tuple[str, GroupOutcome]] = ()


class TaskCursor(TypedDict, total=False):
    """The positions after the task of the last admitted group.

    Attributes:
        tasks: position of the run's source, `TaskSource.cursor`.
        stage: number of the stage.
        num_drawn: number of tasks drawn from the stage's own.
        num_offered: `Curriculum.num_offered`.
    """

    tasks: JsonObject
    stage: int
    num_drawn: int
    num_offered: int


@dataclass(frozen=True, slots=True)
class StageNote:
    """The beginning of a stage.

    Attributes:
        step: the last step before it.
        tasks: the stage's own tasks; None: those of the source.
        last_group, cursor: number of the last group, and the cursor before it; None: there is none.
    """

    step: int
    tasks: Sequence[Task] | None
    last_group: int
    cursor: TaskCursor | None

    @classmethod
    def from_dict(cls, row: JsonObject) -> StageNote:
        tasks = None if row["tasks"] is None else [Task(**task) for task in row["tasks"]]
        return cls(row["step"], tasks, row["last_group"], row["cursor"])


class GroupQueue:
    """A queue of groups in an SQLite file; create it with `GroupQueue.open`.

    Transactions run one at a time in a worker thread. A cancelled method has either completed its
    transaction or done nothing.

    Attributes:
        rolled_out: what open groups have rolled out so far.
    """

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._lock = anyio.Lock()
        self._num_bytes = 0
        self.rolled_out = OpenGroups(self._transaction)

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path) -> AsyncIterator[GroupQueue]:
        """Open the file, creating it if necessary.

        Raises:
            RunFolderError: The file cannot be read or written, or was written by another
                version of agentloop.
        """
        connection = await in_run_thread(_connect, path)
        with closing(connection):
            queue = cls(connection, path)
            queue._num_bytes = await queue._transaction(_finished_bytes)
            try:
                async with anyio.create_task_group() as writing:
                    writing.start_soon(queue.rolled_out.write)
                    yield queue
                    writing.cancel_scope.cancel()
            except BaseExceptionGroup as group:  # of the one error that ended the block
                raise group.exceptions[0] from group.exceptions[0].__cause__

    @property
    def num_bytes(self) -> int:
        """Total size of the files of groups that are finished but not leased."""
        return self._num_bytes

    async def admit(self, task: Task, *, version: int, cursor: TaskCursor) -> QueuedGroup:
        """Admit the next group and record `cursor`, the positions after its task."""

        def work(db: sqlite3.Connection) -> QueuedGroup:
            row = (dumps(asdict(task)).decode(), version)  # fields of data sets may be dates
            number = db.execute("INSERT INTO groups (task, version) VALUES (?, ?)", row).lastrowid
            _note(db, "cursor", cursor)
            assert number is not None
            return QueuedGroup(number, task, version)

        return await self._transaction(work)

    async def finish(
        self, number: int, *, path: str | None, num_bytes: int, figures: GroupFigures
    ) -> None:
        """Mark a group as finished, with its rollouts in the file at `path`.

        Args:
            path: None if the task could not be run and has no rollouts.

        Raises:
            ValueError: The group is not open.
        """
        row = (path, num_bytes, _json(asdict(figures)), number)
        set_ = "state = 'finished', path = ?, num_bytes = ?, figures = ?"
        await self._transaction(partial(_end_group, set_, row))
        self._num_bytes += num_bytes

    async def discard(self, number: int, *, path: str | None, figures: GroupFigures) -> None:
        """Mark a group as one that will not be trained on.

        Raises:
            ValueError: The group is not open.
        """
        row = (path, _json(asdict(figures)), number)
        set_ = "state = 'discarded', path = ?, figures = ?"
        await self._transaction(partial(_end_group, set_, row))

    async def lease(
        self,
        step: int,
        numbers: Sequence[int],
        notes: StepNotes,
        *,
        rate_key: Callable[[Task], str] = lambda task: task.id,
    ) -> Lease:
        """Make these groups the batch of `step`, and record their outcomes.

        Args:
            rate_key: returns the key of a task's solve rate.

        Raises:
            ValueError: A group is not finished, or the step already has a batch.
        """

        def work(db: sqlite3.Connection) -> Lease:
            taken = "step = ?, place = ?, state = 'leased' WHERE state = 'finished' AND number = ?"
            for place, number in enumerate(numbers):
                _update_group(taken, (step, place, number), db)
            try:
                db.execute("INSERT INTO steps VALUES (?, ?, NULL)", (step, _json(asdict(notes))))
            except sqlite3.IntegrityError:
                raise ValueError(f"step {step} already has a batch") from None
            since = "state = 'discarded' AND step IS NULL"
            db.execute(f"UPDATE groups SET step = ? WHERE {since}", (step,))
            lease = _lease(db, step, notes, None)
            outcomes = [
                (rate_key(group.task), outcome)
                for group in (*lease.groups, *lease.replaced)
                if (outcome := GroupOutcome.of(group.figures)) is not None
            ]
            _add_outcomes(db, step, outcomes)
            return replace(lease, outcomes=outcomes)

        lease = await self._transaction(work)
        self._num_bytes -= sum(group.num_bytes for group in lease.groups)
        return lease

    async def record_result(self, step: int, result: Mapping[str, float | None]) -> None:
        """Record the result of a step that is not in a checkpoint yet."""

        def work(db: sqlite3.Connection) -> None:
            row = (_json(result), step)
            db.execute("UPDATE steps SET result = ? WHERE step = ?", row)

        await self._transaction(work)

    async def acknowledge(self, step: int) -> None:
        """Mark the groups of all steps up to `step` as trained: a checkpoint contains them."""

        def work(db: sqlite3.Connection) -> None:
            where = "state = 'leased' AND step <= ?"
            db.execute(f"UPDATE groups SET state = 'trained' WHERE {where}", (step,))

        await self._transaction(work)

    async def rewind(self, step: int) -> list[Lease]:
        """Return the batches after `step`, in order, for a learner that resumes from that step.

        Batches up to `step` become trained even if they were never acknowledged; later ones are
        leased again even if they were.
        """

        def work(db: sqlite3.Connection) -> list[Lease]:
            held = "state = 'leased' AND step <= ?"
            db.execute(f"UPDATE groups SET state = 'trained' WHERE {held}", (step,))
            where = "state = 'trained' AND step > ?"
            db.execute(f"UPDATE groups SET state = 'leased' WHERE {where}", (step,))
            steps = "SELECT step, notes, result FROM steps WHERE step > ? ORDER BY step"
            return [
                _lease(
                    db, number, StepNotes(**loads(notes)), None if result is None else loads(result)
                )
                for number, notes, result in db.execute(steps, (step,)).fetchall()
            ]

        return await self._transaction(work)

    async def begin_stage(
        self,
        number: int,
        *,
        step: int,
        tasks: Sequence[Task] | None,
        cursor: TaskCursor,
        outcomes: Sequence[tuple[str, GroupOutcome]] = (),
    ) -> StageNote:
        """Record that a stage begins after `step`; return the note about it.

        Args:
            number: Number of the stage.
            step: The last step before the stage.
            tasks: Tasks of the stage; None: those of the source.
            cursor: Positions before the stage's first task.
            outcomes: Outcomes of the groups that filtered the tasks, with their keys.
        """

        def work(db: sqlite3.Connection) -> StageNote:
            (last,) = db.execute("SELECT coalesce(max(number), 0) FROM groups").fetchone()
            stage = StageNote(step, tasks, last, _read_note(db, "cursor"))
            _note(db, f"stage {number}", asdict(stage))
            _note(db, "cursor", cursor)
            _add_outcomes(db, step, outcomes)
            return stage

        return await self._transaction(work)

    async def stage(self, number: int) -> StageNote | None:
        """Return the note about the beginning of a stage, or None if it has not begun."""
        row = await self.read_note(f"stage {number}")
        return None if row is None else StageNote.from_dict(row)

    async def undo(self, step: int) -> None:
        """Undo all steps after `step`: the weights that sampled their rollouts no longer exist.

        Groups of stages that continue become open again, including discarded ones. A
        stage that began after `step` starts over: its groups and those of later stages are deleted,
        and the task source returns to its position at the beginning of the stage.

        The files of these groups are recorded in the note `undone`, which the caller clears after
        moving them away.
        """

        def work(db: sqlite3.Connection) -> None:
            since = "(state IN ('leased', 'trained', 'discarded') AND coalesce(step > ?, TRUE))"
            undone_groups = f"state = 'finished' OR {since}"
            paths = db.execute(
                f"SELECT path FROM groups WHERE path NOT NULL AND ({undone_groups})", (step,)
            )
            undone = {
                "step": step,
                "name": f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
                "files": [path for (path,) in paths.fetchall()],
            }
            reopened = "state = 'open', step = NULL, place = NULL, path = NULL, figures = '{}'"
            db.execute(
                f"UPDATE groups SET {reopened}, num_bytes = 0 WHERE {undone_groups}", (step,)
            )
            db.execute("DELETE FROM kept")
            db.execute("DELETE FROM steps WHERE step > ?", (step,))
            db.execute("DELETE FROM outcomes WHERE step > ?", (step,))
            digests = "key LIKE 'weights %' AND CAST(substr(key, 9) AS INTEGER) > ?"
            db.execute(f"DELETE FROM notes WHERE {digests}", (step,))
            stages = db.execute("SELECT key, value FROM notes WHERE key LIKE 'stage %'").fetchall()
            # By their numbers: `stage 10` comes after `stage 9`.
            by_number = sorted(stages, key=lambda row: int(row[0].split()[1]), reverse=True)
            for key, value in by_number:
                stage = StageNote.from_dict(loads(value))
                if stage.step > step:
                    db.execute("DELETE FROM notes WHERE key = ?", (key,))
                    db.execute("DELETE FROM groups WHERE number > ?", (stage.last_group,))
                    _note(db, "cursor", stage.cursor)
            _note(db, "undone", undone)

        await self._transaction(work)
        self._num_bytes = 0

    async def open_groups(self) -> list[QueuedGroup]:
        """Return the groups to roll out after a restart: neither finished nor discarded."""
        return await self._transaction(lambda db: _groups(db, "state = 'open' ORDER BY number", ()))

    async def finished_groups(self) -> list[QueuedGroup]:
        """Return the groups that are finished and not in a batch."""
        return await self._transaction(
            lambda db: _groups(db, "state = 'finished' ORDER BY number", ())
        )

    async def outcomes(self) -> list[tuple[str, GroupOutcome]]:
        """Return all outcomes with their keys, in the order in which they were recorded."""
        query = "SELECT key, num_solved, num_rollouts, is_equal FROM outcomes ORDER BY number"

        def work(db: sqlite3.Connection) -> list[tuple[str, GroupOutcome]]:
            rows = db.execute(query).fetchall()
            return [
                (key, GroupOutcome(solved, rollouts, bool(equal)))
                for key, solved, rollouts, equal in rows
            ]

        return await self._transaction(work)

    async def reopen(self, numbers: Sequence[int], *, version: int) -> None:
        """Mark groups as open again, to be rolled out anew with the weights of `version`."""

        def work(db: sqlite3.Connection) -> int:
            reopened = "state = 'open', version = ?, path = NULL, num_bytes = 0, figures = '{}'"
            where = "WHERE state IN ('open', 'finished') AND number = ?"
            for number in numbers:
                _update_group(f"{reopened} {where}", (version, number), db)
                drop(db, number)
            return _finished_bytes(db)

        self._num_bytes = await self._transaction(work)

    async def cursor(self) -> TaskCursor:
        """Return the last recorded cursor; empty: there is none."""
        cursor: TaskCursor | None = await self.read_note("cursor")
        return cursor or {}

    async def note(self, key: str, value: object) -> None:
        """Store `value` under `key`; None deletes the value."""
        await self._transaction(lambda db: _note(db, key, value))

    async def read_note(self, key: str) -> Any:
        """Return the value stored under `key`, such as `stage 1`, or None."""
        return await self._transaction(lambda db: _read_note(db, key))

    async def counts(self) -> dict[str, int]:
        """Return the number of groups in each state."""
        query = "SELECT state, count(*) FROM groups GROUP BY state"
        return await self._transaction(lambda db: dict(db.execute(query).fetchall()))

    async def _transaction(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run `work` in a transaction.

        Raises:
            RunFolderError: The disk is full, the file is damaged, or SQLite failed otherwise.
        """

        def transact() -> T:
            with self._connection:
                self._connection.execute("BEGIN IMMEDIATE")
                return work(self._connection)

        async with self._lock:  # no deadline: each transaction has one, _BUSY_S
            try:  # takes milliseconds, at most _BUSY_S; cancellation waits for it
                return await in_run_thread(transact)
            except (sqlite3.Error, zlib.error, json.JSONDecodeError) as error:
                raise RunFolderError(f"run.folder: {self._path}: {error}") from error


def copy_journal(source: Path, target: Path) -> None:
    """Copy a journal to a new file, without writing to it; a run may be using it.

    Raises:
        RunFolderError: it is missing or damaged, or the copy cannot be written.
    """
    if not source.is_file():
        raise RunFolderError(f"{source}: there is no such journal")
    try:
        with (
            closing(sqlite3.connect(f"{source.absolute().as_uri()}?mode=ro", uri=True)) as journal,
            closing(sqlite3.connect(target)) as copy,
        ):
            journal.backup(copy)
    except sqlite3.Error as error:
        raise RunFolderError(f"run.folder: {source}: {error}") from error


def _connect(path: Path) -> sqlite3.Connection:
    try:
        connection = sqlite3.connect(
            path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")  # survive a power cut
            (format_,) = connection.execute("PRAGMA user_version").fetchone()
            if not format_:
                connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} COMMIT;")
            elif format_ != _FORMAT:
                raise RunFolderError(
                    f"{path}: written by another version of agentloop (format {format_}, not "
                    f"{_FORMAT}): finish the run with that version, or start a new one"
                )
            connection.executescript(f"BEGIN IMMEDIATE; {SCHEMA} COMMIT;")
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise RunFolderError(f"run.folder: {path}: {error}") from error
    return connection


def _update_group(update: str, row: Sequence[object], db: sqlite3.Connection) -> None:
    """Update one group, whose number is last in `row`.

    Raises:
        ValueError: The group is in another state.
    """
    if db.execute(f"UPDATE groups SET {update}", row).rowcount != 1:
        state = db.execute("SELECT state FROM groups WHERE number = ?", row[-1:]).fetchone()
        raise ValueError(f"group {row[-1]} is {state[0] if state else 'not there'}")


def _end_group(set_: str, row: Sequence[object], db: sqlite3.Connection) -> None:
    """Update an open group, whose number is last in `row`. Raises ValueError if it is not open."""
    _update_group(f"{set_} WHERE state = 'open' AND number = ?", row, db)
    drop(db, row[-1])


def _note(db: sqlite3.Connection, key: str, value: object) -> None:
    row = (key, dumps(value).decode())  # a stage's tasks may have dates
    db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", row)


def _read_note(db: sqlite3.Connection, key: str) -> Any:
    row = db.execute("SELECT value FROM notes WHERE key = ?", (key,)).fetchone()
    return None if row is None else loads(row[0])


def _add_outcomes(
    db: sqlite3.Connection, step: int, outcomes: Sequence[tuple[str, GroupOutcome]]
) -> None:
    rows = [
        (step, key, outcome.num_solved, outcome.num_rollouts, int(outcome.is_equal))
        for key, outcome in outcomes
    ]
    columns = "step, key, num_solved, num_rollouts, is_equal"
    db.executemany(f"INSERT INTO outcomes ({columns}) VALUES (?, ?, ?, ?, ?)", rows)


def _json(value: object) -> str:
    """Serialize figures. Raises TypeError if they are no plain data: no number becomes text."""
    return dumps(value, default=None).decode()


def _groups(db: sqlite3.Connection, where: str, row: Sequence[object]) -> list[QueuedGroup]:
    columns = "number, task, version, path, num_bytes, figures"
    rows = db.execute(f"SELECT {columns} FROM groups WHERE {where}", row).fetchall()
    return [
        QueuedGroup(
            number,
            Task(**loads(task)),
            version,
            path,
            num_bytes,
            GroupFigures.from_dict(loads(figures)),
        )
        for number, task, version, path, num_bytes, figures in rows
    ]


def _lease(
    db: sqlite3.Connection, step: int, notes: StepNotes, result: Mapping[str, float | None] | None
) -> Lease:
    batch = _groups(db, "step = ? AND state != 'discarded' ORDER BY place", (step,))
    replaced = _groups(db, "step = ? AND state = 'discarded' ORDER BY number", (step,))
    return Lease(step, batch, notes, result, replaced)


def _finished_bytes(db: sqlite3.Connection) -> int:
    query = "SELECT coalesce(sum(num_bytes), 0) FROM groups WHERE state = 'finished'"
    return int(db.execute(query).fetchone()[0])
