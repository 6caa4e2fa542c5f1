"""Play the rollouts of a task and score them: one path, whoever the agent is.

    task ──admitted──> siblings ──each as it ends──> checked, graded, judged ──> RolloutGroup
                          ▲                │
                          └──stopped───────┘  when enough of them have ended

What the siblings are is up to a `Player`: an environment, the built-in agent as one, or an
endpoint. What becomes of the group is up to the caller: training selects rollouts and gives
credit, an evaluation repeats those that have no reward.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio

from agentloop.aio import task_group
from agentloop.environments.rewards.reward import Grader, Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError, culprit
from agentloop.events import Emit, GroupFinished, GroupStarted, RolloutScored, ignore
from agentloop.rollouts.metrics import RaisedErrors
from agentloop.rollouts.record import NoReward, RolloutGroup, RolloutRecord
from agentloop.rollouts.request import GroupRequest, Purpose

log = logging.getLogger(__name__)

FlawOf = Callable[[RolloutRecord], "tuple[NoReward, str] | None"]
"""Returns why a rollout must not be scored, such as other weights, also in words; or None."""

Judge = Callable[[RolloutRecord], Awaitable[None]]
"""Judges a rollout that has a reward; may replace the reward by none."""

Select = Callable[[RolloutGroup], GroupFinished]
"""Decides what becomes of a group."""


class Sibling(Protocol):
    """A rollout of a group."""

    async def play(self) -> RolloutRecord:
        """Run the rollout to its end; its failures are in the record."""
        ...

    def cut_off(self) -> RolloutRecord:
        """Return the record of a rollout of which `play` was cancelled, or has not begun."""
        ...


class Player(Protocol):
    """Plays rollouts: an environment, several, or an endpoint."""

    def group(self, request: GroupRequest) -> AbstractAsyncContextManager[Sequence[Sibling]]:
        """Wait until a group may start; return its rollouts, to be played within the context.

        Sets `request.queued` before it waits.

        Raises:
            RequestError: the task cannot be run.
            EnvironmentFailed: the environment failed on all rollouts; raised at the exit.
        """
        ...


async def play_siblings(
    siblings: Sequence[Sibling],
    *,
    enough: int = 0,
    on_end: Callable[[RolloutRecord], object] = lambda record: None,
) -> list[RolloutRecord]:
    """Play the rollouts of a group concurrently.

    Args:
        enough: stop the remaining ones, the slowest, when this many have ended that may count; 0:
            never.
        on_end: called with each rollout as it ends.
    """
    records: dict[int, RolloutRecord] = {}
    num_ended = 0

    async def play(index: int) -> None:
        nonlocal num_ended
        record = records[index] = await siblings[index].play()
        on_end(record)
        num_ended += record.may_count
        if enough and num_ended == enough:
            playing.cancel_scope.cancel()

    try:
        async with anyio.create_task_group() as playing:
            for index in range(len(siblings)):
                playing.start_soon(play, index)
    except ExceptionGroup as errors:
        # Usually all fail alike. A failure that ends the run goes before a refused task.
        error = culprit(errors, RequestError)
        raise error from error.__cause__
    for index, sibling in enumerate(siblings):
        if index not in records:
            records[index] = sibling.cut_off()
            on_end(records[index])
    return [records[index] for index in range(len(siblings))]


class GroupRunner:
    """Plays and scores groups of rollouts."""

    def __init__(
        self, player: Player, grader: Grader, *, enough: int = 0, emit: Emit = ignore
    ) -> None:
        """
        Args:
            grader: checks the answers of rollouts that have no reward of an environment.
            enough: see `play_siblings`; ignored for groups that are not larger.
            emit: called with events about groups and rewards.
        """
        self._player = player
        self._grader = grader
        self._enough = enough
        self._emit = emit
        self._raised = RaisedErrors()

    async def run(
        self,
        request: GroupRequest,
        *,
        flaw_of: FlawOf = lambda rollout: None,
        judge: Judge | None = None,
        select: Select | None = None,
    ) -> RolloutGroup:
        """Play and score a group.

        Args:
            flaw_of: checks each rollout that may have a reward before it is scored.
            judge: judges each rollout that has a reward.
            select: decides what becomes of the group, for the event about its end.

        Raises:
            RequestError: the task cannot be run.
            RewardError: a reward function of the user's failed.
        """
        task, name, size = request.task, request.name, request.size
        is_chosen = request.purpose is Purpose.TRAIN
        self._emit(GroupStarted(name, task.id, task.prompt, task.answer, size, is_chosen))
        finished = GroupFinished(name, is_chosen=is_chosen)

        opened = request.open_group

        async def score(rollout: RolloutRecord) -> None:
            started = time.monotonic()
            if opened.ended(rollout.id) is not rollout:
                rollout.reward = await self._reward(task, rollout, flaw_of)
            assert rollout.reward is not None
            if judge is not None and rollout.reward.value is not None:
                await judge(rollout)
            reward = rollout.reward
            if reward.value is None and rollout.no_reward is None:
                rollout.no_reward = NoReward.NOT_GIVEN
            await opened.keep_rollout(rollout)
            verdict = reward.value, reward.answer, reward.reason
            seconds = time.monotonic() - started
            for trajectory in rollout.all_trajectories:
                self._emit(RolloutScored(trajectory.id, *verdict, seconds, reward.parts))

        try:
            async with task_group(only_first=True) as scoring:  # while siblings still run
                async with self._player.group(request) as siblings:
                    rollouts = await play_siblings(
                        siblings,
                        enough=self._enough if self._enough < size else 0,
                        on_end=lambda rollout: scoring.start_soon(score, rollout),
                    )
            for raised in self._raised.add(name, rollouts):
                log.warning("%s", raised.text)
                self._emit(raised)
            group = RolloutGroup(task, rollouts)
            finished = GroupFinished(name, mean_reward=group.mean_reward, is_chosen=is_chosen)
            if select is not None:
                finished = select(group)
        finally:
            self._emit(finished)
        return group

    async def _reward(self, task: Task, rollout: RolloutRecord, flaw_of: FlawOf) -> Reward:
        """Return the reward of a rollout, which has none if it says nothing about the model."""
        if rollout.reward is not None and rollout.reward.value is None:
            return rollout.reward
        if (flaw := flaw_of(rollout)) is not None:
            rollout.no_reward, reason = flaw
            return Reward(None, None, reason)
        if rollout.to_grade is not None:
            return await self._grader.score(rollout.to_grade, task)
        assert rollout.reward is not None
        return rollout.reward
