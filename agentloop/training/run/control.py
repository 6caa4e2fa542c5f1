"""Let the tasks of a run wait for each other, pause and drain."""

from __future__ import annotations

from collections.abc import Callable

from agentloop.aio import Signal
from agentloop.training.run.status import StatusWatch, Unwatched


class Drained(Exception):
    """The run is draining, so the operation was not started."""


class RunControl:
    """Wakes the tasks of a run when its state changes, and tells them to pause or to drain.

    Attributes:
        watch: detects stalls. It is told of each change and of each wait.
        is_paused: whether no groups may be started.
        is_draining: whether the run is to end in order.
    """

    def __init__(self, watch: StatusWatch | None = None) -> None:
        self.watch = watch or Unwatched()
        self.is_paused = self.is_draining = False
        self._changed = Signal()

    def pause(self, paused: bool = True) -> None:
        """Stop admitting groups, or resume. Groups in flight continue."""
        self.is_paused = paused
        self.notify()

    def drain(self) -> None:
        """Stop admitting groups and end the run in order, so that it can be resumed."""
        self.is_draining = True
        self.notify()

    def notify(self) -> None:
        """Report progress and have all waiting tasks check their conditions."""
        self.watch.moved()
        self._changed.notify()

    async def wait_changed(self) -> None:
        """Wait until the next `notify`."""
        await self._changed.wait()  # no deadline: for tasks that have nothing to do until then

    async def wait_until(
        self, condition: Callable[[], bool], waiter: str, reason: Callable[[], str]
    ) -> None:
        """Wait until `condition` holds, reporting what `waiter` waits for (`reason`).

        Both functions are evaluated at each `notify`.
        """
        while not condition():
            reported = reason()
            with self.watch.waiting(waiter, reported):
                while not condition() and reason() == reported:
                    # no deadline: the awaited operation has its own, or ends the run
                    await self._changed.wait()

    async def wait_while_paused(self, waiter: str) -> None:
        """Wait while the run is paused. Raises Drained if it is draining."""
        await self.wait_until(
            lambda: not self.is_paused or self.is_draining,
            waiter,
            lambda: "the run to be resumed (paused)",
        )
        if self.is_draining:
            raise Drained
