"""The evaluation of runs in the benchmark of Resample-on-Correct."""

from __future__ import annotations

from typing import Any

from agentloop.cli.train import TrainSettings
from agentloop.cli.train_checks import check_settings
from agentloop.config import load_settings
from agentloop.models import SMALL
from bench.roc import ARMS, RECIPE, Run, summary

ROWS: list[dict[str, Any]] = [
    {"step": 0, "held_out/reward": 0.4, "held_out/tool_errors_in_correct": 0.25},
    {"step": 1, "reward": 0.5, "tool_errors_in_correct": None, "num_sampled_tokens": 100},
    {"step": 2, "reward": 0.7, "tool_errors_in_correct": 0.2, "num_sampled_tokens": 50},
    {"step": 2, "held_out/reward": 0.8, "held_out/tool_errors_in_correct": 0.125},
]


def test_a_run_is_read_from_its_metrics() -> None:
    run = Run.of("roc", 3, ROWS)
    assert run.tokens == [100, 150]
    assert run.held_out == [(0.4, 0.25), (0.8, 0.125)]
    assert run.at_the_end(run.errors) == 0.2


def test_the_table_has_a_row_for_each_arm() -> None:
    head, _, *rows = summary([Run.of("grpo", 0, ROWS), Run.of("roc", 0, ROWS)])
    assert head.startswith("| arm |")
    assert [row.split()[1] for row in rows] == ["grpo", "roc"]
    assert "0.800 (0.800 to 0.800)" in rows[0]


def test_arms_differ_only_in_the_trained_rollouts() -> None:
    """Sampling is the same, and each arm is a valid run."""
    settings = [
        check_settings(
            load_settings(TrainSettings, [RECIPE], [f"model='{SMALL}'", "loop.steps=3", *arm])
        )
        for arm in ARMS.values()
    ]
    for setting in settings:
        assert setting.tasks == settings[0].tasks
        assert setting.sampling == settings[0].sampling
        assert setting.loop.group_size * setting.loop.prompts_per_step == 128
    assert [setting.roc.down_sample_to_n for setting in settings] == [0, 8, 8, 8]
