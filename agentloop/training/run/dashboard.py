"""The web page of a training or evaluation run, and the other readers of its events.

The page is served from the run's start; servers, sandbox and training loop appear on it as they
become available. Visitors may cancel rollouts and control the loop.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

import anyio
from aiohttp import web

from agentloop.agent.chat_format import ChatFormat
from agentloop.distribution import version
from agentloop.errors import RequestError, ServerError, message_of
from agentloop.events import Emit, Event, Measured
from agentloop.launch.progress import ProgressLine
from agentloop.observe.archive import read_group, read_rollout
from agentloop.observe.bottleneck import ServedOn
from agentloop.observe.dashboard import Dashboard, Exporter
from agentloop.observe.exporters.event_log import EventLog, EventLogSettings
from agentloop.observe.exporters.otel import OtelSettings, Traces
from agentloop.observe.exporters.sinks import Sinks, SinksSettings
from agentloop.observe.live import Sources, served_here
from agentloop.observe.page import Page
from agentloop.observe.runs import of_start, origin_of, start_metrics
from agentloop.runtime import Runtime
from agentloop.serving.access import ApiGuard, ServeSettings
from agentloop.serving.listen import bind, serving
from agentloop.training.loop.training_loop import TrainingLoop
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.learning import headline

_SAVE_S = 600.0
T = TypeVar("T")


class RunDashboard:
    """The readers of a run's events; `emit` passes an event to all of them.

    Set `runtime` and `loop` as soon as they exist.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: ProgressLine,
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
        self.runtime: Runtime | None = None
        self.loop: TrainingLoop | None = None
        self._kind = kind
        self._has_runtime = has_runtime
        self._progress = progress
        self._last_chat: ChatFormat | None = None
        self._was_draining = False
        self._answers: set[anyio.CancelScope] = set()  # to visitors
        self._dashboard = Dashboard(self._sources(), readers=readers, queue=self._queue)
        self.stalls, self.emit = self._dashboard.stalls, self._dashboard.emit
        steps = [*start_metrics(folder.path), *folder.metrics()]
        self._dashboard.board.steps.extend(steps)

    def on_start_event(self, event: Event) -> None:
        """Show the metrics of a step of supervised fine-tuning on the page.

        Other readers of events do not receive them, since they would take the step for one of the
        run's, which are counted separately.
        """
        if isinstance(event, Measured):
            self._dashboard.board.on_event(Measured(of_start(event.row)))

    @asynccontextmanager
    async def exporters(
        self,
        otel: OtelSettings,
        *,
        model: str,
        event_log: EventLogSettings | None = None,
        sinks: SinksSettings | None = None,
        config: Mapping[str, object] | None = None,
    ) -> AsyncIterator[None]:
        """Pass events to the configured exporters: traces, the event log and sinks such as wandb.

        Raises:
            SettingsError: a package that an exporter needs is not installed.
        """
        path = self.folder.path
        opened: dict[str, AbstractAsyncContextManager[Exporter]] = {
            "traces": Traces.open(
                otel, model=model, run=path.name, is_scored=True, decode=self._decode
            )
        }
        if event_log is not None and event_log.enabled:
            opened["event_log"] = EventLog.open(path, event_log)
        if sinks is not None:
            opened["sinks"] = Sinks.open(
                sinks, folder=path, run_name=path.name, config=config or {}
            )
        async with AsyncExitStack() as stack:
            for name, exporter in opened.items():
                await stack.enter_async_context(self._dashboard.exporting(name, exporter))
            yield

    @asynccontextmanager
    async def serve_page(self, settings: ServeSettings) -> AsyncIterator[None]:
        """Serve the page, on another port if the configured one is taken.

        Raises:
            SettingsError: the address cannot be bound.
        """
        with bind(settings, or_free=True) as bound:
            async with self._dashboard.running(self._answer) as ask:
                page = Page(
                    self._dashboard.live,
                    ask=ask if self._has_runtime else None,
                    control=self if self.actions else None,
                    control_token=settings.control_token,
                    io_timeout_s=settings.io_timeout_s,
                )
                app = web.Application()
                ApiGuard(settings).add_to(app)
                page.add_to(app)
                app.router.add_get("/metrics", self._dashboard.serve_metrics)
                async with serving(app, bound) as url:
                    token = f" (control token: {page.control_token})" if self.actions else ""
                    self._progress.say(f"Watch it: {url}/{token}")
                    async with self._ending():
                        yield

    @asynccontextmanager
    async def _ending(self) -> AsyncIterator[None]:
        """Tell the page's readers how the block ended."""
        path, live = self.folder.path, self._dashboard.live
        again = f"To view it later: agentloop runs view {shlex.quote(str(path))}"
        resume = f"to continue: agentloop {self._kind} --resume {shlex.quote(str(path))}"
        try:
            yield
        except Exception as error:
            message = message_of(error).partition("\n")[0] or type(error).__name__
            await live.end("failed", f"The run has failed: {message}. {again}")
            raise
        except BaseException:
            await live.end("stopped", f"The run was stopped; {resume}. {again}")
            raise
        if self._was_draining:
            await live.end("drained", f"The run was drained; {resume}. {again}")
        else:
            await live.end("finished", f"The run has finished. {again}")

    def detach(self) -> None:
        """Detach from the loop and the runtime before they end, cancelling answers to visitors.

        The page keeps showing what they have done.
        """
        self._last_chat = self._chat
        self._was_draining |= self.loop is not None and self.loop.control.is_draining
        self.runtime = self.loop = None
        for scope in self._answers:
            scope.cancel()

    # --- actions of visitors ----------------------------------------------------------------------

    @property
    def actions(self) -> Sequence[str]:
        """Implement `agentloop.observe.page.Control`."""
        if self._kind == "train":
            return ("pause", "resume", "drain", "cancel", "checkpoint")
        return ("cancel",) if self._has_runtime else ()

    async def perform(self, action: str, rollout: str | None) -> str:
        """Implement `agentloop.observe.page.Control`."""
        if action == "cancel":
            if rollout is None:
                raise RequestError("rollout: name the rollout to cancel")
            if self.runtime is None or not self.runtime.cancel(rollout):
                raise RequestError(f"rollout: {rollout!r} is not in flight here")
            return f"{rollout} was cancelled and gets no reward"
        loop = self.loop
        if loop is None:
            raise RequestError("do: the run has not started its rollouts yet")
        match action:
            case "pause":
                loop.control.pause()
                return "paused: no further groups are started; those in flight continue"
            case "resume":
                loop.control.pause(False)
                if loop.control.is_draining:
                    return "resumed, but no groups are started because the run is draining"
                return "resumed: groups are started again"
            case "drain":
                loop.control.drain()
                return "draining: the run ends when the groups in flight have ended"
            case _:
                with anyio.move_on_after(_SAVE_S):
                    return f"a checkpoint of step {await loop.save()} is being written"
                raise RequestError(f"do: the learner was busy for {_SAVE_S:g} s; try again later")

    async def _answer(self, question: str, emit: Emit) -> None:
        if self.runtime is None:
            raise ServerError("no server is ready yet; ask again later")
        with anyio.CancelScope() as scope:
            self._answers.add(scope)
            try:
                await self.runtime.rollout(question, on_event=emit)
            finally:
                self._answers.remove(scope)
        if scope.cancelled_caught:
            raise ServerError("the run has ended")

    # --- state shown on the page ------------------------------------------------------------------

    def _sources(self) -> Sources:
        return Sources(
            {
                "kind": self._kind,
                "title": self.folder.path.name,
                "version": f"agentloop {version()}",
                "can_ask": self._has_runtime,
                "controls": self.actions,
                "has_sandbox": self._has_runtime,
                **origin_of(self.folder.path),
            },
            chat=lambda: self._chat,
            servers=lambda: self.runtime.router.view() if self.runtime else (),
            num_waiting=lambda: self.runtime.router.num_waiting if self.runtime else 0,
            sandbox=lambda: self.runtime.pool.stats() if self.runtime else {},
            served_on=self._served_on,
            more=self._state,
            folder=self.folder.path,
            read_rollout=partial(self._read, read_rollout),
            read_group=partial(self._read, read_group),
        )

    @property
    def _chat(self) -> ChatFormat | None:
        return self._last_chat if self.runtime is None else self.runtime.chat

    def _decode(self, ids: Sequence[int]) -> str:
        return "" if self._chat is None else self._chat.decode(ids)

    def _served_on(self) -> ServedOn:
        if self.runtime is None:
            return ServedOn.UNKNOWN if self._has_runtime else ServedOn.ENDPOINT
        settings = self.runtime.settings
        return served_here(settings.servers, settings.server.device)

    def _queue(self) -> tuple[int, int]:
        if self.loop is None:
            return 0, 0
        view = self.loop.view()
        return view["queue_groups"], view["queue_bytes"]

    def _state(self) -> Mapping[str, object]:
        state: dict[str, object] = {"waits": self._progress.line}
        if (status := self._progress.status) is not None:
            state |= {
                "stage": status.stage,
                "stage_step": status.step,
                "stage_num_steps": status.num_steps,
                "waits": status.waits,
                "values": dict(status.values),
                "left_s": status.left_s,
                "unit": status.unit,
            }
        steps = self._dashboard.board.steps
        if learning := headline(steps):
            state["learning"] = asdict(learning)
        if self.loop is not None:
            state |= self.loop.view()
            if steps:
                state["staleness"] = steps[-1].get("staleness_mean")
        return state

    async def _read(
        self, read: Callable[[Path, str, ChatFormat | None], T | None], name: str
    ) -> T | None:
        return await anyio.to_thread.run_sync(read, self.folder.path, name, self._chat)
