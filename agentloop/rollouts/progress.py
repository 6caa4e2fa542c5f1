"""What is kept of a group while it is open, so that a kill costs at most the turns in flight.

    a turn has its results ──> the journal of its conversation ──┐
    a rollout is scored ───────────────────────────────────> keep ──> the run's journal (queue.py)
    the group is rolled out again, after a kill <──────── kept rows ──┘

A rollout that was scored is taken as it was. Of another one, the conversations that may be repeated
from what was kept go on after their last turn (agent/turn_journal.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from agentloop.plain_json import JsonObject
from agentloop.rollouts.record import NoReward, RolloutRecord

__all__ = ["GroupProgress", "Keep", "KeptRow"]

_ENDED = -1  # in place of a turn's number: the record of a rollout
_NOT_KEPT = (NoReward.INFRASTRUCTURE, NoReward.STOPPED, NoReward.CANCELLED)

KeptRow = tuple[str, int, JsonObject]
"""The id of a conversation, the number of a turn, and what was kept of it."""


class Keep(Protocol):
    """Keeps the state of a turn durably, in place of what was kept of it before."""

    async def __call__(self, conversation: str, turn: int, value: object) -> None: ...


class GroupProgress:
    """The scored rollouts and the finished turns of an open group."""

    def __init__(self, keep: Keep, kept: Iterable[KeptRow] = ()) -> None:
        """
        Args:
            keep: keeps a row of the group.
            kept: the rows that were kept before a kill.
        """
        self._keep = keep
        self._ended: dict[str, RolloutRecord] = {}
        for conversation, turn, value in kept:
            if turn == _ENDED:
                self._ended[conversation] = RolloutRecord.from_dict(value)

    def ended(self, rollout: str) -> RolloutRecord | None:
        """Return the record of a rollout that was scored before a kill."""
        return self._ended.get(rollout)

    async def keep_rollout(self, record: RolloutRecord) -> None:
        """Keep a scored rollout, unless it was lost to something other than what happened in it.

        Raises:
            RunFolderError: the journal cannot be written.
        """
        if record.no_reward not in _NOT_KEPT and self.ended(record.id) is not record:
            await self._keep(record.id, _ENDED, record)
