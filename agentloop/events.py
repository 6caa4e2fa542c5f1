"""What happened, typed, once. Emitters call a plain function; readers decide what to keep.

    rollouts, groups, the learner's steps ──emit──> every reader: metrics, page, run folder, traces

Events of one rollout arrive in order. Times are not repeated here where the trajectory has them.
A reader is called in the loop's thread and must not block: what takes longer it puts aside.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio

from agentloop.trajectory import ToolCall, ToolResult, Trajectory, Turn

__all__ = [
    "CallFinished",
    "CallStarted",
    "Emit",
    "Event",
    "Explained",
    "Feed",
    "GroupFinished",
    "GroupStarted",
    "Measured",
    "RolloutAbandoned",
    "RolloutFinished",
    "RolloutScored",
    "RolloutStarted",
    "TokensSampled",
    "TurnFinished",
    "TurnMoved",
    "TurnPlaced",
    "TurnSampled",
    "TurnStarted",
    "WeightsLoaded",
    "ignore",
]


@dataclass(frozen=True, slots=True)
class RolloutStarted:
    """`record` is what the rollout writes into as it goes on: it may be read at any time."""

    record: Trajectory
    group: str = ""  # that of its siblings; none: it has no siblings

    @property
    def rollout_id(self) -> str:
        return self.record.id


@dataclass(frozen=True, slots=True)
class TurnStarted:
    rollout_id: str
    turn: int


class Explained(Protocol):
    """A decision that can say more of itself: `agentloop.inference.placement.Decision`."""

    @property
    def why(self) -> str: ...

    def explain(self) -> str: ...


@dataclass(frozen=True, slots=True)
class TurnPlaced:
    """The router has chosen a server for the turn, or for the rest of one that was broken.

    `decision` has what it knew of each server at that moment, in words when asked for them.
    """

    rollout_id: str
    turn: int
    server: str
    decision: Explained

    @property
    def reason(self) -> str:
        """Why it goes there, in a few words."""
        return self.decision.why


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
class TurnSampled:
    """Its last token has come; calls of it may still run."""

    rollout_id: str
    turn: int


@dataclass(frozen=True, slots=True)
class TurnFinished:
    rollout_id: str
    turn: int
    record: Turn


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    rollout_id: str
    trajectory: Trajectory
    num_tokens: int | None = None  # as an endpoint of others counts them, whose ids nobody knows


@dataclass(frozen=True, slots=True)
class RolloutAbandoned:
    """It was cancelled, or it raised: there is no trajectory."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """A task is to be rolled out `size` times; `group` is what its rollouts name; `is_chosen` as of
    `GroupFinished`."""

    group: str
    task_id: str
    prompt: Any  # a question, or a conversation in OpenAI's terms
    answer: str | None
    size: int
    is_chosen: bool = True


@dataclass(frozen=True, slots=True)
class RolloutScored:
    """What a rollout is worth. `reward` is None where it says nothing about the model."""

    rollout_id: str
    reward: float | None
    answer: str | None  # what it gave as its answer
    reason: str  # why, for people
    seconds: float  # that it took to say so


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """All of a group is scored, and it was chosen from it.

    Attributes:
        kept: ids of the rollouts that are learned from, by their advantage.
        dropped: the other ones' ids, by the reason.
        teaches: whether any advantage is other than 0.
        is_chosen: whether somebody chooses from it, to learn: not in an evaluation, nor where tasks
            are held out or filtered.

    One that could not be rolled out has none of it.
    """

    group: str
    kept: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    mean_reward: float | None = None
    teaches: bool = False
    is_chosen: bool = True


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a run's metrics: of a step, or of an evaluation after it."""

    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """The servers were given weights; `failed` are the addresses of those that could not."""

    version: str
    seconds: float
    loaded: Sequence[str]
    failed: Sequence[str]


Event = (
    RolloutStarted
    | TurnStarted
    | TurnPlaced
    | TokensSampled
    | CallStarted
    | CallFinished
    | TurnMoved
    | TurnSampled
    | TurnFinished
    | RolloutFinished
    | RolloutAbandoned
    | RolloutScored
    | GroupStarted
    | GroupFinished
    | Measured
    | WeightsLoaded
)
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The reader that keeps nothing."""


class Feed:
    """Events of one rollout for one reader: call it to add, iterate over it to read.

    Adding never waits. A reader that lags finds adjacent `TokensSampled` of a turn joined into
    one, so what it has not read is bounded by the rollout's own budget.
    """

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._tokens: list[TokensSampled] = []  # adjacent, not yet joined
        self._added = anyio.Event()
        self._closed = False
        self._error: BaseException | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TokensSampled):
            if self._tokens and self._tokens[0].turn != event.turn:
                self._join()
            self._tokens.append(event)
        else:
            self._join()
            self._events.append(event)
        self._added.set()

    def close(self, error: BaseException | None = None) -> None:
        """No more will come; the reader gets `error` after the last event."""
        self._closed, self._error = True, error
        self._added.set()

    def __aiter__(self) -> Feed:
        return self

    async def __anext__(self) -> Event:
        while True:
            if not self._events:
                self._join()
            if self._events:
                return self._events.popleft()
            if self._closed:
                if self._error is not None:
                    raise self._error
                raise StopAsyncIteration
            self._added = anyio.Event()
            await self._added.wait()  # no deadline: the rollout has one, and then closes this

    def _join(self) -> None:
        if not self._tokens:
            return
        first = self._tokens[0]
        ids = [token for event in self._tokens for token in event.ids]
        text = "".join(event.text for event in self._tokens)
        self._events.append(TokensSampled(first.rollout_id, first.turn, ids, text))
        self._tokens.clear()
