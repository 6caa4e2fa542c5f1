"""Resample-on-Correct: choose which rollouts of a group to train on. Pure.

From rStar2-Agent, arXiv 2508.20722, section on GRPO-RoC, Eq. 4-5. Sample more rollouts than needed
(in the paper 32 for n = 16), then keep n of them:

    negatives   floor(n/m * num_negatives) of them, uniformly at random
    positives   the rest, without replacement, with weights 1 / p_total

where m is the number of rollouts with a reward (with m = 2n: half of the negatives), and

    p_total  = p_err + p_format
    p_err    = 0.5 if the trace calls no tool, else num_failed_calls / num_calls
    p_format = 1 if it gives no answer, else min(1, (num_answers - 1) / num_turns)

So the negatives keep their variety, and cleaner positives are more likely to be kept. The rules
for a group, in order:

    no reward (infrastructure)  ->  left out, as if it had never been sampled
    fewer than n left           ->  rejected
    all rewards equal, but for rounding
                                ->  rejected, if `reject_equal_reward` is set
    exactly n left              ->  all are kept
    more                        ->  resampled

The form `released` follows the paper's published code, which is deterministic. Both shares are
rounded; a side at or below its floor gets its floor and the other side the rest; the positives with
the smallest penalties and the first negatives are kept. p_format is also 1 if the <answer> and
</answer> tags of the whole response do not alternate. It differs from that code in four ways:

    failed calls  are recognised by their `ToolCallStatus`, not by the word "error" in the output
    turns         all count; the published code leaves out the first, and a last one that was cut
                  off (to reproduce its penalties, pass traces with fewer turns)
    answer tags   count in the model's turns only, not in tool responses
    quotas        always sum to n; the published code fails an assertion if both roundings of an odd
                  n go the same way and neither side is at its floor (here the positives get the
                  rest)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Literal, Self

import pydantic

from agentloop.environments.rewards.answers import tagged_answers
from agentloop.training.credit.grpo import are_equal
from agentloop.trajectory import ToolCallStatus, Trajectory

_TAG = re.compile("</?answer>")

MIN_PENALTY = 0.01
"""Lower bound of the penalty in the weight 1 / p_total, which Eq. 5 leaves undefined for 0.

Penalties above it keep their exact proportions. The smallest nonzero penalty of a rollout of 30
turns with one call each is 1/30, so a flawless trace weighs at least three times as much as any
other and a hundred times as much as one whose calls all failed: it is far more likely to be drawn,
but not certain.
"""


class RocSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of Resample-on-Correct, named as in the paper's published code."""

    form: Literal["paper", "released"] = pydantic.Field(
        "paper",
        description="Form of Resample-on-Correct. paper: sample as in the paper's equations; "
        "released: select as in the authors' code.",
    )
    down_sample_to_n: int = pydantic.Field(
        8, description="Rollouts of each group to train on. 0 or less: all."
    )
    reject_equal_reward: bool = pydantic.Field(
        True,
        description="Do not train on groups whose rewards are all equal, because their advantages "
        "are 0.",
    )
    roc_error_ratio: bool = pydantic.Field(
        True,
        description="Prefer correct rollouts with few failed tool calls; a rollout without any "
        "calls counts as bad.",
    )
    roc_answer_format: bool = pydantic.Field(
        True, description="Prefer correct rollouts with exactly one answer tag."
    )
    min_zero_reward_trace_num: int = pydantic.Field(
        -1,
        description="Minimum number of wrong rollouts to keep, if there are that many; -1: none, "
        "as in the paper, where a single wrong rollout of a group is never kept. The authors' code "
        "uses 2.",
    )
    min_non_zero_reward_trace_num: int = pydantic.Field(
        -1,
        description="Minimum number of correct rollouts to keep, if there are that many; -1: none.",
    )

    @pydantic.model_validator(mode="after")
    def _check_minimums(self) -> Self:
        floors = [self.min_zero_reward_trace_num, self.min_non_zero_reward_trace_num]
        if 0 < self.down_sample_to_n < sum(max(0, floor) for floor in floors):
            raise ValueError(
                f"min_zero_reward_trace_num ({floors[0]}) and min_non_zero_reward_trace_num "
                f"({floors[1]}) add up to more than down_sample_to_n ({self.down_sample_to_n})"
            )
        return self


@dataclass(frozen=True, slots=True)
class Trace:
    """The properties of a rollout that Resample-on-Correct uses.

    Attributes:
        reward: Positive if the rollout is correct; None if the infrastructure failed.
        num_calls: Tool calls that count, failed or not.
        num_answers: Number of <answer> tags that are closed within the same turn, over all turns.
        num_pairs: Number of answers as the published code counts them: in the text of all turns
            joined, or 0 if the tags do not alternate. None: use `num_answers`.
    """

    reward: float | None
    num_calls: int
    num_failed_calls: int
    num_answers: int
    num_turns: int
    num_pairs: int | None = None

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory], reward: float | None) -> Self:
        """Build the trace of a rollout, which has one or more trajectories.

        Calls that were cancelled or lost to the infrastructure do not count.
        """
        excluded = (ToolCallStatus.CANCELLED, ToolCallStatus.INFRASTRUCTURE)
        results = [result for trajectory in trajectories for result in trajectory.results]
        statuses = [result.status for result in results if result.status not in excluded]
        turns = [turn for trajectory in trajectories for turn in trajectory]
        is_lost = any(trajectory.stop_reason.is_unscorable for trajectory in trajectories)
        return cls(
            reward=None if is_lost else reward,
            num_calls=len(statuses),
            num_failed_calls=sum(status.failed for status in statuses),
            num_answers=sum(len(tagged_answers(turn.text)) for turn in turns),
            num_turns=len(turns),
            num_pairs=_num_pairs("\n".join(turn.text for turn in turns)),
        )


class Rejected(StrEnum):
    """Reason why a whole group was rejected."""

    EQUAL_REWARDS = "equal_rewards"
    TOO_FEW = "too_few"


class DropReason(StrEnum):
    """Reason why a rollout was not kept."""

    NO_REWARD = "no_reward"
    GROUP_REJECTED = "group_rejected"
    NEGATIVE = "negative"  # over the quota of wrong rollouts
    POSITIVE = "positive"  # over the quota of correct rollouts


@dataclass(frozen=True, slots=True)
class Selection:
    """The rollouts kept of a group. Each index into the traces is either kept or dropped.

    Attributes:
        kept: Indexes in ascending order.
        penalties: p_total of every trace, correct or wrong.
    """

    kept: list[int]
    dropped: dict[int, DropReason]
    rejected: Rejected | None
    penalties: list[float]


def resample(traces: Sequence[Trace], settings: RocSettings, rng: Random) -> Selection:
    """Choose the rollouts to train on; deterministic for the same state of `rng`."""
    penalties = [penalty(trace, settings) for trace in traces]
    scored = [index for index, trace in enumerate(traces) if trace.reward is not None]
    rejected = _rejection([traces[index].reward for index in scored], settings)
    if rejected:
        kept = []
    elif 0 < settings.down_sample_to_n < len(scored):
        positives = [index for index in scored if _is_correct(traces[index])]
        negatives = [index for index in scored if not _is_correct(traces[index])]
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
    return Selection(sorted(kept), dropped, rejected, penalties)


def penalty(trace: Trace, settings: RocSettings) -> float:
    """Return p_total of the enabled parts, from 0 (flawless) to 2."""
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
    """Return how many positives and negatives to keep of n traces or more; the two sum to n.

    A minimum raises the share of its side, up to the number of its traces.
    """
    n, total = settings.down_sample_to_n, num_positives + num_negatives
    least_positives = min(settings.min_non_zero_reward_trace_num, num_positives)
    least_negatives = min(settings.min_zero_reward_trace_num, num_negatives)
    if settings.form == "paper":
        negatives = max(n * num_negatives // total, least_negatives)
        negatives = min(negatives, n - least_positives)
        return n - negatives, negatives
    positives, negatives = (round(n * side / total) for side in (num_positives, num_negatives))
    # Use <=, not <: the two roundings of an odd n need not sum to n.
    if negatives <= least_negatives:
        negatives = least_negatives
        positives = n - negatives
    if positives <= least_positives:
        negatives = n - least_positives
    return n - negatives, negatives


def _num_pairs(text: str) -> int:
    """Return the number of <answer>...</answer> pairs, or 0 if the tags do not alternate."""
    tags = _TAG.findall(text)
    num_pairs = len(tags) // 2
    return num_pairs if tags == ["<answer>", "</answer>"] * num_pairs else 0


def _is_correct(trace: Trace) -> bool:
    return trace.reward is not None and trace.reward > 0


def _rejection(rewards: Sequence[float | None], settings: RocSettings) -> Rejected | None:
    if len(rewards) < max(1, settings.down_sample_to_n):
        return Rejected.TOO_FEW
    values = [reward for reward in rewards if reward is not None]
    if settings.reject_equal_reward and are_equal(values):
        return Rejected.EQUAL_REWARDS
    return None


def _weighted_sample(
    indexes: Sequence[int], penalties: Sequence[float], count: int, rng: Random
) -> list[int]:
    """Draw `count` of `indexes` without replacement, with probability proportional to weight.

    Equivalent to taking the first arrivals of independent exponential clocks whose rates are the
    weights (Efraimidis and Spirakis, 2006).
    """
    arrivals = {index: rng.expovariate(1 / max(penalties[index], MIN_PENALTY)) for index in indexes}
    return sorted(indexes, key=arrivals.__getitem__)[:count]


def _why_dropped(trace: Trace, rejected: Rejected | None) -> DropReason:
    if trace.reward is None:
        return DropReason.NO_REWARD
    if rejected:
        return DropReason.GROUP_REJECTED
    return DropReason.POSITIVE if _is_correct(trace) else DropReason.NEGATIVE
