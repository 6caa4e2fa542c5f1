"""`agentloop chat --url`: converse with a service that is running, such as `agentloop serve`.

    messages ──POST /v1/chat/completions──> chunks, printed as they arrive ──> the answer

Any service with OpenAI's chat completions will do. What `agentloop serve` reports of the calls that
its agent ran is part of the reasoning.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from urllib.parse import urlsplit

import httpx
from rich.console import Console

from agentloop.errors import RequestError, ServerUnavailable, SettingsError
from agentloop.inference.openai_client import stop_reason_of
from agentloop.inference.proxies import proxy_for
from agentloop.plain_json import JsonObject, loads
from agentloop.trajectory import Message

_READ_S = 600.0  # for the next chunk: tools run in between
_CONNECT_S = 10.0
_MAX_ERROR_CHARS = 300


class RunningService:
    """A service that answers conversations."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self._url = url

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, token: str | None) -> AsyncIterator[RunningService]:
        """Open a connection.

        Args:
            url: The service's address, such as http://127.0.0.1:8000, with or without /v1.

        Raises:
            SettingsError: the URL, or the proxy of the environment for it, is invalid.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise SettingsError(f"--url: {url!r} does not have the form http://HOST:PORT")
        base = url.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        timeout = httpx.Timeout(_READ_S, connect=_CONNECT_S)
        transport = httpx.AsyncHTTPTransport(proxy=proxy_for(url))
        async with httpx.AsyncClient(headers=headers, timeout=timeout, transport=transport) as http:
            yield cls(http, base)

    async def answer(self, messages: list[Message], out: Console) -> str:
        """Print the answer to a conversation as it arrives, its reasoning dimmed, and return it.

        Raises:
            RequestError: the service refused the conversation.
            ServerUnavailable: it cannot be reached, or failed.
        """
        answer, shown = "", ""
        async with aclosing(self._deltas(messages)) as deltas:
            async for delta in deltas:  # no deadline: each chunk has one
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                content = delta.get("content") or ""
                if content and not answer and shown and not shown.endswith("\n"):
                    out.print()  # the answer has lines of its own
                for text, style in ((reasoning, "dim"), (content, "bold")):
                    text = text if shown else text.lstrip("\n")
                    out.print(text, style=style, end="", markup=False, highlight=False)
                    shown += text
                answer += content
        if shown and not shown.endswith("\n"):
            out.print()
        return answer

    async def _deltas(self, messages: list[Message]) -> AsyncGenerator[JsonObject]:
        body = {"messages": messages, "stream": True}
        finish_reason = None
        try:
            async with self._http.stream(
                "POST", f"{self._url}/chat/completions", json=await self._with_model(body)
            ) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                    raise RequestError(f"{self._url}: {_reason(response)}")
                async for line in response.aiter_lines():  # no deadline: the client has one
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    chunk = loads(data.encode())
                    if error := chunk.get("error"):
                        raise ServerUnavailable(f"{self._url}: {error.get('message', error)}")
                    for choice in chunk.get("choices", ()):
                        finish_reason = choice.get("finish_reason") or finish_reason
                        yield choice.get("delta", {})
        except httpx.HTTPError as error:
            raise ServerUnavailable(
                f"{self._url}: {error or type(error).__name__}; is `agentloop serve` running there?"
            ) from error
        except ValueError as error:
            raise ServerUnavailable(f"{self._url}: an invalid chunk: {error}") from error
        if stop_reason_of(finish_reason).is_unscorable:
            raise ServerUnavailable(
                f"{self._url}: the answer was broken off (finish_reason {finish_reason!r})"
            )

    async def _with_model(self, body: dict[str, object]) -> dict[str, object]:
        """Add the first of the service's models, which for `agentloop serve` is the agent."""
        response = await self._http.get(f"{self._url}/models")
        if response.status_code != httpx.codes.OK:
            raise RequestError(f"{self._url}: {_reason(response)}")
        listed = loads(response.content).get("data") or [{}]
        name = listed[0].get("id")
        return body if name is None else {**body, "model": name}


def _reason(response: httpx.Response) -> str:
    try:
        error = loads(response.content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:_MAX_ERROR_CHARS]
    except (ValueError, KeyError, TypeError):
        return f"{response.status_code} {response.reason_phrase}"
