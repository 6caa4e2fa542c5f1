"""What happened, typed, once. Emitters call a plain function; readers decide what to keep.

Events of one rollout arrive in order. Times are not repeated here where the trajectory has them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from agentloop.trajectory import ToolCall, ToolResult, Trajectory, Turn

__all__ = [
    "CallFinished",
    "CallStarted",
    "Emit",
    "Event",
    "RolloutFinished",
    "RolloutStarted",
    "TokensSampled",
    "TurnFinished",
    "TurnMoved",
    "TurnStarted",
    "ignore",
]


@dataclass(frozen=True, slots=True)
class RolloutStarted:
    rollout_id: str
    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TurnStarted:
    rollout_id: str
    turn: int


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """A frame of tokens. `text` may lag behind `ids` by an unfinished UTF-8 character.

    `ids` may be empty: then `text` is what was still held back when the turn ended.
    """

    rollout_id: str
    turn: int
    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    rollout_id: str
    turn: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallFinished:
    rollout_id: str
    turn: int
    result: ToolResult


@dataclass(frozen=True, slots=True)
class TurnMoved:
    """A server failed in mid-turn; the turn goes on elsewhere from its exact ids."""

    rollout_id: str
    server: str
    reason: str


@dataclass(frozen=True, slots=True)
class TurnFinished:
    rollout_id: str
    turn: int
    record: Turn


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    rollout_id: str
    trajectory: Trajectory


Event = (
    RolloutStarted
    | TurnStarted
    | TokensSampled
    | CallStarted
    | CallFinished
    | TurnMoved
    | TurnFinished
    | RolloutFinished
)
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The reader that keeps nothing."""
