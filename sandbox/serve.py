"""`python -m sandbox.serve`: the pool as an HTTP service, for other machines and other languages.

    POST /v1/run  /v1/run/batch          a program; many, as NDJSON, each as it finishes
    POST /v1/sessions  /v1/sessions/ID/run     DELETE /v1/sessions/ID
    GET  /v1/stats  /healthz  /openapi.json    GET /v1/link: a sandbox.Pool elsewhere (remote.py)
    /run /judge /run/batch /judge/batch /run/long-batch /judge/long-batch /status /ping: Code Judge
    POST /run_code: SandboxFusion

A call lives in its request's task: a client that leaves kills what it asked for. An answer to a
call is 200, whatever its `status` says; another code means that no call was made, or that its
session was lost (410).
"""

from __future__ import annotations

import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Self

import anyio
import pydantic
from aiohttp import web
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from sandbox import compat
from sandbox.api import (
    BatchRequest,
    Refused,
    RunRequest,
    SessionRequest,
    parse,
    to_json,
    to_line,
)
from sandbox.errors import Overloaded, SandboxError, SandboxUnavailable, SessionLost
from sandbox.guard import Guard, http_log, is_loopback, url_at
from sandbox.host import Guest
from sandbox.openapi import document
from sandbox.pool import Pool
from sandbox.protocol import MAX_FRAME_BYTES
from sandbox.remote import HEARTBEAT_S
from sandbox.results import CallResult
from sandbox.sessions import Sessions
from sandbox.settings import PoolSettings

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Numbered = tuple[int, CallResult]

MIB = 1 << 20


class ServeSettings(BaseSettings):
    """Run Python programs sent over HTTP, each confined in a process of its own.

    Settings are flags (--port 8010 --pool.workers 4), key=value (port=8010 pool.workers=4) or
    variables (SANDBOX_PORT, SANDBOX_POOL__WORKERS; best for SANDBOX_TOKEN, which others could
    read off a command line).
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix="SANDBOX_",
        env_nested_delimiter="__",
        cli_prog_name="python -m sandbox.serve",
    )

    host: str = Field(
        "127.0.0.1", description="Address to listen on; other than loopback only with a token."
    )
    port: int = Field(8010, ge=0, le=65_535, description="Port; 0 finds a free one.")
    token: pydantic.SecretStr | None = Field(
        None, description="Callers must send it as `Authorization: Bearer ...`."
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Names, besides its own address, that callers may reach it by; with a token "
        "any name will do, and these are the sites whose pages may call it.",
    )
    max_requests: int = Field(
        4096, ge=1, description="Requests at once; further ones get 503 and `Retry-After`."
    )
    max_body_mib: int = Field(64, ge=1, description="A larger request is refused.")
    max_held_mib: int = Field(1024, ge=1, description="All requests at once; then 503.")
    io_timeout_s: float = Field(
        60.0, gt=0, description="The longest wait for a client to send its body or take an answer."
    )
    session_idle_s: float = Field(
        600.0, gt=0, description="A session that has run nothing for so long is closed."
    )
    code_judge_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Wall time of Code Judge's submissions, which name none."
    )
    pool: PoolSettings = Field(default_factory=PoolSettings)

    @pydantic.model_validator(mode="after")
    def _is_safe(self) -> Self:
        if not is_loopback(self.host) and not (self.token and self.token.get_secret_value()):
            raise ValueError(f"host: {self.host!r} can be reached by others: set a token as well")
        return self


class App:
    """The handlers. `async with` it: sessions live in it."""

    def __init__(self, pool: Pool, settings: ServeSettings) -> None:
        self._pool = pool
        self._settings = settings
        token = settings.token.get_secret_value() if settings.token else None
        self._guard = Guard(settings.host, token, settings.allowed_hosts)
        self._sessions = Sessions(pool, settings.session_idle_s)
        self._num_requests = 0
        self._held: dict[int, int] = {}  # bytes of each body, by its request's id()
        self._num_held = 0  # their sum

    async def __aenter__(self) -> Self:
        await self._sessions.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._sessions.__aexit__(*exc)

    def build(self) -> web.Application:
        app = web.Application(
            middlewares=[self._errors, self._guarded, self._bounded],
            client_max_size=self._settings.max_body_mib * MIB,
        )
        post, get = app.router.add_post, app.router.add_get
        post("/v1/run", self.run)
        post("/v1/run/batch", self.run_batch)
        post("/v1/sessions", self.open_session)
        post("/v1/sessions/{id}/run", self.run_cell)
        app.router.add_delete("/v1/sessions/{id}", self.close_session)
        get("/v1/stats", self.stats)
        get("/v1/link", self.link)
        get("/healthz", self.healthz)
        get("/openapi.json", self.openapi)
        for path, with_output in (("/run", True), ("/judge", False)):
            post(path, partial(self.submission, with_output))
            post(f"{path}/batch", partial(self.submissions, with_output))
            post(f"{path}/long-batch", partial(self.submissions, with_output))
        get("/status", self.status)
        get("/ping", self.ping)
        post("/run_code", self.run_code)
        return app

    # -- our own protocol -------------------------------------------------------------------

    async def run(self, request: web.Request) -> web.Response:
        asked = parse(RunRequest, await self._body(request))
        self._check_memory(asked)
        result = await self._pool.run(asked.code, asked.stdin, asked.timeout_s, asked.memory_mib)
        return _json(result)

    async def run_batch(self, request: web.Request) -> web.StreamResponse:
        calls = parse(BatchRequest, await self._body(request)).calls
        for index, call in enumerate(calls):
            self._check_memory(call, f"calls.{index}.")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            async with self._each(
                (c.code, c.stdin, c.timeout_s, c.memory_mib) for c in calls
            ) as results:
                async for index, result in results:  # no deadline: the calls have theirs
                    with anyio.fail_after(self._settings.io_timeout_s):
                        await response.write(to_line(index, result))
        except* OSError:  # TimeoutError is one: the client has left or reads nothing
            if request.transport is not None:
                request.transport.abort()
        return response

    async def open_session(self, request: web.Request) -> web.Response:
        parse(SessionRequest, await self._body(request) or b"{}")
        key = await self._sessions.open()
        return _json({"id": key, "idle_s": self._settings.session_idle_s}, status=201)

    async def run_cell(self, request: web.Request) -> web.Response:
        key = request.match_info["id"]
        asked = parse(RunRequest, await self._body(request))
        self._check_memory(asked)
        what = (asked.code, asked.stdin, asked.timeout_s, asked.memory_mib)
        try:
            return _json(await self._sessions.run(key, *what))
        except KeyError:
            raise _no_session() from None
        except SessionLost as error:
            raise Refused(410, "session_lost", str(error)) from error

    async def close_session(self, request: web.Request) -> web.Response:
        if not self._sessions.close(request.match_info["id"]):
            raise _no_session()
        return web.Response(status=204)

    async def stats(self, request: web.Request) -> web.Response:
        here = {"requests": self._num_requests, "body_bytes": self._num_held}
        return _json(self._pool.stats() | here)

    async def healthz(self, request: web.Request) -> web.Response:
        well = self._pool.stats()["workers"] > 0
        status = "ok" if well else "no worker is up"
        return _json({"status": status}, status=200 if well else 503)

    async def openapi(self, request: web.Request) -> web.Response:
        return _json(document())

    async def link(self, request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, max_msg_size=MAX_FRAME_BYTES, compress=False, timeout=2.0
        )
        await socket.prepare(request)
        await Guest(self._pool).serve(socket)
        return socket

    # -- others' protocols ------------------------------------------------------------------

    async def submission(self, with_output: bool, request: web.Request) -> web.Response:
        asked = parse(compat.Submission, await self._body(request))
        (answer,) = await self._judge([asked], with_output)
        return _json(answer)

    async def submissions(self, with_output: bool, request: web.Request) -> web.Response:
        asked = parse(compat.BatchSubmission, await self._body(request))
        answers = await self._judge(asked.submissions, with_output)
        return _json({"sub_id": asked.sub_id or compat.new_id(), "results": answers})

    async def _judge(
        self, asked: list[compat.Submission], with_output: bool
    ) -> list[dict[str, Any]]:
        answers = [compat.refused_submission(one, with_output=with_output) for one in asked]
        todo = [index for index, answer in enumerate(answers) if answer is None]
        timeout_s = self._settings.code_judge_timeout_s
        calls = ((asked[i].solution, asked[i].input or "", timeout_s, None) for i in todo)
        async with self._each(calls) as results:
            async for place, result in results:  # no deadline: the calls have theirs
                index = todo[place]
                answers[index] = compat.judged(asked[index], result, with_output=with_output)
        return [answer for answer in answers if answer is not None]

    async def status(self, request: web.Request) -> web.Response:
        stats = self._pool.stats()
        return _json({"queue": stats["waiting"], "num_workers": stats["slots"]})

    async def ping(self, request: web.Request) -> web.Response:
        return _json("pong")

    async def run_code(self, request: web.Request) -> web.Response:
        asked = parse(compat.RunCodeRequest, await self._body(request))
        if refusal := compat.refused_code(asked):
            return _json(refusal)
        memory_mib = compat.memory_mib(asked, self._pool.settings.memory_mib)
        result = await self._pool.run(asked.code, asked.stdin or "", asked.run_timeout, memory_mib)
        return _json(compat.run_code_answer(result))

    # -- what they share --------------------------------------------------------------------

    @asynccontextmanager
    async def _each(
        self, calls: Iterable[tuple[str, str, float | None, int | None]]
    ) -> AsyncIterator[AsyncIterator[Numbered]]:
        """Results of many calls as they finish, numbered. Only a few more than can run are with
        the pool at any time, so that one batch does not stand before everybody else's calls;
        what the others waited here counts as their queue time."""
        began = anyio.current_time()
        numbered = enumerate(calls)  # shared: each of the tasks takes the next
        out, results = anyio.create_memory_object_stream[Numbered](0)

        async def work(out: MemoryObjectSendStream[Numbered]) -> None:
            async with out:
                for index, call in numbered:
                    waited_s = anyio.current_time() - began
                    result = await self._pool.run(*call)
                    # no deadline: its reader has one, or waits for nobody
                    await out.send((index, replace(result, queue_s=result.queue_s + waited_s)))

        # The group inside: a caller that fails ends the tasks before their stream is closed.
        async with results, anyio.create_task_group() as group:
            async with out:
                for _ in range(max(16, 2 * self._pool.stats()["slots"])):
                    group.start_soon(work, out.clone())
            yield results

    def _check_memory(self, asked: RunRequest, where: str = "") -> None:
        most = self._pool.settings.memory_mib
        if asked.memory_mib is not None and asked.memory_mib > most:
            field = f"{where}memory_mib"
            why = f"{field}: the pool gives a call {most} MiB at most"
            raise Refused(400, "bad_request", why, field)

    async def _body(self, request: web.Request) -> bytearray:
        """All of the body, counted as it comes: what is announced alone takes nobody's room."""
        body = bytearray()
        try:
            with anyio.fail_after(self._settings.io_timeout_s):
                self._hold(request, request.content_length or 0, 0)
                while chunk := await request.content.readany():
                    self._hold(request, len(body) + len(chunk), len(chunk))
                    body += chunk
        except TimeoutError:
            raise Refused(408, "slow", "the body did not arrive in time") from None
        except web.RequestPayloadError:
            why = "the body is not what its Content-Encoding says"
            raise Refused(400, "bad_request", why) from None
        return body

    def _hold(self, request: web.Request, size: int, num_new: int) -> None:
        """Count more bytes of a body of (so far) `size`, until the request ends."""
        most = self._settings.max_body_mib * MIB
        if size > most:
            raise Refused(413, "too_large", f"the most that a body may have is {most} bytes")
        if self._num_held + num_new > max(self._settings.max_held_mib * MIB, most):
            raise _overloaded()
        self._num_held += num_new
        self._held[id(request)] = self._held.get(id(request), 0) + num_new

    @web.middleware
    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts a request, and what was read of its body, for as long as it is here."""
        if request.method != "POST":
            return await handler(request)
        if self._num_requests >= self._settings.max_requests:
            raise _overloaded()
        self._num_requests += 1
        try:
            return await handler(request)
        finally:
            self._num_requests -= 1
            self._num_held -= self._held.pop(id(request), 0)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if refusal := self._guard.refusal(request.path, request.headers):
            status, why = refusal
            raise Refused(status, "unauthorized" if status == 401 else "forbidden", why)
        return await handler(request)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except Refused as error:
            refused = error
        except Overloaded as error:
            refused = Refused(503, "overloaded", str(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            refused = Refused(error.status, "http", f"{request.path}: {error.reason}")
        response = _json(refused.body, status=refused.status)
        if refused.status == 503:
            response.headers["Retry-After"] = "1"
        if request.content.exception() is not None:  # aiohttp must not try to read the rest
            request.content.feed_eof()
            response.force_close()
        return response


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(body), status=status, content_type="application/json")


def _overloaded() -> Refused:
    return Refused(503, "overloaded", "too many requests are open here; come again")


def _no_session() -> Refused:
    return Refused(404, "no_session", "there is no such session; it may have rested too long")


@asynccontextmanager
async def serving(pool: Pool, settings: ServeSettings) -> AsyncIterator[str]:
    """Serve a pool until the context is left; yields the URL. Raises SandboxUnavailable where the
    address cannot be used."""
    async with App(pool, settings) as app:
        runner = web.AppRunner(
            app.build(),
            handler_cancellation=True,
            access_log=None,
            logger=http_log,
            shutdown_timeout=0.3,
        )
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, settings.host, settings.port, backlog=4096).start()
            except OSError as error:
                where = f"{settings.host}:{settings.port}"
                why = error.strerror or error
                raise SandboxUnavailable(f"cannot listen on {where}: {why}") from error
            host, port = runner.addresses[0][:2]
            yield url_at(host, port)
        finally:
            with anyio.move_on_after(10, shield=True):
                await runner.cleanup()


async def serve(settings: ServeSettings) -> None:
    """The whole service; one line on stdout when it is ready. Ends by being cancelled."""
    async with (
        Pool(settings.pool, on_progress=partial(print, file=sys.stderr, flush=True)) as pool,
        serving(pool, settings) as url,
    ):
        stats = pool.stats()
        print(
            f"sandbox is ready: {url} (backend: {stats['backend']}, "
            f"workers: {stats['workers']}, slots: {stats['slots']})",
            flush=True,
        )
        await anyio.sleep_forever()  # no deadline: until it is told to stop


async def _until_signal(settings: ServeSettings) -> int:
    status = 0
    async with anyio.create_task_group() as group:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            group.start_soon(serve, settings)
            async for number in signals:  # no deadline: as long as the service runs
                status = 128 + number
                group.cancel_scope.cancel()
                break  # no second one is needed: every cleanup has a deadline
    return status


def load(arguments: list[str]) -> ServeSettings:
    """Settings from flags, key=value and the environment. Raises ValueError that names the
    setting; ends the process for --help and for unknown flags."""
    flags = [a if a.startswith("-") or "=" not in a else f"--{a}" for a in arguments]
    try:
        return ServeSettings(_cli_parse_args=flags)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{field}: {problem['msg']}" if field else problem["msg"]) from None
    except SettingsError as error:
        raise ValueError(str(error)) from None


def main(arguments: list[str] | None = None) -> int:
    try:
        settings = load(sys.argv[1:] if arguments is None else arguments)
        return anyio.run(_until_signal, settings, backend_options={"use_uvloop": _has_uvloop()})
    except (ValueError, SandboxError, BaseExceptionGroup) as error:
        inner: BaseException = error
        while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
            inner = inner.exceptions[0]
        if not isinstance(inner, (ValueError, SandboxError)):
            raise
        print(f"sandbox.serve: error: {inner}", file=sys.stderr)
        return 2


def _has_uvloop() -> bool:
    try:
        import uvloop  # noqa: F401
    except ImportError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
