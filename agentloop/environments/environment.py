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
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any, ClassVar, TypeVar, overload

import pydantic

from agentloop.agent.threads import rollout_threads, sharing_connections
from agentloop.agent.tools import import_schema_parser
from agentloop.config import import_named
from agentloop.environments.player import Script
from agentloop.environments.registry import find
from agentloop.environments.rewards.reward import Reward, finite_number, plain_reward
from agentloop.environments.tasks.problems import GENERATORS
from agentloop.environments.tasks.sources import TaskList, TaskSource, TasksSettings
from agentloop.environments.tasks.task import Task, describe, line_of
from agentloop.errors import AgentLoopError, SettingsError, leaves, place_of, summary_of
from agentloop.trajectory import Trajectory

__all__ = [
    "EnvSettings",
    "Environment",
    "EnvironmentFunction",
    "Setup",
    "TaskFunction",
    "Tasks",
    "Teacher",
    "environment",
    "load",
    "open_tasks",
    "reward_of",
    "set_up",
    "with_checked_rewards",
]

EnvironmentFunction = Callable[..., Awaitable[Any]]
"""An async function of a task, an agent and, by name, the environment's arguments."""

TaskFunction = Callable[..., "Mapping[str, object] | Iterable[Mapping[str, object]]"]
"""A function of a `random.Random` that returns the fields of a task; or one without random numbers
that returns those of all tasks, such as a generator.

Further parameters are arguments of the environment, by their names.
"""

Tasks = TaskFunction | Iterable[Mapping[str, object]]
"""A function that makes tasks, or the fields of all tasks: a list, an iterator or a data set."""

Setup = Callable[..., AbstractAsyncContextManager[object]]
"""A function that returns an async context manager, such as one made by `asynccontextmanager`.

Its parameters are arguments of the environment, by their names.
"""

Teacher = Callable[[Task, Random], Script]
"""A function of a task and a random number generator that returns the script of one rollout."""

T = TypeVar("T")

HARBOR = "harbor:"  # before a folder of tasks, in place of a module and a function
_PROGRAM = "program"  # the parameter that gets the setting `agent`
_SHARED = "shared"  # the parameter that gets what `setup` has opened
# The environments of this process that have been set up, by `_key_of`.
_opened: dict[tuple[EnvironmentFunction, str], Environment] = {}


class EnvSettings(pydantic.BaseModel):
    """The environment that rollouts run in. `env = "module:name"` is short for `env.name`."""

    SHORT_FORM: ClassVar = "name"

    model_config = pydantic.ConfigDict(extra="forbid")

    name: str = pydantic.Field(
        "",
        description="An environment, as module:name, by the name that an installed package "
        "registers, or as harbor:FOLDER for a folder of Harbor tasks; none: the agent answers each "
        "task's prompt, and its answer is checked (`reward`).",
    )
    args: dict[str, object] = pydantic.Field(
        default_factory=dict, description="Arguments of the environment, by name."
    )


@dataclass(frozen=True)
class Environment:
    """An environment function with its arguments.

    Attributes:
        tasks: makes the tasks, or has their fields, if the settings name no others.
        held_out_tasks: the same for tasks that are never trained on; None: some of `tasks` are not.
        weights: the weight of each named part of the reward; 1 for those that are not in it. A
            part that has a weight must be in each reward that has parts.
        teacher: plays the dialogues that a model may start from (`sft.data.teacher`).
        agent_errors: exceptions that the agent causes, such as an answer that is no number, with
            the reward of a rollout that ends with one. Others are failures of the environment.
        setup: opens what all rollouts of a process share.
        replayable: whether a rollout may be repeated from its conversations after a kill.
        arguments: keyword arguments of the function, besides the task and the agent. Each rollout
            gets copies of lists, dicts and sets; other objects are shared.
        shared: the object that `setup` has opened, after `opened`.
    """

    function: EnvironmentFunction
    tasks: Tasks | None = None
    held_out_tasks: Tasks | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    teacher: Teacher | None = None
    agent_errors: Mapping[type[Exception], float] = field(default_factory=dict)
    setup: Setup | None = None
    replayable: bool = False
    arguments: Mapping[str, object] = field(default_factory=dict)
    shared: object = None

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
        declared = [reward for reward in rewards if reward is not None]
        return min(declared) if len(declared) == len(rewards) else None

    def _reward_of_leaf(self, error: BaseException) -> float | None:
        is_ours = isinstance(error, AgentLoopError)
        for kind, reward in self.agent_errors.items():
            if isinstance(error, kind) and (issubclass(kind, AgentLoopError) or not is_ours):
                return reward
        return None

    async def __call__(self, task: object, agent: object) -> object:
        # What a rollout changes in its task or its arguments reaches no other rollout.
        shared = {} if self.setup is None else {_SHARED: self.shared}
        with sharing_connections(), rollout_threads():
            arguments = {name: _copy(value) for name, value in self.arguments.items()}
            return await self.function(deepcopy(task), agent, **arguments, **shared)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Environment]:
        """Open what its rollouts share, and yield the environment with it.

        Raises:
            SettingsError: it cannot be opened.
        """
        if self.setup is None:
            yield self
            return
        async with AsyncExitStack() as stack:
            try:
                arguments = self.with_arguments(self.arguments).arguments  # with the defaults
                context = _partial(self.setup, 0, arguments)()
                with sharing_connections():
                    # No deadline: it may load a model or a data set, and Ctrl-C ends it.
                    shared: object = await stack.enter_async_context(context)
            except Exception as error:  # the user's code
                where = place_of(error) or line_of(self.setup)
                message = f"setup of {self.name}: {where}: {summary_of(error)}"
                raise SettingsError(message) from error
            # To open it once more gives the same.
            yield replace(self, setup=partial(nullcontext, shared), shared=shared)

    def _types_of(self, names: Sequence[str]) -> dict[str, object]:
        """Return the types of these parameters; those of task and agent may exist for mypy alone.

        Raises:
            SettingsError: an annotation has a name that is not defined.
        """
        annotations = inspect.get_annotations(self.function)
        namespace = getattr(self.function, "__globals__", {})
        try:
            return {
                name: eval(
                    annotations[name], namespace
                )  # as inspect does it, of the user's own code
                if isinstance(annotations[name], str)
                else annotations[name]
                for name in names
                if name in annotations
            }
        except NameError as error:
            raise SettingsError(f"env.name: {self.name}: an annotation: {error}") from error

    def with_arguments(self, arguments: Mapping[str, object]) -> Environment:
        """Return the environment with these arguments, converted to the types of its signature.

        Raises:
            SettingsError: an argument is missing, unknown or of another type.
        """
        parameters = _parameters(self.function)
        hints = self._types_of([parameter.name for parameter in parameters])
        fields: dict[str, Any] = {
            parameter.name: (
                hints.get(parameter.name, object),
                ... if parameter.default is parameter.empty else parameter.default,
            )
            for parameter in parameters
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        if _PROGRAM in arguments and _PROGRAM not in fields:
            raise SettingsError(
                f"agent, env: both are set, and {self.name} takes no program: its function needs a "
                f"parameter `{_PROGRAM}` (docs/guides/computer.md)"
            )
        config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
        model = pydantic.create_model("arguments", __config__=config, **fields)
        try:
            validated = model.model_validate(arguments)
        except pydantic.ValidationError as error:
            problems = "; ".join(
                f"env.args.{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors(include_url=False)
            )
            accepted = ", ".join(fields) or "none"
            raise SettingsError(f"{problems} (arguments of {self.name}: {accepted})") from error
        values = {name: getattr(validated, name) for name in fields}
        return replace(
            self,
            arguments=values,
            tasks=_with_arguments(self.tasks, values),
            held_out_tasks=_with_arguments(self.held_out_tasks, values),
        )


@overload
def environment(function: EnvironmentFunction, /) -> Environment: ...


@overload
def environment(
    *,
    tasks: Tasks | None = None,
    held_out_tasks: Tasks | None = None,
    weights: Mapping[str, float] | None = None,
    teacher: Teacher | None = None,
    agent_errors: Mapping[type[Exception], float] | None = None,
    setup: Setup | None = None,
    replayable: bool = False,
) -> Callable[[EnvironmentFunction], Environment]: ...


def environment(
    function: EnvironmentFunction | None = None,
    /,
    *,
    tasks: Tasks | None = None,
    held_out_tasks: Tasks | None = None,
    weights: Mapping[str, float] | None = None,
    teacher: Teacher | None = None,
    agent_errors: Mapping[type[Exception], float] | None = None,
    setup: Setup | None = None,
    replayable: bool = False,
) -> Environment | Callable[[EnvironmentFunction], Environment]:
    """Make an environment of an async function of a task and an agent.

    Args:
        tasks: a function of a `random.Random` that returns the fields of a task, such as
            `{"answer": rng.randint(1, 100), "top": 100}`. Or the fields of all tasks: a list, an
            iterator that ends, a `datasets.Dataset`, or a function without random numbers that
            returns one of these. Further parameters of either function are arguments of the
            environment, by their names. Listed tasks are drawn in epochs; those with the same
            field `id`, or without one with the same fields, are one task.
        held_out_tasks: tasks that are never trained on, but evaluated on, in the same forms.
            Without them, `tasks.held_out` takes some of the others.
        weights: weights of the named parts of the reward; 1 by default. A part that has a weight
            must be in each mapping that the function returns.
        teacher: a function of a task and a `random.Random` that returns a script, as
            `agentloop.play` takes one. `sft.data.teacher` is the number of rollouts that such
            scripts play, for a model to imitate before it learns from its own.
        agent_errors: exceptions that count as the agent's failure, each with the reward that a
            rollout then gets, such as `{ValueError: 0.0}` where the model's answer is parsed. A
            rollout that ends with any other exception has no reward, so a model that can provoke
            one could escape a bad reward.
        setup: an async context manager function, entered once in each process before the first
            rollout, and once before the teacher's; left after the last one. What it yields is the
            function's parameter `shared`. Its own parameters are arguments of the environment, by
            their names.
        replayable: whether what the function does, and what it returns, depends on nothing but its
            task, its arguments and what its conversations return. After a kill, its rollouts then
            go on after their last turn: the function is called again, and turns that were kept
            stand for those that would be sampled, without their calls. Without it, they start anew.

    Raises:
        TypeError: the function is not async or does not take a task and an agent, a function of
            tasks needs an argument that the environment does not have, or another argument is of
            another type.
        ValueError: a weight, or a reward of `agent_errors`, is no finite number.
    """
    parts = {} if weights is None else weights
    errors = {} if agent_errors is None else agent_errors
    options = tasks, held_out_tasks, parts, teacher, errors, setup, replayable

    def make(function: EnvironmentFunction) -> Environment:
        return _check(Environment(function, *options))

    return make if function is None else make(function)


def _check(given: Environment) -> Environment:
    """Return an environment whose tasks can be read again, and whose weights are floats."""
    function, weights, agent_errors = given.function, given.weights, given.agent_errors
    if not inspect.iscoroutinefunction(function):
        name = getattr(function, "__qualname__", repr(function))
        where = line_of(function) if inspect.isfunction(function) else ""
        raise TypeError(
            f"environment: {name} must be an `async def` function{f' ({where})' if where else ''}; "
            "the module's other environments cannot be loaded either"
        )
    if len(inspect.signature(function).parameters) < 2:
        raise TypeError(f"environment: {function.__name__} must take a task and an agent")
    if not isinstance(weights, Mapping):
        raise _type_error("weights", "a mapping such as {'quick': 0.2}", weights)
    teacher = given.teacher
    if teacher is not None and (not callable(teacher) or inspect.iscoroutinefunction(teacher)):
        expected = "a function of a task and of random numbers that returns a script"
        raise _type_error("teacher", expected, teacher)
    if not isinstance(agent_errors, Mapping):
        raise _type_error("agent_errors", "a mapping such as {ValueError: 0.0}", agent_errors)
    for kind in agent_errors:
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise TypeError(f"environment: agent_errors: {kind!r} is not a type of exception")
    takes_shared = _SHARED in inspect.signature(function).parameters
    if takes_shared != (given.setup is not None):
        raise TypeError(f"environment: setup= and the parameter `{_SHARED}` belong together")
    return replace(
        given,
        tasks=_checked_tasks(given.tasks, function),
        held_out_tasks=_checked_tasks(given.held_out_tasks, function),
        weights={
            name: finite_number(weight, f"environment: weights: {name!r}")
            for name, weight in weights.items()
        },
        agent_errors={
            kind: finite_number(reward, f"environment: agent_errors: {kind.__name__}")
            for kind, reward in agent_errors.items()
        },
    )


def _type_error(argument: str, expected: str, value: object) -> TypeError:
    return TypeError(f"environment: {argument}: expected {expected}, not {describe(value)}")


def _checked_tasks(tasks: Tasks | None, function: EnvironmentFunction) -> Tasks | None:
    """Return tasks in a form that can be read again.

    Raises:
        TypeError: a function of tasks is async or needs arguments that the environment does not
            have, or the tasks are neither a function nor a list.
    """
    if tasks is None:
        return None
    if not callable(tasks):
        if isinstance(tasks, str | Mapping) or not isinstance(tasks, Iterable):
            expected = "a function of random numbers, or a list of the fields of tasks"
            raise _type_error("tasks", expected, tasks)
        return list(tasks) if iter(tasks) is tasks else tasks
    if inspect.iscoroutinefunction(tasks):
        raise TypeError(f"environment: tasks: {line_of(tasks)}: it must not be async")
    arguments = [parameter.name for parameter in _parameters(function)]
    parameters = list(inspect.signature(tasks).parameters.values())
    is_list = not parameters or parameters[0].kind is inspect.Parameter.KEYWORD_ONLY
    is_list = is_list or parameters[0].name in arguments
    missing = [
        parameter.name
        for parameter in parameters[0 if is_list else 1 :]
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        and parameter.name not in arguments
    ]
    if missing:
        raise TypeError(
            f"environment: tasks: {line_of(tasks)}: it must take random numbers, or nothing, and "
            f"arguments of the environment by name, of which {function.__name__} lacks "
            f"{', '.join(missing)}"
        )
    return TaskList(tasks) if is_list else tasks


def _parameters(function: EnvironmentFunction) -> list[inspect.Parameter]:
    """Return the parameters of an environment's function that are settings."""
    parameters = list(inspect.signature(function).parameters.values())[2:]
    return [parameter for parameter in parameters if parameter.name != _SHARED]


def _with_arguments(tasks: Tasks | None, values: Mapping[str, object]) -> Tasks | None:
    """Pass those of the environment's arguments to a function of tasks that it takes."""
    if isinstance(tasks, TaskList):
        return TaskList(_partial(tasks.function, 0, values))
    return _partial(tasks, 1, values) if callable(tasks) else tasks


def _partial(function: Callable[..., T], num_own: int, values: Mapping[str, object]) -> partial[T]:
    taken = list(inspect.signature(function).parameters)[num_own:]
    return partial(function, **{name: values[name] for name in taken if name in values})


def _copy(value: object) -> object:
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
    arguments = settings.args
    if name.startswith(HARBOR):
        arguments = {"folder": name.removeprefix(HARBOR), **arguments}
        name = "agentloop.environments.adapters.harbor:task"
    if ":" not in name:
        name = find(name)
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise SettingsError(f"env.name: {name!r} is not of the form module:function")
    with sharing_connections():
        imported = import_named(name, "env.name")
    if not isinstance(imported, Environment):
        raise SettingsError(
            f"env.name: {name} is not an environment: decorate it with @agentloop.environment"
        )
    import_schema_parser()  # now, when nothing else waits for the event loop
    configured = imported.with_arguments(arguments)
    return _opened.get(_key_of(configured), configured)


@asynccontextmanager
async def set_up(environments: Iterable[Environment | None]) -> AsyncIterator[None]:
    """Open what the environments share; meanwhile, `load` returns them with it.

    Raises:
        SettingsError: it cannot be opened.
    """
    async with AsyncExitStack() as stack:
        for environment in environments:
            if environment is None or environment.setup is None:
                continue
            if (key := _key_of(environment)) not in _opened:
                _opened[key] = await stack.enter_async_context(environment.opened())
                stack.callback(_opened.pop, key)
        yield


def _key_of(environment: Environment) -> tuple[EnvironmentFunction, str]:
    return environment.function, repr(sorted(environment.arguments.items()))


def open_tasks(
    settings: TasksSettings,
    environment: Environment | None,
    cursor: Mapping[str, object] | None = None,
) -> TaskSource:
    """Open the tasks of the settings. An environment's own replace those of a generator.

    Raises:
        DataError, SettingsError: as `TaskSource.open`.
    """
    if environment is None:
        return TaskSource.open(settings, cursor)
    if environment.tasks is not None and settings.kind in GENERATORS:
        settings = settings.model_copy(update={"kind": "environment"})
    return TaskSource.open(
        settings,
        cursor,
        function=environment.tasks,
        held_out=environment.held_out_tasks,
        env=environment.name,
    )


def reward_of(value: object, weights: Mapping[str, float]) -> Reward:
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
        if not parts:
            raise ValueError("the reward: expected at least one part")
        if unknown := weights.keys() - parts.keys():
            raise ValueError(
                f"weights: {', '.join(sorted(unknown))}: the reward has no such part; its parts: "
                f"{', '.join(parts) or 'none'}"
            )
        total = sum(weights.get(name, 1.0) * part for name, part in parts.items())
        reason = ", ".join(f"{name} {part:g}" for name, part in parts.items())
        return Reward(finite_number(total, "the sum of the parts"), None, reason, parts)
    return Reward(finite_number(value, "the reward"), None, "by the environment")


def with_checked_rewards(trajectory: Trajectory) -> Trajectory:
    """Return a copy of a conversation, with the rewards of its turns and tokens as floats.

    Raises:
        ValueError: one is not a finite number, or there is not one for each token of a turn.
    """
    turns = []
    for number, turn in enumerate(trajectory, 1):
        where = f"turn {number} of {trajectory.id}"
        reward = turn.reward
        if reward is not None:
            reward = finite_number(reward, f"{where}: reward")
        given: object = turn.token_rewards  # an environment may have set anything
        if not isinstance(given, Iterable):
            raise ValueError(
                f"{where}: token_rewards: expected a list of numbers, got {describe(given)}"
            )
        token_rewards = [finite_number(each, f"{where}: token_rewards") for each in given]
        if token_rewards and len(token_rewards) != len(turn.output_ids):
            raise ValueError(
                f"{where}: token_rewards: {len(token_rewards)} for {len(turn.output_ids)} tokens: "
                "give one for each of output_ids"
            )
        turns.append(replace(turn, reward=reward, token_rewards=token_rewards))
    return replace(trajectory, turns=turns)
