"""`agentloop COMMAND`: dispatch to the module of that name, imported only when it is needed."""

from __future__ import annotations

import os
import signal
import sys
from difflib import get_close_matches
from importlib import import_module

__all__ = ["main"]

_COMMANDS = {
    "serve": "serve the agent over HTTP (OpenAI's protocol)",
    "chat": "ask the agent in a terminal",
    "sft": "fine-tune a model on dialogues, usually before training by rollouts",
    "train": "train a model by reinforcement learning on rollouts",
    "rollouts": "generate rollouts for a training run on another machine",
    "evaluate": "evaluate a model or an endpoint on tasks",
    "export": "export a run's weights as a model folder",
    "view": "show a run as a web page, or export it as one HTML file",
    "ls": "list the runs in a folder",
    "plot": "plot the metrics of one or more runs",
    "analyze": "analyze a run's rollouts: at which tokens the policy is uncertain",
    "data": "prepare problems for training and evaluation, and dialogues for fine-tuning",
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command named by the first argument and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    command, *rest = arguments or ["--help"]
    if command in ("-h", "--help", "help"):
        if command == "help" and rest and rest[0] in _COMMANDS:
            return main([rest[0], "--help"])
        print(_help())
        return 0
    if command in ("-V", "--version"):
        from agentloop.distribution import version

        print(f"agentloop {version()}")
        return 0
    if command not in _COMMANDS:
        close = get_close_matches(command, _COMMANDS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        print(f"agentloop: error: unknown command {command!r}{hint}\n\n{_help()}", file=sys.stderr)
        return 2
    try:
        status: int = import_module(f"agentloop.{command}").main(rest)
        sys.stdout.flush()
    except KeyboardInterrupt:  # before the command has installed its signal handler
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the interpreter flushes it once more
        return 128 + signal.SIGPIPE
    return status


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: agentloop COMMAND [ARGUMENTS]",
            "",
            "Run and train tool-using language-model agents.",
            "",
            "commands:",
            *lines,
            "",
            "Use agentloop COMMAND --help for details, agentloop --version for the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
