"""Keep the finished turns of a conversation, so that a kill costs at most the turn in flight.

    turn k ends ──keep──> the run's journal ──a kill──> take(k) ──> the turn, in place of sampling

A conversation is taken up by running it again: each turn that was kept stands for what would be
sampled, as long as it follows exactly the ids that it followed before, with the same settings. So
its tools are not called again, what is derived from its turns is the same, and where anything has
changed, the model goes on from there.

A call that must not run twice is noted before it runs. If its turn was not kept, nobody knows what
became of it, and the conversation ends as lost to the infrastructure.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentloop.errors import RunFolderError, ServerError
from agentloop.plain_json import JsonObject
from agentloop.trajectory import Turn

__all__ = ["Journals", "TurnJournal"]

KeepTurn = Callable[[int, JsonObject], Awaitable[None]]
"""Keeps the state of a turn, by its number, durably."""


@dataclass(slots=True)
class TurnJournal:
    """The finished turns of a conversation.

    Attributes:
        kept: what was kept before a kill, by the number of the turn.
    """

    keep: KeepTurn
    kept: Mapping[int, JsonObject] = field(default_factory=dict)
    _sha256: hashlib._Hash = field(init=False, default_factory=hashlib.sha256)  # of the ids so far
    _num_ids: int = field(init=False, default=0)
    _history: str = field(init=False, default="")  # what the turn that has begun depends on

    @property
    def elapsed_s(self) -> float:
        """Seconds from the conversation's start to the end of its last kept turn."""
        ends = [row["turn"]["ended_s"] for row in self.kept.values() if "turn" in row]
        return max(ends, default=0.0)

    def begin_turn(self, ids: Sequence[int], settings: str) -> None:
        """Take note of the ids before the next turn, and of the settings that it is sampled with.

        Args:
            ids: those of the last turn, and what has followed.
        """
        self._sha256.update(array("q", ids[self._num_ids :]))
        self._num_ids = len(ids)
        of_turn = self._sha256.copy()
        of_turn.update(settings.encode())
        self._history = of_turn.hexdigest()

    def take(self, index: int) -> Turn | None:
        """Return the turn that has begun, if it was kept; None: it has to be sampled.

        Raises:
            ServerError: the process was killed during a call that must not run twice.
        """
        row = self.kept.get(index)
        if row is None or row["history"] != self._history:
            self.kept = {}
            return None
        if "turn" not in row:
            raise ServerError(f"a kill cut off a call of {row['called']}, which may have run")
        return Turn.from_dict(row["turn"])

    async def add(self, index: int, turn: Turn) -> None:
        """Keep the turn, which has its results. Raises ServerError if the journal is lost."""
        await self._keep(index, {"turn": turn})

    async def begin_call(self, index: int, name: str) -> None:
        """Note that a call begins which must not run twice. Raises like `add`."""
        await self._keep(index, {"called": name})

    async def _keep(self, index: int, row: JsonObject) -> None:
        try:
            await self.keep(index, {"history": self._history, **row})
        except RunFolderError as error:
            raise ServerError(str(error)) from error


class Journals(Protocol):
    """Keeps what happens in a rollout; implemented by `agentloop.rollouts.open_group`."""

    @property
    def elapsed_s(self) -> float:
        """Seconds that the rollout had taken when it was interrupted, as far as it was kept."""
        ...

    def journal(self, conversation: str, elapsed_s: Callable[[], float]) -> TurnJournal:
        """Return the journal of a conversation."""
        ...
