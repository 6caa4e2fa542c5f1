"""`agentloop env try`: transcripts, rewards, failures and times."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from agentloop.__main__ import main
from tests.agentloop.cli import played
from tests.agentloop.cli.played import SAID, server, settings_for
from tests.agentloop.environments.test_player import calls
from tests.agentloop.evaluation.fake_endpoint import FakeEndpoint, saying
from tests.support import FakeSGLang

HERE = "tests.agentloop.cli.played"
GUESS = "agentloop.environments.examples.guess_number:guess"


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    """Run a fake server in a thread with its own event loop."""
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(server().serving()) as fake:
            yield fake


def test_environment_is_shown_with_all_parts(
    fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [*settings_for(fake), "num_rollouts=3", "env.args.half=0.25"]
    assert main(["env", "try", f"{HERE}:two_talks", *settings]) == 0
    out, err = capsys.readouterr()
    assert out.count("rollout ") >= 3
    assert "3 of 3 rollouts ended" in out + err
    assert "rollout 2 of 3: environment-" in out
    assert "mood '[good]'" in out
    assert out.count("> First question about ") == out.count("> Second question?") == 3
    assert out.count(SAID) == 6
    assert out.count("reward 1.25 (whole 1, half 0.25)") == 3
    (head,) = (line for line in out.splitlines() if line.startswith("  rollout") or "turns" in line)
    for name in (
        "reward",
        "whole",
        "half",
        "talks",
        "turns",
        "calls",
        "tokens",
        "model s",
        "waiting s",
    ):
        assert name in head
    assert "reward     1.250 on average\n  whole: 1.000\n  half: 0.250\n  talks: 2.000" in out
    assert "failed" not in out
    assert "s in all rollouts: model " in out


def test_transcript_interleaves_messages_of_environment_and_model(
    fake: FakeSGLang, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["env", "try", f"{HERE}:two_replies", *settings_for(fake), "num_rollouts=1"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    at = lines.index("system> Play a game.")
    expected = ["> Your guess?", SAID, "> [cold] [/red]", SAID, "> warm", SAID]
    assert lines[at + 1 : at + 7] == expected


@pytest.mark.parametrize(
    "command", [["env", "try", GUESS, "num_rollouts=1"], ["chat", f"env={GUESS}"]]
)
def test_endpoint_plays_with_the_tools_of_the_environment(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    guess = calls(("a", "guess", '{"number": 40}'), text="I try [40].")
    answer = saying("I give up.", reasoning_content="Too large.")
    with start_blocking_portal() as portal:
        fake = FakeEndpoint(deque([guess, answer]))
        with portal.wrap_async_context_manager(fake.serving()):
            settings = [f"endpoint.url={fake.url}", "sandbox.backend=process"]
            assert main([*command, *settings]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    start = next(number for number, line in enumerate(lines) if line.startswith("> Find my number"))
    assert lines[start + 1 : start + 4] == ["I try [40].", "\u25b6 guess", '\u2502 {"number": 40}']
    assert lines[start + 5] == "\u2502 lower"
    assert lines[start + 6 : start + 8] == ["Too large.", "I give up."]
    assert "2 turns, 1 call, 14 tokens in" in lines[start + 8]
    assert "reward 0 (found 0)" in lines
    first, second = fake.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["guess"]
    assert [message["role"] for message in second["messages"]] == ["user", "assistant", "tool"]


def test_line_that_blocks_the_event_loop_is_named(
    fake: FakeSGLang, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []

    def warn(text: str, message: str) -> None:
        warnings.append(text % message)
        played.is_noticed.set()

    monkeypatch.setattr("agentloop.observe.watchdog.log.warning", warn)
    assert main(["env", "try", f"{HERE}:blocking", *settings_for(fake), "num_rollouts=1"]) == 0
    (warning,) = warnings
    assert "the event loop has been blocked for" in warning
    assert "assert is_noticed.wait(60)" in warning


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("broken", "environment broken: the environment raised KeyError: 'board' (played.py:"),
        ("undecided", "the environment gives none"),
    ],
)
@pytest.mark.full
def test_failed_rollout_is_shown_with_its_reason(
    fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, reason: str
) -> None:
    settings = [*settings_for(fake), "num_rollouts=2"]
    assert main(["env", "try", f"{HERE}:{name}", *settings]) == 1
    out = capsys.readouterr().out
    assert out.count(f"no reward: {reason}") == 2
    assert f"failed     2 of 2: {reason}" in out
    assert "it breaks?" in out or name != "broken"  # the transcript is there nevertheless
    assert "reward     - on average" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["num_rollouts=3"], "expected the NAME of an environment first"),
        ([], "expected the NAME of an environment first"),
    ],
)
def test_name_comes_first(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["env", "try", *arguments])
    assert message in capsys.readouterr().err


def test_mistakes_are_told_before_anything_starts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.cli.playing.Runtime", None)
    monkeypatch.setattr("agentloop.launch.machine.is_installed", lambda name: name != "sglang")
    assert main(["env", "try", f"{HERE}:two_talks"]) == 2
    assert "SGLang is not installed" in capsys.readouterr().err
    assert main(["env", "try", "no_such_module:f"]) == 2
    assert "there is no module 'no_such_module'" in capsys.readouterr().err
    assert main(["env", "try", f"{HERE}:two_talks", "num_rollouts=0"]) == 2
    assert "num_rollouts: " in capsys.readouterr().err
    assert main(["env", "try", "--list-settings"]) == 0
    assert "num_rollouts = 10" in capsys.readouterr().out
