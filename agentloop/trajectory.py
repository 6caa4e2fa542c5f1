"""The record of a rollout: trajectory, turns, tool calls and their results.

Token ids are authoritative. A trajectory is `prompt_ids` followed, per turn, by the ids that the
model sampled (`output_ids`) and the ids that the runtime appended (`observation_ids`); a turn's
prompt is exactly the ids before it. Text is decoded from ids for people and never tokenized again.

A conversation that an endpoint or a script had in place of the model has no ids: its `messages` are
recorded, and the texts, calls and results of its turns. It is never trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from typing import Any

from agentloop.token_records import KeptIds, RoutedExperts

__all__ = [
    "Message",
    "StopReason",
    "ToolCall",
    "ToolCallStatus",
    "ToolResult",
    "Trajectory",
    "Turn",
    "TurnEnd",
    "VersionSpan",
    "rollout_of",
    "union_s",
]

_LATER = re.compile(r"(?<=\.)(\d+)(?:\+\w+)+$")

Message = Mapping[str, Any]
"""A chat message as OpenAI and Hugging Face define it: role, content, tool_calls, ..."""


def rollout_of(id: str) -> str:
    """Return the id of the rollout to which a conversation belongs.

    The conversations of rollout `7-sum.3` are `7-sum.3`, `7-sum.3+1`, `7-sum.3+checker`, ...
    """
    return _LATER.sub(r"\1", id)


def union_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds that at least one span covers."""
    total, until = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


class StopReason(StrEnum):
    """The reason why a rollout ended."""

    ANSWERED = "answered"  # by a turn without a tool call
    STOP_SEQUENCE = "stop_sequence"  # the answer reached a stop sequence of the caller
    CALLER_TOOLS = "caller_tools"  # the model called tools that the caller runs
    TURN_BUDGET = "turn_budget"
    TOKEN_BUDGET = "token_budget"  # response tokens, or the model's context
    TIME_BUDGET = "time_budget"  # wall time: see `Trajectory.used_its_time`
    CONTENT_FILTER = "content_filter"  # an endpoint withheld the answer, or the rest of it
    INFRASTRUCTURE = "infrastructure"  # failed for reasons other than the model: no reward
    STRAGGLER = "straggler"  # stopped because enough of its group had ended: no reward
    CANCELLED = "cancelled"  # by a person: no reward
    ENVIRONMENT = "environment"  # its environment failed, or stopped it: not trained on

    @property
    def is_unscorable(self) -> bool:
        """True if the rollout says nothing about the model and must not be scored."""
        return self in (
            StopReason.INFRASTRUCTURE,
            StopReason.STRAGGLER,
            StopReason.CANCELLED,
            StopReason.ENVIRONMENT,
        )


class TurnEnd(StrEnum):
    """The reason why a generation ended."""

    STOP = "stop"  # the model's end-of-turn token, or a stop sequence of the caller
    LENGTH = "length"
    FILTER = "filter"  # an endpoint's content filter
    THOUGHT = "thought"  # the limit of a thought; the next turn goes on with the same message
    ABORT = "abort"  # by the server, by a budget of time, or by a failure


class ToolCallStatus(StrEnum):
    """The outcome of a tool call: for reasons of the model, then for reasons of the runtime."""

    OK = "ok"
    ERROR = "error"  # the tool or the program raised
    TIMEOUT = "timeout"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"
    MALFORMED = "malformed"  # the call could not be decoded
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"

    CALLER = "caller"  # left for the caller to run
    CANCELLED = "cancelled"  # the turn was cut off, so its calls do not count
    INFRASTRUCTURE = "infrastructure"

    @property
    def failed(self) -> bool:
        """True if the model is to blame; Resample-on-Correct counts it as a failed call."""
        return self not in (
            ToolCallStatus.OK,
            ToolCallStatus.CALLER,
            ToolCallStatus.CANCELLED,
            ToolCallStatus.INFRASTRUCTURE,
        )

    @property
    def ran(self) -> bool:
        """True if the call was valid, so that a tool could start to run."""
        return self not in (
            ToolCallStatus.MALFORMED,
            ToolCallStatus.UNKNOWN_TOOL,
            ToolCallStatus.BAD_ARGUMENTS,
            ToolCallStatus.CALLER,
        )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call as the model wrote it.

    `start` and `end` delimit the call, markers included, in the turn's `output_ids`; if the opening
    marker spans several tokens, `start` is the last of them. If the call could not be decoded,
    `error` explains why to the model, and `name` may be empty.
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
    """The result of a tool call.

    `content` is the text that the model reads. Times are in seconds since the start of the
    trajectory; `started_s` is the time at which the tool started to run, after any queueing.
    `raised` is the type of the exception that a Python function raised, such as
    `sqlite3.ProgrammingError`.
    """

    call_id: str
    name: str
    status: ToolCallStatus
    content: str
    dispatched_s: float
    started_s: float
    ended_s: float
    raised: str = ""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Output tokens `start` to `end` of a turn were sampled under policy `version`."""

    version: str
    start: int
    end: int


@dataclass(slots=True)
class Turn:
    """A generation, with its tool calls and their results.

    `output_ids` and `logprobs` have the same length, and `versions` covers them without gaps.
    `calls` and `results` are in the order of the calls; `results` is shorter only if the turn was
    cut off. `observation_ids` encode the results or, after a turn without calls, the user's next
    message, or the end of a thought that reached its limit. Times are in seconds since the start of
    the trajectory.

    `top_logprobs`, if requested, lists for each output token the most likely tokens at its
    position as (log-probability, id), most likely first; otherwise it is empty.

    While the turn is streamed, the last of `versions` does not grow with each token: its end is set
    when another version or the end of the turn follows (`versions_until`).

    Turns to train on also have what the learner needs to compute the same probabilities: `kept`, if
    top-k, top-p or min-p is set, has the ids that they left for each output token, and `logprobs`
    are those of the distribution over them; `experts`, with routing replay, are those of the tokens
    that no turn before had recorded, up to the token before the last.

    An environment may give the turn a `reward`, and each output token one of its own
    (`token_rewards`); training uses them with `credit = "per_turn"`.
    """

    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    end: TurnEnd = TurnEnd.ABORT
    calls: list[ToolCall] = field(default_factory=list)
    results: list[ToolResult] = field(default_factory=list)
    observation_ids: list[int] = field(default_factory=list)
    text: str = ""
    servers: list[str] = field(default_factory=list)  # several if the turn was moved
    cached_tokens: int = 0
    started_s: float = 0.0
    placed_s: float | None = None  # on the server of its first token; None: not recorded
    first_token_s: float | None = None
    generated_s: float = 0.0  # the last token
    ended_s: float = 0.0  # the last result
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    reward: float | None = None
    token_rewards: list[float] = field(default_factory=list)
    kept: KeptIds | None = None
    experts: RoutedExperts | None = None

    def versions_until(self, end: int) -> list[VersionSpan]:
        """Return `versions` for the first `end` output tokens; the last span reaches to there."""
        ends = [*(span.start for span in self.versions[1:]), end]
        return [
            VersionSpan(span.version, span.start, min(stop, end))
            for span, stop in zip(self.versions, ends, strict=False)
            if span.start < end
        ]

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Turn:
        """Rebuild a turn from its fields as plain data; raises like `Trajectory.from_dict`."""
        parsed = {name: _TEXTS[name](row[name]) for name in _TEXTS.keys() & {*row} if row[name]}
        return cls(
            **{
                **row,
                **parsed,
                "end": TurnEnd(row["end"]),
                "versions": [VersionSpan(**span) for span in row["versions"]],
                "calls": [ToolCall(**call) for call in row["calls"]],
                "results": [
                    ToolResult(**{**result, "status": ToolCallStatus(result["status"])})
                    for result in row["results"]
                ],
            }
        )


@dataclass(slots=True)
class Trajectory:
    """The record of one rollout. The module's docstring describes its ids.

    `answer` is the answer as a person would read it: the last turn's text without reasoning, tool
    calls and markup. It is empty until the rollout has ended, and if it was cut off while
    reasoning.

    `messages` is the conversation if an endpoint or a script took the model's place, and is empty
    otherwise.
    """

    id: str
    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    stop_reason: StopReason = StopReason.INFRASTRUCTURE
    error: str | None = None
    created_unix_s: float = 0.0
    elapsed_s: float = 0.0
    answer: str = ""
    messages: list[Message] = field(default_factory=list)

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
        """1 for each id that was sampled from the policy, otherwise 0."""
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
    def kept(self) -> KeptIds | None:
        """The kept ids of each id; None: none were recorded."""
        if all(turn.kept is None for turn in self.turns):
            return None
        kept = KeptIds()
        kept.append_whole(len(self.prompt_ids))
        for turn in self.turns:
            if turn.kept is not None:
                kept.append(turn.kept)
            else:
                kept.append_whole(len(turn.output_ids))
            kept.append_whole(len(turn.observation_ids))
        return kept

    @property
    def experts(self) -> list[RoutedExperts]:
        """The recorded experts of its tokens, in order; those of a token are the first recorded."""
        spans: list[RoutedExperts] = []
        for turn in self.turns:
            if turn.experts is not None:
                spans.append(turn.experts.after(spans[-1].end if spans else 0))
        return spans

    @property
    def num_routed(self) -> int:
        """The number of tokens up to the last one of which experts were recorded."""
        return max((turn.experts.end for turn in self.turns if turn.experts), default=0)

    @property
    def has_ids(self) -> bool:
        """False if an endpoint or a script wrote its turns, so that their tokens are unknown."""
        return bool(self.prompt_ids) or not self.turns

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
        return union_s((result.started_s, result.ended_s) for result in self.results)

    @property
    def used_its_time(self) -> bool:
        """True if its own tool calls ran for at least half of its time. A rollout that ran out of
        time (`TIME_BUDGET`) did so because of the model then; otherwise because it waited for
        servers and the sandbox."""
        return self.tool_run_s >= self.elapsed_s / 2 > 0

    def message_of(self, turn: int) -> int:
        """Return the number of the assistant's message to which a turn belongs.

        It differs from the turn's number if thoughts have reached their limit.
        """
        return sum(earlier.end is not TurnEnd.THOUGHT for earlier in self.turns[:turn])

    @property
    def text(self) -> str:
        """The text of the last turn, markers included."""
        return self.turns[-1].text if self.turns else ""

    @property
    def messages_between(self) -> list[list[Message]]:
        """The messages before the first turn and after each turn, of a conversation without ids."""
        is_said = [message.get("role") == "assistant" for message in self.messages]
        num_turns = sum(turn.end is not TurnEnd.ABORT for turn in self.turns)
        num_before = sum(is_said) - num_turns  # messages of the assistant in the prompt
        between: list[list[Message]] = [[]]
        for message, is_turn in zip(self.messages, is_said, strict=False):
            if is_turn and num_before <= 0:
                between.append([])
            else:
                num_before -= is_turn
                between[-1].append(message)
        return between

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as plain data for JSON."""
        return asdict(self, dict_factory=_plain)

    def to_dict_per_token(self) -> dict[str, Any]:
        """Return the same, and `ids` with lists as long: `mask`, `logprobs` and `versions`."""
        lists = {"ids": self.ids, "mask": self.mask, "logprobs": self.logprobs}
        return {**self.to_dict(), **lists, "versions": self.versions}

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> Trajectory:
        """Rebuild a trajectory from the output of `to_dict`.

        Raises:
            KeyError: a field is missing.
            TypeError: a field has the wrong type.
            ValueError: a value is invalid.
        """
        turns = [Turn.from_dict(turn) for turn in row["turns"]]
        values = {field.name: row[field.name] for field in fields(cls)}
        return cls(**values | {"turns": turns, "stop_reason": StopReason(row["stop_reason"])})


_TEXTS: dict[str, Callable[[str], KeptIds | RoutedExperts]] = {
    "kept": KeptIds.parse,
    "experts": RoutedExperts.parse,
}
"""Fields that are stored as text, each with what reads it."""


def _plain(fields: list[tuple[str, object]]) -> dict[str, object]:
    return {key: str(value) if key in _TEXTS and value else value for key, value in fields}
