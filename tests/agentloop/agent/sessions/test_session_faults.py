"""Sessions of clients that mislead: edits, departures and failures at the wrong moment."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.sessions import TurnRequest
from agentloop.agent.sessions.history import context_key, keys_of
from agentloop.errors import RequestError, ServerError, ServerUnavailable
from agentloop.events import Feed
from agentloop.trajectory import Message, StopReason
from tests.agentloop.agent.sessions.test_session import TOOL, Client, as_message, reply, user
from tests.support import END, TEMPLATE, call_text, chunks, template, tokenizer


async def test_changed_reasoning_of_an_unsampled_message_is_an_edit() -> None:
    def example(thought: str) -> Message:
        return {"role": "assistant", "content": "4", "reasoning_content": thought}

    client = Client(reply("one"), reply("two"))
    before, after = (
        [user("2+2"), example(thought), user("a")] for thought in ("I add.", "I guess.")
    )
    first = await client.ask(*before)
    await client.ask(*after, first, user("b"))
    assert client.reasons == ["", "messages[1] differs from what came there before"]


def test_keys_of_long_messages_are_short() -> None:
    (key,) = keys_of([user("x" * 10_000)])
    assert len(key) <= 64
    assert len(context_key([], {"ignored_by_the_template": "x" * 10_000})) <= 64


async def test_turn_in_flight_is_in_no_trajectory() -> None:
    started = anyio.Event()

    async def hang() -> None:
        started.set()
        await anyio.sleep_forever()

    client = Client([*chunks([1, 2], end=None), hang])
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, user("a"))
        await started.wait()
        assert client.branches == []
        tasks.cancel_scope.cancel()

    client = Client(reply("one"), [*chunks([1, 2], end=None), hang])
    started = anyio.Event()
    first = await client.ask(user("a"))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.ask, user("a"), first, user("b"))
        await started.wait()
        (record,) = client.branches
        assert [turn.observation_ids for turn in record.turns] == [[]]
        tasks.cancel_scope.cancel()


async def test_answer_to_another_request_does_not_hide_a_failure() -> None:
    client = Client([ServerUnavailable("gone")], reply("one"), reply("two"))
    with pytest.raises(ServerError):
        await client.ask(user("of a sub-agent"))
    await client.ask(user("of the agent"))
    assert client.session.failure == "gone"
    await client.ask(user("of a sub-agent"))
    assert client.session.failure is None


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_tokens_read_before_a_client_left_are_recorded(is_streamed: bool) -> None:
    started = anyio.Event()

    async def hang() -> None:
        started.set()
        await anyio.sleep_forever()

    client = Client(reply("one"), [*chunks([1, 2], end=None), hang], reply("two"))
    first = await client.ask(user("a"))
    history = [user("a"), first, user("b")]
    feed: tuple[Any, ...] = (Feed(),) if is_streamed else ()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(client.session.complete, TurnRequest(history), as_message, *feed)
        await started.wait()
        tasks.cancel_scope.cancel()
    await client.ask(*history)  # goes on where it was, since it may ask again
    assert len(client.branches[0].turns) == 2
    outputs = [turn.output_ids for branch in client.branches for turn in branch.turns]
    assert outputs.count([1, 2]) == int(is_streamed)
    if is_streamed:
        partial = client.branches[1]
        assert partial.prompt_ids == client.engine.asked[1].ids
        assert len(partial.turns[0].logprobs) == 2
        assert sum(span.end - span.start for span in partial.turns[0].versions) == 2
        assert client.reasons[1] == "its client left before the end of the message"


async def test_tokens_read_before_the_session_was_closed_are_recorded() -> None:
    started = anyio.Event()

    async def hang() -> None:
        started.set()
        await anyio.sleep_forever()

    client = Client([*chunks([1, 2], end=None), hang])
    async with anyio.create_task_group() as tasks:

        async def ask() -> None:
            with pytest.raises(RequestError, match="closed"):
                await client.session.complete(TurnRequest([user("a")]), as_message, Feed())

        tasks.start_soon(ask)
        await started.wait()
        (record,) = client.session.close()
        (turn,) = record.turns
        assert turn.output_ids == [1, 2]
        assert sum(span.end - span.start for span in turn.versions) == len(turn.logprobs) == 2
        assert record.stop_reason is StopReason.STOP_SEQUENCE
    assert client.branches == [record]


async def test_responses_name_sampled_calls_after_a_client_changed_their_ids() -> None:
    written = "+ message.content + '\n</tool"
    source = TEMPLATE.replace(written, f"+ message.tool_call_id {written}")
    assert source != TEMPLATE
    writes_ids = ChatFormat(tokenizer(), template(source), end_token=END)
    client = Client(reply(call_text("add", {"a": 1})), reply("1"))
    client.session._chat = writes_ids
    first = await client.ask(user("a"), tools=[TOOL])
    (call,) = first["tool_calls"]
    renamed = {**first, "tool_calls": [{**call, "id": "theirs"}]}
    response = {"role": "tool", "tool_call_id": "theirs", "content": "1"}
    await client.ask(user("a"), renamed, response, tools=[TOOL])
    assert len(client.branches) == 1
    prompt = writes_ids.decode(client.engine.asked[1].ids)
    assert call["id"] in prompt
    assert "theirs" not in prompt
