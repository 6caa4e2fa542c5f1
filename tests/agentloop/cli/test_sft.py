"""`agentloop sft`: its settings, and training from random weights with a real learner."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest

import agentloop.cli.sft
import agentloop.training.sft.run
from agentloop.__main__ import main
from agentloop.cli.sft import load_run_settings
from agentloop.config import load_settings, to_toml
from agentloop.environments.tasks.teacher import lessons
from agentloop.models import SMALL
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.run.folder import RunFolder, checkpoints_in
from agentloop.training.run.status import RunStatus
from agentloop.training.sft.run import SftSettings, sft
from tests.fakes import RecordedProgress
from tests.support import eventually

RECIPES = Path(__file__).parents[3] / "agentloop" / "cli" / "recipes"


def test_every_setting_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "--list-settings"]) == 0
    listed = capsys.readouterr().out
    assert "loop.epochs = 3\n" in listed
    assert 'learner.init = "pretrained"\n' in listed


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("loop.epoch=1", "did you mean 'loop.epochs'?"),
        ("data.paths=[]", "data.paths: name at least one file"),
        ("learner.optimizer.lr=0.1", "unknown setting 'learner.optimizer.lr'"),
        ("learner.config.num_hidden_layers=2", "learner.config: .*init = random"),
        ("learner.model=x", "unknown setting 'learner.model'"),
        ("chat.template=gone.jinja", "chat.template: 'gone.jinja' cannot be read: No such file"),
        ("learner.loss.clip_low=0.1", "unknown setting 'learner.loss'"),
        ("model=/gone", "model: /gone is not a model folder"),
        ('data.paths=["gone.jsonl"]', "gone.jsonl: No such file"),
    ],
)
def test_invalid_settings_are_named_before_anything_starts(
    setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", 'data.paths=["x.jsonl"]', setting]) == 2
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["train", "--restarts=0", "server.device=cuda"], "server.device: cuda, but no GPU"),
        (["evaluate", "server.device=cuda"], "server.device: cuda, but no GPU"),
        (["chat", "hello", "server.device=cuda"], "server.device: cuda, but no GPU"),
        (
            ["sft", "data.teacher=9", "learner.attention=flash_attention_2"],
            "learner.attention: flash_attention_2 needs a GPU, but no GPU",
        ),
    ],
)
def test_gpu_that_is_not_there_is_named_before_anything_starts(
    command: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "0")
    monkeypatch.chdir(tmp_path)
    assert main(command) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_runs_own_settings_can_be_used_again(tmp_path: Path) -> None:
    settings = load_settings(SftSettings, overrides=["data.teacher=9", "learner.init=random"])
    again = tmp_path / "config.toml"
    again.write_text(to_toml(settings), "utf-8")
    assert load_settings(SftSettings, [again]) == settings


def test_laptops_stages_fit_together() -> None:
    """The rollouts use the tools and kinds of problems that the dialogues have."""
    settings = load_settings(TrainSettings, [RECIPES / "laptop.toml"])
    assert settings.sft is not None
    (row,) = lessons(1, levels=[2])
    assert settings.tools == [tool["function"]["name"] for tool in row["tools"]]
    assert set(settings.tasks.levels) <= set(settings.sft.data.levels)
    assert not settings.tasks.system
    assert settings.loop.evaluate_tasks <= settings.tasks.held_out


OWN = "{#- ours -#}" + (SMALL / "chat_template.jinja").read_text("utf-8")


def tiny_settings(folder: Path, name: str) -> list[str]:
    """Return the settings of a quick run: two layers of random weights, and two ranks."""
    model = folder / "tiny"
    if not model.exists():
        shutil.copytree(SMALL, model, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "own.jinja").write_text(OWN, "utf-8")
    return [
        f"model={model}", f"chat.template={folder / 'own.jinja'}", "data.teacher=120", "page=false",
        f"run.folder={folder}", f"run.name={name}", "loop.epochs=2", "loop.lr=3e-3",
        "loop.batch_tokens=2500", "loop.checkpoint_every=3", "learner.init=random",
        "learner.config.num_hidden_layers=2", "learner.micro_batch_tokens=5000",
        "ranks.nproc_per_node=2",
    ]  # fmt: skip


def rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


@pytest.mark.real
@pytest.mark.timeout(900)
async def test_killed_run_resumes_with_equal_losses_and_weights(tmp_path: Path) -> None:
    """An undisturbed run and one whose process is killed, and that then loses a rank, have
    equal losses and weights."""
    pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")
    progress = RecordedProgress()
    settings = load_settings(SftSettings, overrides=tiny_settings(tmp_path, "unbroken"))
    published = await sft(settings, progress)  # type: ignore[arg-type]
    expected = rows(tmp_path / "unbroken")
    assert expected[0]["learner/loss"] == pytest.approx(6.24, abs=0.2)  # ln 512: it knows nothing
    assert expected[-1]["learner/loss"] < 5
    assert (published / "model.safetensors").stat().st_size > 500_000
    assert (published / "tokenizer.json").read_bytes() == (SMALL / "tokenizer.json").read_bytes()
    assert (published / "chat_template.jinja").read_text("utf-8") == OWN
    config = json.loads((published / "config.json").read_text("utf-8"))
    assert (config["num_hidden_layers"], len(config["layer_types"])) == (2, 2)
    assert progress.lines[0].startswith("120 samples, ")

    run = tmp_path / "killed"
    command = [sys.executable, "-m", "agentloop", "sft", *tiny_settings(tmp_path, "killed")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    async with await anyio.open_process(
        command, stderr=None, stdout=None, env=environment
    ) as process:
        metrics = run / "metrics.jsonl"
        await eventually(
            lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 8, within_s=300
        )
        process.kill()
    num_done = len(rows(run))
    assert 8 <= num_done < len(expected)
    step = max(checkpoints_in(run))
    assert 3 <= step <= num_done

    class Kills(RecordedProgress):
        def show(self, status: RunStatus) -> None:
            if status.step == num_done + 2:
                os.kill(pid_of_rank_1(run / "logs"), signal.SIGKILL)

    progress = Kills()
    settings = load_run_settings(SftSettings, [], run)
    again = await sft(settings, progress, resume=run)  # type: ignore[arg-type]
    assert f"Resuming from the checkpoint of step {step}" in progress.lines
    assert sum("was lost; restarting it" in line for line in progress.lines) == 1
    assert not [line for line in progress.lines if "had a loss of" in line]
    for name in ("step", "learner/loss", "learner/grad_norm", "learner/lr"):
        assert [row[name] for row in rows(run)] == [row[name] for row in expected], name
    first, second = (
        json.loads((process / "published.json").read_text()) for process in (published, again)
    )
    assert first == second
    lines = len(progress.lines)
    assert await sft(settings, progress, resume=run) == again  # type: ignore[arg-type]
    assert len(progress.lines) == lines + 1, "nothing is started for what is done"


def pid_of_rank_1(logs: Path) -> int:
    """Return the pid of rank 1: the process that writes to that log and is not a guardian."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes().split(b"\0")
            writes_to = (process / "fd" / "2").readlink()
            if (
                command[1:4] == [b"-P", b"-m", b"agentloop.learner"]
                and writes_to == logs / "learner-1.log"
            ):
                return int(process.name)
    raise AssertionError("there is no rank 1")


async def test_stopped_run_prints_the_command_to_resume_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command resumes with the run's settings, some of which may be changed."""
    progress, started = RecordedProgress(), anyio.Event()

    async def train(*_: object, **options: object) -> Path:
        started.set()
        await anyio.sleep_forever()
        raise AssertionError

    monkeypatch.setattr(agentloop.training.sft.run, "learner_of", lambda *_: nullcontext())
    monkeypatch.setattr(agentloop.training.sft.run, "fine_tune", train)
    monkeypatch.chdir(tmp_path)
    settings = load_settings(SftSettings, overrides=tiny_settings(tmp_path, "one"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(partial(sft, settings, progress))  # type: ignore[arg-type]
        await started.wait()
        tasks.cancel_scope.cancel()
    assert progress.lines[-1] == (
        "Stopped; there is no checkpoint yet. Continue with: agentloop sft --resume one"
    )
    again = load_run_settings(SftSettings, ["loop.epochs=9"], Path("one"))
    assert again == settings.model_copy(
        update={"loop": settings.loop.model_copy(update={"epochs": 9})}
    )


def test_folder_that_is_not_a_run_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sft", "--resume", str(tmp_path)]) == 2
    assert "--resume: " in capsys.readouterr().err


def test_resuming_with_other_dialogues_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agentloop.cli.sft, "require_learner", lambda settings: None)
    settings = load_settings(SftSettings, overrides=["data.teacher=3", "page=false"])
    checkpoint = RunFolder(tmp_path / "run", to_toml(settings)).path / "checkpoints" / "step-00001"
    checkpoint.mkdir()
    state = {"step": 1, "lineage": "of other dialogues"}
    (checkpoint / "state.json").write_text(json.dumps({"state": state}))
    assert main(["sft", "--resume", str(tmp_path / "run")]) == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert error.startswith(
        f"agentloop: error: --resume: {tmp_path / 'run'}: the batches up to step 1 would "
    )
