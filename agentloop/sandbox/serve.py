"""`python -m agentloop.sandbox.serve`: the pool as an HTTP service for any machine and language."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from importlib.util import find_spec

import anyio
from aiohttp import web

from agentloop.sandbox.errors import SandboxError, SandboxUnavailable
from agentloop.sandbox.guard import http_log, url_at
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.serve_settings import SandboxServeSettings, load, raise_descriptor_limit
from agentloop.sandbox.service import SandboxService


@asynccontextmanager
async def serving(pool: Pool, settings: SandboxServeSettings) -> AsyncIterator[str]:
    """Serve a pool until the context is left; yield the URL.

    Raises:
        SandboxUnavailable: the address cannot be bound.
    """
    async with SandboxService(pool, settings) as app, AsyncExitStack() as stack:
        runner = web.AppRunner(
            app.build(),
            handler_cancellation=True,
            access_log=None,
            logger=http_log,
            shutdown_timeout=0.3,
        )
        stack.push_async_callback(_clean_up, runner)
        await runner.setup()
        make_handler = runner.server
        assert make_handler is not None
        try:
            server = await asyncio.get_running_loop().create_server(
                lambda: app.protocol(make_handler()),
                settings.host,
                settings.port,
                backlog=min(4096, settings.max_connections),
            )
        except OSError as error:
            where = f"{settings.host}:{settings.port}"
            reason = error.strerror or error
            raise SandboxUnavailable(f"cannot listen on {where}: {reason}") from error
        stack.callback(server.close)
        host, port = server.sockets[0].getsockname()[:2]
        yield url_at(host, port)


async def _clean_up(runner: web.AppRunner) -> None:
    with anyio.move_on_after(10, shield=True):
        await runner.cleanup()


async def serve(settings: SandboxServeSettings) -> None:
    """Run the service until cancelled; print a line on stdout when it is ready."""
    async with (
        Pool(settings.pool, on_progress=partial(print, file=sys.stderr, flush=True)) as pool,
        serving(pool, settings) as url,
    ):
        stats = pool.stats()
        print(
            f"sandbox is ready: {url} (backend: {stats['backend']}, "
            f"workers: {stats['workers']}, slots: {stats['slots']})",
            flush=True,
        )
        await anyio.sleep_forever()  # no deadline: serves until it is stopped


async def _until_signal(settings: SandboxServeSettings) -> int:
    """Run the service until SIGINT or SIGTERM; return the exit status."""
    status = 0
    with anyio.CancelScope() as scope:

        def stop(number: int) -> None:
            nonlocal status
            status = 128 + number
            scope.cancel()  # all cleanup has a deadline

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop, number)
        await serve(settings)
    return status


def main(arguments: list[str] | None = None) -> int:
    try:
        settings = load(sys.argv[1:] if arguments is None else arguments)
        raise_descriptor_limit(settings)
        has_uvloop = find_spec("uvloop") is not None
        return anyio.run(_until_signal, settings, backend_options={"use_uvloop": has_uvloop})
    except (ValueError, SandboxError) as error:
        print(f"sandbox.serve: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
