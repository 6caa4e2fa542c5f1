"""Rollouts of one environment by the model of the settings, or by an endpoint in its place.

settings ──playing──> a function of a reader of events ──> what runs a rollout of a task
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.environments.environment import load, set_up
from agentloop.environments.mixture import RunEnvironment
from agentloop.environments.player import PlayerHost
from agentloop.environments.rewards.reward import Grader
from agentloop.errors import SettingsError
from agentloop.events import Emit
from agentloop.inference.openai_client import EndpointSettings
from agentloop.launch.machine import require_servers
from agentloop.launch.settings import AskSettings
from agentloop.launch.without_servers import open_endpoint, open_tools
from agentloop.rollouts.player import endpoint_player_of, environment_player
from agentloop.rollouts.runner import GroupRunner
from agentloop.runtime import Progress, Runtime
from agentloop.trajectory import Message


class PlaySettings(AskSettings):
    """The settings of an environment, with an endpoint that may play in place of the model."""

    endpoint: EndpointSettings = pydantic.Field(default_factory=lambda: EndpointSettings())


def check_player(settings: PlaySettings) -> None:
    """Check that something can play, before anything is started.

    Raises:
        SettingsError: nothing can.
    """
    if settings.endpoint.url and settings.servers:
        raise SettingsError("servers: not used with endpoint.url: omit one of the two")
    if not settings.servers and not settings.endpoint.url:
        require_servers(settings.server)


@asynccontextmanager
async def playing(
    settings: PlaySettings, progress: Progress, *, has_oracle: bool = False
) -> AsyncIterator[tuple[Callable[[Emit], GroupRunner], ChatFormat | None]]:
    """Start the agent; yield a function of a rollout's reader that returns what plays it.

    With an endpoint in place of the model, or an oracle, there is no chat format.

    Args:
        has_oracle: whether the environment plays by itself, without a model.
    """
    s = settings
    if has_oracle or s.endpoint.url:
        async with (
            set_up([load(s.env)]),
            _open_host(s, progress, has_oracle) as host,
            Grader(s.reward, pool=host.pool) as grader,
        ):
            play = partial(
                endpoint_player_of,
                [RunEnvironment("", s.env, s.tasks)],
                host,
                max_groups=1,  # each rollout has a player of its own
                sampling=s.sampling,
                grader=grader,
            )
            yield lambda emit: GroupRunner(play(emit=emit), grader), None
        return
    async with (
        set_up([load(s.env)]),
        Runtime(s, progress=progress) as runtime,
        Grader(s.reward, pool=runtime.pool) as grader,
    ):
        play_ours = partial(
            environment_player,
            s.env,
            runtime,
            sampling=s.sampling,
            grader=grader,
            with_text=True,
        )
        yield lambda emit: GroupRunner(play_ours(emit=emit), grader), runtime.chat


@asynccontextmanager
async def _open_host(
    settings: PlaySettings, progress: Progress, has_oracle: bool
) -> AsyncIterator[PlayerHost]:
    if not has_oracle:
        async with open_endpoint(settings, settings.endpoint, progress=progress) as (host, _):
            yield host
        return
    async with open_tools(settings, log_dir=None, progress=progress) as (pool, resolve):
        yield PlayerHost(_leave, pool, resolve)


def _leave(messages: list[Message]) -> str:
    return "The environment has played by itself."
