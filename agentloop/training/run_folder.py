"""A run's folder: its settings, results and checkpoints.

config.toml  metrics.jsonl  queue.sqlite  trajectories/group-0000001.jsonl
checkpoints/  weights/  logs/
"""

from __future__ import annotations

import fcntl
import json
import os
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import pydantic

from agentloop.errors import SettingsError
from agentloop.plain_json import dumps, loads

__all__ = ["RunFolder", "RunSettings", "checkpoints_in", "is_going_on"]

_LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.01


class RunSettings(pydantic.BaseModel):
    """Settings of the run's folder."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    folder: Path = pydantic.Field(Path("runs"), description="Parent folder of all runs.")
    name: str = pydantic.Field(
        "", pattern=r"^[\w.-]*$", description="Name of this run; none: the time of its start."
    )


class RunFolder:
    """The folder of a run, locked by this process."""

    def __init__(self, path: Path, config: str, *, resume: bool = False) -> None:
        """Create the folder, or open that of a run to resume, and lock it.

        Args:
            config: the settings as TOML; with `resume` they are not written (see `tell`).

        Raises:
            SettingsError: a run of that name exists or is active, or the folder cannot be created.
        """
        self.path = path
        signs = ("metrics.jsonl", "start/metrics.jsonl", "queue.sqlite")
        if not resume and any((path / name).exists() for name in signs):
            raise SettingsError(
                f"run.name: there already is a run at {path}: use another name, or --resume"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)  # a folder without results is not a run
            self._unlock = weakref.finalize(self, os.close, _lock(path))
            for name in ("trajectories", "checkpoints", "weights", "logs", "batches"):
                (path / name).mkdir(exist_ok=True)
            for file in path.glob("*.jsonl"):
                _cut_to_lines(file)
        except OSError as error:
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error
        if not resume:
            self.tell(config)

    @classmethod
    def of(cls, settings: RunSettings, config: str) -> Self:
        """Create the folder of a new run. Its path is absolute, for servers that read weights."""
        name = settings.name or time.strftime("%Y%m%d-%H%M%S")
        run = cls((settings.folder.expanduser() / name).absolute(), config)
        run._become_latest()
        return run

    @classmethod
    def again(cls, path: Path) -> Self:
        """Open the folder of a run to resume. Raises the errors of the constructor."""
        return cls(path.expanduser().resolve(), "", resume=True)

    def tell(self, config: str) -> None:
        """Write the run's settings and mark it as active. Raises SettingsError if that fails."""
        self.write("config.toml", config)
        for name in ("ended", "failed"):
            (self.path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Release the run's lock, so that others can open it. Idempotent."""
        self._unlock()

    def end(self) -> None:
        """Mark the run as complete. Raises SettingsError if that cannot be written."""
        self.write("ended", "")

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Record an error that the block raises; a run that is cancelled has not failed."""
        try:
            yield
        except Exception as error:
            with suppress(SettingsError):  # the disk may be what failed
                self.write("failed", f"{error or type(error).__name__}\n")
            raise

    @property
    def has_rollouts(self) -> bool:
        """True if a group was rolled out or a step trained, now or before a restart."""
        groups = (self.path / "trajectories").glob("group-*.jsonl")
        return self.checkpoint is not None or any(True for _ in groups)

    def _become_latest(self) -> None:
        """Point the link `latest` in the parent folder here; ignore failures."""
        link, new = self.path.with_name("latest"), self.path.with_name(f".latest.{os.getpid()}")
        with suppress(OSError):
            if link.is_symlink() or not link.exists():
                new.symlink_to(self.path.name)
                new.replace(link)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Complete checkpoints by step."""
        return checkpoints_in(self.path)

    @property
    def checkpoint(self) -> Path | None:
        """The newest checkpoint, or None."""
        found = self.checkpoints
        return found[max(found)] if found else None

    def checkpoint_of(self, step: int) -> Path:
        """Return the checkpoint that holds this step.

        Raises:
            SettingsError: there is none.
        """
        checkpoints = self.checkpoints
        if step not in checkpoints:
            there = ", ".join(map(str, sorted(checkpoints))) or "none"
            raise SettingsError(f"--from: no checkpoint of step {step}; available: {there}")
        return checkpoints[step]

    def undo(self, step: int, *, name: str = "", files: Iterable[str] = ()) -> None:
        """Set aside all results after `step`: weights, checkpoints, metrics and groups.

        May be called again with the same `name` after a kill.

        Args:
            name: name of the target folder in `undone/`.
            files: files of groups to move.

        Raises:
            SettingsError: there is no checkpoint of that step, or something cannot be moved.
        """
        self.checkpoint_of(step)
        aside = self.path / "undone" / (name or time.strftime("%Y%m%d-%H%M%S"))
        groups = [Path(file).name for file in files]
        try:
            aside.mkdir(parents=True, exist_ok=True)
            (self.path / "ended").unlink(missing_ok=True)
            _move((self.path / "weights").iterdir(), aside / "weights")
            later = [path for held, path in _checkpoints(self.path) if held > step]
            _move(later, aside)
            for kind in ("trajectories", "entropy"):
                found = (self.path / kind / group for group in groups)
                _move(filter(Path.exists, found), aside / kind)
            whole = "metrics.jsonl"
            if (self.path / whole).exists() and not (aside / whole).exists():
                _write(aside / whole, (self.path / whole).read_text("utf-8"))
            lines = [dumps(row).decode() for row in self.metrics() if row["step"] <= step]
            _write(self.path / whole, "".join(f"{line}\n" for line in lines))
        except OSError as error:
            raise SettingsError(f"run.folder: {aside}: {error.strerror or error}") from error

    def within(self, name: str) -> RunFolder:
        """Create or resume a run that is a part of this one, in the subfolder `name`.

        Raises:
            SettingsError: as in the constructor.
        """
        part = RunFolder.again(self.path / name)
        part.tell((self.path / "config.toml").read_text("utf-8"))
        return part

    @staticmethod
    def model_in(path: Path) -> Path:
        """Return the folder of the newest model of the run at `path`.

        Raises:
            SettingsError: there is no run, or it has no model.
        """
        published = [one for one in (path / "weights").glob("*") if one.name.isdigit()]
        newest = sorted(published, key=lambda one: int(one.name))[-1:]
        for folder in (*newest, path / "model", path / "start" / "model"):
            if (folder / "config.json").is_file():
                return folder
        raise SettingsError(f"{path} is not a run with a model. Try `agentloop runs list`.")

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append a row to metrics.jsonl. Raises SettingsError if that fails (disk full)."""
        self.append("metrics.jsonl", metrics)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row to a JSONL file. Raises SettingsError if that fails (disk full)."""
        _append(self.path / name, [row])

    def write(self, name: str, text: str) -> None:
        """Write a file atomically. Raises SettingsError if that fails."""
        try:
            _write(self.path / name, text)
        except OSError as error:
            path = self.path / name
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error

    def add_group(self, number: int, rows: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
        """Write the rollouts of a group, one per line, atomically and durably.

        Returns:
            The file's path, relative to the run's folder, and its size in bytes.

        Raises:
            SettingsError: the file cannot be written, for example because the disk is full.
        """
        path = self.path / "trajectories" / f"group-{number:07}.jsonl"
        partial = path.with_name(f".{path.name}.partial")
        try:
            with partial.open("wb") as file:
                for row in rows:
                    file.write(dumps(dict(row)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            partial.replace(path)
            _sync(path.parent)  # make the file's name durable, too
        except OSError as error:
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error
        return str(path.relative_to(self.path)), size

    def read_group(self, path: str) -> list[dict[str, Any]]:
        """Read a group's rollouts. Raises SettingsError if they are missing or damaged."""
        try:
            lines = (self.path / path).read_bytes().splitlines()
        except OSError as error:
            raise SettingsError(f"{self.path / path}: {error.strerror or error}") from error
        return _parsed(lines, self.path / path)

    def metrics(self) -> list[dict[str, Any]]:
        """Read metrics.jsonl, ignoring an incomplete last line.

        Raises:
            SettingsError: another line is damaged.
        """
        return self.rows("metrics.jsonl")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Read the rows of a JSONL file, none if it does not exist. Raises like `metrics`."""
        try:
            whole = (self.path / name).read_bytes().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        return _parsed(whole.splitlines(), self.path / name)


def checkpoints_in(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of the run in a folder, by step."""
    return dict(_checkpoints(run))


def _checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return all complete checkpoints with their steps.

    Two may have the same step, since a failing step leaves a checkpoint of the state before it.
    """
    found = []
    for path in sorted((run / "checkpoints").glob("*/state.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append((int(json.loads(path.read_bytes())["state"]["step"]), path.parent))
    return found


def is_going_on(run: Path) -> bool:
    """Return whether a process has locked the run in a folder, without disturbing it.

    Raises:
        OSError: the lock file cannot be read.
    """
    try:
        file = os.open(run / ".lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _has(file, fcntl.LOCK_SH)  # released at once
    finally:
        os.close(file)


def _lock(path: Path) -> int:
    """Lock a run for this process and return the file descriptor that holds the lock.

    Raises:
        SettingsError: another process has locked it.
    """
    file = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while not _has(file, fcntl.LOCK_EX):
        # A run's lock is exclusive; `is_going_on` takes a shared one for a moment.
        if not _has(file, fcntl.LOCK_SH) or time.monotonic() > deadline_s:
            os.close(file)
            raise SettingsError(f"run.name: the run at {path} is active in another process")
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(_LOCK_POLL_S)
    return file


def _has(file: int, lock: int) -> bool:
    """Try to take a lock; return whether it succeeded."""
    try:
        fcntl.flock(file, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Flush a folder's entries to disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _move(paths: Iterable[Path], folder: Path) -> None:
    """Move files and folders into `folder`, creating it if there are any."""
    for path in list(paths):
        folder.mkdir(exist_ok=True)
        path.replace(folder / path.name)


def _write(path: Path, text: str) -> None:
    """Write a file atomically, so that a kill leaves either the old or the new content."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def _cut_to_lines(path: Path) -> None:
    """Cut off an incomplete last line, which a kill may have left."""
    if path.exists():
        data = path.read_bytes()
        if len(whole := data.rpartition(b"\n")[0]) + 1 < len(data):
            os.truncate(path, len(whole) + 1 if whole else 0)


def _parsed(lines: Sequence[bytes], path: Path) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(loads(line))
        except ValueError as error:
            raise SettingsError(f"{path}: line {number} is damaged: {error}") from error
    return rows


def _append(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    try:
        with path.open("ab") as file:
            for row in rows:
                file.write(dumps(dict(row)) + b"\n")
    except OSError as error:
        raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error
