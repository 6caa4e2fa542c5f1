"""The cheats of test_harbor.py, each many times, with an honest solution between them.

python -m tests.integration.cheats --tries 1000
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import anyio

from agentloop.errors import InfrastructureFailed
from agentloop.sandbox import Pool
from tests.integration.test_harbor import CHEATS, SETTINGS, reward_of, write_task

HONEST = "echo hello $NAME > hello.txt"
AT_ONCE = 4


async def main(tries: int, minutes: float) -> int:
    """Go through all of them in turn, and return how many rewards were wrong."""
    deadline = time.monotonic() + 60 * minutes
    turns = itertools.product(range(tries), [HONEST, *CHEATS])
    ended, wrong, lost = Counter[str](), Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as top:
        folder = write_task(Path(top))

        async def one_by_one() -> None:
            for _, command in turns:
                if time.monotonic() > deadline:
                    return
                try:
                    reward = await reward_of(pool, folder, command)
                except InfrastructureFailed as error:
                    lost[str(error)] += 1
                    continue
                ended[command] += 1
                if reward.value != (command == HONEST):
                    wrong[command] += 1
                    print(f"WRONG {command!r}: {reward}", flush=True)
                if ended.total() % 330 == 0:
                    print(f"{ended.total()} ended, {wrong.total()} wrong", flush=True)

        async with Pool(SETTINGS) as pool, anyio.create_task_group() as group:
            for _ in range(AT_ONCE):
                group.start_soon(one_by_one)
    each = [ended[cheat] for cheat in CHEATS]
    print(f"{len(CHEATS)} cheats, {min(each)} to {max(each)} tries of each, {sum(each)} in all")
    print(f"honest: {ended[HONEST]}; wrong: {wrong.total()}; infrastructure: {dict(lost)}")
    return min(wrong.total(), 1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tries", type=int, default=1000, help="of each cheat")
    parser.add_argument("--minutes", type=float, default=25, help="of time, at most")
    options = parser.parse_args()
    sys.exit(anyio.run(main, options.tries, options.minutes))
