"""What is said of a run's learning, from its metrics: what it has learned, or why it cannot."""

from __future__ import annotations

from typing import Any

import pytest

from agentloop.rollouts.metrics import GroupFigures, RolloutFigures, about
from agentloop.training.run.learning import Headline, headline, held_out_rewards


def step(reward: float | None, share: float = 0.0, **more: float | None) -> dict[str, Any]:
    return {"step": 1, "reward": reward, "groups_with_signal": share, "num_groups": 8, **more}


def held_out(reward: float | None) -> dict[str, Any]:
    return {"step": 1, "held_out/reward": reward, "held_out/groups_with_signal": None}


def test_first_and_last_held_out_reward() -> None:
    rows = [held_out(0.41), step(0.5, 0.75), held_out(0.7), step(0.5, 0.25), held_out(0.8567)]
    assert held_out_rewards(rows) == "held out 0.41 -> 0.86"
    assert headline(rows) == Headline("held out 0.41 -> 0.86; 2 of 8 groups have a signal", False)
    assert held_out_rewards(rows[:1]) == held_out_rewards([*rows[:1], held_out(None)]) == ""
    assert headline(rows[:1]) is None


def test_metrics_of_wrong_rollouts() -> None:
    wrong = RolloutFigures(0.0, has_answer=False, tool_errors=0.5)
    groups = [GroupFigures([wrong, RolloutFigures(1.0)], None, True), GroupFigures([wrong])]
    row = about(groups).row()
    assert (row["groups_with_signal"], row["no_answer"], row["tool_errors"]) == (1, 2 / 3, 0.5)


@pytest.mark.parametrize(
    ("reward", "more", "says"),
    [
        (1.0, {}, "all rewards are 1; take harder problems (tasks.levels, tasks.paths), or "),
        (0.0, {}, "all rewards are 0; take easier problems "),
        (0.0, {"truncated": 0.75, "no_answer": 0.9},
         "all rewards are 0, and 75% of the rollouts are cut off; raise budget."),
        (0.0, {"truncated": 0.2, "no_answer": 0.9}, "all rewards are 0, and 90% give no answer; "),
        (0.0, {"tool_errors": 1.0}, "all rewards are 0, and 100% of their calls fail; "),
        (0.25, {"truncated": 1.0}, "the rewards within each group are equal; "),
        (None, {}, "no rollout has a reward; "),
    ],
)  # fmt: skip
def test_three_steps_without_a_signal(
    reward: float | None, more: dict[str, float], says: str
) -> None:
    rows = [step(reward, 0.125), *[step(reward, **more)] * 2]
    assert headline(rows) == Headline("0 of 8 groups have a signal", False)
    stated = headline([*rows, held_out(0.5), step(reward, **more)]) or Headline("", False)
    assert stated.is_stuck
    assert stated.text.startswith(f"0 of 8 groups have a signal: {says}")
