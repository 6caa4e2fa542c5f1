"""The nouns of the runtime: what one rollout leaves behind.

Token ids are the truth. A trajectory is `prompt_ids` followed, per turn, by what the model
sampled (`output_ids`) and by what the runtime appended (`observation_ids`); each turn's prompt
is exactly what stands before it. Text is decoded from ids for people, and never tokenised again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

__all__ = [
    "CallStatus",
    "Message",
    "StopReason",
    "ToolCall",
    "ToolResult",
    "Trajectory",
    "Turn",
    "TurnEnd",
    "VersionSpan",
]

Message = Mapping[str, Any]
"""A chat message in the terms of OpenAI and Hugging Face: role, content, tool_calls, ..."""


class StopReason(StrEnum):
    """How a rollout ended."""

    ANSWERED = "answered"  # a turn without a tool call
    STOP_SEQUENCE = "stop_sequence"  # the answer came to one that the caller had named
    CALLER_TOOLS = "caller_tools"  # it called tools that the caller runs
    TURN_BUDGET = "turn_budget"
    TOKEN_BUDGET = "token_budget"  # response tokens, or the model's context
    TIME_BUDGET = "time_budget"  # wall time: see `Trajectory.used_its_time`
    INFRASTRUCTURE = "infrastructure"  # broken by us, not by the model: has no reward
    STRAGGLER = "straggler"  # stopped by us, for enough of its group had ended: has no reward
    CANCELLED = "cancelled"  # by a person: has no reward

    @property
    def infrastructure(self) -> bool:
        """Whether the rollout says nothing about the model and must not be scored."""
        return self in (StopReason.INFRASTRUCTURE, StopReason.STRAGGLER, StopReason.CANCELLED)


class TurnEnd(StrEnum):
    """How one generation ended."""

    STOP = "stop"  # the model's end-of-turn token, or what the caller has named as an end
    LENGTH = "length"
    ABORT = "abort"  # by the server, by a budget of time, or by a failure


class CallStatus(StrEnum):
    """How a tool call ended. The first block speaks about the model, the last about us."""

    OK = "ok"
    ERROR = "error"  # the tool or the program raised
    TIMEOUT = "timeout"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    MALFORMED = "malformed"  # the call could not be decoded
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"

    CALLER = "caller"  # left to the caller to run
    CANCELLED = "cancelled"  # the turn was cut short: its calls do not count
    INFRASTRUCTURE = "infrastructure"

    @property
    def failed(self) -> bool:
        """Whether the model is to blame: what Resample-on-Correct counts as a failed call."""
        return self not in (
            CallStatus.OK,
            CallStatus.CALLER,
            CallStatus.CANCELLED,
            CallStatus.INFRASTRUCTURE,
        )

    @property
    def ran(self) -> bool:
        """Whether there was a tool that could begin to run."""
        return self not in (
            CallStatus.MALFORMED,
            CallStatus.UNKNOWN_TOOL,
            CallStatus.BAD_ARGUMENTS,
            CallStatus.CALLER,
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it.

    `start` and `end` delimit it, markers included, in the turn's `output_ids` (where the opening
    marker is text of several tokens, `start` is the last of them). Where it could not be decoded,
    `error` says why, for the model to read, and `name` may be empty.
    """

    id: str
    name: str
    arguments: dict[str, Any]
    raw: str
    start: int
    end: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What came of a call.

    `content` is what the model reads. Times are seconds on the clock of the trajectory
    (0 = its start); `started_s` is when the tool began to run, after any queue.
    """

    call_id: str
    name: str
    status: CallStatus
    content: str
    dispatched_s: float
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start` to `end` of a turn were sampled under policy `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Turn:
    """One generation and what the runtime answered to it.

    Lengths: `output_ids` and `logprobs` are equally long; `versions` covers them without gaps.
    `calls` and `results` are in the order of the calls; `results` is shorter only where the
    turn was cut off. Times are seconds on the clock of the trajectory.

    `top_logprobs` has, where they were asked for, the likeliest tokens in the place of each
    output token, as (log-probability, id), the likeliest first; else it is empty.
    """

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    end: TurnEnd = TurnEnd.ABORT
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    observation_ids: list[int] = field(default_factory=list)
    text: str = ""
    servers: list[str] = field(default_factory=list)  # more than one: it went on elsewhere
    cached_tokens: int = 0
    started_s: float = 0.0
    first_token_s: float | None = None
    generated_s: float = 0.0  # the last token
    ended_s: float = 0.0  # the last result
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)


@dataclass(slots=True)
class Trajectory:
    """The record of one rollout. See the module's docstring for what its ids mean.

    `answer` is what a person would read as the answer: the last turn's text without thoughts,
    tool calls and markup. It is empty until the rollout has ended, and where it was cut off in a
    thought.
    """

    id: str
    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = StopReason.INFRASTRUCTURE
    error: str | None = None
    created_unix_s: float = 0.0
    elapsed_s: float = 0.0
    answer: str = ""

    def __iter__(self) -> Iterator[Turn]:
        return iter(self.turns)

    @property
    def ids(self) -> list[int]:
        """All token ids, prompt first."""
        ids = list(self.prompt_ids)
        for turn in self.turns:
            ids += turn.output_ids
            ids += turn.observation_ids
        return ids

    @property
    def mask(self) -> list[int]:
        """1 exactly where `ids` was sampled from the policy, else 0."""
        mask = [0] * len(self.prompt_ids)
        for turn in self.turns:
            mask += [1] * len(turn.output_ids)
            mask += [0] * len(turn.observation_ids)
        return mask

    @property
    def logprobs(self) -> list[float]:
        """The engine's log-probability of each id; 0.0 where the mask is 0."""
        logprobs = [0.0] * len(self.prompt_ids)
        for turn in self.turns:
            logprobs += turn.logprobs
            logprobs += [0.0] * len(turn.observation_ids)
        return logprobs

    @property
    def versions(self) -> list[str | None]:
        """The policy version that each id was sampled under; None where the mask is 0."""
        versions: list[str | None] = [None] * len(self.prompt_ids)
        for turn in self.turns:
            for span in turn.versions:
                versions += [span.version] * (span.end - span.start)
            versions += [None] * len(turn.observation_ids)
        return versions

    @property
    def num_response_tokens(self) -> int:
        """Tokens after the prompt, tool responses included."""
        return sum(len(turn.output_ids) + len(turn.observation_ids) for turn in self.turns)

    @property
    def num_sampled_tokens(self) -> int:
        return sum(len(turn.output_ids) for turn in self.turns)

    @property
    def calls(self) -> list[ToolCall]:
        return [call for turn in self.turns for call in turn.calls]

    @property
    def results(self) -> list[ToolResult]:
        return [result for turn in self.turns for result in turn.results]

    @property
    def tool_run_s(self) -> float:
        """Seconds during which at least one of its tool calls ran: their queues are left out, and
        so is a call that the end of the rollout cut off."""
        spans = sorted((result.started_s, result.ended_s) for result in self.results)
        total = until = 0.0
        for start, end in spans:
            total += max(0.0, end - max(start, until))
            until = max(until, end)
        return total

    @property
    def used_its_time(self) -> bool:
        """Whether its own tool calls ran for half of the time that it took, or more. A rollout that
        ran out of time (`TIME_BUDGET`) did so by the model's doing then; else it waited for servers
        and the sandbox."""
        return self.tool_run_s >= self.elapsed_s / 2 > 0

    @property
    def text(self) -> str:
        """What the model wrote in its last turn, markers included."""
        return self.turns[-1].text if self.turns else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for JSON: the turns, and the ids with what stands beside each."""
        return {
            **asdict(self),
            "ids": self.ids,
            "mask": self.mask,
            "logprobs": self.logprobs,
            "versions": self.versions,
        }
