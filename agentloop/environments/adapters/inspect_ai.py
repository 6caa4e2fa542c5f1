"""A task of Inspect: its data set, solver and scorer, with our agent as the model.

    env=agentloop.environments.adapters.inspect_ai:sample env.args.name=my_tasks.py@arithmetic

The solver drives the rollout: it runs the tools, and asks for completions, each of which is a
conversation of its own. Not supported: Inspect's sandboxes, and images.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from random import Random
from typing import Any

from agentloop.distribution import require
from agentloop.environments.adapters.completions import Completion, complete
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import PromptTooLong, SettingsError
from agentloop.trajectory import Message

__all__ = ["sample"]


def make_task(rng: Random, *, name: str, args: dict[str, Any] | None) -> Mapping[str, Any]:
    """Choose a sample of the task's data set.

    Raises:
        SettingsError: there is no such task, it is not supported, or Inspect is not installed.
    """
    found = _loaded(name, json.dumps(args or {}, sort_keys=True))
    row = rng.randrange(len(found.dataset))
    target = found.dataset[row].target
    answer = target if isinstance(target, str) else ", ".join(target)
    return {"row": row, "answer": answer, "source": found.name}


@environment(tasks=make_task)
async def sample(
    task: Task, agent: Agent, *, name: str, args: dict[str, Any] | None = None
) -> Reward:
    """Let the task's solver run with the agent as its model, and score what it has made.

    A scorer that asks a model gets the same one as another agent, `grader`, which is not trained.

    Args:
        name: FILE@NAME, or the name of a task that an installed package has.
        args: arguments of the task.
    """
    found = _loaded(name, json.dumps(args or {}, sort_keys=True))
    one, util, model = found.dataset[task.row], _module("util"), _module("model")
    text = isinstance(one.input, str)
    state = _module("solver").TaskState(
        model=model.ModelName(_provider()),
        sample_id=task.row if one.id is None else one.id,
        epoch=1,
        input=one.input,
        messages=[model.ChatMessageUser(content=one.input)] if text else list(one.input),
        target=_module("scorer").Target(one.target),
        choices=one.choices,
        metadata=one.metadata,
    )
    generate = _entered(found, agent, state)
    limits = [util.message_limit(found.message_limit), util.token_limit(found.token_limit)]
    try:
        with util.apply_limits(limits, catch_errors=True):
            for step in (found.setup, found.solver):
                state = state if step is None else await step(state, generate)
        _entered(found, agent.other("grader", is_trained=False), state)
        return await _reward(found.scorer, state)
    finally:
        if found.cleanup is not None:
            await found.cleanup(state)


def _module(name: str) -> Any:
    return import_module(f"inspect_ai.{name}")


@cache
def _loaded(name: str, args: str) -> Any:
    """Return the task of that name."""
    require("inspect", {"inspect_ai": "a task of Inspect"})
    try:
        (found,) = _module("_eval.loader").load_tasks([name], json.loads(args))
    except Exception as error:  # the task is another's code
        why = f"{type(error).__name__}: {error}"
        raise SettingsError(f"env.args.name: {name}: {why}; write FILE@NAME") from error
    if found.sandbox or any(one.sandbox for one in found.dataset):
        raise SettingsError(f"env.args.name: {name} needs a sandbox of Inspect: not supported")
    return found


def _entered(found: Any, agent: Agent, state: Any) -> Any:
    """Set the context of this rollout as Inspect's own runner does, and return what generates.

    Inspect runs one evaluation at a time in a process, so rollouts run outside of it. That needs
    parts that are not public; the extra's bounds name versions that have them.
    """
    model = _module("model")
    used = model.get_model(_provider(), config=found.config, memoize=False, agent=agent)
    _module("_eval.context").init_model_context(used, found.model_roles)
    _module("model._model").init_sample_model_data()
    _module("util._store").init_subtask_store(state.store)
    _module("solver._task_state").set_sample_state(state)

    async def generate(state: Any, tool_calls: str = "loop", cache: Any = False, **own: Any) -> Any:
        config = found.config.merge(model.GenerateConfig(**own))
        run = _module("_eval.task.generate").task_generate
        return await run(used, state, tool_calls, cache, config)

    return generate


@cache
def _provider() -> str:
    """Register our agent as a model of Inspect, and return its name."""
    model = _module("model")

    @model.modelapi(name="agentloop")  # type: ignore[untyped-decorator]
    class Api(model.ModelAPI):  # type: ignore[misc, name-defined]
        def __init__(self, model_name: str, *args: Any, agent: Agent, **options: Any) -> None:
            super().__init__(model_name, *args, **options)
            self._agent = agent

        def max_connections(self) -> int:
            return 1 << 20  # the router has the limit

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            tools = [] if tool_choice == "none" else tools
            return await _output(self._agent, input, tools, config)

    return "agentloop/agent"


async def _output(agent: Agent, messages: Sequence[Any], tools: Sequence[Any], config: Any) -> Any:
    """Return a completion as a model of Inspect does."""
    model, call = _module("model"), _module("tool").ToolCall
    schemas = [
        {"type": "function", "function": tool.model_dump(exclude_none=True)} for tool in tools
    ]
    prompt = [*map(_message, messages)]
    try:
        found = await complete(agent, prompt, schemas, max_tokens=config.max_tokens)
        end = "max_tokens" if found.finish_reason == "length" else found.finish_reason
    except PromptTooLong:
        found, end = Completion(""), "model_length"
    calls = [call(id=one.id, function=one.name, arguments=one.arguments) for one in found.calls]
    output = model.ModelOutput.from_message(
        model.ChatMessageAssistant(content=found.text, tool_calls=calls or None), end
    )
    used = found.num_prompt_tokens, found.num_sampled_tokens
    output.usage = model.ModelUsage(
        input_tokens=used[0], output_tokens=used[1], total_tokens=sum(used)
    )
    return output


def _message(message: Any) -> Message:
    """Return a message of Inspect as one of OpenAI."""
    found = {"role": message.role, "content": message.text}
    if message.role == "tool":
        error = message.error.message if message.error else ""
        found |= {"tool_call_id": message.tool_call_id, "content": error or message.text}
    if message.role == "assistant" and message.tool_calls:
        asked = [
            (one.id, {"name": one.function, "arguments": one.arguments})
            for one in message.tool_calls
        ]
        found["tool_calls"] = [
            {"id": id, "type": "function", "function": what} for id, what in asked
        ]
    return found


async def _reward(scorers: Sequence[Any] | None, state: Any) -> Reward:
    """Return the first scorer's score as the reward; that of a mapping is the mean of its parts."""
    if not scorers:
        return Reward(None, None, "the task has no scorer")
    score, to_float = await scorers[0](state, state.target), _module("scorer").value_to_float()
    values = score.value if isinstance(score.value, Mapping) else {"score": score.value}
    parts = {str(name): to_float(value) for name, value in values.items()}
    mean = sum(parts.values()) / len(parts)
    why = score.explanation or "by the task's scorer"
    return Reward(None if math.isnan(mean) else mean, score.answer, why, parts)
