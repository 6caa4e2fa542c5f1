"""Bind the service's address before anything slow starts, and serve on it."""

from __future__ import annotations

import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from aiohttp import web

from agentloop.errors import SettingsError
from agentloop.sandbox.guard import http_log, url_at
from agentloop.serving.access import ServeSettings


def bind(settings: ServeSettings, *, or_free: bool = False) -> socket.socket:
    """Bind the configured address, or with `or_free` another port if it is in use.

    Raises:
        SettingsError: The address cannot be bound.
    """
    try:
        return _bind(settings.host, settings.port)
    except SettingsError:
        if not or_free:
            raise
    return _bind(settings.host, 0)


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound_socket = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind((host, port))
        # So that a second service on this port fails now, not once it is ready.
        bound_socket.listen()
    except OSError as error:
        bound_socket.close()
        reason = error.strerror or error
        hint = "; serve.port=0 takes a free port" if error.errno == errno.EADDRINUSE else ""
        raise SettingsError(
            f"serve.port: cannot listen on {host}:{port}: {reason}{hint}"
        ) from error
    return bound_socket


def runner_of(app: web.Application, *, shutdown_timeout_s: float = 5.0) -> web.AppRunner:
    """Return what serves an application; handlers are cancelled when their clients leave."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        auto_decompress=False,  # read_body does, and answers an unknown encoding in our form
        logger=http_log,
        shutdown_timeout=shutdown_timeout_s,
    )


@asynccontextmanager
async def serving(app: web.Application, bound_socket: socket.socket) -> AsyncIterator[str]:
    """Serve `app` on a bound socket until the context is left; yield the URL."""
    runner = runner_of(app)
    await runner.setup()
    try:
        await web.SockSite(runner, bound_socket, backlog=1024).start()
        host, port = bound_socket.getsockname()[:2]
        yield url_at(host, port)
    finally:
        with anyio.move_on_after(10, shield=True):
            await runner.cleanup()
