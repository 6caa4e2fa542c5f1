"""`python -m agentloop.sandbox doctor`: check this machine's isolation. `run`: run one program."""

from __future__ import annotations

import argparse
import json
import re
import sys
from functools import partial

import anyio

from agentloop.sandbox.doctor import as_text, examine
from agentloop.sandbox.errors import SandboxError
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.settings import PoolSettings

tell = partial(print, file=sys.stderr, flush=True)
# All control characters but tab and newline, including the 8-bit ones that terminals interpret.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def for_terminal(text: str) -> str:
    """Return a program's text with control characters spelled out, safe to print on a terminal."""
    return CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


async def doctor(as_json: bool) -> int:
    report = await examine(tell)
    print(json.dumps(report, indent=2) if as_json else as_text(report))
    return 0 if report["isolated"] else 1


async def run(settings: PoolSettings, timeout_s: float) -> int:
    code = await anyio.to_thread.run_sync(sys.stdin.read)
    async with Pool(settings, on_progress=tell) as pool:
        result = await pool.run(code, timeout_s=timeout_s)
    value = "" if result.result is None else f"{result.result}\n"
    for stream, text in ((sys.stdout, result.stdout + value), (sys.stderr, result.stderr)):
        stream.write(for_terminal(text) if stream.isatty() else text)
    if not result.ok:
        tell(f"[{result.status}, {result.run_s:.3f} s]")
    return 0 if result.ok else result.exit_code or 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m agentloop.sandbox", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    check = actions.add_parser(
        "doctor",
        help="list the isolation layers of this machine; exit status 1 if calls are not isolated",
    )
    check.add_argument("--json", action="store_true", help="print the result as JSON")
    program = actions.add_parser("run", help="run the program read from standard input")
    program.add_argument("--backend", default="auto", choices=["auto", "docker", "process"])
    program.add_argument("--allow-weak-isolation", action="store_true")
    program.add_argument("--timeout-s", type=float, default=4.0)
    args = parser.parse_args(arguments)
    if args.action == "doctor":
        return anyio.run(doctor, args.json)
    settings = PoolSettings(
        backend=args.backend, workers=1, allow_weak_isolation=args.allow_weak_isolation
    )
    try:
        return anyio.run(run, settings, args.timeout_s)
    except (SandboxError, ValueError) as error:
        tell(f"error: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
