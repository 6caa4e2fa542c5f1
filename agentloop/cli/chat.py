"""`agentloop chat`: ask the agent in a terminal and watch it think, call and answer.

With `env`, play one rollout of an environment instead, and show what it is worth.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os.path
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from agentloop.agent.channels import Channel, Channels, Splitter
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.sessions.history import text_of
from agentloop.agent.threads import in_command_thread
from agentloop.cli import console as commands
from agentloop.cli.chat_url import RunningService
from agentloop.cli.playing import PlaySettings, check_player, playing
from agentloop.config import load_known, load_settings
from agentloop.environments.environment import load, open_tasks
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import SettingsError
from agentloop.events import (
    CallFinished,
    CallStarted,
    Emit,
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnStarted,
    ignore,
)
from agentloop.launch.progress import ProgressLine
from agentloop.launch.settings import AskSettings
from agentloop.observe.event_fanout import EventFanout
from agentloop.rollouts.request import GroupRequest
from agentloop.training.run.folder import RunFolder, config_of
from agentloop.training.run.status import count_of
from agentloop.trajectory import (
    Message,
    StopReason,
    ToolCall,
    ToolCallStatus,
    Trajectory,
    TurnEnd,
)

_ENDINGS = {
    StopReason.TURN_BUDGET: "the turn budget is used up",
    StopReason.TOKEN_BUDGET: "the token budget is used up",
    StopReason.TIME_BUDGET: "the time budget is used up",
    StopReason.CONTENT_FILTER: "the endpoint's content filter withheld it",
    StopReason.INFRASTRUCTURE: "the infrastructure failed",
    StopReason.CANCELLED: "the rollout was cancelled",
    StopReason.ENVIRONMENT: "the environment failed or stopped it",
}


class Transcript:
    """Print a rollout as it happens: reasoning dimmed, calls framed, the answer in bold."""

    def __init__(self, out: Console, chat: ChatFormat | None) -> None:
        """
        Args:
            chat: The format of the model that is asked; None: something else is asked, without ids.
        """
        self._out = out
        self._chat = chat
        self._record: Trajectory | None = None
        self._channels = self._open_channels(False)
        self._at_line_start = True

    def _open_channels(self, thinks: bool) -> Splitter:
        return self._chat.family.channels(thinks) if self._chat else Channels(reasoning=thinks)

    def __call__(self, event: Event) -> None:
        match event:
            case RolloutStarted(record=record):
                self._record = record
            case TurnStarted(turn=turn):
                thinks = (
                    self._chat is not None
                    and self._record is not None
                    and not self._record.messages  # without token ids
                    and self._chat.begins_in_thought(self._record, turn)
                )
                self._channels = self._open_channels(thinks)
            case TokensSampled(text=text):
                for channel, piece in self._channels.feed(text):
                    self._write(piece, "dim" if channel is Channel.REASONING else "bold")
            case CallStarted(call=call):
                self._line(f"[cyan]\u25b6 {escape(call.name or 'malformed call')}[/cyan]")
                self._block(_source(call), "cyan")
            case CallFinished(result=result):
                good = result.status is ToolCallStatus.OK
                color = "green" if good else "red"
                elapsed_s = result.ended_s - result.dispatched_s
                self._line(
                    f"[{color}]\u25c0 {result.status} in {elapsed_s * 1000:.0f} ms[/{color}]"
                )
                self._block(result.content, color)
            case TurnMoved(server=server):
                self._line(
                    f"[yellow]{escape(server)} failed; continuing on another server[/yellow]"
                )
            case TurnFinished():
                for channel, piece in self._channels.flush():
                    self._write(piece, "dim" if channel is Channel.REASONING else "bold")
                self._end_line()

    def end(self, trajectory: Trajectory, num_tokens: int | None = None) -> None:
        """Print the last lines: why the rollout ended, and its turns, tokens and time.

        Args:
            num_tokens: The tokens that an endpoint has counted; None: count the trajectory's.
        """
        if num_tokens is None and trajectory.has_ids:
            num_tokens = trajectory.num_sampled_tokens
        tokens = "" if num_tokens is None else f", {count_of(num_tokens, 'token')}"
        self._end_line()
        if ending := _ENDINGS.get(trajectory.stop_reason):
            reason = f": {trajectory.error}" if trajectory.error else ""
            self._line(f"[red]no answer: {escape(ending + reason)}[/red]")
        self._line(
            f"[dim]{count_of(len(trajectory.turns), 'turn')}, "
            f"{count_of(len(trajectory.calls), 'call')}{tokens} in "
            f"{trajectory.elapsed_s:.1f} s[/dim]"
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


class Conversations:
    """Print the conversations of an environment's rollout one at a time, from its events.

    A conversation that begins during another one is printed after it.
    """

    def __init__(self, out: Console, chat: ChatFormat | None) -> None:
        self._out = out
        self._chat = chat
        self._transcript = Transcript(out, chat)
        self._record = Trajectory("", [])
        self._waiting: dict[str, list[Event]] = {}  # the first one is being printed

    def __call__(self, event: Event) -> None:
        key = getattr(event, "rollout_id", None)
        if key is None:
            return
        self._waiting.setdefault(key, []).append(event)
        while self._waiting:
            first, events = next(iter(self._waiting.items()))
            ended = False
            while events and not ended:
                ended = self._print(events.pop(0))
            if not ended:
                return
            del self._waiting[first]

    def _print(self, event: Event) -> bool:
        """Print an event, and return whether its conversation has ended."""
        match event:
            case RolloutStarted(record=record, messages=messages):
                self._record = record
                self._transcript = Transcript(self._out, self._chat)
                self._transcript(event)
                self._print_messages(messages or self._messages_before(0))
            case TurnStarted(turn=turn) if turn > 0:
                self._print_messages(self._messages_before(turn))
                self._transcript(event)
            case RolloutFinished(trajectory=trajectory, num_tokens=num_tokens):
                self._transcript.end(trajectory, num_tokens)
                return True
            case RolloutAbandoned():
                self._out.print("\n[red]the environment ended this conversation[/red]")
                return True
            case _:
                self._transcript(event)
        return False

    def _messages_before(self, turn: int) -> list[Message]:
        """Return what was said to the model since its last turn, without responses to calls."""
        record = self._record
        if record.messages or self._chat is None:  # without token ids
            between = record.messages_between
            messages = between[turn] if turn < len(between) else []
            return [message for message in messages if message.get("role") != "tool"]
        last = record.turns[turn - 1] if turn > 0 else None
        if last is not None and (last.calls or last.end is TurnEnd.THOUGHT):
            return []
        ids = record.prompt_ids if last is None else last.observation_ids
        return [_from_user(self._chat.last_user_text(ids))]

    def _print_messages(self, messages: Sequence[Message]) -> None:
        """Print what an environment says: after ">", and the role if that is not a user's."""
        for message in messages:
            role = str(message.get("role"))
            mark = ">" if role == "user" else f"{role}>"
            for line in text_of(message).strip().splitlines():
                self._out.print(f"{mark} {line}", markup=False, highlight=False, soft_wrap=True)


def reward_in_words(reward: Reward) -> str:
    """Return a rollout's reward with its parts, or the reason why it has none."""
    if reward.value is None:
        return f"no reward: {reward.reason}"
    return f"reward {reward.value:g}" + (f" ({reward.reason})" if reward.reason else "")


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
    rollout: Callable[..., Awaitable[Trajectory]],
    chat: ChatFormat,
    messages: list[Message],
    out: Console,
    *,
    also: Emit = ignore,
) -> Trajectory:
    """Answer a conversation by `rollout`, such as `Runtime.rollout`, and print it as it happens.

    Args:
        also: called with every event.
    """
    transcript = Transcript(out, chat)
    trajectory = await rollout(messages, on_event=EventFanout(also, transcript))
    transcript.end(trajectory)
    return trajectory


async def play(settings: PlaySettings, task: Task, out: Console) -> Reward:
    """Run one rollout of the environment, print it as it happens and return its reward.

    Raises:
        RequestError: the environment has failed.
    """
    with ProgressLine("Starting the agent") as progress:
        async with playing(settings, progress) as (groups_of, chat):
            progress.stop()
            groups = groups_of(Conversations(out, chat))
            group = await groups.run(GroupRequest(task, "chat", 1, settings.budget))
    (reward,) = group.rewards
    out.print(reward_in_words(reward), style="bold", markup=False, highlight=False, soft_wrap=True)
    return reward


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop chat",
        description="Ask the agent a question and watch its tool calls and their results as they "
        "stream. Without a question, read questions until the end of the input. Ctrl-C cancels "
        "an answer; at the prompt it ends the chat. With env=NAME, play one rollout of an "
        "environment and show its reward; with endpoint.url, an endpoint plays in place of the "
        "model.",
    )
    parser.add_argument("question", nargs="?", help='such as "What is 37 times 48?"')
    parser.add_argument(
        "--run",
        type=Path,
        metavar="FOLDER",
        help="use the newest model of this run of `agentloop train` or `agentloop sft`, with the "
        "run's tools and budget, such as runs/latest",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="talk to a service that is running, such as http://127.0.0.1:8000 of `agentloop "
        "serve`, instead of starting servers; serve.token is its token",
    )
    add_task_argument(parser)
    commands.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(commands.settings_text(PlaySettings))
        return 0
    positional = [] if options.question is None else [options.question, *options.settings]
    questions, settings = _split_questions(positional)
    if len(questions) > 1:
        parser.error(f"expected one question, in quotes, not {', '.join(map(repr, questions))}")
    question = questions[0] if questions else None
    if question is not None and not question.strip():
        parser.error("the question is empty")
    if options.url is not None:
        if options.run is not None:
            parser.error("--url and --run: the running service has a model of its own")
        return commands.run(lambda: _chat_at(options.url, question, settings))
    return commands.run(
        lambda: _chat(question, settings, options.run, options.task), explain=options.explain
    )


def add_task_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--task",
        type=commands.at_least(1),
        default=1,
        metavar="N",
        help="with env=NAME: the N-th of its tasks; with tasks.held_out, of the held-out ones "
        "(default: 1)",
    )


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


def settings_of(arguments: list[str], run: Path | None, *, with_env: bool = True) -> PlaySettings:
    """Return the settings of the command line, on top of those of `run`.

    Args:
        with_env: keep the run's environment, which asks the questions.

    Raises:
        SettingsError: a setting is invalid.
        RunFolderError: `run` is not a run with a model.
    """
    files, overrides = commands.split_settings(arguments)
    if run is None:
        return load_settings(PlaySettings, files, overrides)
    # Settings of training alone would be refused here, so only the known ones are read.
    base = load_known(PlaySettings, config_of(run, "--run"))
    if not with_env:
        base.pop("env", None)
    base |= {"model": str(RunFolder.model_in(run)), "servers": []}
    return load_settings(PlaySettings, files, overrides, base=base)


async def _chat(question: str | None, arguments: list[str], run: Path | None, number: int) -> int:
    settings = settings_of(arguments, run, with_env=question is None)
    task: Task | None = None
    if settings.endpoint.url and not settings.env.name:
        raise SettingsError(
            "endpoint.url: an endpoint plays environments: name one by env=..., or ask the "
            "endpoint by --url"
        )
    if settings.env.name:
        if question is not None:
            raise SettingsError(
                "env: the environment asks the questions: omit yours, and choose a task with --task"
            )
        task = await in_command_thread(task_of, settings, number)
        check_player(settings)
    if run is not None and settings.model is not None:
        print(f"Model: {settings.model}{_origin(Path(settings.model), run)}", file=sys.stderr)
    out = Console()
    if task is not None:
        reward = await play(settings, task, out)
        return 0 if reward.value is not None else 1
    async with commands.open_runtime(settings) as runtime:
        if question is not None:
            messages = [_from_user(question)]
            trajectory = await ask(runtime.rollout, runtime.chat, messages, out)
            return 0 if trajectory.stop_reason is StopReason.ANSWERED else 1

        async def answer(messages: list[Message]) -> list[Message]:
            trajectory = await ask(runtime.rollout, runtime.chat, messages, out)
            return runtime.chat.messages_of(trajectory.turns)

        await _converse(answer, out)
    return 0


async def _chat_at(url: str, question: str | None, arguments: list[str]) -> int:
    """Converse with a running service."""
    files, overrides = commands.split_settings(arguments)
    if unused := [
        *files,
        *(override for override in overrides if not override.startswith("serve.token=")),
    ]:
        raise SettingsError(f"--url: the running service has its own settings: omit {unused[0]}")
    token = load_settings(PlaySettings, [], overrides).serve.token
    out = Console()
    key = None if token is None else token.get_secret_value()
    async with RunningService.open(url, key) as service:
        if question is not None:
            return 0 if await service.answer([_from_user(question)], out) else 1

        async def answer(messages: list[Message]) -> list[Message]:
            return [{"role": "assistant", "content": await service.answer(messages, out)}]

        await _converse(answer, out)
    return 0


async def _converse(
    answered: Callable[[list[Message]], Awaitable[list[Message]]], out: Console
) -> None:
    """Answer questions until the end of the input; Ctrl-C drops the one that is being answered.

    Args:
        answered: prints the answer to a conversation, and returns its messages.
    """
    lines = commands.Lines()
    messages: list[Message] = []
    while (question := await _next_question(lines)) is not None:
        messages.append(_from_user(question))
        with commands.interruptible() as scope:
            messages += await answered(messages)
        if scope.cancelled_caught:
            out.print("\n[dim]interrupted; the question was dropped[/dim]")
            messages.pop()


def _from_user(question: str) -> Message:
    return {"role": "user", "content": question}


def task_of(settings: AskSettings, number: int) -> Task:
    """Return the task with this number, counted from 1.

    Raises:
        DataError: a task is invalid.
        SettingsError: there is no such task, or the environment cannot be imported.
    """
    source = open_tasks(settings.tasks, load(settings.env))
    is_held_out = settings.tasks.held_out or source.has_split
    listed = source.held_out() if is_held_out else source.distinct
    if listed is None:
        return next(itertools.islice(source, number - 1, None))
    if number > len(listed):
        has = count_of(len(listed), "task")
        raise SettingsError(f"--task: {number}: the environment has only {has}")
    return listed[number - 1]


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
