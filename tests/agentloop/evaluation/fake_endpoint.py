"""A fake chat completions endpoint that fails on request."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
from aiohttp import web

from tests.support import serving


@dataclass(frozen=True)
class Answer:
    """The response to one request. A `body` of bytes is sent unchanged."""

    status: int = 200
    body: Mapping[str, Any] | bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


def saying(content: str | None, finish: str = "stop", **more: Any) -> Answer:
    message = {"role": "assistant", "content": content, **more}
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return Answer(body={"choices": [choice], "usage": {"completion_tokens": 7}})


@dataclass
class FakeEndpoint:
    """Gives its `script` first, then answers every question with `\\boxed{1}`."""

    script: deque[Answer] = field(default_factory=deque)
    models: list[str] = field(default_factory=lambda: ["fake"])
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    gate: anyio.Event | None = None  # each answer waits for it
    num_in_flight: int = 0
    most_in_flight: int = 0
    url: str = ""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeEndpoint]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        async with serving(app) as url:
            self.url = url + "/v1"
            yield self

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": name} for name in self.models]})

    async def _complete(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        self.keys.append(request.headers.get("Authorization"))
        answer = self.script.popleft() if self.script else saying("It is \\boxed{1}.")
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        try:
            if self.gate is not None:
                await self.gate.wait()
        finally:
            self.num_in_flight -= 1
        body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
        return web.Response(
            status=answer.status,
            body=body,
            headers={"Content-Type": "application/json", **answer.headers},
        )
