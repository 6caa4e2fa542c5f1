"""A run's folder: what it was told, what came of it, what it can go on from.

config.toml  metrics.jsonl  trajectories/step-00001.jsonl  checkpoints/  weights/  logs/
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
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
        try:
            path.mkdir(parents=True)
            for name in ("trajectories", "checkpoints", "weights", "logs", "batches"):
                (path / name).mkdir()
            (path / "config.toml").write_text(config, "utf-8")
        except FileExistsError:
            raise SettingsError(f"run.name: there is a run at {path} already") from None
        except OSError as error:
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error

    @classmethod
    def of(cls, settings: RunSettings, config: str) -> Self:
        """As the settings say. Its path is absolute: servers of others read weights there, too."""
        name = settings.name or time.strftime("%Y%m%d-%H%M%S")
        return cls((settings.folder.expanduser() / name).absolute(), config)

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Raises SettingsError: the file cannot be written, such as on a disk that is full."""
        _append(self.path / "metrics.jsonl", [metrics])

    def add_trajectories(
        self, step: int, rows: Iterable[tuple[Mapping[str, Any], Trajectory]]
    ) -> None:
        """Each with what was made of it: its task, reward, advantage. Raises as `add_metrics`."""
        path = self.path / "trajectories" / f"step-{step:05}.jsonl"
        _append(path, ({**about, "trajectory": one.to_dict()} for about, one in rows))


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
