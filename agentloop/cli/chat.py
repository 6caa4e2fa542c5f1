"""`agentloop chat`: ask the agent in a terminal and watch it think, call and answer."""

from __future__ import annotations

import argparse
import json
import os.path
import sys
from collections.abc import Sequence, Sized
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from agentloop.agent.channels import Channel, Channels
from agentloop.cli import console as commands
from agentloop.config import load_known, load_settings
from agentloop.events import (
    CallFinished,
    CallStarted,
    Emit,
    Event,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    ignore,
)
from agentloop.runtime import Runtime, Settings
from agentloop.training.run_folder import RunFolder, config_of
from agentloop.trajectory import Message, StopReason, ToolCall, ToolCallStatus, Trajectory

__all__ = ["Transcript", "ask", "main", "settings_of"]

_ENDINGS = {
    StopReason.TURN_BUDGET: "the turn budget is used up",
    StopReason.TOKEN_BUDGET: "the token budget is used up",
    StopReason.TIME_BUDGET: "the time budget is used up",
    StopReason.INFRASTRUCTURE: "the infrastructure failed",
    StopReason.CANCELLED: "the rollout was cancelled",
    StopReason.ENVIRONMENT: "the environment failed or stopped it",
}


class Transcript:
    """Print a rollout as it happens: reasoning dimmed, calls framed, the answer in bold."""

    def __init__(self, out: Console, *, reasoning_first: bool) -> None:
        self._out = out
        self._reasoning_first = reasoning_first
        self._channels = Channels(reasoning=reasoning_first)
        self._at_line_start = True

    def __call__(self, event: Event) -> None:
        match event:
            case TokensSampled(text=text):
                for channel, piece in self._channels.feed(text):
                    self._write(piece, "dim" if channel is Channel.REASONING else "bold")
            case CallStarted(call=call):
                self._line(f"[cyan]\u25b6 {escape(call.name or 'malformed call')}[/cyan]")
                self._block(_source(call), "cyan")
            case CallFinished(result=result):
                good = result.status is ToolCallStatus.OK
                color = "green" if good else "red"
                took = result.ended_s - result.dispatched_s
                self._line(f"[{color}]\u25c0 {result.status} in {took * 1000:.0f} ms[/{color}]")
                self._block(result.content, color)
            case TurnMoved(server=server):
                self._line(
                    f"[yellow]{escape(server)} failed; continuing on another server[/yellow]"
                )
            case TurnFinished():
                for channel, piece in self._channels.flush():
                    self._write(piece, "dim" if channel is Channel.REASONING else "bold")
                self._channels = Channels(reasoning=self._reasoning_first)
                self._end_line()

    def end(self, trajectory: Trajectory) -> None:
        """Print the last lines: why the rollout ended, and its turns, tokens and time."""
        self._end_line()
        if ending := _ENDINGS.get(trajectory.stop_reason):
            reason = f": {trajectory.error}" if trajectory.error else ""
            self._line(f"[red]no answer: {escape(ending + reason)}[/red]")
        self._line(
            f"[dim]{_count(trajectory.turns, 'turn')}, {_count(trajectory.calls, 'call')}, "
            f"{trajectory.num_sampled_tokens} tokens in {trajectory.elapsed_s:.1f} s[/dim]"
        )

    def _write(self, text: str, style: str) -> None:
        if self._at_line_start:
            text = text.lstrip("\n")
        if text:
            self._out.print(text, style=style, end="", markup=False, highlight=False)
            self._at_line_start = text.endswith("\n")

    def _line(self, markup: str) -> None:
        self._end_line()
        self._out.print(markup, highlight=False)

    def _block(self, text: str, color: str) -> None:
        for line in text.splitlines() or [""]:
            self._out.print(f"[{color}]  \u2502[/{color}] {escape(line)}", highlight=False)

    def _end_line(self) -> None:
        if not self._at_line_start:
            self._out.print()
            self._at_line_start = True


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


def _source(call: ToolCall) -> str:
    """Return the program that a call runs, or the call's arguments as JSON if there is none."""
    if call.error is not None:
        return call.raw
    code = call.arguments.get("code")
    if isinstance(code, str) and not any(
        call.arguments.get(key) for key in call.arguments if key != "code"
    ):
        return code
    return json.dumps(call.arguments, ensure_ascii=False)


async def ask(
    runtime: Runtime, messages: list[Message], out: Console, *, also: Emit = ignore
) -> Trajectory:
    """Run one rollout and print it as it happens; `also` is called with every event."""
    transcript = Transcript(out, reasoning_first=bool(runtime.chat.opened_thought))

    async with runtime.stream(messages, on_event=also) as rollout:
        async for event in rollout:  # no deadline: the rollout has one, and then ends this
            transcript(event)
    trajectory = rollout.trajectory
    assert trajectory is not None
    transcript.end(trajectory)
    return trajectory


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop chat",
        description="Ask the agent a question and watch its tool calls and their results as they "
        "stream. Without a question, read questions until the end of the input. Ctrl-C cancels "
        "an answer; at the prompt it ends the chat.",
    )
    parser.add_argument("question", nargs="?", help='such as "What is 37 times 48?"')
    parser.add_argument(
        "--run",
        type=Path,
        metavar="FOLDER",
        help="use the newest model of this run of `agentloop train` or `agentloop sft`, with the "
        "run's tools and budget, such as runs/latest",
    )
    commands.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(commands.settings_text(Settings))
        return 0
    given = [] if options.question is None else [options.question, *options.settings]
    questions, settings = _split_questions(given)
    if len(questions) > 1:
        parser.error(f"expected one question, in quotes, not {', '.join(map(repr, questions))}")
    question = questions[0] if questions else None
    if question is not None and not question.strip():
        parser.error("the question is empty")
    return commands.run(lambda: _chat(question, settings, options.run), explain=options.explain)


def _split_questions(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the arguments into questions and settings.

    The first argument is a settings file only if its name ends in .toml; later ones also if a file
    of that name exists.
    """
    questions: list[str] = []
    settings: list[str] = []
    for index, text in enumerate(arguments):
        looks_like_one = " " not in text and ("=" in text or text.endswith(".toml"))
        is_setting = looks_like_one or (index > 0 and os.path.isfile(text))
        (settings if is_setting else questions).append(text)
    return questions, settings


def settings_of(arguments: list[str], run: Path | None) -> Settings:
    """Return the settings of the command line, on top of those of `run`.

    Raises:
        SettingsError: a setting is invalid.
        RunFolderError: `run` is not a run with a model.
    """
    files, overrides = commands.split_settings(arguments)
    if run is None:
        return load_settings(Settings, files, overrides)
    # Settings of training alone would be refused here, so only the known ones are read.
    base = load_known(Settings, config_of(run, "--run"))
    base |= {"model": str(RunFolder.model_in(run)), "servers": []}
    return load_settings(Settings, files, overrides, base=base)


async def _chat(question: str | None, arguments: list[str], run: Path | None) -> int:
    settings = settings_of(arguments, run)
    if run is not None and settings.model is not None:
        print(f"Model: {settings.model}{_origin(Path(settings.model), run)}", file=sys.stderr)
    out = Console()
    async with commands.started(settings) as runtime:
        if question is not None:
            trajectory = await ask(runtime, [{"role": "user", "content": question}], out)
            return 0 if trajectory.stop_reason is StopReason.ANSWERED else 1
        lines = commands.Lines()
        messages: list[Message] = []
        while (question := await _next_question(lines)) is not None:
            messages.append({"role": "user", "content": question})
            with commands.interruptible() as scope:
                trajectory = await ask(runtime, messages, out)
                messages += runtime.chat.messages_of(trajectory.turns)
            if scope.cancelled_caught:
                out.print("\n[dim]interrupted; the question was dropped[/dim]")
                messages.pop()
    return 0


def _origin(model: Path, run: Path) -> str:
    if model.parent == run / "weights":
        return f" (version {model.name}, the newest published)"
    return " (no weights have been published)" if model == run / "sft" / "model" else ""


async def _next_question(lines: commands.Lines) -> str | None:
    """Return the next line that is not blank, or None at the end of the input."""
    is_terminal = sys.stdin.isatty()
    while True:
        if is_terminal:
            print("\nyou> ", end="", flush=True)
        line = await lines.next()
        if line is None:
            return None
        if line.strip():
            return line.strip()
