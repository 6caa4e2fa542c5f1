"""The JSON that the page's scripts read: frames of the board, with rows of rollouts and groups.

Times of rows are in milliseconds since `t0` of `about`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NotRequired, TypedDict

_MAX_CHARS = 160  # of a question or an answer in a row

Lane = Literal["wait", "prefill", "decode", "tool", "client", "siblings", "reward"]
"""State of a rollout: waiting for capacity, prefill, decoding, running tools, waiting for the
client of its session, waiting for the rest of its group, or being scored."""

RolloutState = Literal["live", "done", "abandoned"]


class RolloutSummary(TypedDict):
    """A row of the timelines."""

    id: str
    group: str
    state: RolloutState
    stop: str | None
    turn: int
    tokens: int | None
    calls: int
    failed_calls: int
    server: str
    reward: float | None
    answer: str
    start: int
    end: int | None
    lanes: list[tuple[Lane, int]]
    more: NotRequired[bool]  # lanes were left out
    question: NotRequired[str]  # first words; that of a group's rollouts is the group's


class WrongAnswer(TypedDict):
    """A rollout of a group that got no positive reward."""

    id: str
    answer: str | None


class GroupSummary(TypedDict):
    """A row of the groups. `kept` and `has_signal` are None if no rollouts are selected.

    `question` has the first words of the task, and `wrong` is the first rollout that was wrong.
    """

    id: str
    task: str
    question: str
    answer: str | None
    wrong: WrongAnswer | None
    size: int
    state: Literal["live", "done"]
    num_done: int
    mean_reward: float | None
    kept: int | None
    has_signal: bool | None
    start: int
    end: int | None


class MemberSummary(TypedDict):
    """A conversation in its group."""

    id: str
    state: RolloutState
    stop: str | None
    tokens: int | None
    calls: int
    failed_calls: int
    turns: int
    reward: float | None
    no_reward: NotRequired[str | None]  # `NoReward`, once the group is on disk
    answer: str | None
    reason: str
    parts: Mapping[str, float]  # of the reward
    advantage: float | None
    dropped: str | None
    kept: bool | None
    branch: NotRequired[str | None]  # of a conversation that a service has recorded


class GroupDetails(GroupSummary):
    """A group with its rollouts."""

    prompt: str
    rollouts: list[MemberSummary]


class ToolsSummary(TypedDict):
    """Calls by status, and percentiles of the milliseconds that the latest took, waited and ran."""

    calls: dict[str, int]
    latency_ms: NotRequired[dict[str, float]]
    queued_ms: NotRequired[dict[str, float]]
    ran_ms: NotRequired[dict[str, float]]


class RemovedRows(TypedDict):
    """Ids of what the board has forgotten."""

    rollouts: list[str]
    groups: list[str]


class HistoryPoint(TypedDict):
    """Values at a Unix time.

    `servers` has, by URL: tokens per second since the last point, running requests, and tokens of
    the KV cache that are held or reserved, wait for a tool, or can be reused.
    """

    t: float
    now: Mapping[str, float]
    servers: Mapping[str, Sequence[float]]


class BoardFrame(TypedDict, total=False):
    """The board, or what has changed of it: a frame that is `full` replaces what was before.

    Attributes:
        rev, t, missed: number of the frame, its Unix time, and how many the reader has missed.
        about: what does not change, such as the kind and title of the run.
        now: counters, rates and progress.
        steps: rows of metrics.
        history: points of the last hour that the reader does not have yet, oldest first.
    """

    rev: int
    t: float
    full: bool
    missed: int
    about: Mapping[str, object]
    now: Mapping[str, Any]
    waits: list[dict[str, object]]
    servers: list[dict[str, object]]
    sandbox: Mapping[str, object]
    rollouts: list[RolloutSummary]
    groups: list[GroupSummary]
    steps: Sequence[Mapping[str, object]]
    history: Sequence[HistoryPoint]
    gone: RemovedRows


def first_words(text: str | None) -> str:
    """Return as much of a text as a row of the page shows, on one line."""
    return " ".join((text or "")[:_MAX_CHARS].split())
