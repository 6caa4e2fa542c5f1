"""The learner's steps, each from a leased batch; steps lost with a learner are repeated.

    lease ──> batch (a file) ──> the learner ──> version + 1
      ▲                            │ lost: restart and load the newest checkpoint
      └──── the steps since then ──┘

Checkpoints are written while training continues. The groups of a step are acknowledged to the queue
when a checkpoint that includes the step is complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from agentloop.aio import in_run_thread
from agentloop.training.credit.rule import TokenCredit
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import KeptLearner, Learner
from agentloop.training.learner_client.protocol import (
    LoadRequest,
    PublishRequest,
    ResetOptimizerRequest,
    StepRequest,
    TrainingState,
)
from agentloop.training.learner_record import note_weights
from agentloop.training.queue import GroupQueue, Lease
from agentloop.training.resume import ResumableLearner, tell_other_loss
from agentloop.training.run_folder import RunFolder
from agentloop.training.step_metrics import Learned
from agentloop.training.weight_sync.transport import PublishedWeights, Publisher
from agentloop.trajectory import Trajectory

__all__ = ["LeasedSample", "Steps", "leased_samples"]


class Steps:
    """The training steps of a learner (`Trainer`).

    Attributes:
        step: the last completed step; unchanged while a recovered learner repeats steps.
        version: version of the learner's weights: the number of steps with anything to train on.
    """

    def __init__(
        self,
        learner: Learner,
        queue: GroupQueue,
        folder: RunFolder,
        *,
        restored: TrainingState | None,
        timeout_s: float,
        say: Callable[[str], None],
        kept: KeptLearner | None = None,
        max_restarts: int = 0,
    ) -> None:
        """Take the arguments of `ResumableLearner`."""
        self._queue = queue
        self._folder = folder
        self._timeout_s = timeout_s
        self._say = say
        self._published_in: Path | None = (
            None  # folder of the newest weights published by this process
        )
        self._learner = ResumableLearner(
            learner,
            folder,
            self,
            restored=restored,
            timeout_s=timeout_s,
            say=say,
            kept=kept,
            max_restarts=max_restarts,
        )
        self.step, self.version = self._step, self._version

    def state(self) -> TrainingState:
        """Implement `Trainer`."""
        return TrainingState(step=self.step, version=self.version)

    def stand(self, state: TrainingState) -> None:
        """Implement `Trainer`. The learner may be behind `step` while steps are repeated."""
        self._step, self._version = state.step, state.version

    async def redo(self, before: int) -> None:
        """Implement `Trainer`."""
        for lease in await self._queue.rewind(self._step):
            if lease.step < before:
                self._compare(lease, await self._learn(lease))

    async def saved(self, step: int) -> None:
        """Implement `Trainer`."""
        await self._queue.acknowledge(step)

    async def watch(self) -> None:
        """Recover the learner also if it is lost between requests, until cancelled.

        Raises:
            LearnerError: as in `learn`.
        """
        await self._learner.watch()

    async def learn(self, lease: Lease) -> Learned:
        """Train on a leased batch.

        The learner is not called if there is nothing to train on or training is disabled.

        Raises:
            LearnerError: the learner is lost for good, or has ended itself.
        """
        async with self._learner.busy:  # no deadline: requests have one
            await self._learner.hear_of_checkpoint()
            learn = partial(self._learn, lease)
            learned = await self._learner.until_done(learn, before=lease.step)
            self.step, self.version = self._step, self._version
            return learned

    async def publish(self, publisher: Publisher) -> PublishedWeights:
        """Publish the current weights. Raises the errors of `learn`."""

        async def publish() -> PublishedWeights:
            published = await publisher.publish(str(self.version), timeout_s=self._timeout_s)
            self._published_in = published.folder
            await self._note_weights(published.sha256)
            return published

        async with self._learner.busy:  # no deadline: requests have one
            return await self._learner.until_done(publish)

    async def checkpoint(self, *, wait: bool = False) -> bool:
        """Start writing a checkpoint; see `ResumableLearner.save`."""
        async with self._learner.busy:  # no deadline: requests have one
            return await self._learner.save(wait=wait)

    async def do_again(self, on_done: Callable[[Lease, Learned], Awaitable[None]]) -> None:
        """Repeat the steps since the newest checkpoint after a restart of this process.

        Args:
            on_done: called after each of them.
        """
        leases = await self._queue.rewind(self.step)
        if leases:
            first, last = leases[0].step, leases[-1].step
            self._say(f"Repeating steps {first} to {last}, which are not in a checkpoint")
        for lease in leases:
            learned = await self.learn(lease)
            self._compare(lease, learned)
            await on_done(lease, learned)

    async def _learn(self, lease: Lease) -> Learned:
        begun = time.monotonic()
        learns = lease.notes.learns
        if learns and lease.notes.resets:
            await self._learner.ask_once(ResetOptimizerRequest())
        path = self._folder.path / "batches" / f"step-{lease.step:05}.safetensors"
        num_learned = 0
        if learns:
            num_learned = await in_run_thread(self._write_batch, path, lease)
        metrics: Mapping[str, Any] = {}
        if num_learned:
            rescue = self._learner.checkpoint_folder(f"step-{lease.step:05}-rescue")
            before = TrainingState(step=lease.step - 1, version=self._version)
            reply = await self._learner.ask_once(
                StepRequest(batch=path, rescue=rescue, state=before)
            )
            path.unlink()
            self._version += 1
            metrics = reply.metrics()
        learned = Learned(num_learned, time.monotonic() - begun, metrics)
        self._step = lease.step
        await self._queue.done(lease.step, learned.row())
        return learned

    def _write_batch(self, path: Path, lease: Lease) -> int:
        """Write the batch file and return the number of rollouts in it.

        Each conversation of a rollout is a sample. Those with an advantage of 0 are included: the
        objective is a mean over all tokens of a group.
        """
        leased = list(leased_samples(self._folder, lease))
        samples = [
            Sample(
                sample.trajectory.ids,
                sample.trajectory.mask,
                sample.trajectory.logprobs,
                sample.credit.advantages,
                sample.group,
                sample.credit.weights,
            )
            for sample in leased
        ]
        rollouts = {(sample.group, sample.rollout) for sample in leased}
        if not any(sample.credit.has_signal for sample in leased):
            return 0
        write_batch(path, samples)
        return len(rollouts)

    async def go_back(self, checkpoint: Path) -> None:
        """Load a checkpoint and leave only its weights in the run's folder.

        Raises:
            LearnerError: as in `learn`.
        """
        weights = self._folder.path / "weights"
        await in_run_thread(partial(shutil.rmtree, weights, ignore_errors=True))

        async def load() -> None:
            loaded = await self._learner.ask_once(LoadRequest(folder=checkpoint))
            self.stand(loaded.state)
            version = str(self._version)
            await self._learner.ask_once(PublishRequest(folder=weights / version, version=version))

        async with self._learner.busy:  # no deadline: requests have one
            # If the learner is lost, do not repeat steps: `load` replaces its weights anyway.
            await self._learner.until_done(load, before=0)
            self.step, self.version = self._step, self._version

    async def leave_model(self) -> None:
        """Leave only the learner's current weights in the run's folder.

        Weights of this version published by an earlier process may differ, and are replaced.
        """
        folder = self._folder.path / "weights" / str(self.version)
        if self._published_in != folder:
            async with self._learner.busy:  # no deadline: requests have one
                version = str(self.version)
                request = PublishRequest(folder=folder, version=version)
                await self._note_weights((await self._learner.ask(request)).sha256)
        await in_run_thread(_remove_others, folder)

    async def _note_weights(self, sha256: Mapping[str, str]) -> None:
        """Record a digest of the weights after the last step, unless the checksums are unknown."""
        if sha256:
            await note_weights(self._queue, self.step, sha256)

    def _compare(self, lease: Lease, learned: Learned) -> None:
        before = (lease.result or {}).get("learner/loss")
        tell_other_loss(self._say, lease.step, before, learned.loss)


@dataclass(frozen=True, slots=True)
class LeasedSample:
    """A conversation that a step trains on.

    Attributes:
        group: place of its group in the lease.
        rollout: number of its rollout in the group.
    """

    group: int
    rollout: int
    trajectory: Trajectory
    credit: TokenCredit


def leased_samples(folder: RunFolder, lease: Lease) -> Iterator[LeasedSample]:
    """Yield the conversations that a step trains on, in order.

    Raises:
        RunFolderError: the file of a group is missing or damaged.
    """
    for place, group in enumerate(lease.groups):
        for row in [] if group.path is None else folder.read_group(group.path):
            if row["credit"] is not None:
                trajectory = Trajectory.from_dict(row["trajectory"])
                if trajectory.num_sampled_tokens:
                    credit = TokenCredit(**row["credit"])
                    yield LeasedSample(place, row["rollout"], trajectory, credit)


def _remove_others(folder: Path) -> None:
    """Remove the weights of other versions next to those in `folder`."""
    for other in folder.parent.iterdir():
        if other.name.isdigit() and other != folder:
            shutil.rmtree(other, ignore_errors=True)
