"""Each shipped recipe that runs on a CPU, struck in each of its phases and continued to its end."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentloop.config import load_settings
from agentloop.distribution import is_installed
from agentloop.errors import SettingsError
from agentloop.training.plan.settings import TrainSettings
from tests.agentloop.cli.struck import PHASES, WAYS
from tests.patience import patient

pytestmark = [
    pytest.mark.timeout(1200),  # a run has as many lives as phases
    pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc"),
]

ROOT = Path(__file__).parents[3]
RECIPES = ROOT / "agentloop" / "cli" / "recipes"
NEEDS_GPUS_OR_THE_HUB = re.compile(r"^gsm8k$|^math$|^dapo$|^paper|^evaluate-|^one-gpu$|^release-")
SHORT = [
    "sft.loop.epochs=1", "sft.loop.checkpoint_every=2", "loop.prompts_per_step=2",
    "loop.group_size=4", "loop.evaluate_tasks=2", "loop.evaluate_every=1",
    "loop.checkpoint_every=2", "roc.down_sample_to_n=2", "roc.reject_equal_reward=false",
    "ranks.nproc_per_node=1", "sandbox.backend=process", "sandbox.workers=1",
    "sandbox.allow_weak_isolation=true", "page=false",
]  # fmt: skip
REWARD = "reward.function=tests.agentloop.cli.struck:by_place"


def on_a_cpu() -> list[str]:
    trains = re.compile(r"^# .*agentloop train ", re.M)
    paths = [path for path in sorted(RECIPES.glob("*.toml")) if trains.search(path.read_text())]
    return [path.stem for path in paths if not NEEDS_GPUS_OR_THE_HUB.match(path.stem)]


def settings_of(recipe: str) -> TrainSettings:
    return load_settings(TrainSettings, [RECIPES / f"{recipe}.toml"])


def arguments_for(recipe: str) -> list[str]:
    """Return the recipe, made short, with the steps that its phases need."""
    settings = settings_of(recipe)
    arguments = [recipe, *SHORT]
    if settings.sft is None:
        arguments = [word for word in arguments if not word.startswith("sft.")]
    else:
        arguments += ["sft.data.teacher=8", "sft.loop.batch_tokens=300"]
    if not settings.env.name:  # otherwise the environment gives the rewards
        arguments += [REWARD, "tasks.held_out=2"]
    names = [*settings.stages]
    arguments += [f"stages.{name}.steps=2" for name in names] or ["loop.steps=3"]
    return arguments + [
        f"stages.{name}.filter_tasks=2" for name in names if settings.stages[name].filter_tasks
    ]


def phases_of(recipe: str) -> list[str]:
    settings = settings_of(recipe)
    left_out = {"filter"} if not any(s.filter_tasks for s in settings.stages.values()) else set()
    left_out |= {f"stage {number}" for number in range(max(1, len(settings.stages)) + 1, 4)}
    if settings.sft is None:
        left_out |= {"games", "fine-tuning", "publishing", "between"}
    if not settings.env.name:  # the arithmetic teacher does not play
        left_out.add("games")
    return [phase for phase in PHASES if phase not in left_out]


def struck(
    folder: Path,
    way: str,
    phases: Sequence[str],
    arguments: Sequence[str],
    *,
    parts: str = "played",
) -> dict[str, Any]:
    """Run to the end, struck in these phases; return what must not depend on the strikes."""
    own_mounts = ["unshare", "--mount"] if way == "full disk" else []
    arguments = [way, str(folder), parts, ",".join(phases), *arguments]
    done = subprocess.run(
        [*own_mounts, sys.executable, "-m", "tests.agentloop.cli.struck", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=patient(1150),
        check=False,
    )
    assert done.returncode == 0, done.stdout
    outcome: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert sorted(outcome.pop("struck")) == sorted(phases), done.stdout
    return outcome


@functools.cache
def undisturbed(recipe: str) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp())
    try:
        return struck(folder, "interrupt", [], arguments_for(recipe))
    finally:
        shutil.rmtree(folder)


def require(way: str, recipe: str) -> None:
    settings = settings_of(recipe)
    if settings.mcp and not is_installed("mcp"):
        pytest.skip("needs the MCP SDK: pip install 'agentloop-rl[mcp]'")
    try:
        for environment in settings.environments:
            environment.load()
    except SettingsError as error:  # it needs a package that is not installed
        pytest.skip(str(error))
    if way == "full disk":
        with suppress(OSError):
            if subprocess.run(["unshare", "--mount", "true"], check=False).returncode == 0:
                return
        pytest.skip("needs the privilege to mount")


@pytest.mark.parametrize("way", ["interrupt", "kill the child"])
def test_struck_run_goes_on(tmp_path: Path, way: str) -> None:
    """The rest is in the next test, which takes long."""
    outcome = struck(tmp_path, way, ["fine-tuning", "stage 2"], arguments_for("laptop"))
    assert outcome == undisturbed("laptop")


@pytest.mark.full
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("recipe", on_a_cpu())
def test_recipe_goes_on_from_each_phase(tmp_path: Path, recipe: str, way: str) -> None:
    require(way, recipe)
    outcome = struck(tmp_path, way, phases_of(recipe), arguments_for(recipe))
    assert outcome == undisturbed(recipe)


def test_recipes_have_all_phases() -> None:
    assert {phase for recipe in on_a_cpu() for phase in phases_of(recipe)} == set(PHASES)
