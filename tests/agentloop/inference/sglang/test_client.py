"""The client of SGLang, with a server that fails on purpose."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pydantic
import pytest

from agentloop.errors import ServerRefused, ServerUnavailable
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.token_records import RoutedExperts
from agentloop.trajectory import TurnEnd, VersionSpan
from tests.support import FakeSGLang, Fault, eventually, logprob

PROMPT = [1, 2, 3]
ANSWER = list(range(10, 22))


@asynccontextmanager
async def client(fake: FakeSGLang, **options: Any) -> AsyncIterator[SGLangServer]:
    async with fake.serving(), http_session() as session:
        yield SGLangServer(fake.url + "/", session, **options)


async def stream(
    server: SGLangServer, received: list[int] | None = None, *, max_new_tokens: int = 100
) -> list[Chunk]:
    params = Sampling().to_sglang(max_new_tokens=max_new_tokens, stop_ids=(99,))
    inputs: list[Chunk] = []

    def take(chunk: Chunk) -> None:
        inputs.append(chunk)
        if received is not None:
            received.extend(chunk.ids)

    await server.generate(PROMPT, params, rid="r-1", on_chunk=take)
    return inputs


def join(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    ids = [token for chunk in chunks for token in chunk.ids]
    return ids, [value for chunk in chunks for value in chunk.logprobs]


@pytest.mark.parametrize("tokens_a_frame", [1, 5, 100])
@pytest.mark.parametrize("incremental", [True, False])
async def test_increments_and_cumulative_frames_give_the_same(
    incremental: bool, tokens_a_frame: int
) -> None:
    fake = FakeSGLang(ANSWER, incremental=incremental, tokens_a_frame=tokens_a_frame)
    async with client(fake) as server:
        chunks = await stream(server)
    assert join(chunks) == (ANSWER, [logprob(i) for i in range(len(ANSWER))])
    last = chunks[-1]
    assert (last.end, last.cached_tokens) == (TurnEnd.STOP, 2)
    assert last.versions == (VersionSpan("v0", 0, len(ANSWER)),)
    assert all(chunk.end is None for chunk in chunks[:-1])


@pytest.mark.parametrize("tokens_a_frame", [1, 5, 100])
@pytest.mark.parametrize("incremental", [True, False])
async def test_top_logprobs_are_reported_if_requested(
    incremental: bool, tokens_a_frame: int
) -> None:
    fake = FakeSGLang(ANSWER, incremental=incremental, tokens_a_frame=tokens_a_frame)
    inputs: list[Chunk] = []
    params = Sampling().to_sglang(max_new_tokens=100, stop_ids=(99,))
    async with client(fake) as server:
        await server.generate(PROMPT, params, rid="r", on_chunk=inputs.append, num_top_logprobs=2)
    assert [top for chunk in inputs for top in chunk.top_logprobs] == [
        [(logprob(at), token), (logprob(at) - 1, token + 1)] for at, token in enumerate(ANSWER)
    ]
    assert {chunk.cached_tokens for chunk in inputs} == {2}


@pytest.mark.parametrize("tokens_a_frame", [1, 5, 100])
@pytest.mark.parametrize("incremental", [True, False])
@pytest.mark.parametrize("num_top", [0, 2])
async def test_kept_ids_are_reported_if_requested(
    incremental: bool, tokens_a_frame: int, num_top: int
) -> None:
    fake = FakeSGLang(ANSWER, incremental=incremental, tokens_a_frame=tokens_a_frame)
    inputs: list[Chunk] = []
    params = Sampling(top_k=20).to_sglang(max_new_tokens=100, stop_ids=(99,))
    async with client(fake) as server:
        await server.generate(
            PROMPT, params, rid="r", on_chunk=inputs.append, num_top_logprobs=num_top, kept_ids=True
        )
    assert [kept for chunk in inputs for kept in chunk.kept] == [[id, id + 1] for id in ANSWER]
    assert join(inputs) == (ANSWER, [logprob(at) / 2 for at in range(len(ANSWER))])
    (request,) = fake.requests
    assert request["return_logprob"] == bool(num_top)  # else nobody reads them


async def test_experts_are_reported_from_where_they_are_wanted() -> None:
    fake = FakeSGLang(ANSWER)
    inputs: list[Chunk] = []
    params = Sampling().to_sglang(max_new_tokens=100, stop_ids=(99,))
    async with client(fake) as server:
        await server.generate(PROMPT, params, rid="r", on_chunk=inputs.append, experts_from=2)
    expected = RoutedExperts(2, 1, bytes(range(2, len(PROMPT + ANSWER) - 1)))
    assert [chunk.experts for chunk in inputs if chunk.experts] == [expected]


async def test_requests_use_sglangs_parameters() -> None:
    fake = FakeSGLang(ANSWER, end="length")
    async with client(fake) as server:
        assert (await stream(server, max_new_tokens=4))[-1].end is TurnEnd.LENGTH
    (request,) = fake.requests
    assert request["input_ids"] == PROMPT
    assert (request["stream"], request["return_logprob"], request["rid"]) == (True, True, "r-1")
    params = request["sampling_params"]
    assert (params["max_new_tokens"], params["stop_token_ids"]) == (4, [99])
    assert "sampling_seed" not in params


@pytest.mark.parametrize("after", [0, 1, 5])
@pytest.mark.parametrize("kind", ["cut", "done"])
async def test_stream_that_breaks_is_unavailable(kind: Any, after: int) -> None:
    fake = FakeSGLang(ANSWER, faults=deque([Fault(kind, after)]))
    received: list[int] = []
    async with client(fake) as server:
        with pytest.raises(ServerUnavailable):
            await stream(server, received)
    assert received == ANSWER[:after]


@pytest.mark.parametrize(
    "body",
    [
        b"{nope",
        b"[]",
        b"3",
        b"null",
        b"{}",
        b'{"meta_info": {}}',
        b'{"meta_info": {"weight_version": "v", "completion_tokens": "x", "finish_reason": null}}',
        b'{"output_ids": [1], "meta_info": {"weight_version": "v", "completion_tokens": 3,'
        b' "finish_reason": null, "output_token_logprobs": [[0.1]]}}',
        b'{"output_ids": [1], "meta_info": {"weight_version": "v", "completion_tokens": 1,'
        b' "finish_reason": "stop", "output_token_logprobs": [[0.1]]}}',
    ],
)
async def test_invalid_frame_is_unavailable(body: bytes) -> None:
    fake = FakeSGLang(ANSWER, faults=deque([Fault("frame", body=body)]))
    async with client(fake) as server:
        with pytest.raises(ServerUnavailable):
            await stream(server)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"error": {"message": "broken"}}, 500),
        ({"error": "broken"}, 500),
        ({"error": {"message": "broken", "code": 400, "retryable": False}}, 400),
        ({"error": {"message": "broken", "code": "Internal"}}, 500),
    ],
)
async def test_error_in_the_stream_has_its_status(body: dict[str, Any], status: int) -> None:
    """SGLang answers a bad streaming request with 200 and a frame that contains the true status."""
    fault = Fault("frame", after=1, body=json.dumps(body).encode())
    fake = FakeSGLang(ANSWER, faults=deque([fault]))
    async with client(fake) as server:
        with pytest.raises(ServerRefused, match="broken") as caught:
            await stream(server)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("status_code", "refused"), [(None, None), (500, None), (503, None), (400, 400)]
)
async def test_abort_with_a_callers_status_is_a_refusal(
    status_code: int | None, refused: int | None
) -> None:
    fault = Fault("abort", after=2, status_code=status_code)
    fake = FakeSGLang(ANSWER, faults=deque([fault]))
    async with client(fake) as server:
        if refused is None:
            chunks = await stream(server)
            assert chunks[-1].end is TurnEnd.ABORT
            assert join(chunks)[0] == ANSWER[:3]
        else:
            with pytest.raises(ServerRefused, match="Aborted") as caught:
                await stream(server)
            assert caught.value.status == refused


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (400, b'{"error": {"message": "temperature must be"}}', "400: temperature must be"),
        (422, b'{"detail": "no"}', "422: .*detail"),
        (500, b"\xff\xfe", "500"),
        (503, b"", "503: Service Unavailable"),
        (500, b'["list"]', "500"),
        (502, b"x" * 5_000_000, "502: x{20}"),
    ],
)
async def test_refusal_says_why_whatever_its_body(status: int, body: bytes, error: str) -> None:
    fake = FakeSGLang(ANSWER, faults=deque([Fault("refuse", status=status, body=body)]))
    async with client(fake) as server:
        with pytest.raises(ServerRefused, match=error) as caught:
            await stream(server)
    assert caught.value.status == status
    assert len(str(caught.value)) < 1000


async def test_silence_is_noticed_before_and_during_the_stream() -> None:
    fake = FakeSGLang(ANSWER, faults=deque([Fault("silence", after=2)]))
    received: list[int] = []
    async with client(fake, stall_timeout_s=0.05) as server:

        async def watch() -> None:
            await eventually(lambda: len(received) == 2)
            while True:
                await anyio.sleep(0.01)
                server.close_stalled()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(watch)
            with pytest.raises(ServerUnavailable, match=r"silent for 0\.05 s, after 2 tokens"):
                await stream(server, received)
            tasks.cancel_scope.cancel()
        await eventually(lambda: fake.num_streaming == 0)


async def test_server_that_is_not_there_is_unavailable() -> None:
    async with http_session() as session:
        server = SGLangServer("http://127.0.0.1:1", session)
        with pytest.raises(ServerUnavailable, match=r"http://127\.0\.0\.1:1"):
            await stream(server)
        with pytest.raises(ServerUnavailable):
            await server.weight_version()
        with pytest.raises(ServerUnavailable):
            await server.info()


async def test_callback_that_raises_frees_the_request_and_its_error_propagates() -> None:
    fake = FakeSGLang(ANSWER, faults=deque([Fault("silence", after=2)]))

    def take(chunk: Chunk) -> None:
        raise ZeroDivisionError

    async with client(fake) as server:
        with pytest.raises(ZeroDivisionError):
            await server.generate(PROMPT, {"max_new_tokens": 50}, rid="r", on_chunk=take)
        await eventually(lambda: fake.num_streaming == 0)


@pytest.mark.parametrize("where", ["before the first frame", "amid"])
async def test_cancellation_frees_the_request(where: str) -> None:
    gate = anyio.Event() if where.startswith("before") else None
    fake = FakeSGLang(ANSWER, gate=gate, faults=deque([Fault("silence", after=2)]))
    async with client(fake) as server, anyio.create_task_group() as tasks:
        tasks.start_soon(stream, server)
        await eventually(lambda: fake.num_streaming == 1)
        tasks.cancel_scope.cancel()
    assert fake.num_streaming == 0


async def test_information_and_readiness() -> None:
    fake = FakeSGLang(ANSWER, context_length=500, max_total_num_tokens=700)
    async with client(fake) as server:
        info = await server.info()
        assert (info.model_path, info.context_length, info.max_total_num_tokens) == (
            "fake",
            500,
            700,
        )
        assert await server.weight_version() == fake.version
        fake.ready = False
        with pytest.raises(ServerRefused, match="503"):
            await server.weight_version()


@pytest.mark.parametrize(
    ("said", "num_tokens"),
    [
        ({}, 0),
        ({"enable_hierarchical_cache": False, "hicache_ratio": 2.0}, 0),
        ({"enable_hierarchical_cache": True}, 1400),
        ({"enable_hierarchical_cache": True, "hicache_ratio": 1.5, "hicache_size": 0}, 1050),
        (
            {  # what the scheduler could allocate, rather than what was asked for
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2.0,
                "internal_states": [{"hicache_ratio": 0.5}],
            },
            350,
        ),
        (
            {
                "enable_hierarchical_cache": True,
                "hicache_ratio": 2.0,
                "hicache_size": 100,
                "internal_states": [{"memory_usage": {"kvcache": 50e9 / 2**30}}],
            },
            1400,
        ),
        ({"enable_hierarchical_cache": True, "hicache_size": 100}, 0),
        ({"enable_hierarchical_cache": True, "hicache_host_memory_mode": "buffer_only"}, 0),
    ],
)
async def test_size_of_the_cache_in_the_hosts_memory(said: dict[str, Any], num_tokens: int) -> None:
    fake = FakeSGLang(ANSWER, max_total_num_tokens=700, info=said)
    async with client(fake) as server:
        assert (await server.info()).num_host_tokens == pytest.approx(num_tokens, abs=1)


async def test_server_of_another_kind_is_refused() -> None:
    fake = FakeSGLang(ANSWER)
    fake.max_total_num_tokens = None  # type: ignore[assignment]
    async with fake.serving(), http_session() as session:
        with pytest.raises(ServerRefused, match="404"):
            await SGLangServer(fake.url + "/elsewhere", session).info()
        with pytest.raises(ServerRefused, match="not an SGLang server"):
            await SGLangServer(fake.url, session).info()


async def test_key_is_in_every_request() -> None:
    fake, key = FakeSGLang(ANSWER), pydantic.SecretStr("open-sesame")
    async with fake.serving(), http_session(key) as session:
        server = SGLangServer(fake.url, session)
        await server.info()
        await stream(server)
    assert len(fake.keys) >= 2
    assert set(fake.keys) == {"Bearer open-sesame"}


async def test_without_a_key_none_is_sent() -> None:
    fake = FakeSGLang(ANSWER)
    async with client(fake) as server:
        await stream(server)
    assert fake.keys == [""]
