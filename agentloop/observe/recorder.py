"""Keep what a service has answered, in the format of a training run.

    a session that is closed ──a row for each branch──┐
    an answer of the agent ──a row for each choice────┴─queue, thread──> trajectories/group-*.jsonl

A group's file appears complete or not at all. The service never waits for the disk: groups that it
is too slow or too full for are dropped, counted and logged.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, Self

import anyio
import anyio.to_thread

from agentloop.agent.sessions.tree import Branch
from agentloop.aio import Signal, task_group
from agentloop.errors import message_of
from agentloop.events import Event
from agentloop.observe.exporters.drop_counter import DropCounter
from agentloop.rollouts.record import ConversationRow
from agentloop.trajectory import Trajectory

_MAX_WAITING_TOKENS = 4_000_000  # some 300 MB
_MAX_WAITING_GROUPS = 65_536
_CLOSE_S = 30.0
_MAX_TITLE = 80  # characters of a question
_FILES = "group-*.jsonl"


class GroupFolder(Protocol):
    """The folder of a run, such as `RunFolder`."""

    path: Path

    def add_group(self, number: int, rows: Iterable[Mapping[str, object]]) -> tuple[str, int]:
        """Write a group's rows atomically; return the file's path in the folder, and its size."""
        ...


@dataclass(frozen=True, slots=True)
class _Group:
    name: str
    model: str
    is_session: bool
    rollouts: Sequence[Branch]
    num_tokens: int


class Recorder:
    """Writes groups of rollouts to a folder while it is `running` (`Exporter`)."""

    def __init__(
        self,
        folder: GroupFolder | None,
        question_of: Callable[[Sequence[int]], str],
        *,
        agent: str,
        model: str,
        max_bytes: int,
    ) -> None:
        """
        Args:
            folder: where groups are written; None: nowhere.
            question_of: returns the question in a prompt's ids.
            agent: the name of the agent.
            model: the name of the bare model, which sessions ask.
            max_bytes: size of all files of groups above which the oldest are deleted.
        """
        self._folder = folder
        self._question_of = question_of
        self._agent, self._model = agent, model
        self._max_bytes = max_bytes
        self._files: deque[tuple[Path, int]] = deque()
        self._num_bytes = 0
        self._next = 1
        self._waiting: deque[_Group] = deque()
        self._num_waiting_tokens = 0
        self._added = Signal()
        self._is_closing = False
        self._ended = anyio.Event()  # all groups are written
        self._writing = anyio.CancelScope(shield=True)  # goes on until `running` ends it
        self._dropped = DropCounter("recorded groups")

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Self]:
        """Write groups in the background; on leaving, write the rest within 30 seconds."""
        if self._folder is None:
            yield self
            return
        await anyio.to_thread.run_sync(self._find_files, self._folder)
        async with task_group() as tasks:
            tasks.start_soon(self._keep_writing, self._folder)
            try:
                yield self
            finally:
                self._is_closing = True
                self._added.notify()
                with anyio.move_on_after(_CLOSE_S, shield=True):
                    await self._ended.wait()
                self._writing.cancel()
                if num_left := len(self._waiting):
                    self._dropped.add(num_left, f"not written within {_CLOSE_S:g} s at the end")
                self._dropped.report()

    @property
    def num_dropped(self) -> int:
        """Number of groups that were not written."""
        return self._dropped.num

    def on_event(self, event: Event) -> None:
        """Do nothing: groups come through `add` and `add_session`."""

    def add(self, *rollouts: Trajectory, question: str = "") -> None:
        """Record rollouts of the agent that have the same prompt; they must not change any more.

        Args:
            question: the user's last message; empty: the last one of the prompt.
        """
        if rollouts:
            recorded = [Branch(rollout, question=question) for rollout in rollouts]
            self._add(rollouts[0].id, recorded, is_session=False)

    def add_session(self, name: str, branches: Sequence[Branch]) -> None:
        """Record the branches of a session that was closed."""
        sampled = [branch for branch in branches if branch.record.turns]
        self._add(name, sampled, is_session=True)

    def _add(self, name: str, rollouts: Sequence[Branch], *, is_session: bool) -> None:
        if self._folder is None or not rollouts:
            return
        records = [rollout.record for rollout in rollouts]
        num_tokens = sum(len(record.prompt_ids) + record.num_response_tokens for record in records)
        is_full = self._num_waiting_tokens + num_tokens > _MAX_WAITING_TOKENS
        if self._waiting and (is_full or len(self._waiting) >= _MAX_WAITING_GROUPS):
            self._dropped.add(1, f"{len(self._waiting)} groups are already queued")
            return
        model = self._model if is_session else self._agent
        self._waiting.append(_Group(name, model, is_session, rollouts, num_tokens))
        self._num_waiting_tokens += num_tokens
        self._added.notify()

    async def _keep_writing(self, folder: GroupFolder) -> None:
        with self._writing:
            while self._waiting or not self._is_closing:
                if self._waiting:
                    await self._write_next(folder)
                else:
                    await self._added.wait()  # no deadline: until `running` ends
        self._ended.set()

    async def _write_next(self, folder: GroupFolder) -> None:
        group = self._waiting[0]
        try:
            await anyio.to_thread.run_sync(self._write, folder, group, abandon_on_cancel=True)
        except Exception as error:  # such as a full disk: the service goes on
            self._dropped.add(1, message_of(error) or type(error).__name__)
        self._waiting.popleft()
        self._num_waiting_tokens -= group.num_tokens

    # --- in the thread ----------------------------------------------------------------------------

    def _find_files(self, folder: GroupFolder) -> None:
        """Go on after the groups of earlier services."""
        for path in sorted((folder.path / "trajectories").glob(_FILES)):
            with suppress(OSError, ValueError):
                number = int(path.stem.removeprefix("group-"))
                self._remember(path, path.stat().st_size)
                self._next = max(self._next, number + 1)

    def _write(self, folder: GroupFolder, group: _Group) -> None:
        number, self._next = self._next, self._next + 1
        rows = (self._row(number, group, index) for index in range(len(group.rollouts)))
        name, size = folder.add_group(number, rows)
        self._remember(folder.path / name, size)
        while self._num_bytes > self._max_bytes and len(self._files) > 1:
            oldest, size = self._files.popleft()
            self._num_bytes -= size
            with suppress(OSError):  # someone else has deleted it
                oldest.unlink()

    def _remember(self, path: Path, size: int) -> None:
        self._files.append((path, size))
        self._num_bytes += size

    def _row(self, number: int, group: _Group, index: int) -> dict[str, object]:
        rollout = group.rollouts[index]
        record = rollout.record
        name = f"{number}-{group.name}"
        ids = {member.record.id: f"{name}.{i}" for i, member in enumerate(group.rollouts)}
        question = rollout.question or self._question_of(record.prompt_ids)
        conversation = ConversationRow(
            rollout=index,
            answer=record.answer or None,
            trajectory=replace(record, id=ids[record.id]),
        )
        return {
            "group": number,
            "title": _title(question),
            "question": question,
            "model": group.model,
            "session": group.name if group.is_session else None,
            "served_id": record.id,
            "branch": rollout.reason,
            "parent": None if rollout.parent is None else ids.get(rollout.parent),
            **conversation.to_dict(),
        }


def _title(question: str) -> str:
    """Return the beginning of a question, in one line."""
    line = re.sub(r"\s+", " ", question[: 4 * _MAX_TITLE]).strip()
    return line if len(line) <= _MAX_TITLE else f"{line[: _MAX_TITLE - 3]}..."
