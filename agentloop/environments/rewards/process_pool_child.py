"""The child process of `process_pool.py`: serves calls until its parent exits.

Replies are JSON, so that the parent never unpickles data that a function could have forged.
"""

from __future__ import annotations

import asyncio
import ctypes
import dataclasses
import importlib
import inspect
import json
import operator
import os
import pickle
import resource
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import BinaryIO

from agentloop.errors import AgentLoopError

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
_OUT_OF_MEMORY = 71
_MAX_ERROR_CHARS = 4000


def main() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    memory_mib, *preload = sys.argv[1:]
    # Keep a function's output apart from the replies, and give it an empty input.
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    with requests, replies:
        _reply(replies, _attempt(lambda: [_find(function) for function in preload] and None))
        if int(memory_mib):
            _limit_memory(int(memory_mib) << 20)
        while size := requests.read(8):
            request = requests.read(int.from_bytes(size, "big"))
            _reply(replies, _attempt(partial(_call, request)))


def _limit_memory(more: int) -> None:
    """Limit the address space to `more` bytes above its current size."""
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = mapped + more if hard == resource.RLIM_INFINITY else min(hard, mapped + more)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


def _attempt(function: Callable[[], object]) -> dict[str, object]:
    try:
        return {"value": function()}
    except MemoryError:  # little can be relied on from here
        os._exit(_OUT_OF_MEMORY)
    except AgentLoopError as error:  # its message says all
        return {"error": str(error)[:_MAX_ERROR_CHARS]}
    except Exception as error:
        try:
            message = f"{type(error).__name__}: {error}"
        except Exception:  # its own __str__ may raise, too
            message = type(error).__name__
        return {"error": message[:_MAX_ERROR_CHARS]}


def _find(name: str) -> Callable[..., object]:
    module, _, path = name.partition(":")
    function: Callable[..., object] = operator.attrgetter(path)(importlib.import_module(module))
    return function


def _call(request: bytes) -> object:
    name, arguments = pickle.loads(request)
    value = _find(name)(*arguments)
    if inspect.isawaitable(value):
        value = asyncio.run(_wait(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    # Fail here, so that the error is attributed to the function. Other numbers become floats.
    return json.loads(json.dumps(value, default=float))


async def _wait(awaitable: Awaitable[object]) -> object:
    return await awaitable


def _reply(replies: BinaryIO, reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply).encode() + b"\n")
    replies.flush()


if __name__ == "__main__":
    main()
