"""The HTTP service of a runtime: OpenAI's routes, the service's own, and the page.

The routes are in ROUTES at the end; those of the live web page are in observe/page.py.

A request lives in its handler's task: when the client disconnects, its rollouts are cancelled.
"""

from __future__ import annotations

import logging
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from itertools import product
from typing import Any, TypeVar

import anyio
import pydantic
from aiohttp import web
from anyio.streams.memory import MemoryObjectSendStream
from typing_extensions import TypedDict

from agentloop.agent.rollout import Budget
from agentloop.aio import task_group
from agentloop.api.chat_completions import ChunkWriter, chunk_frame, completion
from agentloop.api.guard import ApiGuard
from agentloop.api.http import (
    BODY_ERRORS,
    REFUSALS,
    REQUEST_ID,
    UNKNOWN_MODEL,
    error_body,
    error_of,
    json_response,
    name_request,
    read_body,
    send,
)
from agentloop.api.listen import serving
from agentloop.api.mcp import AgentTool
from agentloop.api.requests import ChatRequest, parse
from agentloop.api.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorBody,
    HealthStatus,
    Model,
    ModelList,
    RolloutLine,
    ToolDefinition,
    UsageChunk,
)
from agentloop.distribution import version
from agentloop.errors import AgentLoopError, RequestError, ServerError, UnknownModel
from agentloop.events import Emit
from agentloop.inference.replicas import ServerView
from agentloop.inference.sglang.sampling import Sampling
from agentloop.observe.ask import Ask
from agentloop.observe.dashboard import Dashboard
from agentloop.observe.exporters.otel import CallerSpan, Traces, caller_span
from agentloop.observe.live import Sources
from agentloop.observe.stalls import Wait
from agentloop.plain_json import dumps
from agentloop.runtime import Runtime, Settings
from agentloop.sandbox.openapi import (
    EVENTS,
    JSON,
    JSON_LINES,
    TEXT,
    Response,
    Responses,
    Route,
    add_routes,
    document,
)
from agentloop.trajectory import StopReason, Trajectory

__all__ = ["AgentService", "listening"]

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
M = TypeVar("M", bound=pydantic.BaseModel)


class RolloutsRequest(pydantic.BaseModel):
    """The body of `POST /v1/rollouts`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    prompts: list[str | list[dict[str, Any]]] = pydantic.Field(min_length=1, max_length=65_536)
    n: int = pydantic.Field(1, ge=1, le=1024)
    tools: list[str | ToolDefinition] | None = None
    sampling: Sampling = pydantic.Field(
        default_factory=lambda: Sampling(), description="Fields left out have the service's values."
    )
    budget: Budget = pydantic.Field(
        default_factory=lambda: Budget(), description="Fields left out have the service's values."
    )


class RoomWait(TypedDict):
    """A rollout that waits for KV capacity on a server."""

    rollout_id: str
    why: str
    waited_s: float


class Waits(TypedDict):
    """The response to `GET /v1/waits`."""

    no_progress_s: float
    waits: list[Wait]
    for_room: list[RoomWait]
    servers: list[ServerView]


class AgentService:
    """The HTTP handlers of a runtime; they also map its errors to HTTP responses."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._guard = ApiGuard(settings.serve)
        self._slots = anyio.CapacityLimiter(settings.serve.max_rollouts)
        self._created = int(time.time())
        self._is_paused = False
        self._num_refused = 0
        self._token_text = lru_cache(1 << 16)(lambda token: runtime.chat.decode([token]))
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
            more=self._moment,
        )
        self._dashboard = Dashboard(sources, num_refused=lambda: self._num_refused)
        self.on_event = self._dashboard.emit  # also for rollouts that others start, to count them
        self.page = self._dashboard.page(
            ask=self._ask,
            control=self,
            control_token=settings.serve.control_token,
            io_timeout_s=settings.serve.io_timeout_s,
        )
        self._asks: Ask | None = None
        self._mcp = AgentTool(self._answer_to, model_name=runtime.model_name)
        self._document = document(
            ROUTES,
            info={"title": "agentloop", "version": version(), "description": _ABOUT},
            needs_token=self._guard.needs_token,
            refusals=REFUSALS,
            headers=REQUEST_ID,
        )

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the background tasks of the service: page updates, stall detection and traces."""
        dashboard, chat, model = self._dashboard, self._runtime.chat, self._runtime.model_name
        no_progress_s = self._settings.serve.no_progress_s
        traces = Traces.open(self._settings.otel, model=model, decode=chat.decode)
        async with (
            dashboard.exporting("traces", traces),
            dashboard.running(self._answer) as self._asks,
            task_group() as tasks,
        ):
            tasks.start_soon(dashboard.stalls.watch, no_progress_s, self._servers_in_words)
            try:
                yield
            finally:
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

    async def _answer(self, question: str, emit: Emit) -> None:
        async with self._slots:  # no deadline: `asking` has one for its start
            await self._runtime.rollout(question, on_event=emit)

    def _check_open(self) -> None:
        """Raise ServerError if the service is paused."""
        if self._is_paused:
            self._num_refused += 1
            raise ServerError("the service is paused by its operator; try again later")

    def _moment(self) -> dict[str, Any]:
        return {
            "paused": self._is_paused,
            "refusals": self._num_refused,
            "places": self._slots.total_tokens,
            "places_used": self._slots.borrowed_tokens,
        }

    def _servers_in_words(self) -> str:
        return "\n".join(
            f"  {view.url}: {view.state}, {view.num_running} running, "
            f"{view.num_held_tokens + view.num_reserved_tokens} of {view.capacity_tokens} tokens"
            f"{f' ({view.reason})' if view.reason else ''}"
            for view in self._runtime.router.view()
        )

    def build(self) -> web.Application:
        app = web.Application(
            middlewares=[self._errors, self._guard.middleware],
            client_max_size=self._settings.serve.max_body_mib * 1024 * 1024,
        )
        add_routes(app.router, ROUTES, self)
        self.page.add_to(app)
        app.on_response_prepare.append(name_request)
        return app

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        asked = ChatRequest.parse(await self._body(request))
        self._check_model(asked.model)
        self._check_open()
        writers = self._writers(asked)
        if asked.stream:
            return await self._stream_completion(request, asked, writers)
        trajectories: dict[int, Trajectory] = {}
        async with task_group(only_first=True) as tasks:
            for index in range(len(writers)):
                tasks.start_soon(self._complete, asked, index, trajectories)
        choices = [(writer, trajectories[index]) for index, writer in enumerate(writers)]
        if asked.logprobs:  # building them takes seconds for many tokens
            return await anyio.to_thread.run_sync(lambda: json_response(completion(choices)))
        return json_response(completion(choices))

    async def _complete(
        self, asked: ChatRequest, index: int, trajectories: dict[int, Trajectory]
    ) -> None:
        options = self._options(asked, index)
        async with self._slots:  # no deadline: until another rollout ends, which has its own
            trajectory = await self._runtime.rollout(
                asked.messages, on_event=self.on_event, **options
            )
        trajectories[index] = _scorable(trajectory)

    async def _stream_completion(
        self, request: web.Request, asked: ChatRequest, writers: Sequence[ChunkWriter]
    ) -> web.StreamResponse:
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        )
        write_event = partial(self._send, request, response)
        chunks_in, chunks = anyio.create_memory_object_stream[ChatCompletionChunk](0)
        trajectories: dict[int, Trajectory] = {}

        async def write(index: int, out: MemoryObjectSendStream[ChatCompletionChunk]) -> None:
            writer, options = writers[index], self._options(asked, index)
            async with (
                out,
                self._slots,  # no deadline: until another rollout ends, which has its own
                self._runtime.stream(asked.messages, on_event=self.on_event, **options) as stream,
            ):
                async for event in stream:  # no deadline: the rollout has one, and then ends this
                    for chunk in writer.feed(event):
                        # no deadline: the reader below writes to a client, with one
                        await out.send(chunk)
                assert stream.trajectory is not None
                trajectories[index] = _scorable(stream.trajectory)
                await out.send(writer.last(stream.trajectory))  # no deadline: as above

        try:
            async with task_group(only_first=True) as tasks:
                async with chunks_in:
                    for index in range(len(writers)):
                        tasks.start_soon(write, index, chunks_in.clone())
                async with chunks:
                    async for chunk in chunks:  # no deadline: the rollouts have theirs
                        if not response.prepared:  # before this, an error can still set the status
                            await response.prepare(request)
                        await write_event(chunk)
        except AgentLoopError as error:
            if not response.prepared:
                raise
            await write_event(error_of(error)[1])
            return response
        if asked.stream_options and asked.stream_options.include_usage:
            ended = [trajectories[index] for index in range(len(writers))]
            await write_event(writers[0].usage(ended))
        await self._write(request, response, b"data: [DONE]\n\n")
        return response

    def _writers(self, asked: ChatRequest) -> list[ChunkWriter]:
        """Return a chunk writer for each choice."""
        chat = self._runtime.chat
        frame = chunk_frame(f"chatcmpl-{uuid.uuid4().hex}", self._runtime.model_name)
        return [
            ChunkWriter(
                frame,
                index,
                reasoning_first=bool(chat.opened_thought),
                stop=asked.stop_sequences,
                has_caller_tools=asked.has_caller_tools,
                token_text=self._token_text if asked.logprobs else None,
            )
            for index in range(asked.n or 1)
        ]

    async def rollouts(self, request: web.Request) -> web.StreamResponse:
        asked = parse(RolloutsRequest, await self._body(request))
        self._check_open()
        sampling = _with(self._settings.sampling, asked.sampling)
        budget = _with(self._settings.budget, asked.budget)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        lines_in, lines = anyio.create_memory_object_stream[RolloutLine](0)
        jobs = product(range(len(asked.prompts)), range(asked.n))
        name = uuid.uuid4().hex

        async def work(out: MemoryObjectSendStream[RolloutLine]) -> None:
            async with out:
                for index, sample in jobs:  # shared: each worker takes the next
                    # no deadline: the reader below writes to a client, with one
                    await out.send(await one(index, sample))

        async def one(index: int, sample: int) -> RolloutLine:
            line: RolloutLine = {"index": index, "sample": sample}
            try:
                # no deadline: until another rollout ends, which has its own
                async with self._slots:
                    trajectory = await self._runtime.rollout(
                        asked.prompts[index],
                        tools=asked.tools,
                        sampling=sampling.of_sibling(sample),
                        budget=budget,
                        group=f"{name}.{index}" if asked.n > 1 else "",
                        on_event=self.on_event,
                    )
                line["trajectory"] = trajectory.to_dict()
            except (RequestError, ServerError) as error:  # the status has been sent already
                line["error"] = str(error)
            return line

        try:
            async with task_group(only_first=True) as tasks:
                async with lines_in:
                    num_jobs = len(asked.prompts) * asked.n
                    for _ in range(min(num_jobs, self._settings.serve.max_rollouts)):
                        tasks.start_soon(work, lines_in.clone())
                async with lines:
                    async for line in lines:  # no deadline: the rollouts have theirs
                        await self._write(request, response, dumps(line) + b"\n")
        finally:
            for index in range(len(asked.prompts)):
                self._runtime.router.forget_group(f"{name}.{index}")
        return response

    async def models(self, request: web.Request) -> web.Response:
        body: ModelList = {"object": "list", "data": [self._model_entry()]}
        return json_response(body)

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return json_response(self._model_entry())

    def _model_entry(self) -> Model:
        return {
            "id": self._runtime.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "agentloop",
        }

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
        async with self._slots:  # no deadline: until another rollout ends, which has its own
            trajectory = await self._runtime.rollout(question, on_event=self.on_event)
        return _scorable(trajectory).answer

    async def waits(self, request: web.Request) -> web.Response:
        """List everything that waits, with reasons and durations, and the state of the servers."""
        body: Waits = {
            "no_progress_s": self._dashboard.stalls.no_progress_s,
            "waits": self._dashboard.stalls.waits(),
            "for_room": [
                {"rollout_id": key, "why": why, "waited_s": waited_s}
                for key, waited_s, why in self._runtime.router.waits()
            ],
            "servers": list(self._runtime.router.view()),
        }
        return json_response(body)

    async def metrics(self, request: web.Request) -> web.Response:
        return await self._dashboard.serve_metrics(request)

    async def openapi(self, request: web.Request) -> web.Response:
        return json_response(self._document)

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self._settings.serve.io_timeout_s)

    async def _send(self, request: web.Request, response: web.StreamResponse, body: Any) -> None:
        await self._write(request, response, b"data: " + dumps(body) + b"\n\n")

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        await send(request, response, data, timeout_s=self._settings.serve.io_timeout_s)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        # One task serves all requests of a connection: do not inherit the previous request's span.
        caller_span.set(CallerSpan.parse(request.headers.get("traceparent", "")))
        try:
            return await handler(request)
        except (RequestError, ServerError) as error:
            status, body = error_of(error)
            return json_response(body, status=status)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            message, code = error.text or error.reason, None
            if request.match_info.http_exception is not None:  # no route
                message, code = self._not_offered(request), "unknown_url"
            answer = json_response(error_body(message, kind, code=code), status=error.status)
            if isinstance(error, web.HTTPMethodNotAllowed):
                answer.headers["Allow"] = error.headers["Allow"]
            return answer
        except ConnectionError as error:  # the client has disconnected and will not read this
            return json_response(error_body(str(error), "invalid_request_error"), status=408)
        except Exception:  # a bug: the client gets a well-formed error, the log the traceback
            log.exception("%s %s failed", request.method, request.path)
            return json_response(error_body("internal server error", "server_error"), status=500)

    def _options(self, asked: ChatRequest, index: int) -> dict[str, Any]:
        sampling = _override(self._settings.sampling, asked.sampling_overrides(), "sampling")
        budget = self._settings.budget
        if asked.token_limit is not None:
            most = min(asked.token_limit, budget.max_sampled_tokens or asked.token_limit)
            budget = budget.model_copy(update={"max_sampled_tokens": most})
        tools: list[Any] | None = list(asked.tools) if asked.tools else None
        return {
            "sampling": sampling.of_sibling(index),
            "budget": budget,
            "options": asked.turn_options(),
            "tools": [] if asked.tool_choice == "none" else tools,
        }

    def _check_model(self, name: str | None) -> None:
        have = self._runtime.model_name
        if name not in (None, have):
            raise UnknownModel(f"model: {name!r} is not served here; this server has {have!r}")

    def _not_offered(self, request: web.Request) -> str:
        offered = ", ".join(f"{one.method} {one.template}" for one in ROUTES)
        return f"{request.method} {request.path} does not exist; available: {offered}"


_ABOUT = (
    "The agent answers in OpenAI's protocol and runs its own tools. Whole trajectories are "
    "available as well. Details: docs/http.md."
)
_COMPLETION = Response(
    "The answer, with `stream` as it is generated. An error after the status was sent is the last "
    "event.",
    {JSON: ChatCompletion, EVENTS: ChatCompletionChunk | UsageChunk | ErrorBody},
    last_event="[DONE]",
)
_HEALTH: Responses = {
    200: Response("At least one inference server is healthy.", {JSON: HealthStatus}),
    503: Response("No inference server is healthy.", {JSON: HealthStatus}),
}
ROUTES = [
    Route("POST", "/v1/chat/completions", AgentService.chat_completions,
          "Answer a conversation; the agent runs its own tools",
          {200: _COMPLETION, **UNKNOWN_MODEL, **BODY_ERRORS}, ChatRequest),
    Route("POST", "/v1/rollouts", AgentService.rollouts,
          "Run rollouts of prompts and return their trajectories",
          {200: Response("Trajectories, each sent when it ends.", {JSON_LINES: RolloutLine}),
           **BODY_ERRORS}, RolloutsRequest),
    Route("GET", "/v1/models", AgentService.models, "List the model",
          {200: Response("The model.", {JSON: ModelList})}),
    Route("GET", "/v1/models/{model:.+}", AgentService.model, "Get the model by name",
          {200: Response("The model.", {JSON: Model}), **UNKNOWN_MODEL},
          parameters={"model": "Name of the model; slashes need not be escaped."}),
    Route("POST", "/mcp", AgentService.mcp, "Speak MCP, with the agent as a tool", {}),
    Route("GET", "/v1/waits", AgentService.waits,
          "List what every rollout is waiting for and how long, and the servers",
          {200: Response("The router's current state.", {JSON: Waits})}),
    Route("GET", "/healthz", AgentService.healthz, "Check the service's health", _HEALTH),
    Route("GET", "/health", AgentService.healthz, "Check the service's health", _HEALTH),
    Route("GET", "/metrics", AgentService.metrics, "Get Prometheus metrics",
          {200: Response("Metrics in the text format.", {TEXT: str})}),
    Route("GET", "/openapi.json", AgentService.openapi, "Get this document",
          {200: Response("An OpenAPI 3.1 document.", {JSON: dict[str, Any]})}),
]  # fmt: skip


@asynccontextmanager
async def listening(app: AgentService, bound: socket.socket) -> AsyncIterator[str]:
    """Serve on a bound socket until the context is left; yield the URL."""
    async with serving(app.build(), bound) as url, app.running():
        yield url


def _scorable(trajectory: Trajectory) -> Trajectory:
    """Return the trajectory; raise ServerError if it was cancelled or failed without an answer."""
    if trajectory.stop_reason is StopReason.CANCELLED:
        raise ServerError("the rollout was cancelled by the service's operator")
    if trajectory.stop_reason.is_unscorable:
        raise ServerError(f"the rollout failed: {trajectory.error}")
    return trajectory


def _override(base: Any, overrides: dict[str, Any], name: str) -> Any:
    """Return `base` with `overrides` validated and set. Raises RequestError naming the field."""
    if not overrides:
        return base
    try:
        return type(base).model_validate({**base.model_dump(), **overrides})
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{name}.{field}: {problem['msg']}") from error


def _with(base: M, overrides: M) -> M:
    """Return `base` with the fields that are set in `overrides`."""
    return base.model_copy(update=overrides.model_dump(exclude_unset=True))
