"""Benchmark of the readers of the event stream: the cost of each, by kind of event.

    python -m bench.readers                  microseconds of the loop's thread, for each event
    python -m bench.readers --lag            and the loop's lag while rollouts are played at a rate

The events are those of simulated rollouts (bench.watchers'), scored and in groups, with a row of
metrics for every hundred of them. OpenTelemetry exports to a collector in another process, which
accepts everything; the CPU time of its thread is part of "all threads", like the event log's.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
from aiohttp import web

from agentloop.events import (
    Emit,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutScored,
    RolloutStarted,
    WeightsLoaded,
    ignore,
)
from agentloop.observe.board import Board
from agentloop.observe.event_fanout import EventFanout
from agentloop.observe.exporters.event_log import EventLog
from agentloop.observe.exporters.metrics import Metrics
from agentloop.observe.exporters.otel import OtelSettings, Traces
from agentloop.observe.exporters.sinks import Sinks, SinksSettings
from agentloop.observe.stalls import Stalls
from bench.command import Lag, helper_process, quantile, words
from bench.watchers import rollout

READERS = ("metrics", "stalls", "board", "event_log", "otel", "sinks")
_ROW = {"step": 1, "step_s": 1.0, **{f"learner/{number}": 0.5 for number in range(40)}}


class _PatientTraces(Traces):
    CLOSE_S = 60
    MAX_WAITING = 100_000


def rollout_events(num_rollouts: int, draw: random.Random) -> Iterator[Event]:
    """Yield the events of groups of 16, one rollout after the other."""
    for number in range(num_rollouts):
        group = f"group-{number // 16}"
        if number % 16 == 0:
            yield GroupStarted(group, "task", "What is 37 times 48?", "1776", 16)
        key = ""
        for event in rollout(number, draw):
            if isinstance(event, RolloutStarted):
                key = event.rollout_id
                event = RolloutStarted(event.record, group)
            yield event
        yield RolloutScored(key, 1.0, "1776", "it is right", 0.01)
        if number % 16 == 15:
            yield GroupFinished(group, dict.fromkeys(map(str, range(16)), 0.5), {}, 0.5, True)
        if number % 100 == 99:
            yield Measured(_ROW)
            yield WeightsLoaded(str(number), 0.5, ["http://server"], [])


@asynccontextmanager
async def reader(name: str, folder: Path, collector: str) -> AsyncIterator[Emit]:
    match name:
        case "metrics":
            yield Metrics(list, lambda: 0).on_event
        case "stalls":
            yield Stalls().on_event
        case "board":
            yield Board().on_event
        case "event_log":
            async with EventLog.open(folder) as event_log:
                yield event_log.on_event
        case "otel":
            settings = OtelSettings(endpoint=collector)
            async with _PatientTraces.open(settings, model="small", is_scored=True) as traces:
                yield traces.on_event
            assert traces.num_dropped == 0
        case "sinks":
            to = SinksSettings(report_to=("tensorboard",))
            async with Sinks.open(to, folder=folder, run_name="run", config={}) as sinks:
                yield sinks.on_event
        case _:
            yield ignore


async def costs(
    name: str, events: Sequence[Event], collector: str
) -> tuple[dict[str, float], float, float]:
    """Return seconds per kind of event, of the loop's thread in total, and of all threads in
    total."""
    by_kind: dict[str, list[int]] = defaultdict(list)
    clock = time.perf_counter_ns
    with tempfile.TemporaryDirectory() as folder:
        cpu_s = time.process_time()
        async with reader(name, Path(folder), collector) as read:
            loop_s = time.thread_time()
            for number, event in enumerate(events):
                started = clock()
                read(event)
                by_kind[type(event).__name__].append(clock() - started)
                if number % 1000 == 0:
                    await anyio.lowlevel.checkpoint()
            loop_s = time.thread_time() - loop_s
        cpu_s = time.process_time() - cpu_s
    return (
        {kind: statistics.median(durations) for kind, durations in by_kind.items()},
        loop_s,
        cpu_s,
    )


async def lag_ms(names: Sequence[str], collector: str, rate: float, seconds: float) -> list[float]:
    """Return the lag of a timer while `rate` rollouts per second are played: p50, p99, maximum."""
    draw = random.Random(0)
    lag = Lag()

    with tempfile.TemporaryDirectory() as folder:
        async with _all(names, Path(folder), collector) as emit, anyio.create_task_group() as tasks:
            tasks.start_soon(lag.measure)
            started = time.monotonic()
            num_played = 0
            while (elapsed_s := time.monotonic() - started) < seconds:
                for event in rollout_events(max(0, round(elapsed_s * rate) - num_played), draw):
                    emit(event)
                num_played = round(elapsed_s * rate)
                await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
    return [1000 * quantile(lag.samples, share) for share in (0.5, 0.99, 1.0)]


@asynccontextmanager
async def _all(names: Sequence[str], folder: Path, collector: str) -> AsyncIterator[Emit]:
    if not names:
        yield ignore
        return
    async with reader(names[0], folder, collector) as first:
        async with _all(names[1:], folder, collector) as others_read:
            yield EventFanout(first, others_read)


# --- the collector: another process ---------------------------------------------------------------


async def _collect() -> None:
    async def take(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=b"", content_type="application/x-protobuf")

    app = web.Application(client_max_size=2**27)
    app.router.add_post("/v1/traces", take)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await anyio.to_thread.run_sync(sys.stdin.read)
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rollouts", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=words, default=list(READERS))
    parser.add_argument("--lag", action="store_true")
    parser.add_argument("--rate", type=float, default=100.0, help="rollouts per second, for --lag")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="duration of each part of --lag"
    )
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect:
        anyio.run(_collect)
        return
    with helper_process("bench.readers", "--collect") as url:
        (_lags if options.lag else _costs)(options, options.readers, url)


def _run(function: Any, *arguments: Any) -> Any:
    return anyio.run(function, *arguments, backend_options={"use_uvloop": True})


def _costs(options: argparse.Namespace, names: Sequence[str], url: str) -> None:
    events = list(rollout_events(options.rollouts, random.Random(0)))
    kinds = sorted({type(event).__name__ for event in events})
    rounds: dict[str, list[tuple[dict[str, float], float, float]]] = defaultdict(list)
    for _ in range(options.rounds):
        for name in ("nothing", *names):
            rounds[name].append(_run(costs, name, events, url))
    print(
        f"{options.rollouts} rollouts, {len(events)} events; medians of {options.rounds} rounds, "
        f"less the overhead of measuring; {os.cpu_count()} cores\n"
    )
    print("| microseconds of the loop | " + " | ".join(names) + " |")
    print("|---|" + "---|" * len(names))

    def of_kind(name: str, kind: str) -> float:
        return statistics.median(figures[0][kind] for figures in rounds[name])

    def over_all(name: str, which: int) -> float:
        return statistics.median(float(figures[which]) for figures in rounds[name])  # type: ignore[arg-type]

    for kind in kinds:
        added_us = [(of_kind(name, kind) - of_kind("nothing", kind)) / 1000 for name in names]
        print(f"| {kind} | " + " | ".join(f"{max(0.0, us):.2f}" for us in added_us) + " |")
    for which, title in ((1, "a rollout, the loop's thread"), (2, "a rollout, all threads")):
        added_us = [over_all(name, which) - over_all("nothing", which) for name in names]
        per_rollout = (f"{max(0.0, 1e6 * s / options.rollouts):.0f}" for s in added_us)
        print(f"| {title} | " + " | ".join(per_rollout) + " |")


def _lags(options: argparse.Namespace, names: Sequence[str], url: str) -> None:
    rate, seconds = options.rate, options.seconds
    print(f"{rate:g} rollouts per second, {seconds:g} s each; {os.cpu_count()} cores\n")
    print("| readers | lag p50 | p99 | largest |\n|---|---|---|---|")
    for title, some in [("none", []), *((name, [name]) for name in names), ("all", list(names))]:
        lags = _run(lag_ms, some, url, rate, seconds)
        print(f"| {title} | " + " | ".join(f"{ms:.1f} ms" for ms in lags) + " |", flush=True)


if __name__ == "__main__":
    main()
