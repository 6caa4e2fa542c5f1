"""What may leave a computer: an allow-list, and strict readings of what its proxy (proxy.py) gets.

    allow:pypi.org, *.pythonhosted.org:443, 10.1.2.3:8080, 10.2.0.0/16, [2001:db8::1]:443

A name lets through connections to public addresses that it has at that moment; an address that is
not public (a loopback, private or link-local one, such as that of a cloud's metadata) must be
listed itself, by number. What does not read as exactly one thing is refused, so that no server can
read it as another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import TypeAlias

Address: TypeAlias = IPv4Address | IPv6Address

PREFIX = "allow:"
HTTP_PORT, TLS_PORT = 80, 443
WEB_PORTS = (HTTP_PORT, TLS_PORT)  # of what is listed without one

_HOST_AND_PORT = re.compile(r"(\[(?=[^]]*:)[0-9a-f:./]+\]|[a-z0-9._*/-]+)(?::([1-9][0-9]{0,4}))?")
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_NUMBER = re.compile(r"(?:.*\.)?(?:[0-9]+|0x[0-9a-f]*)")  # resolvers take these for addresses
_REQUEST = re.compile(rb"([A-Z]+) ([!-~]+) (HTTP/1\.[01])")
_HEADER = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([\t -~\x80-\xff]*)")
_URL = re.compile(rb"[hH][tT][tT][pP]://([^/?#@\\]+)(/[^#]*|\?[^#]*)?")
# Of one connection alone, or replaced by the proxy's.
_HOP_HEADERS = {b"host", b"connection", b"proxy-connection", b"keep-alive", b"te", b"trailer"} | {
    *(b"upgrade", b"http2-settings", b"proxy-authorization", b"proxy-authenticate")
}
# Of IPv6, only these are public, without those that stand for an address of IPv4.
_GLOBAL_V6 = ip_network("2000::/3")
_TRANSLATED_V6 = (ip_network("2001::/23"), ip_network("2002::/16"))


class Refused(Exception):
    """What a computer asked for may not be; the message tells it why."""


@dataclass(frozen=True)
class _Rule:
    host: str | IPv4Network | IPv6Network
    port: int | None

    def has_port(self, port: int) -> bool:
        return port in WEB_PORTS if self.port is None else port == self.port

    def has_name(self, name: str) -> bool:
        if not isinstance(self.host, str):
            return False
        return name.endswith(self.host[1:]) if self.host[0] == "*" else name == self.host


@dataclass(frozen=True)
class AllowList:
    """Hosts and ports that a computer may reach."""

    rules: tuple[_Rule, ...]

    @classmethod
    def parse(cls, text: str) -> AllowList:
        """Read `allow:HOST[:PORT],...`.

        A host is a name, `*.` and a name for all below it, `*` for all names, an address, or a
        network of addresses. Without a port it has 80 and 443.

        Raises:
            ValueError: an entry is none of these.
        """
        entries = [entry.strip().lower() for entry in text.removeprefix(PREFIX).split(",")]
        return cls(tuple(_parse_rule(entry) for entry in entries))

    def check_host(self, host: str, port: int) -> Address | None:
        """Return a host as an address, or None for a name that may be looked up.

        Raises:
            Refused: it is not listed with this port.
        """
        address = as_address(host)
        if address is not None:
            if not self.lists(address, port):
                raise Refused(f"{host} is not listed with port {port}")
        elif not any(rule.has_name(host) and rule.has_port(port) for rule in self.rules):
            raise Refused(f"{host} is not listed with port {port}")
        return address

    def lists(self, address: Address, port: int) -> bool:
        """Return whether an address is listed itself, or a network that has it."""
        return any(
            not isinstance(rule.host, str) and address in rule.host and rule.has_port(port)
            for rule in self.rules
        )


def _parse_rule(entry: str) -> _Rule:
    try:
        host, port = split_host(entry)
    except ValueError:
        raise ValueError(
            f"network: {entry!r} is neither a name, nor *. and a name, nor an address "
            "([...] around one of IPv6), with :PORT or without"
        ) from None
    try:
        return _Rule(ip_network(host), port)
    except ValueError as error:
        if host != "*" and not _is_name(host.removeprefix("*.")):
            raise ValueError(f"network: {entry!r}: {error}") from None
    return _Rule(host, port)


def split_host(text: str) -> tuple[str, int | None]:
    """Split HOST[:PORT], in small letters. Raises ValueError."""
    found = _HOST_AND_PORT.fullmatch(text)
    port = int(found[2]) if found and found[2] else None
    if not found or (port is not None and port >= 1 << 16):
        raise ValueError("not a host and a port")
    return found[1].strip("[]"), port


def as_address(host: str) -> Address | None:
    """Return an address, or None for a proper name. Raises Refused for all else."""
    try:
        return plain(ip_address(host))
    except ValueError:
        if not _is_name(host):
            raise Refused(f"{host} is neither a name nor an address") from None
        return None


def _is_name(text: str) -> bool:
    is_short = len(text) <= 253
    return is_short and bool(_NAME.fullmatch(text)) and not _NUMBER.fullmatch(text)


def plain(address: Address) -> Address:
    """Return an address of IPv4 that is written as one of IPv6 as what it is."""
    return getattr(address, "ipv4_mapped", None) or address


def is_public(address: Address) -> bool:
    """Return whether an address belongs to the Internet, and stands for no other one."""
    if not address.is_global or address.is_multicast:
        return False
    if isinstance(address, IPv4Address):
        return True
    return address in _GLOBAL_V6 and not any(address in network for network in _TRANSLATED_V6)


# -- requests to the proxy ----------------------------------------------------------------------


@dataclass(frozen=True)
class ProxyRequest:
    """A request of a computer's program to its proxy.

    Attributes:
        head: what the server gets of it; None for a tunnel.
        body_bytes: how much of the connection follows the head.
    """

    host: str
    port: int
    head: bytes | None = None
    body_bytes: int = 0

    @property
    def is_name(self) -> bool:
        return as_address(self.host) is None


def parse_request(head: bytes) -> ProxyRequest:
    """Read the head of a request, without the empty line at its end.

    Raises:
        Refused: it is not a request to a proxy, or can be read in two ways.
    """
    first, *lines = head.split(b"\r\n")
    found = _REQUEST.fullmatch(first)
    headers = [_HEADER.fullmatch(line) for line in lines]
    if not found or not all(headers):
        raise Refused("not a request of HTTP/1.1")
    method, target, version = found.groups()
    if method == b"CONNECT":
        host, port = _split_authority(target)
        if port is None or port == HTTP_PORT:
            raise Refused("tunnels have a port, and not 80: ask for http://HOST/ instead")
        return ProxyRequest(host, port)
    url = _URL.fullmatch(target)
    if not url:
        raise Refused("not a request to a proxy: http://HOST/, or CONNECT HOST:PORT")
    host, port = _split_authority(url[1])
    path = url[2] or b"/"
    out = [b"%s %s %s" % (method, path if path[:1] == b"/" else b"/" + path, version)]
    out.append(b"Host: " + url[1])
    lengths = []
    for header in headers:
        assert header is not None
        name = header[1].lower()
        if name == b"transfer-encoding":
            raise Refused("a body needs a Content-Length")
        if name == b"content-length":
            lengths.append(header[2].strip())
        if name not in _HOP_HEADERS:
            out.append(header[0])
    if len(lengths) > 1 or not all(re.fullmatch(rb"[0-9]{1,15}", length) for length in lengths):
        raise Refused("Content-Length is not one number")
    out += [b"Connection: close", b"", b""]
    num = int(lengths[0]) if lengths else 0
    return ProxyRequest(host, port or HTTP_PORT, b"\r\n".join(out), num)


def _split_authority(text: bytes) -> tuple[str, int | None]:
    try:
        return split_host(text.decode("ascii").lower())
    except ValueError:
        raise Refused("not a host and a port") from None


# -- TLS ----------------------------------------------------------------------------------------

HANDSHAKE = b"\x16"
_MAX_HELLO_BYTES = 16 << 10


def read_server_name(data: bytes) -> str | None:
    """Return the name that the first bytes of a TLS client ask for, in small letters.

    Returns:
        None if more bytes are needed; "" if it asks for none.

    Raises:
        Refused: this is not the beginning of TLS.
    """
    hello, rest = bytearray(), data
    while len(rest) >= 5:
        size = int.from_bytes(rest[3:5], "big")
        if rest[:1] != HANDSHAKE or rest[1] != 3 or not size:
            break
        hello += rest[5 : 5 + size]
        rest = rest[5 + size :]
        num = int.from_bytes(hello[1:4], "big")
        if len(hello) >= 4 + num and len(hello) >= 4:
            return _name_in_hello(_Bytes(bytes(hello[4 : 4 + num])) if hello[0] == 1 else _Bytes())
    if (rest and rest[:1] != HANDSHAKE) or len(rest) >= 5 or len(data) > _MAX_HELLO_BYTES:
        raise Refused("not TLS")
    return None


class _Bytes:
    """Bytes that are taken from the front. Raises Refused if there are too few."""

    def __init__(self, data: bytes = b"") -> None:
        self.left = data

    def take(self, num: int) -> bytes:
        if num > len(self.left):
            raise Refused("not TLS")
        taken, self.left = self.left[:num], self.left[num:]
        return taken

    def block(self, num_length_bytes: int) -> bytes:
        return self.take(int.from_bytes(self.take(num_length_bytes), "big"))


def _name_in_hello(hello: _Bytes) -> str:
    hello.take(2 + 32)  # version, random
    for num_length_bytes in (1, 2, 1):  # session, ciphers, compression
        hello.block(num_length_bytes)
    extensions = _Bytes(hello.block(2) if hello.left else b"")
    names = []
    while extensions.left:
        kind = extensions.take(2)
        body = extensions.block(2)
        if kind == b"\0\0":
            entries = _Bytes(_Bytes(body).block(2))
            while entries.left:
                entries.take(1)
                names.append(entries.block(2))
    if len(names) > 1 or hello.left:
        raise Refused("not TLS of one server")
    return names[0].decode("latin-1").lower() if names else ""
