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
import sys
from typing import Any


def start(command: list[str], text: str) -> int:
    """Start the command with `text` on its standard input; return its process id."""
    content = os.memfd_create("stdin")  # not a pipe: it may be longer than a pipe holds
    with open(content, "wb", closefd=False) as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(content, 0, os.SEEK_SET)
    pid = os.fork()
    if pid:
        os.close(content)
        return pid
    status = 126
    try:
        os.dup2(content, 0)
        os.setsid()
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # python ignores them
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)
    except OSError as error:
        if isinstance(error, FileNotFoundError):
            status = 127
        message = f"agentloop: {command[0]}: {error.strerror or error}\n"
        os.write(2, message.encode("utf-8", "backslashreplace"))
    finally:
        os._exit(status)


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


async def main(job: dict[str, Any]) -> int:
    """Run the job and return the exit status."""
    loop = asyncio.get_running_loop()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await forward(job["socket"], reader, writer)

    await asyncio.start_server(serve, "127.0.0.1", job["port"], backlog=128)
    ended: asyncio.Future[int] = loop.create_future()
    pid = start(job["command"], job["stdin"])
    loop.add_reader(0, watch_owner)
    loop.add_signal_handler(signal.SIGCHLD, reap, pid, ended)
    reap(pid, ended)  # it may have ended before the handler was set
    return await ended


if __name__ == "__main__":
    line = sys.stdin.buffer.readline()
    os._exit(asyncio.run(main(json.loads(line))) if line else 1)
