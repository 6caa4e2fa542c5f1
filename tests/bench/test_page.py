"""The simulated run of the page's benchmark: a valid stream, with flow control and bounds."""

from __future__ import annotations

from contextlib import aclosing
from typing import Any

import anyio
import orjson
import pytest

from bench.page import Replay
from tests.patience import patient

pytestmark = pytest.mark.anyio


class Reader:
    """Merges frames as the page does."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}
        self.num_steps = self.missed = 0

    def apply(self, data: bytes) -> int:
        frame = orjson.loads(data)
        if frame["full"]:
            self.rollouts, self.groups, self.num_steps = {}, {}, 0
        for name, rows in (("rollouts", self.rollouts), ("groups", self.groups)):
            rows |= {row["id"]: row for row in frame.get(name, [])}
            for key in frame.get("gone", {}).get(name, []):
                rows.pop(key, None)
        self.num_steps += len(frame.get("steps", []))
        self.missed += frame.get("missed", 0)
        rev: int = frame["rev"]
        return rev


async def read(replay: Replay, reader: Reader) -> None:
    with anyio.fail_after(patient(15)):
        async with aclosing(replay.frames()) as frames:
            async for _, data in frames:
                if data and reader.apply(data) == replay.num_frames:
                    return


async def test_a_reader_has_exactly_the_boards_content() -> None:
    replay, reader = Replay(in_flight=20, num_frames=300, max_ended=100, max_groups=10), Reader()
    await read(replay, reader)
    assert reader.rollouts.keys() == replay.board.rows.keys()
    assert reader.groups.keys() == replay.board.groups.keys()
    assert 100 < len(reader.rollouts) < 150
    assert len(reader.groups) == 10
    assert reader.num_steps == len(replay.board.steps) == 15


async def test_a_reader_that_missed_frames_gets_everything_again() -> None:
    replay, reader = Replay(in_flight=20, num_frames=40), Reader()
    replay.missed = 7
    await read(replay, reader)
    assert reader.missed == 7
    assert reader.rollouts.keys() == replay.board.rows.keys()
    assert reader.num_steps == len(replay.board.steps)


async def test_frames_are_sent_only_when_allowed() -> None:
    replay, reader = Replay(in_flight=20, num_frames=100), Reader()
    replay.let(30)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read, replay, reader)
        await anyio.wait_all_tasks_blocked()
        assert replay.sent == 30
        replay.let(100)
    assert replay.sent == 100
