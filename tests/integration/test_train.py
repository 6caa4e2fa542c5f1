"""Training end to end with the real parts: SGLang, the sandbox, DeepSpeed with two ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from agentloop.cli.chat import settings_of
from agentloop.cli.replay import replay
from agentloop.config import load_settings
from agentloop.environments.tasks.sources import Task
from agentloop.launch.progress import ProgressLine
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.wiring import train
from agentloop.trajectory import Trajectory
from tests.fakes import RecordedProgress
from tests.integration.quickstart import QuickStart

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("docker_engine", "sglang_installed"),
]

RECIPE = Path(__file__).parents[2] / "agentloop" / "cli" / "recipes" / "small.toml"
CUT_SHORT = [  # of laptop.toml
    "sft.data.teacher=40",
    "stages.short.steps=1",
    "stages.short.max_response_tokens=40",
    "stages.longer.steps=1",
    "stages.hard.steps=1",
    "stages.hard.filter_tasks=2",
    "budget.max_response_tokens=60",
    "loop.prompts_per_step=2",
    "loop.group_size=4",
    "loop.evaluate_tasks=2",
    "tasks.held_out=2",
    "roc.down_sample_to_n=3",
    "ranks.nproc_per_node=1",  # two: above
    "roc.reject_equal_reward=false",
    f"reward.function={__name__}:coin",
]


def coin(trajectory: Trajectory, task: Task) -> float | None:
    """The small model is as good as always right here, which would teach it nothing."""
    if not trajectory.logprobs:
        return None  # the row's own answer, which the start of a run scores
    return int(-sum(trajectory.logprobs) * 1e6) % 2


@pytest.mark.gate
async def test_two_steps_of_training_change_what_the_servers_serve(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The quick start's run, cut short."""
    page = QuickStart("train.md", tmp_path)
    page.write_files()
    assert "inference  1 server" in page.run()  # the plan
    overrides = [
        f"tasks.paths=['{tmp_path}/tasks.jsonl']", f"run.folder={tmp_path}/runs", "loop.steps=2",
        "loop.prompts_per_step=3", "loop.evaluate_tasks=4", "loop.group_size=6",
        "roc.down_sample_to_n=4", "roc.reject_equal_reward=false", "sampling.temperature=2.5",
        f"reward.function={__name__}:coin",
    ]  # fmt: skip
    settings = load_settings(TrainSettings, [tmp_path / "my.toml"], overrides)
    stated = RecordedProgress()
    folder = await train(settings, cast(ProgressLine, stated))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [first for first in metrics if "reward" in first]
    assert [first["step"] for first in steps] == [1, 2]
    for first in steps:
        assert first["num_rollouts"] == 18
        assert first["num_without_reward"] == 0
        assert first["weights/num_failed"] == 0
        assert first["learner/num_updates"] == first["step"]
        # The engine's log-probabilities are those of the weights that the learner has.
        assert abs(first["learner/mismatch_kl"]) < 1e-3
    files = sorted((folder / "trajectories").iterdir())
    rows = [line for file in files[len(files) // 2 :] for line in file.read_text().splitlines()]
    turns = [turn for row in map(json.loads, rows) for turn in row["trajectory"]["turns"]]
    versions = {span["version"] for turn in turns for span in turn["versions"]}
    assert versions == {"1"}
    assert (folder / "weights" / "2" / "model.safetensors").stat().st_size > 1_000_000
    assert (folder / "checkpoints" / "step-00002" / "state.json").exists()
    # Everything again from the journal, and the second step alone.
    capsys.readouterr()
    assert await replay(folder, None) == 0
    assert capsys.readouterr().err.count("weights: the same") == 3  # as they began, and each step
    assert await replay(folder, (2, 2)) == 0
    printed = capsys.readouterr()
    assert "step 2: loss" in printed.err
    assert "|learner - engine|: mean" in printed.out
    watch, *remaining = stated.lines
    assert watch.startswith("Watch it: http://127.0.0.1:")
    assert len(remaining) == 5
    assert remaining[-1].startswith("held out 0.")
    page.run(only="runs export")
    assert (tmp_path / "models/mine/model.safetensors").stat().st_size > 1_000_000


async def test_cut_distribution_is_trained_on_as_it_was_sampled(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [
        f"run.folder={tmp_path}",
        "run.name=cut",
        "sampling={top_p=0.9, top_k=20, min_p=0.01, temperature=2.5}",
        "loop={steps=2, prompts_per_step=3, group_size=6, evaluate_tasks=2}",
        "roc={down_sample_to_n=4, reject_equal_reward=false}",
        "tasks.held_out=2",
        "learner.loss={kl_coef=0.1, entropy_coef=0.01}",
        f"reward.function={__name__}:coin",
    ]
    settings = load_settings(TrainSettings, [RECIPE], overrides)
    folder = await train(settings, cast(ProgressLine, RecordedProgress()))
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [first for first in metrics if "learner/kl" in first]
    assert [first["step"] for first in steps] == [1, 2]
    for first in steps:
        assert abs(first["learner/mismatch_kl"]) < 1e-9
    assert steps[0]["learner/kl"] == pytest.approx(0, abs=1e-9)
    rows = [
        json.loads(line)["trajectory"]
        for path in sorted((folder / "trajectories").iterdir())
        for line in path.read_text().splitlines()
    ]
    turns = [turn for row in map(Trajectory.from_dict, rows) for turn in row]
    evaluated = [turn for turn in turns if turn.kept is None]
    kept = [row for turn in turns for row in turn.kept or ()]
    assert all(1 <= len(row) <= 20 for row in kept)
    assert len(kept) == sum(len(turn.output_ids) for turn in turns if turn not in evaluated)
    assert len(kept) < sum(map(len, kept)) < 20 * len(kept)
    capsys.readouterr()
    assert await replay(folder, None) == 0
    assert capsys.readouterr().err.count("weights: the same") == 3


async def test_run_from_nothing_through_its_stages(tmp_path: Path) -> None:
    """laptop.toml, cut short: a model that has learned nothing yet, but each part is there."""
    overrides = [*CUT_SHORT, f"run.folder={tmp_path}", "run.name=laptop"]
    settings = load_settings(TrainSettings, [RECIPE.with_name("laptop.toml")], overrides)
    stated = RecordedProgress()
    folder = await train(settings, cast(ProgressLine, stated))
    stages = [line for line in stated.lines if line.startswith("Stage ")]
    assert [line.split(",")[0] for line in stages] == [
        "Stage 1 of 3: short",
        "Stage 2 of 3: longer",
        "Stage 3 of 3: hard",
    ]
    assert (folder / "sft" / "model" / "model.safetensors").exists()
    assert (folder / "plots.png").read_bytes().startswith(b"\x89PNG")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = {json.loads(line)["step"] for line in lines}
    assert {0, 1, 2} <= steps
    # What `agentloop chat --run` takes.
    requests = settings_of([], tmp_path / "latest")
    assert requests.model is not None
    assert Path(requests.model).parent.name == "weights"
    config = json.loads((Path(requests.model) / "config.json").read_text())
    assert config["num_hidden_layers"] == 3
    assert requests.tools == ["python_code_with_standard_io"]
