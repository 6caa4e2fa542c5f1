"""`agentloop chat`: the choice of the model, and errors."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import anyio
import pytest

from agentloop.__main__ import main
from agentloop.trajectory import Message


class Asked:
    """Standard input with these lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = [*lines, None]

    async def next(self) -> str | None:
        return self._lines.pop(0)


def test_an_answer_that_is_interrupted_is_forgotten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class PlayedChat:
        def messages_of(self, turns: list[str]) -> list[Message]:
            return [{"role": "assistant", "content": turn} for turn in turns]

    async def ask(runtime: object, messages: list[Message], out: object) -> SimpleNamespace:
        seen.append([message["content"] for message in messages])
        if messages[-1]["content"] == "two":
            os.kill(os.getpid(), signal.SIGINT)
            await anyio.sleep_forever()
        return SimpleNamespace(turns=["said"])

    @asynccontextmanager
    async def started(settings: object) -> AsyncIterator[SimpleNamespace]:
        yield SimpleNamespace(chat=PlayedChat())

    monkeypatch.setattr("agentloop.cli.console.started", started)
    monkeypatch.setattr("agentloop.cli.chat.ask", ask)
    monkeypatch.setattr("agentloop.cli.console.Lines", lambda: Asked("one", " ", "two", "three"))
    assert main(["chat"]) == 0
    assert seen == [["one"], ["one", "said", "two"], ["one", "said", "three"]]
    assert "interrupted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("models", "said"),
    [
        (("sft/model",), "sft/model (no weights have been published)"),
        (
            ("sft/model", "weights/9", "weights/12"),
            "weights/12 (version 12, the newest published)",
        ),
        (("model",), "model"),  # of a supervised run
    ],
)
def test_it_says_which_weights_of_a_run_it_took(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    models: tuple[str, ...],
    said: str,
) -> None:
    @asynccontextmanager
    async def started(settings: object) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr("agentloop.cli.console.started", started)
    monkeypatch.setattr("agentloop.cli.console.Lines", lambda: Asked())
    (tmp_path / "config.toml").touch()
    for model in models:
        (tmp_path / model).mkdir(parents=True)
        (tmp_path / model / "config.json").write_text("{}")
    assert main(["chat", "--run", str(tmp_path)]) == 0
    assert f"Model: {tmp_path}/{said}\n" in capsys.readouterr().err


def test_a_wrong_end_of_turn_is_told_before_servers_are_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sglang_servers(*_: object, **__: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr("agentloop.runtime.sglang_servers", sglang_servers)
    assert main(["chat", "Hello", "chat.end_token=<eos>", "sandbox.backend=process"]) == 2
    assert "chat.end_token: the tokenizer has no token '<eos>'" in capsys.readouterr().err
