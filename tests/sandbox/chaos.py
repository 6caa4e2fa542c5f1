"""A load with known results, while processes of its workers are killed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import anyio

from agentloop.sandbox import CallResult, CallStatus, Pool, PoolSettings
from tests.patience import patient

TIMEOUT_S = 20.0  # no call takes as long, however slow the machine


def program(n: int) -> str:
    """Return the program of call number `n`: mostly trivial; some fail, some sleep."""
    match n % 20:
        case 0:
            return f"print({n}); raise ValueError({n})"
        case 1:
            return f"import time; print({n}, flush=True); time.sleep(0.2)\n{n} + 1"
        case 2:
            return f"import os; print({n}, flush=True); os._exit({n} % 7 + 1)"
    return f"print({n})\n{n} + 1"


def is_right(n: int, result: CallResult) -> bool:
    if result.stdout != f"{n}\n":
        return False
    match n % 20:
        case 0:
            error = result.error
            return result.status is CallStatus.ERROR and error is not None and (
                (error.type, error.message) == ("ValueError", str(n))
            )  # fmt: skip
        case 2:
            return result.status is CallStatus.ERROR and result.exit_code == n % 7 + 1
    return result.status is CallStatus.OK and result.result == str(n + 1)


@dataclasses.dataclass
class Tally:
    """The results of a load."""

    num_answers: list[int]
    ends: Counter[str] = dataclasses.field(default_factory=Counter)
    wrong: list[CallResult] = dataclasses.field(default_factory=list)
    second: int = 0
    most_attempts: int = 0

    def add(self, n: int, result: CallResult) -> None:
        self.num_answers[n] += 1
        self.most_attempts = max(self.most_attempts, result.attempt)
        self.second += result.attempt > 1
        if result.status is CallStatus.SANDBOX_ERROR:
            self.ends["infrastructure"] += 1
        elif result.status is CallStatus.KILLED and result.signal == signal.SIGKILL:
            self.ends["killed"] += 1  # its own process was one of those that we killed
        elif is_right(n, result):
            self.ends["right"] += 1
        else:
            self.ends["wrong"] += 1
            self.wrong.append(result)

    def check(self) -> None:
        """Check that each call got one result, and none a wrong one."""
        assert set(self.num_answers) == {1}
        assert self.wrong == []
        assert self.most_attempts <= 2


async def run_load(pool: Pool, num_calls: int, tally: Tally, first: int = 0) -> None:
    """Run all calls at once; the pool queues those that cannot run yet."""

    async def call(n: int) -> None:
        tally.add(n, await pool.run(program(n), timeout_s=TIMEOUT_S))

    async with anyio.create_task_group() as group:
        for n in range(first, first + num_calls):
            group.start_soon(call, n)


def children(pid: int) -> list[int]:
    actual: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            actual.extend(map(int, task.read_text().split()))
    return actual


def descendants(pid: int) -> list[int]:
    actual = [pid]
    for at in actual:
        actual.extend(children(at))
    return actual[1:]


def kill(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True


def kill_one(kind: str, servers: list[int], dice: random.Random) -> bool:
    """Kill a server, a zygote (its child) or a call (a zygote's child)."""
    pids = servers
    if kind != "server":
        pids = [pid for server in servers for pid in children(server)]
    if kind == "call":
        pids = [pid for zygote in pids for pid in children(zygote)]
    return bool(pids) and kill(dice.choice(pids))


async def answers(tally: Tally, every: int, dice: random.Random) -> AsyncIterator[None]:
    """Wait again and again, on average for `every` results. With a clock, workers of a slow
    machine would be killed before they are up."""
    while True:
        due = tally.ends.total() + dice.expovariate(1 / every)
        while tally.ends.total() < due:  # noqa: ASYNC110 - the tally sets no event
            await anyio.sleep(0.01)
        yield


async def kill_at_random(
    kinds: list[str], servers: Callable[[], list[int]], tally: Tally, every: int,
    dice: random.Random, killed: Counter[str],
) -> None:  # fmt: skip
    """Kill random processes of random workers until cancelled."""
    async for _ in answers(tally, every, dice):
        kind = dice.choice(kinds)
        killed[kind] += kill_one(kind, servers(), dice)


async def own_a_pool(settings: PoolSettings) -> None:
    """Run a pool under load for ever, in a process to be killed."""
    async with Pool(settings) as pool:
        tally = Tally([0] * 1_000_000)

        async def tell() -> None:
            while sum(tally.ends.values()) < 50:  # noqa: ASYNC110 - the pool sets no event
                await anyio.sleep(0.02)
            print("up", flush=True)

        async with anyio.create_task_group() as group:
            group.start_soon(tell)
            for first in itertools.count(step=500):
                await run_load(pool, 500, tally, first)


async def kill_an_owner(settings: PoolSettings, tmp: Path) -> set[int]:
    """Start such a process with temporary files in `tmp`, kill it at work, and return the pids
    of its children."""
    root = Path(__file__).parents[2]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), *sys.path]), "TMPDIR": str(tmp)}
    command = [sys.executable, "-m", "tests.sandbox.chaos", settings.model_dump_json()]
    async with await anyio.open_process(command, stdout=subprocess.PIPE, stderr=None, env=env) as p:
        assert p.stdout is not None
        with anyio.fail_after(patient(60)):
            assert (await p.stdout.receive()).startswith(b"up")
        family = set(descendants(p.pid))
        p.send_signal(signal.SIGKILL)
    return family


if __name__ == "__main__":
    anyio.run(own_a_pool, PoolSettings.model_validate_json(sys.argv[1]))
