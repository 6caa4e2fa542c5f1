"""A learner that goes on after it was lost, and its checkpoints.

    ask ──> the learner ──lost──> started again ──> loads the newest checkpoint ──> redo ──> ask

Whoever trains with it says what its state is and how steps are done again; everything else is the
same for rollouts (steps.py) and for dialogues (supervised.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol, TypeVar

import anyio

from agentloop.inference.keep_alive import Restarts
from agentloop.training.learner import (
    KeptLearner,
    Learner,
    LearnerError,
    LearnerLost,
    LearnerRefused,
)
from agentloop.training.run_folder import RunFolder

__all__ = ["ResumableLearner", "Trainer", "load_newest", "tell_other_loss"]

log = logging.getLogger(__name__)

_SAME_LOSS = 1e-5  # of a step that is done again, relative

T = TypeVar("T")


class Trainer(Protocol):
    """Who trains with a learner, and knows its steps."""

    @property
    def step(self) -> int:
        """The last one that is done. Steps that are done again do not change it."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint of now is saved with: `step`, and whatever else is needed."""
        ...

    def stand(self, state: Mapping[str, Any]) -> None:
        """The learner is where this state says; it is empty at the beginning."""
        ...

    async def redo(self, before: int) -> None:
        """Do all steps after where the learner stands, up to the one before `before`. Raises
        LearnerError."""
        ...

    async def saved(self, step: int) -> None:
        """A checkpoint of this step is complete."""
        ...


async def load_newest(learner: Learner, folder: RunFolder, *, timeout_s: float) -> dict[str, Any]:
    """The learner loads the newest checkpoint; returns the state that it was saved with, which is
    empty where there is none. Raises LearnerError."""
    if (checkpoint := folder.checkpoint) is None:
        return {}
    loaded = await learner.ask("load", folder=str(checkpoint), timeout_s=timeout_s)
    state: dict[str, Any] = loaded["state"]
    return state


def tell_other_loss(
    say: Callable[[str], None], step: int, before: float | None, now: float | None
) -> None:
    """Say so where a step that was done again had another loss. The same batch on the same weights
    has the same one: another loss is another run."""
    if before is None or now is None:
        return
    if not math.isclose(before, now, rel_tol=_SAME_LOSS, abs_tol=_SAME_LOSS):
        say(f"Step {step} had the loss {before:.6g}, and done again {now:.6g}")


class ResumableLearner:
    """A learner, its checkpoints, and what is done where it is lost.

    Attributes:
        busy: to be held while it is asked, for `watch` asks, too.
    """

    def __init__(
        self,
        learner: Learner,
        folder: RunFolder,
        trainer: Trainer,
        *,
        restored: Mapping[str, Any],
        timeout_s: float,
        say: Callable[[str], None],
        kept: KeptLearner | None = None,
        max_restarts: int = 0,
    ) -> None:
        """`restored` as `load_newest` returned it; `timeout_s` is for an answer; `kept` is the
        learner that can be started again; where it is None, one that is lost is an error."""
        self.busy = anyio.Lock()
        self._learner = learner
        self._folder = folder
        self._trainer = trainer
        self._timeout_s = timeout_s
        self._say = say
        self._kept = kept
        self._restarts = Restarts(max_restarts)
        self._num_revived = 0
        self._writing: tuple[int, str] | None = None  # step and folder of a checkpoint
        self._saved_step = -1
        self._stand(restored)

    def _stand(self, state: Mapping[str, Any]) -> None:
        self._trainer.stand(state)
        if state:
            self._saved_step = int(state["step"])

    async def ask_once(self, op: str, **arguments: Any) -> dict[str, Any]:
        """One request. Raises LearnerError."""
        return await self._learner.ask(op, timeout_s=self._timeout_s, **arguments)

    async def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        """The same, again where it was lost: for what changes nothing that was learned.

        Raises:
            LearnerError: it is lost for good, or ended.
        """
        return await self.until_done(lambda: self.ask_once(op, **arguments))

    async def until_done(self, work: Callable[[], Awaitable[T]], before: int | None = None) -> T:
        """What `work` returns. Where the learner is lost under it, it is begun anew once the
        learner has done all steps before that one: all that were done, if not said otherwise.

        Raises:
            LearnerError: as `ask`.
        """
        while True:
            try:
                return await work()
            except LearnerLost as error:
                await self._revive(error, before)

    async def watch(self) -> None:
        """Until cancelled: start it again also where it is lost while nobody asks for anything.
        Raises as `ask`."""
        while self._kept is not None:
            num_revived = self._num_revived
            how = await self._kept.lost()
            async with self.busy:  # no deadline: what it does has one
                if num_revived == self._num_revived:  # who asked would have done it
                    await self._revive(LearnerLost(how), None)

    async def save(self, *, wait: bool = False) -> bool:
        """Begin to write a checkpoint; with `wait` it is complete. Where there is one, nothing is
        done. False: it could not be begun, such as on a disk that is full, which is said.

        Raises:
            LearnerError: as `ask`; with `wait` also where it cannot be written.
        """
        if wait:
            await self.hear_of_checkpoint(wait=True)
        step = self._trainer.step
        if step in (self._saved_step, self._writing and self._writing[0]):
            return True
        folder, state = self.checkpoint_folder(f"step-{step:05}"), self._trainer.state()
        try:
            await self.ask("save", folder=folder, state=state, beside=not wait)
        except LearnerRefused as error:
            if wait:
                raise
            self._say(f"No checkpoint of step {step} could be begun: {error}")
            return False
        if wait:
            await self._complete(step)
        else:
            self._writing = step, folder
        return True

    def checkpoint_folder(self, name: str) -> str:
        return str(self._folder.path / "checkpoints" / name)

    async def hear_of_checkpoint(self, *, wait: bool = False) -> None:
        """Ask whether the one that is being written is complete. Raises as `ask`."""
        if self._writing is None:
            return
        step, folder = self._writing
        saved = await self.ask("saved", wait=wait)
        if saved.get("folder") == folder:
            await self._complete(step)
        elif saved.get("failed"):
            self._say(f"The checkpoint of step {step} could not be written: {saved['failed']}")
            self._writing = None

    async def _complete(self, step: int) -> None:
        await self._trainer.saved(step)
        self._saved_step, self._writing = step, None

    async def _revive(self, error: LearnerLost, before: int | None) -> None:
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
                timeout_s = self._timeout_s
                self._stand(await load_newest(self._learner, self._folder, timeout_s=timeout_s))
                await self._trainer.redo(self._trainer.step + 1 if before is None else before)
                return
            except LearnerLost as lost:
                error = lost
