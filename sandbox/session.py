"""A session: a process that keeps its variables between cells, until it is closed or lost."""

from __future__ import annotations

import anyio

from agentloop.sandbox.calls import Calls
from agentloop.sandbox.errors import LostBy, SessionLost
from agentloop.sandbox.link import OpenSession
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.slots import PoolWorker

HOW_LOST = {
    LostBy.PROGRAM: "was ended by the code that ran in it",
    LostBy.CALLER: "was killed with a cell that its caller cancelled",
    LostBy.INFRASTRUCTURE: "has ended, not because of the code that ran in it",
}


class Session:
    """A process in which cells share their variables. Created by `Pool.session()`."""

    def __init__(self, calls: Calls, worker: PoolWorker, session_id: int) -> None:
        self.id = session_id
        self.worker = worker
        self.closed = False
        self._calls = calls
        self._state: OpenSession = worker.link.open_session(session_id)
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
        message = self._calls.message(code, stdin, timeout_s, memory_mib) | {"session": self.id}
        async with self._turn:  # no deadline: the calls before it have theirs
            result = None if self.lost else await self._calls.run_cell(message, self.worker)
            if result is None:
                raise self.loss
        return result

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
