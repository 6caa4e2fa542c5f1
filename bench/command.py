"""Parts that the benchmarks' commands share: options, processes, the lag of a loop."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import anyio

__all__ = ["Lag", "helper_process", "numbers", "parser_for", "quantile", "say", "words"]


def parser_for(module: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser for `python -m bench.MODULE` that shows the description as it is."""
    return argparse.ArgumentParser(
        f"python -m bench.{module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def words(text: str) -> list[str]:
    return text.split(",")


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which this share of the values lies; 0 without values."""
    return sorted(values)[int(share * (len(values) - 1))] if values else 0.0


@contextmanager
def helper_process(*arguments: str) -> Iterator[str]:
    """Start `python -m ARGUMENTS`, yield its first line, and close its stdin to end it."""
    command = [sys.executable, "-m", *arguments]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.communicate(timeout=10)


class Lag:
    """The lag of a timer of 5 ms, in seconds."""

    PERIOD_S = 0.005

    def __init__(self) -> None:
        self.samples: list[float] = []

    async def measure(self) -> None:
        """Add samples until cancelled."""
        while True:
            due_s = time.perf_counter() + self.PERIOD_S
            await anyio.sleep(self.PERIOD_S)
            self.samples.append(time.perf_counter() - due_s)
