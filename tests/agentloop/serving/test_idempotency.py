"""Requests that are repeated with the same Idempotency-Key, in sessions and without."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import anyio
import pytest
from aiohttp.test_utils import make_mocked_request

from agentloop.agent.chat_format import ChatFormat
from agentloop.errors import RequestError
from agentloop.events import Emit, ignore
from agentloop.serving import answering
from agentloop.serving.idempotency import IdempotentAnswers
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, chunk_frame
from agentloop.trajectory import Trajectory
from tests.agentloop.serving.test_app import HELLO, Service, says, service
from tests.agentloop.serving.test_bare_model import open_session, trajectories
from tests.support import Step, chat_format, chunks, eventually

BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": HELLO},
    "responses": {"input": HELLO},
    "messages": {"messages": HELLO, "max_tokens": 100},
}


@asynccontextmanager
async def post_with_key(
    at: Service, url: str, body: dict[str, Any], key: str = "k"
) -> AsyncIterator[aiohttp.ClientResponse]:
    async with at.http.post(url, json=body, headers={"Idempotency-Key": key}) as response:
        yield response


async def answer(at: Service, url: str, body: dict[str, Any], key: str = "k") -> str:
    async with post_with_key(at, url, body, key) as response:
        text = await response.text()
        assert response.status == 200, text
        return text


def events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def without_times(value: Any) -> Any:
    """Return an answer without what may differ when it is written again."""
    if isinstance(value, dict):
        return {k: without_times(part) for k, part in value.items() if k != "completed_at"}
    return [without_times(part) for part in value] if isinstance(value, list) else value


@pytest.mark.parametrize("protocol", BODIES)
async def test_retry_gets_the_same_answer(protocol: str) -> None:
    async with service(says("one"), says("two")) as at, open_session(at) as session:
        url = f"{session['url']}/v1/{protocol}"
        first = await answer(at, url, BODIES[protocol])
        again = await answer(at, url, BODIES[protocol])
        assert without_times(json.loads(again)) == without_times(json.loads(first))
        new = await answer(at, url, BODIES[protocol], key="another")
        assert json.loads(new)["id"] != json.loads(first)["id"]
        assert len(at.router.asked) == 2


@pytest.mark.parametrize("protocol", BODIES)
async def test_stream_is_repeated(protocol: str) -> None:
    body = {**BODIES[protocol], "stream": True}
    async with service(says("<think>hm</think>one")) as at, open_session(at) as session:
        url = f"{session['url']}/v1/{protocol}"
        first = events(await answer(at, url, body))
        again = events(await answer(at, url, body))
        assert len(at.router.asked) == 1
    if protocol == "responses":
        assert without_times(again[-1]["response"]) == without_times(first[-1]["response"])
    else:
        assert without_times(again[0]) == without_times(first[0])
        assert without_times(again[-1]) == without_times(first[-1])


async def test_repeated_response_can_be_continued_by_its_id() -> None:
    async with service(says("one"), says("two")) as at, open_session(at) as session:
        url = f"{session['base_url']}/responses"
        await answer(at, url, {"input": "a"})
        id = json.loads(await answer(at, url, {"input": "a"}))["id"]
        await answer(at, url, {"input": "b", "previous_response_id": id}, key="next")
        (record,) = await trajectories(at, session)
        assert len(record["turns"]) == 2


async def test_key_of_another_request_is_refused() -> None:
    async with service(says("one")) as at, open_session(at) as session:
        url = f"{session['base_url']}/chat/completions"
        await answer(at, url, {"messages": HELLO})
        async with post_with_key(at, url, {"messages": HELLO, "max_tokens": 3}) as refused:
            assert refused.status == 400
            message = (await refused.json())["error"]["message"]
        assert message.startswith("Idempotency-Key: ")


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_invalid_key_is_refused(key: str) -> None:
    async with (
        service() as at,
        open_session(at) as session,
        post_with_key(
            at, f"{session['base_url']}/chat/completions", {"messages": HELLO}, key
        ) as refused,
    ):
        assert refused.status == 400
        assert "Idempotency-Key" in (await refused.json())["error"]["message"]


async def test_retry_waits_for_the_attempt_in_flight() -> None:
    gate = anyio.Event()
    answers: list[Any] = []
    async with service([gate.wait, *says("one")]) as at, open_session(at) as session:
        url = f"{session['base_url']}/chat/completions"

        async def ask() -> None:
            answers.append(json.loads(await answer(at, url, {"messages": HELLO})))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await eventually(lambda: at.router.num_open == 1)
            tasks.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            gate.set()
        assert answers[0] == answers[1]
        assert len(at.router.asked) == 1


async def test_answer_that_was_cut_off_is_sampled_anew() -> None:
    gate = anyio.Event()
    hangs: list[Step] = [*chunks([1, 2], end=None), gate.wait]
    body = {"messages": HELLO, "stream": True}
    async with service(hangs, says("two")) as at, open_session(at) as session:
        url = f"{session['base_url']}/chat/completions"
        async with post_with_key(at, url, body) as response:
            await response.content.readany()
            response.close()
        text = await answer(at, url, body)
        assert "two" in "".join(
            chunk["choices"][0]["delta"].get("content", "") for chunk in events(text)
        )
        cut, complete = await trajectories(at, session)
        assert [turn["output_ids"] for turn in cut["turns"]] == [[1, 2]]  # its client has read it
        assert len(complete["turns"]) == 1


async def test_error_is_not_remembered() -> None:
    async with (
        service([RequestError("x: refused")], says("two")) as at,
        open_session(at) as session,
    ):
        url = f"{session['base_url']}/chat/completions"
        async with post_with_key(at, url, {"messages": HELLO}) as failed:
            assert failed.status == 400
        assert "two" in await answer(at, url, {"messages": HELLO})


@pytest.mark.parametrize("has_key", [True, False])
async def test_answer_without_its_client_is_kept_for_retries_only(
    has_key: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with service(says("one"), says("two")) as at, open_session(at) as session:
        url = f"{session['base_url']}/chat/completions"
        headers = {"Idempotency-Key": "k"} if has_key else {}
        with monkeypatch.context() as patch:
            patch.setattr(answering, "has_left", lambda request: True)
            async with at.http.post(url, json={"messages": HELLO}, headers=headers) as lost:
                assert lost.status == 408
        assert len(await trajectories(at, session)) == (1 if has_key else 0)
        async with at.http.post(url, json={"messages": HELLO}, headers=headers) as response:
            text = (await response.json())["choices"][0]["message"]["content"]
        assert text == ("one" if has_key else "two")
        (record,) = await trajectories(at, session)
        assert len(record["turns"]) == 1


async def test_sessions_do_not_share_keys() -> None:
    async with (
        service(says("one"), says("two")) as at,
        open_session(at) as mine,
        open_session(at) as second,
    ):
        for session, text in ((mine, "one"), (second, "two")):
            url = f"{session['base_url']}/chat/completions"
            assert text in await answer(at, url, {"messages": HELLO})


@pytest.mark.parametrize("model", ["fake", "fake-agent"])
async def test_requests_without_a_session_may_be_repeated(model: str) -> None:
    async with service(says("one"), says("two")) as at:
        url, body = f"{at.url}/v1/chat/completions", {"model": model, "messages": HELLO}
        first = json.loads(await answer(at, url, body))
        assert json.loads(await answer(at, url, body)) == first
        # Another client may have chosen the same key.
        assert "two" in await answer(at, url, {**body, "max_tokens": 50})


# --- bounds ---------------------------------------------------------------------------------------

CHAT: ChatFormat = chat_format()


async def attempt(answers: IdempotentAnswers, key: str, num_ids: int = 1) -> bool:
    """Make an attempt; return whether it was an answer that was remembered."""
    request = make_mocked_request("POST", "/v1/x", headers={"Idempotency-Key": key})
    writer = ChunkWriter(chunk_frame("c", "m"), 0, chat=CHAT)
    ran = False

    async def run(index: int, emit: Emit) -> Trajectory:
        nonlocal ran
        ran = True
        return Trajectory("t", [0] * num_ids)

    async with answers.attempt(request, b"{}") as made:
        await made.runs([writer], run)(0, ignore)
    return not ran


async def test_oldest_answers_are_forgotten() -> None:
    answers = IdempotentAnswers(max_answers=2)
    for key in ("a", "b", "a", "c"):
        await attempt(answers, key)
    assert len(answers) == 2
    assert await attempt(answers, "a")  # it was used after b
    assert not await attempt(answers, "b")


async def test_answers_are_bounded_by_their_ids() -> None:
    answers = IdempotentAnswers(max_ids=100)
    await attempt(answers, "a", 60)
    await attempt(answers, "b", 60)
    assert not await attempt(answers, "a", 1000)
    assert len(answers) == 1  # the newest is kept, however long
    assert await attempt(answers, "a")
