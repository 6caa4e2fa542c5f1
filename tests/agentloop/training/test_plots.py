"""The pictures of runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentloop.errors import SettingsError
from agentloop.training.plots import plot_runs


def run(folder: Path, rows: list[dict[str, object]]) -> Path:
    folder.mkdir()
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines, "utf-8")
    return folder


def test_runs_are_drawn_with_what_they_have(tmp_path: Path) -> None:
    step: dict[str, object] = {
        "step": 1,
        "reward": 0.5,
        "tool_errors_in_correct": None,
        "step_s": 2,
        "rollout_s": 1,
    }
    whole = run(tmp_path / "whole", [{"step": 0, "held_out/reward": 0.4}, step])
    empty = run(tmp_path / "empty", [])
    out = tmp_path / "plots.png"
    plot_runs([whole, empty], out)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_a_run_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nothing to draw: .*metrics\.jsonl"):
        plot_runs([tmp_path], tmp_path / "plots.png")
