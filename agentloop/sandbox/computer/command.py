"""A command of a computer: a line of a shell, or a program without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import anyio

from agentloop.sandbox.computer.channel import ComputerChannel, ComputerEnded
from agentloop.sandbox.computer.guest import CHUNK_BYTES
from agentloop.sandbox.computer.guest_files import GuestFrame
from agentloop.sandbox.results import CallStatus


@dataclass(frozen=True)
class CommandResult:
    """The end of a command.

    Attributes:
        status: OK, ERROR (another exit status than 0), KILLED (by a signal that was not ours), OOM,
            TIMEOUT or OUTPUT_LIMIT.
        exit_status: the shell's number for it; None if it was ended at a limit.
        stdout, stderr: the first and the last 32 KiB of each. Background processes write to the
            same, so the next command has what they wrote meanwhile.
        truncated: whether output was omitted from the middle.
        shell_ended: whether the shell ended with it, such as by `exit`: the next command runs in a
            new one, with the first directory and environment.
    """

    status: CallStatus
    exit_status: int | None
    stdout: str
    stderr: str
    stdout_bytes: int
    stderr_bytes: int
    truncated: bool
    shell_ended: bool
    elapsed_s: float

    @property
    def ok(self) -> bool:
        return self.status is CallStatus.OK


class HeadAndTail:
    """The first and the last bytes of a stream, and how many there were."""

    def __init__(self, num_kept: int) -> None:
        self.num_bytes = 0
        self._num_kept = num_kept
        self._head, self._tail = bytearray(), bytearray()

    def add(self, data: bytes) -> None:
        self.num_bytes += len(data)
        room = self._num_kept - len(self._head)
        self._head += data[:room]
        self._tail += data[room:] if room > 0 else data
        del self._tail[: -self._num_kept]

    @property
    def is_truncated(self) -> bool:
        return self.num_bytes > len(self._head) + len(self._tail)

    @property
    def text(self) -> str:
        omitted = self.num_bytes - len(self._head) - len(self._tail)
        middle = f"\n[{omitted} bytes omitted]\n".encode() if omitted else b""
        return bytes(self._head + middle + self._tail).decode("utf-8", "replace")


class Command:
    """A command that is under way: its input, its output, its limits and its end."""

    def __init__(
        self,
        channel: ComputerChannel,
        timeout_s: float,
        max_output_bytes: int,
        num_kept: int,
        on_output: Callable[[int, bytes], None] | None = None,
        stdin: bytes | None = None,
    ) -> None:
        self._channel = channel
        self._request = channel.open(self._take)
        self._timeout_s, self._max_output_bytes = timeout_s, max_output_bytes
        self._streams = HeadAndTail(num_kept), HeadAndTail(num_kept)
        self._on_output = on_output
        self._is_flooded = False
        # A shell's command has none.
        self._chunks = None if stdin is None else _chunks_of(stdin)
        self._asks_for_output = stdin is not None
        self._num_fed = 0

    async def until_ended(
        self, begin: GuestFrame, text: bytes, stop: Sequence[tuple[GuestFrame, float]]
    ) -> CommandResult:
        """Run it, and return how it ended.

        Args:
            begin: the request that starts it, and `text` with it.
            stop: requests that end it where it has reached a limit, and the time for each. The last
                one is sent where the caller is cancelled.
        """
        request, channel = self._request, self._channel
        began = anyio.current_time()
        limit: CallStatus | None = None
        try:
            self._send(begin, text)
            with anyio.move_on_after(self._timeout_s) as deadline:
                while request.done is None and not self._is_flooded:
                    channel.check()
                    self._feed()
                    await request.changed()
            if request.done is None:
                is_late = deadline.cancelled_caught
                limit = CallStatus.TIMEOUT if is_late else CallStatus.OUTPUT_LIMIT
            for message, patience_s in stop:
                if request.done is None:
                    self._send(message)
                    with anyio.move_on_after(patience_s):
                        await channel.until_done(request)
            if request.done is None:
                # Its programs have taken all of its time.
                channel.lose("its first process did not answer", by_program=True)
                channel.check()
            assert request.done is not None  # else `check` has raised
            done = request.done
        except ComputerEnded as error:
            done = {"status": 137, "oom": False, "ended": True, "error": error.strerror}
        except BaseException:
            if request.done is None and not channel.lost.is_set():
                self._send(stop[-1][0])
            raise
        finally:
            channel.close(request)
        stdout, stderr = self._streams
        if reason := done.get("error"):
            stderr.add(f"agentloop: {reason}\n".encode())
        return CommandResult(
            limit or _status_of(done["status"], done["oom"]),
            None if limit else done["status"],
            stdout.text,
            stderr.text,
            stdout.num_bytes,
            stderr.num_bytes,
            stdout.is_truncated or stderr.is_truncated,
            done["ended"],
            anyio.current_time() - began,
        )

    def _take(self, stream: int, data: bytes) -> None:
        self._streams[stream - 1].add(data)
        num_bytes = sum(kept.num_bytes for kept in self._streams)
        self._is_flooded = num_bytes > self._max_output_bytes
        if self._asks_for_output:
            self._send({"op": "more", "stream": stream})
        if self._on_output is not None:
            self._on_output(stream, data)

    def _feed(self) -> None:
        """Send the next chunk of the input when the last one has been taken, and then its end."""
        while self._chunks is not None and self._request.acks == self._num_fed:
            if chunk := next(self._chunks, b""):
                self._num_fed += 1
                self._send({"op": "data"}, chunk)
            else:
                self._chunks = None
                self._send({"op": "eof"})

    def _send(self, message: GuestFrame, data: bytes = b"") -> None:
        self._channel.send({**message, "id": self._request.id}, data)


def _chunks_of(data: bytes) -> Iterator[bytes]:
    return (data[start : start + CHUNK_BYTES] for start in range(0, len(data), CHUNK_BYTES))


def _status_of(exit_status: int, is_oom: bool) -> CallStatus:
    if exit_status == 0:
        return CallStatus.OK
    if is_oom:
        return CallStatus.OOM
    return CallStatus.KILLED if 128 < exit_status <= 192 else CallStatus.ERROR
