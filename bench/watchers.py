"""Benchmark of the page's readers: their cost for the event loop with many rollouts in flight.

    python -m bench.watchers --rollouts 10000 --readers 5 --seconds 30
    python -m bench.watchers first --url http://127.0.0.1:8000      time until the first view

The first plays rollouts (events like real ones, no servers) in one process with the board and the
page's routes on loopback; readers are another process. The loop's lag is the delay of a timer of 5
ms. A run has three parts, one after the other: without a board, with a board without readers, and
with the readers. The last part has one more reader that reads nothing.

The second opens the page in Chromium a few times and measures from the request to the first numbers
on it.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import anyio
import httpx
from aiohttp import web

from agentloop.api.guard import ServeSettings
from agentloop.api.listen import bind, serving
from agentloop.events import (
    CallFinished,
    CallStarted,
    Emit,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
    ignore,
)
from agentloop.observe.board import Board
from agentloop.observe.event_fanout import EventFanout
from agentloop.observe.live import Live, Sources
from agentloop.observe.page import Page
from agentloop.observe.stalls import Stalls
from agentloop.trajectory import StopReason, ToolCall, ToolCallStatus, ToolResult, Trajectory, Turn
from bench.command import Lag, quantile

EVENTS_EVERY_S = 0.01


class Decision:
    why = "played"

    def explain(self) -> str:
        return self.why


def rollout(number: int, draw: random.Random) -> Iterator[Any]:
    """Yield the events of a rollout: turns of tokens, with a call between each two."""
    key = f"played-{number}"
    record = Trajectory(key, [0] * 200, stop_reason=StopReason.ANSWERED)
    yield RolloutStarted(record)
    num_turns = draw.choice([1, 2, 3, 4])
    for index in range(num_turns):
        turn = Turn()
        record.turns.append(turn)
        yield TurnStarted(key, index)
        yield TurnPlaced(key, index, f"http://server-{draw.randrange(8)}", Decision())
        for _ in range(max(1, int(draw.lognormvariate(3.5, 0.8)))):
            turn.output_ids += [1, 2, 3, 4, 5]
            turn.logprobs += [0.0] * 5
            yield TokensSampled(key, index, [1, 2, 3, 4, 5], "")
        if index + 1 < num_turns:
            call = ToolCall(f"{key}-{index}", "python", {}, "", 0, 5)
            yield CallStarted(key, index, call)
            yield TurnSampled(key, index)
            result = ToolResult(call.id, "python", ToolCallStatus.OK, "1", 0.0, 0.01, 0.05)
            yield CallFinished(key, index, result)
        yield TurnFinished(key, index, turn)
    yield RolloutFinished(key, record)


class Played:
    """A number of rollouts in flight, whose events come at a constant rate."""

    def __init__(self, number: int, events_per_s: int) -> None:
        self._draw = random.Random(1)
        self._num = 0
        self.emit: Emit = ignore
        self._each = max(1, int(events_per_s * EVENTS_EVERY_S))
        self._open = [self._next() for _ in range(number)]
        self.num_events = 0

    def _next(self) -> Iterator[Any]:
        self._num += 1
        return rollout(self._num, self._draw)

    def begin(self) -> None:
        """Put all of them in flight, each at some stage."""
        for events in self._open:
            self.emit(next(events))

    async def run(self) -> None:
        at = 0
        while True:
            await anyio.sleep(EVENTS_EVERY_S)
            for _ in range(self._each):
                at = (at + 1) % len(self._open)
                event = next(self._open[at], None)
                if event is None:
                    self._open[at] = self._next()
                    event = next(self._open[at])
                self.emit(event)
                self.num_events += 1


async def describe(name: str, played: Played, seconds: float) -> str:
    """Measure for some seconds; return the loop's lag and the rate of events, as a line."""
    lag, before = Lag(), played.num_events
    with anyio.move_on_after(seconds):
        await lag.measure()
    p50, p99, largest = (1000 * quantile(lag.samples, share) for share in (0.5, 0.99, 1.0))
    return (
        f"{name:34} lag p50 {p50:6.2f} ms, p99 {p99:6.2f} ms, max {largest:6.2f} ms; "
        f"{(played.num_events - before) / seconds:,.0f} events/s"
    )


async def run(rollouts: int, readers: int, seconds: float, events_per_s: int) -> None:
    board, stalls = Board(), Stalls()
    live = Live(board, stalls, Sources({"kind": "serve", "title": "played"}))
    settings = ServeSettings(port=0)
    app = web.Application()
    Page(live).add_to(app)
    with bind(settings) as bound:
        async with serving(app, bound) as url, anyio.create_task_group() as tasks:
            tasks.start_soon(live.run)
            played = Played(rollouts, events_per_s)
            played.begin()
            tasks.start_soon(played.run)
            fanout = EventFanout(stalls.on_event, board.on_event)
            for name, emit in (("no board", ignore), ("a board without readers", fanout)):
                played.emit = emit
                if emit is not ignore:  # the board needs all events from the start
                    played = Played(rollouts, events_per_s)
                    played.emit = emit
                    played.begin()
                    tasks.start_soon(played.run)
                print(await describe(name, played, seconds), flush=True)
            command = [sys.executable, "-m", "bench.watchers", "read", url, str(readers)]
            async with await anyio.open_process(command) as process:
                with anyio.fail_after(30):
                    while live.num_readers <= readers:
                        await anyio.sleep(0.1)
                name = f"{readers} readers, and a sleeping one"
                print(await describe(name, played, seconds), flush=True)
                process.terminate()
                await process.wait()
                if process.stdout is not None:
                    print((await process.stdout.receive()).decode().strip())
            print(f"{board.num_in_flight:,} rollouts in flight at the end")
            tasks.cancel_scope.cancel()


async def read(url: str, readers: int) -> None:
    """Run readers that read everything, and one that reads nothing."""
    sizes = [0] * readers
    started = time.monotonic()

    async def read_stream(index: int) -> None:
        async with httpx.AsyncClient(timeout=None) as http:
            async with http.stream("GET", f"{url}/api/stream") as answer:
                async for data in answer.aiter_raw():
                    sizes[index] += len(data)

    async def sleeper() -> None:
        async with httpx.AsyncClient(timeout=None) as http:
            async with http.stream("GET", f"{url}/api/stream"):
                await anyio.sleep_forever()

    with anyio.open_signal_receiver(signal.SIGTERM) as signals:
        async with anyio.create_task_group() as tasks:
            for index in range(readers):
                tasks.start_soon(read_stream, index)
            tasks.start_soon(sleeper)
            async for _ in signals:
                tasks.cancel_scope.cancel()
                break
    rate = sum(sizes) / len(sizes) / (time.monotonic() - started)
    print(f"each reader received {rate / 1e6:.2f} MB/s", flush=True)


def first(url: str, times: int) -> None:
    from playwright.sync_api import sync_playwright

    shown: list[float] = []
    with sync_playwright() as playwright:
        path = shutil.which("chromium")
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for _ in range(times):
            context = browser.new_context()  # with an empty cache
            page = context.new_page()
            started = time.monotonic()
            page.goto(url)
            page.get_by_text("tokens/s").first.wait_for()
            shown.append(1000 * (time.monotonic() - started))
            context.close()
        browser.close()
    print(
        f"first numbers after {statistics.median(shown):.0f} ms (median of {times}), "
        f"{min(shown):.0f} to {max(shown):.0f} ms"
    )


def main() -> int:
    if sys.argv[1:2] == ["read"]:
        anyio.run(partial(read, sys.argv[2], int(sys.argv[3])))
        return 0
    parser = argparse.ArgumentParser("python -m bench.watchers", description=__doc__)
    parser.add_argument("command", nargs="?", choices=["load", "first"], default="load")
    parser.add_argument("--rollouts", type=int, default=10_000)
    parser.add_argument("--readers", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--events-per-s", type=int, default=20_000)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--times", type=int, default=9)
    args = parser.parse_args()
    if args.command == "first":
        first(args.url, args.times)
        return 0
    load = partial(run, args.rollouts, args.readers, args.seconds, args.events_per_s)
    anyio.run(load, backend_options={"use_uvloop": True})
    return 0


if __name__ == "__main__":
    sys.exit(main())
