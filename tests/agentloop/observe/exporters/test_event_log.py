"""The event log of a run: written despite disk errors, and read back."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.events import (
    CallFinished,
    Event,
    Measured,
    RolloutAbandoned,
    RolloutScored,
    TokensSampled,
)
from agentloop.observe.exporters.event_log import EventLog, EventLogSettings, read_events
from agentloop.trajectory import ToolCallStatus, ToolResult
from tests.agentloop.observe import story
from tests.patience import patient
from tests.support import eventually


class FrequentLog(EventLog):
    EVERY_S = 0.001


class FinalLog(EventLog):
    """Writes at its end."""

    EVERY_S = 3600


class SmallLog(FinalLog):
    MAX_WAITING = 3


async def write_events(
    folder: Path, events: Sequence[Event], settings: EventLogSettings | None = None
) -> list[dict[str, Any]]:
    async with FinalLog.open(folder, settings) as event_log:
        for event in events:
            event_log.on_event(event)
    return list(read_events(folder))


def names(lines: Sequence[dict[str, Any]]) -> list[str]:
    return [line["event"] for line in lines]


async def test_run_is_read_back(tmp_path: Path) -> None:
    lines = await write_events(tmp_path, story.run())
    assert names(lines)[:4] == ["opened", "weights_loaded", "group_started", "rollout_started"]
    assert names(lines)[-2:] == ["measured", "measured"]
    assert [line["t"] for line in lines] == sorted(line["t"] for line in lines)
    of_one = [line for line in lines if line.get("rollout") == "1-task.0"]
    turn = next(line for line in of_one if line["event"] == "turn_finished")
    del turn["t"]
    assert turn == {
        "event": "turn_finished",
        "rollout": "1-task.0",
        "turn": 0,
        "end": "stop",
        "num_tokens": 4,
        "num_cached_tokens": 2,
        "num_calls": 2,
        "servers": ["http://127.0.0.1:30001", story.SERVER],
        "versions": ["6", "7"],
        "started_s": 0.5,
        "first_token_s": 1.0,
        "generated_s": 2.25,
        "ended_s": 2.5,
    }
    scored = next(line for line in of_one if line["event"] == "rollout_scored")
    assert (scored["reward"], scored["answer"]) == (1.0, "1776")
    group = next(line for line in lines if line["event"] == "group_finished")
    assert group["kept"] == {"1-task.0": 1.0, "1-task.1": -1.0}
    assert lines[-2]["row"] == story.STEP_ROW


async def test_tokens_are_not_written(tmp_path: Path) -> None:
    tokens: list[Event] = [TokensSampled("r", 0, [1, 2], "secret") for _ in range(100)]
    assert names(await write_events(tmp_path, tokens)) == ["opened"]
    assert b"secret" not in (tmp_path / "events.jsonl").read_bytes()


async def test_lines_are_written_during_the_run(tmp_path: Path) -> None:
    async with FrequentLog.open(tmp_path) as event_log:
        event_log.on_event(RolloutAbandoned("r"))
        await eventually(
            lambda: names(list(read_events(tmp_path))) == ["opened", "rollout_abandoned"]
        )


async def test_queued_lines_are_written_if_the_run_fails(tmp_path: Path) -> None:
    async def fail() -> None:
        async with FinalLog.open(tmp_path) as event_log:
            event_log.on_event(RolloutAbandoned("r"))
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        await fail()
    with anyio.move_on_after(0):
        async with FinalLog.open(tmp_path) as event_log:
            event_log.on_event(RolloutAbandoned("s"))
            await anyio.sleep_forever()
    assert names(list(read_events(tmp_path))) == ["opened", "rollout_abandoned"] * 2


@given(cut=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
async def test_line_cut_short_by_a_kill_is_skipped(
    tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    """For any position of the cut and any lines added later."""
    folder = tmp_path_factory.mktemp("run")
    before = await write_events(folder, story.run())
    path = folder / "events.jsonl"
    data = path.read_bytes()[:cut]
    path.write_bytes(data)
    num_whole = data.count(b"\n")
    after = list(read_events(folder))
    # A line that lacks nothing but its end is whole.
    assert after in (before[:num_whole], before[: num_whole + 1])
    again = await write_events(folder, [RolloutAbandoned("r")])
    assert again[: len(after)] == after
    assert names(again[len(after) :]) == ["opened", "rollout_abandoned"]


async def test_lines_beyond_the_queue_limit_are_dropped_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with SmallLog.open(tmp_path) as event_log:
        for number in range(10):
            event_log.on_event(RolloutAbandoned(str(number)))
        assert event_log.num_dropped == 8
    lines = list(read_events(tmp_path))
    assert names(lines) == ["opened", "rollout_abandoned", "rollout_abandoned", "dropped"]
    assert lines[-1]["num"] == 8
    assert [message.partition(": dropped")[2] for message in caplog.messages] == [
        " 1 (1 in total): 3 lines are already queued",
        " 7 (8 in total): 3 lines are already queued",
    ]


async def test_full_disk_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    write, is_full = os.write, True

    def no_room(file: int, data: bytes) -> int:
        if is_full and b"event" in data:
            write(file, data[:5])
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(os, "write", no_room)
    async with FrequentLog.open(tmp_path) as event_log:
        await eventually(lambda: event_log.num_dropped == 1)
        event_log.on_event(RolloutAbandoned("r"))
        await eventually(lambda: event_log.num_dropped == 2)
        is_full = False
        event_log.on_event(RolloutAbandoned("s"))
        await eventually(lambda: len(list(read_events(tmp_path))) == 2)
    assert [message.partition(": dropped")[2] for message in caplog.messages] == [
        " 1 (1 in total): No space left on device",
        " 1 (2 in total): No space left on device",
    ]
    lines = list(read_events(tmp_path))
    assert [(line["event"], line.get("num"), line.get("rollout")) for line in lines] == [
        ("rollout_abandoned", None, "s"),
        ("dropped", 2, None),
    ]


async def test_slow_disk_does_not_block_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, go_on, waits = os.write, threading.Event(), threading.Event()

    def slow(file: int, data: bytes) -> int:
        if b"event" in data:
            waits.set()
            assert go_on.wait(patient(15))
        return write(file, data)

    monkeypatch.setattr(os, "write", slow)
    async with FrequentLog.open(tmp_path) as event_log:
        await eventually(waits.is_set)
        for number in range(100):
            event_log.on_event(RolloutAbandoned(str(number)))
        await anyio.lowlevel.checkpoint()  # others go on meanwhile
        go_on.set()
    assert len(list(read_events(tmp_path))) == 101


async def test_oldest_lines_are_deleted_when_the_file_is_full(tmp_path: Path) -> None:
    for part in range(8):
        events: list[Event] = [RolloutAbandoned(f"{part}-{n:060}") for n in range(2000)]
        await write_events(tmp_path, events, EventLogSettings(max_mib=1))
    size = sum(os.stat(tmp_path / name).st_size for name in os.listdir(tmp_path))
    assert 2**20 / 2 < size < 2**20 + 2**19
    lines = [line for line in read_events(tmp_path) if line["event"] == "rollout_abandoned"]
    numbers = [line["rollout"] for line in lines]
    assert numbers == sorted(numbers)
    assert numbers[-1] == f"7-{1999:060}"
    assert numbers[0] > "1"


@pytest.mark.parametrize("text", ["\ud800", "a" * 10_000, '"\n\x00'])
async def test_long_texts_of_a_model_are_cut(tmp_path: Path, text: str) -> None:
    result = ToolResult("c", text, ToolCallStatus.UNKNOWN_TOOL, "", 0, 0, 0)
    events: list[Event] = [
        CallFinished("r", 0, result),
        RolloutScored("r", 2**70 / 1, text, text, 0),
    ]
    lines = await write_events(tmp_path, events)
    assert names(lines) == ["opened", "call_finished", "rollout_scored"]
    assert len(lines[1]["name"]) <= 500
    assert len((tmp_path / "events.jsonl").read_bytes().splitlines()) == 3


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (float("nan"), None),
        (2**70, 2**70),
        (Path("x"), "x"),
        (None, None),
        ({1: 2}, {"1": 2}),
        ("\ud800", "\ud800"),
    ],
)
async def test_any_metrics_row_is_written(tmp_path: Path, value: object, read: object) -> None:
    lines = await write_events(tmp_path, [Measured({"value": value, "step": 3})])
    assert lines[-1]["row"] == {"value": read, "step": 3}


async def test_event_log_can_be_disabled(tmp_path: Path) -> None:
    assert await write_events(tmp_path, story.run(), EventLogSettings(max_mib=0)) == []
    assert os.listdir(tmp_path) == []


def test_run_without_events_has_none(tmp_path: Path) -> None:
    assert list(read_events(tmp_path / "no-such-run")) == []
    (tmp_path / "events.jsonl").write_bytes(b'1\n[]\n{"t": 1}\n{"t": 1, "event": "opened"}\nhalf')
    assert names(list(read_events(tmp_path))) == ["opened"]
