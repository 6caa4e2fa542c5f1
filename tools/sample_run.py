"""Make the run that ships with the package, for `agentloop runs view --sample`, from a real one.

    agentloop train laptop      # stop it after the fine-tuning
    agentloop train laptop-rl model=runs/latest/sft/model loop.steps=8 \
        loop.prompts_per_step=4 loop.group_size=8 roc.down_sample_to_n=4 loop.evaluate_every=4 \
        server.device=cpu
    python -m tools.sample_run runs/latest

The copy has what the page shows: settings, metrics and the newest rollouts. What is left out
belongs to the machine (paths), or is large (weights, logs). Numbers are rounded.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentloop.observe.sample import SAMPLE
from agentloop.plain_json import dumps, loads

__all__ = ["main"]

_MAX_BYTES = 700_000
_NUM_DIGITS = 3
_OF_MACHINE = ("folder", "name", "model", "host", "port", "token", "control_token")


def main(arguments: list[str]) -> int:
    """Write the sample and return the exit status."""
    parser = argparse.ArgumentParser("python -m tools.sample_run", description=__doc__)
    parser.add_argument("run", type=Path)
    run: Path = parser.parse_args(arguments).run
    files = {
        "config.toml": _settings((run / "config.toml").read_text("utf-8")).encode(),
        "metrics.jsonl": b"".join(_lines(run / "metrics.jsonl")),
    }
    size = sum(map(len, files.values()))
    for path in sorted((run / "trajectories").glob("group-*.jsonl"), reverse=True):
        data = b"".join(_lines(path))
        if size + len(data) > _MAX_BYTES:
            break
        files[f"trajectories/{path.name}"] = data
        size += len(data)
    for old in SAMPLE.rglob("*.jsonl"):
        old.unlink()
    for name, data in files.items():
        (SAMPLE / name).parent.mkdir(parents=True, exist_ok=True)
        (SAMPLE / name).write_bytes(data)
    print(f"{SAMPLE}: {len(files)} files, {size:,} bytes")
    return 0


def _lines(path: Path) -> Iterator[bytes]:
    for line in path.read_bytes().splitlines():
        yield dumps(_round(loads(line))) + b"\n"


def _round(value: Any) -> Any:
    match value:
        case float() if abs(value) < 0.1:  # a learning rate is not 0
            return float(f"{value:.{_NUM_DIGITS}g}")
        case float():
            return round(value, _NUM_DIGITS)
        case dict():
            return {name: _round(element) for name, element in value.items()}
        case list():
            return [_round(element) for element in value]
        case _:
            return value


def _settings(toml: str) -> str:
    """Remove the settings that belong to the machine, so that defaults take their place."""
    of_machine = re.compile(rf"^(?:{'|'.join(_OF_MACHINE)}) = ")
    return "".join(line for line in toml.splitlines(True) if not of_machine.match(line))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
