"""The real training loop in virtual time is deterministic, within its bounds, and faster with
overlap."""

from __future__ import annotations

import json
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.rollouts.request import GroupRequest
from agentloop.trajectory import VersionSpan
from bench import virtual_time
from bench.async_train import (
    Full,
    Result,
    Shape,
    _SleepingLearner,
    full,
    main,
    real_table,
    run_all,
    run_real,
    table,
    train,
)
from bench.server_model import Job, ServerParams
from bench.virtual_servers import Server, Servers

pytest.importorskip("safetensors")  # batches; of the extra `train`

SMALL = Shape(
    num_servers=2,
    params=ServerParams(capacity=40_000),
    prompts_per_step=4,
    group_size=4,
    budget=2000,
    load_s=2.0,
    publish_s=2.0,
    warm_up=2,
    steps=5,
)


@pytest.fixture(scope="module")
def results() -> dict[int, Result]:
    at_best = full(SMALL, 1)
    return {age: train(SMALL, "balanced", age, 1, at_best) for age in (0, 1, 2)}


def test_same_seed_gives_the_same_table() -> None:
    shape = replace(SMALL, steps=4)
    first, second = (table(run_all(shape, ["balanced"], [0, 1], [3])) for _ in range(2))
    assert first == second
    assert first != table(run_all(shape, ["balanced"], [0, 1], [4]))


def test_no_sample_is_staler_than_allowed(results: dict[int, Result]) -> None:
    assert set(results[0].staleness) == {0}
    for age in (1, 2):
        assert 0 < max(results[age].staleness) <= age
    num_samples = 3 * SMALL.prompts_per_step * SMALL.group_size // 2
    assert all(sum(result.staleness.values()) == num_samples for result in results.values())


def test_overlap_is_faster(results: dict[int, Result]) -> None:
    assert results[0].step_s > 1.2 * results[1].step_s
    assert results[1].step_s >= 0.99 * results[2].step_s
    assert results[1].servers_idle < results[0].servers_idle


def test_no_run_is_faster_than_its_learner(results: dict[int, Result]) -> None:
    for result in results.values():
        assert result.step_s >= result.learner_s * (1 - 1e-9)
        assert result.learner_idle == pytest.approx(1 - result.learner_s / result.step_s)
        assert 0 <= result.servers_idle < 1


def test_without_overlap_a_step_is_the_sum_of_its_parts(results: dict[int, Result]) -> None:
    """Without overlap, servers are idle while the learner is busy and weights are loaded."""
    (result,) = [results[0]]
    busy_s = result.step_s * (1 - result.servers_idle)
    assert busy_s + result.learner_s + SMALL.load_s <= result.step_s + 1e-6


@pytest.mark.parametrize("age", [0, 1])
def test_loop_itself_takes_no_time(age: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch starts as soon as its last group has finished and the learner is free.

    Its groups start as soon as the weights are live; with a staleness of up to 1 they are the next
    ones in order.
    """
    started: dict[int, float] = {}
    ended: dict[int, float] = {}
    live: dict[int, float] = {}
    learned: list[tuple[float, float]] = []
    open_group, weights_loaded = Servers.group, Servers.weights_loaded
    step = _SleepingLearner._step

    @asynccontextmanager
    async def noted_group(self: Servers, request: GroupRequest) -> AsyncIterator[Any]:
        number = int(request.name.partition("-")[0])
        started[number] = anyio.current_time()
        async with open_group(self, request) as siblings:
            yield siblings
        ended[number] = anyio.current_time()

    def noted_weights(self: Servers, url: str, version: str) -> None:
        weights_loaded(self, url, version)
        live[int(version)] = anyio.current_time()

    async def noted_step(self: _SleepingLearner, batch: Path) -> None:
        start_s = anyio.current_time()
        await step(self, batch)
        learned.append((start_s, anyio.current_time()))

    monkeypatch.setattr(Servers, "group", noted_group)
    monkeypatch.setattr(Servers, "weights_loaded", noted_weights)
    monkeypatch.setattr(_SleepingLearner, "_step", noted_step)
    shape = replace(SMALL, params=ServerParams(), steps=6)  # admission never limits
    train(shape, "balanced", age, 1, Full(1000.0, 40.0, 10_000.0))
    for index, (start_s, _) in enumerate(learned[1:-1], 1):
        numbers = range(
            1 + index * shape.prompts_per_step, 1 + (index + 1) * shape.prompts_per_step
        )
        is_free = learned[index - 1][1] + shape.publish_s
        assert start_s == max(is_free, *(ended[number] for number in numbers))
        assert {started[number] for number in numbers} == {live[max(0, index - age)]}


def test_turn_continues_with_new_weights() -> None:
    async def check() -> None:
        server = Server("a", ServerParams(), load_s=5.0)
        server.version = "3"
        spans: list[VersionSpan] = []

        async def turn() -> None:
            spans.extend(await server.generate(Job("k.0", "k", "g", 100, 50, 1000, 1000)))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn)
            await anyio.sleep(4.0)
            (held,) = [num_tokens for _, num_tokens in server.in_flight()]
            await server.update_weights("weights", "4", timeout_s=60)
            assert anyio.current_time() == 9.0
        first, second = spans
        assert (first.version, first.start, first.end) == ("3", 0, held - 50)
        assert (second.version, second.start, second.end) == ("4", first.end, 1000)
        assert 200 < first.end < 400
        assert server.num_sampled == 1000
        assert server.busy_s == pytest.approx(anyio.current_time() - 5.0)

    virtual_time.run(check)


def test_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    small = "--regimes balanced --seeds 1 --staleness 0 --tasks 2 --group-size 4 --budget 1000"
    main(["model", *small.split(), "--warm-up", "1", "--steps", "2", "--out", str(out)])
    assert "| balanced | 0 |" in capsys.readouterr().out
    (figures,) = json.loads(out.read_text())
    assert figures["bound_s"] == max(figures["learner_s"], figures["servers_s"])
    with pytest.raises(SystemExit):
        main(["model", "--steps", "2"])


def test_real_runs_are_started_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_(command: list[str], **options: Any) -> None:
        age = int(
            next(argument for argument in command if argument.startswith("loop.max_stal"))[-1]
        )
        assert "loop.steps=3" in command
        assert command[-1] == "seed=1"
        run = tmp_path / f"staleness-{age}"
        run.mkdir()
        step = {
            "step_s": 10.0 / (age + 1),
            "num_sampled_tokens": 100,
            "staleness_mean": age,
            "staleness_max": age,
            "reward": 0.5,
        }
        rows: list[dict[str, Any]] = [{"held_out/reward": 1.0}, step | {"step_s": 99.0}, step, step]
        rows += [step | {"step_s": 1.0}] * age  # without concurrent rollouts
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    monkeypatch.setattr(subprocess, "run", train_)
    recipe = Path("recipe.toml")
    runs = {age: run_real(recipe, "model", age, 3, tmp_path, ["seed=1"]) for age in (0, 1)}
    lines = real_table(runs, warm_up=1).splitlines()
    assert lines[-2].startswith("| 0 | 360 | 1.00 | 10.0 | 10 |")
    assert lines[-1].startswith("| 1 | 720 | 2.00 | 5.0 | 20 |")
