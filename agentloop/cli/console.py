"""Helpers shared by all commands: arguments, output, progress and signal handling."""

from __future__ import annotations

import argparse
import copy
import errno
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

import anyio

from agentloop.aio import collect_garbage_rarely, exempt_from_collection, task_group
from agentloop.distribution import conflict
from agentloop.errors import AgentLoopError, leaves, place_of, sole, summary_of, user_entries

if TYPE_CHECKING:
    import pydantic

    from agentloop.runtime import Runtime, Settings

_interruptible: list[anyio.CancelScope] = []  # innermost last; a process runs one command
_MIN_FIRST_WIDTH = 8  # of a table's first column, in cells
_MAX_WIDTH = 1 << 20  # of a table that goes to a file


def add_settings_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name settings, and explain an option that should be one of these."""
    report_error = parser.error

    def error(message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: -"):
            message += "; settings have no dashes: section.name=value (--list-settings)"
        report_error(message)

    parser.error = error  # type: ignore[method-assign]
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],  # otherwise argparse reports it as required
        metavar="RECIPE | FILE.toml | key=value",
        help="recipes that come with agentloop, by name, such as small; settings files; overrides "
        "such as server.count=2. Later ones take precedence",
    )
    parser.add_argument(
        "--list-settings",
        action="store_true",
        help="print every setting with its default, and exit",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="log, for each turn, the chosen server, the reason and the state of all candidates",
    )


@contextmanager
def loading(what: str, *, as_line: bool = False) -> Iterator[None]:
    """Say on stderr what the block imports: on a terminal until its end, else as a line or not."""
    text, is_terminal = f"Loading {what}", sys.stderr.isatty()
    if is_terminal or as_line:
        print(text, end="" if is_terminal else "\n", file=sys.stderr, flush=True)
    yield
    if is_terminal:
        print("\r" + " " * len(text), end="\r", file=sys.stderr, flush=True)


def split_settings(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into files and overrides; an override contains an equals sign."""
    files = [argument for argument in arguments if "=" not in argument]
    return files, [argument for argument in arguments if "=" in argument]


def at_least(least: int) -> Callable[[str], int]:
    """Return what parses an integer, for argparse."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least {least}")
        return int(text)

    return number


def settings_text(model: type[pydantic.BaseModel]) -> str:
    """Return all settings, two lines each: `key = default`, then the description."""
    from agentloop.config import describe_settings

    lines = []
    for key, default, description in describe_settings(model):
        lines.append(f"{key} = {default or '(none)'}")
        if description:
            lines.append(f"    {description}")
    return "\n".join(lines)


def printable(text: str) -> str:
    """Return `text` with control characters, such as terminal escapes, spelled out."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def print_json(value: object) -> None:
    """Print a value as indented JSON on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Collection[str] = (),
    optional: Sequence[str] = (),
    styles: Mapping[str, str] | None = None,
) -> None:
    """Print a table on stdout: fitted to a terminal, otherwise as aligned text in full.

    On a narrow terminal headings are folded, then columns are left out; the first one takes the
    width that the others leave.

    Args:
        numbers: columns to align to the right.
        optional: columns to omit on a narrow terminal, in the order of omission.
        styles: rich styles for cells, by the cell's text.
    """
    from rich import box
    from rich.console import Console
    from rich.measure import Measurement
    from rich.table import Table
    from rich.text import Text

    out, shown = Console(), list(columns)
    is_terminal = out.is_terminal

    def table(*, folds: bool = False) -> Table:
        left_out = [name for name in optional if name not in shown]
        fitted = Table(
            box=box.SIMPLE_HEAD if is_terminal else None,
            show_edge=False,
            pad_edge=False,
            padding=(0, 1 if is_terminal else 2, 0, 0),  # the box has a space between columns
            caption=f"columns omitted: {', '.join(left_out)}" if left_out else None,
            caption_justify="left",
        )
        for name in shown:
            fitted.add_column(
                name.replace(" ", "\n") if folds else name,
                justify="right" if name in numbers else "left",
                overflow="fold",
                no_wrap=name != columns[0],
                min_width=_MIN_FIRST_WIDTH if is_terminal and name == columns[0] else None,
            )
        for row in rows:
            cells = [cell for name, cell in zip(columns, row, strict=True) if name in shown]
            fitted.add_row(*(Text(printable(c), (styles or {}).get(c, "")) for c in cells))
        return fitted

    unlimited = out.options.update_width(_MAX_WIDTH)
    fitted = table()
    if not is_terminal:
        out.width = _MAX_WIDTH
        with out.capture() as text:
            out.print(fitted)
        print("\n".join(line.rstrip() for line in text.get().splitlines()))
        return
    for name in (None, *optional):  # at first, only headings are folded
        if Measurement.get(out, unlimited, fitted).maximum <= out.width:
            break
        if name is not None:
            shown.remove(name)
        fitted = table(folds=True)
    out.print(fitted)


@asynccontextmanager
async def open_runtime(settings: Settings) -> AsyncIterator[Runtime]:
    """Start a runtime, showing progress meanwhile, and stop it when the context is left."""
    from agentloop.launch.progress import ProgressLine
    from agentloop.runtime import Runtime

    with ProgressLine("Starting the agent") as progress:
        async with Runtime(settings, progress=progress) as runtime:
            exempt_from_collection()
            progress.stop()
            yield runtime


def run(main: Callable[[], Awaitable[int]], *, explain: bool = False) -> int:
    """Run a command on uvloop, except on Windows; SIGINT and SIGTERM cancel it.

    Args:
        explain: log the router's decisions.

    Returns:
        The exit status: that of `main`, 130 or 143 after a signal, 2 after an AgentLoopError, a
        SandboxError or a full disk, which is printed, or if some code has called `sys.exit`.
    """
    from agentloop.sandbox import SandboxError

    _configure_logging()
    if clash := conflict():
        print(f"agentloop: warning: {clash}", file=sys.stderr)
    collect_garbage_rarely()
    if explain:
        logging.getLogger("agentloop.explain").setLevel(logging.INFO)
    try:
        return anyio.run(
            partial(_until_signal, main), backend_options={"use_uvloop": sys.platform != "win32"}
        )
    except (AgentLoopError, SandboxError, OSError, BaseExceptionGroup) as error:
        errors = list(leaves(error))
        expected = (AgentLoopError, SandboxError)
        if not all(isinstance(leaf, expected) or _is_disk_full(leaf) for leaf in errors):
            raise
        for message in dict.fromkeys(map(str, errors)):  # several tasks may fail alike
            print(f"agentloop: error: {message}", file=sys.stderr)
        notes = (note for noted in (error, *errors) for note in getattr(noted, "__notes__", ()))
        for note in dict.fromkeys(notes):
            print(f"agentloop: {note}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # not ours: with 0, a run that was cut short would look complete
        at = f" at {place}" if (place := place_of(stop)) else ""
        print(f"agentloop: error: sys.exit({stop.code!r}) was called{at}", file=sys.stderr)
        return 2


def _is_disk_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def _configure_logging() -> None:
    """Log warnings and errors to stderr, for people: in color on a terminal."""
    from structlog import dev, processors, stdlib

    # Without the values of local variables, among which may be keys.
    plain = dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=dev.plain_traceback)
    stamp = processors.TimeStamper(fmt="iso")
    handler = _Stderr()
    handler.setFormatter(
        stdlib.ProcessorFormatter(plain, foreign_pre_chain=[stdlib.add_log_level, stamp])
    )
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


class _Stderr(logging.StreamHandler[TextIO]):
    """A handler that looks up `sys.stderr` at each record, since live displays replace it.

    Of warnings that quote an error, such as those of an environment that fails in each rollout, it
    prints the first one of each place in the code, with the traceback's entries in the user's code,
    and then the 10th, the 100th, ... in one line.
    """

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[tuple[object, ...]] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is None or record.levelno > logging.WARNING:
            # asyncio's reports of tasks that `sys.exit` has ended: `run` reports it.
            if error is None or not all(isinstance(leaf, SystemExit) for leaf in leaves(error)):
                super().emit(record)
            return
        error, place = sole(error), place_of(error)
        key = record.name, record.msg, type(error), place
        self._counts[key] += 1
        count = self._counts[key]
        if count not in (10**power for power in range(len(str(count)))):
            return
        record = copy.copy(record)  # other handlers get the original
        record.exc_info = record.exc_text = None
        if count == 1:
            users: TracebackType | None = None
            for entry in reversed(user_entries(error)):
                users = TracebackType(users, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
            record.exc_info = type(error), error, users or error.__traceback__
        at, times = f" ({place})" * bool(place), f", {count:,} times" * (count > 1)
        record.msg = f"{record.getMessage()}: {summary_of(error)}{at}{times}"
        record.args = ()
        super().emit(record)

    @property
    def stream(self) -> TextIO:
        return sys.stderr

    @stream.setter
    def stream(self, stream: TextIO) -> None:
        pass


@contextmanager
def interruptible() -> Iterator[anyio.CancelScope]:
    """Let Ctrl-C cancel this block instead of the whole command.

    Afterwards, the scope's `cancelled_caught` tells whether it did. SIGTERM still ends the command.
    """
    with anyio.CancelScope() as scope:
        _interruptible.append(scope)
        try:
            yield scope
        finally:
            _interruptible.remove(scope)


class Lines:
    """Lines of standard input, read without a thread so that waiting for one can be cancelled."""

    def __init__(self, fd: int = 0) -> None:
        self._fd = fd
        self._buffer = b""
        self._is_at_end = False

    async def next(self) -> str | None:
        """Return the next line without its line break, or None at the end of the input."""
        while b"\n" not in self._buffer and not self._is_at_end:
            # Files and /dev/null are always readable and cannot be registered with epoll.
            with suppress(PermissionError):
                await anyio.wait_readable(self._fd)  # no deadline: a person is typing
            data = os.read(self._fd, 1 << 16)
            self._buffer += data
            self._is_at_end = not data
        if not self._buffer:
            return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")


async def _until_signal(main: Callable[[], Awaitable[int]]) -> int:
    status = 0
    working = anyio.CancelScope()

    async def watch(signals: AsyncIterator[signal.Signals]) -> None:
        nonlocal status
        async for number in signals:  # no deadline: as long as the command runs
            if number == signal.SIGINT and _interruptible and not status:
                _interruptible[-1].cancel()
                continue
            # A second signal changes nothing: all cleanup has a deadline.
            status = status or 128 + number
            working.cancel()

    with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async with task_group() as tasks:
            tasks.start_soon(watch, signals)
            with working:
                status = await main()
            tasks.cancel_scope.cancel()
    return status
