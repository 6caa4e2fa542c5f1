"""Guides and quick starts: their settings load, their commands name settings that exist, and the
messages that they quote are those of the code."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pydantic
import pytest

import agentloop
from agentloop.agent.tools import Tools, as_tool
from agentloop.cli.env.trial import TrySettings
from agentloop.cli.playing import PlaySettings
from agentloop.config import describe_settings, load_settings
from agentloop.environments.environment import EnvSettings, load
from agentloop.environments.program import ProgramSettings, program
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.mixed import MixedTasks
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings, read_tasks
from agentloop.errors import AgentLoopError
from agentloop.evaluation.wiring import EvaluateSettings
from agentloop.launch.settings import AskSettings
from agentloop.plain_json import JsonObject
from agentloop.sandbox import CallStatus, ProgramEnd
from agentloop.training.plan.settings import TrainSettings
from agentloop.trajectory import ToolCallStatus, Trajectory, Turn

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "agentloop" / "environments" / "examples"
GUIDES = sorted([*ROOT.glob("docs/guides/*.md"), *ROOT.glob("docs/quickstart/*.md")])


def blocks(guide: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", guide.read_text("utf-8"), re.M | re.S)


def guide(name: str) -> str:
    return (ROOT / "docs/guides" / name).read_text("utf-8")


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_settings_files_load(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for text in blocks(path, "toml"):
        file = tmp_path / "settings.toml"
        file.write_text(text)
        load_settings(TrainSettings, [file])


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_commands_name_settings_that_exist(path: Path) -> None:
    models: dict[str, type[pydantic.BaseModel]] = {
        "train": TrainSettings,
        "evaluate": EvaluateSettings,
        "serve": AskSettings,
        "chat": PlaySettings,
        "env try": TrySettings,
    }
    for text in blocks(path, "sh"):
        for line in text.splitlines():
            command = "agentloop (train|evaluate|serve|chat|env try) (.*)"
            match = re.search(rf"^(?:\w+=\S+ )?{command}", line)
            if match is None:
                continue
            settings = {key for key, _, _ in describe_settings(models[match[1]])}
            settings |= {"env", "credit", "credit.args.discount"}  # short; of one of the rules
            named = re.findall(r"(?:^| )'?([a-z]\w*(?:\.\w+)*)=", match[2])
            settings |= {f"agent.{name}" for name in ProgramSettings.model_fields}
            arguments = {name for name in named if name.startswith(("env.args.", "agent.env."))}
            assert set(named) - arguments <= settings, line
            if match[1] == "train" and "servers" in named and ".toml" not in match[2]:
                assert "model" in named, f"the learner starts from the model's folder: {line}"


@pytest.mark.parametrize("path", GUIDES, ids=lambda path: path.stem)
def test_programs_compile(path: Path) -> None:
    for text in blocks(path, "python"):
        compile(text, path.name, "exec")


def test_rows_of_the_data_guide_are_tasks(tmp_path: Path) -> None:
    (rows,) = blocks(ROOT / "docs/guides/your-data.md", "json")
    file = tmp_path / "tasks.jsonl"
    file.write_text(rows)
    tasks = list(read_tasks(TasksSettings(kind="jsonl", paths=[file])))
    assert [task.answer for task in tasks] == ["1776", "42"]


def rows(*rows: str) -> Callable[[], None]:
    def read() -> None:
        Path("tasks.jsonl").write_text("\n".join(rows))
        list(read_tasks(TasksSettings(kind="jsonl", paths=[Path("tasks.jsonl")])))

    return read


RIGHT = json.dumps({"problem": "What is 37 times 48?", "answer": "1776"})


@pytest.mark.parametrize(
    "fails",
    [
        rows('{"problem": "x"'),
        rows(RIGHT, '{"problem": "What is 12 plus 30?", "gold": 42}'),
        rows(RIGHT, '{"problem": "What is 12 plus 30?", "answer": null}'),
        rows("problem,answer", "What is 12 plus 30?,42"),
        rows('{"messages": [{"role": "assistant", "content": "x"}], "answer": "1"}'),
        lambda: load_settings(TrainSettings, [], ["tasks.kind=jsonl"]),
    ],
)
def test_data_guide_quotes_the_messages(
    fails: Callable[[], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(AgentLoopError) as raised:
        fails()
    assert is_quoted(str(raised.value), guide("your-data.md"))


def a(x):  # type: ignore[no-untyped-def]
    """Do something."""


def b(x: int) -> None: ...


def c(*args: int) -> None:
    """Do something."""


@pytest.mark.parametrize("tool", [a, b, c, 3])
def test_tool_guide_quotes_the_messages(tool: Any) -> None:
    with pytest.raises(AgentLoopError) as raised:
        as_tool(tool)
    assert is_quoted(str(raised.value), guide("your-tool.md"))


def test_guide_of_judges_quotes_the_messages() -> None:
    with pytest.raises(AgentLoopError) as raised:
        agentloop.Judge(agentloop.Endpoint("http://a/v1"), "", low=1, high=1)
    assert is_quoted(str(raised.value), guide("a-judge.md"))


@pytest.mark.parametrize(
    "fails",
    [
        lambda: load(EnvSettings(name="guess")),
        lambda: load(EnvSettings(name="my_module:guess")),
        lambda: TaskSource.open(TasksSettings(kind="environment")),
        lambda: load_settings(TrainSettings, [], ["env=a:b", "envs=['c:d']"]).environments,
        lambda: MixedTasks({"guess": TaskSource.open()}, {"guess": 1}).go_to(
            {"envs": {"guess": {}, "agent": {}}}
        ),
    ],
)
def test_environment_guide_quotes_the_messages(fails: Callable[[], object]) -> None:
    with pytest.raises(AgentLoopError) as raised:
        fails()
    assert is_quoted(str(raised.value), guide("your-environment.md"))


@pytest.mark.parametrize(
    ("overrides", "quoted"),
    [
        (["agent=x", "env=agentloop.environments.examples.guess_number:guess"], True),
        (["agent.image=my-agent"], True),
        (["agent=x", "agent.folder=/no/such"], False),  # a check of the test
    ],
)
def test_guide_of_programs_quotes_the_messages(overrides: list[str], quoted: bool) -> None:
    with pytest.raises(AgentLoopError) as raised:
        load(load_settings(TrainSettings, [], overrides).environment)
    assert is_quoted(str(raised.value), guide("your-agent.md")) is quoted


@pytest.mark.parametrize("command", ["my_agent.py", "python3"])
async def test_guide_of_programs_quotes_how_they_end(command: str) -> None:
    for status in (126, 127) if command != "python3" else (0, 1):
        end = ProgramEnd(CallStatus.ERROR if status else CallStatus.OK, status, "", "", 1.0)
        sandbox = SimpleNamespace(has_containers=True, run_program=AsyncMock(return_value=end))
        agent = SimpleNamespace(
            url="http://a", key="", socket=Path("s"), time_left_s=9.0, queued_s=0.0,
            trajectories=[], sandbox=sandbox, stop_requests=lambda: False,
        )  # fmt: skip
        settings = ProgramSettings(command=(command,))
        with pytest.raises(AgentLoopError) as raised:
            await program.function(Task("t", "?", ""), agent, settings=settings)
        assert is_quoted(str(raised.value), guide("your-agent.md"))


def is_quoted(message: str, text: str) -> bool:
    """Return whether a cell of a guide's table holds the message, up to its `...`."""
    quotes = [
        quote.removeprefix("RequestError: ") for quote in re.findall(r"^\| `(.*?)` \|", text, re.M)
    ]
    return any(message.startswith(quote.removesuffix("...").rstrip()) for quote in quotes)


@pytest.mark.parametrize(
    ("text", "num_tokens", "value"),
    [
        (r"\boxed{1776}", 10, 1.0),
        (r"\boxed{1776}", 300, 0.8),
        (r"\boxed{1776}", 100_000, 0.1),
        (r"\boxed{1777}", 10, 0.0),
        ("1776", 10, 0.0),
    ],
)
def test_example_of_a_reward(text: str, num_tokens: int, value: float) -> None:
    score = runpy.run_path(str(EXAMPLES / "my_reward.py"))["right_and_short"]
    turn = Turn(output_ids=[1] * num_tokens, logprobs=[0.0] * num_tokens, text=text)
    reward = score(Trajectory("one", [1], turns=[turn]), Task("task", "37 * 48?", "1776"))
    assert isinstance(reward, Reward)
    assert reward.value == pytest.approx(value)


async def test_example_of_a_tool_with_state() -> None:
    notepad = runpy.run_path(str(EXAMPLES / "stateful_tool.py"))["Notepad"]

    async def note(tools: Tools, arguments: JsonObject) -> tuple[str, str]:
        output = await tools.run("note", arguments)
        return output.status, output.content

    async with Tools([notepad()]) as tools:
        assert await note(tools, {"line": "3"}) == (ToolCallStatus.OK, "3")
        assert await note(tools, {"line": "4"}) == (ToolCallStatus.OK, "3\n4")
        status, _ = await note(tools, {})
        assert status == ToolCallStatus.BAD_ARGUMENTS
    async with Tools([notepad()]) as tools:  # another rollout
        assert await note(tools, {"line": "5"}) == (ToolCallStatus.OK, "5")


async def test_example_of_a_method_with_state() -> None:
    (program,) = [
        text for text in blocks(ROOT / "docs/guides/your-tool.md", "python") if "notes(" in text
    ]
    names: dict[str, Any] = {"__name__": "my_module"}
    exec(program, names)

    def player(messages: list[agentloop.Message]) -> agentloop.Message | str:
        return "Noted." if len(messages) > 1 else agentloop.call("note", line="3 and 4")

    for _ in range(2):  # the second rollout has a notepad of its own
        task = {"prompt": "Note the numbers 3 and 4.", "answer": "3 and 4"}
        played = await agentloop.play(names["notes"], task, player)
        assert played.reward.value == 1


async def test_environment_that_was_moved_from_verifiers() -> None:
    _, program = blocks(ROOT / "docs/guides/other-environments.md", "python")
    names: dict[str, Any] = {"__name__": "my_module"}
    exec(program, names)

    def counting_up(messages: list[agentloop.Message]) -> str:
        return f"Is it {len(messages) // 2 + 1}?"

    for answer, part in ((3, 1), (7, 1), (8, 0)):
        task = {"prompt": "Find my number, 1 to 9.", "answer": answer}
        played = await agentloop.play(names["game"], task, counting_up)
        assert played.reward.value == part
        assert played.reward.parts == {"found": part}


@pytest.mark.parametrize(
    ("name", "example"),
    [
        ("your-agent.md", "calculator.py"),
        ("your-environment.md", "guess_number.py"),
        ("../quickstart/environment.md", "shop.py"),
        ("two-agents.md", "solver_and_checker.py"),
    ],
)
def test_guide_shows_the_example_as_it_is(name: str, example: str) -> None:
    text = (EXAMPLES / example).read_text("utf-8")
    assert text.partition("\n\n")[2] in blocks(ROOT / "docs/guides" / name, "python")


def test_first_example_is_short() -> None:
    assert len((EXAMPLES / "guess_number.py").read_text("utf-8").splitlines()) <= 30
