"""The page at `/`, and what it reads: static files, server-sent events, JSON.

    GET  /  /page/NAME                       the page itself: vendored, no build step
    GET  /api/stream  /api/frame             the board, as it changes; all of it at once
    GET  /api/rollouts/ID  .../ID/stream     a rollout, whole or as it grows
    GET  /api/groups/ID  /api/runs  /api/curves?run=NAME
    POST /api/ask  /api/control

What is shown is a `Shown`: what goes on (live.py) or a run's folder (archive.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import anyio
import orjson
from aiohttp import web

from agentloop.errors import AgentLoopError, NotThere, RequestError
from agentloop.plain_json import dumps

__all__ = ["Control", "Page", "Shown"]

_WEB = Path(__file__).resolve().with_name("web")
_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MAX_QUESTION_CHARS = 100_000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Shown(Protocol):
    """What the page shows. Its answers are plain data; what it does not have is `NotThere`."""

    def frames(self, last_id: str | None = None) -> AsyncGenerator[tuple[str, bytes]]:
        """Ids and encoded frames, the first of which replaces all; empty ones are signs of life.
        A reader that has been here before says what it had last."""
        ...

    async def frame(self) -> dict[str, Any]:
        """Everything at once."""
        ...

    async def rollout(self, key: str) -> dict[str, Any]:
        """A trajectory with its text, token by token, and what was made of it."""
        ...

    def grows(self, key: str) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Names and data: "trajectory", then "delta" as it grows, then "end"; or a sign of life,
        which has no name."""
        ...

    async def group(self, name: str) -> dict[str, Any]:
        """The rollouts of a task: what each is worth, and whether it is learned from."""
        ...

    async def runs(self) -> list[dict[str, Any]]:
        """Runs whose curves can be shown beside."""
        ...

    async def curves(self, run: str) -> list[dict[str, Any]]:
        """A run's rows of metrics."""
        ...


class Control(Protocol):
    """What a visitor who has the token may do."""

    @property
    def can(self) -> Sequence[str]:
        """Of pause, resume, drain, cancel, checkpoint."""
        ...

    async def do(self, what: str, rollout: str | None) -> str:
        """One of these; says in words what was done. Raises RequestError: it cannot be."""
        ...


class Page:
    """The page's routes."""

    def __init__(
        self,
        shown: Shown,
        *,
        ask: Callable[[str], Awaitable[str]] | None = None,
        control: Control | None = None,
        control_token: str | None = None,
        io_timeout_s: float = 60.0,
    ) -> None:
        """`ask` starts a rollout of a question and returns its id. Without `control_token` one is
        made up. A reader that takes nothing for `io_timeout_s` is one that has left."""
        self._shown = shown
        self._ask = ask
        self._control = control
        self.control_token = control_token or secrets.token_urlsafe(9)
        self._io_timeout_s = io_timeout_s
        self._streaming: set[asyncio.Transport] = set()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/", self._index)
        app.router.add_get("/page/{name:.+}", self._file)
        app.router.add_get("/favicon.ico", self._icon)
        gets = {
            "/api/stream": self._stream,
            "/api/frame": self._frame,
            "/api/rollouts/{id}": self._rollout,
            "/api/rollouts/{id}/stream": self._grows,
            "/api/groups/{id}": self._group,
            "/api/runs": self._runs,
            "/api/curves": self._curves,
        }
        for path, handler in gets.items():
            app.router.add_get(path, _told(handler))
        app.router.add_post("/api/ask", _told(self._asked))
        app.router.add_post("/api/control", _told(self._controlled))
        app.on_shutdown.append(self._end_streams)

    # --- the page itself --------------------------------------------------------------------------

    async def _index(self, request: web.Request) -> web.StreamResponse:
        return await _static("index.html")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return await _static(request.match_info["name"])

    async def _icon(self, request: web.Request) -> web.StreamResponse:
        return await _static("icon.svg")

    # --- what it reads ----------------------------------------------------------------------------

    async def _frame(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._shown.frame())

    async def _rollout(self, request: web.Request) -> web.StreamResponse:
        return await _json_in_thread(await self._shown.rollout(request.match_info["id"]))

    async def _group(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._shown.group(request.match_info["id"]))

    async def _runs(self, request: web.Request) -> web.StreamResponse:
        return _json({"runs": await self._shown.runs()})

    async def _curves(self, request: web.Request) -> web.StreamResponse:
        run = request.query.get("run", "")
        return await _json_in_thread({"run": run, "rows": await self._shown.curves(run)})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        last_id = request.headers.get("Last-Event-ID")
        async with (
            aclosing(self._shown.frames(last_id)) as frames,
            self._begun(request) as response,
        ):
            with suppress(ConnectionResetError):  # the reader has left
                async for frame_id, data in frames:  # no deadline: until then
                    if not data:
                        await self._write(request, response, b":\n\n")
                        continue
                    name = f"id: {frame_id}\n" if frame_id else ""
                    head = f"{name}event: frame\ndata: ".encode()
                    await self._write(request, response, head + data + b"\n\n")
            return response

    async def _grows(self, request: web.Request) -> web.StreamResponse:
        async with aclosing(self._shown.grows(request.match_info["id"])) as events:
            first = await anext(events)  # no deadline: it is there, or it is not; raises NotThere
            async with self._begun(request) as response:
                with suppress(ConnectionResetError):  # the reader has left
                    await self._event(request, response, *first)
                    async for name, data in events:  # no deadline: the rollout has one
                        await self._event(request, response, name, data)
            return response

    # --- what it does -----------------------------------------------------------------------------

    async def _asked(self, request: web.Request) -> web.StreamResponse:
        question = (await _body(request, self._io_timeout_s)).get("question")
        if self._ask is None:
            raise RequestError("there is nobody to ask here")
        if not isinstance(question, str) or not question.strip():
            raise RequestError("question: a text is expected")
        if len(question) > _MAX_QUESTION_CHARS:
            raise RequestError(f"question: {_MAX_QUESTION_CHARS:,} characters at most")
        return _json({"rollout": await self._ask(question)})

    async def _controlled(self, request: web.Request) -> web.StreamResponse:
        given = request.headers.get("X-Control-Token", "").encode("utf-8", "surrogatepass")
        if not secrets.compare_digest(given, self.control_token.encode()):
            text = "the control token is needed: it was printed when this was started"
            return _json({"error": text}, status=403)
        body = await _body(request, self._io_timeout_s)
        what, rollout = body.get("do"), body.get("rollout")
        can = [] if self._control is None else self._control.can
        if self._control is None or not isinstance(what, str) or what not in can:
            raise RequestError(f"do: one of {', '.join(can) or 'nothing'} is possible here")
        if rollout is not None and not isinstance(rollout, str):
            raise RequestError("rollout: its id is expected")
        return _json({"done": await self._control.do(what, rollout)})

    # --- streams ----------------------------------------------------------------------------------

    @asynccontextmanager
    async def _begun(self, request: web.Request) -> AsyncIterator[web.StreamResponse]:
        headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}
        response = web.StreamResponse(headers=headers)
        await response.prepare(request)
        transport = request.transport
        if transport is None:  # the reader has left
            yield response
            return
        self._streaming.add(transport)
        try:
            yield response
        finally:
            self._streaming.discard(transport)

    async def _end_streams(self, app: web.Application) -> None:
        """They have no end of their own, and would be waited for."""
        for transport in self._streaming:
            transport.abort()

    async def _event(
        self, request: web.Request, response: web.StreamResponse, name: str, data: dict[str, Any]
    ) -> None:
        if not name:
            await self._write(request, response, b":\n\n")
            return
        encoded = await anyio.to_thread.run_sync(dumps, data)
        await self._write(request, response, f"event: {name}\ndata: ".encode() + encoded + b"\n\n")

    async def _write(self, request: web.Request, response: web.StreamResponse, data: bytes) -> None:
        try:
            with anyio.fail_after(self._io_timeout_s):
                await response.write(data)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # to close it would be to wait for it
            raise ConnectionResetError("the reader reads nothing") from None


def _told(handler: Handler) -> Handler:
    """Errors with a name, as the page reads them."""

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            return await handler(request)
        except NotThere as error:
            return _json({"error": str(error)}, status=404)
        except RequestError as error:
            return _json({"error": str(error)}, status=400)
        except AgentLoopError as error:
            return _json({"error": str(error)}, status=503)
        except web.HTTPClientError as error:  # a body that is too large, or does not come
            return _json({"error": error.text or error.reason}, status=error.status)

    return handle


async def _body(request: web.Request, timeout_s: float) -> dict[str, Any]:
    try:
        with anyio.fail_after(timeout_s):
            data = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text="the body did not arrive in time") from None
    except web.RequestPayloadError:
        raise web.HTTPBadRequest(text="the body is not encoded as it says") from None
    try:
        body = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body: an object is expected")
    return body


async def _static(name: str) -> web.StreamResponse:
    path = _WEB / name
    # Nothing but what lies there: the name is a stranger's.
    try:
        is_there = path.resolve().is_relative_to(_WEB) and path.is_file()
    except (OSError, ValueError):  # too long, or with a NUL
        is_there = False
    if path.suffix not in _TYPES or not is_there:
        raise web.HTTPNotFound(text=f"there is no {name!r}")
    headers = {**_HEADERS, "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8"}
    return web.FileResponse(path, headers=headers)


def _json(body: Any, status: int = 200) -> web.Response:
    return web.Response(body=dumps(body), status=status, content_type="application/json")


async def _json_in_thread(body: Any) -> web.Response:
    """What may be long."""
    encoded = await anyio.to_thread.run_sync(dumps, body)
    return web.Response(body=encoded, content_type="application/json")
