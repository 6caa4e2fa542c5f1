"""Benchmark of the sandbox under load: throughput, latency, cost, and correctness of every answer.

    python -m bench.sandbox --concurrency 1,64,1024,45000 --calls 45000 --mix trivial=8,failing=1
    python -m bench.sandbox --open 0.5                          then half of that load, open loop
    python -m bench.sandbox --against http://127.0.0.1:8088 --cpu-of PID,PID     beside Code Judge

Closed loop: `concurrency` callers, each of which sends its next call as soon as it has the last
answer. Open loop: calls arrive at random times at a fixed rate, whatever has been answered, and are
timed from the moment at which they were due. Every call has an answer of its own, which is checked.

CPU time is the kernel's, of this process (pool and load generator together) and of the workers with
everything that they forked. It misses time of a service that kills a process before its parent has
waited for it. "the whole machine" includes everything, other programs too; use it to compare
services on an otherwise idle machine.

The floor is measured in the same run, before and after each load, with the workers' interpreter:
fork, exec of the same code, a pipe; from a zygote without isolation, limits or timeouts. The
"prepared" floor is the same after the zygote has compiled something: CPython sets up its syntax
tree types at the first `compile`, so a plain zygote leaves half a millisecond of that to every
child.

Not covered: the network. A Code Judge is reached over loopback only, each call by a request.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypedDict
from urllib.parse import urlsplit

import aiohttp
import anyio
import anyio.abc
import anyio.lowlevel
import orjson

from agentloop.sandbox import CallStatus, Pool, PoolSettings, slots
from agentloop.sandbox.engine import connect
from bench.command import Lag, numbers, parser_for, say

TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 4096
TICK_S = os.sysconf("SC_CLK_TCK")

# --- calls and their answers -------------------------------------------------------------------


@dataclass(slots=True)
class Answer:
    """The answer to one call, from any target."""

    status: str  # ok, failed, limit (output), infrastructure
    stdout: str = ""
    stderr: str = ""
    queue_s: float = math.nan
    run_s: float = math.nan
    cpu_s: float = math.nan
    said: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of call; {n} is the call's own number, {m} the next."""

    code: str
    stdout: str
    status: tuple[str, ...] = ("ok",)
    stderr: str = ""

    def write(self, n: int) -> str:
        return self.code.replace("{n}", str(n)).replace("{m}", str(n + 1))

    def is_right(self, n: int, answer: Answer) -> bool:
        stdout = self.stdout.replace("{n}", str(n)).replace("{m}", str(n + 1))
        return (
            answer.status in self.status
            and answer.stdout.partition("\n")[0] == stdout
            and self.stderr.replace("{n}", str(n)) in answer.stderr
        )


KINDS = {
    "trivial": Kind("print({n}, {n} + 1)", "{n} {m}"),
    "failing": Kind(
        "print({n})\nraise ValueError('no {n}')", "{n}", ("failed",), "ValueError: no {n}"
    ),
    # Code Judge has no limit on output and returns its beginning.
    "flooding": Kind("print({n})\nprint('x' * (4 << 20))", "{n}", ("limit", "ok")),
}


def make_mix(text: str) -> dict[str, float]:
    mix = {
        name: float(weight or 1) for name, _, weight in (p.partition("=") for p in text.split(","))
    }
    if unknown := mix.keys() - KINDS.keys():
        raise argparse.ArgumentTypeError(f"{sorted(unknown)}: kinds are {', '.join(KINDS)}")
    return mix


# --- targets -----------------------------------------------------------------------------------

Ask = Callable[[str], Awaitable[Answer]]


@dataclass
class Target:
    """A service that runs code, and the processes whose CPU time counts as its own."""

    name: str
    ask: Ask
    pids: Callable[[], Sequence[int]] = lambda: ()
    floor_command: Sequence[str] = (sys.executable,)


@asynccontextmanager
async def open_pool(settings: PoolSettings) -> AsyncIterator[Target]:
    kinds = {CallStatus.OK: "ok", CallStatus.ERROR: "failed", CallStatus.OUTPUT_LIMIT: "limit"}
    async with Pool(settings, on_progress=say) as pool:

        async def ask(code: str) -> Answer:
            r = await pool.run(code, timeout_s=TIMEOUT_S)
            status = "infrastructure" if r.status.is_unscorable else kinds.get(r.status, "other")
            said = f"{r.status}: {r.error.message if r.error else ''}"
            return Answer(status, r.stdout, r.stderr, r.queue_s, r.run_s, r.cpu_s, said)

        backend = pool.stats()["backend"]
        for kind in KINDS.values():  # trigger everything that is loaded on first use
            await ask(kind.write(1))
        if backend == "docker":
            pids, image = await _container_pids()
            floor = ["docker", "run", "--rm", "-i", "--network=none", "--entrypoint=python3", image]
            yield Target("pool (docker)", ask, lambda: pids, floor)
        else:
            yield Target(f"pool ({backend})", ask, lambda: _children(os.getpid()))


async def _container_pids() -> tuple[list[int], str]:
    """Return the main processes of our containers, and the image that they run."""
    pids, image = [], ""
    async with connect() as docker:
        for container in await docker.containers.list():
            shown = await container.show()
            if shown["Name"].startswith(f"/agentloop-sandbox-{os.getpid()}-"):
                pids.append(int(shown["State"]["Pid"]))
                image = shown["Config"]["Image"]
    return pids, image


class CodeJudgeAnswer(TypedDict):
    """Code Judge's answer to a call."""

    reason: str
    run_success: bool
    cost: float
    stdout: str | None
    stderr: str | None


@asynccontextmanager
async def open_code_judge(url: str, pids: Sequence[int]) -> AsyncIterator[Target]:
    """Open a Code Judge on this machine."""
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:

        async def ask(code: str) -> Answer:
            body = {"type": "python", "solution": code}
            async with http.post(f"{url}/run", json=body) as response:
                response.raise_for_status()
                r: CodeJudgeAnswer = orjson.loads(await response.read())
            lost = r["reason"] in ("internal_error", "queue_timeout", "invalid_input")
            status = "infrastructure" if lost else "ok" if r["run_success"] else "failed"
            texts = r["stdout"] or "", r["stderr"] or ""
            return Answer(status, *texts, run_s=r["cost"], said=r["reason"])

        yield Target("code-judge", ask, lambda: pids)


# --- CPU time and memory -----------------------------------------------------------------------


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for task in tasks for child in task.read_text().split()]
    return []


def cpu_of_tree(pid: int) -> float:
    """Return CPU seconds of a process, of the children that it waited for, and of its
    descendants."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / TICK_S + sum(map(cpu_of_tree, _children(pid)))


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine_cpu_s() -> float:
    """Return CPU seconds of all processes since boot: user, nice, system, interrupts."""
    fields = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return sum(fields[n] for n in (0, 1, 2, 5, 6)) / TICK_S


def reset_peak_memory() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024


FLOOR = """
import gc, json, os, resource, sys
codes, prepared = json.loads(sys.stdin.read())
exec(codes[0], {"print": lambda *a: None})
if prepared: compile("1", "", "exec")
gc.collect(); gc.freeze(); gc.disable()
def cpu():
    spent = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in spent)
began = cpu()
for code in codes:
    mine, its = os.pipe()
    pid = os.fork()
    if not pid:
        os.dup2(its, 1); os.close(its)
        try:
            exec(compile(code, "<call>", "exec"), {"__name__": "__main__"})
            sys.stdout.flush()
        finally:
            os._exit(0)
    os.close(its)
    while os.read(mine, 65536): pass
    os.close(mine); os.waitpid(pid, 0)
print(1000 * (cpu() - began) / len(codes))
"""


def measure_floor(
    command: Sequence[str], mix: dict[str, float], num: int, prepared: bool
) -> dict[str, float]:
    """Return CPU milliseconds per call of each kind that consists only of a fork, an exec and a
    pipe."""
    floor = {}
    for name in mix:
        # The traceback of a failing program is not part of the floor.
        kind = KINDS["trivial" if name == "failing" else name]
        given = json.dumps([[kind.write(n) for n in range(num)], prepared])
        bare = [*command, "-I", "-S", "-c", FLOOR]
        done = subprocess.run(bare, input=given, capture_output=True, text=True, check=True)
        floor[name] = float(done.stdout)
    total = sum(mix.values())
    return {**floor, "mix": sum(floor[name] * mix[name] for name in mix) / total}


# --- the load ----------------------------------------------------------------------------------


class Percentiles(TypedDict):
    """Milliseconds."""

    p50: float
    p95: float
    p99: float
    max: float


class LoadFigures(TypedDict):
    """The figures of a load."""

    target: str
    load: str
    calls: int
    most_outstanding: int
    wall_s: float
    calls_per_s: float
    lost: int
    wrong: int
    queue_ms: Percentiles | None
    run_ms: Percentiles | None
    latency_ms: Percentiles | None
    loop_lag_ms: Percentiles | None
    peak_memory_mib: int
    cpu_ms_per_call: dict[str, float | None]
    errors: dict[str, int]
    wrong_answers: list[str]


class RunFigures(LoadFigures):
    """The figures of a load beside its floors, plain and prepared."""

    floor_cpu_ms: dict[str, dict[str, float]]
    times_the_floor: dict[str, float | None]


class BenchFigures(TypedDict):
    """The figures of all loads."""

    mix: dict[str, float]
    pool: dict[str, object]
    runs: list[RunFigures]


@dataclass
class Load:
    """A run of a number of calls of a mix, in a closed or an open loop."""

    target: Target
    mix: dict[str, float]
    num_calls: int
    concurrency: int | None = None
    rate: float | None = None
    deadline_s: float = 600.0  # calls that are unfinished then are lost
    answers: dict[int, Answer] = field(default_factory=dict)
    latency_s: dict[int, float] = field(default_factory=dict)
    lag: Lag = field(default_factory=Lag)
    wrong: list[str] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    most_outstanding: int = 0

    def __post_init__(self) -> None:
        names, weights = zip(*self.mix.items(), strict=True)
        self._kinds = random.Random(0).choices(names, weights, k=self.num_calls)
        self._outstanding = 0

    async def run(self) -> LoadFigures:
        reset_peak_memory()
        own_s, theirs_s, machine_s = own_cpu_s(), self._their_cpu_s(), machine_cpu_s()
        began = time.monotonic()
        with anyio.move_on_after(self.deadline_s):
            async with anyio.create_task_group() as watching:
                watching.start_soon(self.lag.measure)
                watching.start_soon(self._show_progress)
                async with anyio.create_task_group() as calling:
                    await (self._closed if self.rate is None else self._open)(calling)
                watching.cancel_scope.cancel()
        wall_s = time.monotonic() - began
        own_s, theirs_s = own_cpu_s() - own_s, self._their_cpu_s() - theirs_s
        return self._figures(wall_s, own_s, theirs_s, machine_cpu_s() - machine_s)

    def _their_cpu_s(self) -> float:
        return sum(map(cpu_of_tree, self.target.pids()))

    async def _closed(self, calling: anyio.abc.TaskGroup) -> None:
        remaining = iter(range(self.num_calls))  # shared: each caller takes the next

        async def caller() -> None:
            for n in remaining:
                await self._call(n, time.monotonic())

        for started in range(min(self.concurrency or 1, self.num_calls)):
            calling.start_soon(caller)
            if started % 64 == 63:  # tens of thousands of first steps at once would stall the loop
                await anyio.lowlevel.checkpoint()

    async def _open(self, calling: anyio.abc.TaskGroup) -> None:
        assert self.rate is not None
        draw = random.Random(1)
        due = time.monotonic()
        for n in range(self.num_calls):
            due += draw.expovariate(self.rate)
            if (left_s := due - time.monotonic()) > 0:
                await anyio.sleep(left_s)
            calling.start_soon(self._call, n, due)

    async def _call(self, n: int, due: float) -> None:
        kind = KINDS[self._kinds[n]]
        self._outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self._outstanding)
        try:
            answer = await self.target.ask(kind.write(n))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError) as error:
            self.errors[repr(error)[:100]] += 1
            return
        finally:
            self._outstanding -= 1
        self.latency_s[n] = time.monotonic() - due
        if answer.status == "infrastructure":
            self.errors[answer.said[:100]] += 1
        elif not kind.is_right(n, answer) and len(self.wrong) < 1000:
            self.wrong.append(f"{n} {self._kinds[n]}: {answer.status} {answer.stdout[:80]!r}")
        answer.stdout = answer.stderr = ""
        self.answers[n] = answer

    async def _show_progress(self) -> None:
        what = f"{self.target.name}, {self._title()}"
        every_s = 1 if sys.stderr.isatty() else 10
        for seconds in itertools.count(every_s, every_s):
            await anyio.sleep(every_s)
            done = len(self.latency_s) + self.errors.total()
            line = f"{what}: {done:,} of {self.num_calls:,} answered, {seconds} s"
            print(line, file=sys.stderr, end="\r" if sys.stderr.isatty() else "\n", flush=True)

    def _title(self) -> str:
        if self.rate is not None:
            return f"open loop, {self.rate:.0f} calls/s"
        return f"{self.concurrency} at once"

    def _figures(
        self, wall_s: float, own_s: float, theirs_s: float, machine_s: float
    ) -> LoadFigures:
        answers = list(self.answers.values())
        good = [a for a in answers if a.status != "infrastructure"]
        num = max(1, len(good))
        queue = [a.queue_s for a in good if not math.isnan(a.queue_s)]
        children = [a.cpu_s for a in good if a.cpu_s > 0]
        cpu: dict[str, float | None] = {
            "this process (supervisor and generator)": round(1000 * own_s / num, 3),
            "workers with their calls": round(1000 * theirs_s / num, 3),
        }
        if children:
            cpu["of these, the calls themselves"] = round(1000 * statistics.mean(children), 3)
        # Without any, the service's processes are unknown.
        cpu["total"] = round(1000 * (own_s + theirs_s) / num, 3) if theirs_s else None
        cpu["the whole machine"] = round(1000 * machine_s / num, 3)
        return {
            "target": self.target.name,
            "load": self._title(),
            "calls": self.num_calls,
            "most_outstanding": self.most_outstanding,
            "wall_s": round(wall_s, 2),
            "calls_per_s": round(len(good) / wall_s, 1),
            "lost": self.num_calls - len(good),
            "wrong": len(self.wrong),
            "queue_ms": _percentiles(queue),
            "run_ms": _percentiles([a.run_s for a in good if not math.isnan(a.run_s)]),
            "latency_ms": _percentiles(list(self.latency_s.values())),
            "loop_lag_ms": _percentiles(self.lag.samples),
            "peak_memory_mib": round(peak_memory_mib()),
            "cpu_ms_per_call": cpu,
            "errors": dict(self.errors.most_common(5)),
            "wrong_answers": self.wrong[:5],
        }


def _percentiles(seconds: list[float]) -> Percentiles | None:
    if not seconds:
        return None
    seconds.sort()
    last = len(seconds) - 1
    p50, p95, p99 = (round(1000 * seconds[round(last * p / 100)], 3) for p in (50, 95, 99))
    return {"p50": p50, "p95": p95, "p99": p99, "max": round(1000 * seconds[-1], 3)}


# --- the whole ---------------------------------------------------------------------------------


async def bench(options: argparse.Namespace) -> BenchFigures:
    runs: list[RunFigures] = []
    async with contextlib.AsyncExitStack() as stack:
        settings = PoolSettings.model_validate(options.pool)
        targets = [await stack.enter_async_context(open_pool(settings))]
        if options.against:
            service = open_code_judge(options.against, options.cpu_of)
            targets.append(await stack.enter_async_context(service))
        for target in targets:
            best = 0.0
            for concurrency in options.concurrency:
                num = max(options.calls, concurrency) if target is targets[0] else options.calls
                load = Load(target, options.mix, num, concurrency)
                runs.append(await _one(load, options))
                best = max(best, runs[-1]["calls_per_s"])
            for part in options.open:
                load = Load(target, options.mix, options.calls, rate=best * part)
                runs.append(await _one(load, options))
    return {"mix": options.mix, "pool": options.pool, "runs": runs}


async def _one(load: Load, options: argparse.Namespace) -> RunFigures:
    def floors() -> dict[str, dict[str, float]]:
        measure = partial(measure_floor, load.target.floor_command, load.mix, options.floor)
        return {"plain": measure(prepared=False), "prepared": measure(prepared=True)}

    before = await anyio.to_thread.run_sync(floors)
    figures = await load.run()
    after = await anyio.to_thread.run_sync(floors)
    total = figures["cpu_ms_per_call"]["total"]
    floor = {
        which: {name: round((ms + after[which][name]) / 2, 3) for name, ms in kinds.items()}
        for which, kinds in before.items()
    }
    run: RunFigures = {
        **figures,
        "floor_cpu_ms": floor,
        "times_the_floor": {
            which: round(total / kinds["mix"], 2) if total else None
            for which, kinds in floor.items()
        },
    }
    say(_in_words(run))
    return run


def _in_words(f: RunFigures) -> str:
    p50, p99 = (f["run_ms"]["p50"], f["run_ms"]["p99"]) if f["run_ms"] else (math.nan, math.nan)
    lag = f["loop_lag_ms"]["p99"] if f["loop_lag_ms"] else math.nan
    cpu = f["cpu_ms_per_call"]["total"]
    times = f["times_the_floor"]
    cost = (
        f"CPU {cpu} ms a call ({f['cpu_ms_per_call']['the whole machine']} the whole machine), "
        f"{times['plain']} times the floor ({times['prepared']} prepared)"
    )
    return (
        f"{f['target']}, {f['load']}: {f['calls']:,} calls in {f['wall_s']} s, "
        f"{f['calls_per_s']:.0f}/s; lost {f['lost']}, wrong {f['wrong']}; run p50 {p50} ms, "
        f"p99 {p99} ms; {cost if cpu else 'CPU unknown'}; loop lag p99 "
        f"{lag} ms; peak memory {f['peak_memory_mib']} MiB"
    )


def _code_judge(text: str) -> str:
    if urlsplit(text).hostname not in ("127.0.0.1", "localhost", "::1"):
        raise argparse.ArgumentTypeError(f"{text!r}: the service must be on this machine")
    return text.rstrip("/")


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _pair(text: str) -> tuple[str, object]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = parser_for("sandbox", __doc__)
    add = parser.add_argument
    add(
        "--concurrency",
        type=numbers,
        default=[1, 64, 1024],
        help="concurrency of the closed loops",
    )
    add("--open", type=_shares, default=[], metavar="PART,...",
        help="then open loops, at these fractions of the best throughput so far")  # fmt: skip
    add("--calls", type=int, default=5000, help="calls per run; at least the concurrency")
    add("--mix", metavar="KIND=WEIGHT,...", type=make_mix, default={"trivial": 1.0},
        help=f"kinds of calls: {', '.join(KINDS)}")  # fmt: skip
    add("--against", type=_code_judge, metavar="URL", help="a Code Judge to measure as well")
    add("--cpu-of", type=numbers, default=[], metavar="PID,...",
        help="process ids of that service, for its CPU time")  # fmt: skip
    add("--floor", type=int, default=300, help="calls per measurement of the floor")
    add("--json", type=Path, help="file for the figures")
    add("pool", nargs="*", type=_pair, metavar="key=value", help="settings of our pool")
    options = parser.parse_args(arguments)
    # The CPU time of a recycled worker would be lost.
    slots.RECYCLE_AFTER = 1 << 30
    options.pool = dict(options.pool)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    figures = anyio.run(bench, options, backend_options={"use_uvloop": True})
    text = json.dumps(figures, indent=2)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")
    return 1 if any(run["wrong"] for run in figures["runs"]) else 0


if __name__ == "__main__":
    sys.exit(main())
