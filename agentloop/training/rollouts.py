"""Groups of rollouts for training: scored, selected, and given credit."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import anyio

from agentloop.aio import in_run_thread
from agentloop.environments.rewards.reward import Reward
from agentloop.errors import EnvironmentFailed, ServerError, ServerRefused
from agentloop.events import GroupFinished
from agentloop.plain_json import loads
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.record import (
    AgentRecord,
    ConversationRow,
    NoReward,
    RolloutGroup,
    RolloutRecord,
    TokenCredit,
)
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.credit.roc import Rejected, RocSettings, Selection, Trace, resample
from agentloop.training.credit.rule import RewardedRollout
from agentloop.training.credit.settings import CreditSettings, assign
from agentloop.trajectory import Trajectory

log = logging.getLogger(__name__)

NUM_TRIES = 5
"""How often a group is rolled out, if it is lost to the infrastructure each time."""

_FIRST_PAUSE_S = 5.0  # before the second try; it doubles each time

Teacher = Callable[[Trajectory], Awaitable[Sequence[float]]]
"""Returns a teacher's log-probabilities of a trajectory's sampled tokens."""


@dataclass(frozen=True, slots=True)
class RolledOut:
    """A group that was rolled out and scored, with the selection of rollouts to train on.

    Attributes:
        lines: the conversations, each with its reward and selection, as lines of JSON
            (`ConversationRow`): what is sent and stored as it is, and parsed for a step.
        versions: versions of the weights that sampled the rollouts with a reward.
    """

    figures: GroupFigures
    lines: bytes
    versions: frozenset[str] = frozenset()

    @classmethod
    def of(cls, figures: GroupFigures, rows: Sequence[ConversationRow]) -> RolledOut:
        """Encode a group. This is slow: call it in a thread."""
        versions = frozenset(
            span.version
            for row in rows
            if row.reward is not None
            for turn in row.trajectory
            for span in turn.versions
        )
        return cls(figures, b"".join(row.to_json() + b"\n" for row in rows), versions)

    @property
    def rows(self) -> list[ConversationRow]:
        """The conversations, decoded, which is slow."""
        return [ConversationRow.from_dict(loads(line)) for line in self.lines.splitlines()]


class RollsOut(Protocol):
    """Generates groups of rollouts, in this process or in remote runtimes."""

    async def run(self, request: GroupRequest) -> RolledOut:
        """Roll out and score a group.

        Raises:
            RequestError: the task is not a valid request.
            ServerError: the infrastructure failed for all rollouts, several times in a row.
        """
        ...


@dataclass(slots=True)
class TrainingGroup:
    """A scored group, with the rollouts to train on.

    Attributes:
        credit: the credit of each trajectory to train on, by its id.
    """

    group: RolloutGroup
    choice: Selection
    credit: Mapping[str, TokenCredit]

    @property
    def has_signal(self) -> bool:
        return any(credit.has_signal for credit in self.credit.values())

    def event(self, name: str) -> GroupFinished:
        """Return the event of a group from which rollouts to train on were chosen."""
        dropped = self.choice.dropped
        return GroupFinished(
            name,
            kept={key: credit.mean_advantage for key, credit in self.credit.items()},
            dropped={
                trajectory.id: str(dropped[index])
                for index, _, trajectory in self.group.conversations
                if index in dropped
            },
            mean_reward=self.group.mean_reward,
            has_signal=self.has_signal,
        )

    def rolled_out(self) -> RolledOut:
        """Return the group as others see it. This is slow: call it in a thread."""
        rows, rejected = self.group.rows(), self.choice.rejected
        for row in rows:
            row.credit = self.credit.get(row.trajectory.id)
            row.dropped = self.choice.dropped.get(row.rollout)
        reason = None if rejected is None else str(rejected)
        return RolledOut.of(GroupFigures.of(self.group, reason, self.has_signal), rows)


class Rollouts:
    """Generates, scores and filters groups of rollouts in this process (`RollsOut`)."""

    def __init__(
        self,
        groups: GroupRunner,
        roc: RocSettings,
        credit: CreditSettings | None = None,
        teacher: Teacher | None = None,
        *,
        seed: int,
        num_tries: int = NUM_TRIES,
        is_tainted: Callable[[Trajectory], bool] = lambda trajectory: False,
    ) -> None:
        """
        Args:
            groups: plays and scores the groups.
            teacher: returns a teacher's log-probabilities of the sampled tokens, for a rule of
                credit assignment that needs them.
            seed: seed of all random choices.
            num_tries: how often a group is rolled out if all of its rollouts are lost to the
                infrastructure.
            is_tainted: returns whether a trajectory may have been sampled with wrong weights; it
                then gets no reward.
        """
        self._groups = groups
        self._credit = credit or CreditSettings()
        self._roc = roc
        self._teacher = teacher
        self._has_warned = False
        self._seed = seed
        self._num_tries = num_tries
        self._is_tainted = is_tainted

    async def run(self, request: GroupRequest) -> RolledOut:
        """Implement `RollsOut`."""
        trained = await self._run(request)
        for number in range(1, self._num_tries):
            if trained.group.outage is None:
                return await in_run_thread(trained.rolled_out)
            pause_s = _FIRST_PAUSE_S * 2 ** (number - 1)
            log.warning(
                "group %s is rolled out again in %g s, because no rollout survived: %s",
                request.name,
                pause_s,
                trained.group.outage,
            )
            await anyio.sleep(pause_s)
            request.open_group.start_anew()
            trained = await self._run(request)
        if (outage := trained.group.outage) is not None:
            times = f"{self._num_tries} times in a row" if self._num_tries > 1 else ""
            raise ServerError(f"task {request.task.id}: all rollouts were lost {times}: {outage}")
        return await in_run_thread(trained.rolled_out)

    async def _run(self, request: GroupRequest) -> TrainingGroup:
        """Play and score a group once, and select the rollouts to train on."""
        task, name = request.task, request.name
        full_name = f"{name}-{task.id}"
        is_chosen = request.purpose is Purpose.TRAIN
        logprobs: dict[str, Sequence[float]] = {}
        trained: list[TrainingGroup] = []

        def select(group: RolloutGroup) -> GroupFinished:
            try:
                trained.append(self._select(group, name, logprobs))
            except ValueError as error:  # of this group, whose numbers are not what they should be
                where = f"task {task.id}{f' of {task.env}' if task.env else ''}"
                raise EnvironmentFailed(f"{where}: credit {self._credit.name}: {error}") from error
            if is_chosen:
                return trained[0].event(full_name)
            return GroupFinished(full_name, mean_reward=group.mean_reward, is_chosen=False)

        await self._groups.run(
            replace(request, name=full_name),
            flaw_of=partial(self._flaw_of, oldest=request.oldest),
            judge=partial(self._judge, logprobs) if self._teacher and is_chosen else None,
            select=select,
        )
        return trained[0]

    def _flaw_of(self, rollout: RolloutRecord, *, oldest: int) -> tuple[NoReward, str] | None:
        """Return why a rollout cannot be trained on, whatever its reward (`FlawOf`)."""
        if not rollout.num_sampled_tokens:
            return NoReward.NOT_SAMPLED, "nothing was sampled"
        for trajectory in rollout.all_trajectories:
            if version := _other_version(trajectory, oldest):
                return NoReward.OTHER_WEIGHTS, f"sampled with other weights: {version}"
            if self._is_tainted(trajectory):
                return NoReward.OTHER_WEIGHTS, "sampled by a server with wrong weights"
        return None

    async def _judge(self, logprobs: dict[str, Sequence[float]], rollout: RolloutRecord) -> None:
        """Add the teacher's log-probabilities of a rollout to `logprobs`.

        A rollout that the teacher refuses, such as one that is too long for it, has no reward.
        """
        assert self._teacher is not None
        assert rollout.reward is not None
        try:
            for trajectory in rollout.trained:
                logprobs[trajectory.id] = await self._teacher(trajectory)
        except ServerError as error:
            is_refused = isinstance(error, ServerRefused) and error.is_about_request
            rollout.no_reward = NoReward.TEACHER if is_refused else NoReward.INFRASTRUCTURE
            cause = "the teacher refuses it" if is_refused else "infrastructure"
            rollout.reward = Reward(None, rollout.reward.answer, f"{cause}: {error}")

    def _select(
        self, group: RolloutGroup, name: str, logprobs: Mapping[str, Sequence[float]]
    ) -> TrainingGroup:
        rollouts = group.rollouts
        values = [reward.value for reward in group.rewards]
        # A generator per group, since groups finish in any order.
        draw = random.Random(f"{self._seed} {name}")
        has_turn_rewards = _has_turn_rewards(rollouts)
        if has_turn_rewards and not self._credit.rule.uses_turn_rewards:
            self._warn_ignored()
        roc = self._credit.selection(self._roc, has_turn_rewards=has_turn_rewards)
        traces = [
            Trace.of(rollout.whole, value) for rollout, value in zip(rollouts, values, strict=True)
        ]
        choice = resample(traces, roc, draw)
        members: dict[str, tuple[float | None, RolloutRecord | AgentRecord]]
        members = {
            rollouts[n].id: (values[n], rollouts[n]) for n in choice.kept if rollouts[n].is_trained
        }
        credit = self._assign(members, logprobs, draw)
        indexes: Sequence[int] = choice.kept
        if choice.rejected is Rejected.EQUAL_REWARDS:  # those of other agents may differ
            indexes = range(len(rollouts))
        for agent in sorted({agent for rollout in rollouts for agent in rollout.others}):
            members = {}
            for index in indexes:
                record = rollouts[index].others.get(agent)
                if record is not None and record.is_trained and values[index] is not None:
                    reward = values[index] if record.reward is None else record.reward
                    members[rollouts[index].id] = reward, record
            credit |= self._assign(members, logprobs, draw)
        trained = TrainingGroup(group, choice, credit)
        if self._roc.reject_equal_reward and not trained.has_signal:
            trained.credit = {}
        return trained

    def _assign(
        self,
        members: Mapping[str, tuple[float | None, RolloutRecord | AgentRecord]],
        logprobs: Mapping[str, Sequence[float]],
        draw: random.Random,
    ) -> dict[str, TokenCredit]:
        """Return the credit of one agent's trajectories by their ids.

        Args:
            members: the agent's reward and its record, by the id of the rollout.
            logprobs: the teacher's log-probabilities, by the trajectory's id.
        """
        needs_teacher = self._credit.rule.needs_teacher  # in an evaluation there is none
        rewarded = [
            RewardedRollout(
                reward,
                record.whole,
                [logprobs.get(trajectory.id, ()) for trajectory in record.whole],
                _names_of(record),
            )
            for reward, record in members.values()
            if reward is not None
            and (not needs_teacher or all(each.id in logprobs for each in record.whole))
        ]
        return {
            trajectory.id: credit
            for rollout, credits in zip(rewarded, assign(rewarded, self._credit, draw), strict=True)
            for trajectory, credit in zip(rollout.trajectories, credits, strict=True)
        }

    def _warn_ignored(self) -> None:
        """Log once that an environment rewards turns, but that this has no effect."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "the environment rewards single turns, but credit = %s does not use these rewards: "
                "set credit = per_turn",
                self._credit.name,
            )


def _names_of(record: RolloutRecord | AgentRecord) -> list[str]:
    """Return the names of the conversations to train on, for comparison with other rollouts.

    They say what a conversation is for, and how many before it, whole or not, are for the same.
    """
    nums: Counter[str] = Counter()
    names: dict[str, str] = {}
    for trajectory in record.trajectories:
        opening = record.openings.get(trajectory.id, "")
        names[trajectory.id] = f"{opening}+{nums[opening]}"
        nums[opening] += 1
    return [names[trajectory.id] for trajectory in record.whole]


def _has_turn_rewards(rollouts: Sequence[RolloutRecord]) -> bool:
    turns = (
        turn
        for rollout in rollouts
        for trajectory in rollout.all_trajectories
        for turn in trajectory
    )
    return any(turn.reward is not None or turn.token_rewards for turn in turns)


def _other_version(trajectory: Trajectory, oldest: int) -> str | None:
    """Return a version older than `oldest` that sampled the trajectory, or None.

    This happens when a server is restarted externally, which serves its initial weights until it is
    probed.
    """
    versions = (span.version for turn in trajectory for span in turn.versions)
    return next(
        (version for version in versions if not (version.isdecimal() and int(version) >= oldest)),
        None,
    )
