"""What clients of others send and expect: bodies, streams, references, errors, browsers."""

from __future__ import annotations

import base64
import gzip
import io
import json
import zlib
from typing import Any

import anyio
import pytest

from agentloop.errors import ServerUnavailable
from agentloop.serving import http
from tests.agentloop.serving.test_app import CHAT, HELLO, THEIRS, Service, says, service
from tests.patience import patient
from tests.support import call_text, chunks, written

PROTOCOLS: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "responses": {"input": "hello"},
    "messages": {"messages": HELLO, "max_tokens": 9},
}


async def post_encoded(at: Service, body: bytes, encoding: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    path = f"{at.url}/v1/chat/completions"
    async with at.http.post(path, data=io.BytesIO(body), headers=headers) as response:
        return response.status, await response.json()


def plain_deflate(body: bytes) -> bytes:
    made = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return made.compress(body) + made.flush()


async def test_body_may_be_compressed() -> None:
    body = json.dumps({"messages": HELLO}).encode()
    encoded = {"gzip": gzip.compress(body), "x-gzip": gzip.compress(body)}
    async with service(*([says("hi")] * 5)) as at:
        for encoding, data in {**encoded, "deflate": zlib.compress(body), "identity": body}.items():
            assert (await post_encoded(at, data, encoding))[0] == 200, encoding
        assert (await post_encoded(at, plain_deflate(body), "deflate"))[0] == 200


async def test_what_cannot_be_decoded_is_refused_in_the_documented_form() -> None:
    body = json.dumps({"messages": HELLO}).encode()
    bomb = gzip.compress(bytes(2 * 2**20))
    zstd = base64.b64decode("KLUv/SAAAQAA")
    async with service(serve={"port": 0, "max_body_mib": 1}) as at:
        for data, encoding, expected in [
            (zstd, "zstd", 415),
            (body, "br", 415),
            (gzip.compress(body)[:-9], "gzip", 400),
            (body, "gzip", 400),
            (bomb, "gzip", 413),
        ]:
            status, answer = await post_encoded(at, data, encoding)
            assert (status, answer["error"]["type"]) == (expected, "invalid_request_error")


@pytest.mark.parametrize(
    ("path", "ping"),
    [
        ("chat/completions", b": nothing new\n"),
        ("responses", b": nothing new\n"),
        ("messages", b"event: ping\n"),
    ],
)
async def test_stream_says_that_it_lives_while_nothing_is_sampled(
    path: str, ping: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "_PING_S", 0.01)
    waiting = anyio.Event()
    hi = chunks(written(CHAT, "hi"), [])
    async with service([waiting.wait, *hi]) as at:
        async with at.post(f"/v1/{path}", {**PROTOCOLS[path], "stream": True}) as response:
            assert response.status == 200
            with anyio.fail_after(patient(15)):
                while await response.content.readline() != ping:
                    pass
                waiting.set()
                assert b"hi" in await response.read()


async def test_error_after_pings_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_PING_S", 0.01)
    waiting = anyio.Event()
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    async with service([waiting.wait, ServerUnavailable("down")]) as at:
        body = {"messages": HELLO, "stream": True, "response_format": schema}
        async with at.post("/v1/chat/completions", body) as response:
            await response.content.readline()
            waiting.set()
            assert b'"server_error"' in await response.read()


async def test_items_of_a_response_are_named_by_their_ids() -> None:
    asks = f"<think>Hm</think>I call.\n{call_text('theirs', {})}"
    tool = {"type": "function", **THEIRS["function"]}
    async with service(says(asks), says("done")) as at:
        question = {"role": "user", "content": "hello"}
        body: dict[str, Any] = {"model": "fake", "input": [question], "tools": [tool]}
        async with at.post("/v1/responses", body) as response:
            output = (await response.json())["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        references = [{"type": "item_reference", "id": item["id"]} for item in output[:2]]
        references.append({"id": output[2]["id"]})
        result = {"type": "function_call_output", "call_id": output[2]["call_id"], "output": "4"}
        again = {**body, "input": [question, *references, result]}
        async with at.post("/v1/responses", again) as response:
            assert response.status == 200
        complete = {**body, "input": [question, *output, result]}
        prompts = [CHAT.decode(generation.ids) for generation in at.router.asked]
        at.router.play(says("done"))
        async with at.post("/v1/responses", complete) as response:
            assert response.status == 200
        assert CHAT.decode(at.router.asked[-1].ids) == prompts[1]
        unknown = {**body, "input": [question, {"type": "item_reference", "id": "rs_x"}]}
        async with at.post("/v1/responses", unknown) as response:
            assert response.status == 400
            message = (await response.json())["error"]["message"]
            assert message.startswith("input[1].id: 'rs_x' is not known here")


async def test_error_for_anthropics_clients_has_the_requests_id() -> None:
    async with service([ServerUnavailable("down")]) as at:
        async with at.post("/v1/messages", {"model": "fake"}) as response:
            assert (await response.json())["request_id"] == response.headers["Request-Id"]
        body = {**PROTOCOLS["messages"], "stream": True}
        async with at.post("/v1/messages", body) as response:
            *_, last = (await response.text()).strip().split("data: ")
            assert json.loads(last)["request_id"] == response.headers["Request-Id"]


async def test_penalties_are_passed_on_for_the_agent() -> None:
    penalties = {"frequency_penalty": 0.5, "presence_penalty": 0.25}
    async with service(*([says("hi")] * 3)) as at:
        for path, body in PROTOCOLS.items():
            async with at.post(f"/v1/{path}", {**body, **penalties}) as response:
                assert response.status == 200, path
            assert at.router.asked[-1].parameters == penalties


async def test_image_in_a_tools_result_does_not_end_a_conversation() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    use = {"type": "tool_use", "id": "c1", "name": "theirs", "input": {}}
    anthropic = {
        "max_tokens": 9,
        "messages": [
            *HELLO,
            {"role": "assistant", "content": [use]},
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [image]}],
            },
        ],
    }
    called = {"type": "function_call", "call_id": "c1", "name": "theirs", "arguments": "{}"}
    shown = [{"type": "input_image", "image_url": "data:,x"}]
    output = {"type": "function_call_output", "call_id": "c1", "output": shown}
    openai = {"input": [*HELLO, called, output]}
    parts = [{"type": "image_url", "image_url": {"url": "data:,x"}}]
    call = {"id": "c1", "type": "function", "function": {"name": "theirs", "arguments": "{}"}}
    chat = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": parts},
    ]
    bodies = {"messages": anthropic, "responses": openai, "chat/completions": {"messages": chat}}
    async with service(*([says("hi")] * 3)) as at:
        for path, body in bodies.items():
            async with at.post(f"/v1/{path}", body) as response:
                assert response.status == 200, await response.text()
            assert "omitted: the model reads text only]" in CHAT.decode(at.router.asked[-1].ids)


async def test_image_of_a_user_is_refused_by_name() -> None:
    parts: dict[str, tuple[str, dict[str, Any]]] = {
        "chat/completions": ("messages", {"type": "image_url", "image_url": {"url": "data:,x"}}),
        "responses": ("input", {"type": "input_image", "image_url": "data:,x"}),
        "messages": ("messages", {"type": "image", "source": {"type": "url", "url": "x"}}),
    }
    async with service() as at:
        for path, (field, part) in parts.items():
            body: dict[str, Any] = {"max_tokens": 9} if path == "messages" else {}
            body |= {field: [{"role": "user", "content": [part]}]}
            async with at.post(f"/v1/{path}", body) as response:
                message = (await response.json())["error"]["message"]
                assert response.status == 400
                assert message.startswith(f'{field}[0].content[0].type: "{part["type"]}" is not')


async def test_page_of_a_listed_site_may_call_the_service() -> None:
    site = "https://app.example"
    serve = {"port": 0, "token": "s3cret", "allowed_hosts": ["app.example"]}
    requests = {
        "Origin": site,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type",
    }
    async with service(says("hi"), serve=serve) as at:
        path = f"{at.url}/v1/chat/completions"
        async with at.http.options(path, headers=requests) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (204, site)
            assert response.headers["Access-Control-Allow-Methods"] == "POST"
            assert response.headers["Access-Control-Allow-Headers"] == "authorization, content-type"
        async with at.http.post(path, json={}, headers={"Origin": site}) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (401, site)
        sent = {"Origin": site, "Authorization": "Bearer s3cret"}
        body = {"messages": HELLO, "stream": True}
        async with at.http.post(path, json=body, headers=sent) as response:
            assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, site)
        second = {**requests, "Origin": "https://other.example"}
        async with at.http.options(path, headers=second) as response:
            assert response.status == 403
            assert "Access-Control-Allow-Origin" not in response.headers
        async with at.http.get(f"{at.url}/v1/models", headers={"Api-Key": "s3cret"}) as response:
            assert response.status == 200


async def test_call_without_arguments_is_the_same_in_every_protocol() -> None:
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1"}]}
    output = {"type": "function_call_output", "call_id": "c1", "output": None}
    bodies: list[tuple[str, dict[str, Any]]] = []
    forms: tuple[object, ...] = ({}, None, "")
    for nothing in forms:
        use = {"type": "tool_use", "id": "c1", "name": "theirs", "input": nothing}
        talk = [*HELLO, {"role": "assistant", "content": [use]}, result]
        bodies.append(("messages", {"max_tokens": 9, "messages": talk}))
        call = {"type": "function_call", "call_id": "c1", "name": "theirs", "arguments": nothing}
        bodies.append(("responses", {"input": [*HELLO, call, output]}))
        function = {"name": "theirs", "arguments": nothing}
        requests = {"role": "assistant", "tool_calls": [{"id": "c1", "function": function}]}
        answered = {"role": "tool", "tool_call_id": "c1", "content": None}
        bodies.append(("chat/completions", {"messages": [*HELLO, requests, answered]}))
    async with service(*([says("hi")] * len(bodies))) as at:
        for path, body in bodies:
            async with at.post(f"/v1/{path}", body) as response:
                assert response.status == 200, await response.text()
        prompts = {tuple(generation.ids) for generation in at.router.asked}
        assert len(prompts) == 1
