"""A training run put together: what is refused before it starts, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from agentloop import console
from agentloop.config import load_settings, to_toml
from agentloop.errors import SettingsError
from agentloop.models import SMALL
from agentloop.train import TrainSettings, _whole, main, train
from agentloop.training import learner
from agentloop.training.learner_settings import LearnerSettings
from agentloop.training.standing import Standing
from tests.agentloop.training.test_learner import RANK
from tests.support import FakeSGLang, eventually


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("sampling.temperature=0", "sampling.temperature: 0 is greedy"),
        ("sampling.top_p=0.9", "sampling.top_p"),
        ("sampling.top_k=20", "sampling.top_k"),
        ("sampling.min_p=0.1", "sampling.min_p"),
        ("learner.temperature=0.7", "learner.temperature: .* set sampling.temperature"),
        ("learner.model=/elsewhere", "learner.model: .* set model alone"),
        ("learner.loss.kl_coef=0.1", "learner.loss.kl_coef"),
        ("learner.init=random", "learner.init.* set start.learner.init "),
        ("learner.loss.kind=sft", "learner.loss.kind"),
        ("loop.group_size=8", "loop.group_size: 8 .* roc.down_sample_to_n .16."),
        ("budget.max_response_tokens=20000", "learner.micro_batch_tokens"),
        ("loop.steps=0", "tasks.held_out"),
        ("start.data.teacher=0", "start: .*data.paths: name a file"),
        ("stages.one.max_turns=3", "stages.one.steps: Field required"),
        ("stages.one.step=3", "did you mean 'stages.one.steps'"),
        ("stages.2nd.steps=3", "no setting"),
        ("stages.one=3", "'stages.one' is a section"),
        ("servers=['http://127.0.0.1:1']", "model: the learner needs the folder"),
        ("model=/no/such/folder", "model: /no/such/folder"),
    ],
)
def test_what_would_teach_the_wrong_thing_is_refused_by_name(override: str, named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        _whole(load_settings(TrainSettings, overrides=[override]))


def test_a_staged_run_can_be_told_again(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[2] / "docs" / "recipes" / "laptop.toml"
    settings = load_settings(TrainSettings, [recipe])
    again = tmp_path / "config.toml"
    again.write_text(to_toml(settings), "utf-8")
    assert _whole(load_settings(TrainSettings, [again])) == _whole(settings)


def test_a_plan_says_what_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "loop.group_size=1"]) == 2
    assert "refused    loop.group_size: 1 rollouts" in capsys.readouterr().out


@pytest.mark.anyio
async def test_a_reward_that_is_not_there_is_missed_at_once(tmp_path: Path) -> None:
    overrides = ["reward.function=no_such_module:reward", f"run.folder='{tmp_path}/runs'"]
    with pytest.raises(SettingsError, match=r"reward\.function: .*no_such_module"):
        await train(load_settings(TrainSettings, overrides=overrides), cast(Any, Said()))
    assert not (tmp_path / "runs").exists()


def test_a_group_is_given_up_before_the_ranks_give_each_other_up() -> None:
    group = ["weights.by=group", "weights.group_timeout_s=90"]
    same = load_settings(TrainSettings, overrides=[*group, "learner.collective_timeout_s=90"])
    with pytest.raises(SettingsError, match=r"weights\.group_timeout_s: 90 .*learner\.collective"):
        _whole(same)
    _whole(load_settings(TrainSettings, overrides=[*group, "learner.collective_timeout_s=91"]))
    by_disk = ["weights.group_timeout_s=90", "learner.collective_timeout_s=90"]
    _whole(load_settings(TrainSettings, overrides=by_disk))


def test_a_group_of_one_teaches_nothing() -> None:
    overrides = ["loop.group_size=1", "roc.down_sample_to_n=0"]
    with pytest.raises(SettingsError, match=r"loop\.group_size"):
        _whole(load_settings(TrainSettings, overrides=overrides))


def test_the_learner_has_the_servers_model_and_temperature() -> None:
    settings = load_settings(TrainSettings, overrides=["sampling.temperature=0.7"])
    whole = _whole(settings)
    assert whole.learner.temperature == 0.7
    assert str(whole.learner.model) == whole.model
    assert whole.learner == LearnerSettings(model=whole.learner.model, temperature=0.7)
    assert _whole(whole) == whole


PLAYED_RANK = RANK.replace(
    'tell({"ok": True, "echo": request, "pid": os.getpid()})',
    'request["op"] == "publish" and os.makedirs(request["folder"])\n'
    '        tell({"ok": True, "seconds": 0.1, "pid": os.getpid()})',
)


class PlayedServer(FakeSGLang):
    """Says the same to every prompt; from the `silent_after`-th request on, nothing."""

    silent_after = 1000

    async def _stream(self, request: Any, response: Any, asked: Any, fault: Any) -> None:
        self.num_prompt = len(asked["input_ids"])
        if len(self.requests) > self.silent_after:
            await anyio.sleep_forever()
        await super()._stream(request, response, asked, fault)


class Said:
    """Progress, kept."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, line: str) -> None:
        self.lines.append(line)

    say = __call__

    def show(self, standing: Standing) -> None:
        pass


@pytest.fixture
def played_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "rank.py"
    script.write_text(PLAYED_RANK)
    monkeypatch.setattr(learner, "_COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(learner, "_OTHERS_S", 1.0)
    return script


def played_settings(folder: Path, server: FakeSGLang) -> TrainSettings:
    overrides = [
        *(f"servers=['{server.url}']", f"model='{SMALL}'", "sandbox.backend=process"),
        *(f"run.folder='{folder}/my runs'", "run.name=first", "reward.function=exact"),
        *("loop.steps=2", "loop.tasks_per_step=2", "loop.group_size=4", "loop.evaluate_every=1"),
        *("roc.down_sample_to_n=2", "tasks.held_out=2", "ranks.count=2"),
    ]
    return load_settings(TrainSettings, overrides=overrides)


def pids_of(script: Path) -> list[int]:
    """Of the ranks that run it, not of their guardians."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if arguments[1:2] == [str(script).encode()]:
                found.append(int(folder.name))
    return found


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc")
async def test_a_run_with_played_servers_and_ranks(tmp_path: Path, played_rank: Path) -> None:
    server = PlayedServer([5, 6, 99], context_length=4000, max_total_num_tokens=80_000)
    said = Said()
    async with server.serving():
        folder = await train(played_settings(tmp_path, server), cast(console.Progress, said))
    assert folder == tmp_path / "my runs" / "first"
    assert [path.name for path in (folder / "weights").iterdir()] == ["0"]  # nothing was learned
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [0, 1, 1, 2, 2]
    assert "The learner is ready" in said.lines
    assert pids_of(played_rank) == []
    again = load_settings(TrainSettings, [folder / "config.toml"])
    assert again == played_settings(tmp_path, server)


@pytest.mark.anyio
@pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc")
async def test_a_rank_that_dies_while_rollouts_go_on_ends_the_run(
    tmp_path: Path, played_rank: Path
) -> None:
    server = PlayedServer([5, 6, 99], context_length=4000, max_total_num_tokens=80_000)
    server.silent_after = 4

    async def kill() -> None:
        await eventually(lambda: server.num_streaming > 2, within_s=15)
        os.kill(max(pids_of(played_rank)), signal.SIGKILL)

    async with server.serving(), anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        with pytest.raises(learner.LearnerError, match="exit status 137"):
            await train(played_settings(tmp_path, server), cast(console.Progress, Said()))
    assert pids_of(played_rank) == []
