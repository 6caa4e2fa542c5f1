"""The first process of a program's container: `python3 -c SOURCE`. Stdlib only, Python 3.8 on.

    standard input ──one line of JSON──> the command, its standard input, a port, a socket
                   ──its end──> our owner is gone: exit, and the kernel ends all other processes
    127.0.0.1:PORT ──bytes──> the socket, which is mounted, and behind which the model is

The command starts once the port listens, inherits the standard output and error, and its exit
status is ours: 126 or 127, as of a shell, if it cannot be started.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys


def start(command: list[str], text: str) -> subprocess.Popen[bytes]:
    """Start the command with `text` on its standard input."""
    # Not a pipe: the text may be longer than a pipe holds.
    with open(os.memfd_create("stdin"), "wb+") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
        file.seek(0)
        return subprocess.Popen(command, stdin=file, start_new_session=True)


def reap(pid: int, ended: asyncio.Future[int]) -> None:
    """Collect processes that have ended, orphans included; set `ended` to the status of `pid`."""
    try:
        while True:
            child, status = os.waitpid(-1, os.WNOHANG)
            if not child:
                return
            if child == pid and not ended.done():
                is_killed = os.WIFSIGNALED(status)
                ended.set_result(128 + os.WTERMSIG(status) if is_killed else os.WEXITSTATUS(status))
    except ChildProcessError:
        pass


def watch_owner() -> None:
    """End with our owner, whose end of the standard input is closed then."""
    if not os.read(0, 4096):
        os._exit(1)


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            # no deadline: our owner has one, and then removes the container
            data = await reader.read(1 << 16)
            if not data:
                return
            writer.write(data)
            await writer.drain()  # no deadline: likewise
    except OSError:
        pass  # either end is gone


async def forward(
    path: str, near_reader: asyncio.StreamReader, near_writer: asyncio.StreamWriter
) -> None:
    """Copy both ways between a connection and the socket until either ends."""
    try:
        far_reader, far_writer = await asyncio.open_unix_connection(path)
    except OSError as error:
        print("agentloop: the model's socket:", error, file=sys.stderr, flush=True)
        near_writer.close()
        return
    copies = [
        asyncio.ensure_future(copy(near_reader, far_writer)),
        asyncio.ensure_future(copy(far_reader, near_writer)),
    ]
    # no deadline: likewise
    await asyncio.wait(copies, return_when=asyncio.FIRST_COMPLETED)
    for task in copies:
        task.cancel()
    near_writer.close()  # sends first what is left
    far_writer.close()


async def main(command: list[str], stdin: str, port: int, socket: str) -> int:
    """Run a command and return its exit status."""
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await forward(socket, reader, writer)

    await asyncio.start_server(serve, "127.0.0.1", port, backlog=128)
    ended: asyncio.Future[int] = loop.create_future()
    try:
        process = start(command, stdin)
    except OSError as error:
        print(f"agentloop: {command[0]}: {error.strerror or error}", file=sys.stderr)
        return 127 if isinstance(error, FileNotFoundError) else 126
    loop.add_reader(0, watch_owner)
    loop.add_signal_handler(signal.SIGCHLD, reap, process.pid, ended)
    reap(process.pid, ended)  # it may have ended before the handler was set
    return await ended


if __name__ == "__main__":
    line = sys.stdin.buffer.readline()
    os._exit(asyncio.run(main(**json.loads(line))) if line else 1)
