"""Random programs, some hostile, next to calls that verify themselves.

Whatever a program does is its own affair: its call, or its session, ends with a status that judges
the program. Nobody beside it may notice. `attribute` runs such a mix and returns every violation,
with the names of its pieces. By hand:

    python -m tests.sandbox.attribution BACKEND NUMBER SEED
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import anyio

from agentloop.sandbox import CallResult, CallStatus, LostBy, Pool, PoolSettings, SessionLost
from tests.sandbox.hostile import HOSTILE

PROGRAM_TIMEOUT_S = 2.0
NEIGHBOUR_TIMEOUT_S = 60.0  # a busy machine is not what is tested

HARMLESS = {
    "adds": "print(sum(range(1000)))",
    "prints JSON": "import json; print(json.dumps({'a': [1, 2]}))",
    "holds some memory": "held = bytearray(20 << 20)",
    "multiplies": "import math; print(math.factorial(200) % 10007)",
    "writes and reads": "open('note', 'w').write('kept'); print(open('note').read())",
}
PIECES = HOSTILE | HARMLESS


@dataclass(frozen=True)
class Program:
    """A call of several pieces, or a session with a cell for each piece.

    Attributes:
        names: the names of its pieces.
    """

    names: tuple[str, ...]
    in_session: bool

    @property
    def code(self) -> str:
        """Its pieces as one program: the next one runs even if one fails."""
        if len(self.names) == 1:
            return PIECES[self.names[0]]
        return "".join(
            f"try: exec({PIECES[name]!r}, globals())\nexcept BaseException: pass\n"
            for name in self.names
        )


def programs(seed: int, number: int) -> list[Program]:
    """Draw `number` programs; the same for the same seed."""
    draw = random.Random(seed)
    hostile, harmless = list(HOSTILE), list(HARMLESS)
    return [
        Program(
            tuple(draw.choice(hostile if draw.random() < 0.8 else harmless)
                  for _ in range(draw.randint(1, 4))),
            draw.random() < 0.3,
        )
        for _ in range(number)
    ]  # fmt: skip


@dataclass
class Found:
    """The results: how programs ended, the number of correct neighbours, and violations."""

    ends: Counter[str] = field(default_factory=Counter)
    num_right: int = 0
    violations: list[str] = field(default_factory=list)


async def attribute(
    pool: Pool, *, seed: int, number: int, side_by_side: int = 3, num_neighbours: int = 2
) -> Found:
    """Run `number` random programs, with neighbours running all the time."""
    actual = Found()
    remaining = iter(programs(seed, number))
    num_lost = pool.stats()["lost"]

    async def run_programs() -> None:
        for program in remaining:
            await _run(pool, program, actual)

    async with anyio.create_task_group() as beside:
        for place in range(num_neighbours):
            beside.start_soon(_call_neighbour, pool, actual, seed + place)
        beside.start_soon(_session_neighbour, pool, actual)
        async with anyio.create_task_group() as tasks:
            for _ in range(side_by_side):
                tasks.start_soon(run_programs)
        beside.cancel_scope.cancel()
    if lost := pool.stats()["lost"] - num_lost:
        actual.violations.append(f"{lost} workers were lost")
    return actual


async def _run(pool: Pool, program: Program, actual: Found) -> None:
    if not program.in_session:
        result = await pool.run(program.code, timeout_s=PROGRAM_TIMEOUT_S)
        _judge(result, program.names, actual)
        return
    async with pool.session() as session:
        for number, name in enumerate(program.names, 1):
            try:
                result = await session.run(PIECES[name], timeout_s=PROGRAM_TIMEOUT_S)
            except SessionLost as error:
                actual.ends[f"session lost by {error.by}"] += 1
                if error.by is not LostBy.PROGRAM or number == 1:
                    actual.violations.append(f"{error!r} of {program.names[:number]}")
                return
            _judge(result, program.names[:number], actual)


def _judge(result: CallResult, names: Sequence[str], actual: Found) -> None:
    actual.ends[result.status] += 1
    if result.status.is_unscorable:
        actual.violations.append(f"{result.status} ({result.error}) of {names}")
    if all(name in HARMLESS for name in names) and result.status is not CallStatus.OK:
        actual.violations.append(f"{result.status} of the harmless {names}: {result.stderr}")


# Uses what neighbours compete for: memory, threads, processes, files, the processor; and tells
# whether all of it was its own.
VERIFIED = """
import hashlib, os, subprocess, threading
assert os.listdir() == [], os.listdir()
held = bytearray(b'x' * (48 << 20))
results = []
threads = [threading.Thread(target=lambda: results.append(1)) for _ in range(8)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
assert len(results) == 8
assert subprocess.run(['/bin/echo', 'child'], capture_output=True).stdout == b'child\\n'
open('mine', 'w').write(input())
assert held.count(b'x') == 48 << 20
digest = b''
for _ in range(20_000): digest = hashlib.sha256(digest).digest()
print(open('mine').read(), digest.hex()[:8])
"""


def _digest() -> str:
    digest = b""
    for _ in range(20_000):
        digest = hashlib.sha256(digest).digest()
    return digest.hex()[:8]


async def _call_neighbour(pool: Pool, actual: Found, seed: int) -> None:
    expected = _digest()
    draw = random.Random(seed)
    while True:
        word = str(draw.random())
        result = await pool.run(VERIFIED, stdin=word, timeout_s=NEIGHBOUR_TIMEOUT_S)
        if result.status is CallStatus.OK and result.stdout == f"{word} {expected}\n":
            actual.num_right += 1
        else:
            actual.violations.append(f"a neighbour's call: {result}")


async def _session_neighbour(pool: Pool, actual: Found) -> None:
    async with pool.session() as session:
        await session.run("total = 0")
        for number in range(1, 10**9):
            result = await session.run(f"total += {number}; total", timeout_s=NEIGHBOUR_TIMEOUT_S)
            if result.result == str(math.comb(number + 1, 2)):
                actual.num_right += 1
            else:
                actual.violations.append(f"a neighbour's cell {number}: {result}")
                return
            await anyio.sleep(0.01)


async def _main(backend: str, number: int, seed: int) -> int:
    settings = PoolSettings.model_validate({"backend": backend, "workers": 4, "preload": []})
    async with Pool(settings, on_progress=print) as pool:
        actual = await attribute(pool, seed=seed, number=number)
    ends = ", ".join(f"{end} {count}" for end, count in sorted(actual.ends.items()))
    print(f"{backend}: {ends}; {actual.num_right} right answers of neighbours")
    print(*actual.violations, f"{len(actual.violations)} violations", sep="\n")
    return 1 if actual.violations else 0


if __name__ == "__main__":
    sys.exit(anyio.run(_main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
