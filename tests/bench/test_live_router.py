"""The parts that need no server: the played rollouts, their evaluation, and with_pace steps."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import numpy as np
import pytest

import bench.pace
from agentloop.errors import ServerUnavailable
from agentloop.inference.sglang.frames import Chunk, OnChunk
from agentloop.inference.turns import Generation
from agentloop.trajectory import TurnEnd
from bench.countdown_model import FILLER, countdown
from bench.live_router import (
    Figures,
    Play,
    Script,
    fit_factors,
    modelled_gpu,
    scale_trace,
    scripts_of,
    shuffled_rounds,
    table,
)
from bench.pace import Pace, with_pace
from bench.router import RolloutSpec, TurnSpec, make_trace
from bench.server_model import ServerParams

TRACE = [
    RolloutSpec("a", 10, (TurnSpec(5, 4, 0.0), TurnSpec(3, 0, 0.0))),
    RolloutSpec("a", 10, (TurnSpec(5, 0, 0.0),)),
    RolloutSpec("b", 8, (TurnSpec(2, 0, 0.0),)),
]


# --- played rollouts


def test_ids_have_the_traces_lengths_and_encode_them() -> None:
    trace = scale_trace(make_trace(3, num_groups=4, group_size=3), 16)
    scripts = scripts_of(trace, 1)
    for spec, script in zip(trace, scripts, strict=True):
        assert len(script.prompt) == spec.num_prompt
        assert [turn.length for turn in script.turns] == [turn.num_output for turn in spec.turns]
        starts = [script.prompt[-1], *(turn.answer[-1] for turn in script.turns[:-1])]
        assert starts == [turn.length for turn in script.turns]
        assert [len(turn.answer) for turn in script.turns[:-1]] == [
            turn.num_tool for turn in spec.turns[:-1]
        ]
        assert script.turns[-1].answer == ()
        assert all(token in FILLER for token in script.prompt[:-1])


def test_siblings_share_a_prompt_but_for_ids_of_their_own() -> None:
    first, second, of_other_group = scripts_of(TRACE, 1)
    num_shared = first.num_shared
    assert first.prompt[:num_shared] == second.prompt[:num_shared]
    assert first.prompt[num_shared:] != second.prompt[num_shared:]
    assert of_other_group.prompt[:5] != first.prompt[:5]
    assert [script.key for script in (first, second, of_other_group)] == ["a.0", "a.1", "b.0"]


def test_the_same_seed_gives_the_same_ids() -> None:
    assert scripts_of(TRACE, 1) == scripts_of(TRACE, 1) != scripts_of(TRACE, 2)


def test_every_round_has_every_arm() -> None:
    rounds = list(shuffled_rounds(["x", "y", "z"], 4, 1))
    assert sorted(rounds) == sorted((number, arm) for number in range(4) for arm in "xyz")
    orders = {tuple(arm for number, arm in rounds if number == wanted) for wanted in range(4)}
    assert len(orders) > 1


# --- evaluation


async def honest(generation: Generation, on_chunk: OnChunk) -> None:
    """Count down correctly, with one token per frame."""
    *reply, last = countdown(generation.ids[-1])
    for token in reply:
        on_chunk(Chunk([token], [0.0], "default"))
    on_chunk(Chunk([last], [0.0], "default", end=TurnEnd.STOP, cached_tokens=2, num_retractions=1))


@pytest.mark.anyio
async def test_whole_rollouts_are_goodput() -> None:
    figures = await Play(scripts_of(TRACE, 1), honest, budget=50).run(deadline_s=10)
    assert figures.num_refused == 0
    assert figures.goodput * figures.makespan_s == pytest.approx(5 + 3 + 5 + 2)
    assert figures.num_retractions == 4  # one per turn
    assert figures.prefix_hits == pytest.approx(4 * 2 / (10 + 19 + 10 + 8))


@pytest.mark.anyio
async def test_a_turn_requests_the_rest_of_the_budget() -> None:
    requested = []

    async def send(generation: Generation, on_chunk: OnChunk) -> None:
        requested.append((len(generation.ids), generation.max_new_tokens))
        await honest(generation, on_chunk)

    await Play(scripts_of(TRACE[:1], 1), send, budget=50).run(deadline_s=10)
    assert requested == [(10, 50), (10 + 5 + 4, 50 - 5 - 4)]


@pytest.mark.anyio
async def test_wrong_tokens_and_errors_refuse_a_rollout() -> None:
    async def send(generation: Generation, on_chunk: OnChunk) -> None:
        if generation.key == "a.1":
            raise ServerUnavailable("broken")
        if generation.key == "b.0":
            generation.ids[-1] += 1  # one token too many
        await honest(generation, on_chunk)

    ended: dict[str, bool] = {}
    figures = await Play(scripts_of(TRACE, 1), send, budget=50).run(
        deadline_s=10, on_end=ended.__setitem__
    )
    assert ended == {"a.0": True, "a.1": False, "b.0": False}
    assert figures.num_refused == 2
    assert figures.goodput * figures.makespan_s == pytest.approx(8)
    assert set(figures.errors) == {"ServerUnavailable: broken", "wrong tokens in turn 0"}


@pytest.mark.anyio
async def test_unfinished_rollouts_are_refused() -> None:
    async def send(generation: Generation, on_chunk: OnChunk) -> None:
        if generation.group == "b":
            await anyio.sleep_forever()
        await honest(generation, on_chunk)

    figures = await Play(scripts_of(TRACE, 1), send, budget=50).run(deadline_s=3)
    assert figures.num_refused == 1
    assert list(figures.errors.values()) == [1]


@pytest.mark.anyio
async def test_the_gate_holds_whole_groups() -> None:
    inside: set[str] = set()
    max_inside = 0
    limiter = anyio.CapacityLimiter(1)

    @asynccontextmanager
    async def gate(group: str, scripts: Sequence[Script]) -> AsyncIterator[None]:
        nonlocal max_inside
        async with limiter:
            inside.add(group)
            max_inside = max(max_inside, len(inside))
            yield
            inside.remove(group)

    async def send(generation: Generation, on_chunk: OnChunk) -> None:
        assert inside == {generation.group}
        await anyio.lowlevel.checkpoint()
        await honest(generation, on_chunk)

    figures = await Play(scripts_of(TRACE, 1), send, budget=50).run(deadline_s=10, gate=gate)
    assert (figures.num_refused, max_inside) == (0, 1)


def test_ratios_are_to_kv_of_the_same_round() -> None:
    results = [
        Figures("kv", 0, makespan_s=10.0, goodput=100.0, num_moves=3),
        Figures("kv", 1, makespan_s=20.0, goodput=50.0, num_moves=5),
        Figures("smg:cache_aware", 0, makespan_s=20.0, goodput=50.0),
        Figures("smg:cache_aware", 1, makespan_s=40.0, goodput=25.0),
    ]
    kv, gateway_row = (
        [cell.strip() for cell in row.split("|")[1:-1]] for row in table(results).splitlines()[2:]
    )
    assert (kv[2], kv[5], kv[-1]) == ("1.00", "1.00", "4")
    assert (gateway_row[0], gateway_row[2], gateway_row[5], gateway_row[-1]) == (
        "smg:cache_aware",
        "2.00",
        "0.50",
        "-",
    )


# --- the model of time


def test_a_linear_relation_is_recovered() -> None:
    rows = [(1.0, n, n * n) for n in (1.0, 2.0, 5.0, 9.0)]
    values = [0.5 + 2.0 * n + 0.1 * n * n for _, n, _ in rows]
    assert fit_factors(rows, values) == pytest.approx([0.5, 2.0, 0.1])


def test_no_factor_is_negative() -> None:
    rows = [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)]
    assert min(fit_factors(rows, [3.0, 2.0, 1.0])) == 0.0


def test_a_full_pool_takes_as_long_as_it_does_unscaled() -> None:
    params, scale, thinning = ServerParams(), 16.0, 4.0
    pace = modelled_gpu(scale, thinning)
    full = params.step_s + 128 * params.step_s_per_sequence
    full += params.capacity * params.step_s_per_token
    capacity = int(params.capacity / scale / thinning)
    assert pace.decode_s(int(128 / thinning), capacity) == pytest.approx(full)


class _Mode:
    def __init__(self, name: str) -> None:
        self._name = name

    def is_decode(self) -> bool:
        return self._name == "decode"

    def is_extend(self) -> bool:
        return self._name == "extend"


class _Batch:
    def __init__(self, mode: str) -> None:
        self.forward_mode = _Mode(mode)
        self.batch_size = 2
        self.seq_lens_cpu = np.array([3, 4])
        self.extend_num_tokens = 50


@pytest.mark.parametrize(
    ("mode", "took_s", "due_s"),
    [("decode", 0.0, 2.27), ("extend", 0.0, 6.0), ("idle", 0.0, 0.0), ("decode", 3.0, 3.0)],
)
def test_a_step_lasts_at_least_as_long_as_modelled(
    mode: str, took_s: float, due_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = 100.0

    class Time:
        @staticmethod
        def perf_counter() -> float:
            return clock

        @staticmethod
        def sleep(seconds: float) -> None:
            nonlocal clock
            clock += seconds

    def forward(runner: object, batch: _Batch) -> str:
        Time.sleep(took_s)
        return "result"

    monkeypatch.setattr(bench.pace, "time", Time)
    pace = Pace(1.0, 0.1, 2.0, 0.1, 0.01)
    assert with_pace(forward, pace, tmp_path)(None, _Batch(mode)) == "result"
    assert clock - 100.0 == pytest.approx(due_s, abs=0.01)  # part of the host's work is hidden
    counters = json.loads((tmp_path / f"{os.getpid()}.json").read_text())
    assert counters["steps"] == 1
    assert counters["late"] == (took_s > 0)
