"""Mathematics with Python is the same as an environment and as the built-in agent."""

from __future__ import annotations

import json
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentloop
from agentloop.agent.rollout import Budget
from agentloop.config import load_settings
from agentloop.environments.environment import EnvSettings, load, open_tasks
from agentloop.environments.examples.python_math import python_math
from agentloop.environments.registry import registered
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import Task
from agentloop.errors import ServerUnavailable, SettingsError
from agentloop.events import ignore
from agentloop.inference.router import Router
from agentloop.inference.scheduling.group_gate import AdmittedGroup
from agentloop.inference.turns import Generation
from agentloop.rollouts.player import environment_player
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.runtime import Runtime, Settings, _Model, _Parts
from agentloop.sandbox import CallResult, CallStatus
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.rollouts import Rollouts
from agentloop.trajectory import StopReason, TurnEnd
from tests.fakes import FakePool
from tests.support import END, call_text, chat_format, chunks, written

# transformers is slow to import, and parses the schemas of tools.
pytestmark = pytest.mark.timeout(120)

ROOT = Path(__file__).parents[3]
CHAT = chat_format()
TOOL = "python_code_with_standard_io"
PAPER_TOOL = "execute_python_code_with_standard_io"
REGISTERED = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
    "agentloop.environments"
]

# The paper's prompt, as settings of tasks.
TASKS: dict[str, Any] = {
    "system": "A conversation between User and Assistant. The user asks a question, and the "
    "Assistant solves it. The Assistant first thinks about the reasoning process in the mind and "
    "then provides the user with the answer. The reasoning process and answer are enclosed within "
    "<reason> </reason> and <answer> </answer> tags, respectively, i.e., <reason> reasoning "
    "process here </reason><answer> answer here </answer>.",
    "template": "You must put your answer inside <answer> </answer> tags, i.e., <answer> answer "
    "here </answer>. And your final answer will be extracted automatically by the \\boxed{} tag.\n"
    "This is the problem:\n{problem}",
}

CALL = call_text(PAPER_TOOL, {"code": "print(6 * 7)"})
RIGHT = "<reason>So.</reason><answer>\\boxed{42}</answer>"
# The turns of a rollout, by its kind.
SCRIPTS: dict[str, Sequence[str]] = {
    "right": [RIGHT],
    "wrong": ["<answer>\\boxed{41}</answer>"],
    "silent": ["I give up."],
    "calls": [CALL, RIGHT],
    "calls two": [f"Both. {CALL}\n{CALL}", RIGHT],
    "malformed": ["<tool_call>\n{broken\n</tool_call>", RIGHT],
    "unknown tool": [call_text("jupyter_code", {"code": "1"}), RIGHT],
    "never answers": [CALL] * 9,
    "long": ["Hm. " * 100 + RIGHT],
    "broken": [CALL, ""],  # the server fails
    "old": [RIGHT],  # sampled with weights that are too old
}


class Engine:
    """Plays a script for each rollout of a group; stands in for a `Router`."""

    context_length = 100_000

    def __init__(self, kinds: Sequence[str]) -> None:
        self.kinds = kinds
        self.asked: dict[str, list[Any]] = {}
        self.groups: list[tuple[str, int]] = []
        self.num_open = 0

    @asynccontextmanager
    async def group(
        self, name: str, size: int, num_prompt: int, *, is_single: bool = True
    ) -> AsyncIterator[AdmittedGroup]:
        self.groups.append((name, size))
        self.num_open += 1
        yield AdmittedGroup(name, tuple(f"{name}.{index}" for index in range(size)))
        self.num_open -= 1

    async def generate(self, generation: Generation, *, on_chunk: Any, **_: Any) -> None:
        assert self.num_open  # the group was admitted
        first = generation
        turns = self.asked.setdefault(first.key, [])
        kind = self.kinds[int(first.key.rpartition(".")[2])]
        text = SCRIPTS[kind][len(turns)]
        maximum = first.max_new_tokens
        turns.append(
            (
                list(first.ids),
                first.sampling,
                maximum,
                first.stop_ids,
                first.group,
                first.num_shared,
            )
        )
        if not text:
            raise ServerUnavailable("gone")
        ids = written(CHAT, text + END)
        end = TurnEnd.STOP if len(ids) <= maximum else TurnEnd.LENGTH
        version = "2" if kind == "old" else "3"
        for chunk in chunks(ids[:maximum], [1] * (maximum > 1), end=end, version=version):
            on_chunk(chunk)
            await anyio.lowlevel.checkpoint()

    def forget(self, key: str, *, is_complete: bool) -> None:
        pass


def programs() -> Any:
    """Return a sandbox in which every program prints 42, and its time limit."""
    return FakePool(lambda *call: CallResult(0, CallStatus.OK, stdout=f"42\n{call[-1]:g}\n"))


class PlayedRuntime(Runtime):
    """A runtime with these parts, which need not be started."""

    def __init__(self, settings: Settings, engine: Engine) -> None:
        super().__init__(settings)
        model = _Model("fake", CHAT, cast(Router, engine), [], cast(Any, None))
        self._parts_or_none = _Parts(model, programs())


async def rolled_out(
    recipe: TrainSettings, kinds: Sequence[str], budget: Budget
) -> tuple[Engine, list[Mapping[str, Any]]]:
    """Roll out a group by the settings of a recipe; return what was asked, and the records."""
    engine = Engine(kinds)
    names = ("tools", "tool_format", "sampling")
    common = {name: getattr(recipe, name) for name in names}
    runtime = PlayedRuntime(Settings(**common), engine)
    task = open_tasks(recipe.tasks, load(recipe.env)).held_out()[0]
    async with Grader(recipe.reward) as grader:
        player = environment_player(
            recipe.env, runtime, sampling=recipe.sampling, emit=ignore, grader=grader
        )
        rollouts = Rollouts(
            GroupRunner(player, grader), recipe.roc, recipe.credit, seed=recipe.loop.seed
        )
        group = await rollouts.run(GroupRequest(task, "1", len(kinds), budget, 3, Purpose.TRAIN))
    return engine, [stable(row.to_dict()) for row in group.rows]


def stable(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a record without its times and random names."""
    record = json.loads(json.dumps(row))
    turns = record["trajectory"]["turns"]
    timed = [record["trajectory"], *turns, *(first for turn in turns for first in turn["results"])]
    for each in timed:
        for name in [name for name in each if name.endswith("_s")]:
            del each[name]
    for turn in turns:
        numbers = {call["id"]: number for number, call in enumerate(turn["calls"])}
        for call in turn["calls"]:
            call["id"] = numbers[call["id"]]
        for result in turn["results"]:
            result["call_id"] = numbers[result["call_id"]]
    return cast(Mapping[str, Any], record)


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainSettings, TrainSettings]:
    """The paper's recipe, and what it says without an environment."""
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    rows = [{"problem": f"What is {n} times {42 // n}?", "answer": "42"} for n in (1, 2, 3, 6, 7)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [f"tasks.paths=['{file}']", "tasks.held_out=2", "sampling.seed=7"]
    paper = load_settings(TrainSettings, [ROOT / "agentloop/cli/recipes/paper.toml"], overrides)
    env = paper.env.model_copy(update={"name": REGISTERED[paper.env.name]})
    built_in = {
        "env": EnvSettings(),
        "tools": [PAPER_TOOL],
        "tasks": paper.tasks.model_copy(update=TASKS),
        "reward": RewardSettings(function="math"),
    }
    return paper.model_copy(update={"env": env}), paper.model_copy(update=built_in)


def test_copy_of_its_file_is_an_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ROOT / "examples/python_math.py"
    (tmp_path / "my_math.py").write_text(source.read_text().replace("You must put", "Please put"))
    monkeypatch.syspath_prepend(str(tmp_path))
    copied = load(EnvSettings(name="my_math:python_math", args={"tools": ["jupyter_code"]}))
    assert copied is not None
    assert str(copied.arguments["template"]).startswith("Please put your answer")
    assert copied.arguments["tools"] == ["jupyter_code"]


@given(
    kinds=st.lists(st.sampled_from([*SCRIPTS]), min_size=1, max_size=6),
    max_turns=st.integers(1, 3),
    max_tokens=st.integers(1, 700),
)
@settings(deadline=None, max_examples=25)
def test_environment_is_the_built_in_agent_with_the_papers_prompt(
    recipes: tuple[TrainSettings, TrainSettings], kinds: list[str], max_turns: int, max_tokens: int
) -> None:
    budget = Budget(max_turns=max_turns, max_response_tokens=max_tokens)
    kinds = ["right", *kinds]  # a group that is lost as a whole would be rolled out again
    each = [anyio.run(rolled_out, recipe, kinds, budget) for recipe in recipes]
    (engine, rows), (usual_engine, usual_rows) = each
    assert engine.asked == usual_engine.asked
    assert engine.groups == usual_engine.groups
    assert rows == usual_rows


async def test_each_kind_of_end_has_its_reward_and_its_reason(
    recipes: tuple[TrainSettings, TrainSettings],
) -> None:
    budget = Budget(max_turns=3, max_response_tokens=400)
    engine, rows = await rolled_out(recipes[0], [*SCRIPTS], budget)
    actual = {
        kind: (row["reward"], row["reason"], row["trajectory"]["stop_reason"])
        for kind, row in zip(SCRIPTS, rows, strict=True)
    }
    right = (1.0, "matches the reference answer", StopReason.ANSWERED)
    nothing = "it gives no answer"
    assert actual == {
        **dict.fromkeys(["right", "calls", "calls two", "malformed", "unknown tool"], right),
        "wrong": (0.0, "is a different number than the reference answer", StopReason.ANSWERED),
        "silent": (0.0, nothing, StopReason.ANSWERED),
        "never answers": (0.0, nothing, StopReason.TURN_BUDGET),
        "long": (0.0, nothing, StopReason.TOKEN_BUDGET),
        "broken": (None, "infrastructure: gone", StopReason.INFRASTRUCTURE),
        "old": (None, "sampled with other weights: 2", StopReason.ANSWERED),
    }
    malformed = rows[[*SCRIPTS].index("malformed")]["trajectory"]["turns"][0]["results"][0]
    assert malformed["content"].startswith("Failed to decode tool call: ")  # the recipe's wording
    (name, _), *_ = engine.groups
    prompt = CHAT.decode(engine.asked[f"{name}.0"][0][0])
    assert TASKS["system"] in prompt
    assert prompt.count(f'"name": "{PAPER_TOOL}"') == 1
    assert "jupyter_code" not in prompt


def test_recipe_holds_out_the_same_problems(recipes: tuple[TrainSettings, TrainSettings]) -> None:
    sources = [open_tasks(recipe.tasks, load(recipe.env)) for recipe in recipes]
    ids = [[task.id for task in source.held_out()] for source in sources]
    assert ids[0] == ids[1]
    assert sources[0].fingerprint == sources[1].fingerprint


class Asked:
    """Records what the model is asked, and answers 42."""

    pool: Any = programs()

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def __call__(self, messages: list[agentloop.Message]) -> str:
        self.messages = messages
        return RIGHT


async def test_prompt_and_tools_are_arguments() -> None:
    requests = Asked()
    changed = python_math.with_arguments(
        {"system": "", "template": "Q: {problem}", "tools": ["jupyter_code"]}
    )
    task = {"prompt": "6 x 7?", "answer": "42"}
    played = await agentloop.play(changed, task, requests, pool=programs())
    assert requests.messages == [{"role": "user", "content": "Q: 6 x 7?"}]
    assert [first["function"]["name"] for first in played.dialogues[0]["tools"]] == ["jupyter_code"]
    assert (played.reward.value, played.reward.answer) == (1.0, "42")


async def test_problem_that_is_a_conversation_is_asked_as_it_stands() -> None:
    requests = Asked()
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "6 x 7?"}]
    task = Task("t", messages, "42")
    played = await agentloop.play(python_math, task, requests, pool=programs())
    assert requests.messages == messages
    assert played.reward.value == 1.0


async def test_script_may_call_its_tool() -> None:
    def script(messages: list[agentloop.Message]) -> agentloop.Message | str:
        if messages[-1]["role"] == "user":
            return agentloop.call(TOOL, code="print(6 * 7)")
        return f"<answer>\\boxed{{{messages[-1]['content'].split()[0]}}}</answer>"

    task = {"prompt": "6 x 7?", "answer": "42"}
    played = await agentloop.play(python_math, task, script, pool=programs())
    assert played.reward.value == 1.0
    with pytest.raises(agentloop.RequestError, match=r"pass play\(pool=\) for it"):
        await agentloop.play(python_math, task, script)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({"tools": ["bash"]}, r"env\.args\.tools\.0: .*'python_code_with_standard_io', "),
        ({"tools": "jupyter_code"}, r"env\.args\.tools: "),
        ({"template": "What?"}, r"env\.args\.template: .*must contain \{problem\}"),
        ({"prompt": "x"}, r"env\.args\.prompt: .*\(arguments of python_math: tools, system, "),
    ],
)
def test_wrong_arguments_are_named(args: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        load(EnvSettings(name=REGISTERED["python-math"], args=args))


def test_python_math_is_registered() -> None:
    ours = [first for first in registered() if first.package.startswith("agentloop-rl ")]
    # An installation in place that is older than this needs: pip install -e . --no-deps
    assert {first.name: first.target for first in ours} == REGISTERED
    assert load(EnvSettings(name="python-math")) == python_math.with_arguments({})
