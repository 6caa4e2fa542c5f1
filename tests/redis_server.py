"""A Redis of a test's own, which it may kill."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

START_TIMEOUT_S = 15.0


class RedisServer:
    """`redis-server` at a unix socket in `folder`; it keeps nothing on disk, unless told to."""

    def __init__(self, folder: Path, options: Sequence[str] = ()) -> None:
        self.path = folder / "redis.sock"
        self.url = f"unix://{self.path}"
        self._options = options
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        binary = shutil.which("redis-server")
        if binary is None:
            pytest.fail("missing: redis-server: apt-get install redis-server", pytrace=False)
        self.path.unlink(missing_ok=True)
        command = [binary, "--port", "0", "--unixsocket", str(self.path), "--dir"]
        command += [str(self._folder), "--save", "", *self._options]
        with open(self._folder / "redis.log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            assert self._process.poll() is None, (self._folder / "redis.log").read_text()
            assert time.monotonic() < deadline, "redis-server did not start"
            time.sleep(0.01)

    def kill(self) -> None:
        """At once, without a word."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _answers(self) -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(1.0)
            try:
                client.connect(str(self.path))
                client.sendall(b"PING\r\n")
                return client.recv(64).startswith((b"+PONG", b"-NOAUTH"))
            except OSError:
                return False


@contextmanager
def redis_server(folder: Path, options: Sequence[str] = ()) -> Iterator[RedisServer]:
    folder.mkdir(parents=True, exist_ok=True)
    server = RedisServer(folder, options)
    try:
        server.start()
        yield server
    finally:
        server.kill()
