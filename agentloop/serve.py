"""`agentloop serve`: serve the agent over HTTP until it is stopped. Routes: serving/app.py."""

from __future__ import annotations

import argparse
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from rich.console import Console

from agentloop.agent.threads import in_command_thread
from agentloop.cli import chat, console
from agentloop.config import load_settings, to_toml
from agentloop.environments.environment import load, set_up
from agentloop.environments.tasks.task import Task
from agentloop.errors import RunFolderError, SettingsError
from agentloop.launch.settings import AskSettings
from agentloop.observe.throughput import Throughput
from agentloop.runtime import Runtime, Settings
from agentloop.serving.app import AgentService, listening
from agentloop.serving.environments import ServedAgent
from agentloop.serving.listen import bind
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.status import count_of
from agentloop.trajectory import Message

__all__ = ["main"]

_LINE_EVERY_S = 10.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop serve",
        description="Serve the agent over HTTP. Without arguments, serve the small model that "
        "ships with agentloop on 127.0.0.1:8000. With env=NAME, the agent is that of an "
        "environment, with its tools and its system message.",
    )
    parser.add_argument(
        "--ask", metavar="QUESTION", help="ask this question when ready and show the answer"
    )
    chat.add_task_argument(parser)
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(sys.argv[1:] if arguments is None else arguments)
    if options.list_settings:
        print(console.settings_text(AskSettings))
        return 0
    work = partial(_serve, options.settings, options.ask, options.task)
    return console.run(work, explain=options.explain)


async def _serve(arguments: list[str], question: str | None, number: int) -> int:
    files, overrides = console.split_settings(arguments)
    overrides = [re.sub(r"^record=", "sessions.record=", override) for override in overrides]
    settings = load_settings(AskSettings, files, overrides)
    task: Task | None = None
    if settings.env.name:
        task = await in_command_thread(chat.task_of, settings, number)
    with bind(settings.serve) as bound:
        async with (
            _record_of(settings) as record,
            set_up([load(settings.env)]),
            console.open_runtime(settings) as runtime,
        ):
            agent: ServedAgent | None = None
            if task is not None and (environment := load(settings.env)) is not None:
                s = settings
                agent = ServedAgent(environment, runtime, task, s.sampling, s.budget)
            app = AgentService(runtime, settings, record, agent)
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
            asked = chat.ask(app.rollout, runtime.chat, messages, Console(), also=app.on_event)
            app.recorder.add(await asked)
            print("\nStill serving; press Ctrl-C to stop.", flush=True)
        throughput = Throughput()
        app.on_event.add(throughput.on_event)
        while True:  # serves until it is stopped
            await anyio.sleep(_LINE_EVERY_S)
            if line := throughput.line(runtime.router.num_waiting):
                print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
