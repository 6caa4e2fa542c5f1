"""Requests to a server besides the token stream: short, JSON, with a deadline."""

from __future__ import annotations

import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.client import responses
from typing import Any

import aiohttp
import orjson
import pydantic

from agentloop.errors import ServerRefused, ServerUnavailable

_MAX_ANSWER_BYTES = 16 << 20  # the answer of /server_info is long
_TIMEOUT_S = 10.0


@asynccontextmanager
async def http_session(
    key: pydantic.SecretStr | None = None,
) -> AsyncIterator[aiohttp.ClientSession]:
    """Open a session without aiohttp's limit of 100 connections, because streams last for
    minutes. `key` is the API key of its servers."""
    connector = aiohttp.TCPConnector(limit=0)
    headers = {"Authorization": f"Bearer {key.get_secret_value()}"} if key else None
    async with aiohttp.ClientSession(
        connector=connector,
        json_serialize=lambda value: orjson.dumps(value).decode(),
        headers=headers,
    ) as session:
        yield session


class ControlClient:
    """A client of a server's control endpoints."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def get(self, path: str) -> Any:
        """Return the answer to a GET request; for the errors see `post`."""
        return await self._request("GET", path, None, _TIMEOUT_S)

    async def post(self, path: str, body: object, *, timeout_s: float = _TIMEOUT_S) -> Any:
        """Send JSON and return the answer.

        Raises:
            ServerUnavailable: The server could not be reached, or did not answer in time.
            ServerRefused: It answered with an error, or not with JSON.
        """
        return await self._request("POST", path, body, timeout_s)

    async def _request(
        self,
        method: str,
        path: str,
        body: object,
        timeout_s: float,
    ) -> object:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(
                method, self._url + path, json=body, timeout=timeout
            ) as response:
                content = b""
                # no deadline: the request has one, timeout
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > _MAX_ANSWER_BYTES:
                        raise ServerRefused(
                            f"{self._url}{path}: an answer of more than {_MAX_ANSWER_BYTES} bytes",
                            status=200,
                        )
                if response.status != 200:
                    raise refusal(self._url + path, response.status, content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            reason = str(error) or type(error).__name__
            if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:
                reason = "no server listens there"
            raise ServerUnavailable(f"{self._url}: {reason}") from error
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise ServerRefused(f"{self._url}{path}: the answer is not JSON", status=200) from error


@contextmanager
def parsing(url: str) -> Iterator[None]:
    """Raise ServerRefused if an answer lacks what SGLang's have."""
    try:
        yield
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise ServerRefused(f"{url} is not an SGLang server", status=200) from error


def refusal(where: str, status: int, body: bytes) -> ServerRefused:
    """Return the error for a response of another status than 200, with the server's message."""
    try:
        message = orjson.loads(body)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body[:500].decode(errors="replace") or responses.get(status, "no message")
    return ServerRefused(f"{where}: {status}: {message}", status=status)
