"""The commands of the large recipes' plans, read by the real parsers of SGLang and DeepSpeed.

Nothing is started: each command line is split as its process would split it. The packages are slow
to import, so another process reads all of them at once.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import load_settings
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.plan.cluster import ClusterPlan, nodes_from
from agentloop.training.plan.settings import TrainSettings
from tests.commands import run_python
from tests.patience import patient

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("sglang_installed"),
]
pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

RECIPES = Path(__file__).parents[2] / "agentloop" / "cli" / "recipes"
SHAPES = {"paper-stage1": "8x128,8x80,2048", "release-8gpu": "1x128,8x80,1024"}

READER = """
import argparse, json, sys
from deepspeed.runtime.config import DeepSpeedConfig
from sglang.srt.server_args import ServerArgs, prepare_server_args

from agentloop.learner.optimizer import deepspeed_config
from agentloop.training.learner_client.settings import LearnerSettings

def read_sglang(arguments):
    prepare_server_args([*arguments, "--device", "cuda"])  # this machine may have none
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(arguments)

def read_config(learner):
    settings = LearnerSettings.model_validate_json(learner)
    return DeepSpeedConfig(deepspeed_config(settings)).zero_config

readers = {
    "sglang": read_sglang,
    "config": read_config,
}
asked = json.load(sys.stdin)
found = {name: vars(readers[kind](arguments)) for name, (kind, arguments) in asked.items()}
with open(sys.argv[1], "w") as file:
    json.dump(found, file, default=str)
"""


def settings_of(recipe: str) -> TrainSettings:
    model = f"model='{RECIPES / 'qwen3-14b'}'"
    return load_settings(
        TrainSettings, [RECIPES / f"{recipe}.toml"], [model, "cluster.address=auto"]
    )


def planned(recipe: str) -> dict[str, list[str]]:
    """The commands of a plan by the processes that they are for, without their variables."""
    nodes = nodes_from([SHAPES[recipe]])
    made = ClusterPlan(settings_of(recipe), nodes, nodes[0].name)
    commands = {row["process"]: shlex.split(row["command"]) for row in made.rows()}
    variable = re.compile(r"[A-Z_]+=")
    return {
        name: [word for word in words if not variable.match(word)]
        for name, words in commands.items()
        if words
    }


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What each command line says, by the parser of the program that it is for."""
    folder = tmp_path_factory.mktemp("commands")
    requests: dict[str, tuple[str, Any]] = {}
    for recipe in SHAPES:
        for name, words in planned(recipe).items():
            if name.startswith("server"):
                at = words.index("agentloop.inference.processes.keyed")
                requests[f"{recipe}: {name}"] = ("sglang", words[at + 1 :])
        learner = settings_of(recipe).learner.model_dump()
        requests[f"{recipe}: config"] = ("config", LearnerSettings(**learner).model_dump_json())
    script = [sys.executable, "-c", READER, str(folder / "found.json")]
    done = subprocess.run(
        script,
        input=json.dumps(requests),
        text=True,
        capture_output=True,
        timeout=patient(800),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, dict[str, Any]] = json.loads((folder / "found.json").read_text())
    assert result.keys() == requests.keys()
    return result


def test_sglang_accepts_the_servers_commands(read: dict[str, dict[str, Any]]) -> None:
    paper = [read[f"paper-stage1: server {number}"] for number in range(1, 5)]
    assert [first["host"] for first in paper] == [f"node-{number}" for number in range(5, 9)]
    assert {(first["tp_size"], first["dp_size"], first["base_gpu_id"]) for first in paper} == {
        (1, 8, 0)
    }
    release = [read[f"release-8gpu: server {number}"] for number in (1, 2)]
    assert {(first["tp_size"], first["dp_size"]) for first in release} == {(4, 1)}
    assert {first["mem_fraction_static"] for first in release} == {0.5}
    assert [first["enable_memory_saver"] for first in [*paper, *release]] == [False] * 4 + [
        True
    ] * 2
    assert {Path(first["model_path"]) for first in [*paper, *release]} == {RECIPES / "qwen3-14b"}


def test_deepspeed_accepts_the_learners_settings(read: dict[str, dict[str, Any]]) -> None:
    assert read["paper-stage1: config"]["stage"] == 3
    release = read["release-8gpu: config"]
    assert release["stage"] == 3
    assert release["reduce_bucket_size"] == 100_000_000
    assert release["max_live_parameters"] == 500_000_000


@pytest.mark.parametrize("recipe", SHAPES)
def test_rank_and_the_sandbox_read_their_own_commands(recipe: str, tmp_path: Path) -> None:
    commands = planned(recipe)
    ranks = [words for name, words in commands.items() if name.startswith("rank")]
    assert len(ranks) == settings_of(recipe).ranks.nodes
    done = run_python(*ranks[0][1:], cwd=tmp_path, timeout_s=300, status=None)
    assert "learner.json: [Errno 2]" in done.stderr  # its arguments are right; the file is missing
    sandboxes = [words for name, words in commands.items() if name.startswith("sandbox")]
    assert sandboxes
    assert all(words == ["python", "-m", "agentloop.sandbox.serve"] for words in sandboxes)
