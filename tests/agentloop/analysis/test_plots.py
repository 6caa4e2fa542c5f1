"""Plots of runs."""

from __future__ import annotations

import builtins
import json
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.analysis.plots import PANELS, labels_of, moving_average, plot_runs
from agentloop.errors import RunFolderError, SettingsError


def run(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(lines, "utf-8")
    return folder


def steps(num: int, **more: Any) -> list[dict[str, Any]]:
    """Return rows as training writes them, with an evaluation before the first step."""
    measured = {"step": 0, "held_out/reward": 0.4, "held_out/tool_errors_in_correct": None}
    times = {"step_s": 2.0, "wait_s": 1.0, "learn_s": 0.5, "sync_s": None}
    return [
        measured,
        *(
            {
                "step": step,
                "reward": step / num,
                "tool_errors_in_correct": None,
                "num_sampled_tokens": 100,
                "learner/entropy": 0.5,
                **times,
                **more,
            }
            for step in range(1, num + 1)
        ),
    ]


def words(path: Path) -> list[str]:
    """Return the texts in an SVG file."""
    root = ElementTree.parse(path).getroot()
    return [
        text for element in root.iter("{http://www.w3.org/2000/svg}text") if (text := element.text)
    ]


def titles(path: Path) -> set[str]:
    return {panel.title for panel in PANELS.values()} & set(words(path))


@pytest.mark.full
def test_runs_are_drawn_with_what_they_have(tmp_path: Path) -> None:
    long_run, empty = run(tmp_path / "whole", steps(70)), run(tmp_path / "empty", [])
    png, svg = tmp_path / "plots.png", tmp_path / "plots.svg"
    plot_runs([long_run, empty], png, svg)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert titles(svg) == {
        "reward",
        "sampled tokens per second",
        "entropy, nats per token",
        "seconds per step",
    }
    assert {"whole", "empty", "with markers: held-out tasks"} <= set(words(svg))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "empty",
        "plots.png",
        "plots.svg",
        "whole",
    ]


def test_step_times_by_part_are_plotted_for_one_run(tmp_path: Path) -> None:
    first, second = run(tmp_path / "one", steps(3)), run(tmp_path / "other", steps(3))
    parts = {"waiting for rollouts", "training", "weight sync"}
    plot_runs([first], tmp_path / "a.svg", what=["times"])
    assert parts <= set(words(tmp_path / "a.svg"))
    plot_runs([first, second], tmp_path / "b.svg", what=["times"])
    assert not parts & set(words(tmp_path / "b.svg"))


def test_reward_of_each_environment_is_plotted(tmp_path: Path) -> None:
    more = {"env/guess/reward": 0.5, "env/guess/length_mean": 9, "held_out/env/solve/reward": 1}
    folder, out = run(tmp_path / "one", steps(3, **more)), tmp_path / "plots.svg"
    plot_runs([folder], out)
    assert {"reward", "reward of guess", "reward of solve"} <= set(words(out))
    plot_runs([folder], out, what=["env/guess/length_mean"])
    assert "reward of guess" not in words(out)


def test_metrics_of_an_environment_are_plotted(tmp_path: Path) -> None:
    more = {"part/found": 0.5, "held_out/recorded/tries": 3, "env/guess/recorded/tries": 4}
    single, out = run(tmp_path / "one", steps(3, **more)), tmp_path / "plots.svg"
    plot_runs([single], out)
    assert {"part found", "recorded tries", "recorded tries of guess"} <= set(words(out))


def test_requested_metrics_are_plotted(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", steps(3, **{"learner/grad_norm": 0.1}))
    out = tmp_path / "plots.svg"
    plot_runs([folder], out, what=["learner/grad_norm", "reward"])
    assert titles(out) == {"reward"}
    assert "learner/grad_norm" in words(out)
    with pytest.raises(SettingsError, match=r"--what: rewards: .* available: reward"):
        plot_runs([folder], out, what=["rewards"])
    with pytest.raises(SettingsError, match="--what: tool_errors: these runs have no such metric"):
        plot_runs([folder], out, what=["tool_errors"])


def test_supervised_run_has_a_loss(tmp_path: Path) -> None:
    rows = [{"step": 1, "learner/loss": 0.5, "learner/entropy": 1.0, "step_s": 1.0}]
    plot_runs([run(tmp_path / "run", rows)], tmp_path / "plots.svg")
    assert titles(tmp_path / "plots.svg") == {"loss", "entropy, nats per token"}


def test_run_that_has_nothing_yet_is_drawn_empty(tmp_path: Path) -> None:
    plot_runs([run(tmp_path / "run", [])], tmp_path / "plots.png")
    assert (tmp_path / "plots.png").read_bytes().startswith(b"\x89PNG")


def test_same_runs_give_the_same_picture(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", steps(3))
    for name in ("a.svg", "b.svg"):
        plot_runs([folder], tmp_path / name, what=["reward"])
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("name", ["_hidden", "$x^2$", "a$b$", "<&>", "\u8dd1"])
def test_name_is_not_read_as_markup(tmp_path: Path, name: str) -> None:
    plot_runs([run(tmp_path / name, steps(1))], tmp_path / "plots.svg", what=["reward"])
    assert name in {word.strip() for word in words(tmp_path / "plots.svg")}


def test_run_without_metrics_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"nothing to plot: .*metrics\.jsonl"):
        plot_runs([tmp_path], tmp_path / "plots.png")


def test_truncated_line_is_ignored_and_damaged_one_reported(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", steps(2))
    content = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(content + '{"step": 3, "rew')
    assert plot_runs([folder], tmp_path / "plots.svg", what=["reward"]) == []
    expected = (tmp_path / "plots.svg").read_bytes()
    for damage in ("{\n", '{"reward": 1}\n', "[]\n"):
        (folder / "metrics.jsonl").write_text(damage + content)
        (problem,) = plot_runs([folder], tmp_path / "plots.svg", what=["reward"])
        assert f"{folder}: metrics.jsonl: " in problem
        assert (tmp_path / "plots.svg").read_bytes() == expected
        (folder / "metrics.jsonl").write_text(damage)
        with pytest.raises(RunFolderError, match=r"nothing to plot: .*metrics\.jsonl: "):
            plot_runs([folder], tmp_path / "plots.svg")


def test_places_that_are_none_are_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", steps(1))
    with pytest.raises(
        SettingsError, match=r"plots\.pdf: the file name must end in \.png or \.svg"
    ):
        plot_runs([folder], tmp_path / "plots.pdf")
    with pytest.raises(SettingsError, match="nowhere"):
        plot_runs([folder], tmp_path / "nowhere" / "plots.png", what=["reward"])


def test_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without(name: str, *arguments: Any, **more: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(name)
        return real_import(name, *arguments, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(SettingsError, match=r"matplotlib: pip install 'agentloop-rl\[train\]'"):
        plot_runs([run(tmp_path / "run", steps(1))], tmp_path / "plots.png")


def test_labels_are_as_long_as_they_must_be(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a/run", "b/run", "other")]
    assert labels_of(paths) == ["a/run", "b/run", "other"]
    assert labels_of([paths[0], paths[0]]) == ["run", "run (2)"]
    assert labels_of([Path("/")]) == ["/"]
    (tmp_path / "a" / "run").mkdir(parents=True)
    (tmp_path / "latest").symlink_to("a/run")
    assert labels_of([tmp_path / "latest"]) == ["run"]


@given(st.lists(st.floats(-1e6, 1e6)), st.integers(0, 10))
def test_smoothing_is_a_mean_of_neighbours(values: list[float], window: int) -> None:
    averages = moving_average(values, window)
    assert len(averages) == len(values)
    for index, average in enumerate(averages):
        near = values[max(0, index - window) : index + window + 1]
        assert average == pytest.approx(math.fsum(near) / len(near), abs=1e-3)
