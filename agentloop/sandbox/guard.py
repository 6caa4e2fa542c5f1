"""Access control of the service: token, Host and Origin.

On loopback no token is needed, so web pages in the user's browser must be kept out: an exact check
of Host stops DNS rebinding, and one of Origin stops cross-site requests. With a token Host is not
checked, since a page that reaches the server under another name does not know the token; so the
server may be reached under any name. Paths that need no token expose nothing secret.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets
from collections.abc import Callable, Mapping, Sequence

from aiohttp import http_exceptions, web

OPEN_PATHS = frozenset({"/healthz", "/ping"})


def _is_ours(record: logging.LogRecord) -> bool:
    """Return whether a log record is worth keeping.

    Records about input that is not HTTP are dropped: it is answered with status 400, and a port
    scanner would flood the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, http_exceptions.HttpProcessingError | web.RequestPayloadError)


http_log = logging.getLogger("sandbox.http")
"""Logger for aiohttp's servers."""
http_log.addFilter(_is_ours)


def is_loopback(host: str) -> bool:
    """Return whether an address or name is on loopback."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_at(host: str, port: int) -> str:
    """Return the URL at which a browser on this machine reaches a listening address."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


_PREFLIGHT = {
    f"Access-Control-Request-{name}": f"Access-Control-Allow-{answer}"
    for name, answer in (
        ("Method", "Methods"),
        ("Headers", "Headers"),
        ("Private-Network", "Private-Network"),  # of a page from the internet to this machine
    )
}


class Guard:
    """Decides whether a request is admitted, before any handler sees it."""

    def __init__(
        self,
        host: str,
        token: str | None,
        allowed_hosts: Sequence[str] = (),
        *,
        open_paths: Callable[[str], bool] = OPEN_PATHS.__contains__,
    ) -> None:
        """
        Args:
            allowed_hosts: names of the server besides its own address.
            open_paths: returns whether a path needs no token.
        """
        self._open_paths = open_paths
        self._token = token.encode() if token else None
        self._allowed = {name.lower() for name in allowed_hosts}
        self._names = {host.lower(), *self._allowed}
        if is_loopback(host):
            self._names |= {"localhost", "127.0.0.1", "::1"}

    def needs_token(self, path: str) -> bool:
        """Return whether requests for a path must have the token."""
        return self._token is not None and not self._open_paths(path)

    def refusal(self, path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        """Return None if a request is admitted, otherwise an HTTP status and the reason."""
        host, origin = headers.get("Host"), headers.get("Origin")
        if self._token is None and _name_of(host or "") not in self._names:
            return 403, (
                f"Host {host!r} is not a name of this server: add it to allowed_hosts, or set a "
                "token"
            )
        if origin is not None and not self._knows_origin(origin, host or ""):
            return 403, f"Origin {origin!r} may not use this server"
        if not self.needs_token(path) or self._token is None:
            return None
        scheme, _, credentials = headers.get("Authorization", "").partition(" ")
        # Header bytes that are not UTF-8 arrive as surrogates.
        token = credentials.strip().encode("utf-8", "surrogatepass")
        if scheme.lower() == "bearer" and secrets.compare_digest(token, self._token):
            return None
        return 401, "a token is needed: send `Authorization: Bearer TOKEN`"

    def admits_preflight(self, method: str, path: str, headers: Mapping[str, str]) -> bool:
        """Return whether a browser asks if a page may send a request, and the page may.

        Such a question never has the token.
        """
        if method != "OPTIONS" or "Access-Control-Request-Method" not in headers:
            return False
        refusal = self.refusal(path, headers)
        return refusal is None or refusal[0] == 401

    def cors_headers(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers by which a browser lets the pages of allowed sites read a response."""
        origin = headers.get("Origin")
        if origin is None or not self._knows_origin(origin, headers.get("Host") or ""):
            return {}
        allowed = {
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Expose-Headers": "Request-Id, X-Request-Id",
            "Vary": "Origin",
        }
        for request_header, response_header in _PREFLIGHT.items():
            if request_header in headers:
                allowed[response_header] = headers[request_header]
        return allowed

    def _knows_origin(self, origin: str, host: str) -> bool:
        """Return whether an origin is the server's own, including the port, or an allowed name.

        The port matters because another program on this machine may serve a page at another one.
        """
        scheme, separator, authority = origin.partition("://")
        if not separator or scheme not in ("http", "https"):
            return False
        return authority.lower() == host.lower() or _name_of(authority) in self._allowed


def _name_of(host: str) -> str:
    """Return the name or address of a Host header, without the port."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()
