"""`agentloop serve`: the agent as an HTTP service, in OpenAI's protocol and in its own.

    POST /v1/chat/completions   the agent answers, running its own tools; streamed or whole
    POST /v1/rollouts           prompts in, trajectories out as NDJSON, each as it finishes
    GET  /v1/models  /v1/waits  /healthz  /metrics

A request lives in its handler's task: a client that leaves cancels what it asked for.
"""

from __future__ import annotations

import argparse
import json
import logging
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import product
from typing import Any

import anyio
import anyio.abc
import orjson
import pydantic
from aiohttp import web
from anyio.streams.memory import MemoryObjectSendStream
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from rich.console import Console

from agentloop import chat, console
from agentloop.api.guard import Guard, ServeSettings
from agentloop.api.openai import (
    ChatRequest,
    ChunkWriter,
    completion,
    error_body,
    model_list,
    parse,
)
from agentloop.config import load_settings
from agentloop.errors import AgentLoopError, RequestError, ServerError, SettingsError
from agentloop.events import Event
from agentloop.observe.metrics import Metrics
from agentloop.observe.stalls import Stalls
from agentloop.runtime import Runtime, Settings
from agentloop.trajectory import Message, StopReason, Trajectory

__all__ = ["App", "bind", "listening", "main"]

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class RolloutsRequest(pydantic.BaseModel):
    """`POST /v1/rollouts`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    prompts: list[str | list[dict[str, Any]]] = pydantic.Field(min_length=1, max_length=65_536)
    n: int = pydantic.Field(1, ge=1, le=1024)
    tools: list[str | dict[str, Any]] | None = None
    sampling: dict[str, Any] = pydantic.Field(default_factory=dict)
    budget: dict[str, Any] = pydantic.Field(default_factory=dict)


class App:
    """The handlers. They know a runtime, and how its errors look over HTTP."""

    def __init__(self, runtime: Runtime, settings: Settings) -> None:
        self._runtime = runtime
        self._settings = settings
        self._guard = Guard(settings.serve)
        self._metrics = Metrics(runtime.router.view, lambda: runtime.router.num_waiting)
        self._stalls = Stalls()
        self._places = anyio.CapacityLimiter(settings.serve.max_rollouts)
        self._created = int(time.time())

    def seen(self, event: Event) -> None:
        """Tell it of the events of rollouts that others start, too: metrics, and who waits."""
        self._metrics.seen(event)
        self._stalls.seen(event)

    async def watch(self) -> None:
        """Until cancelled: say in the log when nothing moves, who waits for what."""
        await self._stalls.watch(self._settings.serve.stall_after_s, self._servers_in_words)

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
        app.router.add_post("/v1/chat/completions", self.chat_completions)
        app.router.add_post("/v1/rollouts", self.rollouts)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/v1/models/{model:.+}", self.model)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/waits", self.waits)
        return app

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        asked = ChatRequest.parse(await request.read())
        self._check_model(asked.model)
        if asked.stream:
            if asked.n != 1:
                raise RequestError("n: a stream has one choice; ask for n=1")
            return await self._stream_completion(request, asked)
        trajectories: dict[int, Trajectory] = {}
        async with _unwrapped_tasks() as tasks:
            for index in range(asked.n):
                tasks.start_soon(self._complete, asked, index, trajectories)
        ordered = [trajectories[index] for index in range(asked.n)]
        for trajectory in ordered:
            if trajectory.stop_reason is StopReason.INFRASTRUCTURE:
                raise ServerError(f"the rollout failed: {trajectory.error}")
        body = completion(
            _completion_id(), self._runtime.model_name, ordered, reasoning_first=self._reasons()
        )
        return _json(body)

    async def _complete(
        self, asked: ChatRequest, index: int, trajectories: dict[int, Trajectory]
    ) -> None:
        options = self._options(asked, index)
        async with self._places:
            trajectory = await self._runtime.rollout(asked.messages, on_event=self.seen, **options)
        trajectories[index] = trajectory

    async def _stream_completion(
        self, request: web.Request, asked: ChatRequest
    ) -> web.StreamResponse:
        writer = ChunkWriter(
            _completion_id(), self._runtime.model_name, reasoning_first=self._reasons(), index=0
        )
        async with (
            self._places,
            self._runtime.stream(
                asked.messages, on_event=self.seen, **self._options(asked, 0)
            ) as stream,
        ):
            await anext(stream)  # raises what is wrong with the request, as a status
            response = web.StreamResponse(
                headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
            )
            await response.prepare(request)
            await _send(response, writer.first())
            try:
                async for event in stream:
                    for chunk in writer.feed(event):
                        await _send(response, chunk)
            except AgentLoopError as error:  # too late for a status
                await _send(response, error_body(str(error), "server_error"))
                return response
            trajectory = stream.trajectory
            assert trajectory is not None
            if trajectory.stop_reason is StopReason.INFRASTRUCTURE:
                message = f"the rollout failed: {trajectory.error}"
                await _send(response, error_body(message, "server_error"))
                return response
            await _send(response, writer.last(trajectory))
            if asked.stream_options and asked.stream_options.include_usage:
                await _send(response, writer.usage([trajectory]))
            await response.write(b"data: [DONE]\n\n")
            return response

    async def rollouts(self, request: web.Request) -> web.StreamResponse:
        asked = parse(RolloutsRequest, await request.read())
        sampling = _override(self._settings.sampling, asked.sampling, "sampling")
        budget = _override(self._settings.budget, asked.budget, "budget")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        lines_in, lines = anyio.create_memory_object_stream[dict[str, Any]](0)
        jobs = product(range(len(asked.prompts)), range(asked.n))
        name = uuid.uuid4().hex

        async def work(out: MemoryObjectSendStream[dict[str, Any]]) -> None:
            async with out:
                for index, sample in jobs:  # shared: each worker takes the next
                    await out.send(await one(index, sample))

        async def one(index: int, sample: int) -> dict[str, Any]:
            line: dict[str, Any] = {"index": index, "sample": sample}
            try:
                async with self._places:
                    trajectory = await self._runtime.rollout(
                        asked.prompts[index],
                        tools=asked.tools,
                        sampling=sampling.of_sibling(sample),
                        budget=budget,
                        group=f"{name}.{index}" if asked.n > 1 else "",
                        on_event=self.seen,
                    )
                line["trajectory"] = trajectory.to_dict()
            except (RequestError, ServerError) as error:  # too late for a status
                line["error"] = str(error)
            return line

        try:
            async with _unwrapped_tasks() as tasks:
                async with lines_in:
                    num_jobs = len(asked.prompts) * asked.n
                    for _ in range(min(num_jobs, self._settings.serve.max_rollouts)):
                        tasks.start_soon(work, lines_in.clone())
                async with lines:
                    async for line in lines:
                        await response.write(_dumps(line) + b"\n")
        finally:
            for index in range(len(asked.prompts)):
                self._runtime.router.forget_group(f"{name}.{index}")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return _json(model_list(self._runtime.model_name, self._created))

    async def model(self, request: web.Request) -> web.Response:
        self._check_model(request.match_info["model"])
        return _json(model_list(self._runtime.model_name, self._created)["data"][0])

    async def healthz(self, request: web.Request) -> web.Response:
        servers = self._runtime.router.view()
        well = any(server.healthy for server in servers)
        body = {
            "status": "ok" if well else "no server is healthy",
            "servers": {"healthy": sum(s.healthy for s in servers), "all": len(servers)},
        }
        return _json(body, status=200 if well else 503)

    async def waits(self, request: web.Request) -> web.Response:
        """Who waits for what, and since when; and the servers, as the router knows them."""
        room = [
            {"rollout_id": key, "why": why, "waited_s": waited_s}
            for key, waited_s, why in self._runtime.router.waits()
        ]
        return _json(
            {
                "still_s": self._stalls.still_s,
                "waits": self._stalls.waits(),
                "for_room": room,
                "servers": self._runtime.router.view(),
            }
        )

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE_LATEST}
        )

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except RequestError as error:
            param, colon, _ = str(error).partition(":")
            known = param if colon and " " not in param else None
            return _json(error_body(str(error), "invalid_request_error", param=known), status=400)
        except ServerError as error:
            return _json(error_body(str(error), "server_error"), status=503)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            kind = "invalid_request_error" if error.status < 500 else "server_error"
            message = error.text or error.reason
            return _json(error_body(message, kind), status=error.status)
        except Exception:  # a mistake of ours: the client gets the same form, the log the rest
            log.exception("%s %s failed", request.method, request.path)
            return _json(error_body("an error of the server's own", "server_error"), status=500)

    def _options(self, asked: ChatRequest, index: int) -> dict[str, Any]:
        overrides = asked.sampling_overrides()
        if "seed" in overrides:
            overrides["seed"] += index
        budget = self._settings.budget
        if asked.token_limit is not None:
            limit = min(asked.token_limit, budget.max_response_tokens)
            budget = budget.model_copy(update={"max_response_tokens": limit})
        tools: list[Any] | None = list(asked.tools) if asked.tools else None
        return {
            "sampling": _override(self._settings.sampling, overrides, "sampling"),
            "budget": budget,
            "tools": [] if asked.tool_choice == "none" else tools,
        }

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self._runtime.model_name):
            have = self._runtime.model_name
            raise web.HTTPNotFound(text=f"the model {name!r} is not here; there is {have!r}")

    def _reasons(self) -> bool:
        return bool(self._runtime.chat.opened_thought)


def bind(settings: ServeSettings) -> socket.socket:
    """Take the address, before anything is started that takes long.

    Raises:
        SettingsError: it cannot be taken.
    """
    where = (settings.host, settings.port)
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(where)
        bound.listen()  # so that a second service on this port fails now, not when it is ready
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise SettingsError(
            f"serve.port: cannot listen on {where[0]}:{where[1]}: {reason}"
        ) from error
    return bound


@asynccontextmanager
async def listening(app: App, bound: socket.socket) -> AsyncIterator[str]:
    """Serve on a socket that is bound, until the context is left; yields the URL."""
    runner = web.AppRunner(
        app.build(), handler_cancellation=True, access_log=None, shutdown_timeout=5.0
    )
    await runner.setup()
    try:
        await web.SockSite(runner, bound, backlog=1024).start()
        host, port = bound.getsockname()[:2]
        async with _unwrapped_tasks() as watching:
            watching.start_soon(app.watch)
            yield f"http://{f'[{host}]' if ':' in host else host}:{port}"
            watching.cancel_scope.cancel()
    finally:
        with anyio.move_on_after(10, shield=True):
            await runner.cleanup()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop serve",
        description="Serve the agent over HTTP. No arguments are needed: it then serves the small "
        "model that ships with agentloop, on 127.0.0.1:8000.",
    )
    parser.add_argument(
        "--ask", metavar="QUESTION", help="once ready, ask this and show the answer"
    )
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(sys.argv[1:] if arguments is None else arguments)
    if options.list_settings:
        print(console.settings_text(Settings))
        return 0
    return console.run(lambda: _serve(options.settings, options.ask), explain=options.explain)


async def _serve(arguments: list[str], question: str | None) -> int:
    settings = load_settings(Settings, *console.split_settings(arguments))
    with bind(settings.serve) as bound:
        async with console.started(settings) as runtime:
            return await _serve_on(bound, App(runtime, settings), runtime, question)


async def _serve_on(bound: socket.socket, app: App, runtime: Runtime, question: str | None) -> int:
    async with listening(app, bound) as url:
        servers = len(runtime.router.view())
        print(
            f"agentloop is ready: {url}/v1 (model {runtime.model_name}, "
            f"{servers} SGLang server{'s' * (servers > 1)}, "
            f"sandbox: {runtime.pool.stats()['backend']})",
            flush=True,
        )
        if question is not None:
            messages: list[Message] = [{"role": "user", "content": question}]
            print(f"\n> {question}")
            await chat.ask(runtime, messages, Console(), also=app.seen)
            print("\nStill serving; Ctrl-C ends it.", flush=True)
        await anyio.sleep_forever()
    return 0


@asynccontextmanager
async def _unwrapped_tasks() -> AsyncIterator[anyio.abc.TaskGroup]:
    """A task group whose sole error comes out as itself."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _override(base: Any, overrides: dict[str, Any], name: str) -> Any:
    """Raises RequestError, which names the field."""
    if not overrides:
        return base
    try:
        return type(base).model_validate({**base.model_dump(), **overrides})
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"])
        raise RequestError(f"{name}.{field}: {problem['msg']}") from error


def _completion_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex}"


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


def _dumps(value: Any) -> bytes:
    """JSON, also of integers beyond 64 bits, which a model may well write."""
    try:
        return orjson.dumps(value)
    except TypeError:
        return json.dumps(value, default=str).encode()


async def _send(response: web.StreamResponse, body: Any) -> None:
    await response.write(b"data: " + orjson.dumps(body) + b"\n\n")


if __name__ == "__main__":
    sys.exit(main())
