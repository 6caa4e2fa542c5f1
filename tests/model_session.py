"""A stand-in for a rollout's session: a model that programs ask over HTTP, and their agent."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
from aiohttp import web

from agentloop.environments.sandbox import EnvironmentSandbox
from agentloop.errors import InfrastructureFailed
from agentloop.sandbox import Pool
from agentloop.trajectory import StopReason, Trajectory, Turn

PATH = "/sessions/unguessable"

# A program with nothing but Python's standard library: it asks once and prints the answer.
ASK = """
import json, os, sys, urllib.request
task = json.load(sys.stdin)
assert task["prompt"] == os.environ["AGENTLOOP_TASK"]
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "any", "messages": task["messages"]}).encode(),
    {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
)
with urllib.request.urlopen(request) as response:
    answer = json.load(response)["choices"][0]["message"]["content"]
"""


class SessionAgent:
    """The agent of one rollout, whose session a test plays.

    Attributes:
        asked: the bodies of the requests so far.
        answer: the model's reply; None: no reply until the program has gone.
        script: messages that the model says first.
        in_flight: requests, by what the model has sampled for them; None: nothing.
    """

    def __init__(self, pool: Any, url: str, socket: Path, timeout_s: float) -> None:
        self.url = url
        self.socket = socket
        self.key = "secret"
        self.time_left_s = timeout_s
        self.queued_s = 0.0
        self.in_flight: list[Trajectory | None] = []
        self.trajectories: list[Trajectory] = []
        self.failures: list[str] = []
        self.sandbox = EnvironmentSandbox(pool, self._record_failure)
        self.asked: list[Any] = []
        self.answer: str | None = "42"
        self.script: list[dict[str, Any]] = []

    def _record_failure(self, reason: str) -> InfrastructureFailed:
        self.failures.append(reason)
        return InfrastructureFailed(reason)

    def stop_requests(self) -> bool:
        self.trajectories += [trajectory for trajectory in self.in_flight if trajectory is not None]
        return bool(self.in_flight)

    async def respond(self, request: web.Request) -> web.Response:
        if request.headers["Authorization"] != f"Bearer {self.key}":
            raise web.HTTPUnauthorized
        self.asked.append(await request.json())
        if self.answer is None:
            self.in_flight.append(None)
            await anyio.sleep_forever()  # no deadline: the client goes away
        message: dict[str, Any] = {"role": "assistant", "content": self.answer}
        if self.script:
            message = self.script.pop(0)
        turn = Turn([2], [-1.0], text=message["content"] or "")
        name = f"1-t.0+{len(self.trajectories)}"
        self.trajectories.append(Trajectory(name, [1], [turn], StopReason.ANSWERED))
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
        }
        completion = {"id": "c", "object": "chat.completion", "created": 0, "model": "any"}
        return web.json_response({**completion, "choices": [choice]})


@asynccontextmanager
async def model_session(pool: Pool | Any, *, timeout_s: float = 60) -> AsyncIterator[SessionAgent]:
    """Serve a session on a unix socket, and on a port of loopback."""
    with TemporaryDirectory(prefix="session-") as folder:
        socket = Path(folder, "model")
        app = web.Application()
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
        agent = SessionAgent(pool, "", socket, timeout_s)
        app.router.add_post(f"{PATH}/v1/chat/completions", agent.respond)
        await runner.setup()
        try:
            await web.UnixSite(runner, str(socket)).start()
            socket.chmod(0o666)  # noqa: ASYNC240 - on a local disk
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            agent.url = f"http://127.0.0.1:{runner.addresses[1][1]}{PATH}"
            yield agent
        finally:
            with anyio.move_on_after(5, shield=True):
                await runner.cleanup()
