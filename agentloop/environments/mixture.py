"""Several environments in one run: `[[envs]]`, each with its own tasks, weight and budget.

    envs ──environments_of──> tasks, drawn by weight ──> a group ──> runs in its task's environment

A run with a single environment, or with none, is the case of one `RunEnvironment` without a name.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

import pydantic

from agentloop.agent.rollout import Budget
from agentloop.config import with_values
from agentloop.environments.environment import Environment, EnvSettings, load, open_tasks
from agentloop.environments.tasks.mixed import MixedTasks
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.errors import SettingsError

__all__ = [
    "Envs",
    "EnvsSettings",
    "RunEnvironment",
    "environments_of",
    "open_mixture",
]

M = TypeVar("M", bound=pydantic.BaseModel)

_BUILT_IN = "agent"  # the name of an item without an environment


class EnvsSettings(EnvSettings):
    """An environment of a run with several: an item of `envs`."""

    weight: float = pydantic.Field(
        1.0, gt=0, allow_inf_nan=False, description="Share of the groups, relative to the others."
    )
    tasks: dict[str, object] = pydantic.Field(
        default_factory=dict, description="Settings of its tasks; the others are those of `tasks`."
    )
    budget: dict[str, object] = pydantic.Field(
        default_factory=dict,
        description="Limits of its rollouts; the others are those of `budget` or of the stage.",
    )


Envs = Annotated[
    list[EnvsSettings],
    pydantic.Field(
        description="Several environments instead of `env`: a list of tables ([[envs]]) with the "
        "keys name and args, as in `env`; weight, the share of the groups relative to the others "
        "(1); and tasks and budget, tables of what differs from `tasks` and `budget`.",
    ),
]
"""The setting `envs` of a command."""


@dataclass(frozen=True, slots=True)
class RunEnvironment:
    """An environment of a run.

    Attributes:
        name: the name in metrics and in the ids of tasks; empty if it is the only one.
        env: the environment and its arguments.
        budget: the limits that differ from the run's and the stage's.
    """

    name: str
    env: EnvSettings
    tasks: TasksSettings
    budget: Mapping[str, object] = field(default_factory=dict)
    weight: float = 1.0

    def load(self) -> Environment | None:
        """Import the environment, or return None. Raises SettingsError, as `load` does."""
        return load(self.env)

    def budget_of(self, usual: Budget) -> Budget:
        """Return the limits of a rollout where those of the run or the stage are `usual`."""
        return usual.model_copy(update=dict(self.budget))


def environments_of(
    env: EnvSettings, envs: Sequence[EnvsSettings], tasks: TasksSettings, budget: Budget
) -> list[RunEnvironment]:
    """Return the environments of a run, without importing them.

    With `envs`, an environment's name is the last part of `module:name`; of several with the same
    name, the second is `name-2`.

    Raises:
        SettingsError: `env` and `envs` are both set, or a setting of an item is invalid.
    """
    if not envs:
        return [RunEnvironment("", env, tasks)]
    if env.name or env.args:
        raise SettingsError("env, envs: both are set: move `env` into a table [[envs]]")
    environments: list[RunEnvironment] = []
    for number, item in enumerate(envs):
        item_budget = _override(budget, item.budget, f"envs.{number}.budget")
        environments.append(
            RunEnvironment(
                _new_name(item, [environment.name for environment in environments]),
                EnvSettings(name=item.name, args=item.args),
                _override(tasks, item.tasks, f"envs.{number}.tasks"),
                {key: getattr(item_budget, key) for key in item.budget},
                item.weight,
            )
        )
    return environments


def _override(settings: M, values: dict[str, object], at: str) -> M:
    """Return the settings with these values. Raises SettingsError that names `at`."""
    try:
        return with_values(settings, values, source=at)
    except SettingsError as error:
        problem = str(error).removeprefix("settings: ")
        raise SettingsError(problem if at in problem else f"{at}: {problem}") from error


def _new_name(env: EnvSettings, taken: Sequence[str]) -> str:
    last = re.sub(r"[^\w.-]", "-", env.name.rpartition(":")[2]) or _BUILT_IN
    names = (f"{last}-{number}" for number in itertools.count(2))
    return next(name for name in itertools.chain([last], names) if name not in taken)


def open_mixture(
    environments: Sequence[RunEnvironment],
    loaded: Sequence[Environment | None],
    cursor: Mapping[str, object] | None = None,
) -> TaskSource:
    """Open the tasks of the environments, and continue from `cursor` if given.

    Args:
        loaded: the results of `RunEnvironment.load`, in the same order.

    Raises:
        DataError, SettingsError: as `TaskSource.open`.
    """
    if not environments[0].name:
        return open_tasks(environments[0].tasks, loaded[0], cursor)
    sources: dict[str, TaskSource] = {}
    for run_environment, environment in zip(environments, loaded, strict=True):
        sources[run_environment.name] = open_tasks(run_environment.tasks, environment)
    source = MixedTasks(
        sources, {run_environment.name: run_environment.weight for run_environment in environments}
    )
    if cursor is not None:
        source.go_to(cursor)
    return source
