"""The proxy of the environment for a URL: HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY.

HTTP clients differ in what they read of these variables, and some fail on an address in NO_PROXY.
All of ours ask here instead. Not covered: a proxy for each of several redirects.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from ipaddress import ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

from agentloop.errors import SettingsError


def proxy_for(url: str) -> str | None:
    """Return the URL of the proxy to reach a URL through; None: connect to it directly.

    There is none towards this machine, whatever the variables say. NO_PROXY is a list of hosts,
    domains (`.example.org`), addresses (also `[::1]`) and ranges (`10.0.0.0/8`), each perhaps with
    a port, or `*`.

    Raises:
        SettingsError: the proxy or an entry of NO_PROXY cannot be used; the message names the
            variable.
    """
    target = urlsplit(url)
    name, proxy = _variable(f"{target.scheme}_proxy", "all_proxy")
    if not proxy or _is_this_machine(target.hostname or ""):
        return None
    without, entries = _variable("no_proxy")
    for entry in entries.replace(",", " ").split():
        try:
            if _covers(entry.lower(), target):
                return None
        except ValueError as error:
            raise SettingsError(f"{without}: {entry!r}: {error}") from error
    return _require_usable(name, proxy, target)


def _variable(*names: str) -> tuple[str, str]:
    """Return the name and the value of the first variable that is set; lower case goes first."""
    for name in names:
        for spelling in (name, name.upper()):
            if value := os.environ.get(spelling, "").strip():
                return spelling, value
    return names[0].upper(), ""


def _is_this_machine(host: str) -> bool:
    try:
        address = ip_address(host)
        address = getattr(address, "ipv4_mapped", None) or address
        return address.is_loopback or address.is_unspecified
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _covers(entry: str, target: SplitResult) -> bool:
    """Return whether an entry of NO_PROXY names the target. Raises ValueError if it is no entry."""
    host = target.hostname or ""
    if entry == "*":
        return True
    if "/" in entry and "://" not in entry:
        network = ip_network(entry.replace("[", "").replace("]", ""), strict=False)
        try:
            return ip_address(host) in network
        except ValueError:  # a name, which only the proxy could resolve
            return False
    if entry.count(":") > 1 and "[" not in entry:  # an IPv6 address without a port
        entry = f"[{entry}]"
    named = urlsplit(entry if "://" in entry else f"//{entry}")
    if named.port is not None and named.port != (target.port or _default_port(target)):
        return False
    name = (named.hostname or "").removeprefix("*").removeprefix(".")
    try:
        return ip_address(name) == ip_address(host)
    except ValueError:
        return bool(name) and (host == name or host.endswith(f".{name}"))


def _default_port(target: SplitResult) -> int:
    return 443 if target.scheme == "https" else 80


def _require_usable(name: str, proxy: str, target: SplitResult) -> str:
    """Return the URL of a proxy. Its password is quoted nowhere."""
    url = proxy if "://" in proxy else f"http://{proxy}"
    instead = f"or name {target.hostname} in NO_PROXY"
    try:
        parts = urlsplit(url)
        is_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or a bracket that is not closed
        is_address = False
    if not is_address:
        raise SettingsError(
            f"{name}: it does not have the form http://HOST:PORT: correct it, {instead}"
        )
    if parts.scheme in ("socks5", "socks5h"):
        if find_spec("socksio") is None:
            raise SettingsError(
                f"{name}: a {parts.scheme} proxy needs a package: pip install socksio; {instead}"
            )
    elif parts.scheme not in ("http", "https"):
        raise SettingsError(
            f"{name}: {parts.scheme} proxies are not supported: use http, https or socks5, "
            f"{instead}"
        )
    return url
