"""An environment: an async function of a task and an agent that returns what the rollout is worth.

    @agentloop.environment
    async def guess(task, agent):
        game = Game(task.answer)
        await agent.run(f"Find my number, 1 to {task.top}.", tools=[game.guess])
        return {"found": game.found, "quick": 1 - game.tries / 20}

It may return

    a number    the reward
    a mapping   named parts of the reward, each a number; the reward is their weighted sum
    a Reward    a value with an answer and a reason
    a Trajectory
                a conversation whose answer is checked, as the setting `reward` says
    None        no reward: the rollout is not trained on
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, ClassVar, overload

import pydantic

from agentloop.agent.tools import import_schema_parser
from agentloop.config import import_named
from agentloop.environments.player import Script
from agentloop.environments.registry import find
from agentloop.environments.rewards.reward import Reward, finite_number, plain_reward
from agentloop.environments.tasks.problems import GENERATORS
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.environments.tasks.task import line_of, shown
from agentloop.errors import AgentLoopError, SettingsError, leaves
from agentloop.trajectory import Trajectory

__all__ = [
    "EnvSettings",
    "Environment",
    "EnvironmentFunction",
    "TaskFunction",
    "Teacher",
    "check_turn_rewards",
    "environment",
    "load",
    "open_tasks",
    "reward_of",
]

EnvironmentFunction = Callable[..., Awaitable[Any]]
"""An async function of a task, an agent and, by name, the environment's arguments."""

TaskFunction = Callable[..., Mapping[str, Any]]
"""A function of a `random.Random` that returns the fields of a task.

Further parameters are arguments of the environment, by their names.
"""

Teacher = Callable[[Any, Random], Script]
"""A function of a task and a random number generator that returns the script of one rollout."""


class EnvSettings(pydantic.BaseModel):
    """The environment that rollouts run in. `env = "module:name"` is short for `env.name`."""

    SHORT_FORM: ClassVar = "name"

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(
        "",
        description="An environment, as module:name or by the name that an installed package "
        "registers; none: the agent answers each task's prompt, and its answer is checked "
        "(`reward`).",
    )
    args: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="Arguments of the environment, by name."
    )


@dataclass(frozen=True)
class Environment:
    """An environment function with its arguments.

    Attributes:
        tasks: makes the tasks, or lists their fields, if the settings name no others.
        weights: the weight of each named part of the reward; 1 for those that are not in it. A
            part that has a weight must be in each reward that has parts.
        teacher: plays the dialogues that a model may start from (`sft.data.teacher`).
        agent_errors: exceptions that the agent causes, such as an answer that is no number, with
            the reward of a rollout that ends with one. Others are failures of the environment.
        arguments: keyword arguments of the function, besides the task and the agent. Each rollout
            gets copies of lists, dicts and sets; other objects are shared.
    """

    function: EnvironmentFunction
    tasks: TaskFunction | Sequence[Mapping[str, Any]] | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    teacher: Teacher | None = None
    agent_errors: Mapping[type[Exception], float] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return getattr(self.function, "__name__", repr(self.function))

    def reward_of_error(self, error: BaseException) -> float | None:
        """Return the reward of a rollout that ended with an error; None: it has none.

        It is that of the first class that is declared. Errors of agentloop's own are the agent's
        doing only if a class of them is declared, and several errors at once if each of them is;
        the least reward then counts.
        """
        rewards = [self._reward_of_leaf(leaf) for leaf in leaves(error)]
        known = [reward for reward in rewards if reward is not None]
        return min(known) if len(known) == len(rewards) else None

    def _reward_of_leaf(self, error: BaseException) -> float | None:
        is_ours = isinstance(error, AgentLoopError)
        for kind, reward in self.agent_errors.items():
            if isinstance(error, kind) and (issubclass(kind, AgentLoopError) or not is_ours):
                return reward
        return None

    async def __call__(self, task: Any, agent: Any) -> Any:
        # What a rollout changes in its task or its arguments reaches no other rollout.
        return await self.function(deepcopy(task), agent, **_copy(self.arguments))

    def _types_of(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the types of these parameters; those of task and agent may exist for mypy alone.

        Raises:
            SettingsError: an annotation has a name that is not defined.
        """
        written = inspect.get_annotations(self.function)
        space = getattr(self.function, "__globals__", {})
        try:
            return {
                name: eval(written[name], space)  # as inspect does it, of the user's own code
                if isinstance(written[name], str)
                else written[name]
                for name in names
                if name in written
            }
        except NameError as error:
            raise SettingsError(f"env.name: {self.name}: an annotation: {error}") from error

    def with_arguments(self, arguments: Mapping[str, Any]) -> Environment:
        """Return the environment with these arguments, converted to the types of its signature.

        Raises:
            SettingsError: an argument is missing, unknown or of another type.
        """
        parameters = list(inspect.signature(self.function).parameters.values())[2:]
        hints = self._types_of([one.name for one in parameters])
        fields: dict[str, Any] = {
            one.name: (
                hints.get(one.name, Any),
                ... if one.default is one.empty else one.default,
            )
            for one in parameters
            if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
        }
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        model = pydantic.create_model("arguments", __config__=config, **fields)
        try:
            found = model.model_validate(arguments)
        except pydantic.ValidationError as error:
            problems = "; ".join(
                f"env.args.{'.'.join(map(str, one['loc']))}: {one['msg']}"
                for one in error.errors(include_url=False)
            )
            known = ", ".join(fields) or "none"
            raise SettingsError(f"{problems} (arguments of {self.name}: {known})") from error
        values = {name: getattr(found, name) for name in fields}
        tasks = _with_arguments(self.tasks, values) if callable(self.tasks) else self.tasks
        return replace(self, arguments=values, tasks=tasks)


@overload
def environment(function: EnvironmentFunction, /) -> Environment: ...


@overload
def environment(
    *,
    tasks: TaskFunction | Iterable[Mapping[str, Any]] | None = None,
    weights: Mapping[str, float] | None = None,
    teacher: Teacher | None = None,
    agent_errors: Mapping[type[Exception], float] | None = None,
) -> Callable[[EnvironmentFunction], Environment]: ...


def environment(
    function: EnvironmentFunction | None = None,
    /,
    *,
    tasks: TaskFunction | Iterable[Mapping[str, Any]] | None = None,
    weights: Mapping[str, float] | None = None,
    teacher: Teacher | None = None,
    agent_errors: Mapping[type[Exception], float] | None = None,
) -> Environment | Callable[[EnvironmentFunction], Environment]:
    """Make an environment of an async function of a task and an agent.

    Args:
        tasks: a function of a `random.Random` that returns the fields of a task, such as
            `{"answer": rng.randint(1, 100), "top": 100}`. Further parameters are arguments
            of the environment, by their names. Or a list of the fields of tasks.
        weights: weights of the named parts of the reward; 1 by default. A part that has a weight
            must be in each mapping that the function returns.
        teacher: a function of a task and a `random.Random` that returns a script, as
            `agentloop.play` takes one. `sft.data.teacher` is the number of rollouts that such
            scripts play, for a model to imitate before it learns from its own.
        agent_errors: exceptions that count as the agent's failure, each with the reward that a
            rollout then gets, such as `{ValueError: 0.0}` where the model's answer is parsed. A
            rollout that ends with any other exception has no reward, so a model that can provoke
            one could escape a bad reward.

    Raises:
        TypeError: the function is not async or does not take a task and an agent, `tasks` is
            neither a list nor a function of random numbers and of the environment's arguments, or
            another argument is of another type.
        ValueError: a weight, or a reward of `agent_errors`, is no finite number.
    """
    make = partial(
        _made,
        tasks=tasks,
        weights={} if weights is None else weights,
        teacher=teacher,
        agent_errors={} if agent_errors is None else agent_errors,
    )
    return make if function is None else make(function)


def _made(
    function: EnvironmentFunction,
    *,
    tasks: TaskFunction | Iterable[Mapping[str, Any]] | None,
    weights: Mapping[str, float],
    teacher: Teacher | None,
    agent_errors: Mapping[type[Exception], float],
) -> Environment:
    if not inspect.iscoroutinefunction(function):
        raise TypeError(f"environment: {function!r} must be an `async def` function")
    if len(inspect.signature(function).parameters) < 2:
        raise TypeError(f"environment: {function.__name__} must take a task and an agent")
    if not isinstance(weights, Mapping):
        raise _unexpected("weights", "a mapping such as {'quick': 0.2}", weights)
    weights = {
        name: finite_number(weight, f"environment: weights: {name!r}")
        for name, weight in weights.items()
    }
    if teacher is not None and (not callable(teacher) or inspect.iscoroutinefunction(teacher)):
        expected = "a function of a task and of random numbers that returns a script"
        raise _unexpected("teacher", expected, teacher)
    if not isinstance(agent_errors, Mapping):
        raise _unexpected("agent_errors", "a mapping such as {ValueError: 0.0}", agent_errors)
    for kind in agent_errors:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(f"environment: agent_errors: {kind!r} is not a type of exception")
    agent_errors = {
        kind: finite_number(reward, f"environment: agent_errors: {kind.__name__}")
        for kind, reward in agent_errors.items()
    }
    if callable(tasks):
        _check_task_function(tasks, function)
    elif tasks is not None:
        if isinstance(tasks, str | Mapping) or not isinstance(tasks, Iterable):
            expected = "a function of random numbers, or a list of the fields of tasks"
            raise _unexpected("tasks", expected, tasks)
        tasks = list(tasks)
    return Environment(function, tasks, weights, teacher, agent_errors)


def _unexpected(argument: str, expected: str, value: Any) -> TypeError:
    return TypeError(f"environment: {argument}: expected {expected}, not {shown(value)}")


def _check_task_function(tasks: TaskFunction, function: EnvironmentFunction) -> None:
    """Raise TypeError if it is async, or needs arguments that the environment does not have."""
    if inspect.iscoroutinefunction(tasks):
        raise TypeError(f"environment: tasks: {line_of(tasks)}: it must not be async")
    needed = [
        one
        for one in inspect.signature(tasks).parameters.values()
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    known = list(inspect.signature(function).parameters)[2:]
    missing = [one.name for one in needed[1:] if one.name not in known]
    if not inspect.signature(tasks).parameters or missing:
        lacks = f", of which {function.__name__} lacks {', '.join(missing)}" if missing else ""
        raise TypeError(
            f"environment: tasks: {line_of(tasks)}: it must take random numbers and, by name, "
            f"arguments of the environment{lacks}"
        )


def _with_arguments(tasks: TaskFunction, values: Mapping[str, Any]) -> TaskFunction:
    """Pass those of the environment's arguments to its task function that the function takes."""
    taken = list(inspect.signature(tasks).parameters)[1:]
    given = {name: values[name] for name in taken if name in values}
    return partial(tasks, **given) if given else tasks


def _copy(value: Any) -> Any:
    """Copy lists, dicts and sets, at any depth in each other."""
    if isinstance(value, dict):
        return {key: _copy(part) for key, part in value.items()}
    if isinstance(value, list | set):
        return type(value)(map(_copy, value))
    return value


def load(settings: EnvSettings) -> Environment | None:
    """Import the environment of the settings, with its arguments; None if they name none.

    Raises:
        SettingsError: there is no such environment, or an argument is invalid.
    """
    if not (name := settings.name):
        return None
    if ":" not in name:
        name = find(name)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"env.name: {name!r} is not of the form module:function")
    found = import_named(name, "env.name")
    if not isinstance(found, Environment):
        raise SettingsError(
            f"env.name: {name} is not an environment: decorate it with @agentloop.environment"
        )
    import_schema_parser()  # now, when nothing else waits for the event loop
    return found.with_arguments(settings.args)


def open_tasks(
    settings: TasksSettings,
    environment: Environment | None,
    cursor: Mapping[str, Any] | None = None,
) -> TaskSource:
    """Open the tasks of the settings. An environment's own replace those of a generator.

    Raises:
        DataError, SettingsError: as `TaskSource.open`.
    """
    if environment is None:
        return TaskSource.open(settings, cursor)
    if environment.tasks is not None and settings.kind in GENERATORS:
        settings = settings.model_copy(update={"kind": "environment"})
    return TaskSource.open(settings, cursor, function=environment.tasks, env=environment.name)


def reward_of(value: Any, weights: Mapping[str, float]) -> Reward:
    """Return what an environment has returned as a reward.

    Raises:
        ValueError: the value is none that an environment may return, or a weight is of a part
            that it does not have.
    """
    if value is None:
        return Reward(None, None, "the environment gives none")
    if isinstance(value, Reward):
        return plain_reward(value)
    if isinstance(value, Mapping):
        parts = plain_reward(Reward(None, None, "", value)).parts
        if unknown := weights.keys() - parts.keys():
            raise ValueError(
                f"weights: {', '.join(sorted(unknown))}: the reward has no such part; its parts: "
                f"{', '.join(parts) or 'none'}"
            )
        total = sum(weights.get(name, 1.0) * part for name, part in parts.items())
        told = ", ".join(f"{name} {part:g}" for name, part in parts.items())
        return Reward(finite_number(total, "the sum of the parts"), None, told, parts)
    return Reward(finite_number(value, "the reward"), None, "by the environment")


def check_turn_rewards(trajectories: Sequence[Trajectory]) -> None:
    """Check the rewards that an environment has given to turns and tokens.

    Raises:
        ValueError: one is not a finite number, or there is not one for each token of a turn.
    """
    for trajectory in trajectories:
        for number, turn in enumerate(trajectory, 1):
            where = f"turn {number} of {trajectory.id}"
            if turn.reward is not None:
                turn.reward = finite_number(turn.reward, f"{where}: reward")
            turn.token_rewards = [
                finite_number(reward, f"{where}: token_rewards") for reward in turn.token_rewards
            ]
            if turn.token_rewards and len(turn.token_rewards) != len(turn.output_ids):
                raise ValueError(
                    f"{where}: token_rewards: {len(turn.token_rewards)} for "
                    f"{len(turn.output_ids)} tokens: give one for each of output_ids"
                )
