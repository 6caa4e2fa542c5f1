"""Going on from a checkpoint, after the run was killed or the learner was lost.

    request ──> learner ──lost──> restart ──> load the newest checkpoint ──> redo steps ──> request

A `Trainer` provides the state and repeats steps; everything else is the same for training on
rollouts (steps.py) and on dialogues (sft.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

import anyio

from agentloop.inference.processes.restarts import Restarts
from agentloop.training.learner_client.client import (
    KeptLearner,
    Learner,
    LearnerError,
    LearnerLost,
    LearnerRefused,
)
from agentloop.training.learner_client.protocol import (
    LoadRequest,
    Reply,
    Request,
    SavedRequest,
    SaveRequest,
    TrainingState,
)
from agentloop.training.run_folder import RunFolder

__all__ = ["ResumableLearner", "Trainer", "load_newest", "tell_other_loss"]

log = logging.getLogger(__name__)

_SAME_LOSS = 1e-5  # relative tolerance of the loss of a repeated step

T = TypeVar("T")
R = TypeVar("R", bound=Reply)


class Trainer(Protocol):
    """Trains a learner step by step, and can repeat steps after a restart."""

    @property
    def step(self) -> int:
        """The last completed step. Repeating steps does not change it."""
        ...

    def state(self) -> TrainingState:
        """Return the state to save with a checkpoint."""
        ...

    def stand(self, state: TrainingState) -> None:
        """Take note that the learner has this state."""
        ...

    async def redo(self, before: int) -> None:
        """Repeat all steps after the learner's state, up to but excluding `before`.

        Raises:
            LearnerError: the learner failed.
        """
        ...

    async def saved(self, step: int) -> None:
        """Take note that a checkpoint of this step is complete."""
        ...


async def load_newest(
    learner: Learner, folder: RunFolder, *, timeout_s: float
) -> TrainingState | None:
    """Load the newest checkpoint; return the state it was saved with, or None if there is none.

    Raises:
        LearnerError: the learner failed.
    """
    if (checkpoint := folder.checkpoint) is None:
        return None
    return (await learner.ask(LoadRequest(folder=checkpoint), timeout_s=timeout_s)).state


def tell_other_loss(
    say: Callable[[str], None], step: int, before: float | None, now: float | None
) -> None:
    """Report if a repeated step had another loss than before.

    The same batch on the same weights must have the same loss; otherwise the run has diverged from
    the original one.
    """
    if before is None or now is None:
        return
    if not math.isclose(before, now, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS):
        say(f"Step {step} had a loss of {before:.6g}, but of {now:.6g} when it was repeated")


class ResumableLearner:
    """A learner with its checkpoints and its recovery after a loss.

    Attributes:
        busy: lock that must be held during requests, since `watch` makes requests, too.
    """

    def __init__(
        self,
        learner: Learner,
        folder: RunFolder,
        trainer: Trainer,
        *,
        restored: TrainingState | None,
        timeout_s: float,
        say: Callable[[str], None],
        kept: KeptLearner | None = None,
        max_restarts: int = 0,
    ) -> None:
        """
        Args:
            restored: the result of `load_newest`.
            timeout_s: time limit of a request.
            kept: the learner, if it may be restarted; None: a lost learner is an error.
            max_restarts: restarts in ten minutes.
        """
        self.busy = anyio.Lock()
        self._learner = learner
        self._folder = folder
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._say = say
        self._kept = kept
        self._restarts = Restarts(max_restarts)
        self._num_revived = 0
        self._writing: tuple[int, Path] | None = (
            None  # step and folder of the checkpoint being written
        )
        self._stand(restored)

    def _stand(self, state: TrainingState | None) -> None:
        """Take note of the state of the newest checkpoint, which the learner has loaded."""
        self._saved_step = -1 if state is None else state.step
        self._trainer.stand(state or TrainingState(step=0))

    async def ask_once(self, request: Request[R]) -> R:
        """Send a request, without recovery. Raises LearnerError."""
        return await self._learner.ask(request, timeout_s=self._timeout_s)

    async def ask(self, request: Request[R]) -> R:
        """Send a request that does not train, and repeat it if the learner was lost.

        Raises:
            LearnerError: the learner is lost for good, or has ended itself.
        """
        return await self.until_done(lambda: self.ask_once(request))

    async def until_done(self, work: Callable[[], Awaitable[T]], before: int | None = None) -> T:
        """Run `work` and return its result; start it again after a recovery from a lost learner.

        Args:
            before: the recovery repeats the steps before this one; None: all completed steps.

        Raises:
            LearnerError: as in `ask`.
        """
        while True:
            try:
                return await work()
            except LearnerLost as error:
                await self._revive(error, before)

    async def watch(self) -> None:
        """Recover the learner also if it is lost between requests, until cancelled.

        Raises:
            LearnerError: as in `ask`.
        """
        while self._kept is not None:
            num_revived = self._num_revived
            how = await self._kept.lost()
            async with self.busy:  # no deadline: requests have one
                if num_revived == self._num_revived:  # otherwise a request has recovered it
                    await self._revive(LearnerLost(how), None)

    async def save(self, *, wait: bool = False) -> bool:
        """Start writing a checkpoint, unless there is one of this step.

        Args:
            wait: wait until it is complete.

        Returns:
            False if it could not be started, for example because the disk is full; this is
            reported.

        Raises:
            LearnerError: as in `ask`; with `wait` also if the checkpoint cannot be written.
        """
        if wait:
            await self.hear_of_checkpoint(wait=True)
        step = self._trainer.step
        if step in (self._saved_step, self._writing and self._writing[0]):
            return True
        folder, state = self.checkpoint_folder(f"step-{step:05}"), self._trainer.state()
        try:
            await self.ask(SaveRequest(folder=folder, state=state, beside=not wait))
        except LearnerRefused as error:
            if wait:
                raise
            self._say(f"The checkpoint of step {step} could not be started: {error}")
            return False
        if wait:
            await self._complete(step)
        else:
            self._writing = step, folder
        return True

    def checkpoint_folder(self, name: str) -> Path:
        return self._folder.path / "checkpoints" / name

    async def hear_of_checkpoint(self, *, wait: bool = False) -> None:
        """Check whether the checkpoint being written is complete. Raises the errors of `ask`."""
        if self._writing is None:
            return
        step, folder = self._writing
        saved = await self.ask(SavedRequest(wait=wait))
        if saved.folder == folder:
            await self._complete(step)
        elif saved.failed:
            self._say(f"The checkpoint of step {step} could not be written: {saved.failed}")
            self._writing = None

    async def _complete(self, step: int) -> None:
        await self._trainer.saved(step)
        self._saved_step, self._writing = step, None

    async def _revive(self, error: LearnerLost, before: int | None) -> None:
        while True:
            if self._kept is None:
                raise error
            delay_s = self._restarts.record_death(time.monotonic())
            if delay_s is None:
                raise LearnerError(
                    f"the learner was lost too often (ranks.max_restarts): {error}"
                ) from error
            self._say(f"The learner was lost; restarting it: {str(error).splitlines()[0]}")
            log.error("the learner was lost; restarting it: %s", error)
            self._writing = None
            await anyio.sleep(delay_s)
            try:
                await self._kept.restart()
                self._num_revived += 1
                timeout_s = self._timeout_s
                self._stand(await load_newest(self._learner, self._folder, timeout_s=timeout_s))
                await self._trainer.redo(self._trainer.step + 1 if before is None else before)
                return
            except LearnerLost as lost:
                error = lost
