"""Repeats the learner's steps of a run from its journal, and compares the results.

    a copy of the journal ──leases──> Steps (as in the run) ──> a learner of its own
                                            └──loss, digest of the weights──> equal to the run's?

Nothing of the run is changed: what is written is in its folder `replay/`. Where the run was killed
and resumed, the steps are repeated in one go: its later result counts. Only where the run went on
with other settings or on another machine is a learner started anew, from a checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import anyio.to_thread

from agentloop.errors import RunFolderError
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import RestartableLearner
from agentloop.training.learner_client.protocol import LoadRequest, ScoreRequest, TrainingState
from agentloop.training.loop.queue import GroupQueue, Lease, copy_journal
from agentloop.training.loop.steps import Steps, leased_conversations
from agentloop.training.recovery.learner_record import (
    LearnerRecord,
    learner_records,
    noted_weights,
    weights_digest,
)
from agentloop.training.recovery.resume import load_newest
from agentloop.training.run.folder import RunFolder, checkpoints_in, training_state
from agentloop.training.run.token_difference import (
    ScoredConversation,
    TokenDifferences,
    differences_of,
)
from agentloop.training.weight_sync.disk import FolderPublisher
from agentloop.training.weight_sync.settings import WeightsSettings


@dataclass(frozen=True, slots=True)
class ReplayedStep:
    """The recorded and the repeated result of a step; that of the first is where a replay begins.

    Attributes:
        loss, loss_again: None if nothing was trained on.
        weights, weights_again: digests of the weights after the step; None: not recorded.
    """

    step: int
    loss: float | None
    loss_again: float | None
    weights: str | None
    weights_again: str

    @property
    def has_same_loss(self) -> bool:
        return self.loss == self.loss_again

    @property
    def has_same_weights(self) -> bool | None:
        """True if the weights are the same to the bit; None: the run has recorded no digest."""
        return None if self.weights is None else self.weights == self.weights_again

    @property
    def differs(self) -> bool:
        return not self.has_same_loss or self.has_same_weights is False


@dataclass(frozen=True, slots=True)
class StepRange:
    """Steps in a row of the same learner."""

    learner: LearnerRecord
    first: int
    last: int


def step_ranges(records: Sequence[LearnerRecord], first: int, last: int) -> list[StepRange]:
    """Divide the steps from `first` to `last` by their learners.

    Args:
        records: records in the order of their steps; the first one is that of the run's first step.
    """

    def index_of(step: int) -> int:
        return sum(record.after < step for record in records)

    parts = []
    for index, steps in groupby(range(first, last + 1), index_of):
        same = list(steps)
        parts.append(StepRange(records[index - 1], same[0], same[-1]))
    return parts


@dataclass(frozen=True, slots=True)
class Replayer:
    """A learner for a replay.

    Attributes:
        max_tokens: size of the longest conversation that it scores.
    """

    learner: RestartableLearner
    max_tokens: int


StartLearner = Callable[[LearnerRecord], AbstractAsyncContextManager[Replayer]]


class Replay:
    """The replay of a run; create it with `Replay.open`."""

    def __init__(
        self, run: Path, folder: RunFolder, queue: GroupQueue, leases: Mapping[int, Lease]
    ) -> None:
        self._run = run
        self._folder = folder
        self._queue = queue
        self._leases = leases

    @classmethod
    @asynccontextmanager
    async def open(cls, run: Path) -> AsyncIterator[Replay]:
        """Copy the journal of a run, and lock the folder of its replay.

        Raises:
            RunFolderError: the run has no journal or no steps, it is damaged, or another replay is
                in progress.
        """
        run = Path(await anyio.Path(await anyio.Path(run).expanduser()).resolve())
        if not (run / "queue.sqlite").is_file():
            raise RunFolderError(
                f"--replay: {run}: no journal (queue.sqlite): only runs of train have one"
            )
        await anyio.to_thread.run_sync(_link_groups, run)
        async with RunFolder.open(run / "replay") as folder:
            await anyio.to_thread.run_sync(_clear, folder.path)
            journal = folder.path / "journal.sqlite"
            await anyio.to_thread.run_sync(copy_journal, run / "queue.sqlite", journal)
            try:
                async with GroupQueue.open(journal) as queue:
                    done = [lease for lease in await queue.rewind(0) if lease.result is not None]
                    if not done:
                        raise RunFolderError(f"--replay: {run}: no step of this run is complete")
                    yield cls(run, folder, queue, {lease.step: lease for lease in done})
            finally:
                await anyio.to_thread.run_sync(_clear, folder.path)

    @property
    def last(self) -> int:
        """The last step of the run that is complete."""
        return max(self._leases)

    @property
    def logs(self) -> Path:
        """The folder for the logs of the learner."""
        return self._folder.path / "logs"

    async def repeat(
        self,
        start: StartLearner,
        *,
        first: int,
        last: int,
        timeout_s: float,
        on_step: Callable[[ReplayedStep], None],
        on_tokens: Callable[[int, TokenDifferences], None] | None = None,
        say: Callable[[str], None],
    ) -> bool:
        """Repeat steps until the first one that differs; return whether all are the same.

        Steps before `first` are repeated, too, from the last checkpoint before it that the run has
        kept; from the model that the run began with if there is none, or if `first` is 1.

        Args:
            start: starts a learner with the run's settings.
            on_step: told the result of each step, and of the weights that the replay begins with.
            on_tokens: told how engine and learner differ in the batch of each step from `first` on,
                as it was before the step.

        Raises:
            RunFolderError: what is needed of the run is missing or damaged.
            LearnerError: the learner has failed.
        """
        checkpoint, state = self._begin(first)
        await anyio.to_thread.run_sync(self._check, state.step, first, last)
        parts = step_ranges(await learner_records(self._queue), state.step + 1, last)
        for part in parts:
            async with start(part.learner) as replayer:
                learner = replayer.learner
                restored: TrainingState | None
                if part is not parts[0]:
                    restored = await load_newest(learner, self._folder, timeout_s=timeout_s)
                elif checkpoint is not None:
                    load = LoadRequest(folder=checkpoint)
                    restored = (await learner.ask(load, timeout_s=timeout_s)).state
                else:
                    restored = None
                queue, folder = self._queue, self._folder
                steps = Steps(
                    learner, queue, folder, restored=restored, timeout_s=timeout_s, say=say
                )
                publisher = FolderPublisher(learner, folder.path / "weights", WeightsSettings())
                if part is parts[0]:
                    initial = await self._publish(steps, publisher, None, None)
                    on_step(initial)
                    if initial.differs:
                        return False
                for step in range(part.first, part.last + 1):
                    lease = self._leases[step]
                    if on_tokens is not None and step >= first:
                        on_tokens(step, await self._differences(replayer, lease, timeout_s))
                    before = (lease.result or {}).get("learner/loss")
                    learned = await steps.learn(lease)
                    repeated = await self._publish(steps, publisher, before, learned.loss)
                    on_step(repeated)
                    if repeated.differs:
                        return False
                if part is not parts[-1]:
                    await steps.checkpoint(wait=True)
        return True

    def _begin(self, first: int) -> tuple[Path | None, TrainingState]:
        """Return the checkpoint to begin with, if there is one, and its state."""
        held = [step for step in checkpoints_in(self._run) if 0 < step < first]
        if not held:
            return None, TrainingState(step=0)
        checkpoint = checkpoints_in(self._run)[max(held)]
        return checkpoint, training_state(checkpoint)

    def _check(self, begin: int, first: int, last: int) -> None:
        """Check that all is there before a learner is started. Raises RunFolderError."""
        if not 1 <= first <= last <= self.last:
            raise RunFolderError(
                f"--replay: {self._run} has the steps 1 to {self.last}, not {first} to {last}"
            )
        for step in range(begin + 1, last + 1):
            if step not in self._leases:
                raise RunFolderError(f"--replay: {self._run}: the journal lacks step {step}")
            lease = self._leases[step]
            if not lease.notes.learns:
                raise RunFolderError(
                    f"--replay: {self._run}: loop.learn is off: it has not learned"
                )
            for group in lease.groups:
                if group.path is not None and not (self._run / group.path).is_file():
                    raise RunFolderError(
                        f"--replay: step {step} needs {self._run / group.path}, which is missing"
                    )

    async def _publish(
        self, steps: Steps, publisher: FolderPublisher, before: float | None, loss: float | None
    ) -> ReplayedStep:
        """Publish the weights as the run does, and compare them with its."""
        recorded = await noted_weights(self._queue, steps.step)
        published = await steps.publish(publisher)
        await publisher.tidy()
        return ReplayedStep(steps.step, before, loss, recorded, weights_digest(published.sha256))

    async def _differences(
        self, replayer: Replayer, lease: Lease, timeout_s: float
    ) -> TokenDifferences:
        """Score a step's batch with the learner's weights before the step."""
        folder = self._folder.path / "batches"
        trajectories = await anyio.to_thread.run_sync(
            lambda: [row.trajectory for _, row, _ in leased_conversations(self._folder, lease)]
        )
        fitting = [
            trajectory for trajectory in trajectories if len(trajectory.ids) <= replayer.max_tokens
        ]
        if not fitting:
            return differences_of([])
        samples = [*map(Sample.of, fitting)]
        batch, out = folder / "scored.safetensors", folder / "scores.safetensors"
        await anyio.to_thread.run_sync(write_batch, batch, samples)
        await replayer.learner.ask(ScoreRequest(batch=batch, out=out), timeout_s=timeout_s)
        scores = await anyio.to_thread.run_sync(_logprobs_in, out)
        scored, start = [], 0
        for trajectory in fitting:
            end = start + len(trajectory.ids)
            scored.append(
                ScoredConversation(
                    name=trajectory.id,
                    ids=trajectory.ids,
                    mask=trajectory.mask,
                    engine=trajectory.logprobs,
                    learner=scores[start:end],
                    versions=trajectory.versions,
                )
            )
            start = end
        return await anyio.to_thread.run_sync(differences_of, scored)


def _logprobs_in(path: Path) -> list[float]:
    from safetensors.numpy import load

    logprobs: list[float] = load(path.read_bytes())["logprobs"].tolist()
    return logprobs


def _link_groups(run: Path) -> None:
    """Let `replay/` have the run's groups. Raises RunFolderError if it cannot be written."""
    try:
        (run / "replay").mkdir(exist_ok=True)
        with suppress(FileExistsError):
            os.symlink("../trajectories", run / "replay" / "trajectories")
    except OSError as error:
        raise RunFolderError(f"--replay: {run / 'replay'}: {error.strerror or error}") from error


def _clear(folder: Path) -> None:
    """Remove what a replay needs only while it runs; its logs stay."""
    for name in ("weights", "checkpoints", "batches"):
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).mkdir()
    for file in folder.glob("journal.sqlite*"):
        file.unlink()
