"""The board: rows, groups and counters, for any events in any order."""

from __future__ import annotations

import copy
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.events import (
    CallFinished,
    CallStarted,
    ClientAwaited,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutAbandoned,
    RolloutFinished,
    RolloutScored,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
    WeightsLoaded,
)
from agentloop.inference.scheduling.placement import Decision
from agentloop.observe import board as board_module
from agentloop.observe.board import Board
from agentloop.observe.bottleneck import ServedOn
from agentloop.trajectory import StopReason, ToolCall, ToolCallStatus, ToolResult, Trajectory, Turn
from tests.fakes import Clock

WEB = Path(board_module.__file__).with_name("web")

KEYS = ("1-a.0", "1-a.1", "2-b.0", "2-b.1", "loose")
GROUPS = ("1-a", "2-b", "3-c")
DECISION = Decision(None, "fake", "the only one", ())
MAX_LANES = 64


def board(**bounds: Any) -> tuple[Board, Clock]:
    clock = Clock(1_790_000_000.0)
    return Board(clock=clock, **bounds), clock


def record(key: str, num_tokens: int = 2) -> Trajectory:
    turn = Turn(output_ids=[1] * num_tokens, logprobs=[0.0] * num_tokens, cached_tokens=1)
    return Trajectory(key, [9, 9], [turn], stop_reason=StopReason.ANSWERED)


def call_of(key: str, number: int = 0) -> ToolCall:
    return ToolCall(f"{key}-{number}", "python", {}, "", 0, 1)


def result_of(key: str, status: ToolCallStatus, number: int = 0, took_s: float = 1.0) -> ToolResult:
    return ToolResult(f"{key}-{number}", "python", status, "", 0.0, took_s / 4, took_s)


def event_of(kind: str, key: str, number: int) -> Event:
    """Return an event of this kind about a rollout or its group."""
    trajectory, group = record(key, number), key.rpartition(".")[0]
    statuses = list(ToolCallStatus)
    events: dict[str, Event] = {
        "start": RolloutStarted(trajectory, group),
        "turn": TurnStarted(key, number),
        "placed": TurnPlaced(key, number, f"http://{number % 3}", DECISION),
        "tokens": TokensSampled(key, number, [1] * number, ""),
        "moved": TurnMoved(key, "http://0", "gone"),
        "call": CallStarted(key, 0, call_of(key, number)),
        "called": CallFinished(key, 0, result_of(key, statuses[number % len(statuses)], number)),
        "sampled": TurnSampled(key, 0),
        "turned": TurnFinished(key, 0, trajectory.turns[0]),
        "finish": RolloutFinished(key, trajectory),
        "abandon": RolloutAbandoned(key),
        "score": RolloutScored(key, float(number % 2), "42", "the same", number / 10),
        "group": GroupStarted(group, "task", "why?", "42", 2),
        "grouped": GroupFinished(group, {key: 0.5}, {}, 0.5, True),
        "measured": Measured({"step": number, "reward": 0.5}),
        "weights": WeightsLoaded(str(number), 0.1, [], []),
    }
    return events[kind]


KINDS = (
    *("start", "turn", "placed", "tokens", "moved", "call", "called", "sampled", "turned"),
    *("finish", "abandon", "score", "group", "grouped", "measured", "weights"),
)
steps = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(KINDS), st.sampled_from(KEYS), st.integers(0, 9)),
        # More of what makes rows come and go.
        st.tuples(st.sampled_from(("start", "finish")), st.sampled_from(KEYS), st.integers(0, 9)),
        st.tuples(st.just("take"), st.just(""), st.integers(0, 3)),
        st.tuples(st.just("later"), st.just(""), st.integers(0, 5)),
    ),
    max_size=120,
)


class Reader:
    """The state of a reader that applies frames as the page does."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Any] = {}
        self.groups: dict[str, Any] = {}
        self.steps: list[Any] = []

    def apply(self, frame: Mapping[str, Any]) -> None:
        gone = frame.get("gone", {})
        for name, rows in (("rollouts", self.rollouts), ("groups", self.groups)):
            for row in frame.get(name, ()):
                rows[row["id"]] = copy.deepcopy(row)  # the board goes on writing into it
            for key in gone.get(name, ()):
                rows.pop(key, None)
        self.steps += frame.get("steps", ())

    def read_all(self, board: Board, max_rows: int, *, taken: bool) -> Reader:
        for slice_ in board.all(max_rows, taken=taken):
            self.apply(slice_)
        return self


def play_script(
    script: Sequence[tuple[str, str, int]], board: Board, clock: Clock, reader: Reader | None = None
) -> None:
    for kind, key, number in script:
        if kind == "take":
            taken = board.take(number)
            if reader is not None:
                assert len(taken.get("rollouts", ())) <= number
                reader.apply(taken)
        elif kind == "later":
            clock.now_s += number
            board.tick()
        else:
            board.on_event(event_of(kind, key, number))
            clock.now_s += 0.001


@settings(max_examples=60, deadline=None)
@given(steps, st.integers(0, 3), st.integers(1, 3), st.integers(0, 20))
def test_memory_is_bounded_for_any_events(
    script: list[tuple[str, str, int]], max_ended: int, max_groups: int, max_kept: int
) -> None:
    made, clock = board(max_ended=max_ended, max_groups=max_groups, max_kept_tokens=max_kept)
    for step in script:
        play_script([step], made, clock)
        rows = made.rows.values()
        live = [row for row in rows if row.state == "live"]
        ended = [row for row in rows if row.state != "live"]
        assert made.num_in_flight == len(live)
        assert len(ended) <= max_ended
        assert len(made.groups) <= max_groups
        kept = [row.record for row in ended if row.record is not None]
        assert sum(len(r.prompt_ids) + r.num_response_tokens for r in kept) <= max_kept
        assert all(row.record is not None for row in live)
        for row in rows:
            assert len(row.lanes) <= MAX_LANES
            starts = [at for _, at in row.lanes]
            assert starts == sorted(starts)
            assert (row.end is None) == (row.state == "live")


@settings(max_examples=60, deadline=None)
@given(steps, steps, steps, st.integers(0, 3), st.integers(1, 3), st.integers(1, 4))
def test_applying_all_changes_gives_the_whole_state(
    before: list[tuple[str, str, int]],
    between: list[tuple[str, str, int]],
    after: list[tuple[str, str, int]],
    max_ended: int,
    max_groups: int,
    max_rows: int,
) -> None:
    made, clock = board(max_ended=max_ended, max_groups=max_groups)
    play_script(before, made, clock)
    reader = Reader()
    # All of it comes in slices, and meanwhile things go on.
    slices = made.all(max_rows, taken=True)
    reader.apply(next(slices))
    play_script([step for step in between if step[0] != "take"], made, clock)
    for slice_ in slices:
        reader.apply(slice_)
    play_script(after, made, clock, reader)
    while made._lane_changes or made._token_changes:
        reader.apply(made.take(max_rows))
    reader.apply(made.take(max_rows))
    fresh = Reader().read_all(made, 2, taken=False)
    assert reader.rollouts == fresh.rollouts
    assert reader.groups == fresh.groups
    assert reader.steps == fresh.steps
    assert reader.rollouts.keys() == made.rows.keys()


@settings(max_examples=60, deadline=None)
@given(steps, steps)
def test_skip_discards_changes(
    before: list[tuple[str, str, int]], after: list[tuple[str, str, int]]
) -> None:
    made, clock = board(max_ended=2, max_groups=2)
    play_script(before, made, clock)
    made.skip()
    assert made.take(1000) == {}
    reader = Reader().read_all(made, 2, taken=True)
    play_script([step for step in after if step[0] != "take"], made, clock)
    reader.apply(made.take(1000))
    fresh = Reader().read_all(made, 2, taken=False)
    assert (reader.rollouts, reader.groups) == (fresh.rollouts, fresh.groups)
    assert reader.steps == fresh.steps


legal = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["finish", "abandon", "goes on"])), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(legal, st.integers(0, 2**16))
def test_counters_are_correct_for_valid_histories(
    rollouts: list[tuple[int, str]], seed: int
) -> None:
    draw = random.Random(seed)
    scripts = []
    for index, (number, end) in enumerate(rollouts):
        key = f"1-a.{index}"
        script = [("start", key, 1), ("turn", key, 0), ("placed", key, 0)]
        script += [("tokens", key, 1)] * number
        script += [] if end == "goes on" else [(end, key, 1)]
        scripts.append(script)
    made, clock = board(max_ended=3)
    while scripts:  # interleaved
        script = draw.choice(scripts)
        play_script([script.pop(0)], made, clock)
        scripts = [script for script in scripts if script]
    ends = Counter(end for _, end in rollouts)
    counters = made.now()
    assert counters["in_flight"] == ends["goes on"]
    assert counters["rollouts_done"] == ends["finish"] + ends["abandon"]
    for index, (number, end) in enumerate(rollouts):
        if end == "goes on":
            assert made.rows[f"1-a.{index}"].tokens == number


def test_restarted_rollout_is_in_flight_once() -> None:
    made, clock = board()
    start = ("start", "1-a.0", 1)
    for script in (
        [start, start],
        [("finish", "1-a.0", 1)] * 2,
        [start],
        [("abandon", "1-a.0", 1)],
    ):
        play_script(script, made, clock)
    assert made.now()["in_flight"] == 0
    assert made.now()["rollouts_done"] == 2


def test_evicted_rollout_that_restarts_is_present() -> None:
    made, clock = board(max_ended=0)
    reader = Reader().read_all(made, 9, taken=True)
    play_script([("start", "1-a.0", 1), ("finish", "1-a.0", 1), ("start", "1-a.0", 1)], made, clock)
    reader.apply(made.take(9))
    assert [row["state"] for row in reader.rollouts.values()] == ["live"]


def test_evicted_group_that_restarts_is_present() -> None:
    made, clock = board(max_groups=1)
    reader = Reader().read_all(made, 9, taken=True)
    play_script([("group", "1-a.0", 1), ("group", "2-b.0", 1), ("group", "1-a.0", 1)], made, clock)
    reader.apply(made.take(9))
    assert [*reader.groups] == ["1-a"]


def test_evaluation_groups_do_not_displace_training_groups() -> None:
    made, _ = board(max_groups=2)
    reader = Reader().read_all(made, 9, taken=True)
    for number in range(3):
        made.on_event(GroupStarted(f"{number}-a", "a", "why?", "42", 8))
        for task in range(3):
            made.on_event(GroupStarted(f"{number}-held-out-{task}-b", "b", "?", "1", 1, False))
    reader.apply(made.take(9))
    assert [*reader.groups] == ["1-a", "2-a", "2-held-out-1-b", "2-held-out-2-b"]


def test_lanes_follow_the_state_of_a_rollout() -> None:
    made, clock = board()
    key = "1-a.0"

    def after(seconds: float, *kinds: str, number: int = 1) -> None:
        clock.now_s += seconds
        for kind in kinds:
            made.on_event(event_of(kind, key, number))

    after(1, "start", "turn")
    after(1, "placed")
    after(1, "tokens", "tokens", "call")
    after(1, "sampled")
    after(1, "called", "turned", "turn", "placed", "tokens", "sampled", "finish")
    after(2, "score", number=5)
    (row,) = made.take(9)["rollouts"]
    # In milliseconds since the board began; the reward took half of a second.
    assert [(lane, round(at, -2)) for lane, at in row["lanes"]] == [
        ("wait", 1000), ("prefill", 2000), ("decode", 3000), ("tool", 4000), ("wait", 5000),
        ("prefill", 5000), ("decode", 5000), ("siblings", 5000), ("reward", 6500),
    ]  # fmt: skip
    assert (row["start"], row["end"]) == (1000, 7000)
    assert (row["turn"], row["tokens"], row["calls"], row["reward"]) == (2, 3, 1, 1.0)


def test_time_of_rollouts_is_split_by_what_they_do() -> None:
    made, clock = board()
    trajectory = record("1-a.0")
    trajectory.created_unix_s = clock.now_s
    trajectory.turns[0].results = [ToolResult("c", "python", ToolCallStatus.OK, "", 3.0, 8.0, 9.0)]
    script: list[tuple[float, Event]] = [
        (0.0, RolloutStarted(trajectory, "1-a")),
        (1.0, event_of("placed", "1-a.0", 1)),
        (1.0, event_of("tokens", "1-a.0", 1)),
        (1.0, event_of("call", "1-a.0", 1)),
        (0.0, event_of("sampled", "1-a.0", 1)),
        (6.0, event_of("called", "1-a.0", 0)),
        (0.0, event_of("turned", "1-a.0", 0)),
        (0.0, event_of("finish", "1-a.0", 0)),
        (4.0, Measured({"step": 1, "learn_s": 3.0, "sync_s": 1.0})),
    ]
    for seconds, event in script:
        clock.now_s += seconds
        made.on_event(event)
    spent = made.spent().by_part()
    assert {str(part): round(seconds, 3) for part, seconds in spent.items()} == {
        "kv": 1.0, "prefill": 1.0, "decode": 1.0, "queue": 5.0, "tool": 1.0, "sync": 1.0,
        "learner": 3.0,
    }  # fmt: skip
    assert made.spent().sentence() == (
        "Rollouts wait for sandbox slots: 5.0 of 6.0 s per call; raise sandbox.workers"
    )


def test_branch_waits_for_its_client_between_requests() -> None:
    made, clock = board()
    key = "1-a.0"
    for kind in ("start", "turn", "placed", "tokens", "sampled", "turned"):
        made.on_event(event_of(kind, key, 1))
    clock.now_s += 1
    made.on_event(ClientAwaited(key))
    clock.now_s += 60
    for kind in ("turn", "placed", "tokens", "sampled", "turned"):
        made.on_event(event_of(kind, key, 1))
    made.on_event(ClientAwaited(key))
    made.on_event(event_of("finish", key, 1))
    made.on_event(ClientAwaited(key))  # late: the row has ended
    lanes = [(lane, at) for lane, at in made.rows[key].lanes if lane in ("client", "decode")]
    assert lanes == [("decode", 0), ("client", 1000), ("decode", 61_000), ("client", 61_000)]


def test_malformed_call_has_no_tool_lane() -> None:
    made, clock = board()
    play_script(
        [("start", "1-a.0", 0), ("placed", "1-a.0", 0), ("tokens", "1-a.0", 1)], made, clock
    )
    made.on_event(CallStarted("1-a.0", 0, replace(call_of("1-a.0"), error="not JSON")))
    made.on_event(TurnSampled("1-a.0", 0))
    assert [lane for lane, _ in made.rows["1-a.0"].lanes] == ["wait", "prefill", "decode"]


def test_endpoint_samples_at_once_and_counts_its_tokens() -> None:
    made, clock = board()
    made.on_event(RolloutStarted(Trajectory("1-a.0", []), "1-a"))
    made.on_event(TurnStarted("1-a.0", 0))
    clock.now_s += 5.0
    assert re.match("Rollouts mostly decode: .* endpoint", made.spent().sentence(ServedOn.ENDPOINT))
    made.on_event(RolloutFinished("1-a.0", Trajectory("1-a.0", [], [Turn(text="42")]), 59))
    assert (made.rows["1-a.0"].turn, made.rows["1-a.0"].tokens) == (1, 59)


def test_old_lanes_are_dropped_and_marked() -> None:
    made, clock = board()
    turn = [("turn", "1-a.0", 0), ("placed", "1-a.0", 0), ("tokens", "1-a.0", 1)]
    end = [("finish", "1-a.0", 1), ("later", "", 2), ("score", "1-a.0", 1)]
    play_script([("start", "1-a.0", 1), *turn * 40, *end], made, clock)
    (row,) = made.take(9)["rollouts"]
    assert len(row["lanes"]) == MAX_LANES
    assert row["more"] is True
    assert row["lanes"][-1][0] == "reward"


def test_events_of_unknown_rollouts_are_ignored() -> None:
    made, clock = board()
    kinds = [kind for kind in KINDS if kind not in ("start", "group", "measured", "weights")]
    play_script([(kind, "1-a.0", 1) for kind in kinds], made, clock)
    assert made.take(9) == {}
    assert made.now()["in_flight"] == made.now()["rollouts_done"] == 0


def test_finished_group_updates_its_rollouts() -> None:
    made, clock = board()
    play_script([("group", "1-a.0", 1)], made, clock)
    play_script([("start", key, 1) for key in ("1-a.0", "1-a.1")], made, clock)
    assert made.take(9)["groups"][0]["state"] == "live"
    play_script([("finish", key, 1) for key in ("1-a.0", "1-a.1")], made, clock)
    made.on_event(GroupFinished("1-a", {"1-a.0": 0.5}, {"1-a.1": "infrastructure"}, 0.5, True))
    (group,) = made.take(9)["groups"]
    assert (group["state"], group["num_done"], group["kept"]) == ("done", 2, 1)
    assert (group["mean_reward"], group["has_signal"]) == (0.5, True)
    assert made.rows["1-a.0"].advantage == 0.5
    assert made.rows["1-a.1"].dropped == "infrastructure"
    assert made.now()["groups_open"] == 0


def test_group_has_its_question_and_the_first_wrong_answer() -> None:
    made, _ = board()
    prompt = [{"role": "user", "content": "What is\n37 times 48? " + "x" * 500}]
    made.on_event(GroupStarted("1-a", "a", prompt, "1776", 3))
    for index, (reward, answer) in enumerate([(1.0, "1776"), (0.0, "1766"), (0.0, "9")]):
        key = f"1-a.{index}"
        made.on_event(RolloutStarted(Trajectory(key, [9]), "1-a"))
        made.on_event(RolloutFinished(key, Trajectory(key, [9], answer="text")))
        assert made.rows[key].to_row()["answer"] == "text"
        made.on_event(RolloutScored(key, reward, answer, "", 0.0))
        assert made.rows[key].to_row()["answer"] == answer
    (group,) = made.take(9)["groups"]
    assert group["question"].startswith("What is 37 times 48? x")
    assert len(group["question"]) < 200
    assert (group["answer"], group["wrong"]) == ("1776", {"id": "1-a.1", "answer": "1766"})


def test_group_counts_rollouts_and_not_their_conversations() -> None:
    made, clock = board()
    keys = ("1-a.0", "1-a.0+1", "1-a.0+checker", "1-a.1")
    play_script([("group", "1-a.0", 1), *(("start", key, 1) for key in keys)], made, clock)
    play_script([("finish", key, 1) for key in keys], made, clock)
    made.on_event(GroupFinished("1-a", dict.fromkeys(keys, 0.5), {}, 0.5, True))
    (group,) = made.take(9)["groups"]
    assert (group["num_done"], group["kept"]) == (2, 2)


def test_page_reads_every_field_of_a_row_by_its_name() -> None:
    """The scripts are not typed: a field that is renamed here must be renamed there."""
    made, clock = board()
    play_script([("group", "1-a.0", 1), ("start", "1-a.0", 1)], made, clock)
    taken = made.take(9)
    scripts = "".join(file.read_text("utf-8") for file in WEB.glob("*.js"))
    for row in (*taken["rollouts"], *taken["groups"]):
        unread = {name for name in row if not re.search(rf"\b{name}\b", scripts)}
        assert unread == set()


def test_rates_cover_the_last_seconds() -> None:
    made, clock = board()
    play_script([("start", "1-a.0", 1), ("turn", "1-a.0", 0)], made, clock)
    clock.now_s = made.t0
    assert made.now()["tokens_per_s"] == 0
    for _ in range(40):
        clock.now_s += 0.5
        made.on_event(TokensSampled("1-a.0", 0, [1] * 50, ""))
        made.tick()
    assert made.now()["tokens_per_s"] == pytest.approx(100, rel=0.05)
    for _ in range(20):
        clock.now_s += 0.5
        made.tick()
    assert made.now()["tokens_per_s"] == 0


def test_clock_that_goes_backwards_gives_no_rate() -> None:
    made, clock = board()
    play_script([("start", "1-a.0", 1), ("tokens", "1-a.0", 9)], made, clock)
    clock.now_s -= 3600
    made.tick()
    assert made.now()["tokens_per_s"] == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=50))
def test_percentiles_are_those_of_the_last_calls(durations: list[float]) -> None:
    made, clock = board()
    play_script([("start", "1-a.0", 1)], made, clock)
    for seconds in durations:
        made.on_event(
            CallFinished("1-a.0", 0, result_of("1-a.0", ToolCallStatus.OK, took_s=seconds))
        )
    tools = made.tools()
    assert tools["calls"] == {"ok": len(durations)}
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        value = tools["latency_ms"][name]
        assert tools["ran_ms"][name] <= value
        below = sum(round(1000 * duration, 1) <= value for duration in durations)
        assert below >= share * len(durations)  # nearest rank: so many are not above it
        assert value in [round(1000 * duration, 1) for duration in durations]


def test_failed_calls_are_those_caused_by_the_model() -> None:
    made, clock = board()
    play_script([("start", "1-a.0", 1)], made, clock)
    for status in ToolCallStatus:
        made.on_event(CallFinished("1-a.0", 0, result_of("1-a.0", status)))
    assert made.rows["1-a.0"].failed_calls == sum(status.failed for status in ToolCallStatus)
    assert sum(made.tools()["calls"].values()) == len(ToolCallStatus)


def test_cached_fraction_is_relative_to_prompt_tokens() -> None:
    made, clock = board()
    assert made.cached_fraction("http://0") is None
    play_script([("start", "1-a.0", 2), ("placed", "1-a.0", 0)], made, clock)
    made.on_event(TurnFinished("1-a.0", 0, record("1-a.0").turns[0]))
    assert made.cached_fraction("http://0") == 0.5  # one of two tokens


def test_newest_rows_of_metrics_are_kept() -> None:
    made, _ = board()
    reader = Reader().read_all(made, 9, taken=True)
    for number in range(5_010):
        made.on_event(Measured({"step": number}))
    reader.apply(made.take(1))
    assert len(reader.steps) == 5_000
    assert reader.steps[-1] == {"step": 5_009, "unix_s": made.t0}
    assert "steps" not in made.take(1)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(1, 7))
def test_frequently_changing_rows_do_not_starve_others(num: int, max_rows: int) -> None:
    """A row that changes once is sent even while others change all the time."""
    made, clock = board()
    keys = [f"1-a.{index}" for index in range(num)]
    play_script([("start", key, 1) for key in keys], made, clock)
    changed: set[str] = set()
    for _ in range(-(-num // max_rows)):
        changed |= {row["id"] for row in made.take(max_rows)["rollouts"]}
        play_script([("turn", key, 0) for key in changed], made, clock)
    assert changed == set(keys)
