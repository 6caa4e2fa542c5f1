"""A feed delivers all events in order, however far behind its reader is."""

from __future__ import annotations

import anyio
import pytest

from agentloop.events import Event, Feed, RolloutStarted, TokensSampled, TurnStarted, ignore
from agentloop.trajectory import Trajectory
from tests.patience import patient


def tokens(number: int, turn: int = 0) -> TokensSampled:
    return TokensSampled("r", turn, [number], str(number))


async def test_events_are_read_as_they_come() -> None:
    feed = Feed()
    read: list[Event] = []

    async def reader() -> None:
        async for event in feed:
            read.append(event)

    with anyio.fail_after(patient(15)):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(reader)
            for number in range(3):
                feed(tokens(number))
                await anyio.wait_all_tasks_blocked()
            assert read == [tokens(number) for number in range(3)]
            feed.close()


async def test_reader_that_lags_finds_adjacent_tokens_joined() -> None:
    feed = Feed()
    feed(RolloutStarted(Trajectory("r", [])))
    for number in range(1000):
        feed(tokens(number))
    feed(TurnStarted("r", 1))
    feed(tokens(7, turn=1))
    feed(tokens(8, turn=2))
    feed.close()
    read = [event async for event in feed]
    assert [type(event) for event in read] == [
        RolloutStarted, TokensSampled, TurnStarted, TokensSampled, TokensSampled,
    ]  # fmt: skip
    assert read[1] == TokensSampled(
        "r", 0, list(range(1000)), "".join(str(number) for number in range(1000))
    )
    assert read[3:] == [tokens(7, 1), tokens(8, 2)]


async def test_events_before_an_error_are_read_first() -> None:
    feed = Feed()
    feed(tokens(1))
    feed.close(ValueError("gone"))
    assert await anext(feed) == tokens(1)
    with pytest.raises(ValueError, match="gone"):
        await anext(feed)


async def test_reader_that_is_cancelled_can_come_back() -> None:
    feed = Feed()
    with anyio.move_on_after(0.01):
        await anext(feed)
    feed(tokens(1))
    assert await anext(feed) == tokens(1)


def test_events_can_be_ignored() -> None:
    ignore(tokens(1))
