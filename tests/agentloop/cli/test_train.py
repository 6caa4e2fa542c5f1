"""A training run as a whole: errors before it starts, and how it ends."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

import agentloop
from agentloop.cli import console, train_program
from agentloop.cli.train import main
from agentloop.config import load_settings, to_toml
from agentloop.distribution import install_hint
from agentloop.environments.examples.guess_number import guess
from agentloop.environments.mixture import open_mixture
from agentloop.environments.tasks.sources import TaskSource
from agentloop.errors import AgentLoopError, DataError, RunFolderError, SettingsError
from agentloop.events import ignore
from agentloop.launch.progress import ProgressLine
from agentloop.models import SMALL
from agentloop.training.learner_client import client as learner
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.plan.checks import check_settings
from agentloop.training.plan.settings import TrainSettings, learner_settings
from agentloop.training.run.folder import RunFolder
from agentloop.training.sft.stage import check_teachers
from agentloop.training.wiring import RolloutPlan, rollouts_of, train
from tests.agentloop.training.fake_learner import REPLIES
from tests.agentloop.training.learner_client.test_client import RANK
from tests.fakes import RecordedProgress
from tests.patience import patient
from tests.support import FakeSGLang, eventually


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sampling.temperature=0", "sampling.temperature: 0 is greedy"),
        ("sampling.top_p=0.9", "sampling.top_k: -1 must be from 2 to 4096 .* SGLang reports"),
        ("sampling.min_p=0.1", "sampling.top_k: -1 must be from 2 to 4096"),
        ("sampling.top_k=4097", "sampling.top_k: 4097 must be from 2 to 4096"),
        ("sampling.top_k=1", "sampling.top_k: 1 is greedy"),
        ("sampling.min_p=1", "sampling.min_p: 1 is greedy"),
        ("learner.temperature=0.7", "unknown setting 'learner.temperature'"),
        ("learner.model=/elsewhere", "unknown setting 'learner.model'"),
        ("learner.loss.kl_coef=-0.1", "learner.loss.kl_coef: .* greater than or equal to 0"),
        ("credit=distill", "credit.args: teacher: Field required"),
        ("credit={name='distill', args={teacher='localhost:3'}}", "teacher: .*http://HOST:PORT"),
        ("learner.init=random", "unknown setting 'learner.init'"),
        ("credit=sft", "credit.name: .*'grpo', 'gspo', 'cispo'"),
        ("credit.args.discount=0.9", r"credit.args: discount: Extra .*arguments of grpo: aggreg"),
        ("learner.loss.clip_low=5", "learner.loss.clip_low: 5 must be at most 1"),
        ("loop.group_size=4", "loop.group_size: 4 .* roc.down_sample_to_n .8."),
        ("budget.max_response_tokens=20000", "learner.micro_batch_tokens"),
        ("loop.steps=0", "tasks.held_out"),
        ("sft.data.teacher=0", "sft: .*data.paths: name at least one file"),
        ("stages.one.max_turns=3", "stages.one.steps: Field required"),
        ("stages.one.step=3", "did you mean 'stages.one.steps'"),
        ("stages.2nd.steps=3", "is not a setting"),
        ("stages.one=3", "'stages.one' is a section"),
        ("servers=['http://127.0.0.1:1']", "model: set the folder of the model"),
        ("model=/no/such/folder", "model: /no/such/folder"),
        ("loop.early_stop_at=99", "loop.early_stop_at: 99 must be at most loop.group_size .16."),
        ("watchdog.give_up_s=60", r"watchdog.give_up_s: 60 .* loop.step_timeout_s .3600."),
        ("cluster.runtimes=1", "cluster.runtimes: .*set cluster.address"),
        ("envs=[{nmae='a:b'}]", r"unknown setting 'envs\.0\.nmae' .did you mean 'envs\.0\.name'"),
        ("envs=[{name='a:b', weight=0}]", r"envs\.0\.weight: .*greater than 0"),
        ("envs=[{name='a:b', tasks={helt_out=1}}]", r"envs\.0\.tasks: .*'held_out'"),
        ("envs=[{budget={max_response_tokens=20000}}]", "learner.micro_batch_tokens: .*.20000."),
        ("ranks.nodes=2", r"ranks.nodes: more than one needs .*cluster \(cluster.address\)"),
        ("envs=a:b", r"'envs' is a list of tables: write \[\[envs\]\]"),
    ],
)
def test_settings_that_would_train_wrongly_are_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        check_settings(load_settings(TrainSettings, overrides=[override]))


def test_staged_run_can_be_told_again(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[3] / "agentloop" / "cli" / "recipes" / "laptop.toml"
    settings = load_settings(TrainSettings, [recipe])
    again = tmp_path / "config.toml"
    again.write_text(to_toml(settings), "utf-8")
    assert check_settings(load_settings(TrainSettings, [again])) == check_settings(settings)


def test_teachers_are_checked_before_anything_starts() -> None:
    taught = load_settings(TrainSettings, overrides=["sft.data.teacher=5"])
    untaught = load_settings(TrainSettings, overrides=["sft.data.paths=['a.jsonl']"])
    assert taught.sft is not None
    assert untaught.sft is not None

    @agentloop.environment
    async def silent(task: Any, agent: agentloop.Agent) -> float:
        return 0.0

    of_many = load_settings(TrainSettings, overrides=["envs=[{name='a:b'}, {name='c:d'}]"])
    symbolic = load_settings(TrainSettings, overrides=["tasks.kind=symbolic"])
    single, several = taught.environments, of_many.environments
    check_teachers(untaught.sft.data, symbolic.environments, [silent])
    check_teachers(taught.sft.data, single, [None])
    check_teachers(taught.sft.data, single, [guess])
    check_teachers(taught.sft.data, single, [silent])  # imitates arithmetic
    with pytest.raises(SettingsError, match=r"sft\.data\.teacher: the environment silent has no"):
        check_teachers(taught.sft.data, symbolic.environments, [silent])
    with pytest.raises(SettingsError, match=r"sft\.data\.teacher: the environment silent has no"):
        check_teachers(taught.sft.data, several, [guess, silent])
    with pytest.raises(SettingsError, match=r"sft\.data\.teacher: the built-in agent has no"):
        check_teachers(taught.sft.data, several, [guess, None])


@pytest.fixture
def complete_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is missing."""
    monkeypatch.setattr("agentloop.cli.train_dry_run.require_machine", lambda settings: None)


def test_plan_says_what_would_be_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "loop.group_size=1"]) == 2
    assert capsys.readouterr().out.startswith("refused    loop.group_size: 1 must be at least 2")


def test_plan_says_which_files_a_start_would_lack(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = tmp_path / "tasks.jsonl"
    run = ["tasks.kind=jsonl", f"tasks.paths=['{tasks}']", "reward.function=no_such_module:score"]
    assert main(["--dry-run", *run]) == 2
    out = capsys.readouterr().out
    assert out.startswith("missing    ")
    assert f"{tasks}: No such file" in out
    assert out.count("reward.function: ") == out.count("no_such_module") == 1
    tasks.write_text('{"problem": "1 plus 1?"}\n')
    assert main(["--dry-run", *run]) == 2
    out = capsys.readouterr().out
    assert "is required; the line has 'problem'" in out
    tasks.write_text('{"problem": "1 plus 1?", "answer": 2}\n')
    assert main(["--dry-run", *run, "tasks.held_out=0.5", "tools=['json:nothing']"]) == 2
    assert "refused    tools: json has no 'nothing'" in capsys.readouterr().out


def test_plan_names_a_run_that_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.jsonl").touch()
    assert main(["--dry-run", f"run.folder={tmp_path}", "run.name=mine"]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"refused    run.name: a run already exists at {tmp_path / 'mine'}")


def test_plan_opens_data_sets_of_hubs(
    complete_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets = pytest.importorskip("datasets")
    run = ["tasks.kind=huggingface", f"tasks.name={tmp_path / 'set'}"]
    datasets.Dataset.from_list([{"problem": "1 plus 1?"}]).save_to_disk(tmp_path / "set")
    assert main(["--dry-run", *run]) == 2
    assert re.match(r"refused    .*row 1.*answer", capsys.readouterr().out)
    datasets.Dataset.from_list([{"problem": "1 plus 1?", "answer": "2"}]).save_to_disk(
        tmp_path / "good"
    )
    assert main(["--dry-run", *run, f"tasks.name={tmp_path / 'good'}"]) == 0


def test_plan_checks_a_dialogue_against_the_template(
    complete_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "dialogues.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "?"}]}')
    assert main(["--dry-run", f"sft.data.paths=['{file}']"]) == 2
    assert capsys.readouterr().out.startswith(f"refused    {file}: line 1: field 'messages'")
    assert main(["--dry-run", "sft.data.paths=['nowhere.jsonl']"]) == 2
    assert capsys.readouterr().out.startswith("missing    nowhere.jsonl: No such file")
    assert main(["--dry-run", "sft.data.teacher=9"]) == 0


def test_plan_starts_mcp_servers(
    complete_machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--dry-run", "mcp.mine.command=['no-such-program']"]) == 2
    assert re.match(
        r"missing    the MCP server mine: there is no program 'no-such-program'",
        capsys.readouterr().out,
    )


def test_plan_with_a_wrong_environment_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--dry-run", "env=math:mine"]) == 2
    (refused,) = re.findall(r"^(?:refused|missing) .*math.*", capsys.readouterr().out, re.M)
    assert re.match(r"refused    env.name: math has no 'mine' \(.*math.*\)", refused)


def test_plan_is_printed_as_json(
    complete_machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = str(Path(__file__).parents[3] / "agentloop" / "cli" / "recipes" / "small.toml")
    assert main(["--dry-run", "--json", recipe]) == 0
    plan_data = json.loads(capsys.readouterr().out)
    assert (plan_data["steps"], plan_data["step"]["num_rollouts"], plan_data["refused"]) == (
        10,
        128,
        None,
    )
    assert plan_data["disk_bytes"]["total"] > plan_data["disk_bytes"]["trajectories"] > 0
    assert main(["--dry-run", "--json", "loop.group_size=1"]) == 2
    assert json.loads(capsys.readouterr().out)["refused"].startswith("loop.group_size: 1 must")
    with pytest.raises(SystemExit, match="2"):
        main(["--json"])


def test_plan_of_a_run_that_goes_on_has_its_settings(
    complete_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = Path(__file__).parents[3] / "agentloop" / "cli" / "recipes" / "small.toml"
    settings = load_settings(TrainSettings, [recipe], ["loop.steps=123"])
    (tmp_path / "config.toml").write_text(to_toml(settings), "utf-8")
    assert main(["--dry-run", "--resume", str(tmp_path)]) == 0
    assert "steps      123;" in capsys.readouterr().out


def test_missing_packages_are_named_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.distribution.find_spec", lambda name: None)
    run = [f"run.folder={tmp_path}", "--restarts", "0"]
    assert main([*run]) == 2
    err = capsys.readouterr().err
    assert "torch (the learner), deepspeed (the learner), matplotlib (plots)" in err
    assert install_hint("train") in err
    assert not list(tmp_path.iterdir())
    assert main(["--dry-run", *run]) == 2
    out = capsys.readouterr().out
    assert out.startswith("missing    SGLang")
    assert "torch (the learner)" in out


def test_run_that_holds_out_all_its_tasks_does_not_start(
    complete_machine: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"problem": "?", "answer": 1}\n')
    listed = ["tasks.kind=jsonl", f"tasks.paths=['{file}']", "tasks.held_out=4"]
    reason = "no tasks to train on: all 1 are held out: tasks.held_out is 4"
    with pytest.raises(DataError, match=re.escape(reason)):
        anyio.run(train, run_at(tmp_path, *listed), progress())
    assert not (tmp_path / "one").exists()
    assert main(["--dry-run", *listed]) == 2
    assert reason in capsys.readouterr().out
    assert main(["--dry-run", *listed, "loop.steps=0"]) == 0
    assert reason not in capsys.readouterr().out


def test_complete_run_is_not_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder(tmp_path / "run", f"model='{SMALL}'\n[loop]\nsteps=2\n")
    for step in (1, 2):
        folder.add_metrics({"step": step, "reward": 0.5})
    folder.end()
    assert main(["--resume", str(folder.path)]) == 0
    assert "has done all of its steps. More, such as by loop.steps" in capfd.readouterr().out
    assert main(["--resume", str(folder.path), "loop.steps=1"]) == 2
    assert f"loop.steps: 1, but {folder.path} has done 2" in capfd.readouterr().err
    assert "steps=2" in (folder.path / "config.toml").read_text(), "nothing has changed"


@pytest.mark.parametrize("recipe", ["laptop", "tiny"])
def test_steps_of_fine_tuning_are_not_those_of_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str
) -> None:
    """It has done more of them than the run has, and is resumed, but cannot go back."""
    settings = load_settings(TrainSettings, [recipe])
    folder = RunFolder(tmp_path / "run", to_toml(settings))
    (folder.path / "sft").mkdir()
    (folder.path / "sft" / "metrics.jsonl").write_text('{"step": 34}\n')
    assert not train_program._is_complete(settings, folder.path, None)
    command = ["--resume", str(folder.path), "--from", "0", "--restarts", "0"]
    assert main(command) == 2
    assert "is in supervised fine-tuning, which is before its step 0" in capsys.readouterr().err


def test_negative_number_of_restarts_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--restarts", "-1"])
    assert "--restarts: '-1': expected an integer of at least 0" in capsys.readouterr().err


def progress() -> Any:
    return RecordedProgress()


def run_at(path: Path, *overrides: str) -> TrainSettings:
    recipe = Path(__file__).parents[3] / "agentloop" / "cli" / "recipes" / "small.toml"
    settings = [f"run.folder='{path}'", "run.name=one", *overrides]
    return load_settings(TrainSettings, [recipe], settings)


@pytest.mark.parametrize(
    ("override", "from_step", "named"),
    [
        ("tasks.seed=9", None, "they are not those that the run began with"),
        ("credit=gspo", None, "weights for 'group', not 'sequence': keep it, or go back to a"),
        ("credit.args.aggregate=batch", 7, "--from: no checkpoint"),  # rolled out again
        ("loop.seed=9", 7, "--from: no checkpoint"),
        ("loop.steps=9", 7, "--from: no checkpoint of step 7"),
    ],
)
async def test_refused_resume_leaves_the_run_unchanged(
    tmp_path: Path, override: str, from_step: int | None, named: str
) -> None:
    settings = run_at(tmp_path)
    folder = RunFolder(tmp_path / "run", to_toml(settings))
    tasks = TaskSource.open(settings.tasks)
    async with GroupQueue.open(folder.path / "queue.sqlite") as queue:
        await queue.admit(next(tasks), version=0, cursor={"tasks": tasks.cursor()})
    path, before = folder.path, (folder.path / "config.toml").read_bytes()
    again = run_at(tmp_path, override)
    with pytest.raises(AgentLoopError, match=named):
        await train(again, progress(), resume=path, from_step=from_step)
    assert (path / "config.toml").read_bytes() == before


async def test_going_back_is_finished_when_the_run_goes_on(tmp_path: Path) -> None:
    settings = run_at(tmp_path)
    folder = RunFolder(tmp_path / "run", to_toml(settings))
    path = folder.path
    for step in (1, 2):
        checkpoint = path / "checkpoints" / f"step-{step}"
        checkpoint.mkdir()
        (checkpoint / "state.json").write_text(json.dumps({"state": {"step": step}}))
    tasks = TaskSource.open(settings.tasks)
    async with GroupQueue.open(path / "queue.sqlite") as queue:
        await queue.admit(next(tasks), version=0, cursor={"tasks": tasks.cursor()})
        await queue.undo(1)  # killed here
    with pytest.raises(AgentLoopError, match="they are not those that the run began with"):
        await train(run_at(tmp_path, "tasks.seed=9"), progress(), resume=path)
    assert [checkpoint.name for checkpoint in (path / "checkpoints").iterdir()] == ["step-1"]


async def test_run_without_its_journal_is_not_begun_anew(tmp_path: Path) -> None:
    settings = run_at(tmp_path)
    folder = RunFolder(tmp_path / "run", to_toml(settings))
    folder.add_group(1, [{"text": "kept"}])
    path = folder.path
    for _ in range(2):
        with pytest.raises(
            RunFolderError, match=r"--resume: .*its journal, queue\.sqlite, has no groups"
        ):
            await train(settings, progress(), resume=path)


def test_missing_journal_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_program, "require_machine", lambda settings: None)
    run = tmp_path / "run"
    RunFolder(run, to_toml(run_at(tmp_path))).add_group(1, [{"text": "kept"}])
    gc.collect()  # it holds a lock
    assert main(["--resume", str(run), "--restarts", "0"]) == 2
    (error,) = (line for line in capsys.readouterr().err.splitlines() if "error" in line)
    assert error.startswith(f"agentloop: error: --resume: {run}: ")
    assert error.endswith("queue.sqlite, has no groups: restore the file, or start a new run")


def test_missing_parts_are_named_in_order_of_installation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentloop.launch.machine.is_installed", lambda module: False)
    monkeypatch.setattr("agentloop.distribution.is_installed", lambda module: False)
    assert main(["--restarts", "0"]) == 2
    loading, error = capsys.readouterr().err.splitlines()
    assert loading == "Loading what trains"  # which takes seconds
    assert error.startswith("agentloop: error: SGLang is not installed: ")
    assert "; torch (the learner), deepspeed (the learner)" in error


async def test_reward_that_is_not_there_is_missed_at_once(tmp_path: Path) -> None:
    overrides = ["reward.function=no_such_module:reward", f"run.folder='{tmp_path}/runs'"]
    with pytest.raises(SettingsError, match=r"reward\.function: .*no_such_module"):
        await train(load_settings(TrainSettings, overrides=overrides), progress())
    assert not (tmp_path / "runs").exists()


SLOW_TO_IMPORT = """
import os, signal, threading

thread, may_end = threading.current_thread(), threading.Event()
os.kill(os.getpid(), signal.SIGTERM)
may_end.wait(60)
has_ended = True
"""


async def start_training(settings: TrainSettings) -> None:
    await train(settings, progress())


async def start_on_a_node(settings: TrainSettings) -> None:
    async with rollouts_of(RolloutPlan.of(settings), cast(Any, None), ignore):
        raise AssertionError


@pytest.mark.parametrize("start", [start_training, start_on_a_node])
def test_signal_ends_a_run_whose_environment_is_slow_to_import(
    start: Callable[[TrainSettings], Awaitable[None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "slow_to_import", raising=False)
    (tmp_path / "slow_to_import.py").write_text(SLOW_TO_IMPORT)
    monkeypatch.syspath_prepend(tmp_path)
    overrides = ["reward.function=exact", "env=slow_to_import:game", f"run.folder='{tmp_path}'"]

    async def run() -> int:
        await start(load_settings(TrainSettings, overrides=overrides))
        return 0

    assert console.run(run) == 143
    module = sys.modules["slow_to_import"]
    assert not hasattr(module, "has_ended")
    assert module.thread.daemon  # the process does not wait for it either
    module.may_end.set()
    module.thread.join(patient(10))


def test_collective_timeout_must_exceed_the_transfer_timeout_for_broadcasts() -> None:
    group, same = "weights.transport=broadcast", "learner.collective_timeout_s=60"
    with pytest.raises(SettingsError, match=r"learner\.collective_timeout_s: 60 .*above 60"):
        check_settings(load_settings(TrainSettings, overrides=[group, same]))
    check_settings(
        load_settings(TrainSettings, overrides=[group, "learner.collective_timeout_s=61"])
    )
    check_settings(load_settings(TrainSettings, overrides=[same]))


def test_kept_ids_of_a_rollout_are_bounded() -> None:
    cut = ["sampling.top_k=20", "sampling.top_p=0.9", "sampling.min_p=0.01"]
    check_settings(load_settings(TrainSettings, overrides=cut))
    many = ["sampling.top_k=4000", "stages.long={steps=1, max_response_tokens=8000}"]
    with pytest.raises(SettingsError, match=r"top_k: 4000 .* 32,000,000 ids to record"):
        check_settings(load_settings(TrainSettings, overrides=many))


def test_all_problems_of_the_settings_are_reported_at_once() -> None:
    overrides = ["model=/no/such", "sampling.top_k=5000", "loop.early_stop_at=99", "ranks.nodes=2"]
    with pytest.raises(SettingsError) as raised:
        check_settings(load_settings(TrainSettings, overrides=overrides))
    named = [problem.partition(":")[0] for problem in str(raised.value).split("; ")]
    assert named == ["model", "ranks.nodes", "sampling.top_k", "loop.early_stop_at"]


def test_learner_has_the_servers_model_and_temperature() -> None:
    template = SMALL / "chat_template.jinja"
    overrides = ["sampling.temperature=0.7", f"chat.template={template}"]
    settings = load_settings(TrainSettings, overrides=overrides)
    run_settings = check_settings(settings)
    of_learner = learner_settings(run_settings)
    assert of_learner == LearnerSettings(
        model=SMALL.resolve(), temperature=0.7, chat_template=template.read_text("utf-8")
    )
    assert str(of_learner.model) == run_settings.model
    assert check_settings(run_settings) == run_settings


PLAYED_RANK = RANK.replace(
    'tell({"ok": True, "echo": request, "pid": os.getpid()})',
    'request["op"] == "publish" and os.makedirs(request["folder"])\n'
    f"        tell({{'ok': True, **{REPLIES}.get(request['op'], {{}})}})",
)


class SilentServer(FakeSGLang):
    """Gives the same response to every prompt; from request `silent_after` on, none."""

    silent_after = 1000

    async def _stream(self, request: Any, *streamed: Any) -> None:
        if len(self.requests) > self.silent_after:
            await anyio.sleep_forever()
        await super()._stream(request, *streamed)


@pytest.fixture
def played_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    script = tmp_path / "rank.py"
    script.write_text(PLAYED_RANK)
    monkeypatch.setattr(learner, "_COMMAND", (sys.executable, str(script)))
    monkeypatch.setattr(learner, "_OTHERS_S", 1.0)
    return script


def played_settings(folder: Path, server: FakeSGLang, *more: str) -> TrainSettings:
    overrides = [
        *(f"servers=['{server.url}']", f"model='{SMALL}'", "sandbox.backend=process"),
        *(f"run.folder='{folder}/my runs'", "run.name=first", "reward.function=exact"),
        *("loop.steps=2", "loop.prompts_per_step=2", "loop.group_size=4", "loop.evaluate_every=1"),
        *("roc.down_sample_to_n=2", "tasks.held_out=2", "ranks.nproc_per_node=2"),
        *more,
    ]
    return load_settings(TrainSettings, overrides=overrides)


def pids_of(script: Path) -> list[int]:
    """Return the pids of the ranks, without their guardians."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            arguments = (folder / "cmdline").read_bytes().split(b"\0")
            if arguments[1:2] == [str(script).encode()]:
                pids.append(int(folder.name))
    return pids


@pytest.mark.timeout(180)  # all processes of a run start, some of them twice
@pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc")
async def test_run_with_played_servers_and_ranks(tmp_path: Path, played_rank: Path) -> None:
    server = SilentServer([5, 6, 99], None, context_length=4000, max_total_num_tokens=80_000)
    progress = RecordedProgress()
    async with server.serving():
        folder = await train(played_settings(tmp_path, server), cast(ProgressLine, progress))
    assert folder == tmp_path / "my runs" / "first"
    assert [path.name for path in (folder / "weights").iterdir()] == ["0"]  # nothing was learned
    metrics = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in metrics] == [0, 1, 1, 2, 2]
    assert "The learner is ready" in progress.passing
    assert pids_of(played_rank) == []
    again = load_settings(TrainSettings, [folder / "config.toml"])
    assert again == played_settings(tmp_path, server)


@pytest.mark.timeout(180)  # all processes of a run start
@pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc")
@pytest.mark.parametrize(
    ("step", "checkpoint"), [(None, "no checkpoint yet"), (7, "a checkpoint of step 7")]
)
@pytest.mark.full
async def test_stopped_run_prints_the_command_to_resume_it(
    tmp_path: Path, played_rank: Path, step: int | None, checkpoint: str
) -> None:
    server = SilentServer([5, 6, 99], None, context_length=4000, max_total_num_tokens=80_000)
    server.gate = anyio.Event()
    progress = RecordedProgress()
    folder = tmp_path / "my runs" / "first"

    async def stop(scope: anyio.CancelScope) -> None:
        await eventually(lambda: server.num_streaming > 0, within_s=60)
        if step is not None:
            (folder / "checkpoints" / "one").mkdir()
            state = json.dumps({"state": {"step": step}})
            (folder / "checkpoints" / "one" / "state.json").write_text(state)
        scope.cancel()

    async with server.serving(), anyio.create_task_group() as tasks:
        tasks.start_soon(stop, tasks.cancel_scope)
        await train(played_settings(tmp_path, server), cast(ProgressLine, progress))
    assert progress.lines[-1] == (
        f"Stopped; there is {checkpoint}. Continue with: agentloop train --resume '{folder}'"
    )


@pytest.mark.timeout(180)  # all processes of a run start, some of them twice
@pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc")
@pytest.mark.parametrize("max_restarts", [0, 1])
@pytest.mark.full
async def test_rank_that_dies_while_rollouts_go_on_is_started_again(
    tmp_path: Path, played_rank: Path, max_restarts: int
) -> None:
    server = SilentServer([5, 6, 99], None, context_length=4000, max_total_num_tokens=80_000)
    server.gate = anyio.Event()
    progress = RecordedProgress()

    async def kill() -> None:
        await eventually(lambda: server.num_streaming > 0, within_s=60)
        dies = max(pids_of(played_rank))
        os.kill(dies, signal.SIGKILL)
        if max_restarts:  # though nobody asks for anything
            await eventually(lambda: len(set(pids_of(played_rank)) - {dies}) == 2, within_s=60)
            assert server.gate is not None
            server.gate.set()

    async with server.serving(), anyio.create_task_group() as tasks:
        settings = played_settings(tmp_path, server)
        ranks = settings.ranks.model_copy(update={"max_restarts": max_restarts})
        settings = settings.model_copy(update={"ranks": ranks})
        tasks.start_soon(kill)
        if max_restarts:
            folder = await train(settings, cast(ProgressLine, progress))
            metrics = (folder / "metrics.jsonl").read_text().splitlines()
            assert [json.loads(line)["step"] for line in metrics] == [0, 1, 1, 2, 2]
            assert any("was lost; restarting it" in line for line in progress.lines)
        else:
            with pytest.raises(learner.LearnerError, match="exit status 137"):
                await train(settings, cast(ProgressLine, progress))
    assert pids_of(played_rank) == []


ENVS = "envs=[{weight=2, tasks={levels=[2]}, budget={max_turns=3}}, {tasks={levels=[3]}}]"


@pytest.mark.timeout(180)  # all processes of a run start
@pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc")
@pytest.mark.full
async def test_run_of_two_environments(tmp_path: Path, played_rank: Path) -> None:
    server = SilentServer([5, 6, 99], None, context_length=4000, max_total_num_tokens=80_000)
    async with server.serving():
        settings = played_settings(tmp_path, server, ENVS, "loop.prompts_per_step=3")
        folder = await train(settings, progress())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "reward" in row]
    numbers = [
        [row[f"env/{name}/num_rollouts"] for name in ("agent", "agent-2")] for row in trained
    ]
    assert numbers == [[8, 4], [8, 4]]
    held_out = [row for row in rows if "held_out/reward" in row]
    assert all(row["held_out/env/agent-2/num_rollouts"] == 2 for row in held_out)
    again = load_settings(TrainSettings, [folder / "config.toml"])
    assert again == settings
    async with GroupQueue.open(folder / "queue.sqlite") as queue:
        cursor = (await queue.cursor())["tasks"]
    positions = [cursor["envs"][name]["position"] for name in ("agent", "agent-2")]
    assert positions[0] > positions[1] > 0


def test_env_and_envs_exclude_each_other() -> None:
    check_settings(load_settings(TrainSettings, overrides=[ENVS]))
    pair = load_settings(
        TrainSettings, overrides=[ENVS, "env=agentloop.environments.examples.guess_number:guess"]
    )
    with pytest.raises(SettingsError, match="env, envs: both are set"):
        check_settings(pair)


async def test_run_is_not_resumed_with_other_environments(tmp_path: Path) -> None:
    settings = run_at(tmp_path, ENVS)
    folder = RunFolder(tmp_path / "run", to_toml(settings))
    path = folder.path
    environments = settings.environments
    tasks = open_mixture(environments, [None, None])
    async with GroupQueue.open(path / "queue.sqlite") as queue:
        await queue.admit(next(tasks), version=0, cursor={"tasks": tasks.cursor()})
    other_settings = run_at(tmp_path, "envs=[{}, {}, {}]")
    with pytest.raises(AgentLoopError, match="envs: the run has agent, agent-2, not agent, ag"):
        await train(other_settings, progress(), resume=path)
