"""The simulation runs the real parts to the end, and never beats its bound."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.observe import sample
from agentloop.trajectory import Trajectory, Turn
from bench.router import (
    POLICIES,
    Options,
    RolloutSpec,
    Simulation,
    TurnSpec,
    lower_bound_s,
    make_trace,
    read_sessions,
    run_all,
    table,
    table_by_prompt,
)
from bench.server_model import ServerParams

SMALL = Options(num_servers=3, params=ServerParams(capacity=16_000), budget=3000)


def small_trace(seed: int) -> list[RolloutSpec]:
    return make_trace(seed, num_groups=6, group_size=8, budget=3000)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_rollout_ends_once_with_its_tokens(policy: str) -> None:
    trace = small_trace(5)
    simulation = Simulation(trace, policy, 1, SMALL)
    result = simulation.run()
    num_tokens = sum(spec.num_output for spec in trace)
    assert result.goodput * result.makespan_s == pytest.approx(num_tokens)
    assert sum(server.num_decoded for server in simulation.servers) == num_tokens
    assert len(simulation._ttft) == sum(len(spec.turns) for spec in trace)
    assert min(simulation._ttft) > 0
    assert 0 <= result.prefix_hits < 1
    assert result.makespan_s >= lower_bound_s(trace, 3, SMALL.params)
    assert (result.num_refused, simulation.admission.num_in_flight) == (0, 0)
    assert len(simulation.admission.forecast) == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_same_seed_gives_the_same_run(policy: str) -> None:
    first, second = (Simulation(small_trace(5), policy, 3, SMALL).run() for _ in range(2))
    for result in (first, second):  # wall-clock times differ
        result.wall_s = 0.0
    assert first == second


def test_turns_that_wait_too_long_are_refused_and_counted() -> None:
    options = replace(SMALL, wait_timeout_s=0.5, params=ServerParams(capacity=6000))
    assert Simulation(small_trace(5), "kv", 1, options).run().num_refused > 0


TURNS = st.lists(
    st.builds(TurnSpec, st.integers(1, 400), st.integers(0, 80), st.floats(0, 3)),
    min_size=1,
    max_size=4,
)


@pytest.mark.parametrize("policy", POLICIES)
@given(
    groups=st.lists(
        st.tuples(st.integers(1, 600), st.lists(TURNS, min_size=1, max_size=5)),
        min_size=1,
        max_size=6,
    ),
    num_servers=st.integers(1, 3),
    capacity=st.integers(4000, 8000),
    free_prefill=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_no_policy_goes_below_the_bound(
    policy: str,
    groups: list[tuple[int, list[list[TurnSpec]]]],
    num_servers: int,
    capacity: int,
    free_prefill: bool,
) -> None:
    """The bound is tightest if prefills cost nothing, because it leaves out little else."""
    params = ServerParams(capacity=capacity, max_running=4)
    if free_prefill:
        params = replace(params, prefill_s=0.0, prefill_s_per_token=0.0)
    trace = [
        RolloutSpec(f"g{number}", num_prompt, tuple(turns))
        for number, (num_prompt, members) in enumerate(groups)
        for turns in members
    ]
    options = Options(num_servers=num_servers, params=params, budget=2000)
    result = Simulation(trace, policy, 1, options).run()
    assert result.num_refused == 0
    assert result.makespan_s >= lower_bound_s(trace, num_servers, params) - 1e-6


def test_bound_is_met_by_one_rollout_alone() -> None:
    params = ServerParams(prefill_s=0.0)
    trace = [RolloutSpec("g", 500, (TurnSpec(300, 50, 2.0), TurnSpec(200, 0, 0.0)))]
    result = Simulation(trace, "kv", 1, Options(num_servers=1, params=params)).run()
    # It only leaves out that a turn's last token gets its key and value in the next prefill.
    assert result.makespan_s == pytest.approx(lower_bound_s(trace, 1, params), rel=1e-3)


def test_lengths_of_sessions_are_read_and_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "sessions.jsonl"
    row = {"group": "g1", "prompt_tokens": 812, "turns": [[100, 20, 0.5], [50, 0, 0]]}
    path.write_text(json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    trace = read_sessions(path)
    assert trace == [RolloutSpec("g1", 812, (TurnSpec(100, 20, 0.5), TurnSpec(50, 0, 0.0)))] * 2
    path.write_text(json.dumps(row) + '\n{"group": "g1"}\n')
    with pytest.raises(ValueError, match=r"line 2: .*prompt_ids"):
        read_sessions(path)


def test_recorded_sessions_share_equal_prompts_and_keep_waits(tmp_path: Path) -> None:
    turns = [Turn([1, 2], observation_ids=[3] * 4, started_s=1.0, generated_s=2.0)]
    turns += [Turn(), Turn([5], observation_ids=[6], started_s=2.75, generated_s=3.0)]
    rows = [
        Trajectory(name, prompt, list(turns)).to_dict()
        for name, prompt in (("a", [7, 8]), ("b", [7, 8]), ("c", [7, 9]))
    ]
    empty = Trajectory("d", [7, 8]).to_dict()
    path = tmp_path / "trajectories" / "group-0000001.jsonl"
    path.parent.mkdir()
    lines = [{"group": 4, "trajectory": row} for row in (*rows, empty)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_sessions(tmp_path)
    assert [spec.turns for spec in trace] == [(TurnSpec(2, 4, 0.75), TurnSpec(1, 1, 0.0))] * 3
    assert [spec.group == trace[0].group for spec in trace] == [True, True, False]
    path.write_text(json.dumps(rows[0]) + "\n")  # without the run's folder
    assert [spec.turns for spec in read_sessions(path)] == [trace[0].turns]
    path.write_text("\n")
    with pytest.raises(ValueError, match="no recorded rollout"):
        read_sessions(path)


def test_sample_run_is_replayed_with_every_sampled_token() -> None:
    trace = read_sessions(Path(sample.__file__).parent)
    result = Simulation(trace, "kv", 1, replace(SMALL, num_servers=1)).run()
    assert result.goodput * result.makespan_s == pytest.approx(
        sum(spec.num_output for spec in trace)
    )


def test_made_trace_keeps_its_bounds() -> None:
    trace = make_trace(1, num_groups=20, max_turns=7, budget=4000)
    assert len(trace) == 640
    for spec in trace:
        used = spec.num_output + sum(turn.num_tool for turn in spec.turns)
        assert used <= 4000
        assert len(spec.turns) <= 7
        assert min(turn.num_output for turn in spec.turns) >= 1
    assert len({spec.num_prompt for spec in trace if spec.group == "g3"}) == 1
    assert trace == make_trace(1, num_groups=20, max_turns=7, budget=4000)


def test_table_has_a_row_for_each_policy() -> None:
    results = run_all(["cache_aware", "kv"], [1, 2], SMALL, small_trace)
    lines = table(results).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["cache_aware", "kv"]
    assert len({line.count("|") for line in lines}) == 1


def test_first_tokens_are_told_by_length_of_the_prompt() -> None:
    trace = [
        RolloutSpec("g", 100, (TurnSpec(10, 3000, 1.0), TurnSpec(10, 6000, 1.0), TurnSpec(9, 0, 0)))
    ]
    (result,) = run_all(["kv"], [1], SMALL, lambda _: trace)
    labels = ["first turn", "later, under 4096", "later, longer"]
    assert list(result.ttft_by_prompt_s) == labels
    first, middle, longest = (result.ttft_by_prompt_s[label][0] for label in labels)
    assert first < middle < longest
    header, _, row = table_by_prompt([result]).splitlines()
    assert header.split(" | ")[1:] == [*labels[:-1], "later, longer |"]
    assert row.count("|") == header.count("|")


def test_host_cache_saves_prefills_of_what_was_evicted() -> None:
    params = replace(SMALL.params, host_capacity=1_000_000)
    trace = small_trace(7)
    plain, hosted = (
        Simulation(trace, "cache_aware", 1, replace(SMALL, params=each)).run()
        for each in (SMALL.params, params)
    )
    assert hosted.prefix_hits > plain.prefix_hits
    assert hosted.makespan_s < plain.makespan_s


def test_help_mentions_the_emulation_and_the_format_of_sessions() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.router", "--help"], capture_output=True, text=True, check=True
    )
    assert "`cache_aware` is an emulation" in done.stdout
    assert '"prompt_tokens"' in done.stdout
