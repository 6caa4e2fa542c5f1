"""`agentloop serve`: serve the agent over HTTP until it is stopped. Routes: api/app.py."""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio
from rich.console import Console

from agentloop.api.app import AgentService, listening
from agentloop.api.listen import bind
from agentloop.cli import chat, console
from agentloop.config import load_settings, to_toml
from agentloop.errors import RunFolderError, SettingsError
from agentloop.observe.throughput import Throughput
from agentloop.runtime import Runtime, Settings
from agentloop.training.run_folder import RunFolder
from agentloop.training.run_status import count_of
from agentloop.trajectory import Message

__all__ = ["main"]

_LINE_EVERY_S = 10.0


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
    overrides = [re.sub(r"^record=", "sessions.record=", override) for override in overrides]
    if any(re.match(r"\s*envs?\b", override) for override in overrides):
        raise SettingsError(
            "env: `agentloop serve` answers questions, and an environment asks its own, with tools "
            "that exist only during a rollout: play it with `agentloop chat env=NAME`"
        )
    settings = load_settings(Settings, files, overrides)
    with bind(settings.serve) as bound:
        async with _record_of(settings) as record, console.started(settings) as runtime:
            app = AgentService(runtime, settings, record)
            return await _serve_on(bound, app, runtime, question)


@asynccontextmanager
async def _record_of(settings: Settings) -> AsyncIterator[RunFolder | None]:
    """Open the folder where conversations are recorded, if there is one.

    Raises:
        SettingsError: it holds a run of another kind, is in use, or cannot be written.
    """
    if not settings.sessions.record:
        yield None
        return
    path = Path(settings.sessions.record)
    async with AsyncExitStack() as stack:
        try:
            opened = RunFolder.open(path, to_toml(settings))
            folder = await stack.enter_async_context(opened)
        except (RunFolderError, SettingsError) as error:
            raise SettingsError(f"sessions.record: {str(error).partition(': ')[2]}") from error
        yield folder


async def _serve_on(
    bound: socket.socket, app: AgentService, runtime: Runtime, question: str | None
) -> int:
    async with listening(app, bound) as url:
        print(
            f"agentloop is ready: {url}/v1 (model {runtime.model_name}, "
            f"{count_of(len(runtime.router.view()), 'SGLang server')}, "
            f"sandbox: {runtime.pool.stats()['backend']})",
            flush=True,
        )
        print(f"Watch it: {url}/ (control token: {app.page.control_token})", flush=True)
        if question is not None:
            messages: list[Message] = [{"role": "user", "content": question}]
            print(f"\n> {question}")
            app.recorder.add(await chat.ask(runtime, messages, Console(), also=app.on_event))
            print("\nStill serving; press Ctrl-C to stop.", flush=True)
        throughput = Throughput()
        app.on_event.add(throughput.on_event)
        while True:  # serves until it is stopped
            await anyio.sleep(_LINE_EVERY_S)
            if line := throughput.line(runtime.router.num_waiting):
                print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
