"""The events of rollouts and training. Emitters call a plain function; readers choose what to keep.

    rollouts, groups, the learner's steps ──emit──> every reader: metrics, page, run folder, traces

Events of one rollout arrive in order. Times that the trajectory records are not repeated here.
Readers are called in the event loop's thread and must not block; they queue slow work themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

import anyio

from agentloop.trajectory import Message, ToolCall, ToolResult, Trajectory, Turn

__all__ = [
    "CallFinished",
    "CallStarted",
    "ClientAwaited",
    "Emit",
    "Event",
    "Explained",
    "Feed",
    "GroupFinished",
    "GroupStarted",
    "Measured",
    "OnlyReason",
    "RolloutAbandoned",
    "RolloutFinished",
    "RolloutScored",
    "RolloutStarted",
    "RolloutStream",
    "TokensSampled",
    "ToolRaised",
    "TurnFinished",
    "TurnMoved",
    "TurnPlaced",
    "TurnSampled",
    "TurnStarted",
    "WeightsLoaded",
    "events_of",
    "ignore",
]


@dataclass(frozen=True, slots=True)
class RolloutStarted:
    """A rollout has started. It updates `record` as it runs, which may be read at any time.

    `messages` is what its prompt was rendered from, unless a client's session keeps it.
    """

    record: Trajectory
    group: str = ""  # the name of its group, if it has siblings
    messages: Sequence[Message] = ()

    @property
    def rollout_id(self) -> str:
        return self.record.id


@dataclass(frozen=True, slots=True)
class TurnStarted:
    """A turn has started; it may have to wait until it is placed on a server."""

    rollout_id: str
    turn: int


class Explained(Protocol):
    """A decision that can explain itself, such as a placement `Decision`."""

    @property
    def why(self) -> str: ...

    def explain(self) -> str: ...


@dataclass(frozen=True, slots=True)
class OnlyReason:
    """A decision of which nothing is known but a few words (`Explained`)."""

    why: str

    def explain(self) -> str:
        return self.why


@dataclass(frozen=True, slots=True)
class TurnPlaced:
    """The router has chosen a server for a turn, or for the rest of an interrupted one.

    `decision.explain()` describes the state of each candidate at that moment.
    """

    rollout_id: str
    turn: int
    server: str
    decision: Explained

    @property
    def reason(self) -> str:
        """The reason for the choice, in a few words."""
        return self.decision.why


@dataclass(frozen=True, slots=True)
class TokensSampled:
    """A frame of sampled tokens. `text` may lag behind `ids` by an incomplete UTF-8 character.

    If `ids` is empty, `text` is the text that was held back until the end of the turn.
    """

    rollout_id: str
    turn: int
    ids: list[int]
    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The last token of a tool call has arrived and the call is dispatched, within its turn."""

    rollout_id: str
    turn: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class CallFinished:
    """A tool call has its result."""

    rollout_id: str
    turn: int
    result: ToolResult


@dataclass(frozen=True, slots=True)
class TurnMoved:
    """A server failed during a turn; the turn continues on another one from the same ids."""

    rollout_id: str
    server: str
    reason: str


@dataclass(frozen=True, slots=True)
class TurnSampled:
    """The last token of a turn has arrived; its tool calls may still be running."""

    rollout_id: str
    turn: int


@dataclass(frozen=True, slots=True)
class TurnFinished:
    """A turn is complete: its last token has arrived and its tool calls have ended."""

    rollout_id: str
    turn: int
    record: Turn


@dataclass(frozen=True, slots=True)
class ClientAwaited:
    """A branch of a session has answered; it goes on if its client asks again."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class RolloutFinished:
    """A rollout has ended; `trajectory` is complete."""

    rollout_id: str
    trajectory: Trajectory
    num_tokens: int | None = None  # as counted by an external endpoint, which reports no ids


@dataclass(frozen=True, slots=True)
class RolloutAbandoned:
    """A rollout was cancelled or raised, so there is no trajectory."""

    rollout_id: str


@dataclass(frozen=True, slots=True)
class GroupStarted:
    """A task is about to be rolled out `size` times.

    `group` is the name that the rollouts' events carry; for `is_chosen` see `GroupFinished`.
    """

    group: str
    task_id: str
    prompt: str | Sequence[Message]
    answer: str | None
    size: int
    is_chosen: bool = True


@dataclass(frozen=True, slots=True)
class RolloutScored:
    """A rollout was scored. `reward` is None if the rollout says nothing about the model."""

    rollout_id: str
    reward: float | None
    answer: str | None  # the rollout's answer
    reason: str  # explanation of the reward, for people
    seconds: float  # the time that scoring took
    parts: Mapping[str, float] = field(default_factory=dict)  # named parts of the reward


@dataclass(frozen=True, slots=True)
class GroupFinished:
    """All rollouts of a group are scored and those to train on are selected.

    The fields are empty for a group that could not be rolled out.

    Attributes:
        kept: advantages of the rollouts that are trained on, by rollout id.
        dropped: reasons why the others are not trained on, by rollout id.
        has_signal: whether any advantage differs from 0.
        is_chosen: whether the group is a candidate for training: not in an evaluation, nor for
            held-out tasks or while tasks are filtered.
    """

    group: str
    kept: Mapping[str, float] = field(default_factory=dict)
    dropped: Mapping[str, str] = field(default_factory=dict)
    mean_reward: float | None = None
    has_signal: bool = False
    is_chosen: bool = True


@dataclass(frozen=True, slots=True)
class ToolRaised:
    """A tool has raised the same type of exception in most of its calls since the run's start."""

    group: str  # after which it was counted
    tool: str
    error: str
    num_raised: int
    num_calls: int

    @property
    def text(self) -> str:
        return f"{self.tool} raised {self.error} in {self.num_raised:,} of {self.num_calls:,} calls"


@dataclass(frozen=True, slots=True)
class Measured:
    """A row of a run's metrics was recorded, for a step or for an evaluation."""

    row: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class WeightsLoaded:
    """A weight sync has ended. `loaded` and `failed` hold the addresses of servers."""

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
    | ClientAwaited
    | RolloutFinished
    | RolloutAbandoned
    | RolloutScored
    | GroupStarted
    | GroupFinished
    | ToolRaised
    | Measured
    | WeightsLoaded
)
Emit = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Discard an event."""


def events_of(trajectory: Trajectory, group: str = "") -> Iterator[tuple[float, Event]]:
    """Yield the events of a rollout from its record, each with the seconds since its start.

    The tokens of a turn are one event. Of a turn that was moved, the last server is known. Records
    of earlier versions do not say when a turn was placed: that counts as the time of its first
    token, or of its start.
    """
    key = trajectory.id
    yield 0.0, RolloutStarted(trajectory, group)
    for index, turn in enumerate(trajectory):
        yield turn.started_s, TurnStarted(key, index)
        first_s = turn.started_s if turn.first_token_s is None else turn.first_token_s
        placed_s = first_s if turn.placed_s is None else turn.placed_s
        if turn.servers:
            yield placed_s, TurnPlaced(key, index, turn.servers[-1], OnlyReason("not recorded"))
        yield first_s, TokensSampled(key, index, turn.output_ids, turn.text)
        for call in turn.calls:
            yield turn.generated_s, CallStarted(key, index, call)
        early = [
            result
            for result in turn.results
            if result.ended_s <= turn.generated_s or not result.status.ran
        ]
        for result in early:
            yield result.ended_s, CallFinished(key, index, result)
        yield turn.generated_s, TurnSampled(key, index)
        for result in turn.results:
            if result not in early:
                yield result.ended_s, CallFinished(key, index, result)
        yield turn.ended_s, TurnFinished(key, index, turn)


class Feed:
    """A queue of one rollout's events for one reader: call it to add, iterate over it to read.

    Adding never waits. Unread, adjacent `TokensSampled` events of a turn are merged, so the queue
    is bounded by the rollout's budget.
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
        """Mark the end of the events; the reader gets `error`, if any, after the last one."""
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


class RolloutStream:
    """The events of one rollout, to iterate over; `trajectory` is set at the end."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self.trajectory: Trajectory | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Event:
        event = await anext(self._feed)  # no deadline: the rollout has one, and then ends this
        if isinstance(event, RolloutFinished):
            self.trajectory = event.trajectory
        return event
