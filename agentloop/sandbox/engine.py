"""Connections to Docker Engines."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiodocker
import aiohttp
import anyio

from agentloop.sandbox.errors import NoEngine, SandboxUnavailable

WITHOUT_ENGINE = (
    "choose local processes, which isolate calls as `python -m agentloop.sandbox doctor` shows: "
    "set backend=process (agentloop: sandbox.backend=process, sandbox.serve: pool.backend=process)"
)
ANSWER_TIMEOUT_S = 5.0
REQUEST_TIMEOUT_S = 60.0


def local_engine() -> str:
    """Return the address of this user's engine: DOCKER_HOST, the rootless or the system socket."""
    if host := os.environ.get("DOCKER_HOST"):
        return host
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    rootless = Path(runtime, "docker.sock")
    if runtime and os.path.exists(rootless):  # Path.exists raises where we may not look
        return f"unix://{rootless}"
    return "unix:///var/run/docker.sock"


def is_local(engine: str) -> bool:
    """Return whether the engine shares our file system, so that sockets can be bind-mounted."""
    return (engine or local_engine()).startswith("unix://")


@asynccontextmanager
async def connect(
    engine: str = "",
    certs: str = "",
    *,
    timeout_s: float = ANSWER_TIMEOUT_S,
    on_progress: Callable[[str], None] = lambda line: None,
) -> AsyncIterator[aiodocker.Docker]:
    """Connect to an engine and wait until it responds, for at most `timeout_s` seconds.

    The number of connections is unlimited: an attached stream holds one for a worker's life, and
    with the default limit of 100 the next request of any kind would hang.

    Args:
        certs: directory of ca.pem, cert.pem and key.pem, for TLS over tcp. Empty: like Docker's
            client, TLS if DOCKER_TLS_VERIFY is set, from DOCKER_CERT_PATH or ~/.docker.

    Raises:
        NoEngine: nothing listens at the address.
        SandboxUnavailable: the engine does not respond in time, or refuses or breaks the
            connection.
    """
    engine = engine or local_engine()
    scheme, _, where = engine.partition("://")
    connector: aiohttp.BaseConnector
    if scheme == "unix":
        connector, url = aiohttp.UnixConnector(where, limit=0), "http://localhost"
    elif scheme in ("tcp", "http", "https"):
        secure = certs or os.environ.get("DOCKER_TLS_VERIFY") or scheme == "https"
        context = _tls(certs) if secure else None
        tls = context or False
        connector = aiohttp.TCPConnector(limit=0, ssl=tls, socket_factory=_watchful_socket)
        url = f"{'https' if context else 'http'}://{where}"
    else:
        raise SandboxUnavailable(
            f"an engine must be unix:///path or tcp://host:port, not {engine!r}"
        )
    timeout = aiohttp.ClientTimeout(REQUEST_TIMEOUT_S)
    docker = aiodocker.Docker(url=url, connector=connector, timeout=timeout)
    try:
        try:
            await _until_it_answers(docker, engine, timeout_s, on_progress)
        except (OSError, aiohttp.ClientError, aiodocker.DockerError) as error:
            raise _unavailable(engine, error) from error
        yield docker
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            await docker.close()
            await connector.close()


async def _until_it_answers(
    docker: aiodocker.Docker, engine: str, timeout_s: float, on_progress: Callable[[str], None]
) -> None:
    """Send requests with doubling timeouts until one is answered.

    An engine that is starting may never answer the first request, and a slow one needs a longer
    timeout.
    """
    began = anyio.current_time()
    patience_s = ANSWER_TIMEOUT_S
    with anyio.move_on_after(timeout_s):
        while True:
            with anyio.move_on_after(patience_s), contextlib.suppress(TimeoutError):  # aiohttp's
                await docker.version()
                return
            on_progress(
                f"The Docker Engine at {engine} has not answered for "
                f"{anyio.current_time() - began:.0f} s; waiting for at most {timeout_s:g} s ..."
            )
            patience_s *= 2
    raise SandboxUnavailable(
        f"the Docker Engine at {engine} has not answered for {timeout_s:g} s. Is it starting, or "
        "stuck (try `docker info`)? A longer wait is set by engine_timeout_s"
    )


def _unavailable(engine: str, error: Exception) -> SandboxUnavailable:
    """Return an error that explains what is wrong with an engine."""
    # aiodocker wraps aiohttp's error without setting it as the cause.
    origin = error.__context__ if isinstance(error, aiodocker.DockerError) else error
    named = " (DOCKER_HOST)" if engine == os.environ.get("DOCKER_HOST") else ""
    where = f"no Docker Engine responds at {engine}{named}"
    match origin:
        case OSError(errno=errno.ENOENT):
            return NoEngine(f"{where}: there is no such socket")
        case OSError(errno=errno.ECONNREFUSED):
            return NoEngine(f"{where}: nothing listens there")
        case OSError(errno=errno.EACCES):
            return SandboxUnavailable(
                f"this user may not use the Docker Engine at {engine}{named}: permission denied. "
                f"Add the user to the group docker (and log in again), or {WITHOUT_ENGINE}"
            )
        case aiohttp.ClientConnectorCertificateError():
            reason = str(origin.certificate_error)
        case aiohttp.ClientConnectorError():
            reason = origin.os_error.strerror or str(origin.os_error)
        case _:
            reason = what_it_said(error)
    return SandboxUnavailable(f"{where}: {reason or type(error).__name__}; {_advice(reason)}")


def what_it_said(error: Exception) -> str:
    """Return an engine's error message without aiodocker's status number."""
    return error.message if isinstance(error, aiodocker.DockerError) else str(error)


def _advice(error: str) -> str:
    if "HTTP request to an HTTPS server" in error:
        return "it requires TLS: set engine_certs, or DOCKER_TLS_VERIFY and DOCKER_CERT_PATH"
    if "CERTIFICATE_VERIFY_FAILED" in error or "certificate verify failed" in error:
        return "its certificate is not valid for this name according to ca.pem"
    if "certificate" in error:
        return "it rejects cert.pem, or there is none"
    if "WRONG_VERSION_NUMBER" in error or "wrong version number" in error.lower():
        return "it does not use TLS at that address"
    return "is it installed and running, and may this user reach it?"


def _tls(certs: str) -> ssl.SSLContext:
    """Load the client's certificates from `certs`, or from where Docker's client looks for them."""
    folder = Path(certs or os.environ.get("DOCKER_CERT_PATH") or "~/.docker").expanduser()
    try:
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_cert_chain(str(folder / "cert.pem"), str(folder / "key.pem"))
    except OSError as error:  # a file is missing or not a certificate
        raise SandboxUnavailable(
            f"TLS to an engine needs ca.pem, cert.pem and key.pem in {folder}: {error}"
        ) from error
    return context


def _watchful_socket(address: aiohttp.AddrInfoType) -> socket.socket:
    """Create a socket that detects a vanished peer within half a minute, idle or not."""
    family, kind, protocol, _, _ = address
    watched = socket.socket(family, kind, protocol)
    watched.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    watched.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 25_000)
    return watched
