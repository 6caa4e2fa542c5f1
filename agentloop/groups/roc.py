"""Resample-on-Correct: of the rollouts of one task, the ones to learn from. Pure.

The source is rStar2-Agent, arXiv 2508.20722, section on GRPO-RoC, Eq. 4-5. Sample more rollouts
than are wanted (there: 32 for n = 16), then keep n of them:

    negatives   floor(n/m * num_negatives) of them, uniformly at random
    positives   the rest, without replacement, with weights 1 / p_total

where m is the number of rollouts with a reward (with m = 2n: half of the negatives), and

    p_total  = p_err + p_format
    p_err    = 0.5 if the trace calls no tool, else num_failed_calls / num_calls
    p_format = 1 if it gives no answer, else min(1, (num_answers - 1) / num_turns)

So wrong rollouts keep their variety, and right ones are learned from the more, the cleaner they
are. What happens to a group, in this order:

    no reward (infrastructure)  ->  left out, as if it had never been sampled
    fewer than n left           ->  rejected
    all rewards equal           ->  rejected, where `reject_equal_reward` is set
    exactly n left              ->  all are kept
    more                        ->  resampled

The form `released` is what the paper's published code does instead, and draws nothing. Both shares
are rounded; a side at or below its floor gets its floor and the other side the rest; the positives
with the smallest penalties and the first negatives are kept. p_format is 1 also where the <answer>
and </answer> of the whole response do not alternate. It differs from that code in four ways:

    failed calls  are told by their `CallStatus`; there by the word "error" in the output
    turns         all count; there the first does not, nor a last one that was cut off (penalties
                  as there come of traces with as many turns less)
    answer tags   count where the model wrote them; there also in tool responses
    quotas        always sum to n; there an assertion fails where both roundings of an odd n go the
                  same way and neither side is at its floor (here the positives get the rest)
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Literal, Self

import pydantic

from agentloop.groups.answers import tagged
from agentloop.trajectory import CallStatus, Trajectory

__all__ = [
    "MIN_PENALTY",
    "Choice",
    "Dropped",
    "Rejected",
    "RocSettings",
    "Trace",
    "penalty",
    "quotas",
    "resample",
]

_TAG = re.compile("</?answer>")

MIN_PENALTY = 0.01
"""What a penalty of 0 counts as when weights are drawn: Eq. 5 does not say what 1/0 is.

Penalties above it keep their exact proportions. The smallest of them that a rollout of 30 turns
with a call each can have is 1/30, so a flawless trace weighs at least three times as much as any
other, and a hundred times as much as one whose every call failed: likelier by far, not certain.
"""


class RocSettings(pydantic.BaseModel):
    """Which rollouts of a group are learned from. The names are those of the paper's code."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    form: Literal["paper", "released"] = pydantic.Field(
        "paper", description='"paper" draws by its equations; "released" picks as its code does.'
    )
    down_sample_to_n: int = pydantic.Field(
        16, description="Rollouts kept of each group; 0 or less: all of them."
    )
    reject_equal_reward: bool = pydantic.Field(
        True, description="Reject groups whose rewards are all equal: nothing can be learned there."
    )
    roc_error_ratio: bool = pydantic.Field(
        True, description="Penalise right rollouts for tool calls that failed, or for none."
    )
    roc_answer_format: bool = pydantic.Field(
        True, description="Penalise right rollouts for no answer tag, or for several."
    )
    min_zero_reward_trace_num: int = pydantic.Field(
        -1,
        description="Keep at least as many wrong rollouts, as far as there are any. The paper has "
        "no such floor, and keeps none where a single rollout of a group is wrong; its code has 2.",
    )
    min_non_zero_reward_trace_num: int = pydantic.Field(
        -1, description="Keep at least as many right rollouts, as far as there are any."
    )

    @pydantic.model_validator(mode="after")
    def _floors_fit(self) -> Self:
        floors = [self.min_zero_reward_trace_num, self.min_non_zero_reward_trace_num]
        if 0 < self.down_sample_to_n < sum(max(0, floor) for floor in floors):
            raise ValueError(
                f"min_zero_reward_trace_num ({floors[0]}) and min_non_zero_reward_trace_num "
                f"({floors[1]}) are more than down_sample_to_n ({self.down_sample_to_n})"
            )
        return self


@dataclass(frozen=True, slots=True)
class Trace:
    """What Resample-on-Correct needs to know of a rollout.

    Attributes:
        reward: more than 0 is right, else wrong; None: infrastructure broke it.
        num_calls: those that say something about the model, whether they failed or not.
        num_answers: <answer> tags of all turns that are closed within their turn.
        num_pairs: answers as the released code counts them: those of all turns as one text, or 0
            where a tag lacks its partner. None: as `num_answers`.
    """

    reward: float | None
    num_calls: int
    num_failed_calls: int
    num_answers: int
    num_turns: int
    num_pairs: int | None = None

    def __post_init__(self) -> None:
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"reward: a finite number or None, not {self.reward}")
        if not 0 <= self.num_failed_calls <= self.num_calls:
            raise ValueError(f"{self.num_failed_calls} of {self.num_calls} calls failed")
        if self.num_answers < 0 or self.num_turns < 0 or (self.num_pairs or 0) < 0:
            raise ValueError(f"{self.num_answers} answers in {self.num_turns} turns")

    @classmethod
    def of(cls, trajectory: Trajectory, reward: float | None) -> Self:
        """A call that was cut short, or that broke by our fault, was never made."""
        ours = (CallStatus.CANCELLED, CallStatus.INFRASTRUCTURE)
        statuses = [result.status for result in trajectory.results if result.status not in ours]
        return cls(
            reward=None if trajectory.stop_reason.infrastructure else reward,
            num_calls=len(statuses),
            num_failed_calls=sum(status.failed for status in statuses),
            num_answers=sum(len(tagged(turn.text)) for turn in trajectory),
            num_turns=len(trajectory.turns),
            num_pairs=_num_pairs("\n".join(turn.text for turn in trajectory)),
        )


class Rejected(StrEnum):
    """Why nothing of a group is learned from."""

    EQUAL_REWARDS = "equal_rewards"
    TOO_FEW = "too_few"


class Dropped(StrEnum):
    """Why a rollout is not learned from."""

    INFRASTRUCTURE = "infrastructure"  # it has no reward
    GROUP_REJECTED = "group_rejected"
    NEGATIVE = "negative"  # wrong, and over the quota
    POSITIVE = "positive"  # right, and over the quota


@dataclass(frozen=True, slots=True)
class Choice:
    """What is kept of a group. Indexes are those of the traces; each is kept or dropped.

    Attributes:
        kept: ascending.
        penalties: p_total of every trace, right or wrong.
    """

    kept: list[int]
    dropped: dict[int, Dropped]
    rejected: Rejected | None
    penalties: list[float]


def resample(traces: Sequence[Trace], settings: RocSettings, rng: Random) -> Choice:
    """Choose whom to learn from. The same traces, settings and state of `rng` choose the same."""
    penalties = [penalty(trace, settings) for trace in traces]
    scored = [index for index, trace in enumerate(traces) if trace.reward is not None]
    rejected = _rejected([traces[index].reward for index in scored], settings)
    if rejected:
        kept = []
    elif 0 < settings.down_sample_to_n < len(scored):
        positives = [index for index in scored if _is_right(traces[index])]
        negatives = [index for index in scored if not _is_right(traces[index])]
        num_positives, num_negatives = quotas(len(positives), len(negatives), settings)
        if settings.form == "paper":
            kept = rng.sample(negatives, num_negatives)
            kept += _weighted_sample(positives, penalties, num_positives, rng)
        else:
            kept = negatives[:num_negatives]
            kept += sorted(positives, key=penalties.__getitem__)[:num_positives]
    else:
        kept = scored
    dropped = {
        index: _why_dropped(trace, rejected)
        for index, trace in enumerate(traces)
        if index not in kept
    }
    return Choice(sorted(kept), dropped, rejected, penalties)


def penalty(trace: Trace, settings: RocSettings) -> float:
    """p_total, of the parts that are switched on: from 0 (flawless) to 2."""
    total = 0.0
    if settings.roc_error_ratio:
        total += trace.num_failed_calls / trace.num_calls if trace.num_calls else 0.5
    if settings.roc_answer_format:
        num_answers = trace.num_answers
        if settings.form == "released" and trace.num_pairs is not None:
            num_answers = trace.num_pairs
        has_answer = num_answers and trace.num_turns
        total += min(1.0, (num_answers - 1) / trace.num_turns) if has_answer else 1.0
    return total


def quotas(num_positives: int, num_negatives: int, settings: RocSettings) -> tuple[int, int]:
    """How many positives and negatives to keep, of at least n in all. They always sum to n.

    A floor lifts its side's share, as far as there are traces.
    """
    n, total = settings.down_sample_to_n, num_positives + num_negatives
    if not 0 < n <= total:
        raise ValueError(f"{n} of {total} traces cannot be kept")
    least_positives = min(settings.min_non_zero_reward_trace_num, num_positives)
    least_negatives = min(settings.min_zero_reward_trace_num, num_negatives)
    if settings.form == "paper":
        negatives = max(n * num_negatives // total, least_negatives)
        negatives = min(negatives, n - least_positives)
        return n - negatives, negatives
    positives, negatives = (round(n * side / total) for side in (num_positives, num_negatives))
    # Also a side that is exactly at its floor: the two roundings of an odd n need not sum to n.
    if negatives <= least_negatives:
        negatives = least_negatives
        positives = n - negatives
    if positives <= least_positives:
        negatives = n - least_positives
    return n - negatives, negatives


def _num_pairs(text: str) -> int:
    """Return the number of <answer>...</answer>, or 0 where their tags do not alternate."""
    tags = _TAG.findall(text)
    num_pairs = len(tags) // 2
    return num_pairs if tags == ["<answer>", "</answer>"] * num_pairs else 0


def _is_right(trace: Trace) -> bool:
    return trace.reward is not None and trace.reward > 0


def _rejected(rewards: Sequence[float | None], settings: RocSettings) -> Rejected | None:
    if len(rewards) < max(1, settings.down_sample_to_n):
        return Rejected.TOO_FEW
    if settings.reject_equal_reward and len(set(rewards)) == 1:
        return Rejected.EQUAL_REWARDS
    return None


def _weighted_sample(
    indexes: Sequence[int], penalties: Sequence[float], count: int, rng: Random
) -> list[int]:
    """`count` of `indexes`, one after another, each with a chance in proportion to its weight.

    Each has a clock that rings at the rate of its weight; the first to ring are taken (Efraimidis
    and Spirakis, 2006: the same as to draw, put aside and draw again).
    """
    rings = {index: rng.expovariate(1 / max(penalties[index], MIN_PENALTY)) for index in indexes}
    return sorted(indexes, key=rings.__getitem__)[:count]


def _why_dropped(trace: Trace, rejected: Rejected | None) -> Dropped:
    if trace.reward is None:
        return Dropped.INFRASTRUCTURE
    if rejected:
        return Dropped.GROUP_REJECTED
    return Dropped.POSITIVE if _is_right(trace) else Dropped.NEGATIVE
