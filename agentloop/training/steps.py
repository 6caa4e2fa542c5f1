"""The learner's steps, each from its lease; what a lost learner has forgotten is done again.

    lease ──> batch (a file) ──> the learner ──> version + 1
      ▲                            │ lost: started again, it loads the newest checkpoint
      └──── the steps since then ──┘

A checkpoint is written beside the training; the groups of a step are acknowledged to the queue once
one that holds the step is complete.
"""

from __future__ import annotations

import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from agentloop.groups.queue import GroupQueue, Lease
from agentloop.inference.keep_alive import Restarts
from agentloop.training.batch import Sample, write_batch
from agentloop.training.handover import InFolder, Published, Publisher
from agentloop.training.learner import (
    KeptLearner,
    Learner,
    LearnerError,
    LearnerLost,
    LearnerRefused,
)
from agentloop.training.run_folder import RunFolder

__all__ = ["Steps", "load_newest"]

log = logging.getLogger(__name__)

_SAME_LOSS = 1e-5  # of a step that is done again, relative


async def load_newest(learner: Learner, folder: RunFolder, *, timeout_s: float) -> dict[str, Any]:
    """The learner loads the newest checkpoint; returns the state that it was saved with, which is
    empty where there is none. Raises LearnerError."""
    if (checkpoint := folder.checkpoint) is None:
        return {}
    loaded = await learner.ask("load", folder=str(checkpoint), timeout_s=timeout_s)
    state: dict[str, Any] = loaded["state"]
    return state


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
        self._learner = learner
        self._busy = anyio.Lock()
        self._num_revived = 0
        self._queue = queue
        self._folder = folder
        self._timeout_s = timeout_s
        self._say = say
        self._kept = kept
        self._restarts = Restarts(max_restarts)
        self._writing: tuple[int, str] | None = None  # step and folder of a checkpoint
        self._saved_step = -1
        self._published_in: Path | None = None  # the folder of the newest weights, in this life
        self._stand(restored)
        self.step, self.version = self._step, self._version

    def _stand(self, state: Mapping[str, Any]) -> None:
        """The learner itself does, which may be behind."""
        self._step, self._version = int(state.get("step", 0)), int(state.get("version", 0))
        if state:
            self._saved_step = self._step

    async def watch(self) -> None:
        """Until cancelled: start it again also where it is lost while nobody asks for anything.
        Raises as `learn`."""
        while self._kept is not None:
            num_revived = self._num_revived
            how = await self._kept.lost()
            async with self._busy:  # no deadline: what it does has one
                if num_revived == self._num_revived:  # who asked would have done it
                    await self._revive(LearnerLost(how), before=self.step + 1)

    async def learn(self, lease: Lease) -> dict[str, Any]:
        """The step of this lease; nothing where there is nothing to learn, or is not to be.

        Raises:
            LearnerError: it is lost for good, or ended.
        """
        async with self._busy:  # no deadline: what it does has one
            await self._hear_of_checkpoint(wait=False)
            while True:
                try:
                    metrics = await self._learn(lease)
                except LearnerLost as error:
                    await self._revive(error, before=lease.step)
                else:
                    self.step, self.version = self._step, self._version
                    return metrics

    async def publish(self, publisher: Publisher) -> Published:
        """Its weights as they are. Raises as `learn`."""
        async with self._busy:  # no deadline: what it does has one
            while True:
                try:
                    published = await publisher.publish(
                        str(self.version), timeout_s=self._timeout_s
                    )
                    self._published_in = (
                        published.folder if isinstance(published, InFolder) else None
                    )
                    return published
                except LearnerLost as error:
                    await self._revive(error, before=self.step + 1)

    async def checkpoint(self, *, wait: bool = False) -> bool:
        """Begin to write one; with `wait` it is complete. Where there is one, nothing is done.
        False: it could not be begun, such as on a disk that is full, which is said.

        Raises:
            LearnerError: as `learn`; with `wait` also where it cannot be written.
        """
        async with self._busy:  # no deadline: what it does has one
            if wait:
                await self._hear_of_checkpoint(wait=True)
            if self.step in (self._saved_step, self._writing and self._writing[0]):
                return True
            step, folder = self.step, self._folder.path / "checkpoints" / f"step-{self.step:05}"
            state = {"step": step, "version": self.version}
            try:
                await self._ask("save", folder=str(folder), state=state, beside=not wait)
            except LearnerRefused as error:
                if wait:
                    raise
                self._say(f"No checkpoint of step {step} could be begun: {error}")
                return False
            if wait:
                await self._complete(step)
            else:
                self._writing = step, str(folder)
            return True

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
            await self._ask_once("reset_optimizer")
        path = self._folder.path / "batches" / f"step-{lease.step:05}.safetensors"
        num_learned = 0
        if learns:
            num_learned = await anyio.to_thread.run_sync(self._write_batch, path, lease)
        metrics: dict[str, Any] = {"num_learned": num_learned}
        if num_learned:
            rescue = self._folder.path / "checkpoints" / f"step-{lease.step:05}-rescue"
            before = {"step": lease.step - 1, "version": self._version}
            learned = await self._ask_once(
                "step", batch=str(path), rescue=str(rescue), state=before
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

    async def _revive(self, error: LearnerLost, *, before: int) -> None:
        """It is started again, and does all steps before that one. Raises as `learn`."""
        while True:
            if self._kept is None:
                raise error
            delay_s = self._restarts.died(time.monotonic())
            if delay_s is None:
                raise LearnerError(f"lost too often (ranks.max_restarts): {error}") from error
            self._say(f"The learner is lost, and started again: {str(error).splitlines()[0]}")
            log.error("the learner is lost, and started again: %s", error)
            self._writing = None
            await anyio.sleep(delay_s)
            try:
                await self._kept.restart()
                self._num_revived += 1
                self._saved_step = -1
                self._stand(
                    await load_newest(self._learner, self._folder, timeout_s=self._timeout_s)
                )
                for lease in await self._queue.rewind(self._step):
                    if lease.step < before:
                        self._compare(lease, await self._learn(lease))
                return
            except LearnerLost as lost:
                error = lost

    async def _hear_of_checkpoint(self, *, wait: bool) -> None:
        """Whether the one that is being written is complete."""
        if self._writing is None:
            return
        step, folder = self._writing
        saved = await self._ask("saved", wait=wait)
        if saved.get("folder") == folder:
            await self._complete(step)
        elif saved.get("failed"):
            self._say(f"The checkpoint of step {step} could not be written: {saved['failed']}")
            self._writing = None

    async def _complete(self, step: int) -> None:
        """There is a checkpoint of that step."""
        await self._queue.acknowledge(step)
        self._saved_step, self._writing = step, None

    async def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """What changes nothing that was learned. Raises as `learn`."""
        while True:
            try:
                return await self._ask_once(op, **arguments)
            except LearnerLost as error:
                await self._revive(error, before=self.step + 1)

    async def _ask_once(self, op: str, **arguments: Any) -> dict[str, Any]:
        return await self._learner.ask(op, timeout_s=self._timeout_s, **arguments)

    async def go_back(self, checkpoint: Path) -> None:
        """The run ends with the weights of this checkpoint, and no others. Raises as `learn`."""
        weights = self._folder.path / "weights"
        await anyio.to_thread.run_sync(partial(shutil.rmtree, weights, ignore_errors=True))
        async with self._busy:  # no deadline: what it does has one
            while True:
                try:
                    loaded = await self._ask_once("load", folder=str(checkpoint))
                    self._stand(loaded["state"])
                    version = str(self._version)
                    await self._ask_once("publish", folder=str(weights / version), version=version)
                    break
                except LearnerLost as error:  # what it loads then is not to be left
                    await self._revive(error, before=0)
            self.step, self.version = self._step, self._version

    async def leave_model(self) -> None:
        """Leave the learner's weights, and no others, in the run's folder. A folder that is there
        already may be of an earlier life, and other weights of that version."""
        folder = self._folder.path / "weights" / str(self.version)
        if self._published_in != folder:
            async with self._busy:  # no deadline: what it does has one
                await self._ask("publish", folder=str(folder), version=str(self.version))
        await anyio.to_thread.run_sync(_remove_others, folder)

    def _compare(self, lease: Lease, metrics: Mapping[str, Any]) -> None:
        """The same batch on the same weights: another loss would be another run."""
        before, now = (lease.result or {}).get("learner/loss"), metrics.get("learner/loss")
        if before is None or now is None:
            return
        if not math.isclose(before, now, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS):
            self._say(f"Step {lease.step} had the loss {before:.6g}, and done again {now:.6g}")


def _remove_others(folder: Path) -> None:
    """Remove the weights of other versions, which lie beside those in `folder`."""
    for other in folder.parent.iterdir():
        if other.name.isdigit() and other != folder:
            shutil.rmtree(other, ignore_errors=True)
