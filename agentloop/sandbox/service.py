"""The HTTP service: its handlers and, at the end, its routes (ROUTES).

A call lives in its request's task: when the client disconnects, the call is killed. The response to
a call has status 200, however the program ended; another status means that no call was made, or
that its session was lost (410).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import cache, partial
from typing import Self

import anyio
import anyio.to_thread
from aiohttp import web
from anyio.streams.memory import MemoryObjectSendStream

from agentloop.sandbox import compat
from agentloop.sandbox.api import (
    BatchLine,
    BatchRequest,
    OpenedSession,
    ProgramRequest,
    RefusalBody,
    RequestRefused,
    RunRequest,
    SessionRequest,
    to_line,
)
from agentloop.sandbox.computer.host import ComputerHost
from agentloop.sandbox.connections import Connections, LimitedProtocol, close_overdue
from agentloop.sandbox.errors import ProgramUnsupported, SessionLost
from agentloop.sandbox.host import LinkedClient
from agentloop.sandbox.languages import Language
from agentloop.sandbox.middleware import MIB, Handler, RequestLimits, json_response
from agentloop.sandbox.openapi import (
    JSON,
    JSON_LINES,
    Response,
    Responses,
    Route,
    add_routes,
    document,
)
from agentloop.sandbox.pool import Pool, ProgramArguments
from agentloop.sandbox.remote import HEARTBEAT_S, MAX_MSG_SIZE
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.serve_settings import SandboxServeSettings, num_connections
from agentloop.sandbox.sessions import Sessions

Numbered = tuple[int, CallResult]


class SandboxService:
    """The HTTP handlers. Use as `async with SandboxService(...)`: sessions end with the context."""

    def __init__(self, pool: Pool, settings: SandboxServeSettings) -> None:
        self._pool = pool
        self._settings = settings
        max_connections = num_connections(settings)
        self._connections = Connections[asyncio.Transport](
            max_connections, settings.io_timeout_s, settings.idle_timeout_s
        )
        self._limits = RequestLimits(settings, max_connections, self._connections)
        self._computers = ComputerHost(pool)
        # On demand, because it takes half a second.
        self._document = cache(partial(
            document, ROUTES,
            info={"title": "sandbox", "version": "1", "description": "Runs untrusted Python."},
            needs_token=self._limits.guard.needs_token, refusals={"default": _REFUSED},
        ))  # fmt: skip

    async def __aenter__(self) -> Self:
        self._group = await anyio.create_task_group().__aenter__()
        self._group.start_soon(close_overdue, self._connections)
        self._sessions = Sessions(self._pool, self._group, self._settings.session_idle_s)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._group.cancel_scope.cancel()
        # Without the block's error, which is then raised as it is, not in an exception group.
        await self._group.__aexit__(None, None, None)

    def protocol(self, handler: asyncio.Protocol) -> asyncio.Protocol:
        """Return the protocol of a new connection, which aiohttp's `handler` serves."""
        return LimitedProtocol(self._connections, handler)

    def build(self) -> web.Application:
        app = web.Application(
            middlewares=[self._count, *self._limits.middlewares],
            client_max_size=self._settings.max_body_mib * MIB,
        )
        add_routes(app.router, ROUTES, self)
        app.on_response_prepare.append(self._limits.allow_origin)
        return app

    # -- native protocol --------------------------------------------------------------------

    async def run(self, request: web.Request) -> web.Response:
        program = await self._limits.parse_body(ProgramRequest, request)
        return json_response(await self._pool.run(**self._program(program)))

    async def run_batch(self, request: web.Request) -> web.StreamResponse:
        programs = (await self._limits.parse_body(BatchRequest, request)).calls
        for language in {program.language for program in programs}:
            await self._pool.check_language(language)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            async with self._run_all(map(self._program, programs)) as results:
                async for index, result in results:  # no deadline: the calls have theirs
                    with anyio.fail_after(self._settings.io_timeout_s):
                        await response.write(to_line(index, result))
        except* OSError:  # also TimeoutError: the client has disconnected or does not read
            if request.transport is not None:
                request.transport.abort()
        return response

    async def open_session(self, request: web.Request) -> web.Response:
        await self._limits.parse_body(SessionRequest, request, empty=b"{}")
        key = secrets.token_urlsafe(16)
        await self._sessions.open(key, max_wait_s=0.0)
        body: OpenedSession = {"id": key, "idle_s": self._settings.session_idle_s}
        return json_response(body, status=201)

    async def run_cell(self, request: web.Request) -> web.Response:
        key = request.match_info["id"]
        cell = await self._limits.parse_body(RunRequest, request)
        try:
            call = cell.arguments(self._pool.settings.memory_mib)
            return json_response(await self._sessions.run(key, **call))
        except KeyError:
            raise _no_session() from None
        except SessionLost as error:
            raise RequestRefused(410, "session_lost", str(error)) from error

    async def close_session(self, request: web.Request) -> web.Response:
        if not self._sessions.close(request.match_info["id"]):
            raise _no_session()
        return web.Response(status=204)

    async def stats(self, request: web.Request) -> web.Response:
        http = {
            "requests": self._limits.num_requests,
            "links": self._limits.num_links,
            "connections": len(self._connections),
            "held_bytes": self._limits.held.total,
        }
        return json_response({**self._pool.stats(), **http})

    async def healthz(self, request: web.Request) -> web.Response:
        if self._pool.stats()["workers"] > 0:
            return json_response({"status": "ok"})
        return json_response({"status": "no worker is up"}, status=503)

    async def openapi(self, request: web.Request) -> web.Response:
        return json_response(await anyio.to_thread.run_sync(self._document))

    async def link(self, request: web.Request) -> web.StreamResponse:
        hold = partial(self._limits.held.hold, id(request))
        with self._limits.link(request):
            socket = web.WebSocketResponse(
                heartbeat=HEARTBEAT_S, max_msg_size=MAX_MSG_SIZE, compress=False, timeout=2.0
            )
            await socket.prepare(request)
            await LinkedClient(self._pool, hold).serve(socket)
        return socket

    async def computer(self, request: web.Request) -> web.StreamResponse:
        op = request.match_info["op"]
        heartbeat_s = None if op == "port" else HEARTBEAT_S  # a port may be slow to read
        socket = web.WebSocketResponse(
            heartbeat=heartbeat_s, max_msg_size=MAX_MSG_SIZE, compress=False, timeout=2.0
        )
        await socket.prepare(request)
        await self._computers.serve(op, socket)
        return socket

    # -- compatible protocols ---------------------------------------------------------------

    async def submission(self, request: web.Request, *, with_output: bool) -> web.Response:
        submission = await self._limits.parse_body(compat.Submission, request)
        (answer,) = await self._judge([submission], with_output)
        return json_response(answer)

    async def submissions(self, request: web.Request, *, with_output: bool) -> web.Response:
        batch = await self._limits.parse_body(compat.BatchSubmission, request)
        answers = await self._judge(batch.submissions, with_output)
        return json_response({"sub_id": batch.sub_id or compat.new_id(), "results": answers})

    async def _judge(
        self, submissions: list[compat.Submission], with_output: bool
    ) -> list[dict[str, object]]:
        answers: dict[int, compat.SubmissionResult] = {}
        for index, submission in enumerate(submissions):
            language = compat.language_of(submission)
            if refusal := compat.refused_submission(submission, await self._lacks(language)):
                answers[index] = refusal
        accepted = [index for index in range(len(submissions)) if index not in answers]
        timeout_s = self._settings.code_judge_timeout_s
        calls = (compat.submitted_call(submissions[index], timeout_s) for index in accepted)
        async with self._run_all(calls) as results:
            async for number, result in results:  # no deadline: the calls have theirs
                index = accepted[number]
                answers[index] = compat.submission_result(
                    submissions[index], result, self._settings.code_judge_chars
                )
        rows = [asdict(answers[index]) for index in range(len(submissions))]
        if not with_output:  # Code Judge's JudgeResult
            for row in rows:
                del row["stdout"], row["stderr"]
        return rows

    async def status(self, request: web.Request) -> web.Response:
        stats = self._pool.stats()
        return json_response({"queue": stats["waiting"], "num_workers": stats["slots"]})

    async def ping(self, request: web.Request) -> web.Response:
        return json_response("pong")

    async def run_code(self, request: web.Request) -> web.Response:
        program = await self._limits.parse_body(compat.RunCodeRequest, request)
        language = compat.FUSION_LANGUAGES.get(program.language)
        if refusal := compat.refused_code(program, await self._lacks(language)):
            return json_response(refusal)
        await self._limits.reserve(request, compat.MAX_RUN_CODE_BYTES)
        result = await self._pool.run(
            program.code,
            program.stdin or "",
            program.run_timeout,
            compat.memory_mib(program, self._pool.settings.memory_mib),
            output=compat.RUN_CODE_OUTPUT,
            language=language or "python",
            compile_timeout_s=program.compile_timeout,
        )
        return json_response(compat.run_code_answer(result, language))

    # -- helpers ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _run_all(
        self, calls: Iterable[ProgramArguments]
    ) -> AsyncIterator[AsyncIterator[Numbered]]:
        """Run calls, given as arguments of `Pool.run`; yield (index, result) pairs as they finish.

        Only slightly more calls than there are slots are in the pool at a time, so that a batch
        does not delay other clients; the wait here counts as queue time.
        """
        began = anyio.current_time()
        numbered = enumerate(calls)  # shared: each of the tasks takes the next
        out, results = anyio.create_memory_object_stream[Numbered](0)

        async def work(out: MemoryObjectSendStream[Numbered]) -> None:
            async with out:
                for index, call in numbered:
                    waited_s = anyio.current_time() - began
                    result = await self._pool.run(**call)
                    # no deadline: the reader has one, or does not wait for anybody
                    await out.send((index, replace(result, queue_s=result.queue_s + waited_s)))

        # The group is inside, so that the tasks end before their stream is closed.
        async with results, anyio.create_task_group() as group:
            async with out:
                for _ in range(max(16, 2 * self._pool.stats()["slots"])):
                    group.start_soon(work, out.clone())
            yield results

    async def _lacks(self, language: Language | None) -> str:
        """Return why calls can't be in a language; "" if they can, or if it is none of ours."""
        try:
            await self._pool.check_language(language or "python")
        except ProgramUnsupported as error:
            return str(error)
        return ""

    def _program(self, request: ProgramRequest) -> ProgramArguments:
        call = request.arguments(self._pool.settings.memory_mib)
        return {**call, "language": request.language, "output": None}

    @web.middleware
    async def _count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._connections.begin(transport)
        try:
            return await handler(request)
        finally:
            self._connections.end(transport, time.monotonic())


def _no_session() -> RequestRefused:
    return RequestRefused(
        404, "no_session", "there is no such session; it may have been idle for too long"
    )


_REFUSED = Response("The request was refused.", {JSON: RefusalBody})
_RESULT = Response("The result, however the program ended.", {JSON: CallResult})
_LOST = Response("The session is lost, possibly because of this cell.", {JSON: RefusalBody})
_ANSWER: Responses = {200: Response("The answer.", {JSON: dict[str, object]})}
_HEALTH: Responses = {
    200: Response("A worker is up.", {JSON: dict[str, str]}),
    503: Response("No worker is up.", {JSON: dict[str, str]}),
}
_SESSION = {"id": "Id of the session."}

ROUTES = [
    Route("POST", "/v1/run", SandboxService.run, "Run a program", {200: _RESULT},
          ProgramRequest),
    Route("POST", "/v1/run/batch", SandboxService.run_batch, "Run programs",
          {200: Response("A line for each program, as it finishes.", {JSON_LINES: BatchLine})},
          BatchRequest),
    Route("POST", "/v1/sessions", SandboxService.open_session, "Open a session",
          {201: Response("The session.", {JSON: OpenedSession})},
          SessionRequest, is_body_optional=True),
    Route("POST", "/v1/sessions/{id}/run", SandboxService.run_cell, "Run a cell in a session",
          {200: _RESULT, 410: _LOST}, RunRequest, parameters=_SESSION),
    Route("DELETE", "/v1/sessions/{id}", SandboxService.close_session, "Close a session",
          {204: Response("The session is closed.")}, parameters=_SESSION),
    Route("GET", "/v1/stats", SandboxService.stats,
          "Count workers, slots, and running and waiting calls", _ANSWER),
    Route("GET", "/v1/link", SandboxService.link, "Connect a pool elsewhere (remote.py)", {}),
    Route("GET", "/v1/computer/{op}", SandboxService.computer,
          "Use a computer from elsewhere (computer/remote.py)", {}),
    Route("GET", "/healthz", SandboxService.healthz, "Check the service's health", _HEALTH),
    Route("GET", "/openapi.json", SandboxService.openapi, "Get this document", _ANSWER),
    # Code Judge
    *(
        Route("POST", path + form, partial(handler, with_output=path == "/run"),
              f"Code Judge's `{path}{form}`", _ANSWER, model)
        for path in ("/run", "/judge")
        for form, handler, model in (
            ("", SandboxService.submission, compat.Submission),
            ("/batch", SandboxService.submissions, compat.BatchSubmission),
            ("/long-batch", SandboxService.submissions, compat.BatchSubmission),
        )
    ),
    Route("GET", "/status", SandboxService.status, "Code Judge's `/status`", _ANSWER),
    Route("GET", "/ping", SandboxService.ping, "Code Judge's `/ping`",
          {200: Response("The word pong.", {JSON: str})}),
    # SandboxFusion
    Route("POST", "/run_code", SandboxService.run_code, "SandboxFusion's `/run_code`", _ANSWER,
          compat.RunCodeRequest),
]  # fmt: skip
