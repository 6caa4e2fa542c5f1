"""A process that is killed is restarted; one that ends by itself is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from agentloop.training.recovery.respawn import run_with_restarts
from tests.patience import patient

pytestmark = pytest.mark.timeout(60)  # several interpreters start, one after the other

CHILD = """
import os, signal, sys
from pathlib import Path
from agentloop.training.recovery.respawn import tell_run

folder = Path(sys.argv[1])
with (folder / "lives").open("a") as lives:
    lives.write(" ".join(sys.argv[2:]) + "\\n")
with (folder / "tokens").open("a") as tokens:
    tokens.write(os.environ["AGENTLOOP_SERVE__CONTROL_TOKEN"] + "\\n")
num_lives = len((folder / "lives").read_text().splitlines())
if "untold" not in sys.argv and not ((folder / "once").exists() and num_lives > 1):
    tell_run(folder / "run")
if num_lives <= int((folder / "deaths").read_text()):
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(7)
"""


def run(folder: Path, *, deaths: int, max_restarts: int, arguments: list[str]) -> tuple[int, str]:
    (folder / "deaths").write_text(str(deaths))
    messages: list[str] = []
    command = [sys.executable, "-c", CHILD, str(folder)]
    status = run_with_restarts(command, arguments, max_restarts, messages.append)
    return status, "\n".join(messages)


def lives(folder: Path) -> list[str]:
    return (folder / "lives").read_text().splitlines()


def test_child_that_ends_by_itself_is_not_restarted(tmp_path: Path) -> None:
    assert run(tmp_path, deaths=0, max_restarts=3, arguments=["a=1"]) == (7, "")
    assert lives(tmp_path) == ["a=1"]


def test_killed_child_is_restarted_and_resumes_its_run(tmp_path: Path) -> None:
    status, output = run(tmp_path, deaths=2, max_restarts=3, arguments=["a=1"])
    assert status == 7
    assert lives(tmp_path) == ["a=1", *[f"--resume {tmp_path / 'run'}"] * 2]
    assert output.count("killed by SIGKILL; resuming") == 2


def test_arguments_that_the_run_does_not_keep_are_repeated(tmp_path: Path) -> None:
    (tmp_path / "deaths").write_text("1")
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    arguments = ["recipe.toml", "servers_key=secret"]
    assert run_with_restarts(command, arguments, 3, print, again=["servers_key=secret"]) == 7
    assert lives(tmp_path) == [
        "recipe.toml servers_key=secret",
        f"--resume {tmp_path / 'run'} servers_key=secret",
    ]


def test_all_lives_of_a_child_have_the_same_control_token(tmp_path: Path) -> None:
    run(tmp_path, deaths=1, max_restarts=3, arguments=[])
    first, second = (tmp_path / "tokens").read_text().splitlines()
    assert first == second
    assert first
    run(tmp_path, deaths=0, max_restarts=3, arguments=[])
    assert (tmp_path / "tokens").read_text().splitlines()[2] != first


def test_control_token_that_was_told_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AGENTLOOP_SERVE__CONTROL_TOKEN", "sesame")
    run(tmp_path, deaths=1, max_restarts=3, arguments=[])
    assert (tmp_path / "tokens").read_text().splitlines() == ["sesame"] * 2


def test_request_to_end_after_the_childs_death_is_obeyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Died:
        returncode = -signal.SIGKILL

        def __init__(self, command: object, *, pass_fds: list[int], **_: object) -> None:
            os.write(pass_fds[0], b"run")

        def poll(self) -> int:
            os.kill(os.getpid(), signal.SIGTERM)
            return self.returncode

    monkeypatch.setattr("subprocess.Popen", Died)
    messages: list[str] = []
    assert run_with_restarts(["train"], [], 3, messages.append) == 128 + signal.SIGKILL
    assert messages == ["Ended by SIGKILL; continue with: agentloop train --resume run"]


def test_child_that_is_killed_while_restarting_is_restarted_again(tmp_path: Path) -> None:
    (tmp_path / "once").touch()
    status, output = run(tmp_path, deaths=2, max_restarts=3, arguments=[])
    assert status == 7
    assert output.count("; resuming ") == 2
    assert lives(tmp_path)[1:] == [f"--resume {tmp_path / 'run'}"] * 2


def test_child_killed_before_its_report_repeats_its_arguments(tmp_path: Path) -> None:
    """It may not have gone back to step 3 yet."""
    (tmp_path / "deaths").write_text("1")
    arguments = ["--resume", "my run", "--from", "3", "untold"]
    command, stated = [sys.executable, "-c", CHILD, str(tmp_path)], list[str]()
    resume = Path("my run")
    assert run_with_restarts(command, arguments, 1, stated.append, resume=resume) == 7
    assert lives(tmp_path) == [" ".join(arguments)] * 2
    assert stated == ["The training process was killed by SIGKILL; resuming my run"]
    (tmp_path / "lives").unlink()
    assert run_with_restarts(command, arguments, 0, stated.append, resume=resume) == 137
    assert stated[-1].endswith("continue with: agentloop train --resume 'my run'")


def test_restarts_are_limited(tmp_path: Path) -> None:
    status, output = run(tmp_path, deaths=9, max_restarts=1, arguments=[])
    assert status == 128 + signal.SIGKILL
    assert len(lives(tmp_path)) == 2
    assert f"agentloop train --resume {tmp_path / 'run'}" in output


def test_child_without_a_run_is_not_restarted(tmp_path: Path) -> None:
    status, output = run(tmp_path, deaths=1, max_restarts=3, arguments=["untold"])
    assert status == 128 + signal.SIGKILL
    assert "before its run had a folder" in output


@contextmanager
def waiting(child: str) -> Iterator[subprocess.Popen[str]]:
    """Start a process that waits for a child, which runs `child`."""
    waits = (
        "import sys\nfrom agentloop.training.recovery.respawn import run_with_restarts\n"
        f"sys.exit(run_with_restarts([sys.executable, '-c', {child!r}], [], 3, print))"
    )
    command = [sys.executable, "-c", waits]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_parent_forwards_signals_and_leaves_no_process(tmp_path: Path, number: int) -> None:
    child = """
import os, signal
ends = (signal.SIGTERM, signal.SIGINT)
signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # none is lost just before we wait
print(os.getpid(), flush=True)
number = signal.sigwait(ends)
os.write(1, str(int(number)).encode())
os._exit(128 + number)
"""
    with waiting(child) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        os.kill(process.pid, number)
        heard = signal.SIGTERM if number == signal.SIGKILL else number  # by the kernel's hand
        assert process.stdout.read() == str(int(heard))  # to its end: the child is gone
        assert process.wait(patient(20)) == (-number if number == signal.SIGKILL else 128 + number)


def test_child_that_was_asked_to_end_is_not_restarted(tmp_path: Path) -> None:
    """A second signal may arrive when an ending interpreter no longer handles it."""
    child = f"""
import os, signal, sys, time
from pathlib import Path
from agentloop.training.recovery.respawn import tell_run
with Path({str(tmp_path / "lives")!r}).open("a") as lives:
    lives.write("once\\n")
tell_run(Path("run"))
print("told", flush=True)
signal.pause()
"""
    with waiting(child) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "told\n"
        process.terminate()
        line = process.stdout.readline()
        assert line == "Ended by SIGTERM; continue with: agentloop train --resume run\n"
        assert process.wait(patient(20)) == 128 + signal.SIGTERM
    assert lives(tmp_path) == ["once"]
