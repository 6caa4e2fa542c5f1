"""What the front, the zygotes and the children say to each other.

front to zygote   FORK, with the child's descriptors     zygote to front   NEWS of a child
front to child    a job: JOB, code, standard input       child to front    a report, in a mapping
"""

from __future__ import annotations

import struct
from typing import NamedTuple

FORK = struct.Struct("<i")  # lane
NEWS = struct.Struct("<iiidq")  # kind, lane, pid or wait status, cpu_s, max rss in KiB
NEWS_FORKED, NEWS_EXITED, NEWS_FAILED = 1, 2, 3

JOB = struct.Struct("<d?I")  # timeout_s, of a session, bytes of code
INLINE_JOB = 64 * 1024  # larger jobs travel as a memory file
LARGE_JOB = b"+"

REPORT_HEAD = struct.Struct("<qi")  # started_ns, bytes of JSON that follow
REPORT_BYTES = 256 * 1024

JOB_FD, REPORT_FD = 3, 4  # held free in a zygote

MAX_TEXT = 16 * 1024  # characters of a result or a traceback


class Job(NamedTuple):
    """A call, as its child sees it."""

    code: str
    stdin: bytes
    timeout_s: float
    lasting: bool  # one of a session's cells


def pack_job(code: str, stdin: str, timeout_s: float, lasting: bool) -> bytes:
    text = code.encode("utf-8", "surrogatepass")
    return JOB.pack(timeout_s, lasting, len(text)) + text + stdin.encode("utf-8", "replace")


def unpack_job(data: bytes) -> Job:
    timeout_s, lasting, size = JOB.unpack_from(data)
    end = JOB.size + size
    code = data[JOB.size : end].decode("utf-8", "surrogatepass")
    return Job(code, data[end:], timeout_s, lasting)


def clip(text: str, limit: int = MAX_TEXT) -> str:
    """At most `limit` characters, the middle left out; always encodable."""
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
