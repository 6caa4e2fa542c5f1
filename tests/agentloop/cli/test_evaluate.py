"""`agentloop evaluate` as a whole: sampling, errors, and results."""

from __future__ import annotations

import gc
import json
import socket
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import anyio
import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from agentloop.cli.evaluate import main
from agentloop.config import load_settings
from agentloop.evaluation.wiring import EvaluateSettings, chosen_tasks, evaluate
from agentloop.launch.progress import ProgressLine
from tests.agentloop.cli import played
from tests.agentloop.evaluation.fake_endpoint import Answer, FakeEndpoint
from tests.fakes import RecordedProgress
from tests.support import eventually


def write(path: Path, *answers: str) -> Path:
    rows = [{"problem": f"What is {n} in {path.stem}?", "answer": a} for n, a in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


def settings_with(*overrides: str) -> EvaluateSettings:
    return load_settings(EvaluateSettings, overrides=overrides)


@pytest.fixture
def portal() -> Iterator[BlockingPortal]:
    with start_blocking_portal() as portal:
        yield portal


@pytest.fixture
def fake(portal: BlockingPortal) -> Iterator[FakeEndpoint]:
    """Run a fake server in a thread with its own event loop."""
    with portal.wrap_async_context_manager(FakeEndpoint().serving()) as fake:
        yield fake


def overrides_for(fake: FakeEndpoint, path: Path, *more: str) -> list[str]:
    return [
        f"endpoint.url={fake.url}",
        "endpoint.max_tries=1",
        "evaluate.num_samples=4",
        "reward.function=exact",
        f"run.folder='{path}/runs'",
        "run.name=one",
        "page=false",
        *more,
    ]


@pytest.fixture
def finished(fake: FakeEndpoint, tmp_path: Path) -> Path:
    """The folder of a run of one task."""
    file = write(tmp_path / "set.jsonl", "1")
    assert main([*overrides_for(fake, tmp_path), f"--tasks={file}"]) == 0
    gc.collect()  # its lock
    return tmp_path / "runs" / "one"


def test_two_sets_are_measured_and_written_down(
    fake: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path / "easy.jsonl", "1", "1"), write(tmp_path / "hard.jsonl", "1", "2")]
    arguments = [*overrides_for(fake, tmp_path), *(f"--tasks={file}" for file in files)]
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["all"]["avg_at_k"]["value"] == 0.75
    assert summary["sets"]["easy"]["avg_at_k"]["value"] == 1
    assert summary["sets"]["hard"]["pass_at_k"]["4"]["value"] == 0.5
    assert (summary["model"], summary["by"]) == ("fake", fake.url)
    folder = tmp_path / "runs" / "one"
    assert json.loads((folder / "results.json").read_text("utf-8")) == summary
    assert "| avg@4 | 1.000" in (folder / "results.md").read_text("utf-8")
    assert len(list((folder / "trajectories").glob("group-*.jsonl"))) == 4
    assert len((folder / "metrics.jsonl").read_text("utf-8").splitlines()) == 4
    assert not (tmp_path / "runs" / "latest").exists()  # what was trained last is there
    assert len(fake.requests) == 16


def test_without_a_terminal_the_table_is_plain_text(
    fake: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "set.jsonl", "1", "2")
    assert main([*overrides_for(fake, tmp_path), f"--tasks={file}"]) == 0
    out, err = capsys.readouterr()
    assert out.splitlines()[2].split()[:2] == ["avg@4", "0.500"]
    assert "\x1b" not in out + err
    assert "2 of 2 tasks, avg@4 0.500" in err


def test_missing_samples_are_reported_and_only_they_are_resumed(
    fake: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.script = deque([Answer(503)] * 3)
    file = write(tmp_path / "set.jsonl", "1", "1")
    arguments = overrides_for(fake, tmp_path, "evaluate.retries=0", "endpoint.max_concurrent=1")
    assert main([*arguments, f"--tasks={file}", "--json"]) == 1
    summary = json.loads(capsys.readouterr().out)
    assert (summary["all"]["num_missing"], summary["all"]["avg_at_k"]["value"]) == (3, 1)
    assert sum(summary["missing"].values()) == 3
    assert "503" in next(iter(summary["missing"]))
    num_requests = len(fake.requests)
    gc.collect()  # its lock
    folder = str(tmp_path / "runs" / "one")
    assert main(["--resume", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["all"]["num_missing"] == 0
    assert len(fake.requests) == num_requests + 3
    gc.collect()
    assert main(["--resume", folder, "evaluate.pass_at=[3]", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["all"]["pass_at_k"]] == ["3"]
    assert len(fake.requests) == num_requests + 3  # nobody was asked


def test_resumed_run_keeps_model_that_was_discovered(fake: FakeEndpoint, finished: Path) -> None:
    fake.models = ["another"]
    assert main(["--resume", str(finished), "evaluate.num_samples=5"]) == 0
    assert fake.requests[-1]["model"] == "fake"


def test_key_is_of_the_environment_and_never_written_down(
    fake: FakeEndpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTLOOP_ENDPOINT__API_KEY", "sk-of-mine")
    file = write(tmp_path / "set.jsonl", "1")
    assert main([*overrides_for(fake, tmp_path), f"--tasks={file}"]) == 0
    assert set(fake.keys) == {"Bearer sk-of-mine"}
    folder = tmp_path / "runs" / "one"
    written = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    assert len(written) > 4
    assert not any(b"sk-of-mine" in content for content in written)


def test_endpoint_is_evaluated_in_an_environment_with_its_tools(
    fake: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides_for(
        *(
            fake,
            tmp_path,
            "env=agentloop.environments.examples.guess_number:guess",
            "sandbox.backend=process",
        ),
        *("evaluate.num_tasks=3", "evaluate.num_samples=2", "sampling.seed=1"),
        *("endpoint.max_concurrent=2", "budget.max_response_tokens=99"),
    )
    assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert (summary["by"], summary["model"]) == (fake.url, "fake")
    assert summary["all"]["parts"] == {"found": 0.0}
    assert summary["all"]["length_mean"] == 7  # by its own count
    assert len(fake.requests) == 6
    for request in fake.requests:
        assert [tool["function"]["name"] for tool in request["tools"]] == ["guess"]
        assert request["max_tokens"] == 99
    assert len({request["seed"] for request in fake.requests}) == 6
    assert fake.most_in_flight <= 2


def test_page_is_not_served_where_the_endpoint_should_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "set.jsonl", "1")
    with socket.socket() as silent:  # bound, but nothing listens
        silent.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        arguments = [f"endpoint.url={url}/v1", "endpoint.model=any", "endpoint.max_tries=1"]
        arguments += [f"serve.port={silent.getsockname()[1]}", f"run.folder='{tmp_path}/runs'"]
        assert main([*arguments, "evaluate.retries=0", f"--tasks={file}"]) == 1
    out, err = capsys.readouterr()
    assert "Watch it: " in err
    assert f"Watch it: {url}/" not in err
    assert " 404" not in out + err


def test_model_is_not_evaluated_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("agentloop.launch.machine.is_installed", lambda module: False)
    assert main([f"run.folder='{tmp_path}/runs'"]) == 2
    assert "SGLang is not installed" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_refused_key_ends_it_at_once(
    fake: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.script = deque([Answer(401, {"error": {"message": "no such key"}})] * 99)
    file = write(tmp_path / "set.jsonl", *["1"] * 40)
    arguments = overrides_for(fake, tmp_path, "endpoint.max_concurrent=2")
    assert main([*arguments, f"--tasks={file}"]) == 2
    assert f"endpoint.api_key: {fake.url}: 401 no such key" in capsys.readouterr().err
    assert len(fake.requests) < 40


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("sampling.temperature=0.1", "--resume: sampling: differs from the run's value"),
        ("budget.max_turns=1", "--resume: budget.max_turns"),
        ("tasks.seed=4", "--resume: tasks"),
        ("reward.function=math", "--resume: reward"),
        ("endpoint.model=other", "--resume: endpoint.model"),
        ("evaluate.num_samples=2", "--resume: evaluate.num_samples: the run already has 4"),
    ],
)
def test_run_does_not_go_on_as_another_one(
    finished: Path, override: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "config.toml").read_bytes()
    assert main(["--resume", str(finished), override]) == 2
    assert named in capsys.readouterr().err
    assert (finished / "config.toml").read_bytes() == before


def test_run_of_that_name_is_not_written_over(
    fake: FakeEndpoint, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*overrides_for(fake, tmp_path), f"--tasks={tmp_path / 'set.jsonl'}"]) == 2
    assert "run.name: a run already exists at" in capsys.readouterr().err


async def test_progress_is_shown(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", "1", "1", "2")
    progress = RecordedProgress()
    async with FakeEndpoint().serving() as fake:
        overrides = overrides_for(fake, tmp_path, "tasks.kind=jsonl", f'tasks.paths=["{file}"]')
        await evaluate(settings_with(*overrides), cast(ProgressLine, progress))
    last = progress.statuses[-1]
    assert (last.step, last.num_steps, last.unit) == (3, 3, "task")
    assert last.values["avg@4"].startswith("0.667 [")
    assert last.values["missing"] == "0"
    assert any("samples in flight" in status.waits for status in progress.statuses)


async def test_page_shows_it_while_it_goes_on(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", "1", "2")
    progress = RecordedProgress()
    more = ["tasks.kind=jsonl", f'tasks.paths=["{file}"]', "page=true", "serve.port=0"]
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        settings = settings_with(*overrides_for(fake, tmp_path, *more))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(evaluate, settings, cast(ProgressLine, progress))
            await eventually(lambda: fake.num_in_flight == 8)
            (line,) = [line for line in progress.lines if line.startswith("Watch it: ")]
            async with httpx.AsyncClient(base_url=line.split()[2], trust_env=False) as http:
                frame = (await http.get("api/frame")).json()
                group = (await http.get(f"api/groups/{frame['groups'][0]['id']}")).json()
            assert fake.gate is not None
            fake.gate.set()
    info = frame["about"]
    assert (info["kind"], info["can_ask"], info["controls"]) == ("evaluate", False, [])
    assert [row["state"] for row in frame["rollouts"]] == ["live"] * 8
    assert {group["id"] for group in frame["groups"]} == {row["group"] for row in frame["rollouts"]}
    assert len(group["rollouts"]) == 4


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["endpoint.model=m"], "endpoint.model: needs endpoint.url as well"),
        (["endpoint.url=http://a/v1", "servers=['http://a:1']"],
         "servers: not used with endpoint.url"),
        (["evaluate.num_samples=2", "evaluate.pass_at=[3]"],
         "pass_at: 3 requires at least as many samples"),
        (["endpoint.url=http://a/v1", "envs=[{}]"],
         "envs: with endpoint.url, each must name an environment"),
        (["envs=[{}]", "env.name=a:b"], "env, envs: both are set"),
        (["endpoint.url=a"], "endpoint.url: 'a' does not have the form"),
        (["evaluate.numsamples=2"], "did you mean 'evaluate.num_samples'"),
        (["tasks.kind=jsonl", "tasks.paths=['/no/such.jsonl']"], "/no/such.jsonl: No such file"),
        (["--resume", "/no/such/run"], "--resume: /no/such/run is not a run (no config.toml)"),
        (["--run", "/no/such/run", "--dry-run"], "config.toml"),
        (["--tasks", "a.jsonl", "--tasks", "b.parquet"], "--tasks: give files of one kind"),
    ],
)  # fmt: skip
def test_invalid_settings_are_refused_by_name(
    overrides: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(overrides) == 2
    assert named in capsys.readouterr().err


@pytest.mark.timeout(120)  # transformers is slow to import, and parses the schemas of tools
@pytest.mark.full
def test_answer_of_an_environment_is_graded_as_the_settings_say(
    portal: BlockingPortal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "agentloop.environments.examples.python_math:python_math"
    file = write(tmp_path / "set.jsonl", "1", "2")
    with portal.wrap_async_context_manager(played.server().serving()) as server:
        arguments = [
            f"--tasks={file}",
            f"env={name}",
            *played.settings_for(server),
            "evaluate.num_samples=2",
            f"run.folder='{tmp_path}/runs'",
            "run.name=one",
            "page=false",
        ]
        assert main([*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["all"]["avg_at_k"]["value"] == 0  # it says nothing
    assert (summary["environments"], summary["tools"]) == ([{"name": name, "args": {}}], [])
    rows = (tmp_path / "runs/one/trajectories/group-0000001.jsonl").read_text("utf-8")
    assert [json.loads(row)["reason"] for row in rows.splitlines()] == ["it gives no answer"] * 2


@pytest.mark.full
def test_sample_without_a_conversation_is_missing_and_the_run_resumes(
    portal: BlockingPortal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with portal.wrap_async_context_manager(played.server().serving()) as server:
        arguments = [
            "env=tests.agentloop.cli.played:silent",
            *played.settings_for(server),
            "evaluate={num_samples=2, num_tasks=2, retries=0}",
            f"run.folder='{tmp_path}/runs'",
            "run.name=one",
            "page=false",
        ]
        assert main([*arguments, "--json"]) == 1
        summary = json.loads(capsys.readouterr().out)
        assert (summary["all"]["num_samples"], summary["all"]["avg_at_k"]["value"]) == (2, 1)
        assert summary["missing"] == {"its agent did not run: nothing was sampled": 2}
        assert summary["all"]["parts"] == {"spoke": 1}
        row = (tmp_path / "runs/one/metrics.jsonl").read_text("utf-8").splitlines()[0]
        assert json.loads(row)["part/spoke"] == 1
        gc.collect()  # its lock
        assert main(["--resume", str(tmp_path / "runs/one"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["all"]["num_samples"] == 4


def test_generator_gives_some_and_files_all(tmp_path: Path) -> None:
    assert len(chosen_tasks(settings_with())) == 64
    assert len(chosen_tasks(settings_with("evaluate.num_tasks=5"))) == 5
    file = write(tmp_path / "set.jsonl", *map(str, range(20)))
    kind = ("tasks.kind=jsonl", f"tasks.paths=['{file}']")
    assert [task.answer for task in chosen_tasks(settings_with(*kind))] == [*map(str, range(20))]


def test_each_environment_has_its_own_tasks() -> None:
    guess = "agentloop.environments.examples.guess_number:guess"
    items = f"envs=['{guess}', {{tasks={{levels=[2], held_out=4}}}}]"
    tasks = chosen_tasks(settings_with(items, "evaluate.num_tasks=3"))
    assert [task.env for task in tasks] == ["guess"] * 3 + ["agent"] * 3
    assert len({task.id for task in tasks}) == 6
    assert tasks[0].top > 0
    assert tasks[-1].level == 2


def test_problems_that_stand_there_twice_count_once(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", "1", "2")
    twice = settings_with("tasks.kind=jsonl", f"tasks.paths=['{file}', '{file}']")
    assert len(chosen_tasks(twice)) == 2


def test_part_is_drawn_by_the_seed(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", *map(str, range(50)))

    def drawn(seed: int) -> list[int]:
        s = settings_with("tasks.kind=jsonl", f"tasks.paths=['{file}']", "evaluate.num_tasks=10",
                 f"tasks.seed={seed}")  # fmt: skip
        return [int(task.answer) for task in chosen_tasks(s)]

    assert len(drawn(1)) == 10
    assert drawn(1) == sorted(drawn(1))
    assert drawn(1) == drawn(1) != drawn(2)


def test_held_out_tasks_are_those_that_training_leaves_out(tmp_path: Path) -> None:
    file = write(tmp_path / "set.jsonl", *map(str, range(50)))
    kind = ("tasks.kind=jsonl", f"tasks.paths=['{file}']")
    held_out = {task.id for task in chosen_tasks(settings_with(*kind, "tasks.held_out=7"))}
    assert len(held_out) == 7
    assert held_out < {task.id for task in chosen_tasks(settings_with(*kind))}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """Create a run folder as training leaves it, as far as evaluation needs it."""
    run = tmp_path / "trained"
    (run / "weights" / "3").mkdir(parents=True)
    (run / "weights" / "3" / "config.json").write_text("{}")
    (run / "config.toml").write_text(
        'model = "/elsewhere"\n[loop]\nsteps = 3\n[tasks]\nheld_out = 9\nlevels = [3]\n'
        "[budget]\nmax_turns = 4\n[run]\nname = 'first'\n"
    )
    return run


@pytest.fixture
def complete_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which nothing is missing."""
    monkeypatch.setattr("agentloop.cli.evaluate.require_servers", lambda settings: None)


def test_plan_says_problems_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HTTP_PROXY", raising=False)
    file = tmp_path / "tasks.jsonl"
    url = "endpoint.url=http://127.0.0.1:9/v1"
    assert main(["--dry-run", "--tasks", str(file), url]) == 2
    first, second = capsys.readouterr().out.splitlines()  # and no counts of nothing
    assert first.startswith("missing    endpoint.url: http://127.0.0.1:9/v1: ")
    assert second == f"missing    {file}: No such file"
    write(file, "1")
    assert main(["--dry-run", "--tasks", str(file), url, "servers=['http://127.0.0.1:1']"]) == 2
    out = capsys.readouterr().out
    assert out.startswith("refused    servers: not used with endpoint.url")
    assert "tasks      1 (tasks)" in out


def test_plan_needs_the_name_of_one_of_several_models(
    fake: FakeEndpoint, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "tasks.jsonl", "1")
    fake.models = ["a", "b"]
    arguments = ["--dry-run", "--tasks", str(file), f"endpoint.url={fake.url}"]
    assert main(arguments) == 2
    assert capsys.readouterr().out.startswith("refused    endpoint.model: set it to one of")
    assert main([*arguments, "endpoint.model=a"]) == 0


def test_evaluation_of_a_run_uses_the_runs_settings(
    complete_machine: None, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--run", str(trained), "--dry-run", "evaluate.num_samples=2"]) == 0
    out = capsys.readouterr().out
    assert "tasks      9 (arithmetic)" in out
    assert "samples    2 per task, 18 in total, by agentloop" in out


def test_given_files_replace_held_out_tasks_of_a_run(
    complete_machine: None, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "mine.jsonl", "1", "2", "3")
    assert main(["--run", str(trained), "--dry-run", "--tasks", str(file)]) == 0
    assert "tasks      3 (mine)" in capsys.readouterr().out


def test_help_and_settings_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "--resume" in capsys.readouterr().out
    assert main(["--list-settings"]) == 0
    assert "evaluate.num_samples = 16" in capsys.readouterr().out
