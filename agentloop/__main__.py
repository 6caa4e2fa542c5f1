"""`agentloop COMMAND`: each command is a module of its own, imported when it is asked for."""

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
    "sft": "train a model on dialogues, before it is trained by rollouts",
    "train": "train a model by rollouts",
    "rollouts": "roll out for a training run on another machine",
    "evaluate": "measure a model, or an endpoint, on tasks",
    "export": "make a model folder for others of a run's weights",
    "view": "show a run as a page, or make one HTML file of it",
    "ls": "list the runs below a folder",
    "plot": "draw what became of runs, one over another",
    "analyze": "look into a run's rollouts: where the policy hesitates",
    "data": "prepare problems to train and to measure on, and dialogues to start from",
}


def main(arguments: list[str] | None = None) -> int:
    """The entry point; returns the exit status."""
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
    except KeyboardInterrupt:  # before the command had begun to listen for it
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the interpreter flushes it once more
        return 128 + signal.SIGPIPE
    return status


def _help() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: agentloop COMMAND [ARGUMENTS]",
            "",
            "Runs tool-using language-model agents.",
            "",
            "commands:",
            *lines,
            "",
            "agentloop COMMAND --help says more; agentloop --version says which this is.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
