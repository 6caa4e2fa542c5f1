"""The service over a fake engine: OpenAI's client, bad input, and clients that disconnect."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import aiohttp
import anyio
import openai
import pytest

import agentloop
from agentloop.agent.chat_format import ChatFormat
from agentloop.environments.tasks.task import Task
from agentloop.errors import RequestError, ServerUnavailable, SettingsError
from agentloop.inference.replicas import ServerView
from agentloop.inference.router import Router
from agentloop.inference.scheduling.health import ServerState
from agentloop.inference.sglang.control import http_session
from agentloop.observe.exporters.otel import CallerSpan, caller_span
from agentloop.observe.recorder import GroupFolder
from agentloop.runtime import Runtime, Settings, _Model, _Parts
from agentloop.sandbox import Pool
from agentloop.serving.access import ServeSettings
from agentloop.serving.app import AgentService, listening
from agentloop.serving.environments import ServedAgent
from agentloop.serving.listen import bind
from tests.patience import patient
from tests.support import (
    END,
    ScriptedEngine,
    Step,
    call_text,
    chat_format,
    chunks,
    eventually,
    template,
    tokenizer,
)
from tests.support import written as ids_of

CHAT = chat_format()
HELLO: Any = [{"role": "user", "content": "hello"}]
PAGE = ("/page/", "/api/")  # for a browser: no part of what is promised
THEIRS: Any = {
    "type": "function",
    "function": {"name": "theirs", "parameters": {"type": "object", "properties": {}}},
}


class PlayedRouter(ScriptedEngine):
    num_waiting = 0

    def __init__(self, *turns: Sequence[Step]) -> None:
        super().__init__(*turns)
        self.forgotten_groups: list[str] = []

    def forget_group(self, name: str) -> None:
        self.forgotten_groups.append(name)

    def play(self, *turns: Sequence[Step]) -> None:
        self._turns.extend(turns)

    def waits(self) -> list[tuple[str, float, str]]:
        return [("r", 1.5, "no server has free KV capacity for it")]

    def view(self) -> list[ServerView]:
        return [ServerView("http://fake", ServerState.HEALTHY, self.num_open, 0, 0, 0, 100)]


class NoCalls:
    """A pool that must not be asked to run anything."""

    def stats(self) -> dict[str, Any]:
        return {}


class PlayedRuntime(Runtime):
    """A runtime whose parts exist without having been started."""

    def __init__(self, settings: Settings, router: PlayedRouter, chat: ChatFormat = CHAT) -> None:
        super().__init__(settings)
        session = cast(aiohttp.ClientSession, None)
        model = _Model("fake", chat, cast(Router, router), [], session)
        self._parts_or_none = _Parts(model, cast(Pool, NoCalls()))


@dataclass
class Service:
    url: str
    router: PlayedRouter
    http: aiohttp.ClientSession

    @asynccontextmanager
    async def post(self, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.http.post(self.url + path, data=io.BytesIO(data)) as response:
            yield response

    async def metric(self, name: str) -> float:
        async with self.http.get(f"{self.url}/metrics") as response:
            text = await response.text()
        return next(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


@asynccontextmanager
async def service(
    *turns: Sequence[Step],
    chat: ChatFormat = CHAT,
    record: GroupFolder | None = None,
    env: agentloop.Environment | None = None,
    **settings: Any,
) -> AsyncIterator[Service]:
    inputs = Settings.model_validate({"tools": [], "serve": {"port": 0}, **settings})
    router = PlayedRouter(*turns)
    runtime = PlayedRuntime(inputs, router, chat)
    agent: ServedAgent | None = None
    if env is not None:
        task = Task("t", "Play.", "42", extra={"top": 100})
        agent = ServedAgent(env, runtime, task, inputs.sampling, inputs.budget)
    app = AgentService(runtime, inputs, record, agent)
    with bind(inputs.serve) as bound:
        async with listening(app, bound) as url, http_session() as http:
            yield Service(url, router, http)


def says(text: str) -> list[Step]:
    ids = ids_of(CHAT, text + END)
    return list(chunks(ids, range(1, len(ids))))


@asynccontextmanager
async def client(at: Service) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{at.url}/v1", api_key="x", max_retries=0) as made:
        yield made


async def test_openais_client_gets_its_answer_streamed_and_whole() -> None:
    async with service(says("It is 1776."), says("It is 1776.")) as at, client(at) as asks:
        completion = await asks.chat.completions.create(model="fake-agent", messages=HELLO)
        assert completion.choices[0].message.content == "It is 1776."
        assert completion.choices[0].finish_reason == "stop"
        stream = await asks.chat.completions.create(
            model="fake-agent", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
        text, last = "", None
        async for chunk in stream:
            last = chunk
            for choice in chunk.choices:
                text += choice.delta.content or ""
        assert text == "It is 1776."
        assert last is not None
        assert last.usage == completion.usage
        assert [model.id async for model in asks.models.list()] == ["fake-agent", "fake"]
        assert (await asks.models.retrieve("fake")).id == "fake"
    assert at.router.num_open == 0


async def test_clients_own_tools_make_the_round_trip() -> None:
    call = call_text("theirs", {"n": 2**70})
    async with service(says(call), says("done")) as at, client(at) as asks:
        first = await asks.chat.completions.create(model="fake", messages=HELLO, tools=[THEIRS])
        (choice,) = first.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        (tool_call,) = choice.message.tool_calls
        assert tool_call.type == "function"
        assert json.loads(tool_call.function.arguments) == {"n": 2**70}
        answer = {"role": "tool", "tool_call_id": tool_call.id, "content": "42"}
        again = [*HELLO, choice.message.model_dump(exclude_none=True), answer]
        second = await asks.chat.completions.create(model="fake", messages=again, tools=[THEIRS])
        assert second.choices[0].message.content == "done"
    prompt = CHAT.decode(at.router.asked[1].ids)
    assert '{"n": 1180591620717411303424}' in prompt
    assert "<tool_response>\n42\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("body", "status", "error"),
    [
        (b"{nope", 400, "not valid JSON"),
        (b"[]", 400, "must be a JSON object"),
        (b"{}", 400, "messages: Field required"),
        ({"messages": HELLO, "temperature": -1}, 400, "temperature"),
        ({"messages": []}, 400, "messages: "),
        ({"messages": HELLO, "regex": "x"}, 400, 'regex: "x" is not supported'),
        ({"messages": HELLO, "model": "other"}, 404, "'other' is not served here"),
        ({"messages": [{"role": "wizard", "content": ""}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "wizard"}], "stream": True}, 400, "messages[0].role"),
        ({"messages": HELLO, "tools": [{}]}, 400, "tools[0].type: "),
        ({"messages": HELLO, "tools": [THEIRS, THEIRS]}, 400, "two are named 'theirs'"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, 400,
         "maximum context length is"),
        (b" " * (10 << 20), 413, "Maximum request body size"),
        ({"messages": HELLO, "top_k": 1 << 31}, 400, "top_k"),
        ({"messages": HELLO, "seed": 1 << 63}, 400, "seed"),
        ({"messages": HELLO, "ignore_eos": 1}, 400, "ignore_eos"),
    ],
)  # fmt: skip
async def test_bad_input_has_a_clear_answer(body: Any, status: int, error: str) -> None:
    async with service() as at:
        async with at.post("/v1/chat/completions", body) as response:
            answer = await response.json()
        assert response.status == status
        assert error in answer["error"]["message"]
        async with at.http.get(f"{at.url}/healthz") as response:  # and nothing broke
            assert response.status == 200
        assert await at.metric("agentloop_rollouts_in_flight") == 0
    assert at.router.asked == []


async def test_unknown_path_gets_a_json_error_that_lists_the_routes() -> None:
    async with service() as at:
        async with at.post("/v1/embeddings", {"input": "hello"}) as response:
            assert (response.status, response.content_type) == (404, "application/json")
            error = (await response.json())["error"]
        assert error["message"].startswith("POST /v1/embeddings does not exist; available: POST")
        assert (error["type"], error["code"]) == ("invalid_request_error", "unknown_url")
        async with at.http.get(f"{at.url}/v1/chat/completions") as response:
            assert (response.status, response.content_type) == (405, "application/json")
            assert response.headers["Allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"model": "other"}, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "x" * 200_000}]}, "context_length_exceeded",
         "messages"),
        ({"min_tokens": 5}, "unsupported_parameter", "min_tokens"),
        ({"n": 0}, None, "n"),
    ],
)  # fmt: skip
async def test_errors_have_the_codes_that_clients_look_for(
    body: Any, code: str | None, param: str, stream: bool
) -> None:
    async with service() as at:
        body = {"messages": HELLO, "stream": stream, "n": 2, **body}
        async with at.post("/v1/chat/completions", body) as response:
            error = (await response.json())["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)


async def test_every_answer_has_a_request_id() -> None:
    async with service(says("It"), says("It"), serve={"port": 0, "token": "t"}) as at:
        inputs = {"Authorization": "Bearer t", "X-Request-Id": "my-request.1"}
        requests = [("/v1/chat/completions", stream) for stream in (True, False)]
        for path, stream in [*requests, ("/nowhere", False)]:
            body = json.dumps({"messages": HELLO, "stream": stream})
            async with at.http.post(at.url + path, data=body, headers=inputs) as response:
                assert response.headers["x-request-id"] == "my-request.1"
        inputs = {"X-Request-Id": "no id \u00e9"}
        request_ids = set()
        for path in ("/health", "/healthz", "/v1/models"):  # the last is refused
            async with at.http.get(at.url + path, headers=inputs) as response:
                assert response.status == (401 if path == "/v1/models" else 200)
                request_ids.add(response.headers["x-request-id"])
        assert len(request_ids) == 3


@pytest.mark.parametrize("path", ["/", "/health", "/healthz", "/v1/models", "/openapi.json"])
async def test_get_routes_accept_head(path: str) -> None:
    async with service() as at, at.http.head(at.url + path) as response:
        assert response.status == 200


async def test_stream_has_as_many_choices_as_were_asked_for() -> None:
    async with service(*[says("It is 1776.")] * 3) as at, client(at) as asks:
        stream = await asks.chat.completions.create(
            model="fake",
            messages=HELLO,
            n=3,
            seed=-1,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
        )
        texts, ends, ids, usage = ["", "", ""], {}, set(), None
        num_logprobs = 0
        async for chunk in stream:
            ids.add(chunk.id)
            usage = chunk.usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
                num_logprobs += len((choice.logprobs and choice.logprobs.content) or [])
                if choice.finish_reason:
                    ends[choice.index] = choice.finish_reason
    assert texts == ["It is 1776."] * 3
    assert ends == dict.fromkeys(range(3), "stop")
    assert len(ids) == 1
    assert usage is not None
    assert usage.completion_tokens == num_logprobs == 3 * len(ids_of(CHAT, "It is 1776." + END))
    seeds = sorted(generation.sampling.seed or 0 for generation in at.router.asked)
    assert seeds == [0, 1, (1 << 63) - 1]


REFUSED: Any = {
    "type": "json_schema",
    "json_schema": {"name": "n", "schema": {"type": "no such type"}},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"response_format": REFUSED}, "response_format: its schema"),
        ({"tools": [THEIRS], "tool_choice": "required"}, "tool_choice: a tool's parameters"),
        (
            {"tools": [THEIRS], "tool_choice": {"type": "function", "function": {"name": "ours"}}},
            "tool_choice: there is no tool 'ours'; the tools are theirs",
        ),
        ({"tool_choice": "required"}, "tool_choice: there are no tools to call"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs: messages: reserved"),
    ],
)
async def test_constraint_that_cannot_be_kept_is_a_bad_request(
    options: Any, reason: str, stream: bool
) -> None:
    refusal = RequestError("http://fake: Failed to compile structural_tag grammar: nope")
    async with service([refusal], [refusal]) as at:
        body = {"messages": HELLO, "stream": stream, "n": 2, **options}
        async with at.post("/v1/chat/completions", body) as response:
            error = (await response.json())["error"]
        assert response.status == 400
        assert error["type"] == "invalid_request_error"
        assert reason in error["message"]


def _thinks_if_told(
    messages: Any, tools: Any = None, add_generation_prompt: bool = False, **arguments: Any
) -> str:
    text = template()(messages, tools, add_generation_prompt)
    opens = add_generation_prompt and arguments.get("reasoning_effort") != "none"
    return f"{text}<think>\n" if opens and arguments.get("enable_thinking", True) else text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "thinks"),
    [
        ({}, True),
        ({"reasoning_effort": "none"}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"chat_template_kwargs": {"enable_thinking": True}}, True),
        ({"reasoning_effort": "none", "chat_template_kwargs": {"reasoning_effort": "low"}}, True),
    ],
)
async def test_template_variables_decide_whether_turns_begin_in_a_thought(
    options: Any, thinks: bool, stream: bool
) -> None:
    chat = ChatFormat(tokenizer(), _thinks_if_told, end_token=END)
    body = {"messages": HELLO, "tools": [THEIRS], "tool_choice": "required", **options}
    call = call_text("theirs", {})
    async with service(says("Well.</think>\n" + call), chat=chat) as at:
        async with at.post("/v1/chat/completions", {**body, "stream": stream}) as response:
            text = await response.text()
        (generation,) = at.router.asked
    assert chat.decode(generation.ids).endswith("<think>\n") == thinks
    assert ("reasoning_content" in text) == thinks
    tag = generation.parameters["structural_tag"]
    assert isinstance(tag, str)
    (thought, *_) = json.loads(tag)["format"]["elements"]
    assert (thought["type"] == "tag") == thinks  # an opened thought must be closed


@pytest.mark.parametrize("n", [1, 2])
async def test_constrained_stream_equals_a_free_one(n: int) -> None:
    async with service(*[says('{"n": 3}')] * (2 * n)) as at:
        streams = []
        for options in ({}, {"response_format": {"type": "json_object"}}):
            body = {"messages": HELLO, "stream": True, "n": n, **options}
            async with at.post("/v1/chat/completions", body) as response:
                lines = (await response.text()).split("\n\n")
            assert lines[-2:] == ["data: [DONE]", ""]
            events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
            choices = [event["choices"][0] for event in events]
            texts, ends = ["" for _ in range(n)], {}
            for choice in choices:  # how it is cut into events depends on when it is read
                texts[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"] is not None:
                    ends[choice["index"]] = (choice["finish_reason"], choice["stop_reason"])
            streams.append((texts, ends))
        assert streams[0] == streams[1]
        assert streams[0][0] == ['{"n": 3}'] * n
    assert [bool(generation.parameters) for generation in at.router.asked] == [False] * n + [
        True
    ] * n


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_infrastructure_failure_is_no_answer(n: int, stream: bool) -> None:
    lost: list[Step] = [*says("It")[:1], ServerUnavailable("gone")]
    async with service(*([says("It")] * (n - 1)), lost) as at:
        body = {"messages": HELLO, "stream": stream, "n": n}
        async with at.post("/v1/chat/completions", body) as response:
            text = await response.text()
        assert response.status == (200 if stream else 503)
        assert "the rollout failed: gone" in text
        assert text.count('"finish_reason":"stop"') < n
        assert "[DONE]" not in text
    assert at.router.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_sequence_ends_the_answer_and_the_generation(stream: bool) -> None:
    script = says("hello world, what STOP is 37")
    async with service([*script[:-1], anyio.sleep_forever]) as at:
        body = {"messages": HELLO, "stream": stream, "stop": ["nope", " STOP is"]}
        async with at.post("/v1/chat/completions", body) as response:
            text = await response.text()
        if stream:
            lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            choices = [json.loads(line)["choices"][0] for line in lines]
            content = "".join(choice["delta"].get("content", "") for choice in choices)
        else:
            choices = json.loads(text)["choices"]
            content = choices[0]["message"]["content"]
        assert content == "hello world, what"
        assert choices[-1]["finish_reason"] == "stop"
        assert choices[-1]["stop_reason"] == "stop_sequence"
        assert at.router.num_open == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_rollouts_know_the_span_of_their_caller(stream: bool) -> None:
    spans: list[CallerSpan | None] = []

    async def look() -> None:
        spans.append(caller_span.get())

    async with service(*[[look, *says("It")]] * 3) as at:
        for traceparent in [f"00-{'1' * 32}-{'2' * 16}-01", "no traceparent"]:
            body = json.dumps({"messages": HELLO, "stream": stream, "n": 1 + (not spans)})
            headers = {"traceparent": traceparent}
            url = f"{at.url}/v1/chat/completions"  # in the same connection
            async with at.http.post(url, data=body, headers=headers) as response:
                await response.read()
    caller = CallerSpan(int("1" * 32, 16), int("2" * 16, 16), True)
    assert spans == [caller, caller, None]


async def test_no_more_tokens_are_sampled_than_were_asked_for() -> None:
    """Tokens of tool responses do not count."""
    call = says(call_text("nope", {}))
    num = len(ids_of(CHAT, call_text("nope", {}) + END))
    async with service(call, says("done"), budget={"max_sampled_tokens": num + 9}) as at:
        for max_tokens, num_sampled in [(num + 2, 2), (num + 20, 9)]:
            body = {"messages": HELLO, "max_tokens": max_tokens}
            async with at.post("/v1/chat/completions", body) as response:
                assert response.status == 200
            assert at.router.asked[-1].max_new_tokens == num_sampled
            at.router.play(call, says("done"))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/rollouts", "stream"])
async def test_client_that_leaves_cancels_what_it_asked_for(path: str) -> None:
    is_running = anyio.Event()

    async def hang() -> None:
        is_running.set()
        await anyio.sleep_forever()

    body: dict[str, Any] = {"messages": HELLO, "stream": path == "stream"}
    if path == "/v1/rollouts":
        body = {"prompts": ["hello"]}
    async with service([*says("It")[:1], hang]) as at:

        async def ask() -> None:
            where = path if path.startswith("/") else "/v1/chat/completions"
            async with at.post(where, body) as response:
                await response.read()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            with anyio.fail_after(patient(15)):
                await is_running.wait()
            tasks.cancel_scope.cancel()
        await eventually(lambda: at.router.num_open == 0)
        await eventually(lambda: len(at.router.forgotten) == 1)
        assert await at.metric("agentloop_rollouts_in_flight") == 0


async def test_rollouts_come_as_lines_each_as_it_ends() -> None:
    call = call_text("nope", {"n": 2**70})
    async with service(says(call), says(call), says("done"), says("done")) as at:
        body = {"prompts": ["one", [{"role": "wizard"}], HELLO], "budget": {"max_turns": 2}}
        async with at.post("/v1/rollouts", body) as response:
            assert response.status == 200
            lines = [json.loads(line) async for line in response.content]
    assert sorted(line["index"] for line in lines) == [0, 1, 2]
    by_index = {line["index"]: line for line in lines}
    assert "messages[0].role" in by_index[1]["error"]
    for index in (0, 2):
        trajectory = by_index[index]["trajectory"]
        assert len(trajectory["ids"]) == len(trajectory["mask"]) == len(trajectory["logprobs"])
        (call,) = trajectory["turns"][0]["calls"]
        assert call["arguments"] == {"n": 2**70}


async def test_samples_of_a_prompt_are_siblings_with_distinct_seeds() -> None:
    async with service(*[says("done")] * 4) as at:
        body = {"prompts": ["one", "two"], "n": 2, "sampling": {"seed": 5}}
        async with at.post("/v1/rollouts", body) as response:
            lines = [json.loads(line) async for line in response.content]
        assert sorted((line["index"], line["sample"]) for line in lines) == [
            *((0, 0), (0, 1)),
            *((1, 0), (1, 1)),
        ]
        groups = {generation.group: generation.num_shared for generation in at.router.asked}
        assert len(groups) == 2
        assert all(num_shared == len(at.router.asked[0].ids) for num_shared in groups.values())
        assert sorted(str(generation.sampling.seed) for generation in at.router.asked) == list(
            "5566"
        )
        assert sorted(at.router.forgotten_groups) == sorted(groups)


async def test_token_is_asked_for_where_one_is_set() -> None:
    async with service(serve={"port": 0, "token": "s3cret"}) as at:
        async with at.post("/v1/chat/completions", {"messages": HELLO}) as response:
            assert response.status == 401
            assert (await response.json())["error"]["code"] == "invalid_api_key"
        async with at.http.get(f"{at.url}/healthz") as response:
            assert response.status == 200


async def test_our_own_mistake_has_openais_form_too(caplog: pytest.LogCaptureFixture) -> None:
    def mistake() -> None:
        raise ZeroDivisionError

    async with service([lambda: anyio.to_thread.run_sync(mistake)]) as at:
        async with at.post("/v1/chat/completions", {"messages": HELLO}) as response:
            assert response.status == 500
            assert (await response.json())["error"]["type"] == "server_error"
    assert "ZeroDivisionError" in caplog.text


def test_port_in_use_is_told_before_anything_starts() -> None:
    with bind(ServeSettings(port=0)) as bound:
        with pytest.raises(SettingsError, match=r"serve\.port: cannot listen"):
            bind(ServeSettings(port=bound.getsockname()[1]))


async def test_whoever_reads_on_after_leaving_finds_the_end() -> None:
    played = PlayedRuntime(Settings(tools=[]), PlayedRouter([anyio.sleep_forever]))
    async with played.stream("hello") as stream:
        await anext(stream)
    with anyio.fail_after(patient(15)):
        assert len([event async for event in stream]) < 5


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ({"servers": ["foo"]}, "servers: .*http://HOST:PORT"),
        ({"servers": ["http://x:1/v1"]}, "servers"),
        ({"tools": ["nope"]}, "tools: .*nope"),
        ({"sever": {}}, "did you mean 'server'"),
    ],
)
def test_settings_given_in_python_are_named_where_they_are_wrong(
    values: dict[str, Any], error: str
) -> None:
    with pytest.raises(SettingsError, match=error):
        Runtime(**values)


async def test_body_that_does_not_come_is_not_waited_for() -> None:
    async with service(serve={"port": 0, "io_timeout_s": 0.1}) as at:
        host, port = at.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            head = f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 9"
            await stream.send(f"{head}\r\n\r\n{{".encode())
            assert b" 408 " in await stream.receive()


NO_GZIP = "Host: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"


@pytest.mark.parametrize(
    "sent",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\r\n",  # how TLS begins
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nno header\r\n\r\n",
        f"POST /v1/rollouts HTTP/1.1\r\n{NO_GZIP}".encode(),
        f"POST /api/ask HTTP/1.1\r\n{NO_GZIP}".encode(),
    ],
)
async def test_malformed_http_request_gets_status_400_and_is_not_logged(
    sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with service() as at:
        host, port = at.url.removeprefix("http://").split(":")
        async with await anyio.connect_tcp(host, int(port)) as stream:
            await stream.send(sent)
            with anyio.fail_after(patient(15)):
                assert b" 400 " in await stream.receive()
    assert not caplog.records


async def test_client_that_reads_nothing_is_not_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ids = ids_of(CHAT, "hello world, " * 4000 + END)
    num = 40  # in all, more than the sockets' buffers take
    body = json.dumps({"prompts": ["hello"] * num}).encode()
    serve = {"port": 0, "io_timeout_s": 0.3, "max_rollouts": 1}
    async with service(*([list(chunks(ids, []))] * num), serve=serve) as at:
        host, port = at.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.connect((host, int(port)))
            head = f"POST /v1/rollouts HTTP/1.1\r\nHost: {host}:{port}\r\n"
            deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            await eventually(lambda: len(at.router.forgotten_groups) == num)
            assert 0 < len(at.router.asked) < num
    assert not caplog.records


async def test_waits_are_listed() -> None:
    async with service(says("It is 1776.")) as at:
        async with at.http.get(f"{at.url}/v1/waits") as response:
            answer = await response.json()
    assert answer["waits"] == []
    assert answer["no_progress_s"] == 0
    reason = "no server has free KV capacity for it"
    assert answer["waiting_for_capacity"] == [{"id": "r", "reason": reason, "waited_s": 1.5}]
    assert answer["servers"][0]["state"] == "healthy"


async def test_document_has_the_routes_that_there_are() -> None:
    inputs = Settings.model_validate({"tools": []})
    app = AgentService(PlayedRuntime(inputs, PlayedRouter()), inputs).build()
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource is not None and route.method != "HEAD"  # which GET has with it
    }
    page = {route for route in routes if route[1].startswith(PAGE) or route[1] == "/"}
    async with service() as at, at.http.get(f"{at.url}/openapi.json") as response:
        document = await response.json()
    documented = {
        (method, path) for path, methods in document["paths"].items() for method in methods
    }
    assert documented == routes - page - {("post", "/mcp")}  # which has a protocol of its own


async def test_rollouts_have_the_services_settings_but_for_what_is_asked() -> None:
    settings: Any = {"sampling": {"temperature": 0.5, "top_p": 0.9}, "budget": {"max_turns": 1}}
    async with service(says(call_text("nope", {})), **settings) as at:
        body = {"prompts": ["one"], "sampling": {"top_p": 0.8}, "budget": {"timeout_s": 9}}
        async with at.post("/v1/rollouts", body) as response:
            (line,) = [json.loads(line) async for line in response.content]
    assert line["trajectory"]["stop_reason"] == "turn_budget"
    (generation,) = at.router.asked
    assert (generation.sampling.temperature, generation.sampling.top_p) == (0.5, 0.8)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompts": []}, "prompts: "),
        ({"prompts": [5]}, "prompts[0]: "),
        ({"prompts": ["x"], "nope": 1}, "nope: "),
        ({"prompts": ["x"], "tools": [{}]}, "tools[0].type: "),
        ({"prompts": ["x"], "sampling": {"nope": 1}}, "sampling.nope: "),
        ({"prompts": ["x"], "sampling": {"top_k": "5"}}, "sampling.top_k: "),
        ({"prompts": ["x"], "budget": {"max_turns": 0}}, "budget.max_turns: "),
        ({"prompts": ["x"], "budget": None}, "budget: "),
    ],
)
async def test_rollouts_that_cannot_be_are_refused_by_the_field(body: Any, message: str) -> None:
    async with service() as at:
        async with at.post("/v1/rollouts", body) as response:
            error = (await response.json())["error"]
    assert response.status == 400
    assert error["message"].startswith(message)
    assert error["param"] == message.partition(":")[0]


async def test_error_of_a_refusing_server_names_no_field() -> None:
    refused = RequestError("http://fake:1: it is too much")
    async with service([refused]) as at:
        async with at.post("/v1/chat/completions", {"messages": HELLO}) as response:
            assert response.status == 400
            assert (await response.json())["error"]["param"] is None
