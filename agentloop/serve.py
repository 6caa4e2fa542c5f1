"""`agentloop serve`: serve the agent over HTTP until it is stopped. Routes: api/app.py."""

from __future__ import annotations

import argparse
import re
import socket
import sys

import anyio
from rich.console import Console

from agentloop.api.app import AgentService, listening
from agentloop.api.listen import bind
from agentloop.cli import chat, console
from agentloop.config import load_settings
from agentloop.errors import SettingsError
from agentloop.runtime import Runtime, Settings
from agentloop.trajectory import Message

__all__ = ["main"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop serve",
        description="Serve the agent over HTTP. Without arguments, serve the small model that "
        "ships with agentloop on 127.0.0.1:8000.",
    )
    parser.add_argument(
        "--ask", metavar="QUESTION", help="ask this question when ready and show the answer"
    )
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(sys.argv[1:] if arguments is None else arguments)
    if options.list_settings:
        print(console.settings_text(Settings))
        return 0
    return console.run(lambda: _serve(options.settings, options.ask), explain=options.explain)


async def _serve(arguments: list[str], question: str | None) -> int:
    files, overrides = console.split_settings(arguments)
    if any(re.match(r"\s*envs?\b", override) for override in overrides):
        raise SettingsError(
            "env: `agentloop serve` answers questions, and an environment asks its own, with tools "
            "that exist only during a rollout: play it with `agentloop chat env=NAME`"
        )
    settings = load_settings(Settings, files, overrides)
    with bind(settings.serve) as bound:
        async with console.started(settings) as runtime:
            return await _serve_on(bound, AgentService(runtime, settings), runtime, question)


async def _serve_on(
    bound: socket.socket, app: AgentService, runtime: Runtime, question: str | None
) -> int:
    async with listening(app, bound) as url:
        servers = len(runtime.router.view())
        print(
            f"agentloop is ready: {url}/v1 (model {runtime.model_name}, "
            f"{servers} SGLang server{'s' * (servers > 1)}, "
            f"sandbox: {runtime.pool.stats()['backend']})",
            flush=True,
        )
        print(f"Watch it: {url}/ (control token: {app.page.control_token})", flush=True)
        if question is not None:
            messages: list[Message] = [{"role": "user", "content": question}]
            print(f"\n> {question}")
            await chat.ask(runtime, messages, Console(), also=app.on_event)
            print("\nStill serving; press Ctrl-C to stop.", flush=True)
        await anyio.sleep_forever()  # no deadline: serves until it is stopped
    return 0


if __name__ == "__main__":
    sys.exit(main())
