"""The log of an SGLang server: its start-up stage, its end, and advice on errors."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentloop.errors import ServerError, leaves
from agentloop.inference.cpu import INSTALL_COMMAND

NOT_INSTALLED = f"SGLang is not installed: `{INSTALL_COMMAND}`"
_TAIL_LINES = 30
_READ_BYTES = 256 * 1024
_MAX_LINE = 300

_ADVICE = (
    ("No module named 'sglang'", NOT_INSTALLED),
    (
        "\nModuleNotFoundError: ",  # within a line, SGLang tells of an optional package
        f"A package that SGLang imports is missing: `{INSTALL_COMMAND}`",
    ),
    ("address already in use", "Another program has taken the port in the meantime: start again"),
    ("out of memory", "There is not enough GPU memory: lower `max_total_tokens`"),
    ("Not enough memory", "There is not enough memory: lower `max_total_tokens`"),
    ("Cannot allocate memory", "There is not enough memory: lower `max_total_tokens` or `count`"),
)
_STAGES = (
    ("Uvicorn running", "answering"),
    ("Capture", "capturing CUDA graphs"),
    ("KV Cache is allocated", "allocating the KV cache"),
    ("Load weight begin", "loading the weights"),
    ("", "importing SGLang"),
)
_NOISE = re.compile(
    r"UserWarning|DeprecationWarning|warnings\.warn\(|server_args=|Ignore import error when"
    r"|^[\s^~]*$|sglang serve"
)
_NOISY_BLOCK = "post-warmup freeze_gc failed"  # followed by a harmless traceback
_STAMP = re.compile(r"\[\d{4}-|INFO:")
_CAUSE = re.compile(r"^[\w.]*(?:Error|Exception)\b.*|Subprocess \S+ .*crashed with exit code.*")
_GAVE_UP = "kill_process_tree called"  # SGLang logs it when one of its processes has failed


class ServerLog:
    """A log that a server may still be writing."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def stage(self) -> str:
        """Return the stage that the start has reached."""
        text = self._read_end()
        return next(stage for pattern, stage in _STAGES if pattern in text)

    def tail(self) -> str:
        """Return the last lines of the log, without those that every start prints."""
        lines = self._lines()[-_TAIL_LINES:] or ["(it is empty)"]
        return "\n".join([f"The end of its log, {self.path}:", *(f"  {line}" for line in lines)])

    def ending(self, exit_status: int | None) -> str:
        """Return how the server ended, the log line that says why, and advice.

        Args:
            exit_status: The status that a shell would report (128 + signal).
        """
        lines = self._lines()
        causes = [match[0] for line in lines if (match := _CAUSE.search(line))]
        advice = _advice("\n".join(lines), exit_status, unexplained=not causes)
        return "\n".join([_describe_end(lines, exit_status) + ".", *causes[-1:], *advice])

    def _lines(self) -> list[str]:
        lines: list[str] = []
        in_block = False
        for line in self._read_end().splitlines():
            in_block = _NOISY_BLOCK in line or (in_block and not _STAMP.match(line))
            if not in_block and not _NOISE.search(line):
                lines.append(line[:_MAX_LINE])
        return lines

    def _read_end(self) -> str:
        try:
            with self.path.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(0, size - _READ_BYTES))
                return log.read().decode(errors="replace")
        except OSError as error:
            return f"(it cannot be read: {error})"


def _describe_end(lines: list[str], exit_status: int | None) -> str:
    if any(_GAVE_UP in line for line in lines):
        return "gave up"
    if exit_status is not None and exit_status > 128:
        with suppress(ValueError):
            return f"was killed by {signal.Signals(exit_status - 128).name}"
    return f"ended with exit status {exit_status}"


def _advice(text: str, exit_status: int | None, *, unexplained: bool) -> list[str]:
    for pattern, advice in _ADVICE:
        if pattern in f"\n{text}":
            return [f"{advice}."]
    killed = exit_status == 128 + signal.SIGKILL and unexplained
    if killed or "crashed with exit code -9" in text:
        return ["If nobody killed it, the machine ran out of memory."]
    return []


@contextmanager
def folder_kept_on_error() -> Iterator[Path]:
    """Yield a temporary folder for logs; keep it if an error refers to a log in it."""
    folder = Path(tempfile.mkdtemp(prefix="agentloop-"))
    keep = False
    try:
        yield folder
    except Exception as error:
        keep = any(_has_log(leaf, folder) for leaf in leaves(error))
        raise
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _has_log(error: BaseException, folder: Path) -> bool:
    """Return whether a server's log in `folder` tells more about an error."""
    path = error.log_path if isinstance(error, ServerError) else None
    return path is not None and path.is_relative_to(folder)
