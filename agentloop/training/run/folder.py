"""A run's folder: its settings, results and checkpoints.

config.toml  commands.jsonl  metrics.jsonl  queue.sqlite  trajectories/group-0000001.jsonl
checkpoints/  weights/  logs/
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Self

import anyio
import pydantic

from agentloop.child_environment import for_system
from agentloop.distribution import version
from agentloop.errors import RunFolderError, SettingsError, message_of, sole
from agentloop.plain_json import JsonObject, dumps, loads
from agentloop.rollouts.record import ConversationRow
from agentloop.training.learner_client.protocol import TrainingState

_LOCK_WAIT_S = 10.0
_LOCK_POLL_S = 0.01
_GIT_S = 5.0
_SECRET = re.compile(r"(token|key|secret|password)$", re.IGNORECASE)


class RunSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of the run's folder."""

    folder: Path = pydantic.Field(Path("runs"), description="Folder that contains all runs.")
    name: str = pydantic.Field(
        "",
        pattern=r"^(\w[\w.-]*)?$",
        description="Name of this run. By default, the time of its start.",
    )


class RunFolder:
    """The files of a run. `open` also locks the run, so that no other process writes to it."""

    def __init__(self, path: Path, config: str | None = None) -> None:
        """Create the folder, as far as it is missing.

        Args:
            config: the settings of a new run as TOML; None: keep those of an existing one.

        Raises:
            RunFolderError: a folder or the settings cannot be written.
        """
        self.path = path
        with writing(path):
            for name in ("trajectories", "checkpoints", "weights", "logs", "batches"):
                (path / name).mkdir(parents=True, exist_ok=True)
        if config is not None:
            self.tell(config)

    @classmethod
    @asynccontextmanager
    async def open(cls, path: Path, config: str | None = None) -> AsyncIterator[Self]:
        """Create a run, or resume one, and lock it until the context is left.

        Args:
            path: made absolute, for servers that read weights from the folder, and with the links
                of a run to resume followed, such as `latest`.
            config: the settings of a new run as TOML; None: resume one (see `tell`).

        Raises:
            SettingsError: there is a run already, and `config` is that of a new one.
            RunFolderError: another process is active in the run, or the folder cannot be written.
        """
        path = _absolute(path, follow_links=config is None)
        async with _hold_lock(path):
            if config is not None:
                require_new(path)
            run = cls(path, config)
            with writing(path):
                for file in path.glob("*.jsonl"):
                    _cut_to_lines(file)
                run._note(await anyio.to_thread.run_sync(_this_command))
            try:
                yield run
            finally:
                with suppress(OSError):  # such as that of a full disk, which others report
                    run._note({"ended_unix_s": round(time.time(), 3)})

    @classmethod
    @asynccontextmanager
    async def new(cls, settings: RunSettings, config: str) -> AsyncIterator[Self]:
        """Create a run where the settings say, as the latest one. Raises the errors of `open`."""
        name = settings.name or time.strftime("%Y%m%d-%H%M%S")
        async with cls.open(settings.folder / name, config) as run:
            run._become_latest()
            yield run

    @asynccontextmanager
    async def within(self, name: str) -> AsyncIterator[RunFolder]:
        """Create or resume a run that is a part of this one. Raises the errors of `open`.

        Args:
            name: the subfolder.
        """
        async with RunFolder.open(self.path / name) as part:
            with writing(self.path):
                config = (self.path / "config.toml").read_text("utf-8")
            part.tell(config)
            yield part

    def tell(self, config: str) -> None:
        """Write the run's settings and mark it as active. Raises RunFolderError if that fails."""
        self.write("config.toml", config)
        with writing(self.path):
            for name in ("ended", "failed", "drained"):
                (self.path / name).unlink(missing_ok=True)

    def end(self, *, drained: bool = False) -> None:
        """Mark the run as complete, or as drained. Raises RunFolderError if that fails."""
        self.write("drained" if drained else "ended", "")

    @contextmanager
    def noting_failure(self) -> Iterator[None]:
        """Record an error that the block raises; a run that is cancelled has not failed."""
        try:
            yield
        except Exception as error:
            with suppress(RunFolderError):  # the disk may be what failed
                self.write("failed", f"{message_of(error) or type(sole(error)).__name__}\n")
            raise

    @property
    def has_rollouts(self) -> bool:
        """True if a group was rolled out or a step trained, now or before a restart."""
        groups = (self.path / "trajectories").glob("group-*.jsonl")
        return self.checkpoint is not None or any(True for _ in groups)

    def _note(self, row: dict[str, object]) -> None:
        """Add a row to the commands that started and resumed the run."""
        with (self.path / "commands.jsonl").open("ab") as file:
            file.write(dumps(row) + b"\n")

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
        checkpoints = self.checkpoints
        return checkpoints[max(checkpoints)] if checkpoints else None

    def checkpoint_of(self, step: int) -> Path:
        """Return the checkpoint that holds this step.

        Raises:
            RunFolderError: there is none.
        """
        checkpoints = self.checkpoints
        if step not in checkpoints:
            available = ", ".join(map(str, sorted(checkpoints))) or "none"
            raise RunFolderError(f"--from: no checkpoint of step {step}; available: {available}")
        return checkpoints[step]

    def undo(self, step: int, *, name: str = "", files: Iterable[str] = ()) -> None:
        """Set aside all results after `step`: weights, checkpoints, metrics and groups.

        May be called again with the same `name` after a kill.

        Args:
            name: name of the target folder in `undone/`.
            files: files of groups to move.

        Raises:
            RunFolderError: there is no checkpoint of that step, something cannot be moved, or
                metrics.jsonl is damaged.
        """
        self.checkpoint_of(step)
        aside = self.path / "undone" / (name or time.strftime("%Y%m%d-%H%M%S"))
        groups = [self.path / "trajectories" / Path(file).name for file in files]
        with writing(aside):
            aside.mkdir(parents=True, exist_ok=True)
            (self.path / "ended").unlink(missing_ok=True)
            _move((self.path / "weights").iterdir(), aside / "weights")
            later = [path for held, path in _checkpoints(self.path) if held > step]
            _move(later, aside)
            _move(filter(Path.exists, groups), aside / "trajectories")
            metrics = "metrics.jsonl"
            if (self.path / metrics).exists() and not (aside / metrics).exists():
                _write(aside / metrics, (self.path / metrics).read_text("utf-8"))
            lines = [dumps(row).decode() for row in self.metrics() if row["step"] <= step]
            _write(self.path / metrics, "".join(f"{line}\n" for line in lines))

    @staticmethod
    def model_in(path: Path) -> Path:
        """Return the folder of the newest model of the run at `path`.

        Raises:
            RunFolderError: there is no run, or it has no model.
        """
        published = [folder for folder in (path / "weights").glob("*") if folder.name.isdigit()]
        newest = sorted(published, key=lambda folder: int(folder.name))[-1:]
        for folder in (*newest, path / "model", path / "sft" / "model"):
            if (folder / "config.json").is_file():
                return folder
        raise RunFolderError(
            f"{path} is not a run with a model, or not yet. Try `agentloop runs list`."
        )

    def add_metrics(self, metrics: Mapping[str, object]) -> None:
        """Append a row to metrics.jsonl. Raises RunFolderError if that fails (disk full)."""
        self.append("metrics.jsonl", metrics)

    def append(self, name: str, row: Mapping[str, object]) -> None:
        """Append a row to a JSONL file. Raises RunFolderError if that fails (disk full)."""
        with writing(self.path / name), (self.path / name).open("ab") as file:
            file.write(dumps(dict(row)) + b"\n")

    def write(self, name: str, text: str) -> None:
        """Write a file atomically. Raises RunFolderError if that fails."""
        with writing(self.path / name):
            _write(self.path / name, text)

    def add_group(self, number: int, rows: Iterable[Mapping[str, object]]) -> tuple[str, int]:
        """Write the rollouts of a group, one per line (see `add_lines`)."""
        return self.add_lines(number, (dumps(dict(row)) for row in rows))

    def add_lines(self, number: int, lines: Iterable[bytes]) -> tuple[str, int]:
        """Write the lines of a group's file, atomically and durably.

        Returns:
            The file's path, relative to the run's folder, and its size in bytes.

        Raises:
            RunFolderError: the file cannot be written, for example because the disk is full.
        """
        path = self.path / "trajectories" / f"group-{number:07}.jsonl"
        partial = path.with_name(f".{path.name}.partial")
        with writing(path):
            with partial.open("wb") as file:
                for line in lines:
                    file.write(line + b"\n")
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            partial.replace(path)
            _sync(path.parent)  # make the file's name durable, too
        return str(path.relative_to(self.path)), size

    def read_group(self, path: str) -> list[JsonObject]:
        """Read a group's rollouts. Raises RunFolderError if they are missing or damaged."""
        try:
            lines = (self.path / path).read_bytes().splitlines()
        except OSError as error:
            raise RunFolderError(f"{self.path / path}: {error.strerror or error}") from error
        return _parse_lines(lines, self.path / path)

    def read_conversations(self, path: str) -> list[ConversationRow]:
        """Read the conversations of a group. Raises RunFolderError like `read_group`."""
        try:
            return [ConversationRow.from_dict(row) for row in self.read_group(path)]
        except (KeyError, TypeError, ValueError) as error:
            raise RunFolderError(f"{self.path / path}: not a rollout: {error!r}") from error

    def metrics(self) -> list[JsonObject]:
        """Read metrics.jsonl, ignoring an incomplete last line.

        Raises:
            RunFolderError: another line is damaged.
        """
        return self.rows("metrics.jsonl")

    def rows(self, name: str) -> list[JsonObject]:
        """Read the rows of a JSONL file, none if it does not exist. Raises like `metrics`."""
        try:
            complete_lines = (self.path / name).read_bytes().rpartition(b"\n")[0]
        except FileNotFoundError:
            return []
        return _parse_lines(complete_lines.splitlines(), self.path / name)


def _this_command() -> dict[str, object]:
    """Return when and how this process was started, without what may be secret.

    `commit` is that of the working directory; it ends in "-dirty" if tracked files differ.
    """
    program = Path(sys.argv[0]).parent.name if sys.argv[0].endswith("__main__.py") else sys.argv[0]
    words = [Path(program).name, *map(_without_secret, sys.argv[1:])]
    return {
        "unix_s": round(time.time(), 3),
        "command": shlex.join(words),
        "version": version(),
        "commit": _commit(),
    }


def _without_secret(argument: str) -> str:
    name, separator, _ = argument.partition("=")
    if separator and (_SECRET.search(name) or re.search(r"\b(env|headers)\b", argument)):
        return f"{name}=..."
    return re.sub(r"://[^\s'\"@/]*@", "://...@", argument)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--exclude=*", "--abbrev=12"]
    try:
        git = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
            env=for_system(),  # git runs hooks with a repository of its own in the environment
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return git.stdout.strip()


def config_of(run: Path, option: str = "") -> Path:
    """Return the file with the settings of the run in a folder.

    Args:
        option: the command-line option that names the run, for the message of the error.

    Raises:
        RunFolderError: there is no run.
    """
    config = run / "config.toml"
    if not config.is_file():
        where = f"{option}: {run}" if option else str(run)
        raise RunFolderError(f"{where} is not a run (no config.toml). Try `agentloop runs list`.")
    return config


def checkpoints_in(run: Path) -> dict[int, Path]:
    """Return the complete checkpoints of the run in a folder, by step."""
    return dict(_checkpoints(run))


def _checkpoints(run: Path) -> list[tuple[int, Path]]:
    """Return all complete checkpoints with their steps.

    Two may have the same step, since a failing step leaves a checkpoint of the state before it.
    """
    checkpoints = []
    for path in sorted((run / "checkpoints").glob("*/state.json")):
        with suppress(RunFolderError):
            checkpoints.append((training_state(path.parent).step, path.parent))
    return checkpoints


def training_state(checkpoint: Path) -> TrainingState:
    """Return the state that the trainer saved with a checkpoint.

    Raises:
        RunFolderError: it cannot be read.
    """
    file = checkpoint / "state.json"
    try:
        return TrainingState.model_validate(json.loads(file.read_bytes())["state"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{file}: not the state of a checkpoint: {error}") from error


def is_active(run: Path) -> bool:
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


def _absolute(path: Path, *, follow_links: bool) -> Path:
    path = path.expanduser()
    return path.resolve() if follow_links else path.absolute()


def require_new(path: Path) -> None:
    """Raise SettingsError if a run at `path` has results; a folder without any is not a run."""
    signs = ("metrics.jsonl", "sft/metrics.jsonl", "queue.sqlite")
    if any((path / name).exists() for name in signs):
        raise SettingsError(
            f"run.name: a run already exists at {path}: use another name, or --resume"
        )


@asynccontextmanager
async def _hold_lock(path: Path) -> AsyncIterator[None]:
    """Lock a run for this process, creating its folder if necessary.

    Raises:
        RunFolderError: another process has locked it, or the lock file cannot be written.
    """
    file = _lock_file(path)
    is_locked = False
    try:
        # A run's lock is exclusive; `is_active` takes a shared one for a moment.
        with anyio.move_on_after(_LOCK_WAIT_S):
            while not (is_locked := _has(file, fcntl.LOCK_EX)) and _has(file, fcntl.LOCK_SH):
                fcntl.flock(file, fcntl.LOCK_UN)
                await anyio.sleep(_LOCK_POLL_S)
        if not is_locked:
            raise RunFolderError(f"run.name: the run at {path} is active in another process")
        yield
    finally:
        os.close(file)  # releases the lock


def _lock_file(path: Path) -> int:
    """Open the lock file of a run, creating its folder if necessary. Raises RunFolderError."""
    with writing(path):
        path.mkdir(parents=True, exist_ok=True)
        return os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an OSError as a RunFolderError that names `path`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(f"run.folder: {path}: {error.strerror or error}") from error


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
        if len(complete := data.rpartition(b"\n")[0]) + 1 < len(data):
            os.truncate(path, len(complete) + 1 if complete else 0)


def _parse_lines(lines: Sequence[bytes], path: Path) -> list[dict[str, object]]:
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            rows.append(loads(line))
        except ValueError as error:
            raise RunFolderError(f"{path}: line {number} is damaged: {error}") from error
    return rows
