"""What a call comes back with."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any


class CallStatus(enum.StrEnum):
    """How a call ended."""

    OK = "ok"
    ERROR = "error"  # an exception, or an exit status that isn't 0
    TIMEOUT = "timeout"
    OOM = "oom"
    OUTPUT_LIMIT = "output_limit"
    KILLED = "killed"  # by a signal, its own or another's; or with the second worker that it ended
    SANDBOX_ERROR = "sandbox_error"
    OVERLOADED = "overloaded"
    CANCELLED = "cancelled"

    @property
    def infrastructure(self) -> bool:
        """True if the end says nothing about the program: never to be scored."""
        return self in _INFRASTRUCTURE


_INFRASTRUCTURE = frozenset({CallStatus.SANDBOX_ERROR, CallStatus.OVERLOADED, CallStatus.CANCELLED})


@dataclasses.dataclass(frozen=True, slots=True)
class CallError:
    """The exception that ended a program, in the program's own words."""

    type: str
    message: str
    line: int | None = None
    traceback: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class CallResult:
    """The answer to a call. `result` and `error` are what the program says of itself; the rest
    was measured outside of it. Of a session's cell whose process lives on, that process tells its
    end and `exit_code` as well, and, within the call's own time, `started_ns`.

    Times are in seconds. `queue_s` ends and `run_s` begins where a worker takes the call;
    `cpu_s` is 0 for a cell of a session, whose process lives on.
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
    truncated: bool = False  # some output was left out of the middle
    queue_s: float = 0.0
    run_s: float = 0.0
    cpu_s: float = 0.0
    max_rss: int = 0  # bytes
    worker_id: str = ""
    attempt: int = 1
    # time.monotonic_ns() as the code begins; comparable with the caller's own on the same host.
    started_ns: int | None = None

    @property
    def ok(self) -> bool:
        return self.status is CallStatus.OK

    @classmethod
    def failed(cls, id: int, status: CallStatus, why: str, **more: Any) -> CallResult:
        """An answer of the infrastructure: the program has not run to an end."""
        return cls(id, status, error=CallError("SandboxError", why), **more)

    @classmethod
    def from_frame(
        cls, frame: dict[str, Any], *, id: int, queue_s: float, worker_id: str, attempt: int
    ) -> CallResult:
        """A `done` frame as a result. A host's (remote.py) also says what it took there."""
        where: dict[str, Any] = {
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


MEASURED = frozenset({
    "exit_code", "signal", "stdout", "stderr", "result", "stdout_bytes", "stderr_bytes",
    "truncated", "run_s", "cpu_s", "max_rss", "started_ns",
})  # fmt: skip
