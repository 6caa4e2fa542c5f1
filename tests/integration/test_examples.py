"""The programs of examples/ run as they are, against the shared server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.commands import run_python
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "prints"),
    [("own_tool.py", "\\boxed{1776}"), ("watch.py", "answered"), ("groups.py", "ids sampled")],
)
def test_example(name: str, prints: str, docker_engine: None, sglang_url: str) -> None:
    environment = {
        **os.environ,
        "AGENTLOOP_SERVERS": f'["{sglang_url}"]',
        "AGENTLOOP_SAMPLING__TEMPERATURE": "0",
        "AGENTLOOP_TOOL_TIMEOUT_S": "60",
    }
    ended = subprocess.run(
        [sys.executable, EXAMPLES / name],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert prints in ended.stdout


# Runs the cells of a notebook as Jupyter does, in one namespace, with `await` at their top.
_CELLS = """
import ast, asyncio, json, sys
cells = [cell for cell in json.load(open(sys.argv[1]))["cells"] if cell["cell_type"] == "code"]
async def run(names):
    for cell in cells:
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        running = eval(compile("".join(cell["source"]), "cell", "exec", flags=flags), names)
        if running is not None:
            await running
asyncio.run(run({}))
"""


@pytest.mark.full
def test_notebook(docker_engine: None, sglang_url: str) -> None:
    ended = run_python(
        "-c", _CELLS, EXAMPLES / "first_run.ipynb", env={"AGENTLOOP_SERVERS": f'["{sglang_url}"]'}
    )
    assert "multiply({'a': 37, 'b': 48}) -> 1776" in ended.stdout
    assert ended.stdout.count("rewards [") == 2


@pytest.mark.gate
def test_minimal_loop_learns(docker_engine: None, sglang_installed: None) -> None:
    program = EXAMPLES / "minimal_rl.py"  # it has a server of its own, whose weights it changes
    assert len(program.read_text("utf-8").splitlines()) <= 120
    ended = run_python(program, "5")
    rewards = [float(reward) for reward in re.findall(r"step \d: reward (\S+),", ended.stdout)]
    assert len(rewards) == 5
    assert rewards[-1] > rewards[0]


def evaluated(
    tmp_path: Path, environment: str, sglang_url: str, *further: str
) -> list[dict[str, Any]]:
    """Evaluate an environment of examples/ and return the rows of its four rollouts.

    The model that ships with agentloop solves none of them, but it takes part.
    """
    settings = [
        f"env=agentloop.environments.examples.{environment}",
        f'servers=["{sglang_url}"]',
        f"run.folder={tmp_path}",
        "run.name=run",
        "page=false",
        "evaluate.num_samples=2",
        "evaluate.num_tasks=2",
        "budget.max_response_tokens=300",
        *further,
    ]
    run_python("-m", "agentloop", "evaluate", *settings, cwd=EXAMPLES.parent)
    results = json.loads((tmp_path / "run/results.json").read_text())
    assert (results["all"]["num_tasks"], results["all"]["num_missing"]) == (2, 0)
    return [
        json.loads(line)
        for file in (tmp_path / "run/trajectories").iterdir()
        for line in file.read_text().splitlines()
    ]


def test_game_is_evaluated(tmp_path: Path, docker_engine: None, sglang_url: str) -> None:
    rows = evaluated(tmp_path, "guess_number:guess", sglang_url)
    assert len(rows) == 4
    assert all(row["parts"].keys() == {"found"} for row in rows)
    assert any(turn["calls"] for row in rows for turn in row["trajectory"]["turns"])


def test_two_agents_are_evaluated(tmp_path: Path, docker_engine: None, sglang_url: str) -> None:
    rows = evaluated(tmp_path, "solver_and_checker:solve_and_check", sglang_url)
    assert all(row["parts"].keys() == {"right", "judged"} for row in rows)
    ids = sorted(row["trajectory"]["id"].partition(".")[2] for row in rows)
    assert ids == sorted(["0", "0+checker", "1", "1+checker"] * 2)


OLDER = """
from contextlib import asynccontextmanager

import agentloop


@asynccontextmanager
async def older(*, url: str):
    sandbox = {"backend": "process", "workers": 1}
    async with agentloop.Runtime(servers=[url], sandbox=sandbox) as runtime:
        yield runtime


@agentloop.environment(tasks=lambda rng: {"answer": str(rng.randint(1, 9))}, setup=older)
async def against(task, agent, *, shared, url: str):
    opponent = agent.other("opponent", player=shared)
    question = "What is 37 times 48?"
    found = await opponent.run(question, tools=["python_code_with_standard_io"])
    agent.record(calls=len(found.calls))
    await agent.chat(question)
    return float("1776" in found.answer)
"""


def test_another_model_has_a_runtime_of_its_own(
    tmp_path: Path, docker_engine: None, sglang_url: str
) -> None:
    (tmp_path / "older.py").write_text(OLDER)
    settings = [f'servers=["{sglang_url}"]', f"env.args.url={sglang_url}", "tool_timeout_s=60"]
    settings += ["sampling.temperature=0", "num_rollouts=2", "budget.max_response_tokens=300"]
    ended = run_python(
        "-m",
        "agentloop",
        "env",
        "try",
        "older:against",
        *settings,
        env={"PYTHONPATH": str(EXAMPLES.parent)},
        cwd=tmp_path,
    )
    assert "reward     1.000 on average\n  calls: 1.000" in ended.stdout


def test_mcp_server_is_used(tmp_path: Path, docker_engine: None, sglang_url: str) -> None:
    server = (
        'mcp.warehouse.command=["python", "-m", "agentloop.environments.examples.warehouse_server"]'
    )
    rows = evaluated(tmp_path, "warehouse:find", sglang_url, server)
    assert {row["reward"] for row in rows} <= {0.0, 1.0}


def test_several_environments_are_evaluated(
    tmp_path: Path, docker_engine: None, sglang_url: str
) -> None:
    recipe = tmp_path / "envs.toml"
    recipe.write_text(
        '[[envs]]\nname = "agentloop.environments.examples.guess_number:guess"\n'
        "budget = {max_turns = 2}\n"
        "[[envs]]\nweight = 3\ntasks = {levels = [2], held_out = 2}\n"
        "[budget]\nmax_response_tokens = 200\n"
        "[evaluate]\nnum_samples = 2\nnum_tasks = 2\n"
    )
    settings = [
        f'servers=["{sglang_url}"]',
        f"run.folder={tmp_path}",
        "run.name=both",
        "page=false",
    ]
    run_python("-m", "agentloop", "evaluate", recipe, *settings, cwd=EXAMPLES.parent)
    results = json.loads((tmp_path / "both/results.json").read_text())
    assert {name: first["num_tasks"] for name, first in results["sets"].items()} == {
        "agent": 2,
        "guess": 2,
    }
    rows = [
        json.loads(line)
        for file in (tmp_path / "both/trajectories").iterdir()
        for line in file.read_text().splitlines()
    ]
    turns = {"agent": [0], "guess": [0]}
    for row in rows:
        name = row["task"].partition("-")[0]
        turns[name].append(len(row["trajectory"]["turns"]))
        assert row["parts"].keys() == ({"found"} if name == "guess" else set())
    assert max(turns["guess"]) <= 2


def test_readme_lists_every_example_and_recipe() -> None:
    text = (EXAMPLES / "README.md").read_text()
    assert [path.name for path in EXAMPLES.glob("[!_]*.py") if f"({path.name})" not in text] == []
    recipes = (EXAMPLES.parent / "agentloop/cli/recipes").glob("*.toml")
    ours = {path.stem for path in recipes if "environments.examples" in path.read_text()}
    assert set(re.findall(r"`agentloop train ([\w-]+)`", text)) == ours


def test_every_example_is_run() -> None:
    run_here = {"own_tool.py", "watch.py", "groups.py", "guess_number.py", "solver_and_checker.py"}
    run_here |= {"warehouse.py", "warehouse_server.py", "minimal_rl.py"}
    run_by_others = {"shop.py", "my_reward.py", "stateful_tool.py", "teachers.py", "calculator.py"}
    run_by_others |= {"calculator_agent.py", "command_line_agent.py", "python_math.py"}
    run_by_others.add("mend_code.py")
    assert {path.name for path in EXAMPLES.glob("[!_]*.py")} == run_here | run_by_others
