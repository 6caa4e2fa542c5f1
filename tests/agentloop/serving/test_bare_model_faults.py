"""The bare model over HTTP where its clients, or we, do what they should not."""

from __future__ import annotations

import logging
from typing import Any

import anyio
import openai
import pytest

from agentloop.agent.sessions import ModelSession
from agentloop.errors import RequestError
from agentloop.serving.http import send
from agentloop.serving.protocols.responses import store as response_store
from agentloop.serving.protocols.responses.store import ResponseStore
from tests.agentloop.serving.test_app import HELLO, says, service
from tests.agentloop.serving.test_bare_model import open_session, trajectories


async def test_bug_is_logged_without_the_sessions_key(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*arguments: Any) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(ModelSession, "complete", broken)
    async with service() as at, open_session(at) as session:
        url = f"{session['base_url']}/chat/completions"
        with caplog.at_level(logging.ERROR):
            async with at.http.post(url, json={"messages": HELLO}) as answer:
                assert answer.status == 500
        assert "a bug" in caplog.text
        assert "/v1/sessions/{key}/v1/chat/completions" in caplog.text
        assert session["url"].rpartition("/")[2] not in caplog.text


async def test_response_can_be_continued_once_its_client_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with service(says("one"), says("two")) as at, open_session(at) as session:
        asks = openai.AsyncOpenAI(base_url=session["base_url"], api_key="x", max_retries=0)
        held = anyio.Event()

        async def slow(request: Any, response: Any, data: bytes, **options: Any) -> None:
            await send(request, response, data, **options)
            if b"response.completed" in data:
                await held.wait()  # as where the client reads slowly

        monkeypatch.setattr("agentloop.serving.http.send", slow)
        async with asks:
            stream = await asks.responses.create(model="m", input="a", stream=True)
            async for event in stream:
                if event.type == "response.completed":
                    more = await asks.responses.create(
                        model="m", input="b", previous_response_id=event.response.id
                    )
                    assert more.output_text == "two"
                    held.set()
        assert len(await trajectories(at, session)) == 1


async def test_session_has_so_many_requests_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.agent.sessions.session._MAX_IN_FLIGHT", 2)
    release = anyio.Event()
    turns = [[release.wait, *says("hi")] for _ in range(3)]
    async with (
        service(*turns) as at,
        open_session(at) as session,
        anyio.create_task_group() as tasks,
    ):

        async def ask() -> None:
            body = {"messages": HELLO, "n": 3}
            async with at.http.post(f"{session['base_url']}/chat/completions", json=body) as answer:
                assert len((await answer.json())["choices"]) == 3

        tasks.start_soon(ask)
        while at.router.num_open < 2:
            await anyio.lowlevel.checkpoint()
        await anyio.wait_all_tasks_blocked()
        assert at.router.num_open == 2
        release.set()


def test_responses_are_remembered_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "_MAX_CHARS", 1000)
    store = ResponseStore()
    for name, size in (("a", 400), ("b", 400), ("c", 400), ("long", 5000)):
        store.add(name, [{"role": "user", "content": "x" * size}])
        assert store[name]
        if name == "c":
            assert store["b"]
            with pytest.raises(RequestError, match="previous_response_id"):
                store["a"]
    with pytest.raises(RequestError, match="previous_response_id"):
        store["c"]


async def test_tokens_are_recorded_if_a_client_leaves_a_stream() -> None:
    turn = [*says("one two three")[:-1], anyio.sleep_forever]
    async with service(turn) as at, open_session(at) as session:
        body = {"messages": HELLO, "stream": True}
        url = f"{session['base_url']}/chat/completions"
        async with at.http.post(url, json=body) as answer:
            read = b""
            while b'"delta":{"content":"' not in read:
                read += await answer.content.readany()
            assert await trajectories(at, session) == []
            answer.close()
        # The service notices the closed connection, and then records the turn, when it can.
        while not (records := await trajectories(at, session)):
            pass
        assert at.router.num_open == 0
    (record,) = records
    (sampled,) = record["turns"]
    assert sampled["text"]
    assert len(sampled["output_ids"]) == len(sampled["logprobs"]) > 0
