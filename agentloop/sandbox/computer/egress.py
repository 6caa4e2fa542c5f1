"""The hosts that a computer may reach, and a strict reading of requests to its proxy.

    allow:pypi.org, *.pythonhosted.org:443, 10.1.2.3:8080, 10.2.0.0/16, [2001:db8::1]:443

A name leads to the public addresses that it has at that moment. Any other address (of loopback, a
private network, a cloud's metadata) must be listed itself. What can be read in two ways is refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address
Network: TypeAlias = IPv4Network | IPv6Network

PREFIX = "allow:"
HTTP_PORT, TLS_PORT = 80, 443

_HOST_AND_PORT = re.compile(r"(\[(?=[^]]*:)[0-9a-f:./]+]|[a-z0-9._*/-]+)(?::([1-9][0-9]{0,4}))?")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$){_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")  # resolvers take these for addresses
_REQUEST = re.compile(rb"([A-Z]+) ([!-~]+) (HTTP/1\.[01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
_LENGTH = re.compile(rb"[0-9]{1,15}")
_URL = re.compile(rb"[hH][tT][tT][pP]://([^/?#@\\]+)(/[^#]*|\?[^#]*)?")
# Of one connection alone, or written by the proxy.
_HOP_HEADERS = frozenset(
    b"host connection proxy-connection keep-alive te trailer upgrade http2-settings "
    b"proxy-authorization proxy-authenticate".split()
)
# Of IPv6, only the first is public, without those that stand for an address of IPv4.
_PUBLIC_V6 = ip_network("2000::/3")
_TRANSLATED_V6 = (ip_network("2001::/23"), ip_network("2002::/16"))


class Refused(ValueError):
    """A refusal of what a computer asked for; the message tells it why."""


@dataclass(frozen=True)
class AllowList:
    """Names, which may begin with `*`, and networks of addresses, each with its ports."""

    names: tuple[tuple[str, tuple[int, ...]], ...]
    networks: tuple[tuple[Network, tuple[int, ...]], ...]

    @classmethod
    def parse(cls, text: str) -> AllowList:
        """Read `allow:HOST[:PORT],...`; without a port it has 80 and 443. Raises ValueError."""
        names, networks = [], []
        for entry in text.removeprefix(PREFIX).lower().split(","):
            try:
                host, port = _split_host(entry.strip())
                ports = (port,) if port else (HTTP_PORT, TLS_PORT)
                if host == "*" or _is_name(host.removeprefix("*.")):
                    names.append((host, ports))
                else:
                    listed = host if "/" in host else read_address(host)
                    networks.append((ip_network(listed), ports))
            except ValueError:
                raise ValueError(
                    f"network: {entry!r} is neither a name, nor *. and a name, nor an address or "
                    "network ([...] around one of IPv6), with :PORT or without"
                ) from None
        return cls(tuple(names), tuple(networks))

    def has(self, host: str | Address, port: int) -> bool:
        """Return whether a name, or an address itself, is listed with a port."""
        if isinstance(host, str):
            return any(port in ports and fnmatchcase(host, name) for name, ports in self.names)
        return any(port in ports and _lists(network, host) for network, ports in self.networks)


def _lists(network: Network, address: Address) -> bool:
    """Return whether a network has an address; one of loopback or a link, if all of it is such."""
    is_near = address.is_loopback or address.is_link_local or address.is_unspecified
    is_all_near = network.is_loopback or network.is_link_local or network.is_unspecified
    return address in network and (is_all_near or not is_near)


def _split_host(text: str) -> tuple[str, int | None]:
    found = _HOST_AND_PORT.fullmatch(text)
    if not found or int(found[2] or 0) >= 1 << 16:
        raise Refused("not a host and a port")
    return found[1].strip("[]"), int(found[2]) if found[2] else None


def _is_name(text: str) -> bool:
    return bool(_NAME.fullmatch(text)) and not _NUMBER.fullmatch(text)


def read_address(text: str) -> Address:
    """Read an address; one of IPv4 that is written as one of IPv6 as what it is."""
    address = ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def is_public(address: Address) -> bool:
    """Return whether an address belongs to the Internet, and stands for no other one."""
    is_plain = isinstance(address, IPv4Address) or (
        address in _PUBLIC_V6 and not any(address in network for network in _TRANSLATED_V6)
    )
    return is_plain and address.is_global and not address.is_multicast


@dataclass(frozen=True)
class ProxyRequest:
    """A request of a computer's program to its proxy.

    Attributes:
        head: what the server gets of it; None for a tunnel.
        body_bytes: how much of the connection follows the head.
    """

    host: str | Address
    port: int
    head: bytes | None = None
    body_bytes: int = 0


def parse_request(head: bytes) -> ProxyRequest:
    """Read the head of a request, without its empty line. Raises Refused."""
    first, *lines = head.split(b"\r\n")
    found = _REQUEST.fullmatch(first)
    headers = [header for header in map(_HEADER.fullmatch, lines) if header]
    if not found or len(headers) < len(lines):
        raise Refused("not a request of HTTP/1.1")
    method, target, version = found.groups()
    if method == b"CONNECT":
        host, port = _read_host(target)
        if port is None or port == HTTP_PORT:
            raise Refused("tunnels have a port, and not 80: ask for http://HOST/ instead")
        return ProxyRequest(host, port)
    if not (url := _URL.fullmatch(target)):
        raise Refused("not a request to a proxy: http://HOST/, or CONNECT HOST:PORT")
    host, port = _read_host(url[1])
    path = url[2] or b"/"
    lengths = [header[2].strip() for header in headers if header[1].lower() == b"content-length"]
    is_chunked = any(header[1].lower() == b"transfer-encoding" for header in headers)
    if is_chunked or len(lengths) > 1 or not all(map(_LENGTH.fullmatch, lengths)):
        raise Refused("a body needs one Content-Length")
    out = [b"%s %s %s" % (method, path if path[:1] == b"/" else b"/" + path, version)]
    out += [b"Host: " + url[1]]
    out += [header[0] for header in headers if header[1].lower() not in _HOP_HEADERS]
    out += [b"Connection: close", b"", b""]
    return ProxyRequest(host, port or HTTP_PORT, b"\r\n".join(out), int(*lengths))


def _read_host(text: bytes) -> tuple[str | Address, int | None]:
    host, port = _split_host(text.decode("latin-1").lower())
    try:
        return read_address(host), port
    except ValueError:
        if not _is_name(host):
            raise Refused(f"{host} is neither a name nor an address") from None
        return host, port
