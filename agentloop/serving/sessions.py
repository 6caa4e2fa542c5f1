"""Sessions on this machine, for the programs and clients that environments run.

Only sessions are served: on a port of loopback, and on a unix socket for containers, which have no
network. Each is known by a key that cannot be guessed.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio
from aiohttp import web

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Budget, Engine
from agentloop.agent.sessions import ModelSession, ModelSessions, SessionSettings
from agentloop.inference.sglang.sampling import Sampling
from agentloop.sandbox.openapi import add_routes
from agentloop.sandbox.owner import removed_at_end
from agentloop.serving.access import ApiGuard, ServeSettings
from agentloop.serving.answering import Answering
from agentloop.serving.bare_model import SESSION_ROUTES, BareModel
from agentloop.serving.error_responses import ErrorResponses
from agentloop.serving.http import name_request
from agentloop.serving.listen import runner_of

_MAX_OPEN = 1 << 16
_MAX_BODY_BYTES = 64 << 20


class SessionListener:
    """Opens sessions and serves them.

    Attributes:
        sessions: The open ones.
        socket: A unix socket on which they are served.
    """

    def __init__(self, sessions: ModelSessions, origin: str, socket: Path) -> None:
        self.sessions = sessions
        self.socket = socket
        self._origin = origin

    def url_of(self, session: ModelSession) -> str:
        """Return a session's base URL for Anthropic's clients; OpenAI's add /v1."""
        return f"{self._origin}/v1/sessions/{session.key}"


@asynccontextmanager
async def listening_for_sessions(
    engine: Engine, chat: ChatFormat, *, model_name: str, sampling: Sampling, budget: Budget
) -> AsyncIterator[SessionListener]:
    """Serve sessions within this context.

    Args:
        sampling: Parameters of requests that bring none of their own.
        budget: Limits of each request.
    """
    make = partial(ModelSession, engine=engine, chat=chat, sampling=sampling, budget=budget)
    sessions = ModelSessions(SessionSettings(max_open=_MAX_OPEN), make)
    bare = BareModel(
        sessions,
        chat,
        name=model_name,
        sampling=sampling,
        context_length=lambda: engine.context_length,
        answering=Answering(chat, io_timeout_s=ServeSettings().io_timeout_s),
        slots=anyio.CapacityLimiter(_MAX_OPEN),
        created=int(time.time()),
    )
    routes = [route for route in SESSION_ROUTES if "{key}/v1/" in route.path]
    app = web.Application(
        middlewares=[ErrorResponses(routes).middleware],
        client_max_size=_MAX_BODY_BYTES,
    )
    add_routes(app.router, routes, bare)
    app.on_response_prepare.append(name_request)
    ApiGuard(ServeSettings()).add_to(app)
    runner = runner_of(app, shutdown_timeout_s=1.0)
    with removed_at_end() as folder:
        socket = folder / "model"
        await runner.setup()
        try:
            await web.UnixSite(runner, str(socket)).start()
            _open_to_all(socket)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            port = runner.addresses[1][1]
            yield SessionListener(sessions, f"http://127.0.0.1:{port}", socket)
        finally:
            sessions.close_all()
            with anyio.move_on_after(5, shield=True):
                await runner.cleanup()


def _open_to_all(socket: Path) -> None:
    """Let the users of containers connect; the key of a session keeps others out."""
    socket.parent.chmod(0o755)
    socket.chmod(0o666)
