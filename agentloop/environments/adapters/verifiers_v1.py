"""A task set of verifiers 0.4 (its v1 protocol), such as one of its hub, played by our model.

    env=agentloop.environments.adapters.verifiers_v1:episode env.args.taskset=gsm8k-v1

verifiers runs the agent's program (a harness), its tools and the scoring. The program asks the
rollout's own endpoint, so what the model samples is recorded as exact ids.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import cache
from importlib import import_module
from itertools import islice
from typing import Any

from agentloop.distribution import require
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import SettingsError, summary_of
from agentloop.plain_json import JsonObject

__all__ = ["config_of", "episode"]


def rows(
    *, taskset: str, config: dict[str, object] | None, num_tasks: int
) -> Iterator[dict[str, object]]:
    """Yield a task for each task of the set.

    Raises:
        SettingsError: verifiers is not installed, or cannot load the task set.
    """
    _, tasks = _load(taskset, json.dumps(config or {}, sort_keys=True), num_tasks)
    for number in range(len(tasks)):
        yield {"row": number, "source": taskset}


@asynccontextmanager
async def serving(
    *, taskset: str, config: dict[str, object] | None, num_tasks: int
) -> AsyncIterator[object]:
    """Open what all episodes share: tool servers, and the proxies of the harnesses' requests."""
    env, tasks = _load(taskset, json.dumps(config or {}, sort_keys=True), num_tasks)
    async with env.serving():
        yield env, tasks


@environment(tasks=rows, setup=serving)
async def episode(
    task: Task,
    agent: Agent,
    *,
    shared: Any,
    taskset: str,
    config: dict[str, object] | None = None,
    num_tasks: int = 10_000,
) -> Reward:
    """Let verifiers run and score an episode.

    Args:
        taskset: id of the task set, an installed package.
        config: the settings below `env` of verifiers, such as
            `{"taskset": {"split": "train"}, "agent": {"harness": {"id": "bash"}}}`.
        num_tasks: how many tasks are read, of a set that may have no end.
    """
    vf = import_module("verifiers.v1")
    env, tasks = shared
    client = vf.EvalClientConfig(base_url=agent.url, api_key_var="AGENTLOOP_NO_KEY_IS_NEEDED")
    result = await env.run_episode(tasks[task.row], vf.ModelContext("agent", client))
    if not result.ok:
        errors = [*result.errors, *(error for trace in result.traces for error in trace.errors)]
        reason = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode failed"
        raise RuntimeError(f"verifiers: {taskset}: {reason}")
    (trace,) = result.traces
    agent.record(**{name: value for name, value in trace.metrics.items() if value is not None})
    parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    return Reward(trace.reward, None, f"by {taskset}", parts)


@cache
def _load(taskset: str, config: str, num_tasks: int) -> tuple[Any, list[Any]]:
    """Return the environment of a task set, and its tasks."""
    require("verifiers-v1", {"verifiers.v1.taskset": "a task set of verifiers 0.4"})
    try:
        loaders = import_module("verifiers.v1.utils.loaders")
        env = loaders.load_environment(config_of(taskset, json.loads(config)))
        return env, list(islice(env.taskset, num_tasks))
    except SettingsError:
        raise
    except Exception as error:  # the task set is another's code
        reason = summary_of(error)
        raise SettingsError(f"env.args: verifiers cannot load {taskset!r}: {reason}") from error


def config_of(taskset: str, settings: JsonObject) -> Any:
    """Return the settings of an environment with one agent.

    A harness that is not named runs no code of the model's; one that does runs in Docker.

    Raises:
        SettingsError: it has several agents.
    """
    loaders = import_module("verifiers.v1.utils.loaders")
    agents = import_module("verifiers.v1.configs.agent")
    values = {**settings, "taskset": {**settings.get("taskset", {}), "id": taskset}}
    fields = loaders.env_config_type(taskset, values.get("id", "")).model_fields
    names = [
        name for name, field in fields.items() if isinstance(field.default, agents.AgentConfig)
    ]
    if len(names) != 1:
        raise SettingsError(
            f"env.args.taskset: {taskset}: its environment has several agents: {', '.join(names)}: "
            "only environments with one can be played"
        )
    agent_settings = values.get(names[0], {})
    default_harness = loaders.default_harness_id(taskset)
    harness = {
        "id": "null" if default_harness == "bash" else default_harness,
        **agent_settings.get("harness", {}),
    }
    runs_code = loaders.harness_class(harness["id"]).EXECUTES_CODE
    runtime = {"type": "docker" if runs_code else "subprocess"}
    values[names[0]] = {"runtime": runtime, **agent_settings, "harness": harness}
    return loaders.resolve_env_config(values)
