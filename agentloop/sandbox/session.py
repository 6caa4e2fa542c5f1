"""A session: a process that keeps its variables between cells, until it is closed or lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypedDict

import anyio

from agentloop.sandbox.calls import Calls, input_bytes
from agentloop.sandbox.errors import LostBy, Overloaded, SessionLost
from agentloop.sandbox.link import OpenSession
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.settings import MAX_CODE_BYTES
from agentloop.sandbox.slots import PoolWorker
from agentloop.sandbox.worker.connection import WorkerFrame

CELL_BYTES = 512  # of a remembered cell, beside its code and input
TRIAL_S = 60.0  # to find out what has ended a session's worker

HOW_LOST = {
    LostBy.PROGRAM: "was ended by the code that ran in it",
    LostBy.CALLER: "was killed with a cell that its caller cancelled",
    LostBy.INFRASTRUCTURE: "has ended, not because of the code that ran in it",
}


class CellArguments(TypedDict):
    """The arguments of `Session.run`."""

    code: str
    stdin: str
    timeout_s: float | None
    memory_mib: int | None


class Session:
    """A process in which cells share their variables. Created by `Pool.session()`."""

    def __init__(
        self,
        calls: Calls,
        worker: PoolWorker,
        session_id: int,
        reopen: Callable[[], AbstractAsyncContextManager[Session]],
    ) -> None:
        """
        Args:
            reopen: opens another session, if this one's worker is lost.
        """
        self.id = session_id
        self.worker = worker
        self.closed = False
        self._calls = calls
        self._state: OpenSession = worker.link.open_session(session_id)
        self._reopen = reopen
        self._cells: list[WorkerFrame] = []  # what has been run, if it is not too much
        self._num_bytes = 0  # of it
        self._turn = anyio.Lock()

    async def run(
        self,
        code: str,
        stdin: str = "",
        timeout_s: float | None = None,
        memory_mib: int | None = None,
    ) -> CallResult:
        """Run a cell; `result` holds the value of its last expression. Cells run one at a time.

        Raises:
            SessionLost: the process is gone; `by` is the cause. A cell that is killed for exceeding
                a limit still returns a result, and the next one raises.
        """
        message = self._calls.message(code, stdin, timeout_s, memory_mib)
        message["session"] = self.id
        async with self._turn:  # no deadline: the calls before it have theirs
            result = None
            if not self.lost:
                self._remember(message)
                result = await self._calls.run_cell(message, self.worker)
            if result is None:
                if await self._has_ended_workers():
                    self._state.lost_by = LostBy.PROGRAM
                raise self.loss
        return result

    def _remember(self, message: WorkerFrame) -> None:
        """Keep a cell, unless the session has run too much to run it again."""
        self._num_bytes += input_bytes(message) + CELL_BYTES
        self._cells.append(message)
        if self._num_bytes > MAX_CODE_BYTES:
            self._cells.clear()

    async def _has_ended_workers(self) -> bool:
        """Return whether the session's cells have ended its worker, and do so to another one.

        A program must not be able to make its own failure look like one of infrastructure.
        """
        cells, self._cells = self._cells, []  # once
        is_known = self.closed or self._state.lost_by is not None or self.worker.is_host
        if is_known or not cells or not self._calls.is_open:
            return False
        with anyio.move_on_after(TRIAL_S):
            try:
                async with self._reopen() as other:
                    again: list[WorkerFrame] = [{**cell, "session": other.id} for cell in cells]
                    return await self._calls.ends_workers(again, [self.worker, other.worker])
            except Overloaded:  # there is no other worker
                return False
        return False

    @property
    def lost(self) -> bool:
        return self.lost_by is not None

    @property
    def lost_by(self) -> LostBy | None:
        """The cause of the session's loss, or None while its process lives.

        Known as soon as the cell that ended the process has its result.
        """
        if self.closed:
            return LostBy.CALLER
        if self._state.lost_by is None and not self.worker.alive:
            return LostBy.INFRASTRUCTURE
        return self._state.lost_by

    @property
    def loss(self) -> SessionLost:
        """The error that `run` raises for a lost session."""
        by = self.lost_by or LostBy.INFRASTRUCTURE
        if self.closed:
            return SessionLost("the session is closed", by)
        if self._state.lost_by is None:
            link = self.worker.link
            return SessionLost(f"worker {link.worker_id} was lost: {link.why}", by)
        return SessionLost(f"the session's process {HOW_LOST[by]}; its variables are gone", by)
