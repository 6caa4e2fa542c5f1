"""The bare model and its sessions over HTTP, in each protocol, over a fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest

from agentloop.trajectory import StopReason
from tests.agentloop.serving.test_app import HELLO, THEIRS, Service, client, says, service
from tests.support import END, call_text

QUESTION = "What is 37 times 48?"
SECRET: dict[str, Any] = {"serve": {"port": 0, "token": "secret"}}


@asynccontextmanager
async def open_session(at: Service, **body: Any) -> AsyncIterator[dict[str, Any]]:
    """Open a session for the duration of the context; yield what the service says of it."""
    async with at.post("/v1/sessions", body) as response:
        assert response.status == 201
        session = await response.json()
    yield session
    async with at.http.delete(session["url"]) as response:
        assert response.status == 200


async def trajectories(at: Service, session: dict[str, Any]) -> list[dict[str, Any]]:
    async with at.http.get(f"{session['url']}/trajectories") as response:
        assert response.status == 200
        lines = (await response.text()).splitlines()
    return [json.loads(line)["trajectory"] for line in lines]


async def test_openais_client_converses_in_a_session() -> None:
    call = call_text("theirs", {"n": 1})
    async with service(says(call), says("done")) as at, open_session(at) as session:
        asks = openai.AsyncOpenAI(base_url=session["base_url"], api_key="x", max_retries=0)
        async with asks:
            first = await asks.chat.completions.create(
                model="any-name", messages=HELLO, tools=[THEIRS]
            )
            message = first.choices[0].message
            assert message.tool_calls
            history = [*HELLO, message.model_dump(exclude_none=True)]
            history.append(
                {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
            )
            second = await asks.chat.completions.create(
                model="any-name", messages=history, tools=[THEIRS], stream=True
            )
            pieces = [
                chunk.choices[0].delta.content or "" async for chunk in second if chunk.choices
            ]
            assert "".join(pieces) == "done"
        (record,) = await trajectories(at, session)
        assert len(record["turns"]) == 2
        assert at.router.asked[1].ids == record["ids"][: -len(record["turns"][1]["output_ids"])]


async def test_clients_of_three_protocols_share_one_record() -> None:
    async with service(says("one"), says("two"), says("three")) as at, open_session(at) as session:
        chat = {"messages": [{"role": "user", "content": "a"}]}
        async with at.http.post(f"{session['base_url']}/chat/completions", json=chat) as answer:
            assert (await answer.json())["choices"][0]["message"]["content"] == "one"
        history = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "one"}]
        body: Any = {"max_tokens": 9, "messages": [*history, {"role": "user", "content": "b"}]}
        url = f"{session['anthropic_base_url']}/v1/messages"
        async with at.http.post(url, json={"model": "m", **body}) as answer:
            assert (await answer.json())["content"] == [{"type": "text", "text": "two"}]
        items = [*body["messages"], {"role": "assistant", "content": "two"}]
        items.append({"role": "user", "content": "c"})
        async with at.http.post(
            f"{session['base_url']}/responses", json={"input": items}
        ) as answer:
            (item,) = (await answer.json())["output"]
            assert item["content"][0]["text"] == "three"
        (record,) = await trajectories(at, session)
        assert [turn["text"] for turn in record["turns"]] == [
            f"{x}{END}" for x in ("one", "two", "three")
        ]


async def test_response_is_continued_by_id_within_its_session_only() -> None:
    async with (
        service(says("one"), says("two")) as at,
        open_session(at) as mine,
        open_session(at) as second,
    ):
        async with at.http.post(f"{mine['base_url']}/responses", json={"input": "a"}) as answer:
            first = await answer.json()
        more = {"input": "b", "previous_response_id": first["id"]}
        async with at.http.post(f"{second['base_url']}/responses", json=more) as answer:
            assert answer.status == 400
            assert "previous_response_id" in (await answer.json())["error"]["message"]
        async with at.http.post(f"{mine['base_url']}/responses", json=more) as answer:
            assert answer.status == 200
        (record,) = await trajectories(at, mine)
        assert len(record["turns"]) == 2


async def test_plain_requests_name_the_agent_or_the_bare_model() -> None:
    call = call_text("anything", {"n": 1})
    async with service(says("agent"), says(call), says("Hm")) as at, client(at) as asks:
        agent = await asks.chat.completions.create(model="fake-agent", messages=HELLO)
        assert agent.choices[0].message.content == "agent"
        bare = await asks.chat.completions.create(model="fake", messages=HELLO)
        (choice,) = bare.choices
        # The bare model has no tools of its own: any call is the caller's.
        assert choice.finish_reason == "tool_calls"
        assert bare.model == "fake"
        biased = await asks.chat.completions.create(
            model="fake", messages=HELLO, frequency_penalty=1.0
        )
        assert biased.choices[0].message.content == "Hm"
        with pytest.raises(openai.BadRequestError, match="min_tokens"):
            await asks.chat.completions.create(
                model="fake-agent", messages=HELLO, extra_body={"min_tokens": 3}
            )


async def test_malformed_call_of_the_bare_model_is_text() -> None:
    broken = "<tool_call>\n{oops\n</tool_call>"
    async with (
        service(says(f"I try. {broken}"), says(f"I try. {broken}")) as at,
        client(at) as asks,
    ):
        completion = await asks.chat.completions.create(model="fake", messages=HELLO)
        assert completion.choices[0].message.content == "I try.\n{oops\n"
        assert completion.choices[0].finish_reason == "stop"
        stream = await asks.chat.completions.create(model="fake", messages=HELLO, stream=True)
        text = "".join(
            [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        )
        assert text == completion.choices[0].message.content


async def test_anthropics_protocol_gets_its_errors_and_its_key() -> None:
    hello = {"model": "fake", "max_tokens": 9, "messages": HELLO}
    async with service(says("hi"), **SECRET) as at:
        async with at.post("/v1/messages", hello) as answer:
            assert answer.status == 401
            assert (await answer.json())["error"]["type"] == "authentication_error"
        headers = {"X-Api-Key": "secret"}
        async with at.http.post(f"{at.url}/v1/messages", json=hello, headers=headers) as answer:
            assert answer.status == 200
        unknown = {**hello, "model": "another"}
        async with at.http.post(f"{at.url}/v1/messages", json=unknown, headers=headers) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["type"] == "not_found_error"


async def test_sessions_key_replaces_the_token_and_nothing_else_does() -> None:
    async with service(says("hi"), **SECRET) as at:
        async with at.post("/v1/sessions", {}) as answer:
            assert answer.status == 401
        headers = {"Authorization": "Bearer secret"}
        async with at.http.post(f"{at.url}/v1/sessions", json={}, headers=headers) as answer:
            session = await answer.json()
        url = f"{session['base_url']}/chat/completions"
        async with at.http.post(url, json={"messages": HELLO}) as answer:
            assert answer.status == 200
        async with at.http.get(f"{at.url}/v1/sessions/guessed") as answer:
            assert answer.status == 404
        assert session["name"] not in session["url"]  # the public name is no key


async def test_closed_session_is_gone() -> None:
    async with service(says("hi")) as at:
        async with open_session(at) as session:
            pass
        async with at.http.post(
            f"{session['base_url']}/chat/completions", json={"messages": HELLO}
        ) as answer:
            assert answer.status == 404
            assert (await answer.json())["error"]["code"] == "session_not_found"


async def test_open_sessions_are_bounded() -> None:
    async with service(sessions={"max_open": 1}) as at, open_session(at):
        async with at.post("/v1/sessions", {}) as answer:
            assert answer.status == 503
            assert "sessions.max_open" in (await answer.json())["error"]["message"]


async def test_tokens_are_counted_without_a_server() -> None:
    body = {"model": "fake", "messages": HELLO}
    async with service() as at, at.post("/v1/messages/count_tokens", body) as answer:
        assert answer.status == 200
        assert (await answer.json())["input_tokens"] > 3


async def test_session_that_a_page_ends_has_a_stop_reason() -> None:
    async with service(says("hi")) as at:
        async with open_session(at) as session:
            url = f"{session['base_url']}/chat/completions"
            async with at.http.post(url, json={"messages": HELLO}) as answer:
                assert answer.status == 200
            (record,) = await trajectories(at, session)
        assert record["stop_reason"] == StopReason.ANSWERED
        assert at.router.forgotten == [session["name"]]
