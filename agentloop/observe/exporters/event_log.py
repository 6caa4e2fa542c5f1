"""Write events to `events.jsonl` in a run's folder.

    events ──seen──> queued lines, bounded ──every half second, in a thread──> events.jsonl
                                                  when full: renamed to events.old.jsonl ─┘

There is a line for each event of a rollout, turn, call, group, reward, metrics row or weight sync,
but no tokens, and no text except the answer. The keys are `t` (Unix time in seconds), `event`, and
those of the event; `rollout` is a rollout's id, and its times are seconds since its start.

Lines that the disk is too slow or too full for are dropped and logged; once there is space again, a
line `dropped` records their number. The run continues.

A kill may lose the last half second. A disk that hangs is not handled.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import fields
from pathlib import Path

import anyio
import anyio.to_thread
import pydantic

from agentloop.aio import task_group
from agentloop.events import (
    CallFinished,
    CallStarted,
    ClientAwaited,
    Event,
    GroupStarted,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
)
from agentloop.observe.exporters.drop_counter import DropCounter
from agentloop.plain_json import JsonObject, dumps, loads

_NEW, _OLD = "events.jsonl", "events.old.jsonl"
_CLOSE_S = 5.0
_MAX_TEXT = 500  # characters of an answer, a reason or a tool name
_KEYS = {"rollout_id": "rollout"}  # of fields of events, where they differ
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")

Line = dict[str, object]


class EventLogSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """The event log of a run."""

    max_mib: int = pydantic.Field(
        512,
        ge=0,
        description="Maximum size of events.jsonl in the run's folder, which has the events of the "
        "run; when it is reached, the older half is deleted. 0: no event log.",
    )

    @property
    def enabled(self) -> bool:
        return self.max_mib > 0


class EventLog:
    """The event log of a run; pass every event to `on_event`. Create it with `EventLog.open`."""

    EVERY_S = 0.5  # between writes; a kill may lose this much
    MAX_WAITING = 65_536  # lines; more are dropped and counted

    def __init__(self, folder: Path, settings: EventLogSettings | None = None) -> None:
        self._settings = settings or EventLogSettings()
        self._file = _File(folder, self._settings.max_mib * 2**20 // 2)
        self._waiting: list[Line] = []
        self._num_unrecorded = 0  # dropped lines that the file does not mention yet
        self._dropped = DropCounter(f"events of {self._file.path}")

    @classmethod
    @asynccontextmanager
    async def open(
        cls, folder: Path, settings: EventLogSettings | None = None
    ) -> AsyncIterator[EventLog]:
        """Open the log, appending to an existing file; on leaving, write the rest within 5 seconds.

        Lines that cannot be written are dropped and logged; no error is raised.
        """
        event_log = cls(folder, settings)
        event_log._add("opened", {})
        try:
            async with task_group() as tasks:
                if event_log._settings.enabled:
                    tasks.start_soon(event_log._keep_writing)
                yield event_log
                tasks.cancel_scope.cancel()
        finally:
            num_left = len(event_log._waiting)
            with anyio.move_on_after(_CLOSE_S, shield=True) as late:
                await event_log._write(abandon=True)
            if late.cancelled_caught:
                event_log._drop(num_left, f"not written within {_CLOSE_S:g} s at the end")
            event_log._dropped.report()

    @property
    def num_dropped(self) -> int:
        """Number of lines dropped since the log was opened."""
        return self._dropped.num

    def on_event(self, event: Event) -> None:
        if (entry := _line_of(event)) is not None:
            self._add(*entry)

    def _add(self, name: str, line: Line) -> None:
        if not self._settings.enabled:
            return
        if len(self._waiting) >= self.MAX_WAITING:
            self._drop(1, f"{self.MAX_WAITING} lines are already queued")
            return
        self._waiting.append({"t": time.time(), "event": name, **line})

    def _drop(self, num: int, reason: str) -> None:
        self._num_unrecorded += num
        self._dropped.add(num, reason)

    async def _keep_writing(self) -> None:
        while True:
            await anyio.sleep(self.EVERY_S)
            await self._write()

    async def _write(self, *, abandon: bool = False) -> None:
        lines, self._waiting = self._waiting, []
        num_unrecorded, self._num_unrecorded = self._num_unrecorded, 0
        if num_unrecorded:
            lines.append({"t": time.time(), "event": "dropped", "num": num_unrecorded})
        if not lines:
            return
        try:
            await anyio.to_thread.run_sync(self._file.write, lines, abandon_on_cancel=abandon)
        except OSError as error:
            self._num_unrecorded += num_unrecorded  # the `dropped` line was not written either
            self._drop(len(lines) - bool(num_unrecorded), error.strerror or str(error))


class _File:
    """The file of the log, written by one thread at a time; other processes may read it."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.path = folder / _NEW
        self._max_bytes = max_bytes

    def write(self, lines: Sequence[Line]) -> None:
        """Append lines and rotate the file if it is full.

        Raises:
            OSError: The lines could not all be written; the last one may be cut short.
        """
        data = b"".join(dumps(line) + b"\n" for line in lines)
        file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(file).st_size
            # The last line was cut short by a kill.
            if size and os.pread(file, 1, size - 1) != b"\n":
                data = b"\n" + data
            size += len(data)
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)
        if size > self._max_bytes:
            self.path.replace(self.path.with_name(_OLD))


def read_events(folder: Path) -> Iterator[JsonObject]:
    """Yield the events of the run in `folder`, oldest first, skipping lines that were cut short.

    Raises:
        OSError: A file cannot be read.
    """
    with ExitStack() as stack:
        files = []
        for name in (_NEW, _OLD):  # in this order, so that a concurrent rename loses no lines
            with suppress(FileNotFoundError):
                files.append(stack.enter_context((folder / name).open("rb")))
        if len({os.fstat(file.fileno()).st_ino for file in files}) < len(files):
            files.pop()
        for file in reversed(files):
            for data in file:
                with suppress(ValueError):
                    line = loads(data)
                    if isinstance(line, dict) and "event" in line:
                        yield line


def _line_of(event: Event) -> tuple[str, Line] | None:
    """Return the name and the values of an event's line, or None for events that are omitted."""
    match event:
        case TokensSampled() | TurnStarted() | TurnSampled() | CallStarted() | ClientAwaited():
            return None  # too many, or repeated when a turn or call finishes
        case RolloutStarted(record=record):
            line: Line = {
                "rollout": record.id,
                "group": event.group,
                "created_unix_s": record.created_unix_s,
                "num_prompt_tokens": len(record.prompt_ids),
            }
        case TurnPlaced():
            line = {
                "rollout": event.rollout_id,
                "turn": event.turn,
                "server": event.server,
                "reason": event.reason,
            }
        case CallFinished(result=result):
            line = {
                "rollout": event.rollout_id,
                "turn": event.turn,
                "call": result.call_id,
                "name": result.name[:_MAX_TEXT],
                "status": result.status,
                "dispatched_s": result.dispatched_s,
                "started_s": result.started_s,
                "ended_s": result.ended_s,
            }
        case TurnFinished(record=turn):
            line = {
                "rollout": event.rollout_id,
                "turn": event.turn,
                "end": turn.end,
                "num_tokens": len(turn.output_ids),
                "num_cached_tokens": turn.cached_tokens,
                "num_calls": len(turn.calls),
                "servers": list(turn.servers),
                "versions": list({span.version: None for span in turn.versions}),
                "started_s": turn.started_s,
                "first_token_s": turn.first_token_s,
                "generated_s": turn.generated_s,
                "ended_s": turn.ended_s,
            }
        case RolloutFinished(trajectory=trajectory, num_tokens=num_tokens):
            if num_tokens is None and trajectory.has_ids:
                num_tokens = trajectory.num_sampled_tokens
            line = {
                "rollout": event.rollout_id,
                "stop_reason": trajectory.stop_reason,
                "error": trajectory.error and trajectory.error[:_MAX_TEXT],
                "num_turns": len(trajectory.turns),
                "num_tokens": num_tokens,
                "elapsed_s": trajectory.elapsed_s,
            }
        case GroupStarted():
            line = {"group": event.group, "task": event.task_id, "size": event.size}
        case _:
            line = {
                _KEYS.get(item.name, item.name): _plain(getattr(event, item.name))
                for item in fields(event)
            }
    return _CAPITAL.sub("_", type(event).__name__).lower(), line


def _plain(value: object) -> object:
    """Return a copy, which nobody changes until it is written, of a field of an event."""
    if isinstance(value, str):
        return value[:_MAX_TEXT]
    if isinstance(value, Mapping):
        return dict(value)
    return [*value] if isinstance(value, Sequence) else value
