"""The results of calls."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, TypedDict, Unpack


class CallStatus(enum.StrEnum):
    """The outcome of a call."""

    OK = "ok"
    ERROR = "error"  # an exception, or an exit status other than 0
    TIMEOUT = "timeout"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # by a signal, or because it ended two workers
    SANDBOX_ERROR = "sandbox_error"
    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"

    @property
    def is_unscorable(self) -> bool:
        """True if the outcome says nothing about the program, so that it must not be scored."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset({CallStatus.SANDBOX_ERROR, CallStatus.OVERLOADED, CallStatus.CANCELLED})


class Where(TypedDict, total=False):
    """The wait of a call, and the worker that took it."""

    queue_s: float
    worker_id: str
    attempt: int


@dataclasses.dataclass(frozen=True, slots=True)
class CallError:
    """The exception that ended a program, as reported by the program."""

    type: str
    message: str
    line: int | None = None
    traceback: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CallResult:
    """The result of a call.

    `result` and `error` are reported by the program; everything else is measured from outside. For
    a session's cell whose process lives on, that process also reports the status, `exit_code` and,
    within the bounds of the call's time, `started_ns`.

    Times are in seconds. `queue_s` is the time until a worker takes the call, and `run_s` the time
    from then on; `cpu_s` is 0 for a session's cell, whose process lives on.
    """

    id: int
    status: CallStatus
    exit_code: int | None = None
    signal: int | None = None
    stdout: str = ""
    stderr: str = ""
    result: str | None = None  # repr of the last expression
    error: CallError | None = None
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    truncated: bool = False  # whether output was omitted from the middle
    queue_s: float = 0.0
    run_s: float = 0.0
    cpu_s: float = 0.0
    max_rss: int = 0  # bytes
    worker_id: str = ""
    attempt: int = 1
    # time.monotonic_ns() when the code starts; comparable with the caller's on the same host.
    started_ns: int | None = None

    @property
    def ok(self) -> bool:
        return self.status is CallStatus.OK

    @classmethod
    def failed(cls, id: int, status: CallStatus, reason: str, **where: Unpack[Where]) -> CallResult:
        """Return a result for a call that failed because of infrastructure."""
        return cls(id, status, error=CallError("SandboxError", reason), **where)

    @classmethod
    def from_frame(
        cls, frame: Mapping[str, Any], *, id: int, queue_s: float, worker_id: str, attempt: int
    ) -> CallResult:
        """Convert a `done` frame. A host's frame (remote.py) also has its own times and attempt."""
        where: Where = {
            "queue_s": queue_s + frame.get("queue_s", 0.0),
            "worker_id": frame.get("worker_id") or worker_id,
            "attempt": attempt + frame.get("attempt", 1) - 1,
        }
        status = CallStatus(frame["status"])
        if "run_s" not in frame:
            return cls.failed(id, status, frame.get("why") or str(status), **where)
        error = frame["error"]
        return cls(
            id=id,
            status=status,
            error=CallError(**error) if error else None,
            **{name: frame[name] for name in MEASURED},
            **where,
        )


# What a worker reports of a program that ran, beside its status and error.
MEASURED = frozenset(CallResult.__slots__) - {
    "id", "status", "error", "queue_s", "worker_id", "attempt"
}  # fmt: skip
