"""What the field wants to know of a step's rollouts. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, Protocol

from agentloop.groups.reward import Reward
from agentloop.groups.roc import Choice
from agentloop.trajectory import CallStatus, StopReason, Trajectory

__all__ = ["ScoredGroup", "about", "mean", "percent"]


_TRUNCATED = (StopReason.TOKEN_BUDGET, StopReason.TURN_BUDGET)


class ScoredGroup(Protocol):
    """The rollouts of a task, each with its reward, and which of them were chosen."""

    trajectories: Sequence[Trajectory]
    rewards: list[Reward]
    choice: Choice


def about(groups: Sequence[ScoredGroup]) -> dict[str, Any]:
    """What the field wants to know of rollouts. Means are over those with a reward."""
    pairs = [
        (trajectory, reward.value)
        for group in groups
        for trajectory, reward in zip(group.trajectories, group.rewards, strict=True)
    ]
    scored = [(trajectory, value) for trajectory, value in pairs if value is not None]
    ratios = [
        ratio
        for trajectory, value in scored
        if value > 0 and (ratio := _tool_error_ratio(trajectory)) is not None
    ]
    lengths = [trajectory.num_sampled_tokens for trajectory, _ in scored]
    return {
        "reward": statistics.fmean(value for _, value in scored) if scored else None,
        "tool_errors_in_correct": statistics.fmean(ratios) if ratios else None,
        "num_rollouts": len(pairs),
        "num_without_reward": len(pairs) - len(scored),
        "num_groups_rejected": sum(group.choice.rejected is not None for group in groups),
        "num_sampled_tokens": sum(lengths),
        "length_mean": _fmean(lengths),
        "turns_mean": _fmean([len(t.turns) for t, _ in scored]),
        "truncated": _fmean([t.stop_reason in _TRUNCATED for t, _ in scored]),
        "pass_at_k": _fmean([any(_is_right(one) for one in group.rewards) for group in groups]),
    }


def _is_right(reward: Reward) -> bool:
    return reward.value is not None and reward.value > 0


def _fmean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def _tool_error_ratio(trajectory: Trajectory) -> float | None:
    """Failed calls by calls; None without any."""
    ours = (CallStatus.CANCELLED, CallStatus.INFRASTRUCTURE)
    statuses = [result.status for result in trajectory.results if result.status not in ours]
    return sum(status.failed for status in statuses) / len(statuses) if statuses else None


def mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"
