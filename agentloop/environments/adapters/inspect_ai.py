"""A task of Inspect: its data set, solver and scorer, with our agent as the model.

    env=agentloop.environments.adapters.inspect_ai:sample env.args.name=my_tasks.py@arithmetic

The solver drives the rollout: it runs the tools, and asks for completions, each of which is a
conversation of its own. Sandboxes, cleanup functions and images are not supported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

from agentloop.distribution import require
from agentloop.environments.adapters.completions import Completion, complete, openai_call
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import PromptTooLong, SettingsError
from agentloop.trajectory import Message

__all__ = ["sample"]

Args = dict[str, Any] | None


def rows(*, name: str, args: Args) -> Iterator[Mapping[str, Any]]:
    """Yield a task for each sample of the data set. Raises SettingsError if it cannot run."""
    found = _loaded(name, json.dumps(args or {}, sort_keys=True))
    for number, one in enumerate(found.dataset):
        yield {"row": number, "answer": str(one.target), "source": found.name}


@environment(tasks=rows)
async def sample(task: Task, agent: Agent, *, name: str, args: Args = None) -> Reward:
    """Let the task's solver run with the agent as its model, and score what it has made.

    A scorer that asks a model gets the same one as another agent, `grader`, which is not trained.

    Args:
        name: FILE@NAME, or the name of an installed task.
        args: arguments of the task.
    """
    found = _loaded(name, json.dumps(args or {}, sort_keys=True))
    one, util, model = found.dataset[task.row], _module("util"), _module("model")
    user = [model.ChatMessageUser(content=one.input)] if isinstance(one.input, str) else one.input
    given = one.id or task.row, 1, one.input, list(user), _module("scorer").Target(one.target)
    state = _module("solver").TaskState(
        model.ModelName(_provider()), *given, choices=one.choices, metadata=one.metadata
    )
    generate = partial(_generate, found, _entered(found, agent, state))
    limits = [util.message_limit(found.message_limit), util.token_limit(found.token_limit)]
    with util.apply_limits(limits, catch_errors=True):
        for step in filter(None, (found.setup, found.solver)):
            state = await step(state, generate)
    _entered(found, agent.other("grader", is_trained=False), state)
    return _reward(await found.scorer[0](state, state.target))


def _module(name: str) -> Any:
    return import_module(f"inspect_ai.{name}")


@cache
def _loaded(name: str, args: str) -> Any:
    """Return the task of that name."""
    require("inspect", {"inspect_ai": "a task of Inspect"})
    try:
        (found,) = _module("_eval.loader").load_tasks([name], json.loads(args))
    except Exception as error:  # the task is another's code
        raise SettingsError(f"env.args.name: {name}: {error!r}; write FILE@NAME") from error
    if found.sandbox or not found.scorer or any(one.sandbox for one in found.dataset):
        raise SettingsError(f"env.args.name: {name}: it must have a scorer, and need no sandbox")
    return found


def _entered(found: Any, agent: Agent, state: Any) -> Any:
    """Set this rollout's context, by the private parts of Inspect's runner; return the model."""
    model = _module("model").get_model(_provider(), config=found.config, memoize=False, agent=agent)
    _module("_eval.context").init_model_context(model, found.model_roles)
    _module("model._model").init_sample_model_data()
    _module("util._store").init_subtask_store(state.store)
    _module("solver._task_state").set_sample_state(state)
    return model


async def _generate(found: Any, model: Any, state: Any, how: str = "loop", **own: Any) -> Any:
    """Let the model answer and call tools, as Inspect's `Generate`."""
    how, cache = own.pop("tool_calls", how), own.pop("cache", False)
    config = found.config.merge(_module("model").GenerateConfig(**own))
    return await _module("_eval.task.generate").task_generate(model, state, how, cache, config)


@cache
def _provider() -> str:
    """Register our agent as a model of Inspect, and return its name."""
    model, call = _module("model"), _module("tool").ToolCall

    @model.modelapi(name="agentloop")  # type: ignore[untyped-decorator, unused-ignore]
    class Api(model.ModelAPI):  # type: ignore[misc, name-defined]
        def __init__(self, agent: Agent, **options: Any) -> None:
            super().__init__(**options)
            self._agent = agent

        def max_connections(self) -> int:
            return 1 << 20  # the router has the limit

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            infos = [one.model_dump(exclude_none=True) for one in tools if tool_choice != "none"]
            schemas = [{"type": "function", "function": one} for one in infos]
            asked = [*map(_message, input)]
            try:
                said = await complete(self._agent, asked, schemas, max_tokens=config.max_tokens)
            except PromptTooLong:
                said = Completion("", finish_reason="length")
            calls = [call(one.id, one.name, one.arguments) for one in said.calls]
            message = model.ChatMessageAssistant(content=said.text, tool_calls=calls or None)
            end = said.finish_reason.replace("length", "max_tokens")
            output = model.ModelOutput.from_message(message, end)
            output.usage = model.ModelUsage(**said.usage("input", "output"))
            return output

    return "agentloop/agent"


def _message(message: Any) -> Message:
    """Return a message of Inspect as one of OpenAI."""
    error = getattr(message, "error", None)
    found = {"role": message.role, "content": error.message if error else message.text}
    if calls := getattr(message, "tool_calls", None):
        found["tool_calls"] = [openai_call(one.id, one.function, one.arguments) for one in calls]
    return found


def _reward(score: Any) -> Reward:
    """Return a score as a reward: that of a mapping is the mean of its parts."""
    to_float = _module("scorer").value_to_float()
    values = score.value if isinstance(score.value, Mapping) else {"score": score.value}
    parts = {str(name): to_float(value) for name, value in values.items()}
    if any(map(math.isnan, parts.values())):  # it could not be scored
        return Reward(None, score.answer, score.explanation or "")
    mean = sum(parts.values()) / len(parts)
    return Reward(mean, score.answer, score.explanation or "", parts)
