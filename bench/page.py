"""Benchmark of the page's memory: an hour of a run, sent as fast as the page reads it.

    python -m bench.page                          7,200 frames, the rollouts' view, a table
    python -m bench.page --in-flight 1000 --view curves --json out.json
    python -m bench.page --serve 8000             no browser: look at it yourself

The runtime's board receives simulated rollouts, groups and steps by a clock that advances half a
second per frame; `agentloop.observe.live` makes the frames. The JavaScript heap after a garbage
collection, the elements and the listeners are measured at equal distances. They grow until the
board has as many finished rollouts and groups as it keeps, and should not grow afterwards.

Needs playwright, and a Chromium: the system's, or that of CHROMIUM.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass

import anyio
from aiohttp import web

from agentloop.api.guard import ServeSettings
from agentloop.api.listen import bind, serving
from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutFinished,
    RolloutScored,
    RolloutStarted,
    TokensSampled,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
    WeightsLoaded,
)
from agentloop.inference.replicas import ServerView
from agentloop.inference.scheduling.health import ServerState
from agentloop.observe.board import Board
from agentloop.observe.frames import BoardFrame
from agentloop.observe.live import Live, Sources
from agentloop.observe.page import Page
from agentloop.observe.stalls import Stalls
from agentloop.plain_json import dumps
from agentloop.trajectory import StopReason, ToolCall, ToolCallStatus, ToolResult, Trajectory

__all__ = ["Replay", "serve_page"]

FRAME_S = 0.5
HOUR = 7_200  # frames
_GROUP = 8  # rollouts
_STEP = 20  # frames
_MAX_ROWS = 500  # per frame, as in the runtime
_MOVES = 0.3  # probability per frame that a rollout changes its state
_KEEP_ALIVE_S = 15.0
_SANDBOX = {"backend": "process", "workers": 1, "slots": 4, "waiting": 0}
_READ_S = 600.0  # time limit of the page between two measurements


class Replay(Live):
    """A simulated run, for one reader at a time.

    Frames are sent as fast as they are read, up to the one that `let` has allowed. If `missed` is
    set, the next frame tells the reader that it was too slow for that many and replaces everything.

    Args:
        max_ended: Finished rollouts that the board keeps.
    """

    def __init__(
        self,
        in_flight: int = 100,
        num_frames: int = HOUR,
        seed: int = 0,
        *,
        max_ended: int = 2_000,
        max_groups: int = 500,
    ) -> None:
        self.in_flight = in_flight
        self.num_frames = num_frames
        self.sent = 0  # frames
        self.missed = 0
        self._begun_s = time.time()
        self._allowed, self._changed = num_frames, anyio.Event()
        self._random = random.Random(seed)
        self._live: dict[str, tuple[Trajectory, int]] = {}  # with the number of its state
        self._members: dict[str, list[str]] = {}
        self._num_groups = 0
        about = {"kind": "train", "title": "an hour", "version": "", "controls": []}
        super().__init__(
            Board(clock=self._clock, max_ended=max_ended, max_groups=max_groups),
            Stalls(self._clock),
            Sources(
                {**about, "can_ask": False, "has_sandbox": True},
                servers=lambda: [self._view(number) for number in range(4)],
                num_waiting=lambda: self.sent % 7,
                sandbox=lambda: {**_SANDBOX, "busy": self.sent % 5},
                more=lambda: {"step": self.sent // _STEP},
            ),
        )

    def let(self, frame: int) -> None:
        """Allow sending frames up to this one; without a number, all frames."""
        self._allowed = min(frame, self.num_frames)
        self._changed.set()
        self._changed = anyio.Event()

    # --- simulation -------------------------------------------------------------------------------

    def advance(self) -> None:
        """Simulate half a second."""
        self.sent += 1
        while len(self._live) < self.in_flight:
            self._begin_group()
        for key, (record, at) in [*self._live.items()]:
            if at == 1:  # sampling
                ids = [*range(self._random.randrange(1, 20))]
                self._emit(TokensSampled(key, 0, ids, "text"))
            if self._random.random() < _MOVES:
                self._move(key, record, at)
        if self.sent % _STEP == 0:
            self._measure(self.sent // _STEP)
        self.board.tick()

    def _begin_group(self) -> None:
        self._num_groups += 1
        group = f"{self._num_groups}-made-up"
        self._emit(GroupStarted(group, f"task {self._num_groups}", "What?", "42", _GROUP))
        self._members[group] = []
        for number in range(_GROUP):
            record = Trajectory(f"{group}.{number}", [1, 2, 3])
            self._emit(RolloutStarted(record, group))
            self._emit(TurnStarted(record.id, 0))
            self._live[record.id] = record, 0
            self._members[group].append(record.id)

    def _move(self, key: str, record: Trajectory, at: int) -> None:
        match at:
            case 0:
                server = f"http://127.0.0.1:{30_001 + self._random.randrange(4)}"
                self._emit(TurnPlaced(key, 0, server, _NoWhy()))
                self._live[key] = record, 1
            case 1:
                call = ToolCall("call", "python", {}, "", 0, 0)
                self._emit(CallStarted(key, 0, call))
                self._emit(TurnSampled(key, 0))
                self._live[key] = record, 2
            case _:
                status = self._random.choice(
                    [ToolCallStatus.OK, ToolCallStatus.OK, ToolCallStatus.ERROR]
                )
                result = ToolResult("call", "python", status, "", 0.0, 0.1, 0.2)
                self._emit(CallFinished(key, 0, result))
                if self._random.random() < 0.3:
                    self._end(key, record)
                else:
                    self._emit(TurnStarted(key, 0))
                    self._live[key] = record, 0

    def _end(self, key: str, record: Trajectory) -> None:
        record.stop_reason = StopReason.ANSWERED
        self._emit(RolloutFinished(key, record))
        del self._live[key]
        group = key.rpartition(".")[0]
        members = self._members[group]
        if any(member in self._live for member in members):
            return
        del self._members[group]
        for member in members:
            reward = float(self._random.random() < 0.5)
            self._emit(RolloutScored(member, reward, "42", "it says 42", 0.01))
        kept = dict.fromkeys(members[: _GROUP // 2], 0.5)
        dropped = dict.fromkeys(members[_GROUP // 2 :], "positive")
        self._emit(GroupFinished(group, kept, dropped, 0.5, True))

    def _measure(self, step: int) -> None:
        names = ("reward", "tool_errors_in_correct", "learner/entropy", "wait_s", "learn_s")
        row = {name: round(self._random.random(), 3) for name in names}
        self._emit(Measured({"step": step, "step_s": 2.5, "length_mean": 300, **row}))
        self._emit(WeightsLoaded(str(step), 0.1, [], []))

    def _emit(self, event: Event) -> None:
        self.board.on_event(event)
        self.stalls.on_event(event)

    def _view(self, number: int) -> ServerView:
        is_well = (self.sent // 100 + number) % 9 > 0
        return ServerView(
            f"http://127.0.0.1:{30_001 + number}",
            ServerState.HEALTHY if is_well else ServerState.DEAD,
            num_running=4,
            num_held_tokens=9_000,
            num_reserved_tokens=900,
            num_parked_tokens=90,
            capacity_tokens=20_000,
            weight_version=str(self.sent // _STEP),
        )

    def _clock(self) -> float:
        return self._begun_s + FRAME_S * self.sent

    # --- frames -----------------------------------------------------------------------------------

    async def frames(self, last_id: str | None = None) -> AsyncGenerator[tuple[str, bytes]]:
        """See `PageData`."""
        yield str(self.sent), dumps(await self.frame())
        while True:
            while self.sent >= self._allowed:
                with anyio.move_on_after(_KEEP_ALIVE_S):
                    await self._changed.wait()
                yield "", b""
            self.advance()
            if self.missed:
                missed, self.missed = self.missed, 0
                yield str(self.sent), dumps({**await self.frame(), "missed": missed})
                self.board.skip()
                continue
            frame = {**self._head(full=False), **self._moment(), **self.board.take(_MAX_ROWS)}
            yield str(self.sent), dumps(frame)
            await anyio.lowlevel.checkpoint()

    def _head(self, *, full: bool) -> BoardFrame:
        return {"rev": self.sent, "t": self._clock(), "full": full}


class _NoWhy:
    why = "there"

    def explain(self) -> str:
        return self.why


@asynccontextmanager
async def serve_page(replay: Replay, port: int = 0) -> AsyncIterator[str]:
    """The page of it; yields the URL."""
    with bind(ServeSettings(port=port)) as bound:
        app = web.Application()
        Page(replay).add_to(app)
        async with serving(app, bound) as url:
            yield url


# --- measuring ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Size:
    """Size of the page after a garbage collection."""

    frame: int
    rollouts: int  # known to the page
    groups: int
    steps: int
    heap_mib: float
    elements: int
    listeners: int


async def measure(replay: Replay, url: str, *, view: str, num_sizes: int) -> list[Size]:
    """Return the sizes at equal distances. `url` is the address of the replay."""
    from playwright.async_api import async_playwright

    sizes: list[Size] = []
    replay.let(0)
    async with async_playwright() as tools:
        path = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = await tools.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = await browser.new_page()
        page.on("pageerror", lambda error: print(f"error in the page: {error}", file=sys.stderr))
        await page.goto(f"{url}/#/{view}")
        devtools = await page.context.new_cdp_session(page)
        for number in range(1, num_sizes + 1):
            to = replay.num_frames * number // num_sizes
            replay.let(to)
            with anyio.fail_after(_READ_S):
                while await page.evaluate("agentloop.app.store.rev") < to:
                    await anyio.sleep(0.1)
            await devtools.send("HeapProfiler.collectGarbage")
            heap = await devtools.send("Runtime.getHeapUsage")
            counters = await devtools.send("Memory.getDOMCounters")
            counts: list[int] = await page.evaluate(
                "(({rollouts, groups, steps}) => [rollouts.size, groups.size, steps.length])"
                "(agentloop.app.store)"
            )
            used = round(heap["usedSize"] / 2**20, 2)
            rollouts, groups, steps = counts
            nodes, listeners = counters["nodes"], counters["jsEventListeners"]
            sizes.append(Size(to, rollouts, groups, steps, used, nodes, listeners))
            print(" ".join(f"{value:>10}" for value in asdict(sizes[-1]).values()), flush=True)
        await browser.close()
    return sizes


async def _main(options: argparse.Namespace) -> None:
    replay = Replay(options.in_flight, options.frames, options.seed)
    async with serve_page(replay, options.serve or 0) as url:
        if options.serve is not None:
            print(f"The page is at {url}/. Press Ctrl-C to stop.")
            await anyio.sleep_forever()  # no deadline: until it is stopped
        print(" ".join(f"{name:>10}" for name in Size.__dataclass_fields__))
        begun_s = time.monotonic()
        sizes = await measure(replay, url, view=options.view, num_sizes=options.sizes)
        took_s = time.monotonic() - begun_s
    half = sizes[len(sizes) // 2 - 1].heap_mib
    print(
        f"{options.frames} frames in {took_s:.0f} s; the heap at the end is "
        f"{sizes[-1].heap_mib / half:.2f} times that at half the time"
    )
    if options.json is not None:
        with open(options.json, "w") as file:
            json.dump({"options": vars(options), "sizes": [*map(asdict, sizes)]}, file)


def main() -> None:
    parser = argparse.ArgumentParser("python -m bench.page")
    parser.add_argument("--frames", type=int, default=HOUR)
    parser.add_argument("--in-flight", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--view", default="rollouts", help="a view such as rollouts or curves; '' is the overview"
    )
    parser.add_argument("--sizes", type=int, default=12, help="number of measurements")
    parser.add_argument(
        "--serve", type=int, metavar="PORT", help="serve the page without measuring"
    )
    parser.add_argument("--json", metavar="FILE")
    anyio.run(_main, parser.parse_args())


if __name__ == "__main__":
    main()
