"""Readers of live data: each at its own pace, resynchronised when late, removed when it leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.errors import NotThere
from agentloop.events import (
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutAbandoned,
    RolloutFinished,
    RolloutScored,
    RolloutStarted,
    TokensSampled,
    TurnPlaced,
    TurnStarted,
)
from agentloop.inference.replicas import ServerView
from agentloop.inference.scheduling.health import ServerState
from agentloop.observe import live as live_module
from agentloop.observe.board import Board, GroupRow
from agentloop.observe.frames import GroupDetails
from agentloop.observe.live import Live, Sources
from agentloop.observe.stalls import Stalls
from agentloop.trajectory import StopReason, Trajectory, Turn, TurnEnd
from tests.agentloop.observe.story import WHY
from tests.agentloop.observe.test_board import Reader
from tests.agentloop.observe.test_record import apply_delta
from tests.patience import patient
from tests.support import END, chat_format, eventually, written

CHAT = chat_format()
ABOUT = {"kind": "serve", "title": "small"}
Frames = AsyncGenerator[tuple[str, bytes]]


def live(**bounds: Any) -> Live:
    return Live(Board(**bounds), Stalls(), Sources(ABOUT, chat=lambda: CHAT))


def starts(at: Live, *keys: str) -> None:
    for key in keys:
        at.board.on_event(RolloutStarted(Trajectory(key, [9]), key.rpartition(".")[0]))


async def next_of(frames: Frames) -> tuple[str, dict[str, Any]]:
    with anyio.fail_after(patient(15)):
        name, data = await anext(frames)
    return name, orjson.loads(data)


async def test_rollout_without_a_group_has_its_own_question() -> None:
    at = live()
    prompt = CHAT.prompt([{"role": "user", "content": "What is 1 plus 1?"}])
    at.board.on_event(RolloutStarted(Trajectory("a", prompt), ""))
    at.board.on_event(GroupStarted("7-t", "t", "Why?", None, 1))
    at.board.on_event(RolloutStarted(Trajectory("7-t.0", prompt), "7-t"))
    rows = {row["id"]: row for row in at.board.take(9)["rollouts"]}
    assert rows["a"]["question"] == "What is 1 plus 1?"
    assert "question" not in rows["7-t.0"]  # which is that of its group


async def test_frames_are_made_only_for_readers() -> None:
    at = live()
    queries: list[int] = []

    def count_query() -> int:
        queries.append(1)
        return 0

    at.sources = Sources(ABOUT, num_waiting=count_query)
    starts(at, "1.0")
    for _ in range(3):
        at.tick()
    assert queries == [1]  # for a point of the history, of which there is one in five seconds
    queries.clear()
    assert not at.board._lane_changes  # and nothing is kept for later
    async with aclosing(at.frames()) as frames:
        await next_of(frames)
        queries.clear()
        at.tick()
        assert queries == [1]
    queries.clear()
    at.tick()
    assert queries == []


async def test_history_covers_last_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(live_module, "time", SimpleNamespace(time=lambda: now_s))
    at = live()
    view = ServerView("http://a", ServerState.HEALTHY, 2, 10, 5, 3, 100, num_cached_tokens=7)
    at.sources = Sources(ABOUT, servers=lambda: [view], sandbox=lambda: {"busy": 1, "slots": 4})
    starts(at, "1.0")
    at.board.on_event(TurnPlaced("1.0", 0, "http://a", WHY))
    for _ in range(1_000):
        at.board.on_event(TokensSampled("1.0", 0, [1] * 50, ""))
        at.tick()
        now_s += 5.0
    frame = await at.frame()
    assert len(frame["history"]) == 720
    last = frame["history"][-1]
    assert (last["t"], last["servers"]) == (5095.0, {"http://a": [10.0, 2, 15, 3, 7]})
    assert last["now"]["in_flight"] == 1
    assert last["now"]["sandbox_busy"] == 1
    assert frame["servers"][0]["since"] == 100.0  # it has been healthy since then
    view = replace(view, state=ServerState.DEAD)
    at.tick()
    assert (await at.frame())["servers"][0]["since"] == now_s


async def test_first_frame_is_complete_and_the_next_has_changes() -> None:
    at = live()
    starts(at, "1.0", "1.1")
    at.board.on_event(Measured({"step": 1}))
    async with aclosing(at.frames()) as frames:
        _, first = await next_of(frames)
        if not first["rollouts"]:
            _, rows = await next_of(frames)
            first["rollouts"] = rows["rollouts"]
        assert first["full"] is True
        assert (first["missed"], first["about"]["kind"]) == (0, "serve")
        assert [row["id"] for row in first["rollouts"]] == ["1.0", "1.1"]
        at.tick()
        await next_of(frames)  # as it was amid its time; all may be told twice
        at.board.on_event(TurnStarted("1.1", 0))
        at.tick()
        _, second = await next_of(frames)
        assert second["full"] is False
        assert [row["id"] for row in second["rollouts"]] == ["1.1"]
        assert "steps" not in second


async def all_of(frames: Frames) -> tuple[str, list[dict[str, Any]]]:
    """Return the frames up to the first one with an id."""
    frames_sent = []
    while True:
        name, frame = await next_of(frames)
        frames_sent.append(frame)
        if name:
            return name, frames_sent


async def test_every_reader_gets_each_step_once() -> None:
    at = live()
    async with aclosing(at.frames()) as early:
        await all_of(early)
        at.board.on_event(Measured({"step": 1}))
        at.tick()
        at.board.on_event(Measured({"step": 2}))  # in no frame yet
        async with aclosing(at.frames()) as late:
            steps: list[Any] = []
            for frame in (await all_of(late))[1]:
                steps += frame.get("steps", ())
            at.board.on_event(Measured({"step": 3}))
            at.tick()
            _, frame = await next_of(late)
            steps += frame["steps"]
        assert [row["step"] for row in steps] == [1, 2, 3]


async def test_two_readers_are_given_the_same_bytes() -> None:
    at = live()
    async with aclosing(at.frames()) as first, aclosing(at.frames()) as second:
        await all_of(first), await all_of(second)
        assert at.num_readers == 2
        starts(at, "1.0")
        at.tick()
        (name, data), (other_name, other_data) = await anext(first), await anext(second)
    assert name == other_name
    assert data is other_data
    assert at.num_readers == 0


async def test_reader_resumes_from_its_last_frame() -> None:
    at = live()
    async with aclosing(at.frames()) as watcher:  # so that frames are made
        await all_of(watcher)
        async with aclosing(at.frames()) as frames:
            last, _ = await all_of(frames)
        for key in ("1.0", "1.1"):
            starts(at, key)
            at.tick()
        async with aclosing(at.frames(last)) as frames:
            for key in ("1.0", "1.1"):
                last, frame = await next_of(frames)
                assert frame["full"] is False
                assert [row["id"] for row in frame["rollouts"]] == [key]
        async with aclosing(at.frames(last)) as frames:  # which has all
            starts(at, "1.2")
            with anyio.move_on_after(0.05) as patience:
                await anext(frames)
            assert patience.cancelled_caught
        async with aclosing(at.frames(last)) as frames:
            at.tick()
            _, frame = await next_of(frames)
            assert [row["id"] for row in frame["rollouts"]] == ["1.2"]


@pytest.mark.parametrize(
    "last",
    [
        None, "", "-", "garbage", "{life}", "{life}-", "{life}-x", "{life}--1", "{life}-1-1",
        "{life}-99", "{life}-" + "9" * 5000, "{life}-\N{SUPERSCRIPT TWO}", "deadbeef-1", "-1",
        "{life}-1",  # the ring has not got what follows it any more
        "\udcff",
    ],
)  # fmt: skip
async def test_reader_with_a_foreign_id_gets_everything(last: str | None) -> None:
    at = live()
    async with aclosing(at.frames()) as watcher:
        await all_of(watcher)
        for _ in range(70):
            at.tick()
        last_id = None if last is None else last.replace("{life}", at.life)
        async with aclosing(at.frames(last_id)) as frames:
            _, frame = await next_of(frames)
        assert frame["full"] is True


async def test_reader_returning_after_an_idle_time_gets_everything() -> None:
    at = live()
    async with aclosing(at.frames()) as frames:
        last, _ = await all_of(frames)
    starts(at, "1.0")
    at.tick()  # nobody reads: what has changed is kept for nobody
    async with aclosing(at.frames(last)) as frames:
        _, (first, *_) = await all_of(frames)
    assert first["full"] is True


async def test_reader_cannot_resume_within_the_first_state() -> None:
    """No frame so far may let the reader resume from there."""
    at = live()
    starts(at, *(f"1.{index}" for index in range(1200)))
    async with aclosing(at.frames()) as frames:
        names = [(await next_of(frames))[0] for _ in range(2)]
        assert names == ["", ""]
        name, slices = await all_of(frames)
        assert name
        assert len(slices) == 2


async def test_every_reader_gets_the_end_and_nothing_after_it() -> None:
    at = live()
    ended = {"state": "finished", "text": "All done."}
    moments: list[dict[str, Any]] = []

    async def read() -> None:
        async with aclosing(at.frames()) as frames:
            async for _, data in frames:
                moments.append(orjson.loads(data)["now"])

    with anyio.fail_after(patient(15)):
        async with anyio.create_task_group() as tasks:
            for _ in range(2):
                tasks.start_soon(read)
            await eventually(lambda: len(moments) == 2)
            await at.end("finished", "All done.")
            assert at.num_readers == 0
        assert [moment.get("ended") for moment in moments] == [None, None, ended, ended]
        await read()  # one who comes late
    assert moments[-1]["ended"] == ended


async def test_end_leaves_stuck_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "_GOODBYE_S", 0.01)
    at = live()
    async with aclosing(at.frames()) as frames:
        await next_of(frames)
        with anyio.fail_after(patient(15)):
            await at.end("stopped", "The service has ended.")
        assert (await next_of(frames))[1]["now"]["ended"]["state"] == "stopped"


async def test_slow_reader_gets_the_number_of_missed_frames_and_everything() -> None:
    at = live()
    async with aclosing(at.frames()) as slow:
        await all_of(slow)
        starts(at, "1.0")
        at.tick()
        await next_of(slow)
        for _ in range(100):
            at.tick()
        starts(at, "1.1")
        _, (first, *slices) = await all_of(slow)
        assert first["full"] is True
        assert first["missed"] == 100
        ids = {row["id"] for frame in (first, *slices) for row in frame.get("rollouts", ())}
        assert ids == {"1.0", "1.1"}
        at.tick()
        _, frame = await next_of(slow)
        assert frame["full"] is False
        assert "missed" not in frame


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from(["start", "end", "tick", "read", "turn", "step", "group", "leave", "lost"]),
        max_size=150,
    ),
    st.integers(0, 3),
)
async def test_reader_of_any_speed_ends_with_whole_state(script: list[str], max_ended: int) -> None:
    at = live(max_ended=max_ended, max_groups=2)
    reader, last, num = Reader(), None, 0
    frames = at.frames()
    unread: list[Any] = []

    async def read() -> None:
        nonlocal last, reader
        name, frame = await next_of(frames)
        if frame["full"]:
            reader = Reader()
        reader.apply(frame)
        last = name or last

    try:
        await read()
        for kind in script:
            num += 1
            match kind:
                case "start":
                    starts(at, f"1.{num}")
                case "turn":
                    at.board.on_event(TurnStarted(f"1.{num % 7}", 0))
                case "end":
                    unread = [row for row in at.board.rows.values() if row.state == "live"]
                    for row in unread[:1]:
                        at.board.on_event(RolloutFinished(row.id, row.record or Trajectory("", [])))
                case "step":
                    at.board.on_event(Measured({"step": num}))
                case "group":
                    at.board.on_event(GroupStarted(f"{num}", "t", "?", None, 1))
                case "lost":
                    for _ in range(70):
                        at.tick()
                case "tick":
                    at.tick()
                case "read":
                    at.tick()
                    await read()
                case "leave":  # and comes again
                    await frames.aclose()
                    if num % 2:
                        at.tick()
                    frames = at.frames(last)
                    at.tick() if num % 3 else None
                    async with aclosing(at.frames()) as keeps:
                        await all_of(keeps)
                        at.tick()
                        await read()
        at.tick()
        while last != f"{at.life}-{at._rev}":
            await read()
    finally:
        await frames.aclose()
    frame = await at.frame()
    assert reader.rollouts == {row["id"]: row for row in frame["rollouts"]}
    assert reader.groups == {row["id"]: row for row in frame["groups"]}
    assert reader.steps == frame["steps"]
    assert at.num_readers == 0


async def test_whole_frame_equals_all_slices() -> None:
    at = live()
    starts(at, *(f"1.{index}" for index in range(1700)))
    for number in range(1300):
        at.board.on_event(Measured({"step": number}))
    at.board.on_event(GroupStarted("1", "t", "?", None, 1))
    at.tick()
    frame = await at.frame()
    reader = Reader()
    async with aclosing(at.frames()) as frames:
        _, slices = await all_of(frames)
    assert len(slices) > 5
    for slice_ in slices:
        reader.apply(slice_)
        assert sum(len(slice_.get(name, ())) for name in ("rollouts", "steps")) <= 500
    assert [*reader.rollouts.values()] == frame["rollouts"]
    assert [*reader.groups.values()] == frame["groups"]
    assert reader.steps == frame["steps"]
    assert [part["full"] for part in slices] == [True] + [False] * (len(slices) - 1)
    assert frame["full"] is True
    assert frame["about"] == slices[0]["about"]
    assert frame["now"]["in_flight"] == 1700


@pytest.mark.parametrize("where", ["at once", "amid all of it", "waiting", "before"])
async def test_cancelled_reader_is_no_longer_counted(where: str) -> None:
    at = live()
    starts(at, *(f"1.{index}" for index in range(1200)))

    async def read() -> None:
        async with aclosing(at.frames()) as frames:
            async for _ in frames:
                if where == "amid all of it":
                    await anyio.sleep_forever()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        if where == "before":
            tasks.cancel_scope.cancel()
        if where in ("amid all of it", "waiting"):
            await anyio.wait_all_tasks_blocked()
            assert at.num_readers == 1
        if where == "at once":
            await anyio.lowlevel.checkpoint()
        tasks.cancel_scope.cancel()
    assert at.num_readers == 0


async def test_loop_that_wakes_early_has_no_lag(monkeypatch: pytest.MonkeyPatch) -> None:
    at = live()
    at.every_s = 0.001
    clock = SimpleNamespace(monotonic=lambda: 5.0, time=lambda: 5.0)
    monkeypatch.setattr(live_module, "time", clock)
    async with aclosing(at.frames()) as frames, anyio.create_task_group() as tasks:
        first = (await all_of(frames))[1][0]
        tasks.start_soon(at.run)
        _, second = await next_of(frames)
        assert (first["now"]["loop_lag_ms"], second["now"]["loop_lag_ms"]) == (0, 0)
        tasks.cancel_scope.cancel()


# --- one rollout ----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_module, "_DELTA_EVERY_S", 0.001)


async def grown(
    at: Live, key: str, then: Callable[[], Coroutine[Any, Any, Any]]
) -> list[tuple[str, Any]]:
    """Return the stream of a rollout; `then` happens after its first event."""
    events: list[tuple[str, Any]] = []
    async with anyio.create_task_group() as tasks, aclosing(at.rollout_events(key)) as stream:
        with anyio.fail_after(patient(15)):
            async for event in stream:
                events.append(event)
                if len(events) == 1:
                    tasks.start_soon(then)
    return events


async def test_rollout_is_streamed_as_it_grows() -> None:
    at, record = live(), Trajectory("1.0", written(CHAT, "why?"))
    at.board.on_event(RolloutStarted(record, "1"))

    async def grow() -> None:
        for text in ("é🙂", "done"):
            turn = Turn(started_s=0.5)
            record.turns.append(turn)
            for token in written(CHAT, text + END):
                turn.output_ids.append(token)
                turn.logprobs.append(-0.5)
                await anyio.sleep(0.001)
            turn.end, turn.ended_s = TurnEnd.STOP, 1.0
        record.stop_reason = StopReason.ANSWERED
        at.board.on_event(RolloutFinished("1.0", record))

    events = await grown(at, "1.0", grow)
    names = [name for name, _ in events]
    assert (names[0], names[-1]) == ("trajectory", "end")
    assert set(names[1:-1]) == {"delta"}
    state = events[0][1]
    assert (state["state"], state["stop_reason"]) == ("live", None)
    for _, delta in events[1:-1]:
        state = apply_delta(state, delta)
    last = events[-1][1]
    assert (last["state"], last["stop_reason"]) == ("done", "answered")
    assert ["".join(turn["pieces"]) for turn in last["turns"]] == [f"é🙂{END}", f"done{END}"]
    for turn, final in zip(state["turns"], last["turns"], strict=False):
        assert turn["ids"] == final["ids"][: len(turn["ids"])]
    orjson.dumps(last)


async def test_finished_rollout_is_sent_at_once() -> None:
    at, record = live(), Trajectory("1.0", [9], stop_reason=StopReason.ANSWERED)
    at.board.on_event(RolloutStarted(record, "1"))
    at.board.on_event(RolloutFinished("1.0", record))
    at.board.on_event(RolloutScored("1.0", 1.0, "42", "the same", 0.1))
    events = [event async for event in at.rollout_events("1.0")]
    assert events[-1][0] == "end"
    assert (events[-1][1]["reward"], events[-1][1]["answer"]) == (1.0, "42")


@pytest.mark.parametrize("ending", ["abandoned", "anew", "forgotten"])
async def test_stream_of_a_rollout_ends_however_it_ends(ending: str) -> None:
    at = live(max_ended=0) if ending == "forgotten" else live()
    starts(at, "1.0")

    async def end() -> None:
        if ending == "anew":
            starts(at, "1.0")
        else:
            at.board.on_event(RolloutAbandoned("1.0"))

    events = await grown(at, "1.0", end)
    assert events[-1][0] == "end"


async def test_evicted_rollout_is_read_from_disk() -> None:
    at = live(max_kept_tokens=0)
    keys: list[str] = []

    async def read(key: str) -> dict[str, Any] | None:
        keys.append(key)
        return {"id": key} if key == "1.0" else None

    record = Trajectory("1.0", [9])
    at.board.on_event(RolloutStarted(record, "1"))
    at.board.on_event(RolloutFinished("1.0", record))
    for key in ("1.0", "1.7"):
        with pytest.raises(NotThere, match=f"'{key}'"):
            await at.rollout(key)
    at.sources = Sources(ABOUT, read_rollout=read)
    assert await at.rollout("1.0") == {"id": "1.0"}
    assert [event async for event in at.rollout_events("1.0")] == [("end", {"id": "1.0"})]
    with pytest.raises(NotThere, match=r"'1\.7'"):
        await at.rollout("1.7")
    with pytest.raises(NotThere):
        await anext(at.rollout_events("1.7"))
    assert keys == ["1.0", "1.0", "1.7", "1.7"]


async def test_group_contains_its_rollouts() -> None:
    at = live()
    with pytest.raises(NotThere, match="'1-a'"):
        await at.group("1-a")
    at.board.on_event(GroupStarted("1-a", "a", [{"role": "user", "content": "why?"}], "42", 2))
    starts(at, "1-a.0", "1-a.1")
    starts(at, "1-a.0")  # anew
    group = await at.group("1-a")
    assert (group["task"], group["answer"], group["size"]) == ("a", "42", 2)
    assert group["prompt"] == "why?"
    assert [row["id"] for row in group["rollouts"]] == ["1-a.0", "1-a.1"]
    assert [row["kept"] for row in group["rollouts"]] == [None, None]


async def test_partly_evicted_group_is_read_from_disk() -> None:
    at = live(max_ended=1, max_groups=1)

    async def read(name: str) -> GroupDetails | None:
        if name not in ("1-a", "2-b"):
            return None
        row = GroupRow(name, "a", "why?", "42", 2, 0, end=9).to_row()
        return {**row, "prompt": "from the folder", "rollouts": []}

    at.sources = Sources(ABOUT, read_group=read)
    for name in ("1-a", "2-b"):
        at.board.on_event(GroupStarted(name, "a", "why?", "42", 2))
        starts(at, f"{name}.0", f"{name}.1")
    assert (await at.group("1-a"))["prompt"] == "from the folder"
    for key in ("2-b.0", "2-b.1"):
        at.board.on_event(RolloutFinished(key, Trajectory(key, [9])))
    assert (await at.group("2-b"))["prompt"] == "why?"  # it is not written down yet
    at.board.on_event(GroupFinished("2-b"))
    assert (await at.group("2-b"))["prompt"] == "from the folder"
    with pytest.raises(NotThere, match="'3-c'"):
        await at.group("3-c")


async def test_without_a_folder_there_are_no_runs(tmp_path: Path) -> None:
    at = live()
    assert await at.runs() == []
    with pytest.raises(NotThere, match="'x'"):
        await at.curves("x")
