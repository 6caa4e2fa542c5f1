"""A small run of bench.sandbox against pool and service, which must detect wrong results."""

from __future__ import annotations

import argparse
import itertools
import sys

import anyio
import anyio.lowlevel
import pytest

from agentloop.sandbox import Pool
from agentloop.sandbox.serve import serving
from agentloop.sandbox.serve_settings import SandboxServeSettings
from bench.sandbox import (
    KINDS,
    Answer,
    Load,
    Target,
    measure_floor,
    open_code_judge,
    open_pool,
    parse,
)
from tests.sandbox.conftest import BARE

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # real workers are started

CHEAP = {"trivial": 3.0, "failing": 1.0, "flooding": 0.2}


@pytest.mark.timeout(120)
@pytest.mark.full
async def test_pool_under_load_loses_nothing_and_is_right() -> None:
    async with open_pool(BARE) as target:
        closed = await Load(target, CHEAP, 300, concurrency=200).run()
        opened = await Load(target, CHEAP, 40, rate=200).run()
    assert (closed["lost"], closed["wrong"], closed["most_outstanding"]) == (0, 0, 200)
    assert (opened["lost"], opened["wrong"]) == (0, 0)
    assert closed["queue_ms"] is not None
    assert closed["run_ms"] is not None
    assert closed["queue_ms"]["p50"] > closed["run_ms"]["p50"]  # of four slots
    cpu = closed["cpu_ms_per_call"]
    own, all_calls = cpu["of these, the calls themselves"], cpu["workers with their calls"]
    assert own is not None
    assert all_calls is not None
    assert 0 < own < 1.5 * all_calls


async def test_code_judges_protocol_under_load(pool: Pool) -> None:
    async with (
        serving(pool, SandboxServeSettings(port=0)) as url,
        open_code_judge(url, pids=[]) as target,
    ):
        figures = await Load(target, {"trivial": 1, "failing": 1}, 60, concurrency=20).run()
    assert (figures["lost"], figures["wrong"]) == (0, 0)
    assert figures["run_ms"] is not None
    assert figures["run_ms"]["p50"] > 0


async def test_wrong_and_lost_answers_are_counted() -> None:
    number = itertools.count()

    async def swap(code: str) -> Answer:
        await anyio.lowlevel.checkpoint()
        match next(number) % 4:
            case 0:
                return Answer("ok", "1000000 1000001\n")
            case 1:
                raise OSError("gone")
            case 2:
                return Answer("infrastructure", said="overloaded")
            case _:
                n = int(code[6:].partition(",")[0])
                return Answer("ok", f"{n} {n + 1}\n")

    figures = await Load(Target("swap", swap), {"trivial": 1}, 100, concurrency=10).run()
    assert (figures["wrong"], figures["lost"]) == (25, 50)
    assert figures["errors"] == {"OSError('gone')": 25, "overloaded": 25}


async def test_calls_that_do_not_end_count_as_lost() -> None:
    async def never(code: str) -> Answer:
        await anyio.sleep_forever()
        raise AssertionError

    load = Load(Target("never", never), {"trivial": 1}, 10, concurrency=10, deadline_s=0.2)
    figures = await load.run()
    assert (figures["lost"], figures["calls_per_s"]) == (10, 0)


@pytest.mark.parametrize("name", KINDS)
def test_answer_to_another_call_is_wrong(name: str) -> None:
    kind = KINDS[name]
    stdout = kind.stdout.replace("{n}", "7").replace("{m}", "8")
    right = Answer(kind.status[0], stdout + "\n", kind.stderr.replace("{n}", "7"))
    assert kind.is_right(7, right)
    assert not kind.is_right(8, right)
    assert not kind.is_right(7, Answer("timeout", right.stdout, right.stderr))


def test_floor_is_more_for_more() -> None:

    floor = measure_floor([sys.executable], {"trivial": 1.0, "flooding": 1.0}, 10, False)
    assert 0 < floor["trivial"] < floor["flooding"]
    assert floor["trivial"] < floor["mix"] < floor["flooding"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--mix", "quick=1"], "quick"),
        (["--against", "http://example.org"], "must be on this machine"),
    ],
)
def test_bad_arguments(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments)
    assert says in capsys.readouterr().err


def test_arguments() -> None:
    options: argparse.Namespace = parse(
        ["--concurrency", "1,64", "--cpu-of", "1,2", "backend=process", "workers=2"]
    )
    assert options.concurrency == [1, 64]
    assert options.cpu_of == [1, 2]
    assert options.pool["backend"] == "process"
    assert options.pool["workers"] == 2
