"""Connections to Docker Engines."""

from __future__ import annotations

import os
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiodocker
import aiohttp
import anyio

from sandbox.errors import SandboxUnavailable

ANSWER_TIMEOUT_S = 5.0


def local_engine() -> str:
    """Where this user's engine listens: DOCKER_HOST, the rootless socket, or the system's."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    rootless = Path(runtime, "docker.sock")
    if runtime and rootless.exists():
        return f"unix://{rootless}"
    return "unix:///var/run/docker.sock"


def is_local(engine: str) -> bool:
    """True if the engine shares our file system, so that a socket can be bind-mounted."""
    return (engine or local_engine()).startswith("unix://")


@asynccontextmanager
async def connect(engine: str = "") -> AsyncIterator[aiodocker.Docker]:
    """A client of an engine that answers. Raises SandboxUnavailable for one that doesn't.

    The connectors are unlimited: an attached stream holds a connection for a worker's life, and
    with the default of 100 the hundred-and-first request of any kind would hang.
    """
    engine = engine or local_engine()
    scheme, _, where = engine.partition("://")
    connector: aiohttp.BaseConnector
    if scheme == "unix":
        connector, url = aiohttp.UnixConnector(where, limit=0), "http://localhost"
    elif scheme in ("tcp", "http", "https"):
        context = _tls() if os.environ.get("DOCKER_TLS_VERIFY") or scheme == "https" else None
        connector = aiohttp.TCPConnector(limit=0, ssl=context or False)
        url = f"{'https' if context else 'http'}://{where}"
    else:
        raise SandboxUnavailable(f"an engine is unix:///path or tcp://host:port, not {engine!r}")
    docker = aiodocker.Docker(url=url, connector=connector, timeout=aiohttp.ClientTimeout(60))
    try:
        try:
            with anyio.fail_after(ANSWER_TIMEOUT_S):
                await docker.version()
        except (OSError, aiohttp.ClientError, aiodocker.DockerError, TimeoutError) as error:
            raise SandboxUnavailable(
                f"no Docker Engine answers at {engine} ({error or 'no answer in time'}); "
                "is it installed and running, and may this user reach it?"
            ) from error
        yield docker
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            await docker.close()
            await connector.close()


def _tls() -> ssl.SSLContext:
    """The client's certificates, where Docker's own client looks for them."""
    folder = Path(os.environ.get("DOCKER_CERT_PATH") or Path.home() / ".docker")
    context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    return context
