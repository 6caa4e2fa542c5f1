"""Workers as local processes, for machines without a Docker Engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from sandbox.backend import worker_settings
from sandbox.errors import SandboxUnavailable
from sandbox.link import Link, SocketProtocol
from sandbox.settings import PoolSettings

WORKER = Path(__file__).with_name("worker.py")


class ProcessBackend:
    """Starts sandbox/worker.py with this interpreter, in a session of its own."""

    name = "process"

    def __init__(self, settings: PoolSettings) -> None:
        self._settings = settings
        self._layers: dict[str, str] = {}

    @property
    def layers(self) -> Mapping[str, str]:
        return self._layers

    @asynccontextmanager
    async def worker(self, worker_id: str) -> AsyncIterator[Link]:
        link = Link(worker_id)
        scratch = await anyio.to_thread.run_sync(tempfile.mkdtemp, None, "agentloop-sandbox-")
        near, far = socket.socketpair()
        command = worker_settings(self._settings, connect=f"fd:{far.fileno()}", scratch=scratch)
        try:
            with far:
                process = await anyio.open_process(
                    [sys.executable, "-I", str(WORKER), json.dumps(command)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=None,
                    env={"PATH": "/usr/local/bin:/usr/bin:/bin"},
                    start_new_session=True,
                    pass_fds=[far.fileno()],
                )
        except OSError as error:
            near.close()
            raise SandboxUnavailable(f"the worker process did not start: {error}") from error
        loop = asyncio.get_running_loop()
        transport, _ = await loop.create_connection(lambda: SocketProtocol(link), sock=near)
        try:
            await wait_ready(link, self._settings.start_timeout_s)
            self._layers = link.hello.get("layers", {})
            yield link
        finally:
            transport.close()
            link.lose("the pool closed it")
            with anyio.CancelScope(shield=True):
                with anyio.move_on_after(5):
                    await process.wait()
                if process.returncode is None:
                    process.kill()
                    await process.wait()
                await process.aclose()
                await anyio.to_thread.run_sync(shutil.rmtree, scratch, True)


async def wait_ready(link: Link, timeout_s: float) -> None:
    """Until the worker says that it is ready. Raises SandboxUnavailable with what is known."""
    with anyio.move_on_after(timeout_s):
        async with anyio.create_task_group() as group:

            async def fail_early() -> None:
                await link.lost.wait()
                group.cancel_scope.cancel()

            group.start_soon(fail_early)
            await link.ready.wait()
            group.cancel_scope.cancel()
    if not link.ready.is_set():
        why = link.why or f"it was not ready after {timeout_s:g} s"
        raise SandboxUnavailable(f"worker {link.worker_id} did not start: {why}")
