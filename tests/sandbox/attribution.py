"""Random programs, some hostile, next to calls that verify themselves.

Whatever a program does is its own affair: its call, or its session, ends with a status that judges
the program. Nobody beside it may notice. `attribute` runs such a mix and returns every violation,
with the code that reproduces it. By hand:

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

PROGRAM_TIMEOUT_S = 2.0
NEIGHBOUR_TIMEOUT_S = 60.0  # a busy machine is not what is tested

# Each does one thing to itself, to its limits, or to whoever it can reach.
HOSTILE = (
    "import os; os._exit(0)",
    "import os; os._exit(3)",
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
    "import os, signal; os.kill(os.getpid(), signal.SIGXCPU)",
    "import os, signal; os.kill(-1, signal.SIGKILL)",
    "import os, signal; os.kill(-1, signal.SIGSTOP)",
    "import os, signal; os.killpg(0, signal.SIGKILL)",
    "import os, signal\nfor pid in range(1, 400):\n    try: os.kill(pid, signal.SIGKILL)\n"
    "    except OSError: pass",
    "import signal\nfor number in range(1, 65):\n    try: signal.signal(number, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "import os, time\nfor _ in range(28):\n    if os.fork() == 0:\n        held = []\n"
    "        while True: held.append(bytearray(1 << 20))\n"
    "time.sleep(60)",
    "import os, time\nopen('/proc/self/oom_score_adj', 'w').write('500')\nfor _ in range(28):\n"
    "    if os.fork() == 0:\n        held = [bytearray(1 << 20) for _ in range(40)]\n"
    "        time.sleep(60)\n"
    "time.sleep(60)",
    "held = []\nwhile True: held.append(bytearray(8 << 20))",
    "import mmap\nheld = [mmap.mmap(-1, 64 << 20) for _ in range(64)]\n"
    "for area in held:\n    for at in range(0, 64 << 20, 4096): area[at] = 1",
    "import os\nfor _ in range(64):\n    fd = os.memfd_create('x')\n"
    "    for _ in range(32): os.write(fd, bytes(1 << 20))",
    "with open('large', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
    "for number in range(10_000): open(f'file-{number}', 'w').close()",
    "while True: print('flood' * 1000)",
    "import os\nos.closerange(0, 256)",
    "import os\nfor fd in range(256):\n    try: os.write(fd, b'\\x00\\x00\\x00\\x10junk')\n"
    "    except OSError: pass",
    "import threading, time\nfor _ in range(200):\n"
    "    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
    "import os\nos.execv('/bin/sleep', ['sleep', '60'])",
    "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 7'])",
    "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(60)\n"
    "    os._exit(0)",
    "import ctypes; ctypes.string_at(0)",
    "import ctypes; ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)",  # PR_SET_PDEATHSIG
    "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
    "raise KeyboardInterrupt",
    "raise SystemExit(5)",
    "1 / 0",
    "while True: pass",
    "import time; time.sleep(60)",
    "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    "import os, signal, threading\nthreading.Timer(0.01, os._exit, (0,)).start()",
    "import os\nfor which in range(16):\n    try:\n        import resource\n"
    "        resource.setrlimit(which, (0, 0))\n    except (ValueError, OSError): pass",
    "import os\nos.nice(19)\ntry: os.sched_setaffinity(0, {0})\nexcept OSError: pass",
    "import os, shutil\nos.chmod('.', 0)",
    "import os\nos.symlink('/', 'root'); os.mkdir('closed', 0)",
    "import gc, os\nfor fd in os.listdir('/proc/self/fd'):\n    try: os.read(int(fd), 1)\n"
    "    except OSError: pass",
    "import os\nfor name in ('comm', 'autogroup', 'oom_score_adj', 'coredump_filter', 'mem'):\n"
    "    try: open(f'/proc/{os.getppid()}/{name}', 'w').write('0')\n    except OSError: pass",
)
HARMLESS = (
    "print(sum(range(1000)))",
    "import json; print(json.dumps({'a': [1, 2]}))",
    "held = bytearray(20 << 20)",
    "import math; print(math.factorial(200) % 10007)",
    "open('note', 'w').write('kept'); print(open('note').read())",
)


@dataclass(frozen=True)
class Program:
    """A call of several pieces, or a session with a cell for each piece."""

    pieces: tuple[str, ...]
    in_session: bool


def programs(seed: int, number: int) -> list[Program]:
    """Draw `number` programs; the same for the same seed."""
    draw = random.Random(seed)
    return [
        Program(
            tuple(draw.choice(HOSTILE if draw.random() < 0.7 else HARMLESS)
                  for _ in range(draw.randint(1, 3))),
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
    found = Found()
    left = iter(programs(seed, number))
    num_replaced = pool.stats()["replaced"]

    async def run_programs() -> None:
        for program in left:
            await _run(pool, program, found)

    async with anyio.create_task_group() as beside:
        for place in range(num_neighbours):
            beside.start_soon(_call_neighbour, pool, found, seed + place)
        beside.start_soon(_session_neighbour, pool, found)
        async with anyio.create_task_group() as tasks:
            for _ in range(side_by_side):
                tasks.start_soon(run_programs)
        beside.cancel_scope.cancel()
    if lost := pool.stats()["replaced"] - num_replaced:
        found.violations.append(f"{lost} workers were lost")
    return found


async def _run(pool: Pool, program: Program, found: Found) -> None:
    if not program.in_session:
        result = await pool.run("\n".join(program.pieces), timeout_s=PROGRAM_TIMEOUT_S)
        _judge(result, program.pieces, found)
        return
    async with pool.session() as session:
        for number, piece in enumerate(program.pieces):
            try:
                result = await session.run(piece, timeout_s=PROGRAM_TIMEOUT_S)
            except SessionLost as error:
                found.ends[f"session lost by {error.by}"] += 1
                if error.by is not LostBy.PROGRAM or number == 0:
                    found.violations.append(f"{error!r} of {program.pieces[:number]!r}")
                return
            _judge(result, program.pieces[: number + 1], found)


def _judge(result: CallResult, pieces: Sequence[str], found: Found) -> None:
    found.ends[result.status] += 1
    if result.status.is_unscorable:
        found.violations.append(f"{result.status} ({result.error}) of {pieces!r}")
    if all(piece in HARMLESS for piece in pieces) and result.status is not CallStatus.OK:
        found.violations.append(f"{result.status} of the harmless {pieces!r}: {result.stderr}")


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


async def _call_neighbour(pool: Pool, found: Found, seed: int) -> None:
    expected = _digest()
    draw = random.Random(seed)
    while True:
        word = str(draw.random())
        result = await pool.run(VERIFIED, stdin=word, timeout_s=NEIGHBOUR_TIMEOUT_S)
        if result.status is CallStatus.OK and result.stdout == f"{word} {expected}\n":
            found.num_right += 1
        else:
            found.violations.append(f"a neighbour's call: {result}")


async def _session_neighbour(pool: Pool, found: Found) -> None:
    async with pool.session() as session:
        await session.run("total = 0")
        for number in range(1, 10**9):
            result = await session.run(f"total += {number}; total", timeout_s=NEIGHBOUR_TIMEOUT_S)
            if result.result == str(math.comb(number + 1, 2)):
                found.num_right += 1
            else:
                found.violations.append(f"a neighbour's cell {number}: {result}")
                return
            await anyio.sleep(0.01)


async def _main(backend: str, number: int, seed: int) -> int:
    settings = PoolSettings.model_validate({"backend": backend, "workers": 1})
    async with Pool(settings, on_progress=print) as pool:
        found = await attribute(pool, seed=seed, number=number)
    ends = ", ".join(f"{end} {count}" for end, count in sorted(found.ends.items()))
    print(f"{backend}: {ends}; {found.num_right} right answers of neighbours")
    print(*found.violations, f"{len(found.violations)} violations", sep="\n")
    return 1 if found.violations else 0


if __name__ == "__main__":
    sys.exit(anyio.run(_main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
