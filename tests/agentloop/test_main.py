"""`agentloop COMMAND`, before any command runs."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentloop.__main__ import main
from agentloop.runtime import Settings
from agentloop.trajectory import Message, StopReason, Trajectory

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_help_names_every_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    out = capsys.readouterr().out
    for word in ("usage: agentloop COMMAND", "serve", "chat"):
        assert word in out


def test_unknown_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sreve", "--help"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("agentloop: error: unknown command 'sreve' (did you mean 'serve'?)")


@pytest.mark.parametrize(
    "command",
    [
        ["train", "--restarts=0", "--resume"],
        ["sft", "--resume"],
        ["evaluate", "--resume"],
        ["evaluate", "--run"],
        ["chat", "question", "--run"],
        ["runs", "view"],
        ["runs", "entropy"],
        ["runs", "export"],
        ["runs", "plot"],
    ],
    ids=" ".join,
)
def test_folder_without_a_run_is_one_line(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, out = tmp_path / "run", [str(tmp_path / "out")] if "export" in command else []
    run.mkdir()
    assert main([*command, str(run), *out]) == 2
    error = capsys.readouterr().err.removeprefix("Loading what trains\n")
    (line,) = error.splitlines()
    assert line.startswith("agentloop: error: ")
    assert str(run) in line


def test_character_that_the_locale_lacks_is_spelled_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    with io.TextIOWrapper(written, "ascii", write_through=True) as out:
        monkeypatch.setattr(sys, "stdout", out)
        assert main(["--version"]) == 0
        print("▶ done")
        assert written.getvalue().endswith(b"\\u25b6 done\n")
        monkeypatch.undo()


def test_groups_of_commands_have_help_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    assert "usage: agentloop runs COMMAND" in capsys.readouterr().out
    assert main(["runs", "veiw"]) == 2
    assert "agentloop runs: error: unknown command 'veiw' (did you mean 'view'?)" in (
        capsys.readouterr().err
    )
    assert main(["env"]) == 0
    assert "usage: agentloop env COMMAND" in capsys.readouterr().out
    assert main(["env", "tyr"]) == 2
    assert "agentloop env: error: unknown command 'tyr' (did you mean 'try'?)" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["serve", "chat", "evaluate"])
def test_each_command_has_help_and_lists_its_settings(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert f"agentloop {command}" in capsys.readouterr().out
    assert main([command, "--list-settings"]) == 0
    listed = capsys.readouterr().out
    assert "router.max_migrations = 4" in listed
    assert "serve.port = 8000" in listed


@pytest.mark.parametrize(
    ("command", "setting", "message"),
    [
        ("serve", "serve.prot=1", "did you mean 'serve.port'?"),
        ("serve", "serve.host=0.0.0.0", "set serve.token"),
        ("serve", "gone.toml", "gone.toml: No such file"),
        ("serve", "env=my_game:play", "env.name: there is no module 'my_game'"),
        ("chat", "budget.max_turns=0", "budget.max_turns: "),
    ],
)
def test_bad_setting_ends_a_command_before_anything_starts(
    command: str, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, setting]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["What is a = b?", "serve.port=1"],
        ["serve.port=1", "What is a = b?"],
        ["serve.port=1", "more.conf", "What is a = b?"],
    ],
)
def test_question_is_found_wherever_it_stands(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @asynccontextmanager
    async def started(settings: Settings) -> AsyncIterator[SimpleNamespace]:
        assert settings.serve.port == 1
        yield SimpleNamespace(rollout=None, chat=None)

    async def ask(rollout: None, chat: None, messages: list[Message], out: object) -> Trajectory:
        sent.extend(messages)
        return Trajectory("r", [], stop_reason=StopReason.ANSWERED)

    sent: list[Message] = []
    monkeypatch.chdir(tmp_path)
    Path("more.conf").touch()
    monkeypatch.setattr("agentloop.cli.console.open_runtime", started)
    monkeypatch.setattr("agentloop.cli.chat.ask", ask)
    assert main(["chat", *arguments]) == 0
    assert sent == [{"role": "user", "content": "What is a = b?"}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve.port=1", ""], "the question is empty"),
        (["What", "serve.port=1", "is"], "expected one question, in quotes, not 'What', 'is'"),
    ],
)
def test_invalid_question_is_an_error(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["chat", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs", "view"], "error: expected the run's folder, such as runs/latest, or --sample"),
        (["runs", "entropy"], "are required: RUN"),
    ],
)
def test_only_what_is_required_is_said_to_be(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"{message}\n")


def test_interrupt_while_a_command_is_imported_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("agentloop.__main__.import_module", interrupt)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["serve"]) == 130
    assert capsys.readouterr().err == "Loading agentloop serve"


def test_help_loads_nothing() -> None:
    program = (
        "import sys; from agentloop.__main__ import main; main(['--help']);"
        "sys.exit(any(m in sys.modules for m in ('aiohttp', 'anyio', 'argparse', 'pydantic')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


def test_restarting_parent_of_training_imports_little() -> None:
    program = (
        "import sys, agentloop.cli.train;"
        "sys.exit(any(m in sys.modules for m in ('aiohttp', 'numpy', 'pydantic', 'tokenizers')))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT)
    assert done.returncode == 0


def test_help_is_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "usage: agentloop COMMAND" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["help", "runs", "list"])
    assert "usage: agentloop runs list" in capsys.readouterr().out


@pytest.mark.full
def test_reader_that_leaves_early_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "agentloop", "train", "--list-settings"],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert done.returncode == 128 + signal.SIGPIPE
    assert not done.stderr
