"""The learner's steps, each from its lease; what a lost learner has forgotten is done again.

    lease ──> batch (a file) ──> the learner ──> version + 1
      ▲                            │ lost: started again, it loads the newest checkpoint
      └──── the steps since then ──┘

A checkpoint is written beside the training; the groups of a step are acknowledged to the queue once
one that holds the step is complete.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agentloop.groups.queue import GroupQueue, Lease
from agentloop.training.batch import Sample, write_batch
from agentloop.training.handover import InFolder, Published, Publisher
from agentloop.training.learner import KeptLearner, Learner
from agentloop.training.resumable import ResumableLearner, tell_other_loss
from agentloop.training.run_folder import RunFolder

__all__ = ["Steps"]


class Steps:
    """Where the learner is.

    Attributes:
        step: the last one that is done. One that was lost comes back to it: who looks meanwhile
            does not see the steps that it does again.
        version: of its weights: how many of the steps had something to learn from.
    """

    def __init__(
        self,
        learner: Learner,
        queue: GroupQueue,
        folder: RunFolder,
        *,
        restored: Mapping[str, Any],
        timeout_s: float,
        say: Callable[[str], None],
        kept: KeptLearner | None = None,
        max_restarts: int = 0,
    ) -> None:
        """`restored` as `load_newest` returned it; `timeout_s` is for an answer; `kept` is the
        learner that can be started again; where it is None, one that is lost is an error."""
        self._queue = queue
        self._folder = folder
        self._timeout_s = timeout_s
        self._say = say
        self._published_in: Path | None = None  # the folder of the newest weights, in this life
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

    def state(self) -> dict[str, Any]:
        """See `Trainer`."""
        return {"step": self.step, "version": self.version}

    def stand(self, state: Mapping[str, Any]) -> None:
        """See `Trainer`: the learner itself does, which may be behind."""
        self._step, self._version = int(state.get("step", 0)), int(state.get("version", 0))

    async def redo(self, before: int) -> None:
        """See `Trainer`."""
        for lease in await self._queue.rewind(self._step):
            if lease.step < before:
                self._compare(lease, await self._learn(lease))

    async def saved(self, step: int) -> None:
        """See `Trainer`."""
        await self._queue.acknowledge(step)

    async def watch(self) -> None:
        """Until cancelled: start it again also where it is lost while nobody asks for anything.
        Raises as `learn`."""
        await self._learner.watch()

    async def learn(self, lease: Lease) -> dict[str, Any]:
        """The step of this lease; nothing where there is nothing to learn, or is not to be.

        Raises:
            LearnerError: it is lost for good, or ended.
        """
        async with self._learner.busy:  # no deadline: what it does has one
            await self._learner.hear_of_checkpoint()
            learn = partial(self._learn, lease)
            metrics = await self._learner.until_done(learn, before=lease.step)
            self.step, self.version = self._step, self._version
            return metrics

    async def publish(self, publisher: Publisher) -> Published:
        """Its weights as they are. Raises as `learn`."""

        async def publish() -> Published:
            published = await publisher.publish(str(self.version), timeout_s=self._timeout_s)
            self._published_in = published.folder if isinstance(published, InFolder) else None
            return published

        async with self._learner.busy:  # no deadline: what it does has one
            return await self._learner.until_done(publish)

    async def checkpoint(self, *, wait: bool = False) -> bool:
        """Begin to write one; with `wait` it is complete. Where there is one, nothing is done.
        False: it could not be begun, such as on a disk that is full, which is said.

        Raises:
            LearnerError: as `learn`; with `wait` also where it cannot be written.
        """
        async with self._learner.busy:  # no deadline: what it does has one
            return await self._learner.save(wait=wait)

    async def do_again(self, tell: Callable[[Lease, Mapping[str, Any]], None]) -> None:
        """The steps that no checkpoint holds, after a restart of ours; each is told of."""
        leases = await self._queue.rewind(self.step)
        if leases:
            first, last = leases[0].step, leases[-1].step
            self._say(f"Steps {first} to {last} are done again: no checkpoint holds them")
        for lease in leases:
            metrics = await self.learn(lease)
            self._compare(lease, metrics)
            await anyio.to_thread.run_sync(tell, lease, metrics)

    async def _learn(self, lease: Lease) -> dict[str, Any]:
        begun = time.monotonic()
        learns = lease.notes["learns"]
        if learns and lease.notes["resets"]:
            await self._learner.ask_once("reset_optimizer")
        path = self._folder.path / "batches" / f"step-{lease.step:05}.safetensors"
        num_learned = 0
        if learns:
            num_learned = await anyio.to_thread.run_sync(self._write_batch, path, lease)
        metrics: dict[str, Any] = {"num_learned": num_learned}
        if num_learned:
            rescue = self._learner.checkpoint_folder(f"step-{lease.step:05}-rescue")
            before = {"step": lease.step - 1, "version": self._version}
            learned = await self._learner.ask_once(
                "step", batch=str(path), rescue=rescue, state=before
            )
            path.unlink()
            self._version += 1
            metrics |= {f"learner/{name}": value for name, value in learned.items()}
        metrics["learn_s"] = time.monotonic() - begun
        self._step = lease.step
        await self._queue.done(lease.step, metrics)
        return metrics

    def _write_batch(self, path: Path, lease: Lease) -> int:
        """How many rollouts there are to learn from. One whose advantage is 0 counts all the same:
        the objective is a mean over all tokens of a group."""
        samples = [
            Sample(one["ids"], one["mask"], one["logprobs"], row["advantage"], number)
            for number, group in enumerate(lease.groups)
            if group.path is not None
            for row in self._folder.read_group(group.path)
            if row["advantage"] is not None
            for one in [row["trajectory"]]
        ]
        if not any(sample.advantage for sample in samples):
            return 0
        write_batch(path, samples)
        return len(samples)

    async def go_back(self, checkpoint: Path) -> None:
        """The run ends with the weights of this checkpoint, and no others. Raises as `learn`."""
        weights = self._folder.path / "weights"
        await anyio.to_thread.run_sync(partial(shutil.rmtree, weights, ignore_errors=True))

        async def load() -> None:
            loaded = await self._learner.ask_once("load", folder=str(checkpoint))
            self.stand(loaded["state"])
            version = str(self._version)
            folder = str(weights / version)
            await self._learner.ask_once("publish", folder=folder, version=version)

        async with self._learner.busy:  # no deadline: what it does has one
            # Where it is lost, no step is done again: what it loads then is not to be left.
            await self._learner.until_done(load, before=0)
            self.step, self.version = self._step, self._version

    async def leave_model(self) -> None:
        """Leave the learner's weights, and no others, in the run's folder. A folder that is there
        already may be of an earlier life, and other weights of that version."""
        folder = self._folder.path / "weights" / str(self.version)
        if self._published_in != folder:
            async with self._learner.busy:  # no deadline: what it does has one
                await self._learner.ask("publish", folder=str(folder), version=str(self.version))
        await anyio.to_thread.run_sync(_remove_others, folder)

    def _compare(self, lease: Lease, metrics: Mapping[str, Any]) -> None:
        before, now = (lease.result or {}).get("learner/loss"), metrics.get("learner/loss")
        tell_other_loss(self._say, lease.step, before, now)


def _remove_others(folder: Path) -> None:
    """Remove the weights of other versions, which lie beside those in `folder`."""
    for other in folder.parent.iterdir():
        if other.name.isdigit() and other != folder:
            shutil.rmtree(other, ignore_errors=True)
