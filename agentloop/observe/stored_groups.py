"""Groups of rollouts in a run's folder, as events for the same board that a live run has.

    trajectories/group-*.jsonl ──read_group_file──> StoredRow ──events──> Board, a group each

Times are those of the records. When a rollout was scored is not recorded: it counts as scored when
it ended.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from agentloop.agent.chat_format import ChatFormat
from agentloop.events import (
    ClientAwaited,
    Event,
    GroupFinished,
    GroupStarted,
    RolloutFinished,
    RolloutScored,
    TurnFinished,
    events_of,
)
from agentloop.observe.board import Board
from agentloop.plain_json import JsonObject, loads
from agentloop.rollouts.record import ConversationRow
from agentloop.trajectory import Trajectory, rollout_of

DAMAGED = (KeyError, TypeError, ValueError, AttributeError)
"""What reading a line may raise that is damaged or from elsewhere."""

_MAX_DIGITS = 18  # of a group's number


class StoredRow(NamedTuple):
    """A line of a group's file.

    Attributes:
        more: the whole line, for what only an evaluation or a service writes, such as `title`.
    """

    conversation: ConversationRow
    more: JsonObject

    @property
    def record(self) -> Trajectory:
        return self.conversation.trajectory

    @property
    def group(self) -> str:
        """The name of its group."""
        return self.record.id.rpartition(".")[0] or str(self.more["group"])

    @property
    def title(self) -> str:
        return self.more.get("title") or self.conversation.task

    def question(self, chat: ChatFormat | None) -> str:
        if (question := self.more.get("question")) or chat is None:
            return question or ""
        try:
            return chat.last_user_text(self.record.prompt_ids)
        except (OverflowError, *DAMAGED):
            return ""


def group_path(folder: Path, number: int) -> Path:
    return folder / "trajectories" / f"group-{number:07}.jsonl"


def rows_of_group(folder: Path, group: str) -> list[StoredRow]:
    """Return the rows of a group; its name begins with its number."""
    number = group.partition("-")[0]
    if not number.isdecimal() or len(number) > _MAX_DIGITS:  # untrusted input must not form a path
        return []
    return [row for row in read_group_file(group_path(folder, int(number))) if row.group == group]


def read_group_file(path: Path) -> list[StoredRow]:
    """Return the rows of a group's file, without damaged ones."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    rows = []
    for line in lines:
        try:
            values = loads(line)
            row = StoredRow(ConversationRow.from_dict(values), values)
            board_of([row], None)
        except DAMAGED:
            continue
        rows.append(row)
    return rows


def board_of(rows: Sequence[StoredRow], chat: ChatFormat | None) -> Board:
    """Return a board with one group. Its times are Unix times, of rows in milliseconds."""
    now_s = 0.0
    board = Board(clock=lambda: now_s, max_ended=sys.maxsize, max_kept_tokens=sys.maxsize)
    for unix_s, event in _group_events(rows, chat):
        now_s = unix_s
        board.on_event(event)
    return board


def _group_events(
    rows: Sequence[StoredRow], chat: ChatFormat | None
) -> Iterator[tuple[float, Event]]:
    """Yield the events of a group, rollout by rollout, each with its time."""
    name, is_chosen = rows[0].group, _is_chosen(rows)
    rewards = {rollout_of(row.record.id): row.conversation.reward for row in rows}
    yield (
        min(row.record.created_unix_s for row in rows),
        GroupStarted(
            name,
            rows[0].title,
            rows[0].question(chat),
            rows[0].conversation.truth,
            len(rewards),
            is_chosen,
        ),
    )
    for row in rows:
        yield from _rollout_events(row, name)
    known = [reward for reward in rewards.values() if reward is not None]
    credit = {row.record.id: row.conversation.credit for row in rows}
    yield (
        max(row.record.created_unix_s + row.record.elapsed_s for row in rows),
        GroupFinished(
            name,
            kept={key: each.mean_advantage for key, each in credit.items() if each is not None},
            dropped={
                row.record.id: row.conversation.dropped for row in rows if row.conversation.dropped
            },
            mean_reward=sum(known) / len(known) if known else None,
            has_signal=any(each is not None and each.has_signal for each in credit.values()),
            is_chosen=is_chosen,
        ),
    )


def _rollout_events(row: StoredRow, group: str) -> Iterator[tuple[float, Event]]:
    record, conversation = row.record, row.conversation
    key, begun_s = record.id, record.created_unix_s
    for after_s, event in events_of(record, group):
        yield begun_s + after_s, event
        is_turn_end = isinstance(event, TurnFinished) and event.record is not record.turns[-1]
        if row.more.get("session") and is_turn_end:
            yield begun_s + after_s, ClientAwaited(key)
    # Of an evaluated endpoint the number is in the row; another agent's tokens are not counted.
    num_tokens = None
    if not record.has_ids and not record.messages:
        num_tokens = row.more.get("figures", {}).get("num_tokens")
    ended_s = begun_s + record.elapsed_s
    yield ended_s, RolloutFinished(key, record, num_tokens)
    verdict = conversation.reward, conversation.answer, conversation.reason
    yield ended_s, RolloutScored(key, *verdict, seconds=0.0, parts=conversation.parts)


def _is_chosen(rows: Sequence[StoredRow]) -> bool:
    """Return whether rollouts were selected from the group, which evaluations never do."""
    of_rows = [row.conversation for row in rows]
    scored = [row for row in of_rows if row.reward is not None]
    return any(row.credit is not None or row.dropped for row in scored or of_rows)
