"""Routes of the page at `/`: static files, server-sent events and JSON.

    GET  /  /page/NAME                       the page itself: static files, no build step
    GET  /api/stream  /api/frame             the board: as a stream of changes; whole
    GET  /api/rollouts/ID  .../ID/stream     a rollout: whole; as it grows
    GET  /api/groups/ID  /api/runs  /api/curves?run=NAME
    GET  /api/trace                          the timelines, for Perfetto
    POST /api/ask  /api/control

The data comes from a `PageData`: a live process (live.py) or a run's folder (archive.py).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Protocol

import anyio
import pydantic
from aiohttp import web

from agentloop.errors import AgentLoopError, NotThere, RequestError
from agentloop.observe.frames import BoardFrame
from agentloop.observe.perfetto import trace_of
from agentloop.plain_json import dumps
from agentloop.serving.http import EventStream, read_body
from agentloop.serving.requests import load_object

_WEB = Path(__file__).resolve().with_name("web")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MAX_QUESTION_CHARS = 100_000

Handler = Callable[[web.Request], Awaitable[web.StreamResponse | Mapping[str, object]]]
"""Returns a response, or the body of one as plain data."""


class PageData(Protocol):
    """A source of data for the page, as plain data; raises `NotThere` for unknown items."""

    def frames(self, last_id: str | None = None) -> AsyncGenerator[tuple[str, bytes]]:
        """Yield ids and encoded frames, the first of which replaces everything.

        A reader that reconnects passes the id of its last frame.
        """
        ...

    async def frame(self) -> BoardFrame:
        """Return the whole state."""
        ...

    async def rollout(self, key: str) -> Mapping[str, object]:
        """Return a trajectory with its text by token, its reward and its group."""
        ...

    def rollout_events(self, key: str) -> AsyncGenerator[tuple[str, Mapping[str, object]]]:
        """Yield names and data: "trajectory", then "delta" as it grows, then "end"."""
        ...

    async def group(self, name: str) -> Mapping[str, object]:
        """Return the rollouts of a task, with their rewards and whether each is trained on."""
        ...

    async def runs(self) -> Sequence[Mapping[str, object]]:
        """Return the runs whose curves can be shown for comparison."""
        ...

    async def curves(self, run: str) -> Mapping[str, object]:
        """Return a run's metrics, `rows`, and what `origin_of` returns."""
        ...


class Control(Protocol):
    """Actions for visitors that have the control token."""

    @property
    def actions(self) -> Sequence[str]:
        """The available actions: some of pause, resume, drain, cancel and checkpoint."""
        ...

    async def perform(self, action: str, rollout: str | None) -> str:
        """Perform an action and return a description of it.

        Raises:
            RequestError: The action is not possible now.
        """
        ...


class Page:
    """The routes of the page."""

    def __init__(
        self,
        data: PageData,
        *,
        ask: Callable[[str], Awaitable[str]] | None = None,
        control: Control | None = None,
        control_token: pydantic.SecretStr | None = None,
        io_timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            ask: Starts a rollout of a question and returns its id.
            control_token: Default: a random one.
            io_timeout_s: Disconnect a reader that has not read for this long.
        """
        self._data = data
        self._ask = ask
        self._control = control
        self.control_token = (
            control_token.get_secret_value() if control_token else secrets.token_urlsafe(9)
        )
        self._io_timeout_s = io_timeout_s
        self._streaming: set[asyncio.Transport] = set()

    def add_to(self, app: web.Application) -> None:
        app.router.add_get("/", _static)
        app.router.add_get("/page/{name:.+}", _static)
        gets: dict[str, Handler] = {
            "/api/stream": self._stream,
            "/api/frame": lambda request: self._data.frame(),
            "/api/rollouts/{id}": lambda request: self._data.rollout(request.match_info["id"]),
            "/api/rollouts/{id}/stream": self._rollout_stream,
            "/api/groups/{id}": lambda request: self._data.group(request.match_info["id"]),
            "/api/runs": self._runs,
            "/api/curves": self._curves,
            "/api/trace": self._trace,
        }
        for path, handler in gets.items():
            app.router.add_get(path, _as_json(handler))
        app.router.add_post("/api/ask", _as_json(self._post_question))
        app.router.add_post("/api/control", _as_json(self._post_action))
        app.on_shutdown.append(self._end_streams)

    # --- data -------------------------------------------------------------------------------------

    async def _runs(self, request: web.Request) -> Mapping[str, object]:
        return {"runs": await self._data.runs()}

    async def _curves(self, request: web.Request) -> Mapping[str, object]:
        run = request.query.get("run", "")
        return {"run": run, **await self._data.curves(run)}

    async def _trace(self, request: web.Request) -> Mapping[str, object]:
        return await anyio.to_thread.run_sync(trace_of, await self._data.frame())

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        async with aclosing(self._data.frames(request.headers.get("Last-Event-ID"))) as frames:
            return await self._send_events(request, _frame_events(frames))

    async def _rollout_stream(self, request: web.Request) -> web.StreamResponse:
        async with aclosing(self._data.rollout_events(request.match_info["id"])) as events:
            name, data = await anext(events)  # no deadline: it is immediate; raises NotThere

            async def encoded() -> AsyncIterator[bytes]:
                yield _event(name, await anyio.to_thread.run_sync(dumps, data))
                async for later, delta in events:  # no deadline: the rollout has one
                    yield _event(later, await anyio.to_thread.run_sync(dumps, delta))

            return await self._send_events(request, encoded())

    async def _send_events(
        self, request: web.Request, events: AsyncIterator[bytes]
    ) -> web.StreamResponse:
        """Send events until they end, the reader leaves, or it stops reading."""
        stream, transport = EventStream(request, timeout_s=self._io_timeout_s), request.transport
        if transport is not None:  # otherwise the reader has left
            self._streaming.add(transport)
        with suppress(ConnectionResetError):
            async with stream.alive():
                try:
                    async for event in events:  # no deadline: ends when the reader leaves
                        await stream.send(event)  # no deadline: it has one
                finally:  # before any other task runs: a shutdown must not cut off the last event
                    if transport is not None:
                        self._streaming.discard(transport)
        return stream.response

    async def _end_streams(self, app: web.Application) -> None:
        """Close streams at shutdown; otherwise it would wait for them, since they never end."""
        for transport in self._streaming:
            transport.abort()

    # --- actions ----------------------------------------------------------------------------------

    async def _post_question(self, request: web.Request) -> Mapping[str, object]:
        question = load_object(await read_body(request, self._io_timeout_s)).get("question")
        if self._ask is None:
            raise RequestError("questions are not available here")
        if not isinstance(question, str) or not question.strip():
            raise RequestError("question: expected text")
        if len(question) > _MAX_QUESTION_CHARS:
            raise RequestError(f"question: longer than {_MAX_QUESTION_CHARS:,} characters")
        return {"rollout": await self._ask(question)}

    async def _post_action(self, request: web.Request) -> Mapping[str, object]:
        token = request.headers.get("X-Control-Token", "").encode("utf-8", "surrogatepass")
        if not secrets.compare_digest(token, self.control_token.encode()):
            text = "the control token is missing or wrong; it was printed at startup"
            raise web.HTTPForbidden(text=text)
        body = load_object(await read_body(request, self._io_timeout_s))
        action, rollout = body.get("do"), body.get("rollout")
        actions = [] if self._control is None else self._control.actions
        if self._control is None or not isinstance(action, str) or action not in actions:
            available = f"must be one of: {', '.join(actions)}" if actions else "not available here"
            raise RequestError(f"do: {available}")
        if rollout is not None and not isinstance(rollout, str):
            raise RequestError("rollout: expected an id")
        return {"done": await self._control.perform(action, rollout)}


def _as_json(handler: Handler) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """Send what a handler returns as JSON, and its errors too, as the page expects them."""

    async def handle(request: web.Request) -> web.StreamResponse:
        status = 200
        try:
            body = await handler(request)
        except AgentLoopError as error:
            body = {"error": str(error)}
            is_request = isinstance(error, RequestError)
            status = 404 if isinstance(error, NotThere) else 400 if is_request else 503
        except web.HTTPClientError as error:  # the body is too large or did not arrive
            body, status = {"error": error.text or error.reason}, error.status
        if isinstance(body, web.StreamResponse):
            return body
        encoded = await anyio.to_thread.run_sync(dumps, body)  # it may be large
        return web.Response(body=encoded, status=status, content_type="application/json")

    return handle


async def _frame_events(frames: AsyncIterator[tuple[str, bytes]]) -> AsyncIterator[bytes]:
    async for frame_id, data in frames:  # no deadline: ends when the reader leaves
        yield _event("frame", data, frame_id)


def _event(name: str, data: bytes, id: str = "") -> bytes:
    """Return one event of a stream; with an id, a reader can resume from there."""
    line = f"id: {id}\n" if id else ""
    return f"{line}event: {name}\ndata: ".encode() + data + b"\n\n"


async def _static(request: web.Request) -> web.StreamResponse:
    name = request.match_info.get("name", "index.html")
    path = _WEB / name
    # The name is untrusted: serve only files of this folder.
    try:
        is_there = path.resolve().is_relative_to(_WEB) and path.is_file()
    except (OSError, ValueError):  # the name is too long or contains a NUL
        is_there = False
    if path.suffix not in _TYPES or not is_there:
        raise web.HTTPNotFound(text=f"{name!r}: not found")
    headers = {**_HEADERS, "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8"}
    return web.FileResponse(path, headers=headers)
