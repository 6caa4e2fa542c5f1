"""An environment of verifiers, such as one of its hub, with our agent behind its OpenAI client.

    env=agentloop.environments.adapters.verifiers:rollout env.args.id=wordle

verifiers drives the rollout: it runs the tools, and asks for completions, each of which is a
conversation of its own. The reward is that of its rubric, and the rubric's metrics are parts.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any

from agentloop.distribution import require
from agentloop.environments.adapters.completions import AgentTransport
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import SettingsError, summary_of
from agentloop.plain_json import JsonObject

__all__ = ["rollout"]


def rows(*, id: str, args: JsonObject | None) -> Iterator[Mapping[str, object]]:
    """Yield a task for each row of the environment's data set.

    Raises:
        SettingsError: verifiers is not installed, or cannot load the environment.
    """
    data_set = _load(id, json.dumps(args or {}, sort_keys=True)).get_dataset()
    for number, row in enumerate(data_set):
        prompt = row.get("prompt") or row.get("question") or ""
        if not isinstance(prompt, str):
            prompt = "\n".join(f"{message['role']}: {message['content']}" for message in prompt)
        yield {"row": number, "prompt": prompt, "answer": row.get("answer", ""), "source": id}


@environment(tasks=rows)
async def rollout(task: Task, agent: Agent, *, id: str, args: JsonObject | None = None) -> Reward:
    """Let verifiers run and score a rollout.

    Args:
        id: name of the environment, an installed package.
        args: arguments of its `load_environment`.
    """
    verifiers_env = _load(id, json.dumps(args or {}, sort_keys=True))
    openai, vf = import_module("openai"), import_module("verifiers")
    http = openai.DefaultAsyncHttpxClient(transport=AgentTransport(agent), timeout=None)
    async with openai.AsyncOpenAI(
        api_key="none", base_url="http://agent/v1", max_retries=0, http_client=http
    ) as client:
        result = await verifiers_env.run_rollout(
            dict(verifiers_env.get_dataset()[task.row]),
            vf.OpenAIChatCompletionsClient(client),
            model="agent",
            sampling_args={},
        )
    if error := result.get("error"):
        reason = error.get("error_chain_str") if isinstance(error, Mapping) else error
        raise RuntimeError(f"verifiers: {id}: {reason}")
    metrics = {name: float(value) for name, value in (result.get("metrics") or {}).items()}
    return Reward(float(result["reward"]), None, f"by the rubric of {id}", metrics)


@cache
def _load(id: str, args: str) -> Any:
    """Return the environment of that name."""
    require("verifiers", {"verifiers": "an environment of verifiers"})
    try:
        with _no_signal_handlers():
            return import_module("verifiers").load_environment(id, **json.loads(args))
    except Exception as error:  # the environment is another's code
        raise SettingsError(
            f"env.args: verifiers cannot load {id!r}: {summary_of(error)}"
        ) from error


@contextmanager
def _no_signal_handlers() -> Iterator[None]:
    """Keep the library from handling signals: it does when an environment is made, and exits."""
    install = signal.signal
    signal.signal = lambda signalnum, handler: None
    try:
        yield
    finally:
        signal.signal = install
