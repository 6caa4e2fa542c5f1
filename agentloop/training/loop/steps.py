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
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path

from agentloop.aio import in_run_thread
from agentloop.rollouts.record import ConversationRow, TokenCredit
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import RestartableLearner
from agentloop.training.learner_client.protocol import (
    LoadRequest,
    PublishRequest,
    ResetOptimizerRequest,
    StepRequest,
    TrainingState,
)
from agentloop.training.loop.queue import GroupQueue, Lease
from agentloop.training.recovery.learner_record import note_weights
from agentloop.training.recovery.resume import ResumableTraining, report_other_loss
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.step_metrics import Learned
from agentloop.training.weight_sync.transport import PublishedWeights, Publisher


class Steps(ResumableTraining):
    """The training steps of a run; their samples are those of leased groups."""

    def __init__(
        self,
        learner: RestartableLearner,
        queue: GroupQueue,
        folder: RunFolder,
        *,
        restored: TrainingState | None,
        timeout_s: float,
        say: Callable[[str], None],
        max_restarts: int = 0,
        lending: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        """Take the arguments of `ResumableTraining`, the journal, and more.

        Args:
            lending: returns a context in which servers leave the GPUs' memory to the learner.
        """
        super().__init__(
            learner,
            folder,
            restored=restored,
            timeout_s=timeout_s,
            say=say,
            max_restarts=max_restarts,
        )
        self._queue = queue
        self._lending = lending
        self._published_in: Path | None = None  # folder of the newest weights of this process

    @property
    def step(self) -> int:
        """The last completed step; unchanged while a recovered learner repeats steps."""
        return self.state.step

    @property
    def version(self) -> int:
        """The version of the weights: the number of steps with anything to train on."""
        return self.state.version

    @property
    def newest(self) -> str:
        """The version of the weights that the learner has at the moment."""
        return str(self._learner_state.version)

    async def learn(self, lease: Lease) -> Learned:
        """Train on a leased batch.

        The learner is not called if there is nothing to train on or training is disabled.

        Raises:
            LearnerError: the learner is lost for good, or has ended itself.
        """
        return await self._train_step(lease.step, partial(self._learn, lease))

    async def publish(self, publisher: Publisher) -> PublishedWeights:
        """Publish the current weights. Raises the errors of `learn`."""

        async def publish() -> PublishedWeights:
            published = await publisher.publish(str(self.version), timeout_s=self._timeout_s)
            self._published_in = published.folder
            await self._note_weights(published.sha256)
            return published

        async with self._busy:  # no deadline: requests have one
            return await self._retry(publish)

    async def repeat_since_checkpoint(
        self, on_done: Callable[[Lease, Learned], Awaitable[None]]
    ) -> None:
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

    async def _repeat_steps(self, before: int) -> None:
        for lease in await self._queue.rewind(self._learner_state.step):
            if lease.step < before:
                self._compare(lease, await self._learn(lease))

    async def _checkpoint_complete(self, step: int) -> None:
        await self._queue.acknowledge(step)

    async def _learn(self, lease: Lease) -> Learned:
        started_s = time.monotonic()
        learns = lease.notes.learns
        if learns and lease.notes.resets:
            await self._ask_once(ResetOptimizerRequest())
        path = self._folder.path / "batches" / f"step-{lease.step:05}.safetensors"
        num_learned, version = 0, self._learner_state.version
        if learns:
            num_learned = await in_run_thread(self._write_batch, path, lease)
        metrics: Mapping[str, float | None] = {}
        if num_learned:
            rescue = self._checkpoint_folder(f"step-{lease.step:05}-rescue")
            before = TrainingState(step=lease.step - 1, version=version)
            async with self._lending():
                reply = await self._ask_once(StepRequest(batch=path, rescue=rescue, state=before))
                version += 1
                self._learner_state = TrainingState(step=lease.step, version=version)
            path.unlink()
            metrics = reply.metrics()
        learned = Learned(num_learned, time.monotonic() - started_s, metrics)
        self._learner_state = TrainingState(step=lease.step, version=version)
        await self._queue.record_result(lease.step, learned.row())
        return learned

    def _write_batch(self, path: Path, lease: Lease) -> int:
        """Write the batch file and return the number of rollouts in it.

        Each conversation of a rollout is a sample. Those with an advantage of 0 are included: the
        objective is a mean over all tokens of a group.
        """
        samples, rollouts, has_signal = [], set(), False
        for place, row, credit in leased_conversations(self._folder, lease):
            samples.append(Sample.of(row.trajectory, credit.advantages, place, credit.weights))
            rollouts.add((place, row.rollout))
            has_signal |= credit.has_signal
        if not has_signal:
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
            self._learner_state = (await self._ask_once(LoadRequest(folder=checkpoint))).state
            version = str(self._learner_state.version)
            await self._ask_once(PublishRequest(folder=weights / version, version=version))

        async with self._busy:  # no deadline: requests have one
            # If the learner is lost, do not repeat steps: `load` replaces its weights anyway.
            await self._retry(load, before=0)
            self.state = self._learner_state

    async def leave_model(self) -> None:
        """Leave only the learner's current weights in the run's folder.

        Weights of this version published by an earlier process may differ, and are replaced.
        """
        folder = self._folder.path / "weights" / str(self.version)
        if self._published_in != folder:
            async with self._busy:  # no deadline: requests have one
                request = PublishRequest(folder=folder, version=str(self.version))
                await self._note_weights((await self._ask(request)).sha256)
        await in_run_thread(_remove_others, folder)

    async def _note_weights(self, sha256: Mapping[str, str]) -> None:
        """Record a digest of the weights after the last step, unless the checksums are unknown."""
        if sha256:
            await note_weights(self._queue, self.step, sha256)

    def _compare(self, lease: Lease, learned: Learned) -> None:
        before = (lease.result or {}).get("learner/loss")
        report_other_loss(self._say, lease.step, before, learned.loss)


def leased_conversations(
    folder: RunFolder, lease: Lease
) -> Iterator[tuple[int, ConversationRow, TokenCredit]]:
    """Yield the conversations that a step trains on, in order, with the places of their groups.

    Raises:
        RunFolderError: the file of a group is missing or damaged.
    """
    for place, group in enumerate(lease.groups):
        for row in [] if group.path is None else folder.read_conversations(group.path):
            if row.credit is not None and row.trajectory.num_sampled_tokens:
                yield place, row, row.credit


def _remove_others(folder: Path) -> None:
    """Remove the weights of other versions next to those in `folder`."""
    for path in folder.parent.iterdir():
        if path.name.isdigit() and path != folder:
            shutil.rmtree(path, ignore_errors=True)
