"""Start a worker: `python -c BOOT CONNECT [SPEC]`.

The process connects, and takes its settings and the other modules from the first frame, so that a
command line holds no more than this, and no source but the pool's own is ever run. SPEC is a JSON
object that adds to the settings: confine.py's, for local processes.
"""

import json
import os
import socket
import struct
import sys
import types


def connect(where: str) -> tuple[int, int]:
    """Descriptors to read from and to write to. `unix:PATH`, `fd:NUMBER`, or `stdio:`."""
    kind, _, name = where.partition(":")
    if kind == "fd":
        return int(name), int(name)
    if kind == "unix":
        link = socket.socket(socket.AF_UNIX)
        link.connect(name)
        fd = link.detach()
        return fd, fd
    read, write = os.dup(0), os.dup(1)  # calls get the names 0 and 1 to something else
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return read, write


def read_exactly(fd: int, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = os.read(fd, size - len(data))
        if not more:
            sys.exit("the supervisor is gone")
        data += more
    return data


def boot() -> None:
    read, write = connect(sys.argv[1])
    (size,) = struct.unpack(">I", read_exactly(read, 4))
    frame = json.loads(read_exactly(read, size))
    for name in ("agentloop", "agentloop.sandbox", "agentloop.sandbox.worker"):
        package = sys.modules[name] = types.ModuleType(name)
        package.__path__ = []
    for name, source in frame["sources"].items():  # in the order of their imports
        module = sys.modules[name] = types.ModuleType(name)
        exec(compile(source, f"<{name}>", "exec"), module.__dict__)
    more = json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    module.main(frame["spec"] | more, read, write)


if __name__ == "__main__":
    boot()
