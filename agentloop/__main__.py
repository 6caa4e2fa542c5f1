"""`agentloop COMMAND`: dispatch to the module of the command, imported only when it is needed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from io import TextIOWrapper

__all__ = ["main"]

_COMMANDS = {
    "serve": "serve the agent over HTTP (OpenAI's protocol)",
    "chat": "chat with the agent in a terminal",
    "sft": "fine-tune a model on dialogues, usually before reinforcement learning",
    "train": "train a model with reinforcement learning",
    "evaluate": "evaluate a model or an endpoint on tasks",
    "env": "try, create and list environments",
    "runs": "list, view, plot, analyze and export runs",
    "doctor": "list what this machine lacks, or how a model's conversations are read",
    "data": "prepare problems for training and evaluation, and dialogues for fine-tuning",
}
_RUNS_COMMANDS = {
    "list": "list the runs in a folder",
    "view": "show a run as a web page, or export it as one HTML file",
    "plot": "plot the metrics of one or more runs",
    "entropy": "find the tokens at which a run's policy is uncertain",
    "export": "export a run's weights as a model folder",
}
_ENV_COMMANDS = {
    "try": "run ten rollouts of an environment and show them",
    "init": "write a package with an environment to start from",
    "list": "list the environments of installed packages",
}
_GROUPS = {"runs": _RUNS_COMMANDS, "env": _ENV_COMMANDS}
_MODULES = {
    "serve": "agentloop.serve",  # `python -m agentloop.serve` works as well
    "try": "agentloop.cli.env.trial",  # a keyword of Python
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command named by the first argument and return its exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if isinstance(sys.stdout, TextIOWrapper):  # a locale may lack what a model writes
        sys.stdout.reconfigure(errors="backslashreplace")
    return _dispatch("agentloop", "agentloop.cli", _COMMANDS, arguments)


def _dispatch(program: str, package: str, commands: Mapping[str, str], arguments: list[str]) -> int:
    command, *command_arguments = arguments or ["--help"]
    if command in ("-h", "--help", "help"):
        if command == "help" and command_arguments and command_arguments[0] in commands:
            return _dispatch(program, package, commands, [*command_arguments, "--help"])
        print(_help(program, commands))
        return 0
    if command in ("-V", "--version"):
        from agentloop.distribution import version

        print(f"agentloop {version()}")
        return 0
    if command not in commands:
        close = get_close_matches(command, commands, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        message = f"{program}: error: unknown command {command!r}{hint}"
        print(f"{message}\n\n{_help(program, commands)}", file=sys.stderr)
        return 2
    if command in _GROUPS and commands is _COMMANDS:
        names = f"agentloop {command}", f"agentloop.cli.{command}"
        return _dispatch(*names, _GROUPS[command], command_arguments)
    from agentloop.cli.console import loading

    try:
        with loading(f"{program} {command}"):
            module = import_module(_MODULES.get(command, f"{package}.{command}"))
        status: int = module.main(command_arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:  # before the command has installed its signal handler
        return 130
    except BrokenPipeError:  # the reader of our output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # because the interpreter flushes it again
        return 128 + signal.SIGPIPE
    return status


def _help(program: str, commands: Mapping[str, str]) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in commands.items()]
    descriptions = {
        "agentloop": "Run and train tool-using language-model agents.",
        "agentloop env": "Try environments, and create your own.",
        "agentloop runs": "Inspect the folders that training and evaluation runs write.",
    }
    return "\n".join(
        [
            f"usage: {program} COMMAND [ARGUMENTS]",
            "",
            descriptions[program],
            "",
            "commands:",
            *lines,
            "",
            f"Use {program} COMMAND --help for details, agentloop --version for the version.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
