"""Restarts our own servers when they die; unresponsive ones are killed first.

a process ends ──> exited ──> backoff ──> may start ──> restarting ──> ready
     ▲                            │           └─ not while the learner has the GPUs' memory
     │                            └─ too often: given up; if no other is left, raise
     └─ killed: no answer for too long
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

import anyio

from agentloop.errors import ServerError, ServerStartError
from agentloop.inference.processes.restarts import Restarts
from agentloop.inference.processes.supervise import ServerProcess, ServerSettings

log = logging.getLogger(__name__)


class Clients(Protocol):
    """The users of the servers, who know their health: `agentloop.inference.replicas.Replicas`."""

    def mark_exited(self, url: str, reason: str) -> None:
        """Record that the process is gone."""

    def mark_restarting(self, url: str) -> None:
        """Record that a new process is being started."""

    def starting(self) -> AbstractAsyncContextManager[None]:
        """Return a context that waits until servers may start, and says that one does."""
        ...

    def is_dead(self, url: str) -> bool:
        """Return whether the server is unresponsive; not called during a restart."""

    def is_enabled(self, url: str) -> bool:
        """Return whether the server should be restarted."""

    def give_up(self, url: str) -> bool:
        """Record that the server won't be restarted; return whether any other is left."""


async def keep_alive(
    servers: Sequence[ServerProcess], settings: ServerSettings, clients: Clients
) -> None:
    """Restart servers that die and kill unresponsive ones, until cancelled.

    Raises:
        ServerError: A server was given up and no other one is left, including those of others; the
            message ends with the tail of its log.
    """
    starting: set[ServerProcess] = set()

    async def kill_if_unresponsive(server: ServerProcess) -> None:
        dead_since_s: float | None = None
        while True:
            await anyio.sleep(min(1.0, settings.unresponsive_s / 4))
            now_s = time.monotonic()
            if not server.alive or server in starting or not clients.is_dead(server.url):
                dead_since_s = None
            elif dead_since_s is None:
                dead_since_s = now_s
            elif now_s - dead_since_s >= settings.unresponsive_s:
                log.error("%s is unresponsive: killing its process", server.url)
                await server.stop()
                dead_since_s = None

    async def keep(server: ServerProcess) -> None:
        restarts = Restarts(settings.max_restarts)
        while True:
            ending = await server.wait_dead()
            while True:
                clients.mark_exited(server.url, ending.splitlines()[0])
                if not clients.is_enabled(server.url):
                    return
                delay_s = restarts.record_death(time.monotonic())
                if delay_s is None:
                    log.error("giving up %s: %s", server.url, ending)
                    if not clients.give_up(server.url):
                        raise ServerError(
                            f"no server is left: {server.url}: {ending}", log_path=server.log_path
                        )
                    return
                log.error("%s died, restarting it: %s", server.url, ending)
                await anyio.sleep(delay_s)
                async with clients.starting():  # no deadline: it may wait for a training step
                    clients.mark_restarting(server.url)
                    starting.add(server)
                    try:
                        await server.restart(log.info)
                        break
                    except ServerStartError as error:
                        ending = str(error)
                        await server.stop()
                    finally:
                        starting.discard(server)
            log.warning("%s is running again", server.url)

    async with anyio.create_task_group() as tasks:
        for server in servers:
            tasks.start_soon(keep, server)
            tasks.start_soon(kill_if_unresponsive, server)
