"""The real libraries that have adapters, with a script in place of the model.

Not all of them can be installed beside SGLang, and together they are large, so they have a tox
environment of their own: `tox -e adapters`.
"""

from __future__ import annotations

import importlib.util
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import pytest

from agentloop.environments.adapters import inspect_ai, openenv, textworld
from agentloop.errors import RequestError, ServerUnavailable, SettingsError
from agentloop.trajectory import Message
from tests.agentloop.environments.adapters.scripted import Said, Scripted, play, task_of
from tests.integration.conftest import need
from tests.patience import patient
from tests.rollouts import reward_in

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),
    # What the libraries import is not ours.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:.*not fully supported"),
]


def needs(module: str, package: str) -> None:
    if importlib.util.find_spec(module) is None:
        need(f"{package}: tox -e adapters")


@pytest.fixture(scope="module")
def games(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two games of TextWorld, made by its own command."""
    needs("textworld", "TextWorld")
    folder = tmp_path_factory.mktemp("games")
    size = ["--world-size", "1", "--nb-objects", "2", "--quest-length", "1"]
    for seed in ("1", "2"):
        program = str(Path(sys.executable).with_name("tw-make"))
        command = [program, "custom", *size, "--silent"]
        output = ["--seed", seed, "--output", str(folder / f"{seed}.z8")]
        subprocess.run([*command, *output], check=True, capture_output=True, timeout=patient(200))
    return folder


def first_command(observed: list[Message]) -> str:
    """Take or do the first thing that is listed and could be what the quest asks for."""
    listed = observed[-1]["content"].rpartition("You can: ")[2].split(", ")
    wanted = [
        single for single in listed if re.match(r"take|open|insert|put|eat|unlock|go", single)
    ]
    return f"I think.\n> {wanted[0] if wanted else listed[0]}"


async def test_text_adventure_is_played(games: Path) -> None:
    arguments = {"file": str(games / "*.z8"), "lists_commands": True, "max_moves": 30}
    game = textworld.game.with_arguments(arguments)
    files = {task_of(game, seed).file for seed in range(20)}
    assert files == {str(games / "1.z8"), str(games / "2.z8")}
    host = Scripted(first_command)
    episodes = await play(game, host, size=4)
    for episode in episodes:
        assert reward_in(episode).parts.keys() == {"score", "won", "moves"}
        assert reward_in(episode).value == reward_in(episode).parts["score"]
        assert len(episode.trajectories) == 1
        assert len(episode.trajectories[0].turns) == reward_in(episode).parts["moves"]
    (_, (system, first), _) = host.asked[0]
    assert "one command" in system["content"]
    assert not re.search(r"[|>$]", first["content"])


async def test_text_adventure_is_won_by_its_walkthrough(games: Path) -> None:
    library = importlib.import_module("textworld")
    file = str(games / "1.z8")
    walkthrough = library.Game.load(file.replace(".z8", ".json")).metadata["walkthrough"]
    host = Scripted(lambda observed: walkthrough[(len(observed) - 2) // 2])
    (episode,) = await play(textworld.game.with_arguments({"file": file}), host)
    assert reward_in(episode).parts == {"score": 1.0, "won": 1.0, "moves": len(walkthrough)}
    assert reward_in(episode).value == 1.0


INSPECT = '''
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import Score, accuracy, match, model_graded_qa, scorer
from inspect_ai.solver import generate, solver, system_message, use_tools
from inspect_ai.tool import tool
from inspect_ai.util import store

SUMS = [Sample(input=f"What is 1 + {n}?", target=str(1 + n)) for n in range(1, 6)]


@tool
def add():
    async def execute(a: int, b: int) -> str:
        """Add two numbers.

        Args:
            a: One.
            b: The other.
        """
        return str(a + b)

    return execute


@solver
def count():
    async def solve(state, generate):
        store().set("count", store().get("count", 0) + 1)
        state.metadata["count"] = store().get("count")
        return state

    return solve


@scorer(metrics=[accuracy()])
def parts():
    async def score(state, target):
        right = state.output.completion == target.text
        return Score(value={"right": right, "first": state.metadata["count"] == 1})

    return score


@task
def sums(system: str = "Be brief."):
    return Task(SUMS, solver=[system_message(system), generate()], scorer=match())


@task
def tools():
    return Task(SUMS, solver=[use_tools(add()), generate()], scorer=match(), message_limit=5)


@task
def graded():
    return Task(SUMS, solver=generate(), scorer=model_graded_qa())


@task
def stored():
    return Task(SUMS, setup=count(), solver=generate(), scorer=parts())


@task
def boxed():
    return Task(SUMS, solver=generate(), scorer=match(), sandbox="docker")
'''


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    needs("inspect_ai", "Inspect")
    file = tmp_path / "own_tasks.py"
    file.write_text(INSPECT)
    return file


def last_user(observed: list[Message]) -> str:
    return str(next(single["content"] for single in reversed(observed) if single["role"] == "user"))


def right(observed: list[Message]) -> str:
    a, b = map(int, re.findall(r"\d+", last_user(observed)))
    return str(a + b)


@pytest.mark.parametrize(("script", "value"), [(right, 1.0), (lambda observed: "no idea", 0.0)])
async def test_inspect_task_is_solved_and_scored(
    tasks: Path, script: Callable[[list[Message]], Said], value: float
) -> None:
    arguments = {"name": f"{tasks}@sums", "args": {"system": "Add."}}
    sample = inspect_ai.sample.with_arguments(arguments)
    host = Scripted(script)
    for episode in await play(sample, host, size=3):
        assert reward_in(episode).value == value, episode.reward
    assert [single["content"] for single in host.asked[0][1]] == [
        "Add.",
        host.asked[0][1][1]["content"],
    ]
    assert len({task_of(sample, seed).row for seed in range(40)}) == 5


async def test_inspect_task_runs_its_tools(tasks: Path) -> None:
    def script(observed: list[Message]) -> Said:
        if observed[-1]["role"] == "tool":
            assert observed[-2]["tool_calls"][0]["function"]["name"] == "add"
            return str(observed[-1]["content"])
        a, b = map(int, re.findall(r"\d+", last_user(observed)))
        return "add", {"a": a, "b": b}

    host = Scripted(script)
    (episode,) = await play(inspect_ai.sample.with_arguments({"name": f"{tasks}@tools"}), host)
    assert reward_in(episode).value == 1.0
    assert [names for _, _, names in host.asked] == [["add"], ["add"]]
    assert len(episode.trajectories) == 2

    endless = Scripted(lambda observed: ("add", {"a": 1, "b": 1}))
    (episode,) = await play(inspect_ai.sample.with_arguments({"name": f"{tasks}@tools"}), endless)
    assert episode.reward is not None
    assert reward_in(episode).value == 0.0  # at its limit of messages it is scored
    assert len(endless.asked) == 2


async def test_grader_of_inspect_is_another_agent(tasks: Path) -> None:
    def script(observed: list[Message]) -> str:
        return "GRADE: C" if "GRADE" in last_user(observed) else "2"

    graded = inspect_ai.sample.with_arguments({"name": f"{tasks}@graded"})
    (episode,) = await play(graded, Scripted(script))
    assert reward_in(episode).value == 1.0
    assert len(episode.trajectories) == 1
    assert episode.others["grader"].is_trained is False
    assert len(episode.others["grader"].trajectories) == 1


async def test_rollouts_of_inspect_do_not_share_a_store(tasks: Path) -> None:
    stored = inspect_ai.sample.with_arguments({"name": f"{tasks}@stored"})
    for episode in await play(stored, Scripted(right), size=3):
        assert reward_in(episode).parts == {"right": 1.0, "first": 1.0}
        assert reward_in(episode).value == 1.0


def test_inspect_tasks_that_cannot_run_are_refused(tasks: Path) -> None:
    with pytest.raises(SettingsError, match="boxed: it must have a scorer, and need no sandbox"):
        task_of(inspect_ai.sample.with_arguments({"name": f"{tasks}@boxed"}))
    for name in ("own_tasks.py", f"{tasks}@nothing", "no_such_package/task"):
        with pytest.raises(SettingsError, match=r"env.args.name: .*; write FILE@NAME"):
            task_of(inspect_ai.sample.with_arguments({"name": name}))


async def test_failure_below_inspect_is_not_the_tasks(tasks: Path) -> None:
    def gone(observed: list[Message]) -> Said:
        raise ServerUnavailable("gone")

    sums = inspect_ai.sample.with_arguments({"name": f"{tasks}@sums"})
    (episode,) = await play(sums, Scripted(gone))
    assert reward_in(episode).reason == "infrastructure: gone"


OPENENV = """
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class Guess(Action):
    number: int


class Seen(Observation):
    text: str


class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **options):
        self.number = options.get("number", 7)
        self._state = State(step_count=0)
        return Seen(text="Guess!", done=False)

    def step(self, action, timeout_s=None, **options):
        if action.number < 0:
            raise ValueError("ouch")
        self._state.step_count += 1
        right = action.number == self.number
        return Seen(text="right" if right else "higher", done=right, reward=float(right))

    @property
    def state(self):
        return self._state


app = create_app(Game, Guess, Seen, max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""

OPENENV_TOOLS = """
import sys

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Game(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        mcp = FastMCP("game")

        @mcp.tool
        def guess(number: int) -> str:
            return "right" if number == self.number else "higher"

        super().__init__(mcp)

    def reset(self, seed=None, episode_id=None, **options):
        self.number = options["number"]
        return Observation(metadata={"message": "Guess!"})

    def _step_impl(self, action, timeout_s=None, **options):
        raise AssertionError("no other action")

    async def step_async(self, action, timeout_s=None, **options):
        seen = await super().step_async(action, timeout_s, **options)
        if "right" in str(getattr(seen, "result", "")):
            seen.done, seen.reward = True, 1.0
        return seen

    @property
    def state(self):
        return State()


app = create_app(Game, CallToolAction, CallToolObservation, max_concurrent_envs=4)
uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="warning")
"""


@pytest.fixture(scope="module")
def openenv_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of OpenEnv."""
    with serving_openenv(tmp_path_factory.mktemp("openenv") / "server.py", OPENENV) as url:
        yield url


@contextmanager
def serving_openenv(file: Path, source: str) -> Iterator[str]:
    needs("openenv", "OpenEnv")
    file.write_text(source)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, file, str(port)])
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + patient(100)
        while True:
            assert process.poll() is None
            assert time.monotonic() < deadline
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").is_success:
                    break
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


async def test_episode_of_openenv_is_played(openenv_url: str) -> None:
    arguments = {"url": openenv_url, "reset": {"number": 2}, "max_sessions": 4}
    stated = ("I do not know.", '{"number": "x"}', '{"number": 1}', 'Now {"number": 2}.')
    host = Scripted(lambda observed: stated[len(observed) // 2 - 1])
    for episode in await play(openenv.episode.with_arguments(arguments), host, size=6):
        assert reward_in(episode).parts == {"reward": 1.0, "steps": 4.0}
    (_, (system, first), _) = host.asked[0]
    assert '"number"' in system["content"]
    assert "Guess!" in first["content"]


async def test_mcp_tools_of_openenv_are_called(tmp_path: Path) -> None:
    stated: list[Said] = [*(("guess", {"number": number}) for number in ("x", 1, 2)), "Done."]
    host = Scripted(lambda observed: stated[len(observed) - 1])
    with serving_openenv(tmp_path / "server.py", OPENENV_TOOLS) as url:
        arguments = {"url": url, "reset": {"number": 2}, "max_sessions": 4}
        for episode in await play(openenv.episode.with_arguments(arguments), host, size=3):
            assert reward_in(episode).parts == {"reward": 1.0, "steps": 3.0}
    assert host.asked[0][2] == ["guess"]
    answers = [message["content"] for message in host.seen if message["role"] == "tool"]
    assert answers[0].startswith("error: [error] 1 validation error")
    assert answers[1:] == ["ok: higher", "ok: right"]


async def test_environment_of_openenv_that_raises_gives_no_reward(openenv_url: str) -> None:
    game = openenv.episode.with_arguments({"url": openenv_url})
    with pytest.raises(RequestError, match=r"openenv: step: ouch"):
        await play(game, Scripted(lambda observed: '{"number": -1}'))
