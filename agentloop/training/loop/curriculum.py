"""Choose which of the offered tasks are trained on, by how often they are solved. Pure.

    source ──offers a task──> taken? ──yes──> group of rollouts ──outcome──> its solve rate
       ▲                        │                                                  │
       └──── no: the next one ──┘◄─────────────────────────────────────────────────┘

A task is taken with a probability that depends on its solve rate p, the share of its rollouts with
a positive reward:

    not tried yet   1
    tried           4 p (1 - p), at least `LEAST`
    retired         the policy's `recheck`

p (1 - p) is the variance of a reward of 0 or 1, so a task is drawn most often where the rewards of
its group differ most, and rarely where they are all equal and nothing is learned. Recent groups
count more, because the model changes. A task is retired when every rollout of several groups in a
row solved it, with equal rewards, and comes back when a recheck finds a failure. With shaped
rewards that are always positive, all tasks have the same rate, and are drawn equally often.

Tasks are passed over rather than reordered, so the position in the source of tasks says where to
continue. What was observed is in the journal (queue.py), in order, and decisions depend on nothing
but that, the seed and the number of tasks that were offered: `restore` continues exactly.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from agentloop.rollouts.metrics import GroupFigures
from agentloop.training.credit.grpo import are_equal

LEAST = 1 / 8
"""Least probability of a task that is not retired: it is tried in one of eight epochs."""

MEMORY = 0.5
"""Weight of a group in the solve rate, relative to that of the next group of the task."""

_PRIOR = 1.0  # solved and failed rollouts that each task begins with (Laplace's rule of succession)


@dataclass(frozen=True, slots=True)
class DrawPolicy:
    """A way to draw tasks.

    Attributes:
        by_solve_rate: whether the probability of a task depends on its solve rate.
        retire_after: groups in a row that must be solved before a task is retired; 0: never.
        recheck: probability that a retired task is taken when it is offered.
    """

    by_solve_rate: bool = False
    retire_after: int = 0
    recheck: float = 0.0


EVERY_TASK = DrawPolicy()
"""Each task once in an epoch."""

BY_SOLVE_RATE = DrawPolicy(by_solve_rate=True, retire_after=3, recheck=1 / 16)
"""The curriculum of `loop.curriculum`."""

NOT_SOLVED = DrawPolicy(retire_after=1)
"""The filter before a stage (arXiv 2508.20722, stage 3): whatever was solved once is left out."""

FILTER_ROLLOUTS = 8
"""Rollouts of each task of that filter, as in the paper."""


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The rewards of a group, as far as a curriculum needs them.

    Attributes:
        num_solved: number of rollouts with a positive reward.
        num_rollouts: number of rollouts with any reward, at least 1.
        is_equal: whether all rewards are equal.
    """

    num_solved: int
    num_rollouts: int
    is_equal: bool

    @classmethod
    def of(cls, figures: GroupFigures) -> GroupOutcome | None:
        """Return the outcome of a group with these figures; None without rewards.

        A rollout that the infrastructure failed has no reward and does not count.
        """
        rewards = (rollout.reward for rollout in figures.rollouts)
        values = [reward for reward in rewards if reward is not None]
        if not values:
            return None
        return cls(sum(value > 0 for value in values), len(values), are_equal(values))

    @property
    def is_solved(self) -> bool:
        """True if there is nothing left to learn: each rollout is right, and as good as any."""
        return self.num_solved == self.num_rollouts and self.is_equal


@dataclass(slots=True)
class _History:
    num_solved: float = 0.0
    num_rollouts: float = 0.0
    num_in_a_row: int = 0  # groups that were solved, up to the last one

    def add(self, outcome: GroupOutcome) -> None:
        self.num_solved = MEMORY * self.num_solved + outcome.num_solved
        self.num_rollouts = MEMORY * self.num_rollouts + outcome.num_rollouts
        self.num_in_a_row = self.num_in_a_row + 1 if outcome.is_solved else 0


class Curriculum:
    """The solve rates of the tasks of a run, and the decisions that follow from them.

    What a rate is kept of is named by a key: `TaskSource.rate_key`.

    Attributes:
        num_offered: number of decisions so far, each of which is a random draw of its own.
    """

    def __init__(self, policy: DrawPolicy = EVERY_TASK, *, seed: int = 0) -> None:
        self.num_offered = 0
        self._policy = policy
        self._seed = seed
        self._histories: dict[str, _History] = {}

    def restore(self, outcomes: Iterable[tuple[str, GroupOutcome]], *, num_offered: int) -> None:
        """Continue after these observations, in this order, and this number of decisions."""
        self._histories.clear()
        for key, outcome in outcomes:
            self.observe(key, outcome)
        self.num_offered = num_offered

    def observe(self, key: str, outcome: GroupOutcome) -> None:
        """Take the outcome of another group into account."""
        self._histories.setdefault(key, _History()).add(outcome)

    def is_retired(self, key: str) -> bool:
        history, enough = self._histories.get(key), self._policy.retire_after
        return history is not None and 0 < enough <= history.num_in_a_row

    def probability(self, key: str) -> float:
        """Return the probability with which a task is taken when it is offered."""
        history = self._histories.get(key)
        if history is None:
            return 1.0
        if self.is_retired(key):
            return self._policy.recheck
        if not self._policy.by_solve_rate:
            return 1.0
        rate = (history.num_solved + _PRIOR) / (history.num_rollouts + 2 * _PRIOR)
        return max(LEAST, 4 * rate * (1 - rate))

    def takes(self, key: str) -> bool:
        """Decide whether a task that is offered is taken."""
        self.num_offered += 1
        draw = Random(f"{self._seed} {self.num_offered}").random()
        return draw < self.probability(key)

    def metrics(self) -> dict[str, float]:
        """Return metrics of what was tried so far; none if every task is taken anyway."""
        if self._policy == EVERY_TASK or not self._histories:
            return {}
        rates = [history.num_solved / history.num_rollouts for history in self._histories.values()]
        return {
            "curriculum/num_tasks": len(rates),
            "curriculum/num_retired": sum(map(self.is_retired, self._histories)),
            "curriculum/solve_rate": sum(rates) / len(rates),
        }
