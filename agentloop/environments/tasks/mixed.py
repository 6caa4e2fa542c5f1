"""The tasks of several environments, drawn by weight.

The environments take turns by smooth weighted round robin, as nginx balances requests: before each
turn every environment gets its weight as credit; the one with the most credit has the turn and
pays the sum of all weights. With weights 2 and 1 the turns are a b a, a b a, ...
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pydantic

from agentloop.environments.tasks.sources import Task, TaskSource
from agentloop.errors import DataError

__all__ = ["MixedTasks", "WeightedTurns", "of_environment"]


class WeightedTurns:
    """Smooth weighted round robin. Pure: the weights and the credit determine all turns.

    After any number of turns, each name has had fewer than one turn more than its share.

    Attributes:
        credit: the turns that each name is owed, in units of the weights; the sum is 0.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        """
        Args:
            weights: positive weights by name. Of names with equal credit, the first has the turn.
        """
        self._weights = dict(weights)
        self.credit = dict.fromkeys(weights, 0.0)

    def take(self) -> str:
        """Return the name whose turn it is."""
        for name, weight in self._weights.items():
            self.credit[name] += weight
        chosen = max(self.credit, key=lambda name: self.credit[name])
        self.credit[chosen] -= sum(self._weights.values())
        return chosen


class _Places(pydantic.BaseModel):
    """The places in several sources, as a cursor has them."""

    envs: dict[str, dict[str, object]] = pydantic.Field(default_factory=dict)
    credit: dict[str, float] = pydantic.Field(default_factory=dict)
    weights: dict[str, float] = pydantic.Field(default_factory=dict)


class MixedTasks(TaskSource):
    """Draws each task from one of several sources, by weight.

    The id of a task begins with the name of its environment.
    """

    def __init__(self, sources: Mapping[str, TaskSource], weights: Mapping[str, float]) -> None:
        """
        Args:
            sources: the tasks of each environment, by its name.
            weights: the weight of each environment.
        """
        self._sources = dict(sources)
        self._weights = dict(weights)
        self._turns = WeightedTurns(weights)
        if all(source.distinct is not None for source in sources.values()):
            self.distinct = self.listed()

    def __next__(self) -> Task:
        name = self._turns.take()
        return of_environment(next(self._sources[name]), name)

    def listed(self) -> list[Task]:
        """Return those of each environment, one environment after the other."""
        return [
            of_environment(task, name)
            for name, source in self._sources.items()
            for task in source.listed()
        ]

    def check_training(self) -> None:
        for source in self._sources.values():
            source.check_training()

    def draw(self, accepts: Callable[[Task], bool]) -> Task:
        """Return the next task of the environment whose turn it is that is accepted."""
        name = self._turns.take()
        task = self._sources[name].draw(lambda task: accepts(of_environment(task, name)))
        return of_environment(task, name)

    def rate_key(self, task: Task) -> str:
        """Return the key of the task's source, after the name of its environment."""
        return f"{task.env} {self._sources[task.env].rate_key(task)}"

    def held_out(self) -> list[Task]:
        """Return the held-out tasks of each environment, one environment after the other."""
        return [
            of_environment(task, name)
            for name, source in self._sources.items()
            for task in source.held_out()
        ]

    def find(self, id: str) -> Task:
        for name, source in self._sources.items():
            if id.startswith(f"{name}-"):
                try:
                    return of_environment(source.find(id.removeprefix(f"{name}-")), name)
                except KeyError:  # the name of another environment may begin alike
                    continue
        raise KeyError(id)

    @property
    def fingerprint(self) -> str:
        """The digests of all sources."""
        return " ".join(f"{name}={source.fingerprint}" for name, source in self._sources.items())

    def cursor(self) -> dict[str, object]:
        """Return the positions in all sources and whose turn is next, as JSON-compatible data."""
        return {
            "envs": {name: source.cursor() for name, source in self._sources.items()},
            "credit": dict(self._turns.credit),
            "weights": self._weights,
        }

    def go_to(self, cursor: Mapping[str, object]) -> None:
        """Continue from a cursor. The weights may have changed since.

        Raises:
            DataError: The cursor belongs to other environments or other tasks.
        """
        places = _Places.model_validate(cursor)
        before = places.envs
        if before.keys() != self._sources.keys():
            raise DataError(
                f"envs: the run has {', '.join(before) or 'a single environment'}, not "
                f"{', '.join(self._sources)}: keep its environments"
            )
        for name, source in self._sources.items():
            try:
                source.go_to(before[name])
            except DataError as error:
                raise DataError(f"envs: {name}: {error}") from error
        # Credit is in units of the weights.
        scale = sum(self._weights.values()) / sum(places.weights.values())
        self._turns.credit = {name: scale * places.credit[name] for name in self._sources}


def of_environment(task: Task, name: str) -> Task:
    """Return the task as one of the environment `name`; unchanged if the name is empty."""
    return replace(task, id=f"{name}-{task.id}", env=name) if name else task
