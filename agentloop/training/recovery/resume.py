"""Going on from a checkpoint, after the run was killed or the learner was lost.

    request ──> learner ──lost──> restart ──> load the newest checkpoint ──> repeat steps ─┐
       ▲                                                                                   │
       └───────────────────────────────────────────────────────────────────────────────────┘

`ResumableTraining` is common to training on rollouts (steps.py) and on dialogues (sft.py).
"""

from __future__ import annotations

import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import anyio

from agentloop.inference.processes.restarts import Restarts
from agentloop.training.learner_client.client import (
    Learner,
    LearnerError,
    LearnerLost,
    LearnerRefused,
    RestartableLearner,
)
from agentloop.training.learner_client.protocol import (
    LoadRequest,
    Reply,
    Request,
    SavedRequest,
    SaveRequest,
    TrainingState,
)
from agentloop.training.run.folder import RunFolder

log = logging.getLogger(__name__)

_SAME_LOSS = 1e-5  # relative tolerance of the loss of a repeated step

T = TypeVar("T")
R = TypeVar("R", bound=Reply)


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


def report_other_loss(
    say: Callable[[str], None], step: int, before: float | None, repeated: float | None
) -> None:
    """Report if a repeated step had another loss than before.

    The same batch on the same weights must have the same loss; otherwise the run has diverged from
    the original one.
    """
    if before is None or repeated is None:
        return
    if not math.isclose(before, repeated, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS):
        say(f"Step {step} had a loss of {before:.6g}, but of {repeated:.6g} when it was repeated")


class ResumableTraining(ABC):
    """Trains a learner step by step, with checkpoints, and recovers it after a loss.

    Attributes:
        learner: the learner.
        state: the state after the last completed step. Repeating steps does not change it.
    """

    def __init__(
        self,
        learner: RestartableLearner,
        folder: RunFolder,
        *,
        restored: TrainingState | None,
        timeout_s: float,
        say: Callable[[str], None],
        max_restarts: int = 0,
    ) -> None:
        """
        Args:
            restored: the state of the checkpoint that the learner has loaded (`load_newest`).
            timeout_s: time limit of a request.
            max_restarts: restarts in ten minutes; 0: a lost learner is an error.
        """
        self.learner = learner
        self._folder = folder
        self._timeout_s = timeout_s
        self._say = say
        self._busy = anyio.Lock()  # held during requests, since `watch` makes requests, too
        self._max_restarts = max_restarts
        self._restarts = Restarts(max_restarts)
        self._num_recovered = 0
        self._writing: tuple[int, Path] | None = None  # step and folder of a checkpoint
        self._use_checkpoint(restored)
        self.state = self._learner_state

    def _use_checkpoint(self, state: TrainingState | None) -> None:
        """Take note of the state of the newest checkpoint, which the learner has loaded."""
        self._saved_step = -1 if state is None else state.step
        self._learner_state = state or TrainingState(step=0)

    @abstractmethod
    async def _repeat_steps(self, before: int) -> None:
        """Repeat all steps after `_learner_state`, up to but excluding `before`.

        Raises:
            LearnerError: the learner failed.
        """

    async def _checkpoint_complete(self, step: int) -> None:  # noqa: B027  # optional
        """Take note that a checkpoint of this step is complete."""

    async def watch(self) -> None:
        """Recover the learner also if it is lost between requests, until cancelled.

        Raises:
            LearnerError: the learner is lost for good, or has ended itself.
        """
        while True:
            num_recovered = self._num_recovered
            description = await self.learner.wait_lost()
            async with self._busy:  # no deadline: requests have one
                if num_recovered == self._num_recovered:  # otherwise a request has recovered it
                    await self._recover(LearnerLost(description), None)

    async def move(self) -> None:
        """Write a checkpoint, and restart the learner from it; without one, steps are repeated.

        Raises:
            LearnerError: as in `watch`.
        """
        if self.state.step:
            with suppress(LearnerRefused):
                await self.checkpoint(wait=True)
        async with self._busy:  # no deadline: requests have one
            self._say("The learner leaves a node; restarting it on others")
            try:
                await self._restart(None)
            except LearnerLost as error:
                await self._recover(error, None)

    async def checkpoint(self, *, wait: bool = False) -> bool:
        """Start writing a checkpoint, unless there is one of this step.

        Args:
            wait: wait until it is complete.

        Returns:
            False if it could not be started, for example because the disk is full; this is
            reported.

        Raises:
            LearnerError: as in `watch`; with `wait` also if the checkpoint cannot be written.
        """
        async with self._busy:  # no deadline: requests have one
            if wait:
                await self._check_checkpoint(wait=True)
            step = self.state.step
            if step in (self._saved_step, self._writing and self._writing[0]):
                return True
            folder = self._checkpoint_folder(f"step-{step:05}")
            try:
                await self._ask(SaveRequest(folder=folder, state=self.state, beside=not wait))
            except LearnerRefused as error:
                if wait:
                    raise
                self._say(f"The checkpoint of step {step} could not be started: {error}")
                return False
            self._writing = step, folder
            if wait:
                await self._complete_checkpoint(step)
            return True

    async def _train_step(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        """Run `work`, which trains the learner on this step; return its result.

        Raises:
            LearnerError: as in `watch`.
        """
        async with self._busy:  # no deadline: requests have one
            await self._check_checkpoint()
            result = await self._retry(work, before=step)
            self.state = self._learner_state
            return result

    async def _ask_once(self, request: Request[R]) -> R:
        """Send a request, without recovery. Raises LearnerError."""
        return await self.learner.ask(request, timeout_s=self._timeout_s)

    async def _ask(self, request: Request[R]) -> R:
        """Send a request that does not train, and repeat it if the learner was lost.

        Raises:
            LearnerError: as in `watch`.
        """
        return await self._retry(lambda: self._ask_once(request))

    async def _retry(self, work: Callable[[], Awaitable[T]], before: int | None = None) -> T:
        """Run `work` and return its result; start it again after a recovery from a lost learner.

        Args:
            before: the recovery repeats the steps before this one; None: all completed steps.

        Raises:
            LearnerError: as in `watch`.
        """
        while True:
            try:
                return await work()
            except LearnerLost as error:
                await self._recover(error, before)

    def _checkpoint_folder(self, name: str) -> Path:
        return self._folder.path / "checkpoints" / name

    async def _check_checkpoint(self, *, wait: bool = False) -> None:
        """Check whether the checkpoint being written is complete. Raises the errors of `watch`."""
        if self._writing is None:
            return
        step, folder = self._writing
        saved = await self._ask(SavedRequest(wait=wait))
        if saved.folder == folder:
            await self._complete_checkpoint(step)
        elif saved.failed:
            self._say(f"The checkpoint of step {step} could not be written: {saved.failed}")
            self._writing = None

    async def _complete_checkpoint(self, step: int) -> None:
        await self._checkpoint_complete(step)
        self._saved_step, self._writing = step, None

    async def _recover(self, error: LearnerLost, before: int | None) -> None:
        while True:
            if not self._max_restarts:
                raise error
            delay_s = self._restarts.record_death(time.monotonic())
            if delay_s is None:
                raise LearnerError(
                    f"the learner was lost too often (ranks.max_restarts): {error}"
                ) from error
            self._say(f"The learner was lost; restarting it: {str(error).splitlines()[0]}")
            log.error("the learner was lost; restarting it: %s", error)
            await anyio.sleep(delay_s)
            try:
                await self._restart(before)
                return
            except LearnerLost as lost:
                error = lost

    async def _restart(self, before: int | None) -> None:
        self._writing = None
        await self.learner.restart()
        self._num_recovered += 1
        timeout_s = self._timeout_s
        self._use_checkpoint(await load_newest(self.learner, self._folder, timeout_s=timeout_s))
        await self._repeat_steps(self.state.step + 1 if before is None else before)
