"""Messages among the server, the zygotes and the children.

server to zygote   FORK, with the child's descriptors
zygote to server   NEWS of a child
server to child    JOB, code, standard input; or FILE_JOB
child to server    STARTED, once, before its program runs; then a count in an eventfd after each
                   cell; a report, in a mapping

A child that ended without STARTED has not run its program, which is the fault of the sandbox. No
program can keep that message from being sent, change it or take it back.

A program can send nothing to the server, since what lies in the server's own queue outlives the
program: descriptors would keep their files, and memory with them, after all of its processes are
dead. So the child closes its end of the channel for writing before the program runs, and an eventfd
holds nothing but a number.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FORK = struct.Struct("<i")  # the child's number
NEWS = struct.Struct("<iiidq")  # kind, number, pid or wait status, cpu_s, max rss in KiB
NEWS_FORKED, NEWS_EXITED, NEWS_FAILED = 1, 2, 3

JOB = struct.Struct("<d??QI")  # timeout_s, of a session, native, bytes of memory, bytes of code
INLINE_JOB = 64 * 1024  # larger jobs travel as a memory file
FILE_JOB = struct.Struct("<Q")  # bytes of standard input, which come first in the file

STARTED = struct.Struct("<q")  # time.monotonic_ns()
# The mapping: STARTED of the latest cell, if of a session; REPORT_SIZE; as many bytes of JSON.
REPORT_SIZE = struct.Struct("<i")
REPORT_START = STARTED.size + REPORT_SIZE.size
REPORT_BYTES = 256 * 1024

JOB_FD, DONE_FD, REPORT_FD = 3, 4, 5  # held free in a zygote; the last is the highest

MAX_TEXT = 16 * 1024  # characters of a result or a traceback


class Job(NamedTuple):
    """A call, as its child sees it."""

    code: str
    timeout_s: float
    lasting: bool  # one of a session's cells
    native: bool  # becomes another program, whose address space says nothing of its memory
    memory_bytes: int
    stdin: bytes  # empty if it came as a file


def pack_job(code: str, timeout_s: float, lasting: bool, native: bool, memory_bytes: int) -> bytes:
    text = code.encode("utf-8", "surrogatepass")
    return JOB.pack(timeout_s, lasting, native, memory_bytes, len(text)) + text


def unpack_job(data: bytes) -> Job:
    timeout_s, lasting, native, memory_bytes, size = JOB.unpack_from(data)
    end = JOB.size + size
    code = data[JOB.size : end].decode("utf-8", "surrogatepass")
    return Job(code, timeout_s, lasting, native, memory_bytes, data[end:])


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """Return at most `limit` characters of the text, without its middle; always encodable."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
