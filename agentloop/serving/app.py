"""The HTTP service of a runtime: OpenAI's routes, the service's own, and the page.

The routes are in ROUTES at the end; those of the live web page are in observe/page.py.

A request lives in its handler's task: when the client disconnects, its rollouts are cancelled.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from itertools import product
from typing import Any

import anyio
import anyio.to_thread
import pydantic
from aiohttp import web
from anyio.streams.memory import MemoryObjectSendStream
from typing_extensions import TypedDict

from agentloop.agent.rollout import Budget
from agentloop.agent.sessions import ModelSession, ModelSessions
from agentloop.agent.sessions.history import question_in
from agentloop.aio import task_group
from agentloop.distribution import version
from agentloop.errors import RequestError, ServerError, UnknownModel
from agentloop.events import Emit
from agentloop.inference.replicas import ServerView
from agentloop.inference.sglang.sampling import Sampling
from agentloop.observe.ask import Ask
from agentloop.observe.dashboard import Dashboard
from agentloop.observe.event_fanout import EventFanout
from agentloop.observe.exporters.otel import CallerSpan, Traces, caller_span
from agentloop.observe.live import Sources, served_here
from agentloop.observe.page import Page
from agentloop.observe.recorder import GroupFolder, Recorder
from agentloop.observe.stalls import Wait
from agentloop.observe.watchdog import FOR_SERVICES, Progress
from agentloop.plain_json import dumps
from agentloop.runtime import Runtime, Settings
from agentloop.sandbox.openapi import (
    JSON,
    JSON_LINES,
    TEXT,
    Response,
    Responses,
    Route,
    add_routes,
    document,
)
from agentloop.serving.access import ApiGuard
from agentloop.serving.answering import Answering
from agentloop.serving.bare_model import (
    COMPLETION,
    MESSAGE,
    RESPONSE,
    SESSION_ROUTES,
    TOKEN_COUNT,
    BareModel,
    in_anthropics_form,
)
from agentloop.serving.environments import ServedAgent
from agentloop.serving.error_responses import ErrorResponses
from agentloop.serving.exchange import (
    ChatExchange,
    Exchange,
    MessagesExchange,
    ResponsesExchange,
)
from agentloop.serving.http import (
    BODY_ERRORS,
    REFUSALS,
    REQUEST_ID,
    UNKNOWN_MODEL,
    json_response,
    name_request,
    read_body,
    send,
)
from agentloop.serving.idempotency import AnswerAttempt, IdempotentAnswers
from agentloop.serving.listen import serving
from agentloop.serving.mcp import AgentTool
from agentloop.serving.protocols.chat.completions import CompletionRequest, Completions
from agentloop.serving.protocols.messages.messages import MessagesRequest, TokenCountRequest
from agentloop.serving.protocols.responses.responses import ResponsesRequest
from agentloop.serving.protocols.responses.store import ResponseStore
from agentloop.serving.requests import ChatRequest, parse, with_overrides
from agentloop.serving.schemas import (
    HealthStatus,
    Model,
    ModelList,
    RolloutLine,
    TextCompletion,
    ToolDefinition,
)
from agentloop.trajectory import StopReason, Trajectory

__all__ = ["AgentService", "listening"]


class RolloutsRequest(pydantic.BaseModel):
    """The body of `POST /v1/rollouts`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    prompts: list[str | list[dict[str, object]]] = pydantic.Field(min_length=1, max_length=65_536)
    n: int = pydantic.Field(1, ge=1, le=1024)
    tools: list[str | ToolDefinition] | None = None
    sampling: Sampling = pydantic.Field(
        default_factory=lambda: Sampling(), description="Fields left out have the service's values."
    )
    budget: Budget = pydantic.Field(
        default_factory=lambda: Budget(), description="Fields left out have the service's values."
    )


class CapacityWait(TypedDict):
    """A turn, by its rollout's id, or a group that waits for KV capacity."""

    id: str
    reason: str
    waited_s: float


class Waits(TypedDict):
    """The response to `GET /v1/waits`."""

    no_progress_s: float
    waits: list[Wait]
    waiting_for_capacity: list[CapacityWait]
    servers: list[ServerView]


class AgentService:
    """The HTTP handlers of a runtime; they also map its errors to HTTP responses."""

    def __init__(
        self,
        runtime: Runtime,
        settings: Settings,
        record: GroupFolder | None = None,
        agent: ServedAgent | None = None,
    ) -> None:
        """
        Args:
            record: where conversations are recorded.
            agent: the agent that is served; None: the built-in one, with the tools of the settings.
        """
        self._runtime = runtime
        self._settings = settings
        self._guard = ApiGuard(settings.serve)
        self._slots = anyio.CapacityLimiter(settings.serve.max_rollouts)
        self._is_paused = False
        self._num_refused = 0
        self._store = ResponseStore()
        self._answers = IdempotentAnswers(is_shared=True, max_answers=1024, max_ids=1 << 22)
        name = "agent" if agent is None else agent.environment.name
        self._agent_name = f"{runtime.model_name}-{name}"
        self.rollout = runtime.rollout if agent is None else agent.rollout
        self.recorder = Recorder(
            record,
            runtime.chat.last_user_text,
            agent=self._agent_name,
            model=runtime.model_name,
            max_bytes=settings.sessions.record_max_mib * 2**20,
        )
        self._answering = Answering(runtime.chat, io_timeout_s=settings.serve.io_timeout_s)
        sources = Sources(
            {
                "kind": "serve",
                "title": runtime.model_name,
                "model": runtime.model_name,
                "version": f"agentloop {version()}",
                "can_ask": True,
                "controls": self.actions,
                "has_sandbox": True,
            },
            chat=lambda: runtime.chat,
            servers=runtime.router.view,
            num_waiting=lambda: runtime.router.num_waiting,
            sandbox=lambda: runtime.pool.stats(),
            served_on=lambda: served_here(settings.servers, settings.server.device),
            more=lambda: {"paused": self._is_paused, "refusals": self._num_refused},
        )
        self._dashboard = Dashboard(sources, num_refused=lambda: self._num_refused)
        self.on_event = self._dashboard.emit  # also for rollouts that others start, to count them
        self.page = Page(
            self._dashboard.live,
            ask=self._ask,
            control=self,
            control_token=settings.serve.control_token,
            io_timeout_s=settings.serve.io_timeout_s,
        )
        self.sessions = ModelSessions(
            settings.sessions,
            partial(
                ModelSession,
                engine=runtime.router,
                chat=runtime.chat,
                sampling=settings.sampling,
                budget=settings.budget,
                emit=self.on_event,
            ),
            on_closed=lambda session, _: self.recorder.add_session(session.name, session.branches),
        )
        self.bare = BareModel(
            self.sessions,
            runtime.chat,
            name=runtime.model_name,
            sampling=settings.sampling,
            context_length=lambda: runtime.router.context_length,
            answering=self._answering,
            slots=self._slots,
            check_open=self._check_open,
            created=int(time.time()),
            io_timeout_s=settings.serve.io_timeout_s,
        )
        self._completions = Completions(
            runtime.router,
            runtime.chat,
            name=runtime.model_name,
            sampling=settings.sampling,
            budget=settings.budget,
            slots=self._slots,
            token_text=self._answering.token_text,
        )
        self._asks: Ask | None = None
        self._mcp = AgentTool(self._answer_to, model_name=runtime.model_name)
        # On demand, because it takes half a second.
        self._document = cache(partial(
            document, [*ROUTES, *SESSION_ROUTES],
            info={"title": "agentloop", "version": version(), "description": _ABOUT},
            needs_token=self._guard.needs_token, refusals=REFUSALS, headers=REQUEST_ID,
        ))  # fmt: skip

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks of the service: page updates, stall detection and traces."""
        dashboard, chat, model = self._dashboard, self._runtime.chat, self._runtime.model_name
        traces = Traces.open(self._settings.otel, model=model, decode=chat.decode)
        async with (
            dashboard.exporting("record", self.recorder.running()),
            dashboard.exporting("traces", traces),
            dashboard.running(self._answer) as self._asks,
            task_group() as tasks,
        ):
            more = self._servers_in_words
            watch = Progress(dashboard.stalls, FOR_SERVICES, more=more, may_idle=True).watch
            tasks.start_soon(watch)
            tasks.start_soon(self.sessions.close_idle)
            try:
                yield
            finally:
                self.sessions.close_all()
                await dashboard.live.end("stopped", "The service has ended.")
            tasks.cancel_scope.cancel()

    # --- the page's visitors ----------------------------------------------------------------------

    @property
    def actions(self) -> Sequence[str]:
        """Implement `agentloop.observe.page.Control`."""
        return ("pause", "resume", "cancel")

    async def perform(self, action: str, rollout: str | None) -> str:
        """Implement `agentloop.observe.page.Control`."""
        if action == "cancel":
            if rollout is None:
                raise RequestError("rollout: name the rollout to cancel")
            if not self._runtime.cancel(rollout):
                raise RequestError(f"rollout: {rollout!r} is not in flight")
            return f"{rollout} was cancelled"
        self._is_paused = action == "pause"
        if self._is_paused:
            return "paused: new requests are refused with status 503"
        return "resumed: new requests are accepted"

    async def _ask(self, question: str) -> str:
        assert self._asks is not None
        self._check_open()
        return await self._asks(question)

    async def _answer(self, question: str, emit: Emit) -> Trajectory:
        async with self._slots:  # no deadline: until another rollout ends, which has its own
            trajectory = await self.rollout(question, on_event=emit)
        self.recorder.add(trajectory)
        return trajectory

    def _check_open(self) -> None:
        """Raise ServerError if the service is paused."""
        if self._is_paused:
            self._num_refused += 1
            raise ServerError("the service is paused by its operator; try again later")

    def _servers_in_words(self) -> str:
        return "\n".join(
            f"  {view.url}: {view.state}, {view.num_running} running, "
            f"{view.num_held_tokens + view.num_reserved_tokens} of {view.capacity_tokens} tokens"
            f"{f' ({view.reason})' if view.reason else ''}"
            for view in self._runtime.router.view()
        )

    def build(self) -> web.Application:
        app = web.Application(
            middlewares=[ErrorResponses([*ROUTES, *SESSION_ROUTES], begin=_begin_span).middleware],
            client_max_size=self._settings.serve.max_body_mib * 1024 * 1024,
        )
        add_routes(app.router, ROUTES, self)
        add_routes(app.router, SESSION_ROUTES, self.bare)
        self.page.add_to(app)
        app.on_response_prepare.append(name_request)
        self._guard.add_to(app)
        return app

    async def count_tokens(self, request: web.Request) -> web.Response:
        return await self.bare.count_tokens(request)

    async def answer(self, request: web.Request, kind: type[Exchange]) -> web.StreamResponse:
        """Answer by the model that a request names: the agent, or the bare model."""
        body = await self._body(request)
        exchange = kind.parse(body, self._store)
        async with self._answers.attempt(request, body) as attempt:
            if self._check_model(exchange.chat.model) == self.bare.name:
                return await self.bare.answer(request, exchange, attempt)
            return await self._answer_by_agent(request, exchange, attempt)

    async def _answer_by_agent(
        self, request: web.Request, exchange: Exchange, attempt: AnswerAttempt
    ) -> web.StreamResponse:
        chat_request = exchange.chat
        chat_request.refuse_for_agent()
        self._check_open()
        writers = self._answering.writers(
            chat_request,
            self._agent_name,
            is_agent=True,
            tells_executed=exchange.tells_executed,
            frame=attempt.frame,
        )
        trajectories: dict[int, Trajectory] = {}

        async def run(index: int, emit: Emit) -> Trajectory:
            options = self._options(chat_request, index)
            on_event = EventFanout(self.on_event, emit)
            async with self._slots:  # no deadline: until another rollout ends, which has its own
                trajectories[index] = await self.rollout(
                    chat_request.messages, on_event=on_event, **options
                )
            return _scorable(trajectories[index])

        try:
            return await self._answering.answer(
                request, exchange, writers, attempt.runs(writers, run)
            )
        finally:
            choices = [trajectories[index] for index in sorted(trajectories)]
            self.recorder.add(*choices, question=question_in(chat_request.messages))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        parameters = CompletionRequest.parse(await self._body(request))
        if parameters.model is not None and self._check_model(parameters.model) != self.bare.name:
            raise RequestError(f"model: only {self.bare.name!r} has completions")
        self._check_open()
        return await self._completions.answer(parameters)

    async def rollouts(self, request: web.Request) -> web.StreamResponse:
        body = parse(RolloutsRequest, await self._body(request))
        self._check_open()
        overrides = body.model_dump(exclude_unset=True)
        sampling = with_overrides(
            self._settings.sampling, overrides.get("sampling", {}), "sampling"
        )
        budget = with_overrides(self._settings.budget, overrides.get("budget", {}), "budget")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        lines_in, lines = anyio.create_memory_object_stream[RolloutLine](0)
        jobs = product(range(len(body.prompts)), range(body.n))
        name, timeout_s = uuid.uuid4().hex, self._settings.serve.io_timeout_s
        ended: dict[int, list[Trajectory]] = {}  # by prompt, until all of its samples are there

        async def work(out: MemoryObjectSendStream[RolloutLine]) -> None:
            async with out:
                for index, sample in jobs:  # shared: each worker takes the next
                    # no deadline: the reader below writes to a client, with one
                    await out.send(await run_sample(index, sample))

        async def run_sample(index: int, sample: int) -> RolloutLine:
            line: RolloutLine = {"index": index, "sample": sample}
            try:
                # no deadline: until another rollout ends, which has its own
                async with self._slots:
                    trajectory = await self.rollout(
                        body.prompts[index],
                        tools=body.tools,
                        sampling=sampling.of_sibling(sample),
                        budget=budget,
                        group=f"{name}.{index}" if body.n > 1 else "",
                        on_event=self.on_event,
                    )
                ended.setdefault(index, []).append(trajectory)
                if len(ended[index]) == body.n:
                    self.recorder.add(*ended.pop(index))
                line["trajectory"] = trajectory.to_dict_per_token()
            except (RequestError, ServerError) as error:  # the status has been sent already
                line["error"] = str(error)
            return line

        try:
            async with task_group(only_first=True) as tasks:
                async with lines_in:
                    num_jobs = len(body.prompts) * body.n
                    for _ in range(min(num_jobs, self._settings.serve.max_rollouts)):
                        tasks.start_soon(work, lines_in.clone())
                async with lines:
                    async for line in lines:  # no deadline: the rollouts have theirs
                        await send(request, response, dumps(line) + b"\n", timeout_s=timeout_s)
        finally:
            for siblings in ended.values():
                self.recorder.add(*siblings)
            for index in range(len(body.prompts)):
                self._runtime.router.forget_group(f"{name}.{index}")
        return response

    async def models(self, request: web.Request) -> web.Response:
        data = [self.bare.entry(name) for name in (self._agent_name, self.bare.name)]
        body: ModelList = {"object": "list", "data": data}
        return json_response(body)

    async def model(self, request: web.Request) -> web.Response:
        name = self._check_model(request.match_info["model"])
        return json_response(self.bare.entry(name))

    async def healthz(self, request: web.Request) -> web.Response:
        servers = self._runtime.router.view()
        is_healthy = any(server.healthy for server in servers)
        body: HealthStatus = {
            "status": "ok" if is_healthy else "no server is healthy",
            "servers": {"healthy": sum(s.healthy for s in servers), "all": len(servers)},
        }
        return json_response(body, status=200 if is_healthy else 503)

    async def mcp(self, request: web.Request) -> web.Response:
        return await self._mcp.answer(request, await self._body(request))

    async def _answer_to(self, question: str) -> str:
        self._check_open()
        return _scorable(await self._answer(question, self.on_event)).answer

    async def waits(self, request: web.Request) -> web.Response:
        """List everything that waits, with reasons and durations, and the state of the servers."""
        body: Waits = {
            "no_progress_s": self._dashboard.stalls.no_progress_s,
            "waits": self._dashboard.stalls.waits(),
            "waiting_for_capacity": [
                {"id": id, "reason": reason, "waited_s": waited_s}
                for id, waited_s, reason in self._runtime.router.waits()
            ],
            "servers": list(self._runtime.router.view()),
        }
        return json_response(body)

    async def metrics(self, request: web.Request) -> web.Response:
        return await self._dashboard.serve_metrics(request)

    async def openapi(self, request: web.Request) -> web.Response:
        return json_response(await anyio.to_thread.run_sync(self._document))

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self._settings.serve.io_timeout_s)

    def _options(self, request: ChatRequest, index: int) -> dict[str, Any]:
        sampling = with_overrides(self._settings.sampling, request.sampling_overrides(), "sampling")
        budget = self._settings.budget
        if request.token_limit is not None:
            max_tokens = min(request.token_limit, budget.max_sampled_tokens or request.token_limit)
            budget = budget.model_copy(update={"max_sampled_tokens": max_tokens})
        if (limit := request.thinking_token_budget) is not None:
            limit = min(limit, budget.max_thought_tokens or limit)
            budget = budget.model_copy(update={"max_thought_tokens": limit})
        tools: list[object] | None = list(request.tools) if request.tools else None
        return {
            "sampling": sampling.of_sibling(index),
            "budget": budget,
            "options": request.turn_options(),
            "tools": [] if request.tool_choice == "none" else tools,
            "template_arguments": request.template_arguments,
        }

    def _check_model(self, name: str | None) -> str:
        """Return the name of the model that is asked for; by default, it is the agent.

        Raises:
            UnknownModel: there is no such model here.
        """
        names = (self._agent_name, self.bare.name)
        if name is None:
            return self._agent_name
        if name not in names:
            raise UnknownModel(
                f"model: {name!r} is not served here; this server has {names[0]!r}, which runs its "
                f"own tools, and {names[1]!r}, which does not"
            )
        return name


_ABOUT = (
    "The agent answers in OpenAI's protocol and runs its own tools. Whole trajectories are "
    "available as well. Details: docs/http.md."
)
_HEALTH: Responses = {
    200: Response("At least one inference server is healthy.", {JSON: HealthStatus}),
    503: Response("No inference server is healthy.", {JSON: HealthStatus}),
}
ROUTES = [
    Route("POST", "/v1/chat/completions", partial(AgentService.answer, kind=ChatExchange),
          "Answer a conversation; the agent runs its own tools",
          {**COMPLETION, **UNKNOWN_MODEL, **BODY_ERRORS}, ChatRequest),
    Route("POST", "/v1/responses", partial(AgentService.answer, kind=ResponsesExchange),
          "Answer a conversation in the protocol of OpenAI's Responses",
          {**RESPONSE, **UNKNOWN_MODEL, **BODY_ERRORS}, ResponsesRequest),
    Route("POST", "/v1/messages", partial(AgentService.answer, kind=MessagesExchange),
          "Answer a conversation in Anthropic's protocol",
          {**MESSAGE, **in_anthropics_form({**UNKNOWN_MODEL, **BODY_ERRORS})}, MessagesRequest),
    Route("POST", "/v1/messages/count_tokens", AgentService.count_tokens,
          "Count the tokens of a prompt",
          {**TOKEN_COUNT, **in_anthropics_form(BODY_ERRORS)},
          TokenCountRequest),
    Route("POST", "/v1/completions", AgentService.completions,
          "Continue text or token ids with the bare model",
          {200: Response("The continuations.", {JSON: TextCompletion}), **UNKNOWN_MODEL,
           **BODY_ERRORS}, CompletionRequest),
    Route("POST", "/v1/rollouts", AgentService.rollouts,
          "Run rollouts of prompts and return their trajectories",
          {200: Response("Trajectories, each sent when it ends.", {JSON_LINES: RolloutLine}),
           **BODY_ERRORS}, RolloutsRequest),
    Route("GET", "/v1/models", AgentService.models, "List the models",
          {200: Response("The agent and the bare model.", {JSON: ModelList})}),
    Route("GET", "/v1/models/{model:.+}", AgentService.model, "Get the model by name",
          {200: Response("The model.", {JSON: Model}), **UNKNOWN_MODEL},
          parameters={"model": "Name of the model; slashes need not be escaped."}),
    Route("POST", "/mcp", AgentService.mcp, "Speak MCP, with the agent as a tool", {}),
    Route("GET", "/v1/waits", AgentService.waits,
          "List what every rollout waits for and how long, and the servers",
          {200: Response("The waits and the state of the servers.", {JSON: Waits})}),
    Route("GET", "/healthz", AgentService.healthz, "Check the service's health", _HEALTH),
    Route("GET", "/health", AgentService.healthz, "Check the service's health", _HEALTH),
    Route("GET", "/metrics", AgentService.metrics, "Get Prometheus metrics",
          {200: Response("Metrics in the text format.", {TEXT: str})}),
    Route("GET", "/openapi.json", AgentService.openapi, "Get this document",
          {200: Response("An OpenAPI 3.1 document.", {JSON: dict[str, object]})}),
]  # fmt: skip


@asynccontextmanager
async def listening(app: AgentService, bound: socket.socket) -> AsyncIterator[str]:
    """Serve on a bound socket until the context is left; yield the URL."""
    async with serving(app.build(), bound) as url, app.running():
        yield url


def _begin_span(request: web.Request) -> None:
    # One task serves all requests of a connection: do not inherit the previous request's span.
    caller_span.set(CallerSpan.parse(request.headers.get("traceparent", "")))


def _scorable(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory; raise ServerError if it was cancelled or failed without an answer."""
    if trajectory.stop_reason is StopReason.CANCELLED:
        raise ServerError("the rollout was cancelled by the service's operator")
    if trajectory.stop_reason.is_unscorable:
        raise ServerError(f"the rollout failed: {trajectory.error}")
    return trajectory
