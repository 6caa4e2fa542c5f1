"""Groups of rollouts: rolled out, scored, and filtered for training."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import anyio
import anyio.lowlevel

from agentloop.agent.rollout import Budget
from agentloop.environments.episodes import Episode, RunGroup
from agentloop.environments.rewards.reward import Grader, Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import EnvironmentFailed, RequestError, ServerError, ServerRefused
from agentloop.events import Emit, GroupFinished, GroupStarted, RolloutScored, ignore
from agentloop.training.credit.roc import Rejected, RocSettings, Selection, Trace, resample
from agentloop.training.credit.rule import RewardedRollout, TokenCredit
from agentloop.training.credit.settings import CreditSettings, assign
from agentloop.training.group_metrics import figures
from agentloop.training.group_stream import finished_groups
from agentloop.trajectory import StopReason, Trajectory

__all__ = ["Purpose", "RolledOut", "Rollouts", "RollsOut", "in_order"]

log = logging.getLogger(__name__)

_NUM_TRIES = 5  # of a group that is lost to the infrastructure
_FIRST_PAUSE_S = 5.0  # before the second try; it doubles each time

Teacher = Callable[[Trajectory], Awaitable[Sequence[float]]]
"""Returns a teacher's log-probabilities of a trajectory's sampled tokens."""


class Purpose(StrEnum):
    """The purpose of a group of rollouts."""

    TRAIN = "train"
    EVALUATE = "evaluate"  # on held-out tasks, or to filter a stage's tasks


class RolledOut(Protocol):
    """A group that was rolled out and scored, with the selection of rollouts to train on."""

    @property
    def figures(self) -> Mapping[str, Any]:
        """The figures that `agentloop.training.group_metrics.about` takes."""
        ...

    @property
    def has_signal(self) -> bool:
        """True if the group has a learning signal: an advantage other than 0."""
        ...

    def rows(self) -> Sequence[Mapping[str, Any]]:
        """Return the record of each rollout, with its reward and selection, as plain data."""
        ...


class RollsOut(Protocol):
    """Generates groups of rollouts, in this process or in remote runtimes."""

    async def wait_for_capacity(self, size: int) -> None:
        """Wait for the capacity to start a group of `size` rollouts."""
        ...

    async def group(
        self,
        task: Task,
        name: str,
        *,
        size: int,
        budget: Budget,
        oldest: int,
        purpose: Purpose = Purpose.TRAIN,
        on_queued: Callable[[], None] = lambda: None,
    ) -> RolledOut:
        """Roll out and score a group.

        Args:
            name: name of the group, which determines all random choices.
            size: number of rollouts.
            oldest: oldest version of the weights that may sample it.
            purpose: purpose of the group, for events about it.
            on_queued: called when the group is queued for capacity, so that the next one may be
                admitted.

        Raises:
            RequestError: the task is not a valid request.
            ServerError: the infrastructure failed for all rollouts, several times in a row.
        """
        ...


async def in_order(
    rolls_out: RollsOut,
    tasks: Sequence[Task],
    name: str,
    *,
    size: int,
    budget: Budget,
    oldest: int,
    on_done: Callable[[int], None],
    on_refused: Callable[[Task, RequestError], None],
    may_begin: Callable[[], Awaitable[None]] = anyio.lowlevel.checkpoint,
) -> list[tuple[Task, RolledOut]]:
    """Roll out a group for each task to evaluate it; return them in the order of the tasks.

    Args:
        on_done: called with the number of finished groups.
        on_refused: called with each task that is not a valid request, or on which the environment
            failed; it is skipped.
        may_begin: waits until the next group may start.

    Raises:
        RequestError: all tasks were refused, and not because the environment failed.
    """
    found: dict[int, tuple[Task, RolledOut]] = {}
    refused: RequestError | None = None

    async def run(
        numbered: tuple[int, Task], on_queued: Callable[[], None]
    ) -> Sequence[Trajectory]:
        number, task = numbered  # numbered, since a task may occur twice
        group = await rolls_out.group(
            task,
            f"{name}-{number}",
            size=size,
            budget=budget,
            oldest=oldest,
            purpose=Purpose.EVALUATE,
            on_queued=on_queued,
        )
        found[number] = task, group
        return ()

    async def source() -> AsyncGenerator[tuple[int, Task], None]:
        for numbered in enumerate(tasks):
            await may_begin()
            yield numbered

    async with finished_groups(
        source(), run, partial(rolls_out.wait_for_capacity, size), max_open=max(1, len(tasks))
    ) as groups:
        async for group in groups:  # no deadline: each rollout has one
            if group.error is not None:
                on_refused(group.task[1], group.error)
                if not isinstance(group.error, EnvironmentFailed):  # the task is invalid
                    refused = group.error
            else:
                on_done(len(found))
    if refused is not None and not found:  # skipping all tasks would hide a mistake
        raise RequestError(f"{refused} (no valid task among {len(tasks)})") from refused
    return [found[number] for number in sorted(found)]


@dataclass(slots=True)
class _Scored:
    """A scored group, with the rollouts to train on.

    Attributes:
        credit: of each trajectory to train on, by its id.
        outage: what the infrastructure failed with, if all rollouts were lost to it.
    """

    task: Task
    episodes: Sequence[Episode]
    rewards: list[Reward]
    choice: Selection
    credit: Mapping[str, TokenCredit]
    outage: str | None = None

    @property
    def figures(self) -> Mapping[str, Any]:
        return figures(self)

    @property
    def has_signal(self) -> bool:
        return any(one.has_signal for one in self.credit.values())

    def event(self, name: str, *, is_chosen: bool) -> GroupFinished:
        values = [reward.value for reward in self.rewards if reward.value is not None]
        mean = sum(values) / len(values) if values else None
        if not is_chosen:
            return GroupFinished(name, mean_reward=mean, is_chosen=False)
        dropped = self.choice.dropped
        return GroupFinished(
            name,
            kept={key: credit.mean_advantage for key, credit in self.credit.items()},
            dropped={
                one.id: str(dropped[index])
                for index, _, one in self._conversations()
                if index in dropped
            },
            mean_reward=mean,
            has_signal=self.has_signal,
        )

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "task": self.task.id,
                "truth": self.task.answer,
                "rollout": index,
                "agent": agent,
                "reward": self.rewards[index].value,
                "parts": dict(self.rewards[index].parts),
                "answer": self.rewards[index].answer,
                "reason": self.rewards[index].reason,
                "advantage": None if credit is None else credit.mean_advantage,
                "credit": None if credit is None else asdict(credit),
                "dropped": self.choice.dropped.get(index),
                "trajectory": trajectory.to_dict(),
            }
            for index, agent, trajectory in self._conversations()
            for credit in [self.credit.get(trajectory.id)]
        ]

    def _conversations(self) -> Iterator[tuple[int, str, Trajectory]]:
        """Yield each trajectory with its rollout's number and its agent's name.

        The name is empty for the rollout's own agent.
        """
        for index, episode in enumerate(self.episodes):
            for one in episode.trajectories:
                yield index, "", one
            for name, other in episode.others.items():
                for one in other.trajectories:
                    yield index, name, one


class Rollouts:
    """Generates, scores and filters groups of rollouts in this process (`RollsOut`)."""

    def __init__(
        self,
        run_group: RunGroup,
        wait_for_capacity: Callable[[int], Awaitable[None]],
        grader: Grader,
        roc: RocSettings,
        credit: CreditSettings | None = None,
        teacher: Teacher | None = None,
        *,
        seed: int,
        enough: int = 0,
        num_tries: int = _NUM_TRIES,
        is_tainted: Callable[[Trajectory], bool] = lambda trajectory: False,
        emit: Emit = ignore,
    ) -> None:
        """
        Args:
            wait_for_capacity: as in `RollsOut`.
            teacher: returns a teacher's log-probabilities of the sampled tokens, for a rule of
                credit assignment that needs them.
            seed: seed of all random choices.
            enough: stop the remaining rollouts of a group when this many have ended; 0: never.
            num_tries: how often a group is rolled out if all of its rollouts are lost to the
                infrastructure.
            is_tainted: returns whether a trajectory may have been sampled with wrong weights; it
                then gets no reward.
            emit: called with events about groups and rewards.
        """
        self._run_group = run_group
        self._wait_for_capacity = wait_for_capacity
        self._grader = grader
        self._credit = credit or CreditSettings()
        self._roc = roc
        self._teacher = teacher
        self._has_told_ignored = False
        self._seed = seed
        self._enough = enough
        self._num_tries = num_tries
        self._is_tainted = is_tainted
        self._emit = emit

    async def wait_for_capacity(self, size: int) -> None:
        """Implement `RollsOut`."""
        await self._wait_for_capacity(size)

    async def group(
        self,
        task: Task,
        name: str,
        *,
        size: int,
        budget: Budget,
        oldest: int,
        purpose: Purpose = Purpose.TRAIN,
        on_queued: Callable[[], None] = lambda: None,
    ) -> RolledOut:
        """Implement `RollsOut`."""
        run = partial(self._tried, task, name, size=size, budget=budget, oldest=oldest)
        group = await run(purpose=purpose, on_queued=on_queued)
        for number in range(1, self._num_tries):
            if group.outage is None:
                return group
            pause_s = _FIRST_PAUSE_S * 2 ** (number - 1)
            log.warning(
                "group %s is rolled out again in %g s, because no rollout survived: %s",
                name,
                pause_s,
                group.outage,
            )
            await anyio.sleep(pause_s)
            group = await run(purpose=purpose, on_queued=lambda: None)
        if group.outage is not None:
            times = f"{self._num_tries} times in a row" if self._num_tries > 1 else ""
            raise ServerError(f"task {task.id}: all rollouts were lost {times}: {group.outage}")
        return group

    async def _tried(
        self,
        task: Task,
        name: str,
        *,
        size: int,
        budget: Budget,
        oldest: int,
        purpose: Purpose,
        on_queued: Callable[[], None],
    ) -> _Scored:
        """Roll out and score a group once."""
        full_name = f"{name}-{task.id}"
        is_chosen = purpose is Purpose.TRAIN
        self._emit(GroupStarted(full_name, task.id, task.prompt, task.answer, size, is_chosen))
        scored: _Scored | None = None
        try:
            episodes = await self._run_group(
                task,
                size=size,
                name=full_name,
                budget=budget,
                on_queued=on_queued,
                enough=self._enough if self._enough < size else 0,
            )
            scored = await self._scored(task, name, episodes, oldest, teaches=is_chosen)
        finally:
            self._emit(
                GroupFinished(full_name, is_chosen=is_chosen)
                if scored is None
                else scored.event(full_name, is_chosen=is_chosen)
            )
        return scored

    async def _scored(
        self, task: Task, name: str, episodes: Sequence[Episode], oldest: int, *, teaches: bool
    ) -> _Scored:
        """Score the rollouts, with the teacher's judgement if it `teaches`, and select.

        A rollout that the teacher refuses, such as one that is too long for it, has no reward.
        """
        rewards: dict[int, Reward] = {}
        taught: dict[str, Sequence[float]] = {}
        num_lost = 0

        async def score(index: int) -> None:
            nonlocal num_lost
            begun = time.monotonic()
            reward = await self._reward(task, episodes[index], oldest)
            is_lost = episodes[index].lost_to is StopReason.INFRASTRUCTURE
            if self._teacher is not None and teaches and reward.value is not None:
                try:
                    for one in episodes[index].trained:
                        taught[one.id] = await self._teacher(one)
                except ServerError as error:
                    is_lost = not (isinstance(error, ServerRefused) and error.is_about_request)
                    what = "infrastructure" if is_lost else "the teacher refuses it"
                    reward = Reward(None, reward.answer, f"{what}: {error}")
            num_lost += is_lost
            rewards[index] = reward
            told = (reward.value, reward.answer, reward.reason, time.monotonic() - begun)
            for trajectory in episodes[index].all_trajectories:
                self._emit(RolloutScored(trajectory.id, *told))

        async with anyio.create_task_group() as scoring:
            for index in range(len(episodes)):
                scoring.start_soon(score, index)
        found = [rewards[index] for index in range(len(rewards))]
        scored = self._select(task, name, episodes, found, taught)
        if num_lost == len(episodes):
            scored.outage = found[0].reason
        return scored

    async def _reward(self, task: Task, episode: Episode, oldest: int) -> Reward:
        """Return the reward of a rollout, which has none if it cannot be trained on."""
        if any(one.stop_reason is StopReason.STRAGGLER for one in episode.all_trajectories):
            return Reward(None, None, "stopped: enough rollouts of its group had ended")
        if episode.reward is not None and episode.reward.value is None:
            return episode.reward
        if not episode.num_sampled_tokens:
            why = "timed out in the queue" if episode.all_trajectories else "its agent did not run"
            return Reward(None, None, f"{why}: nothing was sampled")
        for trajectory in episode.all_trajectories:
            if other := _other_version(trajectory, oldest):
                return Reward(None, None, f"sampled with other weights: {other}")
            if self._is_tainted(trajectory):
                return Reward(None, None, "sampled by a server with wrong weights")
        if episode.reward is not None:
            return episode.reward
        (trajectory,) = episode.trajectories
        return await self._grader.score(trajectory, task)

    def _select(
        self,
        task: Task,
        name: str,
        episodes: Sequence[Episode],
        rewards: list[Reward],
        taught: Mapping[str, Sequence[float]],
    ) -> _Scored:
        values = [reward.value for reward in rewards]
        # A generator per group, since groups finish in any order.
        draw = random.Random(f"{self._seed} {name}")
        has_turn_rewards = _has_turn_rewards(episodes)
        if has_turn_rewards and not self._credit.rule.uses_turn_rewards:
            self._tell_ignored()
        roc = self._credit.selection(self._roc, has_turn_rewards=has_turn_rewards)
        traces = [
            Trace.of(episode.whole, value) for episode, value in zip(episodes, values, strict=True)
        ]
        choice = resample(traces, roc, draw)
        members = {episodes[n].id: (values[n], episodes[n].whole) for n in choice.kept}
        credit = self._assigned(members, taught, draw)
        indexes: Sequence[int] = choice.kept
        if choice.rejected is Rejected.EQUAL_REWARDS:  # those of other agents may differ
            indexes = range(len(episodes))
        for name in sorted({name for episode in episodes for name in episode.others}):
            members = {}
            for index in indexes:
                other = episodes[index].others.get(name)
                if other is not None and other.is_trained and values[index] is not None:
                    reward = values[index] if other.reward is None else other.reward
                    members[episodes[index].id] = reward, other.whole
            credit |= self._assigned(members, taught, draw)
        found = _Scored(task, episodes, rewards, choice, credit)
        if self._roc.reject_equal_reward and not found.has_signal:
            found.credit = {}
        return found

    def _assigned(
        self,
        members: Mapping[str, tuple[float | None, Sequence[Trajectory]]],
        taught: Mapping[str, Sequence[float]],
        draw: random.Random,
    ) -> dict[str, TokenCredit]:
        """Return the credit of one agent's trajectories by their ids.

        Args:
            members: its reward and its trajectories, by the id of the rollout.
            taught: the teacher's log-probabilities, by the trajectory's id.
        """
        needs_teacher = self._credit.rule.needs_teacher  # in an evaluation there is none
        group = [
            RewardedRollout(
                reward,
                trajectories,
                [taught.get(one.id, ()) for one in trajectories],
                [one.id.removeprefix(id) for one in trajectories],
            )
            for id, (reward, trajectories) in members.items()
            if reward is not None
            and (not needs_teacher or all(one.id in taught for one in trajectories))
        ]
        return {
            trajectory.id: credit
            for rollout, credits in zip(group, assign(group, self._credit, draw), strict=True)
            for trajectory, credit in zip(rollout.trajectories, credits, strict=True)
        }

    def _tell_ignored(self) -> None:
        """Log once that an environment rewards turns, but that this has no effect."""
        if not self._has_told_ignored:
            self._has_told_ignored = True
            log.warning(
                "the environment rewards single turns, but credit = %s does not use these rewards: "
                "set credit = per_turn",
                self._credit.name,
            )


def _has_turn_rewards(episodes: Sequence[Episode]) -> bool:
    turns = (turn for episode in episodes for one in episode.all_trajectories for turn in one)
    return any(turn.reward is not None or turn.token_rewards for turn in turns)


def _other_version(trajectory: Trajectory, oldest: int) -> str | None:
    """Return a version older than `oldest` that sampled the trajectory, or None.

    This happens when a server is restarted externally, which serves its initial weights until it is
    probed.
    """
    versions = (span.version for turn in trajectory for span in turn.versions)
    return next((one for one in versions if not (one.isdecimal() and int(one) >= oldest)), None)
