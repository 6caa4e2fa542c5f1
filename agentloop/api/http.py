"""Listening: an address taken before anything slow is started, and served on until it is left."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from aiohttp import web

from agentloop.api.guard import ServeSettings
from agentloop.errors import SettingsError
from sandbox.guard import http_log, url_at

__all__ = ["bind", "serving"]


def bind(settings: ServeSettings, *, or_free: bool = False) -> socket.socket:
    """Take the address, before anything is started that takes long; with `or_free` another port
    where it is taken.

    Raises:
        SettingsError: it cannot be taken.
    """
    try:
        return _bound(settings.host, settings.port)
    except SettingsError:
        if not or_free:
            raise
    return _bound(settings.host, 0)


def _bound(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
        bound.listen()  # so that a second service on this port fails now, not when it is ready
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise SettingsError(f"serve.port: cannot listen on {host}:{port}: {reason}") from error
    return bound


@asynccontextmanager
async def serving(app: web.Application, bound: socket.socket) -> AsyncIterator[str]:
    """Serve on a socket that is bound, until the context is left; yields the URL."""
    runner = web.AppRunner(
        app, handler_cancellation=True, access_log=None, logger=http_log, shutdown_timeout=5.0
    )
    await runner.setup()
    try:
        await web.SockSite(runner, bound, backlog=1024).start()
        host, port = bound.getsockname()[:2]
        yield url_at(host, port)
    finally:
        with anyio.move_on_after(10, shield=True):
            await runner.cleanup()
