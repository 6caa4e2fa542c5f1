"""Call functions that may hang, crash or exhaust memory, in processes that can be killed.

    parent ──function's name and arguments, pickled──> child (process_pool_child.py) ──JSON──> back

A child serves calls one after another. If a call exceeds its deadline, dies or is cancelled, its
child is killed with its descendants, and the next call starts a new one. This is not a sandbox: it
runs the user's code with the user's permissions.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Self, TypedDict

import anyio
from anyio.abc import Process
from anyio.streams.buffered import BufferedByteReceiveStream

from agentloop.child_environment import for_our_python

__all__ = [
    "CallDied",
    "CallFailed",
    "CallNotStarted",
    "CallRaised",
    "CallTimedOut",
    "ProcessPool",
]

_MAX_REPLY_BYTES = 1 << 20
_START_TIMEOUT_S = 60.0  # for a process to start and import `preload`
# Sent by people, supervisors and the kernel's OOM killer; a program that crashes gets others.
_FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM)


class CallFailed(Exception):
    """A call failed; the message says why.

    Where `from_outside` is true, neither the function nor its arguments caused it.
    """

    from_outside = False


class CallNotStarted(CallFailed):
    """Raised if no process could be started for a call, or a preloaded module not imported."""

    from_outside = True


class CallRaised(CallFailed):
    """The function raised, or could not be imported."""


class CallTimedOut(CallFailed):
    """The call exceeded its deadline and was killed."""


class CallDied(CallFailed):
    """The process ended during the call: out of memory, a crash, or a kill from outside."""

    def __init__(self, message: str, *, from_outside: bool = False) -> None:
        super().__init__(message)
        self.from_outside = from_outside


class ProcessPool:
    """A pool of up to `count` processes, started on demand. Use as `async with`.

    Args:
        preload: Functions, as `module:name`, to import when a process starts.
        memory_mib: Memory that a call may allocate; 0: unlimited.
    """

    def __init__(
        self,
        count: int,
        *,
        preload: Sequence[str] = (),
        memory_mib: int = 2048,
    ) -> None:
        self._preload = preload
        self._memory_mib = memory_mib
        self._slots = anyio.Semaphore(count)
        self._idle: list[_Child] = []
        self._alive: set[_Child] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for child in list(self._alive):
            await self._kill(child)

    async def call(
        self, function: str, *arguments: object, timeout_s: float, fresh: bool = False
    ) -> object:
        """Return the result of `function` (`module:name`, sync or async), converted to JSON types.

        Starting a process does not count towards `timeout_s`.

        Args:
            fresh: call it in a process that has served no other call.

        Raises:
            CallFailed: See its subclasses.
        """
        request = pickle.dumps((function, arguments))
        async with self._slots:  # no deadline: each call has one
            if fresh and self._idle:
                await self._kill(self._idle.pop())  # there are at most `count` processes
                child = await self._start()
            else:
                child = self._idle.pop() if self._idle else await self._start()
            try:
                with anyio.fail_after(timeout_s):
                    reply = await child.ask(request)
            except TimeoutError:
                await self._kill(child)
                raise CallTimedOut(f"no result after {timeout_s:g} s") from None
            except BaseException:
                await self._kill(child)
                raise
            self._idle.append(child)
        if "error" in reply:
            raise CallRaised(reply["error"])
        return reply["value"]

    async def warm_up(self) -> None:
        """Start a process, to check that it can import `preload`.

        Raises:
            CallFailed: It cannot.
        """
        async with self._slots:  # no deadline: each call and each start has one
            self._idle.append(await self._start())

    async def _start(self) -> _Child:
        limits = [str(self._memory_mib), *self._preload]
        # Append the working directory: it is missing from a command's path, and functions may be
        # there.
        paths = os.pathsep.join([*filter(None, sys.path), os.getcwd()])
        process = await anyio.open_process(
            # Use -m, not a file name: modules beside that file would shadow the standard library.
            [
                sys.executable,
                "-P",
                "-m",
                "agentloop.environments.rewards.process_pool_child",
                *limits,
            ],
            stderr=None,
            env={**for_our_python(), "PYTHONPATH": paths},
            start_new_session=True,
        )
        child = _Child(process)
        self._alive.add(child)
        try:
            with anyio.fail_after(_START_TIMEOUT_S):
                ready = await child.read()
        except TimeoutError:
            await self._kill(child)
            raise CallNotStarted(f"not started after {_START_TIMEOUT_S:g} s") from None
        except CallDied as error:
            await self._kill(child)
            raise CallNotStarted(str(error)) from error
        except BaseException:
            await self._kill(child)
            raise
        if "error" in ready:
            await self._kill(child)
            raise CallNotStarted(ready["error"])
        return child

    async def _kill(self, child: _Child) -> None:
        await child.kill()
        self._alive.discard(child)


class _Reply(TypedDict, total=False):
    value: object
    error: str


class _Child:
    def __init__(self, process: Process) -> None:
        assert process.stdout is not None
        self._process = process
        self._replies = BufferedByteReceiveStream(process.stdout)

    async def ask(self, request: bytes) -> _Reply:
        assert self._process.stdin is not None
        with suppress(anyio.BrokenResourceError, anyio.ClosedResourceError):  # read() reports why
            # no deadline: call() has one
            await self._process.stdin.send(len(request).to_bytes(8, "big") + request)
        return await self.read()  # no deadline: call() has one

    async def read(self) -> _Reply:
        try:
            # no deadline: call() has one, and _start()
            line = await self._replies.receive_until(b"\n", _MAX_REPLY_BYTES)
        except (anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            raise await self._death() from None
        except anyio.DelimiterNotFound:
            raise CallRaised(f"the result exceeds {_MAX_REPLY_BYTES} bytes") from None
        reply: _Reply = json.loads(line)
        return reply

    async def _death(self) -> CallDied:
        with anyio.move_on_after(5):
            status = await self._process.wait()
            if status >= 0:
                return CallDied(f"the process ended with status {status}")
            by = signal.Signals(-status)
            return CallDied(f"the process ended by {by.name}", from_outside=by in _FROM_OUTSIDE)
        return CallDied("the process ended its output")  # closed by the function

    async def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with anyio.move_on_after(5, shield=True):
            await self._process.aclose()
