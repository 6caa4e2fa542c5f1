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
from types import ModuleType
from typing import Any

from agentloop.agent.tools import CallerTool
from agentloop.distribution import require
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import PromptTooLong, SettingsError, summary_of
from agentloop.trajectory import Message, StopReason, Trajectory

__all__ = ["sample"]

Args = dict[str, object] | None
# Inspect's words for how a completion has ended.
_ENDS = {StopReason.CALLER_TOOLS: "tool_calls"} | dict.fromkeys(
    (StopReason.TOKEN_BUDGET, StopReason.TIME_BUDGET), "max_tokens"
)


def rows(*, name: str, args: Args) -> Iterator[Mapping[str, object]]:
    """Yield a task for each sample of the data set. Raises SettingsError if it cannot run."""
    spec = _load(name, json.dumps(args or {}, sort_keys=True))
    for number, row in enumerate(spec.dataset):
        yield {
            "row": number,
            "prompt": _text_of(row.input),
            "answer": str(row.target),
            "source": spec.name,
        }


@environment(tasks=rows)
async def sample(task: Task, agent: Agent, *, name: str, args: Args = None) -> Reward:
    """Let the task's solver run with the agent as its model, and score what it has made.

    A scorer that asks a model gets the same one as another agent, `grader`, which is not trained.

    Args:
        name: FILE@NAME, or the name of an installed task.
        args: arguments of the task.
    """
    spec = _load(name, json.dumps(args or {}, sort_keys=True))
    row, util, model = spec.dataset[task.row], _module("util"), _module("model")
    user = [model.ChatMessageUser(content=row.input)] if isinstance(row.input, str) else row.input
    fields = row.id or task.row, 1, row.input, list(user), _module("scorer").Target(row.target)
    state = _module("solver").TaskState(
        model.ModelName(_provider()), *fields, choices=row.choices, metadata=row.metadata
    )
    generate = partial(_generate, spec, _enter_context(spec, agent, state))
    limits = [util.message_limit(spec.message_limit), util.token_limit(spec.token_limit)]
    with util.apply_limits(limits, catch_errors=True):
        for step in filter(None, (spec.setup, spec.solver)):
            state = await step(state, generate)
    _enter_context(spec, agent.other("grader", is_trained=False), state)
    return _reward(await spec.scorer[0](state, state.target))


def _text_of(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.role}: {message.text}" for message in prompt)


def _module(name: str) -> ModuleType:
    return import_module(f"inspect_ai.{name}")


@cache
def _load(name: str, args: str) -> Any:
    """Return the task of that name."""
    require("inspect", {"inspect_ai": "a task of Inspect"})
    try:
        (spec,) = _module("_eval.loader").load_tasks([name], json.loads(args))
    except Exception as error:  # the task is another's code
        raise SettingsError(
            f"env.args.name: {name}: {summary_of(error)}; write FILE@NAME"
        ) from error
    if spec.sandbox or not spec.scorer or any(row.sandbox for row in spec.dataset):
        raise SettingsError(f"env.args.name: {name}: it must have a scorer, and need no sandbox")
    return spec


def _enter_context(spec: Any, agent: Agent, state: Any) -> Any:
    """Set this rollout's context, by the private parts of Inspect's runner; return the model."""
    model = _module("model").get_model(_provider(), config=spec.config, memoize=False, agent=agent)
    _module("_eval.context").init_model_context(model, spec.model_roles)
    _module("model._model").init_sample_model_data()
    _module("util._store").init_subtask_store(state.store)
    _module("solver._task_state").set_sample_state(state)
    return model


async def _generate(
    spec: Any, model: Any, state: Any, tool_calls: str = "loop", cache: Any = False, **options: Any
) -> Any:
    """Let the model answer and call tools, as Inspect's `Generate`."""
    config = spec.config.merge(_module("model").GenerateConfig(**options))
    run = _module("_eval.task.generate").task_generate
    return await run(model, state, tool_calls, cache, config)


@cache
def _provider() -> str:
    """Register our agent as a model of Inspect, and return its name."""
    model, tool_call = _module("model"), _module("tool").ToolCall

    @model.modelapi(name="agentloop")  # type: ignore[untyped-decorator, unused-ignore]
    class Api(model.ModelAPI):  # type: ignore[misc, name-defined]
        def __init__(self, agent: Agent, **options: Any) -> None:
            super().__init__(**options)
            self._agent = agent

        def max_connections(self) -> int:
            return 1 << 20  # the router has the limit

        async def generate(self, input: Any, tools: Any, tool_choice: Any, config: Any) -> Any:
            infos = [tool.model_dump(exclude_none=True) for tool in tools if tool_choice != "none"]
            run = partial(self._agent.run, max_turns=1, max_tokens=config.max_tokens)
            schemas = [CallerTool({"type": "function", "function": info}) for info in infos]
            try:
                record = await run([*map(_message, input)], tools=schemas)
            except PromptTooLong:
                record = Trajectory("", [], stop_reason=StopReason.TOKEN_BUDGET)
            end = _ENDS.get(record.stop_reason, "stop")
            called = [call for call in record.calls if end == "tool_calls" and call.error is None]
            calls = [tool_call(call.id, call.name, call.arguments) for call in called]
            message = model.ChatMessageAssistant(content=record.answer, tool_calls=calls or None)
            output = model.ModelOutput.from_message(message, end)
            num, sampled = len(record.prompt_ids), record.num_sampled_tokens
            usage = {"input_tokens": num, "output_tokens": sampled, "total_tokens": num + sampled}
            output.usage = model.ModelUsage(**usage)
            return output

    return "agentloop/agent"


def _message(message: Any) -> Message:
    """Return a message of Inspect as one of OpenAI."""
    error = getattr(message, "error", None)
    data = {"role": message.role, "content": error.message if error else message.text}
    if calls := getattr(message, "tool_calls", None):
        named = [(call.id, call.function, json.dumps(call.arguments)) for call in calls]
        data["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in named
        ]
    return data


def _reward(score: Any) -> Reward:
    """Return a score, of a mapping the mean, as a reward. Raises ValueError for unknown values."""
    to_float, zeros = _module("scorer").value_to_float(), ("i", "n", "no", "false")
    values = score.value if isinstance(score.value, Mapping) else {"score": score.value}
    parts = {  # what Inspect does not know is 0 to it, too
        str(name): to_float(each) or float(0 if str(each).lower() in zeros else each)
        for name, each in values.items()
    }
    if any(map(math.isnan, parts.values())):  # it could not be scored
        return Reward(None, score.answer, score.explanation or "")
    return Reward(sum(parts.values()) / len(parts), score.answer, score.explanation or "", parts)
