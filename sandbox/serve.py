"""`python -m agentloop.sandbox.serve`: the pool as an HTTP service, for any machine and language.

    POST /v1/run  /v1/run/batch          run a program; run many, with NDJSON results as they finish
    POST /v1/sessions  /v1/sessions/ID/run     DELETE /v1/sessions/ID
    GET  /v1/stats  /healthz  /openapi.json    GET /v1/link: a sandbox.Pool elsewhere (remote.py)
    /run /judge /run/batch /judge/batch /run/long-batch /judge/long-batch /status /ping: Code Judge
    POST /run_code: SandboxFusion

A call lives in its request's task: when the client disconnects, the call is killed. The response to
a call has status 200, however the program ended; another status means that no call was made, or
that its session was lost (410).
"""

from __future__ import annotations

import asyncio
import logging
import resource
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Self

import anyio
import pydantic
from aiohttp import web
from anyio.streams.memory import MemoryObjectSendStream
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from agentloop.sandbox import compat
from agentloop.sandbox.api import (
    BatchRequest,
    Model,
    RequestRefused,
    RunRequest,
    SessionRequest,
    ValueCounter,
    max_values,
    parse,
    to_json,
    to_line,
)
from agentloop.sandbox.connections import Connections, Doors
from agentloop.sandbox.errors import Overloaded, SandboxError, SandboxUnavailable, SessionLost
from agentloop.sandbox.flags import flags_of
from agentloop.sandbox.guard import Guard, http_log, is_loopback, url_at
from agentloop.sandbox.held import HeldBytes
from agentloop.sandbox.host import Guest
from agentloop.sandbox.openapi import document
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.remote import HEARTBEAT_S, MAX_MSG_SIZE
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.sessions import Sessions
from agentloop.sandbox.settings import OutputLimits, PoolSettings

log = logging.getLogger("sandbox")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Numbered = tuple[int, CallResult]

MIB = 1 << 20
SPARE_DESCRIPTORS = 64  # reserved for the process itself, and for each worker
DESCRIPTORS_PER_WORKER = 8


class SandboxServeSettings(BaseSettings):
    """Run Python programs sent over HTTP, each confined in a process of its own.

    Settings are flags (--port 8010 --pool.workers 4), key=value (port=8010 pool.workers=4) or
    environment variables (SANDBOX_PORT, SANDBOX_POOL__WORKERS; preferably for SANDBOX_TOKEN, since
    other users can read a command line).
    """

    model_config = SettingsConfigDict(
        extra="forbid",
        env_prefix="SANDBOX_",
        env_nested_delimiter="__",
        cli_prog_name="python -m agentloop.sandbox.serve",
    )

    host: str = Field(
        "127.0.0.1", description="Address to listen on; one other than loopback needs a token."
    )
    port: int = Field(8010, ge=0, le=65_535, description="Port to listen on; 0: any free one.")
    token: pydantic.SecretStr | None = Field(
        None, description="Token that clients must send as `Authorization: Bearer ...`."
    )
    allowed_hosts: list[str] = Field(
        default_factory=list,
        description="Host names, besides its address, under which clients may reach the service. "
        "With a token any name is allowed, and these are the sites whose pages may call it.",
    )
    max_connections: int = Field(
        8192,
        ge=16,
        description="Concurrent connections; fewer if the limit of open files is lower. A further "
        "one replaces the one that has waited longest for a request.",
    )
    max_requests: int = Field(
        4096,
        ge=1,
        description="Concurrent requests, at most half of max_connections; further ones get 503 "
        "and `Retry-After`.",
    )
    max_links: int = Field(
        64, ge=0, description="Concurrent connections of pools on other machines."
    )
    max_body_mib: int = Field(64, ge=1, description="Largest size of a request's body.")
    max_held_mib: int = Field(
        1024, ge=1, description="Memory for all requests and links together; beyond it, 503."
    )
    io_timeout_s: float = Field(
        60.0,
        gt=0,
        description="Time limit for a client to send a request's head or body, or to read a "
        "response.",
    )
    idle_timeout_s: float = Field(
        75.0, gt=0, description="Close a connection after this time without a request."
    )
    session_idle_s: float = Field(
        600.0, gt=0, description="Close a session after this time without a call."
    )
    session_wait_s: float = Field(
        0.0,
        ge=0,
        description="Longest wait for a free session; then 503. 0: no wait.",
    )
    max_waiting_sessions: int = Field(
        256, ge=0, description="Requests that may wait for a session."
    )
    code_judge_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Wall time limit of Code Judge's submissions, in seconds."
    )
    code_judge_chars: int = Field(
        1000, ge=0, description="Characters of each stream in Code Judge's responses."
    )
    pool: PoolSettings = Field(default_factory=PoolSettings)

    @pydantic.model_validator(mode="after")
    def _is_safe(self) -> Self:
        if not is_loopback(self.host) and not (self.token and self.token.get_secret_value()):
            raise ValueError(f"host: {self.host!r} can be reached by others: set a token, too")
        if 2 * self.max_requests > self.max_connections:
            raise ValueError(
                f"max_requests: {self.max_requests} is more than half of max_connections "
                f"({self.max_connections}): lower the one or raise the other"
            )
        return self


class _Call(NamedTuple):
    code: str
    stdin: str
    timeout_s: float | None
    memory_mib: int | None = None
    output: OutputLimits | None = None


class SandboxService:
    """The HTTP handlers. Use as `async with SandboxService(...)`: sessions end with the context."""

    def __init__(self, pool: Pool, settings: SandboxServeSettings) -> None:
        self._pool = pool
        self._settings = settings
        # A service at its limits must still accept requests in order to answer them with 503.
        most = _num_connections(settings)
        self._max_requests = min(settings.max_requests, most // 2)
        self._max_links = min(settings.max_links, most // 4)
        self._max_waiting = min(settings.max_waiting_sessions, most // 8)
        self._connections = Connections(most, settings.io_timeout_s, settings.idle_timeout_s)
        self._doors: Doors
        token = settings.token.get_secret_value() if settings.token else None
        self._guard = Guard(settings.host, token, settings.allowed_hosts)
        self._sessions = Sessions(pool, settings.session_idle_s)
        self._num_requests = 0
        self._num_links = 0
        self._num_waiting = 0  # requests that wait for a session, not counted as open requests
        most_held = max(settings.max_held_mib, settings.max_body_mib)
        self._held = HeldBytes(most_held * MIB)

    async def __aenter__(self) -> Self:
        await self._sessions.__aenter__()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._sessions.__aexit__(*exc)

    def doors(self, make_handler: Callable[[], asyncio.Protocol]) -> Doors:
        """Return the protocol factory for the event loop's server."""
        self._doors = Doors(self._connections, make_handler)
        return self._doors

    def build(self) -> web.Application:
        app = web.Application(
            middlewares=[self._counted, self._errors, self._guarded, self._bounded],
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

    # -- native protocol --------------------------------------------------------------------

    async def run(self, request: web.Request) -> web.Response:
        asked = await self._read(RunRequest, request)
        result = await self._pool.run(asked.code, asked.stdin, asked.timeout_s, self._memory(asked))
        return _json(result)

    async def run_batch(self, request: web.Request) -> web.StreamResponse:
        calls = (await self._read(BatchRequest, request)).calls
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        try:
            each = (_Call(one.code, one.stdin, one.timeout_s, self._memory(one)) for one in calls)
            async with self._each(each) as results:
                async for index, result in results:  # no deadline: the calls have theirs
                    with anyio.fail_after(self._settings.io_timeout_s):
                        await response.write(to_line(index, result))
        except* OSError:  # also TimeoutError: the client has disconnected or does not read
            if request.transport is not None:
                request.transport.abort()
        return response

    async def open_session(self, request: web.Request) -> web.Response:
        await self._read(SessionRequest, request, empty=b"{}")
        # Beyond max_waiting, do not wait: refuse at once if no session is free.
        may_wait = self._num_waiting < self._max_waiting
        with self._waiting_for_a_session():
            key = await self._sessions.open(
                max_wait_s=self._settings.session_wait_s if may_wait else 0.0
            )
        return _json({"id": key, "idle_s": self._settings.session_idle_s}, status=201)

    async def run_cell(self, request: web.Request) -> web.Response:
        key = request.match_info["id"]
        asked = await self._read(RunRequest, request)
        what = (asked.code, asked.stdin, asked.timeout_s, self._memory(asked))
        try:
            return _json(await self._sessions.run(key, *what))
        except KeyError:
            raise _no_session() from None
        except SessionLost as error:
            raise RequestRefused(410, "session_lost", str(error)) from error

    async def close_session(self, request: web.Request) -> web.Response:
        if not self._sessions.close(request.match_info["id"]):
            raise _no_session()
        return web.Response(status=204)

    async def stats(self, request: web.Request) -> web.Response:
        here = {
            "requests": self._num_requests,
            "links": self._num_links,
            "connections": len(self._connections),
            "held_bytes": self._held.total,
        }
        return _json(self._pool.stats() | here)

    async def healthz(self, request: web.Request) -> web.Response:
        well = self._pool.stats()["workers"] > 0
        status = "ok" if well else "no worker is up"
        return _json({"status": status}, status=200 if well else 503)

    async def openapi(self, request: web.Request) -> web.Response:
        return _json(document())

    async def link(self, request: web.Request) -> web.StreamResponse:
        if self._num_links >= self._max_links:
            why = f"{self._max_links} pools are already connected (max_links)"
            raise RequestRefused(503, "overloaded", why)
        socket = web.WebSocketResponse(
            heartbeat=HEARTBEAT_S, max_msg_size=MAX_MSG_SIZE, compress=False, timeout=2.0
        )
        self._num_links += 1
        try:
            await socket.prepare(request)
            await Guest(self._pool, partial(self._held.hold, id(request))).serve(socket)
        finally:
            self._num_links -= 1
            self._held.free(id(request))
        return socket

    # -- compatible protocols ---------------------------------------------------------------

    async def submission(self, with_output: bool, request: web.Request) -> web.Response:
        asked = await self._read(compat.Submission, request)
        (answer,) = await self._judge([asked], with_output)
        return _json(answer)

    async def submissions(self, with_output: bool, request: web.Request) -> web.Response:
        asked = await self._read(compat.BatchSubmission, request)
        answers = await self._judge(asked.submissions, with_output)
        return _json({"sub_id": asked.sub_id or compat.new_id(), "results": answers})

    async def _judge(
        self, asked: list[compat.Submission], with_output: bool
    ) -> list[dict[str, Any]]:
        answers = [compat.refused_submission(one, with_output=with_output) for one in asked]
        todo = [index for index, answer in enumerate(answers) if answer is None]
        calls = (
            _Call(
                one.solution,
                one.input or "",
                self._settings.code_judge_timeout_s,
                output=compat.output_limits(one),
            )
            for one in map(asked.__getitem__, todo)
        )
        async with self._each(calls) as results:
            async for place, result in results:  # no deadline: the calls have theirs
                index = todo[place]
                answers[index] = compat.judged(
                    asked[index],
                    result,
                    with_output=with_output,
                    num_chars=self._settings.code_judge_chars,
                )
        return [answer for answer in answers if answer is not None]

    async def status(self, request: web.Request) -> web.Response:
        stats = self._pool.stats()
        return _json({"queue": stats["waiting"], "num_workers": stats["slots"]})

    async def ping(self, request: web.Request) -> web.Response:
        return _json("pong")

    async def run_code(self, request: web.Request) -> web.Response:
        asked = await self._read(compat.RunCodeRequest, request)
        if refusal := compat.refused_code(asked):
            return _json(refusal)
        result = await self._pool.run(
            asked.code,
            asked.stdin or "",
            asked.run_timeout,
            compat.memory_mib(asked, self._pool.settings.memory_mib),
            output=compat.RUN_CODE_OUTPUT,
        )
        return _json(compat.run_code_answer(result))

    # -- helpers ----------------------------------------------------------------------------

    @asynccontextmanager
    async def _each(self, calls: Iterable[_Call]) -> AsyncIterator[AsyncIterator[Numbered]]:
        """Run many calls; yield (index, result) pairs as they finish.

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
                    result = await self._pool.run(
                        call.code,
                        call.stdin,
                        call.timeout_s,
                        call.memory_mib,
                        output=call.output,
                    )
                    # no deadline: the reader has one, or does not wait for anybody
                    await out.send((index, replace(result, queue_s=result.queue_s + waited_s)))

        # The group is inside, so that the tasks end before their stream is closed.
        async with results, anyio.create_task_group() as group:
            async with out:
                for _ in range(max(16, 2 * self._pool.stats()["slots"])):
                    group.start_soon(work, out.clone())
            yield results

    def _memory(self, asked: RunRequest) -> int | None:
        """Return a call's memory limit in MiB: the requested one, up to the pool's."""
        most = self._pool.settings.memory_mib
        return None if asked.memory_mib is None else min(asked.memory_mib, most)

    async def _read(self, model: type[Model], request: web.Request, empty: bytes = b"") -> Model:
        """Read and validate a request's body."""
        body = await self._body(request, max_values(model))
        return parse(model, body or empty)

    async def _body(self, request: web.Request, most_values: int) -> bytearray:
        """Read the body, accounting for its bytes only as they arrive, not as announced."""
        body, values = bytearray(), ValueCounter()
        try:
            with anyio.fail_after(self._settings.io_timeout_s):
                self._hold(request, request.content_length or 0, 0)
                while chunk := await request.content.readany():
                    self._hold(request, len(body) + len(chunk), len(body) + len(chunk))
                    body += chunk
                    if values.feed(chunk) > most_values:
                        why = f"a request like this has at most {most_values} values and names"
                        raise RequestRefused(413, "too_large", why)
        except TimeoutError:
            raise RequestRefused(408, "slow", "the body did not arrive in time") from None
        except web.RequestPayloadError:
            why = "the body does not match its Content-Encoding"
            raise RequestRefused(400, "bad_request", why) from None
        return body

    def _hold(self, request: web.Request, size: int, num_here: int) -> None:
        """Account for a body that has `size` bytes so far, until the request ends."""
        most = self._settings.max_body_mib * MIB
        if size > most:
            raise RequestRefused(413, "too_large", f"the body may have at most {most} bytes")
        if not self._held.hold(id(request), num_here):
            raise _overloaded()

    @contextmanager
    def _waiting_for_a_session(self) -> Iterator[None]:
        """Count a request that may wait for long separately from those that run calls."""
        self._num_waiting += 1
        self._num_requests -= 1
        try:
            yield
        finally:
            self._num_requests += 1
            self._num_waiting -= 1

    @web.middleware
    async def _bounded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count a request, and the bytes of its body, until it ends."""
        if request.method != "POST":
            return await handler(request)
        if self._num_requests >= self._max_requests:
            raise _overloaded()
        self._num_requests += 1
        try:
            return await handler(request)
        finally:
            self._num_requests -= 1
            self._held.free(id(request))

    @web.middleware
    async def _counted(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        with self._doors.request(request.protocol):
            return await handler(request)

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if refusal := self._guard.refusal(request.path, request.headers):
            status, why = refusal
            raise RequestRefused(status, "unauthorized" if status == 401 else "forbidden", why)
        return await handler(request)

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        allowed = None
        try:
            return await handler(request)
        except RequestRefused as error:
            refused = error
        except Overloaded as error:
            refused = RequestRefused(503, "overloaded", str(error))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            refused = RequestRefused(error.status, "http", f"{request.path}: {error.reason}")
            allowed = error.headers.get("Allow")
        except Exception:  # a bug: the client gets a well-formed error, the log the traceback
            log.exception("%s %s failed", request.method, request.path)
            refused = RequestRefused(500, "internal", "internal server error; see the server's log")
        response = _json(refused.body, status=refused.status)
        if allowed is not None:
            response.headers["Allow"] = allowed
        if refused.status == 503:
            response.headers["Retry-After"] = "1"
        if request.content.exception() is not None:  # keep aiohttp from reading the rest
            request.content.feed_eof()
            response.force_close()
        return response


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(body), status=status, content_type="application/json")


def _overloaded() -> RequestRefused:
    return RequestRefused(503, "overloaded", "too many requests are open here; try again later")


def _no_session() -> RequestRefused:
    return RequestRefused(
        404, "no_session", "there is no such session; it may have been idle for too long"
    )


def _num_connections(settings: SandboxServeSettings) -> int:
    """Return the largest number of connections that leaves file descriptors for the workers."""
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return settings.max_connections
    return max(16, min(settings.max_connections, most - _num_spare(settings)))


def _num_spare(settings: SandboxServeSettings) -> int:
    pool = settings.pool
    return SPARE_DESCRIPTORS + DESCRIPTORS_PER_WORKER * (pool.workers + len(pool.hosts))


def _raise_descriptor_limit(settings: SandboxServeSettings) -> None:
    """Raise the limit of open files as far as the settings need and the process may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = settings.max_connections + _num_spare(settings)
    if resource.RLIM_INFINITY not in (soft, hard):
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@asynccontextmanager
async def serving(pool: Pool, settings: SandboxServeSettings) -> AsyncIterator[str]:
    """Serve a pool until the context is left; yield the URL.

    Raises:
        SandboxUnavailable: the address cannot be bound.
    """
    async with SandboxService(pool, settings) as app:
        runner = web.AppRunner(
            app.build(),
            handler_cancellation=True,
            access_log=None,
            logger=http_log,
            shutdown_timeout=0.3,
        )
        await runner.setup()
        assert runner.server is not None
        try:
            async with app.doors(runner.server) as doors, _listening(doors, settings) as url:
                yield url
        finally:
            with anyio.move_on_after(10, shield=True):
                await runner.cleanup()


@asynccontextmanager
async def _listening(doors: Doors, settings: SandboxServeSettings) -> AsyncIterator[str]:
    loop = asyncio.get_running_loop()
    try:
        server = await loop.create_server(
            doors, settings.host, settings.port, backlog=min(4096, settings.max_connections)
        )
    except OSError as error:
        where = f"{settings.host}:{settings.port}"
        why = error.strerror or error
        raise SandboxUnavailable(f"cannot listen on {where}: {why}") from error
    try:
        host, port = server.sockets[0].getsockname()[:2]
        yield url_at(host, port)
    finally:
        server.close()


async def serve(settings: SandboxServeSettings) -> None:
    """Run the service until cancelled; print a line on stdout when it is ready."""
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
        await anyio.sleep_forever()  # no deadline: serves until it is stopped


async def _until_signal(settings: SandboxServeSettings) -> int:
    status = 0
    async with anyio.create_task_group() as group:
        with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            group.start_soon(serve, settings)
            async for number in signals:  # no deadline: as long as the service runs
                status = 128 + number
                group.cancel_scope.cancel()
                break  # one is enough: all cleanup has a deadline
    return status


def load(arguments: list[str]) -> SandboxServeSettings:
    """Load settings from flags, key=value and the environment.

    Exits the process for --help and for unknown flags.

    Raises:
        ValueError: a setting is invalid; the message names it.
    """
    flags = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        is_value = (
            before.startswith("-") and "=" not in before
        )  # a flag's value may contain an equals sign
        is_pair = "=" in argument and not argument.startswith("-") and not is_value
        flags.append(f"--{argument}" if is_pair else argument)
    try:
        return SandboxServeSettings(_cli_settings_source=flags_of(SandboxServeSettings)(args=flags))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"]))
        raise ValueError(f"{field}: {problem['msg']}" if field else problem["msg"]) from None
    except SettingsError as error:
        raise ValueError(str(error)) from None


def main(arguments: list[str] | None = None) -> int:
    try:
        settings = load(sys.argv[1:] if arguments is None else arguments)
        _raise_descriptor_limit(settings)
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
