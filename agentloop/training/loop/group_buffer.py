"""The groups of a run, from admission until the learner takes them.

    admit ──> open ──finish──> finished ──lease──> in a batch ──weights live──> its slot is free
      ▲         └──discard──> not trained on: replaced by another group               │
      └────────────────────────────────── slots ─────────────────────────────────────┘

`GroupBuffer` is the only writer of a group's state, which has three parts that must agree: its
slot (staleness.py, in memory), its entry in the journal (queue.py, durable) and the number of
groups that a stage still needs. Each operation writes the journal first, so that a slot is never
free while a restart would bring its group back.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.metrics import GroupFigures
from agentloop.training.loop.queue import GroupQueue, Lease, QueuedGroup, StepNotes
from agentloop.training.loop.stage_tasks import StageTasks
from agentloop.training.loop.staleness import Slots
from agentloop.training.run.control import RunControl
from agentloop.training.run.status import count_of
from agentloop.trajectory import rollout_of


@dataclass(frozen=True, slots=True)
class Interrupted:
    """The groups that were open when a run was stopped, and what was kept of their rollouts."""

    num_groups: int = 0
    num_ended: int = 0
    num_begun: int = 0

    @classmethod
    def of(cls, num_groups: int, kept: Sequence[tuple[int, str, bool]]) -> Interrupted:
        """Count the rollouts, from what `OpenGroups.conversations` returns of the groups."""
        ended = {rollout_of(conversation) for _, conversation, has_ended in kept if has_ended}
        begun = {rollout_of(conversation) for _, conversation, _ in kept}
        return cls(num_groups, len(ended), len(begun - ended))

    def in_words(self, group_size: int) -> str:
        num_anew = self.num_groups * group_size - self.num_ended - self.num_begun
        return (
            f"Of {count_of(self.num_groups, 'group')} that the stop has interrupted, "
            f"{count_of(self.num_ended, 'rollout')} had ended, {self.num_begun} can go on after "
            f"their last turn, and {num_anew} must start anew"
        )


class GroupBuffer:
    """The groups that are admitted and not trained on, bounded in number, staleness and bytes."""

    def __init__(
        self,
        queue: GroupQueue,
        control: RunControl,
        *,
        batch_size: int,
        max_staleness: int,
        max_bytes: int,
    ) -> None:
        """
        Args:
            queue: the journal.
            control: notified of each change.
            batch_size: number of groups in a batch.
            max_bytes: size of the finished groups at which no further ones are admitted, except
                those that the next batch needs.
        """
        self._queue = queue
        self._control = control
        self._batch_size = batch_size
        self._max_staleness = max_staleness
        self._max_bytes = max_bytes
        self._slots = Slots(max_staleness, batch_size)
        self._tasks: StageTasks | None = None
        self._num_left = 0  # groups of this stage that are not admitted yet
        self._readmitted: deque[QueuedGroup] = deque()  # open since before a restart
        self._begun: set[int] = set()  # of them, those of which something was kept
        self._complete_s: float | None = None

    def reset(self, version: int) -> None:
        """Begin without groups, with the weights of `version` live. The journal is unchanged."""
        self._slots = Slots(self._max_staleness, self._batch_size, version=version)
        self._readmitted.clear()
        self._num_left = 0

    async def begin_stage(
        self, tasks: StageTasks, *, num_groups: int, ids: Collection[str] | None
    ) -> Interrupted:
        """Begin a stage and restore the groups that were admitted before a restart.

        Finished groups stay unless they are too stale; those and open ones are to be rolled out
        again, except for what was kept of open ones.

        Args:
            num_groups: number of groups that the stage still trains on.
            ids: restore only the groups of these tasks; None: of all tasks.

        Returns:
            What was kept of the groups that a stop has interrupted.
        """
        self._tasks = tasks
        self._num_left = num_groups

        def is_ours(group: QueuedGroup) -> bool:
            return ids is None or group.task.id in ids

        again = []
        for group in filter(is_ours, await self._queue.finished_groups()):
            if self._slots.has_slot_for(group.version):
                self._slots.admit(group.number, version=group.version, finished=True)
                self._num_left -= 1
            else:
                again.append(group)
        opened = [*filter(is_ours, await self._queue.open_groups())]
        again += opened
        numbers = {group.number for group in opened}
        kept = [row for row in await self._queue.rolled_out.conversations() if row[0] in numbers]
        self._begun = {number for number, *_ in kept}
        self._readmitted = deque(sorted(again, key=lambda group: group.number))
        self._complete_s = None
        self._notify()
        return Interrupted.of(len(opened), kept)

    def _notify(self) -> None:
        """Note whether a batch has become complete, and wake what waits for the groups."""
        if self._complete_s is None and self.has_batch:
            self._complete_s = time.monotonic()
        self._control.notify()

    # --- rollouts ---------------------------------------------------------------------------------

    @property
    def num_left(self) -> int:
        """Number of groups that the stage still has to admit."""
        return self._num_left

    @property
    def num_open(self) -> int:
        """Number of groups that are being rolled out."""
        return len(self._slots.open)

    @property
    def num_finished(self) -> int:
        """Number of finished groups that no batch has taken."""
        return len(self._slots) - self.num_open

    @property
    def num_slots(self) -> int:
        """Number of groups that may be admitted and not taken at the same time."""
        return len(self._slots) + self._slots.num_free

    @property
    def num_bytes(self) -> int:
        """Size of the files of finished groups that no batch has taken."""
        return self._queue.num_bytes

    @property
    def can_admit(self) -> bool:
        """True if a group may be admitted now."""
        if self._num_left < 1 or self._slots.num_free < 1:
            return False
        # A batch must always become complete, however large its groups are.
        is_needed = len(self._slots) < self._batch_size
        return is_needed or self._queue.num_bytes < self._max_bytes

    async def admit(self) -> QueuedGroup:
        """Admit the next group, with the version that is live when this returns.

        New weights may go live while the journal is being written. A group of which something was
        kept has the version of its admission, unless it is too stale and starts anew.

        Raises:
            ValueError: there is no free slot.
        """
        if self._readmitted:
            group = self._readmitted.popleft()
            if group.number in self._begun and self._slots.has_slot_for(group.version):
                self._slots.admit(group.number, version=group.version)
                self._num_left -= 1
                return group
            group = await self._reopen(group)
        else:
            assert self._tasks is not None
            task: Task = next(self._tasks)
            version, cursor = self._slots.live, self._tasks.cursor()
            group = await self._queue.admit(task, version=version, cursor=cursor)
        while group.version != self._slots.live:
            group = await self._reopen(group)
        self._slots.admit(group.number)
        self._num_left -= 1
        return group

    async def _reopen(self, group: QueuedGroup) -> QueuedGroup:
        version = self._slots.live
        await self._queue.reopen([group.number], version=version)
        return QueuedGroup(group.number, group.task, version)

    async def finish(
        self,
        group: QueuedGroup,
        *,
        path: str | None,
        num_bytes: int,
        figures: GroupFigures,
    ) -> None:
        """Mark a group as finished, with its rollouts in the file at `path`, if it has any."""
        await self._queue.finish(group.number, path=path, num_bytes=num_bytes, figures=figures)
        self._slots.finish(group.number)
        self._notify()

    async def discard(self, group: QueuedGroup, *, path: str | None, figures: GroupFigures) -> None:
        """Mark a group as one that will not be trained on, so that another one replaces it."""
        await self._queue.discard(group.number, path=path, figures=figures)
        self._slots.discard(group.number)
        self._num_left += 1
        self._notify()

    # --- learning ---------------------------------------------------------------------------------

    @property
    def has_batch(self) -> bool:
        """True if a batch is complete and leaves behind no group that would become too stale."""
        return self._slots.has_batch

    @property
    def complete_s(self) -> float | None:
        """The time at which the next batch became complete; None: it is not yet."""
        return self._complete_s

    async def lease(self, step: int, notes: StepNotes) -> Lease:
        """Take the next batch, oldest groups first, for the training step `step`.

        Args:
            notes: data needed to repeat the step.

        Raises:
            ValueError: there is no batch (`has_batch`).
        """
        numbers = self._slots.take()
        if numbers is None:
            raise ValueError("no batch is complete")
        self._complete_s = None
        assert self._tasks is not None
        lease = await self._queue.lease(step, numbers, notes, rate_key=self._tasks.rate_key)
        self._tasks.observe(lease.outcomes)
        self._notify()
        return lease

    def learned_nothing(self) -> None:
        """Free the slots of the last batch: without a training signal, no version will follow."""
        self._slots.learned_nothing()
        self._control.notify()

    def now_live(self, version: int) -> None:
        """Free the slots of the batches that `version` was trained on: servers have its weights."""
        self._slots.now_live(version)
        self._control.notify()
