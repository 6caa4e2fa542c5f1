"""The readers of a process's events and the page that shows them, wired once for all commands.

events ──> emit ──┬─> board, stalls ──> live ──> page      /
                  ├─> metrics                              /metrics
                  └─> exporters: traces, event log, sinks
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from agentloop.aio import task_group
from agentloop.events import Emit, Event
from agentloop.observe.ask import Ask, asking
from agentloop.observe.board import Board
from agentloop.observe.event_fanout import EventFanout
from agentloop.observe.exporters.metrics import Metrics
from agentloop.observe.live import Live, Sources
from agentloop.observe.stalls import Stalls


class Exporter(Protocol):
    """A reader of events that may drop some: `Traces`, `EventLog` or `Sinks`."""

    def on_event(self, event: Event) -> None: ...

    @property
    def num_dropped(self) -> int: ...


class Dashboard:
    """Passes events to all readers; its page and metrics are served by the caller.

    Attributes:
        emit: passes an event to all readers.
        live: the page's data; call its `end` when the process ends.
    """

    def __init__(
        self,
        sources: Sources,
        *,
        readers: Sequence[Emit] = (),
        queue: Callable[[], tuple[int, int]] | None = None,
        num_refused: Callable[[], int] | None = None,
    ) -> None:
        """
        Args:
            sources: the state that is shown besides the events.
            readers: further readers of the events.
            queue: see `Metrics`.
            num_refused: see `Metrics`.
        """
        self.board = Board()
        self.stalls = Stalls()
        self.live = Live(self.board, self.stalls, sources)
        self._num_dropped: dict[str, Callable[[], int]] = {}
        self._metrics = Metrics(
            sources.servers,
            sources.num_waiting,
            sandbox=sources.sandbox,
            no_progress_s=lambda: self.stalls.no_progress_s,
            queue=queue,
            num_refused=num_refused,
            dropped=self._num_dropped,
        )
        self.emit = EventFanout(
            self.stalls.on_event, self.board.on_event, self._metrics.on_event, *readers
        )

    @asynccontextmanager
    async def exporting(
        self, name: str, opened: AbstractAsyncContextManager[Exporter]
    ) -> AsyncIterator[None]:
        """Pass events to an exporter, and count what it drops in the metrics."""
        async with opened as exporter:
            self._num_dropped[name] = lambda: exporter.num_dropped
            self.emit.add(exporter.on_event)
            try:
                yield
            finally:
                self.emit.remove(exporter.on_event)

    @asynccontextmanager
    async def running(self, answer: Callable[[str, Emit], Awaitable[object]]) -> AsyncIterator[Ask]:
        """Keep the page up to date; yield a function that starts the answer to a question.

        Args:
            answer: runs a rollout of a visitor's question and passes its events on.
        """
        async with task_group() as tasks:
            tasks.start_soon(self.live.run)
            async with asking(answer, self.emit) as ask:
                yield ask
            tasks.cancel_scope.cancel()

    async def serve_metrics(self, request: web.Request) -> web.Response:
        """Handle `GET /metrics`, in Prometheus's format."""
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._metrics.render(), headers=headers)
