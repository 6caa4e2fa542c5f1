"""Keep the rollouts of a group while it is open, so that a kill costs at most the turns in flight.

    a turn has its results ──> the journal of its conversation ──┐
    a rollout is scored ───────────────────────────────────> keep ──> the run's journal (queue.py)
    the group is rolled out again, after a kill <──────── kept rows ──┘

A rollout that was scored is taken as it was. Of another one, the conversations that may be repeated
from what was kept go on after their last turn (agent/turn_journal.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from agentloop.agent.turn_journal import TurnJournal
from agentloop.plain_json import JsonObject
from agentloop.rollouts.record import NoReward, RolloutRecord
from agentloop.trajectory import rollout_of

_ENDED = -1  # in place of a turn's number: the record of a rollout
_NOT_KEPT = (NoReward.INFRASTRUCTURE, NoReward.STOPPED, NoReward.CANCELLED)

OpenGroupRow = tuple[str, int, JsonObject]
"""The id of a conversation, the number of a turn, and what was kept of it."""


class Keep(Protocol):
    """Keeps the state of a turn durably, in place of what was kept of it before."""

    async def __call__(self, conversation: str, turn: int, value: object) -> None: ...


class OpenGroup:
    """The scored rollouts and the finished turns of an open group."""

    def __init__(self, keep: Keep | None = None, kept: Iterable[OpenGroupRow] = ()) -> None:
        """
        Args:
            keep: keeps a row of the group; None: nothing is kept.
            kept: the rows that were kept before a kill.
        """
        self._keep = keep
        self._ended: dict[str, RolloutRecord] = {}
        self._turns: dict[str, dict[int, JsonObject]] = defaultdict(dict)
        for conversation, turn, value in kept:
            if turn == _ENDED:
                self._ended[conversation] = RolloutRecord.from_dict(value)
            else:
                self._turns[conversation][turn] = value

    def ended(self, rollout: str) -> RolloutRecord | None:
        """Return the record of a rollout that was scored before a kill."""
        return self._ended.get(rollout)

    def rollout(self, id: str) -> OpenRollout | None:
        """Return what is kept of a rollout's turns; None: nothing is kept."""
        if self._keep is None:
            return None
        of_rollout = {key: rows for key, rows in self._turns.items() if rollout_of(key) == id}
        return OpenRollout(self._keep, of_rollout)

    def start_anew(self) -> None:
        """Repeat no turns any more, since all rollouts were lost."""
        self._turns.clear()

    async def keep_rollout(self, record: RolloutRecord) -> None:
        """Keep a scored rollout, unless it was lost to something other than what happened in it.

        Raises:
            RunFolderError: the journal cannot be written.
        """
        is_new = self.ended(record.id) is not record
        if self._keep is not None and is_new and record.no_reward not in _NOT_KEPT:
            await self._keep(record.id, _ENDED, replace(record, to_grade=None))


@dataclass(frozen=True, slots=True)
class OpenRollout:
    """The finished turns of a rollout (`Journals`).

    Attributes:
        turns: what was kept before a kill, by conversation and number.
    """

    keep: Keep
    turns: Mapping[str, Mapping[int, JsonObject]]

    @property
    def elapsed_s(self) -> float:
        """Seconds that the rollout had taken at the end of its last kept turn."""
        return max(
            (row["at_s"] for rows in self.turns.values() for row in rows.values()), default=0
        )

    def journal(self, conversation: str, elapsed_s: Callable[[], float]) -> TurnJournal:
        """Return the journal of a conversation.

        Args:
            elapsed_s: returns the seconds that the rollout has taken so far.
        """

        async def keep(turn: int, row: JsonObject) -> None:
            await self.keep(conversation, turn, row | {"at_s": elapsed_s()})

        return TurnJournal(keep, self.turns.get(conversation, {}))
