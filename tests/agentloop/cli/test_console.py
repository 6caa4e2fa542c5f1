"""Helpers of all commands: arguments, progress, and exit statuses."""

from __future__ import annotations

import argparse
import errno
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import anyio
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.agent.threads import in_command_thread
from agentloop.cli import console
from agentloop.cli.console import (
    Lines,
    add_settings_arguments,
    interruptible,
    print_table,
    printable,
    settings_text,
    split_settings,
)
from agentloop.errors import RunFolderError, ServerError, SettingsError
from agentloop.launch.progress import ProgressLine
from agentloop.sandbox import SandboxUnavailable
from agentloop.training.run.status import RunStatus
from tests.commands import OUR_PATH, run_python
from tests.fakes import Unprintable


@pytest.fixture(autouse=True)
def _same_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def test_files_and_overrides_are_told_apart() -> None:
    arguments = ["a.toml", "server.count=2", "folder/b.toml", "model=x"]
    assert split_settings(arguments) == (["a.toml", "folder/b.toml"], ["server.count=2", "model=x"])


def test_settings_are_arguments_of_every_command() -> None:
    parser = argparse.ArgumentParser()
    add_settings_arguments(parser)
    options = parser.parse_args(["a.toml", "x=1", "--list-settings"])
    assert options.settings == ["a.toml", "x=1"]
    assert options.list_settings


def test_option_that_should_be_a_setting_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_settings_arguments(parser)
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--lr=1e-5"])
    assert "settings have no dashes: section.name=value" in capsys.readouterr().err


def test_every_setting_is_listed() -> None:
    class Settings(pydantic.BaseModel):
        port: int = pydantic.Field(8000, description="Where it listens.")
        model: str | None = None

    assert settings_text(Settings).splitlines() == [
        "port = 8000",
        "    Where it listens.",
        "model = (none)",
    ]


def test_progress_without_a_terminal_is_a_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("Starting") as progress:
        for line in ("Loading", "Loading", "Ready"):
            progress(line)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.split() == ["Starting", "Loading", "Ready"]


def test_short_operation_prints_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("Counting", after_s=1e6) as progress:
        progress("Counting on")
        progress.say("Halfway")
    assert capsys.readouterr().err == "Halfway\n"


def test_long_operation_prints_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()  # capsys loses what another thread writes while it is read
    monkeypatch.setattr(sys, "stderr", written)
    with ProgressLine("Counting", after_s=0.001) as progress:
        while written.getvalue() != "Counting\n":
            time.sleep(0.001)
        progress("Counting on")
        while written.getvalue() != "Counting\nCounting on\n":
            time.sleep(0.001)


ROWS = [("a", "1.5", "ended"), ("a long name", "12.25", "going on")]
COLUMNS = ("name", "mean reward", "state")


def test_table_without_a_terminal_is_aligned_text(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(COLUMNS, ROWS, numbers=["mean reward"], optional=COLUMNS)
    assert capsys.readouterr().out.splitlines() == [
        "name         mean reward  state",
        "a                    1.5  ended",
        "a long name        12.25  going on",
    ]


@pytest.mark.parametrize("width", [80, 32, 26, 18])
def test_table_fits_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: int
) -> None:
    """Headings are folded first, then columns are left out, then cells are folded."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(COLUMNS, ROWS, numbers=["mean reward"], optional=["state"], styles={"ended": "red"})
    out = capsys.readouterr().out
    plain = re.sub(r"\x1b\[[0-9;]*m", "", out)
    assert all(len(line) <= width for line in plain.splitlines())
    assert ("mean reward" in plain) == (width == 80)
    assert ("going on" in plain) == (width >= 32)
    assert ("columns omitted: state" in " ".join(plain.split())) == (width < 32)
    assert ("a long name" in plain) == (width > 18)
    assert "12.25" in plain
    if width == 80:
        assert "\x1b[31mended" in out


def test_cell_cannot_speak_to_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("a",), [("\x1b[2J\n\u202e[bold]",)])
    assert capsys.readouterr().out == "a\n\\x1b[2J\\n\\u202e[bold]\n"


@given(st.text())
def test_printable_text_is_one_line_of_text(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


def test_terminal_shows_a_panel_with_the_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    status = RunStatus(
        "stage 2 of 3: longer", 3, 15, "the learner waits", {"reward": "0.812"}, left_s=95
    )
    with ProgressLine("Starting") as progress:
        progress.show(status)
        progress.say("step 3 of 15")
        progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written.getvalue())
    for part in ("stage 2 of 3: longer", "about 1:35 left", "reward 0.812", "the learner waits"):
        assert part in text


@pytest.mark.parametrize("status", [0, 1])
def test_command_ends_with_its_status(status: int) -> None:
    async def main() -> int:
        return status

    assert console.run(main) == status


@pytest.mark.parametrize(
    "kind",
    [SettingsError, RunFolderError, ServerError, SandboxUnavailable],
    ids=lambda kind: kind.__name__,
)
def test_error_with_a_name_is_one_line(
    kind: type[Exception], capsys: pytest.CaptureFixture[str]
) -> None:
    async def main() -> int:
        raise kind("port: bad")

    assert console.run(main) == 2
    assert capsys.readouterr().err == "agentloop: error: port: bad\n"


def test_programmers_error_is_not_hidden() -> None:
    async def main() -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        console.run(main)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_signal_lets_a_command_clean_up(number: signal.Signals, status: int) -> None:
    cleaned = []

    async def main() -> int:
        try:
            os.kill(os.getpid(), number)
            await anyio.sleep_forever()
        finally:
            with anyio.move_on_after(5, shield=True):
                await anyio.lowlevel.checkpoint()
                cleaned.append(number)
        return 0

    before = signal.getsignal(number)
    assert console.run(main) == status
    assert cleaned == [number]
    assert signal.getsignal(number) is before


def test_signal_after_the_end_does_not_change_the_status() -> None:
    async def main() -> int:
        await anyio.lowlevel.checkpoint()
        return 3

    assert console.run(main) == 3


def test_lines_come_as_they_were_written() -> None:
    reader, writer = os.pipe()

    async def main() -> int:
        lines = Lines(reader)
        os.write(writer, b"one\n\ntwo\nthr")
        lines_read = [await lines.next() for _ in range(3)]
        with anyio.move_on_after(0.01) as waited:
            await lines.next()
        os.write(writer, "ée".encode())
        os.close(writer)
        lines_read += [await lines.next(), await lines.next()]
        assert (lines_read, waited.cancelled_caught) == (["one", "", "two", "thrée", None], True)
        return 0

    with open(reader, "rb"):
        assert console.run(main) == 0


@pytest.mark.parametrize(("data", "expected"), [(b"a\nb", ["a", "b", None]), (b"", [None])])
def test_lines_of_a_file(tmp_path: Path, data: bytes, expected: list[str | None]) -> None:
    (tmp_path / "questions").write_bytes(data)

    async def main() -> int:
        lines = Lines(file.fileno())
        assert [await lines.next() for _ in expected] == expected
        assert await Lines(null.fileno()).next() is None
        return 0

    with open(tmp_path / "questions", "rb") as file, open(os.devnull, "rb") as null:
        assert console.run(main) == 0


def test_ctrl_c_ends_only_what_may_be_interrupted() -> None:
    interrupted = []

    async def main() -> int:
        for _ in range(2):
            with interruptible() as scope:
                os.kill(os.getpid(), signal.SIGINT)
                await anyio.sleep_forever()
            interrupted.append(scope.cancelled_caught)
        os.kill(os.getpid(), signal.SIGINT)
        await anyio.sleep_forever()
        raise AssertionError("not reached")

    assert console.run(main) == 130
    assert interrupted == [True, True]


def test_sigterm_ends_the_command_wherever_it_is() -> None:
    async def main() -> int:
        with interruptible():
            os.kill(os.getpid(), signal.SIGTERM)
            await anyio.sleep_forever()
        raise AssertionError("not reached")

    assert console.run(main) == 143


def test_signal_ends_a_command_whose_thread_hangs() -> None:
    release = threading.Event()
    threads: list[threading.Thread] = []

    def hang() -> int:
        threads.append(threading.current_thread())
        os.kill(os.getpid(), signal.SIGINT)
        release.wait()
        return 0

    try:
        assert console.run(lambda: in_command_thread(hang)) == 130
        assert threads[0].daemon  # the process does not wait for it either
    finally:
        release.set()


HANGS = """
import os, signal, threading
import agentloop

def make_task(rng):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()

@agentloop.environment(tasks=make_task)
async def hangs(task, agent):
    return 1.0
"""


@pytest.mark.full
@pytest.mark.parametrize(
    "command", ["env try hangs:hangs", "evaluate env=hangs:hangs", "chat env=hangs:hangs --task 7"]
)
def test_signal_ends_a_command_whose_tasks_are_slow(tmp_path: Path, command: str) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    arguments = ["-m", "agentloop", *command.split(), 'servers=["http://[::1]:1"]']
    run_python(*arguments, cwd=tmp_path, env=OUR_PATH, timeout_s=100, status=143)


def test_errors_of_several_tasks_are_printed_once_each(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> int:
        raise ExceptionGroup("", [ServerError("gone"), ExceptionGroup("", [ServerError("gone")])])

    assert console.run(fail) == 2
    assert capsys.readouterr().err == "agentloop: error: gone\n"


def test_full_disk_is_an_error_of_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def fail() -> int:
        error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/one")
        error.add_note("Continue with: this")
        raise ExceptionGroup("", [error, ServerError("gone")])

    assert console.run(fail) == 2
    assert capsys.readouterr().err == (
        "agentloop: error: [Errno 28] No space left on device: '/runs/one'\n"
        "agentloop: error: gone\n"
        "agentloop: Continue with: this\n"
    )


def test_internal_defect_is_not_printed_as_a_user_error() -> None:
    async def fail() -> int:
        raise ExceptionGroup("", [ServerError("gone"), KeyError("ours")])

    with pytest.raises(ExceptionGroup):
        console.run(fail)


def _fail_on(number: int) -> None:
    key = "sk-" + "SECRET"  # a local variable
    try:
        json.loads(key)
    except ValueError:
        logging.getLogger("agentloop.test").warning("it failed on task %d", number, exc_info=True)


def test_failure_is_printed_once_per_place(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()

    async def fail() -> int:
        for number in range(12):
            _fail_on(number)
        return 0

    assert console.run(fail) == 0
    text = capsys.readouterr().err
    assert "SECRET" not in text
    assert "{" not in text  # a person reads it, also in a file
    assert text.count("Traceback") == 1
    assert text.count("File ") == 1  # of the user's code alone
    reason = r"JSONDecodeError: Expecting value: .* \(test_console.py:\d+\)"
    assert re.search(rf"it failed on task 0: {reason}", text)
    assert re.search(rf"it failed on task 9: {reason}, 10 times", text)
    assert text.count("it failed") == 2


def test_warning_of_error_without_text(capsys: pytest.CaptureFixture[str]) -> None:
    logging.getLogger().handlers.clear()

    async def fail() -> int:
        try:
            raise Unprintable
        except Unprintable:
            logging.getLogger("agentloop.test").warning("it failed", exc_info=True)
        return 0

    assert console.run(fail) == 0
    assert "it failed: Unprintable (test_console.py:" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3, None])
def test_command_that_other_code_ends_has_failed(
    code: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger().handlers.clear()
    has_cleaned_up = False

    async def leave() -> None:
        sys.exit(code)

    async def work() -> int:
        nonlocal has_cleaned_up
        try:
            async with anyio.create_task_group() as tasks:
                for _ in range(2):  # asyncio reports a group of them, too
                    tasks.start_soon(leave)
                tasks.start_soon(anyio.sleep_forever)
        finally:
            has_cleaned_up = True
        return 0

    assert console.run(work) == 2
    assert has_cleaned_up
    (line,) = capsys.readouterr().err.splitlines()
    assert f"sys.exit({code}) was called at test_console.py:" in line
