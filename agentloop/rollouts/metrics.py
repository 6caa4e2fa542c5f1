"""The metrics of a step's groups of rollouts. Pure."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from agentloop.events import ToolRaised
from agentloop.plain_json import JsonObject
from agentloop.rollouts.record import RolloutGroup, RolloutRecord
from agentloop.trajectory import StopReason, ToolCallStatus, Trajectory

_MIN_CALLS = 10  # of a tool, before anything is said of it
_OURS = (ToolCallStatus.CANCELLED, ToolCallStatus.INFRASTRUCTURE)
_TRUNCATED = (StopReason.TOKEN_BUDGET, StopReason.TURN_BUDGET)


@dataclass(frozen=True, slots=True)
class RolloutFigures:
    """The figures of one scored rollout.

    Attributes:
        reward: reward; None: there is none.
        no_reward: reason for that (`NoReward`).
        reason: the same in words, or how it got its reward.
        parts: the named parts of its reward.
        recorded: what its environment has measured, by name.
        has_answer: whether an answer was found in what it said.
        tool_errors: share of its calls that failed; None: it made none.
        num_tokens: number of sampled tokens; None: its endpoint does not count them.
        truncated: whether it ran out of its budget of tokens or turns.
        filtered: whether an endpoint's content filter withheld its answer.
        versions: versions of the weights that sampled it.
    """

    reward: float | None
    no_reward: str | None = None
    reason: str = ""
    parts: Mapping[str, float] = field(default_factory=dict)
    recorded: Mapping[str, float] = field(default_factory=dict)
    has_answer: bool = True
    tool_errors: float | None = None
    num_tokens: int | None = 0
    num_turns: int = 0
    truncated: bool = False
    filtered: bool = False
    versions: Sequence[str] = field(default_factory=list)

    @classmethod
    def of(cls, rollout: RolloutRecord) -> RolloutFigures:
        """Compute the figures of a rollout, from the conversations of its own agent."""
        trajectories, reward = rollout.trajectories, rollout.reward
        assert reward is not None
        num_tokens = rollout.num_tokens
        if num_tokens is None and all(trajectory.has_ids for trajectory in trajectories):
            num_tokens = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
        spans = (
            span for trajectory in trajectories for turn in trajectory for span in turn.versions
        )
        return cls(
            reward.value,
            rollout.no_reward,
            reward.reason,
            dict(reward.parts),
            dict(rollout.recorded),
            reward.answer is not None,
            _tool_error_ratio(trajectories),
            num_tokens,
            sum(len(trajectory.turns) for trajectory in trajectories),
            any(trajectory.stop_reason in _TRUNCATED for trajectory in trajectories),
            any(trajectory.stop_reason is StopReason.CONTENT_FILTER for trajectory in trajectories),
            sorted({span.version for span in spans}),
        )


@dataclass(frozen=True, slots=True)
class GroupFigures:
    """The figures of a group, as the journal keeps them.

    Attributes:
        rejected: reason why no rollout was selected; None: some were, or there was no selection.
        has_signal: whether there is a learning signal: an advantage other than 0. None: nothing
            was to be trained on.
    """

    rollouts: Sequence[RolloutFigures] = field(default_factory=list)
    rejected: str | None = None
    has_signal: bool | None = None

    @classmethod
    def of(
        cls, group: RolloutGroup, rejected: str | None = None, has_signal: bool | None = None
    ) -> GroupFigures:
        return cls([RolloutFigures.of(rollout) for rollout in group.rollouts], rejected, has_signal)

    @classmethod
    def from_dict(cls, row: JsonObject) -> GroupFigures:
        """Rebuild figures from the output of `asdict`; without any, those of an empty group."""
        rollouts = [RolloutFigures(**rollout) for rollout in row.get("rollouts", ())]
        return cls(rollouts, row.get("rejected"), row.get("has_signal"))


@dataclass(frozen=True, slots=True)
class RolloutMetrics:
    """Metrics of rollouts. Means are over rollouts with a reward; None: there are none.

    Attributes:
        reward: mean reward.
        groups_with_signal: share of groups with a learning signal, among those to be trained on.
        tool_errors_in_correct: mean share of failed calls in rollouts with a positive reward that
            make calls.
        tool_errors: the same of all rollouts that make calls.
        no_answer: share of rollouts without an answer.
        without_reward: number of rollouts without one, by the reason (`NoReward`).
        num_groups_rejected: number of groups that were not selected for training.
        num_sampled_tokens: number of sampled tokens of rollouts with a reward, as far as known.
        length_mean: mean number of sampled tokens, where it is known.
        versions_mean: mean number of versions of the weights that sampled a rollout.
        truncated: share of rollouts that ran out of their budget of tokens or turns.
        pass_at_k: share of groups with at least one positive reward, among those with a reward.
    """

    reward: float | None
    groups_with_signal: float | None
    tool_errors_in_correct: float | None
    tool_errors: float | None
    no_answer: float | None
    num_groups: int
    num_rollouts: int
    num_without_reward: int
    without_reward: Mapping[str, int]
    num_groups_rejected: int
    num_sampled_tokens: int
    length_mean: float | None
    turns_mean: float | None
    versions_mean: float | None
    truncated: float | None
    pass_at_k: float | None

    @property
    def with_signal(self) -> str:
        """The number of groups with a learning signal, such as `6 of 8`."""
        return f"{(self.groups_with_signal or 0.0) * self.num_groups:.0f} of {self.num_groups}"

    def row(self) -> dict[str, float | None]:
        """Return the metrics as plain data, those by reason as `without_reward/REASON`."""
        row = asdict(self)
        by_reason = row.pop("without_reward")
        return row | {f"without_reward/{reason}": num for reason, num in by_reason.items()}


def about(groups: Sequence[GroupFigures]) -> RolloutMetrics:
    """Compute metrics from the figures of groups."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    scored = [(rollout, rollout.reward) for rollout in rollouts if rollout.reward is not None]
    ratios = [
        (rollout.tool_errors, reward)
        for rollout, reward in scored
        if rollout.tool_errors is not None
    ]
    lengths = [rollout.num_tokens for rollout, _ in scored if rollout.num_tokens is not None]
    rewards_of_groups = [
        [rollout.reward for rollout in group.rollouts if rollout.reward is not None]
        for group in groups
    ]
    return RolloutMetrics(
        reward=_fmean([reward for _, reward in scored]),
        groups_with_signal=_fmean(
            [group.has_signal for group in groups if group.has_signal is not None]
        ),
        tool_errors_in_correct=_fmean([ratio for ratio, reward in ratios if reward > 0]),
        tool_errors=_fmean([ratio for ratio, _ in ratios]),
        no_answer=_fmean([not rollout.has_answer for rollout, _ in scored]),
        num_groups=len(groups),
        num_rollouts=len(rollouts),
        num_without_reward=len(rollouts) - len(scored),
        without_reward=dict(
            Counter(str(rollout.no_reward) for rollout in rollouts if rollout.reward is None)
        ),
        num_groups_rejected=sum(group.rejected is not None for group in groups),
        num_sampled_tokens=sum(lengths),
        length_mean=_fmean(lengths),
        turns_mean=_fmean([rollout.num_turns for rollout, _ in scored]),
        versions_mean=_fmean([len(rollout.versions) for rollout, _ in scored]),
        truncated=_fmean([rollout.truncated for rollout, _ in scored]),
        pass_at_k=_fmean([max(rewards) > 0 for rewards in rewards_of_groups if rewards]),
    )


def about_each(groups: Iterable[tuple[str, GroupFigures]]) -> dict[str, float | None]:
    """Compute the metrics of each environment, by names such as `env/guess/reward`.

    The means of the parts of a reward are `env/guess/part/found`, those of what the environment
    records `env/guess/recorded/tries`.

    Args:
        groups: the name of each group's environment, and its figures. Groups without a name, of a
            run with a single environment, have only these means: `part/found`.
    """
    groups_of: dict[str, list[GroupFigures]] = {}
    for name, group in groups:
        groups_of.setdefault(name, []).append(group)
    metrics: dict[str, float | None] = {}
    for name in sorted(groups_of):
        prefix = f"env/{name}/" if name else ""
        if name:
            of_all = about(groups_of[name]).row()
            metrics |= {f"{prefix}{metric}": value for metric, value in of_all.items()}
        parts, recorded = mean_parts(groups_of[name]), mean_recorded(groups_of[name])
        metrics |= {f"{prefix}part/{part}": mean for part, mean in parts.items()}
        metrics |= {f"{prefix}recorded/{key}": mean for key, mean in recorded.items()}
    return metrics


def mean_parts(groups: Sequence[GroupFigures]) -> dict[str, float]:
    """Return the mean of each named part of the reward, over the rollouts that have it."""
    return _mean_of_each(rollout.parts for group in groups for rollout in group.rollouts)


def mean_recorded(groups: Sequence[GroupFigures]) -> dict[str, float]:
    """Return the mean of each recorded value, over the rollouts with a reward that have it."""
    rollouts = (rollout for group in groups for rollout in group.rollouts)
    return _mean_of_each(one.recorded for one in rollouts if one.reward is not None)


def _mean_of_each(rows: Iterable[Mapping[str, float]]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, []).append(value)
    return {name: statistics.fmean(values[name]) for name in sorted(values)}


def rewards_of_each(metrics: Mapping[str, float | None]) -> str:
    """Return the rewards among the result of `about_each` in words; empty if there are none."""
    rewards = [
        f"{name.split('/')[1]} {mean(value)}"
        for name, value in metrics.items()
        if re.fullmatch("env/[^/]+/reward", name)
    ]
    return f" ({', '.join(rewards)})" if rewards else ""


class RaisedErrors:
    """Counts what tools raise, and says so where it is the same in most of their calls.

    It is said again of ten times as many calls.
    """

    def __init__(self) -> None:
        self._num_calls: Counter[str] = Counter()
        self._num_raised: Counter[tuple[str, str]] = Counter()
        self._next: dict[tuple[str, str], int] = {}  # how many calls there are when it is said

    def add(self, group: str, rollouts: Sequence[RolloutRecord]) -> list[ToolRaised]:
        """Count the calls of a group, and return what is to be said after it."""
        for rollout in rollouts:
            for trajectory in rollout.all_trajectories:
                for result in trajectory.results:
                    if result.status.ran and result.status not in _OURS:
                        self._num_calls[result.name] += 1
                        self._num_raised[result.name, result.raised] += bool(result.raised)
        news = []
        for (tool, error), num_raised in self._num_raised.items():
            num_calls = self._num_calls[tool]
            is_due = num_calls >= self._next.get((tool, error), _MIN_CALLS)
            if is_due and 2 * num_raised > num_calls:
                self._next[tool, error] = 10 * num_calls
                news.append(ToolRaised(group, tool, error, num_raised, num_calls))
        return news


def _fmean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _tool_error_ratio(trajectories: Sequence[Trajectory]) -> float | None:
    """Return the share of a rollout's calls that failed, or None without calls."""
    results = (result for trajectory in trajectories for result in trajectory.results)
    statuses = [result.status for result in results if result.status not in _OURS]
    return sum(status.failed for status in statuses) / len(statuses) if statuses else None


def mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
