"""The web page of a training or evaluation run, and the other readers of its events.

The page is served from the run's start; servers, sandbox and training loop appear on it as they
become available. Visitors may cancel rollouts and control the loop.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, Literal

import anyio
from aiohttp import web
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from agentloop.agent.chat_format import ChatFormat
from agentloop.api.guard import ApiGuard, ServeSettings
from agentloop.api.listen import bind, serving
from agentloop.cli import console
from agentloop.distribution import version
from agentloop.errors import RequestError, ServerError, sole
from agentloop.events import Emit, Event, Measured
from agentloop.inference.replicas import ServerView
from agentloop.observe.archive import read_group, read_rollout
from agentloop.observe.ask import asking
from agentloop.observe.board import Board
from agentloop.observe.event_fanout import EventFanout
from agentloop.observe.exporters.journal import Journal, JournalSettings
from agentloop.observe.exporters.metrics import Metrics
from agentloop.observe.exporters.otel import OtelSettings, Traces
from agentloop.observe.exporters.sinks import Sinks, SinksSettings
from agentloop.observe.live import Live, Sources
from agentloop.observe.page import Page
from agentloop.observe.runs import of_start, start_metrics
from agentloop.observe.stalls import Stalls
from agentloop.runtime import Runtime
from agentloop.training.loop import TrainingLoop
from agentloop.training.run_folder import RunFolder

__all__ = ["RunDashboard"]

_SAVE_S = 600.0


class RunDashboard:
    """The readers of a run's events; `emit` passes an event to all of them.

    Set `runtime` and `loop` as soon as they exist.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: console.ProgressLine,
        *,
        readers: Sequence[Emit] = (),
        kind: Literal["train", "sft", "evaluate"] = "train",
        has_runtime: bool = True,
    ) -> None:
        """
        Args:
            readers: further readers of the events.
            has_runtime: whether there will be a runtime; without one, visitors can neither ask
                questions nor cancel rollouts.
        """
        self.folder = folder
        self._kind = kind
        self._has_runtime = has_runtime
        self.stalls = Stalls()
        self.board = Board()
        self._dropped: dict[str, Callable[[], int]] = {}
        self._metrics = Metrics(
            self._servers,
            self._num_waiting,
            sandbox=self._sandbox,
            still_s=lambda: self.stalls.still_s,
            queue=self._queue,
            dropped=self._dropped,
        )
        self.emit = EventFanout(self.stalls.seen, self.board.seen, self._metrics.seen, *readers)
        self.runtime: Runtime | None = None
        self.loop: TrainingLoop | None = None
        self._progress = progress
        self._last_chat: ChatFormat | None = None
        self._was_draining = False
        self._answers: set[anyio.CancelScope] = set()  # to visitors
        self.board.steps.extend([*start_metrics(folder.path), *folder.metrics()])

    def measured_start(self, event: Event) -> None:
        """Show the metrics of a step of the supervised start. Its steps count by themselves, so
        other readers of events, to whom they would be steps of the run, are not told."""
        if isinstance(event, Measured):
            self.board.seen(Measured(of_start(event.row)))

    @asynccontextmanager
    async def exporters(
        self,
        otel: OtelSettings,
        *,
        model: str,
        journal: JournalSettings | None = None,
        sinks: SinksSettings | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[None]:
        """Pass events to the configured exporters: traces, the journal and sinks such as wandb.

        Raises:
            SettingsError: a package that an exporter needs is not installed.
        """
        path = self.folder.path
        async with AsyncExitStack() as stack:
            traces = await stack.enter_async_context(
                Traces.open(otel, model=model, run=path.name, is_scored=True, decode=self._decoded)
            )
            opened: dict[str, Traces | Journal | Sinks] = {"traces": traces}
            if journal is not None and journal.enabled:
                opened["journal"] = await stack.enter_async_context(Journal.open(path, journal))
            if sinks is not None:
                opened["sinks"] = await stack.enter_async_context(
                    Sinks.open(sinks, folder=path, run_name=path.name, config=config or {})
                )
            for name, reader in opened.items():
                self.emit.add(reader.seen)
                stack.callback(self.emit.remove, reader.seen)
                self._dropped[name] = partial(_num_dropped, reader)
            yield

    @asynccontextmanager
    async def shown(self, settings: ServeSettings) -> AsyncIterator[None]:
        """Serve the page, on another port if the configured one is taken.

        Raises:
            SettingsError: the address cannot be bound.
        """
        about = {
            "kind": self._kind,
            "title": self.folder.path.name,
            "version": f"agentloop {version()}",
            "can_ask": self._has_runtime,
            "controls": self.can,
            "has_sandbox": self._has_runtime,
        }
        sources = Sources(
            about,
            chat=lambda: self._chat,
            servers=self._servers,
            num_waiting=self._num_waiting,
            sandbox=self._sandbox,
            more=self._moment,
            folder=self.folder.path,
            read_rollout=partial(self._read, read_rollout),
            read_group=partial(self._read, read_group),
        )
        live = Live(self.board, self.stalls, sources)
        token = settings.control_token
        with bind(settings, or_free=True) as bound:
            try:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(live.run)
                    async with asking(self._answer, self.emit) as ask:
                        page = Page(
                            live,
                            ask=ask if self._has_runtime else None,
                            control=self if self.can else None,
                            control_token=token.get_secret_value() if token else None,
                            io_timeout_s=settings.io_timeout_s,
                        )
                        app = web.Application(middlewares=[ApiGuard(settings).middleware])
                        page.add_to(app)
                        app.router.add_get("/metrics", self._scraped)
                        async with serving(app, bound) as url:
                            token_text = f" (control token: {page.control_token})"
                            self._progress.say(f"Watch it: {url}/{token_text if self.can else ''}")
                            async with self._ending(live):
                                yield
                    tasks.cancel_scope.cancel()
            except BaseExceptionGroup as group:
                raise sole(group) from None

    @asynccontextmanager
    async def _ending(self, live: Live) -> AsyncIterator[None]:
        """Tell the page's readers how the block ended."""
        path = self.folder.path
        again = f"To view it later: agentloop runs view {path}"
        resume = f"to continue: agentloop {self._kind} --resume {path}"
        try:
            yield
        except Exception as error:
            message = str(error).partition("\n")[0] or type(error).__name__
            await live.end("failed", f"The run has failed: {message}. {again}")
            raise
        except BaseException:
            await live.end("stopped", f"The run was stopped; {resume}. {again}")
            raise
        if self._was_draining:
            await live.end("stopped", f"The run was drained; {resume}. {again}")
        else:
            await live.end("finished", f"The run has finished. {again}")

    def leave(self) -> None:
        """Detach from the loop and the runtime before they end, cancelling answers to visitors.

        The page keeps showing what they have done.
        """
        self._last_chat = self._chat
        self._was_draining |= self.loop is not None and self.loop.is_draining
        self.runtime = self.loop = None
        for scope in self._answers:
            scope.cancel()

    # --- actions of visitors ----------------------------------------------------------------------

    @property
    def can(self) -> Sequence[str]:
        """Implement `agentloop.observe.page.Control`."""
        if self._kind == "train":
            return ("pause", "resume", "drain", "cancel", "checkpoint")
        return ("cancel",) if self._has_runtime else ()

    async def do(self, what: str, rollout: str | None) -> str:
        """Implement `agentloop.observe.page.Control`."""
        if what == "cancel":
            if rollout is None:
                raise RequestError("rollout: name the rollout to cancel")
            if self.runtime is None or not self.runtime.cancel(rollout):
                raise RequestError(f"rollout: {rollout!r} is not in flight here")
            return f"{rollout} was cancelled and gets no reward"
        loop = self.loop
        if loop is None:
            raise RequestError("do: the run has not started its rollouts yet")
        match what:
            case "pause":
                loop.pause()
                return "no further groups are started; those in flight continue"
            case "resume":
                loop.pause(False)
                if loop.is_draining:
                    return "no groups are started: the run is being drained and ends soon"
                return "groups are started again"
            case "drain":
                loop.drain()
                return "no further groups are started; the run ends when those in flight have ended"
            case _:
                with anyio.move_on_after(_SAVE_S):
                    return f"a checkpoint of step {await loop.save()} is being written"
                raise RequestError(f"do: the learner was busy for {_SAVE_S:g} s")

    async def _answer(self, question: str, emit: Emit) -> None:
        if self.runtime is None:
            raise ServerError("no server is up yet; ask again later")
        with anyio.CancelScope() as scope:
            self._answers.add(scope)
            try:
                await self.runtime.rollout(question, on_event=emit)
            finally:
                self._answers.remove(scope)
        if scope.cancelled_caught:
            raise ServerError("the run has ended")

    # --- state shown on the page ------------------------------------------------------------------

    @property
    def _chat(self) -> ChatFormat | None:
        return self._last_chat if self.runtime is None else self.runtime.chat

    def _decoded(self, ids: Sequence[int]) -> str:
        return "" if self._chat is None else self._chat.decode(ids)

    def _num_waiting(self) -> int:
        return 0 if self.runtime is None else self.runtime.router.num_waiting

    def _sandbox(self) -> Mapping[str, Any]:
        return {} if self.runtime is None else self.runtime.pool.stats()

    def _queue(self) -> tuple[int, int]:
        view = {} if self.loop is None else self.loop.view()
        return view.get("queue_groups", 0), view.get("queue_bytes", 0)

    async def _scraped(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": CONTENT_TYPE_LATEST}
        return web.Response(body=self._metrics.render(), headers=headers)

    def _servers(self) -> Sequence[ServerView]:
        return () if self.runtime is None else self.runtime.router.view()

    def _moment(self) -> Mapping[str, Any]:
        found: dict[str, Any] = {"waits": self._progress.line}
        if (standing := self._progress.standing) is not None:
            found |= {
                "stage": standing.stage,
                "stage_step": standing.step,
                "stage_num_steps": standing.num_steps,
                "waits": standing.waits,
                "values": dict(standing.values),
                "left_s": standing.left_s,
                "unit": standing.unit,
            }
        if self.loop is not None:
            found |= self.loop.view()
            if self.board.steps:
                found["staleness"] = self.board.steps[-1].get("staleness_mean")
        return found

    async def _read(
        self, read: Callable[..., dict[str, Any] | None], name: str
    ) -> dict[str, Any] | None:
        return await anyio.to_thread.run_sync(read, self.folder.path, name, self._chat)


def _num_dropped(reader: Traces | Journal | Sinks) -> int:
    found = reader.num_dropped
    return sum(found.values()) if isinstance(found, dict) else found
