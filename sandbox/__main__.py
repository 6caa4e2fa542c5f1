"""`python -m sandbox doctor`: which walls stand here. `python -m sandbox run`: one program."""

from __future__ import annotations

import argparse
import sys

import anyio

from sandbox.doctor import report
from sandbox.pool import Pool
from sandbox.settings import PoolSettings


async def doctor() -> int:
    print(await report(print))
    return 0


async def run(backend: str, timeout_s: float) -> int:
    code = await anyio.to_thread.run_sync(sys.stdin.read)
    settings = PoolSettings.model_validate({"backend": backend, "workers": 1})
    async with Pool(settings, on_progress=lambda line: print(line, file=sys.stderr)) as pool:
        result = await pool.run(code, timeout_s=timeout_s)
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    if result.result is not None:
        print(result.result)
    if not result.ok:
        print(f"[{result.status}, {result.run_s:.3f} s]", file=sys.stderr)
    return 0 if result.ok else result.exit_code or 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m sandbox", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("doctor", help="a table of the layers that hold on this machine")
    one = actions.add_parser("run", help="run the program on standard input")
    one.add_argument("--backend", default="auto", choices=["auto", "docker", "process"])
    one.add_argument("--timeout-s", type=float, default=4.0)
    args = parser.parse_args()
    if args.action == "doctor":
        return anyio.run(doctor)
    return anyio.run(run, args.backend, args.timeout_s)


if __name__ == "__main__":
    sys.exit(main())
