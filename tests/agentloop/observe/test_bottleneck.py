"""Where the time of rollouts goes, for any spans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.observe.bottleneck import (
    Part,
    RecentTime,
    ServedOn,
    Spent,
    served_on,
    split_tool_time,
)
from agentloop.trajectory import union_s

SECONDS = st.floats(0.0, 100.0, allow_nan=False)


def spent(window_s: float = 60.0, busy_s: float = 60.0, **seconds: float) -> Spent:
    total = Spent(busy_s=busy_s, window_s=window_s, num_turns=10, num_calls=10)
    total.seconds.update({Part(name): value for name, value in seconds.items()})
    return total


def test_sentence_names_the_bottleneck_its_size_and_its_setting() -> None:
    assert spent(queue=26.0, tool=3.0, decode=8.0).sentence() == (
        "Rollouts wait for sandbox slots: 2.6 of 2.9 s per call; raise sandbox.workers"
    )
    assert spent(queue=26.0, tool=3.0, decode=8.0).sentence(has_slots=False) == (
        "Rollouts wait for sandbox slots: 2.6 of 2.9 s per call; no worker of the sandbox is "
        "available, see the log"
    )
    assert spent(kv=1.0, decode=4.0).sentence(ServedOn.GPU) == (
        "Rollouts mostly decode: 400 of 500 ms per turn; raise server.count, or server.tp_size for "
        "a large model"
    )


@pytest.mark.parametrize("part", ["kv", "prefill", "decode"])
def test_no_further_servers_are_recommended_on_a_cpu(part: str) -> None:
    """They would share its cores."""
    assert "server.count" not in spent(**{part: 5.0}).sentence(ServedOn.CPU)
    assert "server.count" in spent(**{part: 5.0}).sentence(ServedOn.GPU)
    assert "server." not in spent(**{part: 5.0}).sentence(ServedOn.ATTACHED)
    unknown = spent(**{part: 5.0}).sentence(ServedOn.UNKNOWN)
    assert "on a CPU" in unknown
    assert "on GPUs" in unknown


def test_shorter_responses_are_recommended_where_some_were_truncated() -> None:
    decoding = spent(decode=5.0)
    assert decoding.sentence(ServedOn.CPU).endswith("use a smaller model")
    assert "budget.max_response_tokens" not in decoding.sentence(ServedOn.UNKNOWN)
    recent = RecentTime(0.0)
    recent.count(1.0, turns=10, truncated=1)
    decoding.add(recent.spent(2.0))
    advice = "use a smaller model or lower budget.max_response_tokens"
    assert advice in decoding.sentence(ServedOn.CPU)


def test_settings_say_which_hardware_serves() -> None:
    assert served_on(["http://gpu1:30000"], "auto") is ServedOn.ATTACHED
    assert served_on([], "cuda") is ServedOn.GPU
    assert served_on([], "cpu", has_accelerator=True) is ServedOn.CPU
    assert served_on([], "auto") is ServedOn.UNKNOWN
    assert served_on([], "auto", has_accelerator=True) is ServedOn.GPU
    assert served_on([], "auto", has_accelerator=False) is ServedOn.CPU


def test_learner_counts_while_no_rollout_is_in_flight() -> None:
    assert spent(busy_s=20.0, decode=500.0, learner=30.0).sentence() == (
        "Servers wait for the learner: 30.0 of 60.0 s; raise loop.max_staleness"
    )
    assert Part.LEARNER not in spent(decode=500.0, learner=30.0).by_part()


@pytest.mark.parametrize("nothing", [Spent(), Spent(window_s=60.0), spent(busy_s=1.0, decode=9.0)])
def test_without_a_bottleneck_there_is_no_sentence(nothing: Spent) -> None:
    assert nothing.sentence() == ""


@given(st.dictionaries(st.sampled_from([part for part in Part if part != "other"]), SECONDS))
def test_all_parts_together_are_the_window(seconds: dict[Part, float]) -> None:
    for busy_s in (0.0, 13.0, 60.0):
        total = spent(busy_s=busy_s, **seconds)
        assert sum(total.by_part().values()) == pytest.approx(60.0, abs=1e-3)


@given(st.lists(st.tuples(SECONDS, SECONDS, SECONDS)), SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_queue_and_run_are_the_whole_time_at_tools(
    calls: list[tuple[float, float, float]], start: float, duration: float, share: float
) -> None:
    sorted_calls = [tuple(sorted(call)) for call in calls]
    queued_s, ran_s = split_tool_time(sorted_calls, start, start + duration, queued_share=share)  # type: ignore[arg-type]
    assert min(queued_s, ran_s) >= -1e-9
    assert queued_s + ran_s == pytest.approx(duration)


def test_call_waits_before_it_runs() -> None:
    assert split_tool_time([(0.0, 2.0, 3.0)], 1.0, 3.0) == (1.0, 1.0)
    assert split_tool_time([(0.0, 2.0, 4.0), (0.0, 1.0, 2.0)], 0.0, 4.0) == (1.0, 3.0)
    assert split_tool_time([], 0.0, 4.0, queued_share=0.25) == (1.0, 3.0)


@given(st.lists(st.tuples(SECONDS, SECONDS)))
def test_union_is_at_most_the_sum(spans: list[tuple[float, float]]) -> None:
    lengths = [max(0.0, end - start) for start, end in spans]
    assert max(lengths, default=0.0) - 1e-9 <= union_s(spans) <= sum(lengths) + 1e-9


def test_two_rollouts_share_the_time_of_the_clock() -> None:
    recent = RecentTime(start=0.0)
    recent.enter("a", Part.KV, 0.0, ())
    recent.enter("b", Part.KV, 0.0, ())
    recent.enter("a", Part.DECODE, 2.0, ())
    recent.enter("b", None, 2.0, ())
    recent.enter("a", None, 6.0, ())
    total = recent.spent(10.0)
    assert (total.window_s, total.busy_s) == (10.0, 6.0)
    assert total.seconds == {Part.KV: 4.0, Part.DECODE: 4.0}
    assert total.by_part() == {Part.KV: 3.0, Part.DECODE: 3.0, Part.OTHER: 4.0}


def test_time_in_progress_counts_already() -> None:
    recent = RecentTime(start=0.0)
    recent.enter("a", Part.TOOL, 1.0, ())
    total = recent.spent(5.0, queued_share=0.75)
    assert total.busy_s == 4.0
    assert total.seconds == {Part.QUEUE: 3.0, Part.TOOL: 1.0}


def test_only_the_last_minute_counts() -> None:
    recent = RecentTime(start=0.0)
    recent.enter("a", Part.DECODE, 0.0, ())
    recent.enter("a", None, 100.0, ())
    recent.add(Part.LEARNER, 100.0, 130.0)
    total = recent.spent(130.0)
    assert total.window_s == pytest.approx(59.0)
    assert total.seconds == pytest.approx({Part.DECODE: 29.0, Part.LEARNER: 30.0})
    assert not recent.spent(1000.0).by_part().keys() - {Part.OTHER}
