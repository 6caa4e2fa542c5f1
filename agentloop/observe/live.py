"""Live updates for the page: the board twice a second, and single rollouts as they grow.

    events ──> Board ──tick──> a frame, encoded once ──ring──> every reader, at its own pace
    rollout ──> its record ──a reader's own position──> the part that the reader has not seen

A reader that is too slow for the ring gets the whole state again and the number of frames that it
missed; readers never block anything, and nothing is buffered per reader. No frames are made without
readers.
"""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import anyio

from agentloop.agent.chat_format import ChatFormat
from agentloop.aio import Signal
from agentloop.errors import NotThere
from agentloop.inference.cpu import has_accelerator
from agentloop.inference.replicas import ServerView
from agentloop.observe.board import Board
from agentloop.observe.bottleneck import ServedOn, served_on
from agentloop.observe.frames import BoardFrame, GroupDetails, HistoryPoint
from agentloop.observe.record import RecordReader
from agentloop.observe.runs import curves, runs_beside
from agentloop.observe.stalls import Stalls
from agentloop.plain_json import dumps, loads, number_of
from agentloop.trajectory import Trajectory

log = logging.getLogger(__name__)

_EVERY_S = 0.5
_DELTA_EVERY_S = 0.1
_MAX_FRAMES = 64
_MAX_ROWS = 500  # in one frame, which takes some milliseconds of the event loop
_MAX_WAITS = 50
_GOODBYE_S = 10.0
_MAX_DIGITS = 18  # of a valid frame id
_POINT_EVERY_S = 5.0
_QUESTION_TOKENS = 2048  # at the end of a prompt, in which a question is looked for
_MAX_POINTS = 720  # an hour
_SHOWN_OVER_TIME = (
    "tokens_per_s",
    "calls_per_s",
    "in_flight",
    "num_waiting",
    "groups_open",
    "queue_groups",
    "staleness",
    "refusals",
    "loop_lag_ms",
)


@dataclass(frozen=True, slots=True)
class Sources:
    """Functions and data to query for each frame, in addition to events; they must not block."""

    about: Mapping[str, object]
    chat: Callable[[], ChatFormat | None] = lambda: None
    servers: Callable[[], Sequence[ServerView]] = tuple
    num_waiting: Callable[[], int] = lambda: 0
    sandbox: Callable[[], Mapping[str, object]] = dict
    served_on: Callable[[], ServedOn] = lambda: ServedOn.UNKNOWN
    # Further values, such as a training run's progress.
    more: Callable[[], Mapping[str, object]] = dict
    folder: Path | None = None  # the run's
    read_rollout: Callable[[str], Awaitable[Mapping[str, object] | None]] | None = None
    """Reads a rollout from disk, if it was dropped from memory or ran on another machine."""
    read_group: Callable[[str], Awaitable[GroupDetails | None]] | None = None


class _Frame(NamedTuple):
    rev: int
    data: bytes


@dataclass
class Live:
    """Live data for the page; implements `PageData`. Run `run`, and pass events to the board."""

    board: Board
    stalls: Stalls
    sources: Sources
    every_s: float = _EVERY_S
    life: str = field(default_factory=lambda: secrets.token_hex(4))
    num_readers: int = 0
    _rev: int = 0
    _lag_s: float = 0.0  # delay of the last tick
    _frames: deque[_Frame] = field(default_factory=lambda: deque(maxlen=_MAX_FRAMES))
    _ticked: Signal = field(default_factory=Signal)
    _spent: Mapping[str, object] = field(default_factory=dict)  # not changed after the end
    _latency: Mapping[str, object] = field(default_factory=dict)  # alike
    _ended: dict[str, str] | None = None
    _ended_rev: int = 0
    # What a reader who comes later sees of the last hour.
    _points: deque[HistoryPoint] = field(default_factory=lambda: deque(maxlen=_MAX_POINTS))
    _states: dict[str, tuple[str, float]] = field(default_factory=dict)  # of servers, since when
    _served: Mapping[str, int] = field(default_factory=dict)  # tokens by server, at the last point

    # Set when the last reader leaves after the end.
    _all_left: anyio.Event = field(default_factory=anyio.Event)

    def __post_init__(self) -> None:
        self.board.question_of = self._question_of

    def _question_of(self, record: Trajectory) -> str:
        """Return the end of a rollout's prompt as text: the user's last message, if it is short."""
        for message in reversed(record.messages):
            if message.get("role") == "user":
                return str(message.get("content") or "")
        chat = self.sources.chat() if record.prompt_ids else None
        return "" if chat is None else chat.last_user_text(record.prompt_ids[-_QUESTION_TOKENS:])

    async def run(self) -> None:
        """Tick until cancelled."""
        while True:
            begun_s = time.monotonic()
            await anyio.sleep(self.every_s)
            # The event loop may wake up early, by its clock's resolution.
            self._lag_s = max(0.0, time.monotonic() - begun_s - self.every_s)
            try:
                self.tick()
            except Exception:  # an error of the page must not end the run
                log.exception("the page could not be updated")

    def tick(self) -> None:
        self.board.tick()
        self._rev += 1
        point = self._next_point() if self._ended is None else None
        if not self.num_readers:
            self.board.skip()
            self._frames.clear()
            return
        frame = {**self._head(full=False), **self._moment(), **self.board.take(_MAX_ROWS)}
        if point is not None:
            frame["history"] = [point]
        self._frames.append(_Frame(self._rev, dumps(frame)))
        self._ticked.notify()

    async def end(
        self, state: Literal["finished", "drained", "stopped", "failed"], text: str
    ) -> None:
        """Tell every reader that the run has ended, and why; this ends their streams.

        Waits up to five seconds for readers to finish, even if cancelled.
        """
        self._ended = {"state": state, "text": text}
        self.tick()
        self._ended_rev = self._rev
        if self.num_readers:
            with anyio.move_on_after(_GOODBYE_S, shield=True):
                await self._all_left.wait()

    async def frames(self, last_id: str | None = None) -> AsyncGenerator[tuple[str, bytes]]:
        """Yield pairs of id and frame until the end.

        Args:
            last_id: Id of the last frame that the reader received on an earlier connection.
        """
        self.num_readers += 1
        try:
            rev = self._resume_rev(last_id)
            missed = 0
            while True:
                if rev is None:
                    rev = self._rev
                    last = b""
                    async for frame in self._all(missed, taken=True):  # no deadline: reads memory
                        if last:  # without an id, since a reader cannot resume from here
                            yield "", last
                        last = frame
                    yield self._id(rev), last
                # Iterate over a copy: frames may be added while a reader takes one.
                for update in [frame for frame in self._frames if frame.rev > rev]:
                    if update.rev > rev + 1:  # the ring has dropped the next frame
                        break
                    rev = update.rev
                    yield self._id(rev), update.data
                if self._frames and self._frames[0].rev > rev + 1:
                    missed, rev = self._rev - rev, None
                    continue
                if self._ended is not None and rev >= self._ended_rev:
                    return
                if self._rev == rev:
                    await self._ticked.wait()  # no deadline: until the next tick, or it leaves
        finally:
            self.num_readers -= 1
            if self._ended is not None and not self.num_readers:
                self._all_left.set()

    async def frame(self) -> BoardFrame:
        """Return the whole state in one frame."""
        # no deadline: reads memory only
        parts: list[BoardFrame] = [loads(part) async for part in self._all(0, taken=False)]
        return {
            **parts[0],
            "rollouts": [row for part in parts for row in part.get("rollouts", ())],
            "steps": [row for part in parts for row in part.get("steps", ())],
        }

    async def rollout(self, key: str) -> Mapping[str, object]:
        row = self.board.rows.get(key)
        if row is not None and row.record is not None:
            reader = RecordReader(row.record, self.sources.chat(), row.verdict)
            return await anyio.to_thread.run_sync(reader.whole)
        rollout = None
        if self.sources.read_rollout is not None:
            rollout = await self.sources.read_rollout(key)
        if rollout is None:
            raise NotThere(f"rollout {key!r}: not found (only the newest rollouts are kept)")
        return rollout

    async def rollout_events(self, key: str) -> AsyncGenerator[tuple[str, Mapping[str, object]]]:
        row = self.board.rows.get(key)
        if row is None or row.record is None:
            yield "end", await self.rollout(key)
            return
        reader = RecordReader(row.record, self.sources.chat(), row.verdict)
        yield "trajectory", await anyio.to_thread.run_sync(reader.whole)
        # Stop if a new rollout with the same id replaces this one.
        while row.state == "live" and self.board.rows.get(key) is row:
            await anyio.sleep(_DELTA_EVERY_S)
            delta = await anyio.to_thread.run_sync(reader.delta)
            if delta is not None:
                yield "delta", delta
        yield "end", await anyio.to_thread.run_sync(reader.whole)

    async def group(self, name: str) -> GroupDetails:
        group, rows = self.board.groups.get(name), self.board.rows
        if self.sources.read_group is not None and (
            group is None or (group.end is not None and not group.members.keys() <= rows.keys())
        ):
            stored = await self.sources.read_group(name)
            if stored is not None:
                return stored
        if (details := self.board.group_details(name)) is None:
            raise NotThere(f"group {name!r}: not found (only the newest groups are kept)")
        return details

    async def runs(self) -> Sequence[Mapping[str, object]]:
        if self.sources.folder is None:
            return []
        return await anyio.to_thread.run_sync(runs_beside, self.sources.folder)

    async def curves(self, run: str) -> Mapping[str, object]:
        if self.sources.folder is None:
            raise NotThere(f"run {run!r}: not found")
        return await anyio.to_thread.run_sync(curves, self.sources.folder, run)

    # --- frames -----------------------------------------------------------------------------------

    async def _all(self, missed: int, *, taken: bool) -> AsyncIterator[bytes]:
        """Yield the whole state in slices, to let other tasks run in between."""
        about = {**self.sources.about, "t0": self.board.t0, "live": True}
        head: BoardFrame = {
            **self._head(full=True),
            "missed": missed,
            "about": about,
            "history": [*self._points],
            **self._moment(),
        }
        for slice_ in self.board.all(_MAX_ROWS, taken=taken):
            yield dumps({**head, **slice_})
            head = self._head(full=False)
            await anyio.lowlevel.checkpoint()

    def _head(self, *, full: bool) -> BoardFrame:
        return {"rev": self._rev, "t": round(time.time(), 3), "full": full}

    def _next_point(self) -> HistoryPoint | None:
        """Remember the values of this moment, if the last point is old enough."""
        now_s, views = time.time(), self.sources.servers()
        before = self._states
        self._states = {
            view.url: before[view.url]
            if view.url in before and before[view.url][0] == str(view.state)
            else (str(view.state), now_s)
            for view in views
        }
        passed_s = now_s - self._points[-1]["t"] if self._points else math.inf
        if 0 <= passed_s < _POINT_EVERY_S:
            return None
        passed_s = max(passed_s, _POINT_EVERY_S)  # the clock may go backwards
        values, sandbox = self._values(), self.sources.sandbox()
        shown = {name: number_of(values.get(name)) for name in _SHOWN_OVER_TIME}
        shown |= {f"sandbox_{name}": number_of(sandbox.get(name)) for name in ("busy", "waiting")}
        served, self._served = self._served, dict(self.board.server_tokens)
        point: HistoryPoint = {
            "t": math.floor(10 * now_s) / 10,
            "now": {name: value for name, value in shown.items() if value is not None},
            "servers": {
                view.url: [
                    round((self._served.get(view.url, 0) - served.get(view.url, 0)) / passed_s, 1),
                    view.num_running,
                    view.num_held_tokens + view.num_reserved_tokens,
                    view.num_parked_tokens,
                    view.num_cached_tokens,
                ]
                for view in views
            },
        }
        self._points.append(point)
        return point

    def _values(self) -> dict[str, object]:
        return {
            **self.board.now(),
            "raised": [*self.board.raised.values()],
            "num_waiting": self.sources.num_waiting(),
            "no_progress_s": round(self.stalls.no_progress_s, 1),
            "loop_lag_ms": round(1000 * self._lag_s, 1),
            **self.sources.more(),
        }

    def _moment(self) -> BoardFrame:
        s = self.sources
        waits = [
            {"who": wait.rollout_id, "what": wait.what, "waited_s": round(wait.waited_s, 2)}
            for wait in self.stalls.waits(_MAX_WAITS)
        ]
        values = self._values()
        sandbox = {**s.sandbox(), **self.board.tools()}
        if self._ended is None:
            spent = self.board.spent(queued_share=_queued_share(sandbox))
            self._spent = spent.to_dict(s.served_on(), has_slots=sandbox.get("slots") != 0)
            self._latency = self.board.latency()
        values["spent"], values["latency"] = self._spent, self._latency
        if self._ended is not None:
            values["ended"] = self._ended
        return {
            "now": values,
            "waits": waits,
            "servers": [self._server(view) for view in s.servers()],
            "sandbox": sandbox,
        }

    def _server(self, view: ServerView) -> dict[str, object]:
        return {
            "url": view.url,
            "state": str(view.state),
            "since": self._states.get(view.url, ("", None))[1],
            "healthy": view.healthy,
            "reason": view.reason,
            "num_running": view.num_running,
            "held": view.num_held_tokens,
            "reserved": view.num_reserved_tokens,
            "parked": view.num_parked_tokens,
            "cached": view.num_cached_tokens,
            "others": view.num_others_tokens,
            "capacity": view.capacity_tokens,
            "version": view.weight_version,
            "cached_fraction": self.board.cached_fraction(view.url),
        }

    def _id(self, rev: int) -> str:
        return f"{self.life}-{rev}"

    def _resume_rev(self, last_id: str | None) -> int | None:
        """Return the revision to resume from, or None if the whole state must be sent."""
        life, _, rev = (last_id or "").partition("-")
        if life != self.life or not rev.isdecimal() or len(rev) > _MAX_DIGITS:
            return None
        oldest = self._frames[0].rev if self._frames else self._rev + 1
        return int(rev) if oldest - 1 <= int(rev) <= self._rev else None


def served_here(servers: Sequence[str], device: str) -> ServedOn:
    """Return the hardware of the servers of a process that runs on this machine."""
    return served_on(servers, device, has_accelerator=has_accelerator())


def _queued_share(sandbox: Mapping[str, object]) -> float:
    """Return how many of the calls in the sandbox wait for a slot, of all that are there."""
    waiting, busy = (number_of(sandbox.get(name)) or 0 for name in ("waiting", "busy"))
    return waiting / (waiting + busy) if waiting else 0.0
