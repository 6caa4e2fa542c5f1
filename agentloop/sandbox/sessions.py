"""Sessions that outlive the request that opened them.

Each is a task that keeps a session of the pool open until it is closed, is lost, or has been idle
for too long.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Unpack

import anyio
from anyio.abc import TaskGroup, TaskStatus

from agentloop.sandbox.errors import LostBy, SessionLost
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.session import CellArguments, Session


@dataclass(eq=False)
class _Held:
    session: Session
    scope: anyio.CancelScope
    num_running: int = 0


class Sessions:
    """Open sessions by key, which are closed when the task group is cancelled."""

    def __init__(self, pool: Pool, group: TaskGroup, idle_s: float = math.inf) -> None:
        self._pool = pool
        self._group = group
        self._idle_s = idle_s
        self._held: dict[Hashable, _Held] = {}

    def __contains__(self, key: object) -> bool:
        return key in self._held

    async def open(self, key: Hashable, max_wait_s: float | None = None) -> None:
        """Open a session.

        Raises:
            Overloaded: no session was free within `max_wait_s` (default: the pool's setting).
        """
        await self._group.start(self._hold, key, max_wait_s)

    async def run(self, key: Hashable, **call: Unpack[CellArguments]) -> CallResult:
        """Run a cell, with the arguments of `Session.run`.

        Raises:
            KeyError: there is no such session.
            SessionLost: its process is gone; the session is then removed.
        """
        held = self._held[key]
        held.num_running += 1
        held.scope.deadline = math.inf
        try:
            return await held.session.run(**call)
        except SessionLost:
            self.close(key)
            raise
        finally:
            held.num_running -= 1
            if not held.num_running:
                held.scope.deadline = anyio.current_time() + self._idle_s

    def lost_by(self, key: Hashable) -> LostBy | None:
        """Return the cause of a session's loss; None if it lives or does not exist."""
        held = self._held.get(key)
        return held.session.lost_by if held is not None else None

    def close(self, key: Hashable) -> bool:
        """Close a session and return whether it existed."""
        held = self._held.pop(key, None)
        if held is not None:
            held.scope.cancel()
        return held is not None

    async def _hold(
        self, key: Hashable, max_wait_s: float | None, *, task_status: TaskStatus[None]
    ) -> None:
        async with self._pool.session(max_wait_s) as session:
            deadline = anyio.current_time() + self._idle_s
            with anyio.CancelScope(deadline=deadline) as scope:
                held = self._held[key] = _Held(session, scope)
                task_status.started()
                try:
                    # no deadline: the surrounding scope has one, which calls prolong
                    await anyio.sleep_forever()
                finally:
                    if self._held.get(key) is held:
                        del self._held[key]
