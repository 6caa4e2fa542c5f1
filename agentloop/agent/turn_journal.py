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

from agentloop.errors import RunFolderError, ServerError
from agentloop.plain_json import JsonObject
from agentloop.trajectory import Turn

__all__ = ["TurnJournal", "history_of"]

KeepTurn = Callable[[int, JsonObject], Awaitable[None]]
"""Keeps the state of a turn, by its number, durably."""


def history_of(ids: Sequence[int], settings: str) -> str:
    """Return a digest of the ids before a turn, and of the settings that it is sampled with."""
    return hashlib.sha256(array("q", ids).tobytes() + settings.encode()).hexdigest()


@dataclass(slots=True)
class TurnJournal:
    """The finished turns of a conversation.

    Attributes:
        kept: what was kept before a kill, by the number of the turn.
    """

    keep: KeepTurn
    kept: Mapping[int, JsonObject] = field(default_factory=dict)

    @property
    def elapsed_s(self) -> float:
        """Seconds from the conversation's start to the end of its last kept turn."""
        ends = [row["turn"]["ended_s"] for row in self.kept.values() if "turn" in row]
        return max(ends, default=0.0)

    def take(self, index: int, history: str) -> Turn | None:
        """Return a turn that was kept; None: it has to be sampled.

        Raises:
            ServerError: the process was killed during a call that must not run twice.
        """
        row = self.kept.get(index)
        if row is None or row["history"] != history:
            self.kept = {}
            return None
        if "turn" not in row:
            raise ServerError(f"a kill cut off a call of {row['called']}, which may have run")
        return Turn.from_dict(row["turn"])

    async def add(self, index: int, history: str, turn: Turn) -> None:
        """Keep a turn that has its results. Raises ServerError if the journal is lost."""
        await self._keep(index, {"history": history, "turn": turn})

    async def begin_call(self, index: int, history: str, name: str) -> None:
        """Note that a call begins which must not run twice. Raises like `add`."""
        await self._keep(index, {"history": history, "called": name})

    async def _keep(self, index: int, row: JsonObject) -> None:
        try:
            await self.keep(index, row)
        except RunFolderError as error:
            raise ServerError(str(error)) from error
