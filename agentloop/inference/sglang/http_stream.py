"""A POST request whose response is handled as bytes arrive, in the event loop's own callback.

A client library wakes a task for every read. A token stream consists of small reads, and the task
would walk its whole stack to handle a few bytes each time. Here the bytes go from the socket
through llhttp (httptools) into a function, and the task sleeps until the response is complete
(figures: docs/benchmarks.md). HTTP/1.1 and TLS; one connection per request, which is closed to
cancel the request. Not covered: redirects, proxies, compression.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Mapping
from typing import cast
from urllib.parse import SplitResult, urlsplit

import anyio
import httptools

from agentloop.aio import let_callbacks_use_anyio

_MAX_ERROR_BYTES = 65_536


class StreamBroken(Exception):
    """The connection could not be made, or it ended before the response did."""


class PostStream(asyncio.Protocol):
    """A single request; call `run()` once.

    `on_data` gets the body of a 200 response piece by piece; it returns True to end the stream.

    Attributes:
        status: Status of the response; 0 until its headers have arrived.
        error_body: First 64 KiB of the body of a response other than 200.
        heard_s: time.monotonic() when data last arrived.
    """

    def __init__(
        self,
        url: str,
        body: bytes,
        on_data: Callable[[bytes], bool],
        *,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status = 0
        self.error_body = b""
        self.heard_s = time.monotonic()
        self._url = urlsplit(url)
        self._request = _head(self._url, len(body), headers or {}) + body
        self._on_data = on_data
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._complete = False
        self._over = False
        self._ended = anyio.Event()
        self._error: BaseException | None = None

    async def run(self, *, connect_timeout_s: float) -> None:
        """Send the request and return when the response has ended.

        Only connecting has a timeout; bounding silence is up to the caller.

        Raises:
            StreamBroken: No connection could be made, or it ended early.
            Exception: Any error raised by `on_data`.
        """
        loop = asyncio.get_running_loop()
        host, port, tls = _address(self._url)
        let_callbacks_use_anyio()
        try:
            with anyio.fail_after(connect_timeout_s):
                await loop.create_connection(lambda: self, host, port, ssl=tls)
            await self._ended.wait()  # no deadline here: see break_off()
        except TimeoutError as error:
            raise StreamBroken(f"could not connect within {connect_timeout_s:g} s") from error
        except OSError as error:
            raise StreamBroken(str(error) or type(error).__name__) from error
        finally:
            self._end()
        if self._error is not None:
            raise self._error

    def break_off(self, reason: str) -> None:
        """Abort the stream: `run()` raises StreamBroken."""
        self._end(StreamBroken(reason))

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._over:  # aborted while connecting
            self._transport.abort()
            return
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self.heard_s = time.monotonic()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._end(StreamBroken(f"the response is not valid HTTP: {error}"))
        else:
            self._deliver()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end(StreamBroken(str(exc) if exc else "the connection was closed"))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        self._complete = True

    def _deliver(self) -> None:
        """Pass on the body of one read as one piece, however it was chunked."""
        pieces, self._pieces = self._pieces, []
        data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        try:
            if self.status != 200:
                self.error_body += data[: _MAX_ERROR_BYTES - len(self.error_body)]
            elif data and self._on_data(data):
                self._complete = True
        except BaseException as error:  # run() raises it instead of the event loop
            self._end(error)
        if self._complete:
            self._end()

    def _end(self, error: BaseException | None = None) -> None:
        if not self._over:
            self._over = True
            self._error = error
            self._ended.set()
        if self._transport is not None:
            self._transport.abort()


def _head(url: SplitResult, length: int, headers: Mapping[str, str]) -> bytes:
    path = (url.path or "/") + (f"?{url.query}" if url.query else "")
    lines = (
        f"POST {path} HTTP/1.1",
        f"Host: {url.netloc.rpartition('@')[2]}",
        "Accept: text/event-stream",
        "Content-Type: application/json",
        f"Content-Length: {length}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in headers.items()),
        "\r\n",
    )
    return "\r\n".join(lines).encode()


def _address(url: SplitResult) -> tuple[str, int, ssl.SSLContext | None]:
    secure = url.scheme == "https"
    tls = ssl.create_default_context() if secure else None
    return url.hostname or "", url.port or (443 if secure else 80), tls
