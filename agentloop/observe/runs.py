"""List the runs on disk, read their metrics and what made them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypedDict

from agentloop.errors import NotThere
from agentloop.plain_json import loads, read_rows

_MAX_RUNS = 100
_MAX_ROWS = 5_000
_MAX_COMMANDS = 20


class RunEntry(TypedDict):
    """A run in the list of the page; `current` is the one that is shown."""

    name: str
    steps: int
    modified_unix_s: float
    current: bool


class Origin(TypedDict):
    """The settings and the commands that made a run."""

    settings: str
    commands: list[dict[str, object]]


class Curves(Origin):
    """The metrics of a run, and what made it."""

    rows: list[dict[str, object]]


def runs_beside(folder: Path) -> list[RunEntry]:
    """Return the run in `folder` and its siblings, newest first."""
    runs: list[RunEntry] = []
    for path in folder.parent.glob("*/metrics.jsonl"):
        run = path.parent
        if run.is_symlink() or run.name.startswith("."):
            continue
        try:
            stat, steps = path.stat(), _last_step(path)
        except OSError:  # being removed, or not a file
            continue
        runs.append(
            {
                "name": run.name,
                "steps": steps,
                "modified_unix_s": stat.st_mtime,
                "current": run.name == folder.name,
            }
        )
    runs.sort(key=lambda row: -row["modified_unix_s"])
    return runs[:_MAX_RUNS] + [row for row in runs[_MAX_RUNS:] if row["current"]]


def curves(folder: Path, run: str) -> Curves:
    """Return the metrics of a run with this name beside `folder`, `rows`, and `origin_of` it.

    Raises:
        NotThere: There is no such run.
    """
    # Untrusted input must not form a path.
    if run not in {row["name"] for row in runs_beside(folder)}:
        raise NotThere(f"run {run!r}: not found in {folder.parent}")
    path = folder.parent / run
    return {"rows": [*start_metrics(path), *read_metrics(path)], **origin_of(path)}


def origin_of(folder: Path) -> Origin:
    """Return what made a run: its `settings`, without what may be secret, and its `commands`.

    The commands are those that started and resumed it, as `RunFolder.open` has noted them, each
    with its time and, unless it was killed, that of its end.
    """
    origin: Origin = {"settings": "", "commands": []}
    with suppress(OSError, UnicodeDecodeError):
        origin["settings"] = _without_secrets((folder / "config.toml").read_text("utf-8"))
    with suppress(OSError):
        for row in read_rows(folder / "commands.jsonl", last=_MAX_COMMANDS)[0]:
            if "command" in row:
                origin["commands"].append(row)
            elif origin["commands"]:
                origin["commands"][-1] |= row
    return origin


def _without_secrets(config: str) -> str:
    """Return the text of config.toml without what may be secret, since a page may be passed on.

    Tokens are never written there, but MCP servers may have some in `env` and `headers`, and URLs
    may contain passwords.
    """
    lines = []
    is_shown = True
    for line in config.splitlines():
        if line.startswith("["):
            is_shown = re.search(r"\.(env|headers)\]", line) is None
        if is_shown and not re.match(r"(env|headers) = \{.", line):
            lines.append(re.sub(r"://[^\s'\"@/]*@", "://...@", line))
    return "\n".join(lines)


def of_start(row: Mapping[str, object]) -> dict[str, object]:
    """Return a row of the metrics of supervised fine-tuning with `start/` in front of each name.

    Its steps are counted apart from those of the rollouts.
    """
    return {f"start/{name}": value for name, value in row.items()}


def start_metrics(folder: Path) -> list[dict[str, object]]:
    """The metrics of a run's supervised fine-tuning, named as by `of_start`; none without it."""
    return [of_start(row) for row in read_metrics(folder / "sft")]


def read_metrics(folder: Path) -> list[dict[str, object]]:
    """Return the last complete rows of a run's metrics, which may still be written to."""
    try:
        return read_rows(folder / "metrics.jsonl", last=_MAX_ROWS)[0]
    except OSError:
        return []


def _last_step(path: Path) -> int:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 65_536))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        try:
            return int(loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0
