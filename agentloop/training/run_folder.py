"""A run's folder: what it was told, what came of it, what it can go on from.

config.toml  metrics.jsonl  trajectories/step-00001.jsonl  checkpoints/  weights/  logs/
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import orjson
import pydantic

from agentloop.errors import SettingsError
from agentloop.trajectory import Trajectory

__all__ = ["RunFolder", "RunSettings"]


class RunSettings(pydantic.BaseModel):
    """Where a run's files go."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    folder: Path = pydantic.Field(Path("runs"), description="Folder of all runs.")
    name: str = pydantic.Field(
        "", pattern=r"^[\w.-]*$", description="Of this run; none: the time of its start."
    )


class RunFolder:
    """Makes the folder and appends to its files."""

    def __init__(self, path: Path, config: str) -> None:
        """
        Raises:
            SettingsError: there is a run of that name, or the folder cannot be made.
        """
        self.path = path
        if any((path / name).exists() for name in ("metrics.jsonl", "start/metrics.jsonl")):
            raise SettingsError(f"run.name: there is a run at {path} already")
        try:
            path.mkdir(parents=True, exist_ok=True)  # one that never came to anything is no run
            weakref.finalize(self, os.close, _lock(path))
            for name in ("trajectories", "checkpoints", "weights", "logs", "batches"):
                (path / name).mkdir(exist_ok=True)
            (path / "config.toml").write_text(config, "utf-8")
        except OSError as error:
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error

    @classmethod
    def of(cls, settings: RunSettings, config: str) -> Self:
        """As the settings say. Its path is absolute: servers of others read weights there, too."""
        name = settings.name or time.strftime("%Y%m%d-%H%M%S")
        run = cls((settings.folder.expanduser() / name).absolute(), config)
        run._become_latest()
        return run

    def _become_latest(self) -> None:
        """`latest` beside it leads here; where that cannot be, nobody misses it much."""
        link, new = self.path.with_name("latest"), self.path.with_name(f".latest.{os.getpid()}")
        with suppress(OSError):
            if link.is_symlink() or not link.exists():
                new.symlink_to(self.path.name)
                new.replace(link)

    def within(self, name: str) -> RunFolder:
        """A run that is a part of this one. Raises as the constructor."""
        return RunFolder(self.path / name, (self.path / "config.toml").read_text("utf-8"))

    @staticmethod
    def model_in(path: Path) -> Path:
        """The folder of the newest model of the run at `path`.

        Raises:
            SettingsError: there is none.
        """
        published = [one for one in (path / "weights").glob("*") if one.name.isdigit()]
        newest = sorted(published, key=lambda one: int(one.name))[-1:]
        for folder in (*newest, path / "model", path / "start" / "model"):
            if (folder / "config.json").is_file():
                return folder
        raise SettingsError(f"{path}: no run with a model is there")

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Raises SettingsError: the file cannot be written, such as on a disk that is full."""
        _append(self.path / "metrics.jsonl", [metrics])

    def add_trajectories(
        self, step: int, rows: Iterable[tuple[Mapping[str, Any], Trajectory]]
    ) -> None:
        """Each with what was made of it: its task, reward, advantage. Raises as `add_metrics`."""
        path = self.path / "trajectories" / f"step-{step:05}.jsonl"
        _append(path, ({**about, "trajectory": one.to_dict()} for about, one in rows))


def _lock(path: Path) -> int:
    """A file that this process holds until its end: nobody else has this run meanwhile.

    Raises:
        SettingsError: somebody has.
    """
    file = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(file)
        raise SettingsError(f"run.name: a run at {path} is going on") from None
    return file


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    try:
        with path.open("ab") as file:
            for row in rows:
                file.write(_line(dict(row)))
    except OSError as error:
        raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error


def _line(row: dict[str, Any]) -> bytes:
    try:
        return orjson.dumps(row, default=str) + b"\n"
    except TypeError:  # an integer of more than 64 bits, which a model may give to a tool
        return json.dumps(row, default=str).encode() + b"\n"
