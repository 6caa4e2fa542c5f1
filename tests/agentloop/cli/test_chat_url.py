"""`agentloop chat --url`: a conversation with a service that is running."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import httpx
import pytest
from rich.console import Console

from agentloop.__main__ import main
from agentloop.cli.chat_url import RunningService
from agentloop.errors import RequestError, ServerUnavailable, SettingsError
from agentloop.trajectory import Message
from tests.agentloop.serving.test_app import says, service

HELLO: list[Message] = [{"role": "user", "content": "Hello?"}]


@asynccontextmanager
async def played(*lines: str, status: int = 200) -> AsyncIterator[RunningService]:
    """Connect to a service that streams these lines."""

    def respond(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/models"):
            return httpx.Response(200, json={"data": [{"id": "m"}]})
        assert json.loads(request.content)["model"] == "m"
        return httpx.Response(status, text="\n\n".join(lines))

    async with httpx.AsyncClient(transport=httpx.MockTransport(respond)) as http:
        yield RunningService(http, "http://played/v1")


def chunk(*, finish_reason: str | None = None, **delta: Any) -> str:
    return f"data: {json.dumps({'choices': [{'delta': delta, 'finish_reason': finish_reason}]})}"


async def test_answer_is_printed_with_its_reasoning() -> None:
    out = Console(file=StringIO())
    lines = [chunk(role="assistant", content=""), chunk(reasoning_content="\n37 * 48"), ": alive"]
    lines += [chunk(content=" is [b]"), chunk(finish_reason="stop"), "data: [DONE]"]
    async with played(*lines) as at:
        assert await at.answer(HELLO, out) == " is [b]"
    assert out.file.getvalue() == "37 * 48\n is [b]\n"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('data: {"error": {"message": "no server is left"}}', "no server is left"),
        ("data: {", "an invalid chunk"),
        ("data: [DONE]", r"broken off \(finish_reason None\)"),
        (chunk(finish_reason="abort"), r"broken off \(finish_reason 'abort'\)"),
    ],
)
async def test_stream_that_breaks_is_an_error(line: str, message: str) -> None:
    async with played(chunk(content="a"), line) as service:
        with pytest.raises(ServerUnavailable, match=message):
            await service.answer(HELLO, Console(file=StringIO()))


async def test_refusal_is_told() -> None:
    refusal = json.dumps({"error": {"message": "the prompt fills the context"}})
    async with played(refusal, status=400) as at:
        with pytest.raises(RequestError, match="the prompt fills the context"):
            await at.answer(HELLO, Console(file=StringIO()))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://here", "http://", ""])
async def test_url_that_is_none_is_told(url: str) -> None:
    with pytest.raises(SettingsError, match="--url"):
        async with RunningService.open(url, None):
            pass


@pytest.mark.parametrize("end", ["", "/", "/v1"])
async def test_our_own_service_answers(end: str) -> None:
    async with service(says("It is 1776.")) as at:
        url = at.url.removesuffix("/v1")
        async with RunningService.open(url + end, None) as running:
            assert await running.answer(HELLO, Console(file=StringIO())) == "It is 1776."


def test_missing_service_and_unused_settings_are_errors(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1", "Hello?"]) == 2
    assert "is `agentloop serve` running there?" in capsys.readouterr().err
    assert main(["chat", "--url", "http://127.0.0.1:1", "Hello?", "model=x"]) == 2
    assert "omit model=x" in capsys.readouterr().err
