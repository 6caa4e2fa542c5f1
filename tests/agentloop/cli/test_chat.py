"""`agentloop chat`: the choice of the model, and errors."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import anyio
import pytest
from anyio.from_thread import start_blocking_portal
from rich.console import Console

from agentloop.__main__ import main
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import HERMES
from agentloop.cli.chat import Conversations, settings_of
from agentloop.events import (
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnStarted,
)
from agentloop.trajectory import Message, StopReason, Trajectory, Turn, TurnEnd
from tests.agentloop.cli.played import SAID, server, settings_for
from tests.support import FakeSGLang


class Asked:
    """Standard input with these lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = [*lines, None]

    async def next(self) -> str | None:
        return self._lines.pop(0)


def test_answer_that_is_interrupted_is_forgotten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    histories = []

    class PlayedChat:
        def messages_of(self, turns: list[str]) -> list[Message]:
            return [{"role": "assistant", "content": turn} for turn in turns]

    async def ask(
        rollout: object, chat: object, messages: list[Message], out: object
    ) -> SimpleNamespace:
        histories.append([message["content"] for message in messages])
        if messages[-1]["content"] == "two":
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.sleep_forever()
        return SimpleNamespace(turns=["said"])

    @asynccontextmanager
    async def open_runtime(settings: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(chat=PlayedChat(), rollout=None)

    monkeypatch.setattr("agentloop.cli.console.open_runtime", open_runtime)
    monkeypatch.setattr("agentloop.cli.chat.ask", ask)
    monkeypatch.setattr("agentloop.cli.console.Lines", lambda: Asked("one", " ", "two", "three"))
    assert main(["chat"]) == 0
    assert histories == [["one"], ["one", "said", "two"], ["one", "said", "three"]]
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "description"),
    [
        (("sft/model",), "sft/model (no weights have been published)"),
        (("sft/model", "weights/9", "weights/12"), "weights/12 (version 12, the newest published)"),
        (("model",), "model"),  # of a supervised run
    ],
)
def test_weights_used_from_a_run_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    models: tuple[str, ...],
    description: str,
) -> None:
    @asynccontextmanager
    async def open_runtime(settings: object) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr("agentloop.cli.console.open_runtime", open_runtime)
    monkeypatch.setattr("agentloop.cli.console.Lines", lambda: Asked())
    (tmp_path / "config.toml").touch()
    for model in models:
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text("{}")
    assert main(["chat", "--run", str(tmp_path)]) == 0
    assert f"Model: {tmp_path}/{description}\n" in capsys.readouterr().err


def test_wrong_end_of_turn_is_told_before_servers_are_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sglang_servers(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("agentloop.runtime.sglang_servers", sglang_servers)
    assert main(["chat", "Hello", "chat.end_token=<eos>", "sandbox.backend=process"]) == 2
    assert "chat.end_token: the tokenizer has no token '<eos>'" in capsys.readouterr().err


HERE = "tests.agentloop.cli.played"


@pytest.fixture
def fake() -> Iterator[FakeSGLang]:
    """Run a fake server in a thread with its own event loop."""
    with start_blocking_portal() as portal:
        with portal.wrap_async_context_manager(server().serving()) as fake:
            yield fake


@pytest.mark.full
def test_rollout_of_an_environment_is_played(
    fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = [f"env={HERE}:two_talks", *settings_for(fake)]
    assert main(["chat", *settings]) == 0
    first = capsys.readouterr().out
    assert first.index("> First question about ") < first.index("> Second question?")
    assert first.count("1 turn, 0 calls, 3 tokens in ") == 2
    assert first.count(SAID) == 2
    assert first.rstrip().endswith("reward 1.5 (whole 1, half 0.5)")
    first_lines = set()
    for number in ("1", "2", "3", "4"):
        assert main(["chat", "--task", number, *settings]) == 0
        first_lines.add(capsys.readouterr().out.splitlines()[0])
    assert first.splitlines()[0] in first_lines
    assert len(first_lines) > 1


@pytest.mark.full
def test_answer_is_graded_as_the_settings_say(
    fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["env=agentloop.environments.examples.python_math:python_math", *settings_for(fake)]
    assert main(["chat", *settings]) == 0
    out = capsys.readouterr().out
    assert "> You must put your answer" in out
    assert out.rstrip().endswith("reward 0 (it gives no answer)")
    functions = "tests.agentloop.environments.rewards.reward_functions"
    assert main(["chat", *settings, f"reward.function={functions}:no_such_function"]) == 2
    assert "no_such_function" in capsys.readouterr().err


@pytest.mark.full
def test_rollout_without_a_reward_is_a_failure(
    fake: FakeSGLang, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = settings_for(fake)
    assert main(["chat", f"env={HERE}:undecided", *settings]) == 1
    assert "no reward: the environment gives none" in capsys.readouterr().out
    assert main(["chat", f"env={HERE}:broken", *settings]) == 2
    assert "the environment raised KeyError: 'board'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["What is 1 + 1?"], "env: the environment asks the questions: omit yours"),
        (["--task", "9", "tasks.held_out=2"], "--task: 9: the environment has only 2 tasks"),
        (
            ["endpoint.url=http://127.0.0.1:9", "servers=['http://127.0.0.1:8']"],
            "servers: not used",
        ),
        (["env.args.x=1"], "env.args.x: Extra inputs are not permitted"),
    ],
)
def test_mistakes_are_reported_before_a_server_is_started(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", *arguments, f"env.name={HERE}:two_talks"]) == 2
    assert message in capsys.readouterr().err


def test_endpoint_needs_an_environment_to_play(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "endpoint.url=http://127.0.0.1:9"]) == 2
    assert "endpoint.url: an endpoint plays environments: name one" in capsys.readouterr().err


def test_run_of_an_environment_plays_it_and_answers_questions(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "config.toml").write_text(
        f'[env]\nname = "{HERE}:two_talks"\n[tasks]\nheld_out = 3\n'
    )
    settings = settings_of([], tmp_path)
    assert (settings.env.name, settings.tasks.held_out) == (f"{HERE}:two_talks", 3)
    assert settings_of([], tmp_path, with_env=False).env.name == ""
    assert settings_of([f"env={HERE}:broken"], tmp_path).env.name == f"{HERE}:broken"


class Terminal:
    """A chat format whose prompts are texts."""

    family = HERMES

    def begins_in_thought(self, trajectory: Trajectory, turn: int) -> bool:
        return False

    def last_user_text(self, ids: Sequence[int]) -> str:
        return "".join(map(chr, ids))


def test_conversations_are_printed_one_after_the_other() -> None:
    out = Console(width=80, color_system=None, file=io.StringIO())
    show = Conversations(out, cast(ChatFormat, Terminal()))

    def record(key: str) -> Trajectory:
        return Trajectory(key, [*map(ord, f"{key}?")], stop_reason=StopReason.ANSWERED)

    a, b, c = map(record, "abc")
    for event in (
        RolloutStarted(a),
        TokensSampled("a", 0, [1], "one "),
        RolloutStarted(b),
        TokensSampled("b", 0, [1], "from b"),
        RolloutStarted(c),
        TurnFinished("b", 0, Turn()),
        RolloutFinished("b", b),
        TokensSampled("a", 0, [2], "two"),
        TurnFinished("a", 0, Turn()),
        RolloutFinished("a", a),
        RolloutAbandoned("c"),
    ):
        show(event)
    text = cast(io.StringIO, out.file).getvalue()
    assert [line for line in text.splitlines() if line] == [
        "> a?", "one two", "0 turns, 0 calls, 0 tokens in 0.0 s", "> b?", "from b",
        "0 turns, 0 calls, 0 tokens in 0.0 s", "> c?", "the environment ended this conversation",
    ]  # fmt: skip


def test_conversation_with_a_player_is_printed() -> None:
    out = Console(width=80, color_system=None, file=io.StringIO())
    show = Conversations(out, cast(ChatFormat, Terminal()))
    messages: list[Message] = [
        {"role": "system", "content": [{"type": "text", "text": "Play chess."}]},
        {"role": "user", "content": "Your move?"},
    ]
    record = Trajectory("a", [], messages=messages, stop_reason=StopReason.ANSWERED)
    show(RolloutStarted(record))
    for number, move in enumerate(("e4", "d4")):
        show(TurnStarted("a", number))
        show(TokensSampled("a", number, [], move))
        record.turns.append(Turn(text=move, end=TurnEnd.STOP))
        messages.append({"role": "assistant", "content": move})
        show(TurnFinished("a", number, record.turns[number]))
        messages += [{"role": "tool", "content": "ok"}, {"role": "user", "content": "And now?"}]
    show(RolloutFinished("a", record))
    lines = cast(io.StringIO, out.file).getvalue().splitlines()
    assert lines[:5] == ["system> Play chess.", "> Your move?", "e4", "> And now?", "d4"]
