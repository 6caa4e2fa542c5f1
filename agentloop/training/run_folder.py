"""A run's folder: what it was told, what came of it, what it can go on from.

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
    """Where a run's files go."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    folder: Path = pydantic.Field(Path("runs"), description="Folder of all runs.")
    name: str = pydantic.Field(
        "", pattern=r"^[\w.-]*$", description="Of this run; none: the time of its start."
    )


class RunFolder:
    """Makes the folder and appends to its files."""

    def __init__(self, path: Path, config: str, *, resume: bool = False) -> None:
        """With `resume` the run that is there goes on, with the settings that it has until it is
        told others (`tell`).

        Raises:
            SettingsError: there is a run of that name, or one that goes on, or the folder cannot
                be made.
        """
        self.path = path
        told = ("metrics.jsonl", "start/metrics.jsonl", "queue.sqlite")
        if not resume and any((path / name).exists() for name in told):
            raise SettingsError(f"run.name: there is a run at {path} already")
        try:
            path.mkdir(parents=True, exist_ok=True)  # one that never came to anything is no run
            weakref.finalize(self, os.close, _lock(path))
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
        """As the settings say. Its path is absolute: servers of others read weights there, too."""
        name = settings.name or time.strftime("%Y%m%d-%H%M%S")
        run = cls((settings.folder.expanduser() / name).absolute(), config)
        run._become_latest()
        return run

    @classmethod
    def again(cls, path: Path) -> Self:
        """The run at `path` goes on. Raises as the constructor."""
        return cls(path.expanduser().resolve(), "", resume=True)

    def tell(self, config: str) -> None:
        """From now on these are its settings, and it has something to do. Raises SettingsError:
        they cannot be written."""
        self.write("config.toml", config)
        for name in ("ended", "failed"):
            (self.path / name).unlink(missing_ok=True)

    def end(self) -> None:
        """It has done all that it was told to. Raises SettingsError: that cannot be written."""
        self.write("ended", "")

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Write the error down where the block raises one; a run that is stopped has not failed."""
        try:
            yield
        except Exception as error:
            with suppress(SettingsError):  # the disk may be what failed
                self.write("failed", f"{error or type(error).__name__}\n")
            raise

    @property
    def has_rollouts(self) -> bool:
        """Whether a group was rolled out, or a step was learned, in whichever life."""
        groups = (self.path / "trajectories").glob("group-*.jsonl")
        return self.checkpoint is not None or any(True for _ in groups)

    def _become_latest(self) -> None:
        """`latest` beside it leads here; where that cannot be, nobody misses it much."""
        link, new = self.path.with_name("latest"), self.path.with_name(f".latest.{os.getpid()}")
        with suppress(OSError):
            if link.is_symlink() or not link.exists():
                new.symlink_to(self.path.name)
                new.replace(link)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """Those that are whole, by the step that they hold."""
        return checkpoints_in(self.path)

    @property
    def checkpoint(self) -> Path | None:
        """The newest one; None: there is none."""
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
            raise SettingsError(f"--from: no checkpoint of step {step}; there are: {there}")
        return checkpoints[step]

    def undo(self, step: int, *, name: str = "", files: Iterable[str] = ()) -> None:
        """Put aside what came after `step`: weights, checkpoints, metrics, and these `files` of
        groups. May be called again, with the same `name`, after a kill.

        Args:
            name: of the folder below `undone/` that it goes to.

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
        """A run that is a part of this one: a new one, or the one that is there, which goes on.
        Raises as the constructor."""
        part = RunFolder.again(self.path / name)
        part.tell((self.path / "config.toml").read_text("utf-8"))
        return part

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
        raise SettingsError(f"{path} is not a run with a model. Try `agentloop ls`.")

    def add_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Raises SettingsError: the file cannot be written, such as on a disk that is full."""
        self.append("metrics.jsonl", metrics)

    def append(self, name: str, row: Mapping[str, Any]) -> None:
        """A line of the file of this name. Raises as `add_metrics`."""
        _append(self.path / name, [row])

    def write(self, name: str, text: str) -> None:
        """A file of this name: what was there before, or all of it. Raises SettingsError."""
        try:
            _write(self.path / name, text)
        except OSError as error:
            path = self.path / name
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error

    def add_group(self, number: int, rows: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
        """The rollouts of the `number`-th group, a line each; the file appears when it is whole,
        and a power cut does not take it back.

        Returns:
            Its path, relative to the run's folder, and its size in bytes.

        Raises:
            SettingsError: it cannot be written, such as on a disk that is full.
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
            _sync(path.parent)  # which has its name
        except OSError as error:
            raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error
        return str(path.relative_to(self.path)), size

    def read_group(self, path: str) -> list[dict[str, Any]]:
        """What `add_group` wrote. Raises SettingsError: it is not there any more, or damaged."""
        try:
            lines = (self.path / path).read_bytes().splitlines()
        except OSError as error:
            raise SettingsError(f"{self.path / path}: {error.strerror or error}") from error
        return _parsed(lines, self.path / path)

    def metrics(self) -> list[dict[str, Any]]:
        """What `add_metrics` wrote; a line that a kill cut short is left out.

        Raises:
            SettingsError: another line is damaged.
        """
        return self.rows("metrics.jsonl")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """What `append` wrote into the file of this name; none where it is not there. Raises as
        `metrics`."""
        try:
            whole = (self.path / name).read_bytes().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        return _parsed(whole.splitlines(), self.path / name)


def checkpoints_in(run: Path) -> dict[int, Path]:
    """The checkpoints of the run in that folder which are whole, by the step that they hold."""
    return dict(_checkpoints(run))


def _checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return all checkpoints with the step that each holds. Two may hold the same one: a step that
    fails leaves a checkpoint of what was before it."""
    found = []
    for path in sorted((run / "checkpoints").glob("*/state.json")):
        with suppress(OSError, ValueError, KeyError, TypeError):
            found.append((int(json.loads(path.read_bytes())["state"]["step"]), path.parent))
    return found


def is_going_on(run: Path) -> bool:
    """Whether a process has the run in that folder. To ask does not disturb it, or one that is
    about to take it.

    Raises:
        OSError: its lock cannot be read.
    """
    try:
        file = os.open(run / ".lock", os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _has(file, fcntl.LOCK_SH)  # given back at once
    finally:
        os.close(file)


def _lock(path: Path) -> int:
    """A file that this process holds until its end: nobody else has this run meanwhile.

    Raises:
        SettingsError: somebody has.
    """
    file = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while not _has(file, fcntl.LOCK_EX):
        # A run has it alone; who asks `is_going_on` has it with others, and for a moment.
        if not _has(file, fcntl.LOCK_SH) or time.monotonic() > deadline_s:
            os.close(file)
            raise SettingsError(f"run.name: a run at {path} is going on")
        fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(_LOCK_POLL_S)
    return file


def _has(file: int, lock: int) -> bool:
    """Whether we have this lock by now."""
    try:
        fcntl.flock(file, lock | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sync(folder: Path) -> None:
    """Have the names in a folder written to the disk."""
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _move(paths: Iterable[Path], folder: Path) -> None:
    """Move files and folders into `folder`, which is made if there are any."""
    for path in list(paths):
        folder.mkdir(exist_ok=True)
        path.replace(folder / path.name)


def _write(path: Path, text: str) -> None:
    """A kill leaves what was there before, or all of it: without it no run can be gone on with."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, "utf-8")
    partial.replace(path)


def _cut_to_lines(path: Path) -> None:
    """A kill may have left half a line."""
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
