"""`agentloop rollouts`: generate rollouts on this machine for a training run on another one.

The trainer determines the tasks, sampling and rewards; the settings here configure this machine's
servers and sandbox.
"""

from __future__ import annotations

import argparse
import os
import socket
import uuid
from functools import partial
from pathlib import Path

import pydantic

from agentloop.cli import console
from agentloop.config import load_settings
from agentloop.environments.mixture import mixed_runner
from agentloop.environments.rewards.reward import Grader
from agentloop.errors import SettingsError
from agentloop.inference.processes.supervise import ServerSettings, require_device
from agentloop.inference.router import RouterSettings
from agentloop.observe.exporters.otel import OtelSettings, Traces
from agentloop.runtime import Runtime, Settings
from agentloop.sandbox import PoolSettings
from agentloop.training.fleet.messages import Recipe
from agentloop.training.fleet.redis_link import RedisLink
from agentloop.training.fleet.settings import FleetSettings
from agentloop.training.fleet.worker import Member, wait_for_trainer
from agentloop.training.rollouts import Rollouts
from agentloop.training.teacher_client import open_teacher
from agentloop.training.weight_sync.sync import Served

__all__ = ["RolloutsSettings", "main", "roll_out"]


class RolloutsSettings(pydantic.BaseModel):
    """The settings of one rollout machine; the trainer provides all others."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = pydantic.Field(
        None, description="Folder of the model on this machine. By default, the trainer's path."
    )
    servers: list[str] = pydantic.Field(
        default_factory=list,
        description="URLs of running SGLang servers to use, such as http://gpu1:30000. By default, "
        "server.count servers are started on this machine.",
    )
    log_dir: Path | None = pydantic.Field(
        None, description="Folder for the servers' logs. By default, a temporary one."
    )
    server: ServerSettings = pydantic.Field(default_factory=ServerSettings)
    router: RouterSettings = pydantic.Field(default_factory=RouterSettings)
    sandbox: PoolSettings = pydantic.Field(default_factory=PoolSettings)
    fleet: FleetSettings = pydantic.Field(default_factory=FleetSettings)
    otel: OtelSettings = pydantic.Field(default_factory=lambda: OtelSettings())


async def roll_out(settings: RolloutsSettings, progress: console.ProgressLine) -> None:
    """Generate rollouts until the run is over.

    Raises:
        AgentLoopError: a failure that this machine cannot recover from.
    """
    fleet = settings.fleet
    if not fleet.redis or not fleet.run:
        raise SettingsError("fleet.redis, fleet.run: missing: --redis URL and --run NAME")
    if not settings.servers:
        require_device(settings.server)
    async with RedisLink.open(fleet, fleet.run) as link:
        state = await wait_for_trainer(link, within_s=fleet.give_up_s, say=progress.say)
        recipe = state.recipe
        environments = recipe.environments
        for one in environments:
            one.load()  # report mistakes before the servers start
        async with Grader(recipe.reward) as grader:
            await grader.ready()  # report missing packages before the servers start
        async with (
            Runtime(_settings_of(settings, recipe), progress=progress) as runtime,
            Grader(recipe.reward, pool=runtime.pool) as grader,
            open_teacher(recipe.credit, runtime.chat.tokenizer) as teacher,
            Traces.open(
                settings.otel,
                model=Path(settings.model or recipe.model).name,
                run=fleet.run,
                is_scored=True,
                decode=lambda ids: runtime.chat.decode(ids),
            ) as traces,
        ):
            served = Served(runtime.router)
            rollouts = Rollouts(
                mixed_runner(environments, runtime, recipe.sampling, traces.on_event),
                runtime.router.wait_for_capacity,
                grader,
                recipe.roc,
                recipe.credit,
                teacher,
                seed=recipe.seed,
                enough=recipe.early_stop_at,
                is_tainted=served.is_tainted,
                emit=traces.on_event,
            )
            member = Member(
                link,
                state,
                rollouts,
                served,
                name=f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:4]}",
                num_servers=len(runtime.router.servers),
                give_up_s=fleet.give_up_s,
                say=progress.say,
            )
            progress(f"Rolling out for the run {fleet.run}")
            await member.run()


def _settings_of(settings: RolloutsSettings, recipe: Recipe) -> Settings:
    """Combine this machine's settings with those of the trainer's `recipe`."""
    names = ("chat", "mcp", "tools", "tool_timeout_s", "sampling", "budget")
    common = {name: getattr(recipe, name) for name in names}
    own = {name: getattr(settings, name) for name in type(settings).model_fields if name != "fleet"}
    own["model"] = settings.model or recipe.model
    return Settings.model_validate(own | common)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop rollouts",
        description="Generate rollouts for a training run, with this machine's servers and "
        "sandbox. Any number of machines may take part, and may join and leave at any time.",
    )
    parser.add_argument("--redis", metavar="URL", help="URL of Redis: the trainer's fleet.redis")
    parser.add_argument("--run", metavar="RUN", help="the name of the run")
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(RolloutsSettings))
        return 0
    flags = {"fleet.redis": options.redis, "fleet.run": options.run}
    overrides = [f"{name}={value}" for name, value in flags.items() if value is not None]
    work = partial(_rollouts, [*options.settings, *overrides])
    return console.run(work, explain=options.explain)


async def _rollouts(arguments: list[str]) -> int:
    settings = load_settings(RolloutsSettings, *console.split_settings(arguments))
    with console.ProgressLine("Looking for the trainer") as progress:
        await roll_out(settings, progress)
    print("The run is over")
    return 0
