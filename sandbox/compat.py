"""Two protocols that others speak, so that their clients need no change.

Code Judge (github.com/0xWJ/code-judge): submissions with a `type`, judged by comparing standard
output with `expected_output`, both stripped. SandboxFusion (github.com/bytedance/SandboxFusion):
`/run_code`. Not covered: other languages than Python, Code Judge's `options`, SandboxFusion's
`files`, `fetch_files` and notebooks. Each is refused in the words of its protocol, never ignored.
"""

from __future__ import annotations

import uuid
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from sandbox.api import MAX_BATCH
from sandbox.results import CallResult, CallStatus


def new_id() -> str:
    return str(uuid.uuid4())


class Submission(pydantic.BaseModel):
    """Code Judge's `/run` and `/judge`."""

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"]
    options: dict[str, str] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(pydantic.BaseModel):
    """Code Judge's `/run/batch` and its like."""

    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: Annotated[list[Submission], Field(min_length=1, max_length=MAX_BATCH)]


_REASONS = {
    CallStatus.TIMEOUT: "worker_timeout",
    CallStatus.OVERLOADED: "queue_timeout",
    CallStatus.SANDBOX_ERROR: "internal_error",
    CallStatus.CANCELLED: "internal_error",
}


def refused_submission(submission: Submission, *, with_output: bool) -> dict[str, Any] | None:
    """The answer to what isn't run here, or None."""
    if submission.type == "python" and not submission.options:
        return None
    what = f"the type {submission.type!r}" if submission.type != "python" else "options"
    why = f"{what}: not offered here, where plain Python is run"
    answer: dict[str, Any] = {
        "sub_id": submission.sub_id or new_id(),
        "success": False,
        "run_success": False,
        "cost": 0.0,
        "reason": "invalid_input",
        "message": why,
    }
    return answer | {"stdout": "", "stderr": why} if with_output else answer


def judged(submission: Submission, result: CallResult, *, with_output: bool) -> dict[str, Any]:
    """A result in Code Judge's words. Output whose middle was left out matches nothing."""
    expected = submission.expected_output
    success = result.ok and (expected is None or result.stdout.strip() == expected.strip())
    answer: dict[str, Any] = {
        "sub_id": submission.sub_id or new_id(),
        "success": success,
        "run_success": result.ok,
        "cost": result.run_s,
        "reason": _REASONS.get(result.status, ""),
    }
    return answer | {"stdout": result.stdout, "stderr": _stderr(result)} if with_output else answer


class RunCodeRequest(pydantic.BaseModel):
    """SandboxFusion's `/run_code`."""

    code: str
    language: str = "python"
    stdin: str | None = None
    compile_timeout: float = 10.0
    run_timeout: Annotated[float, Field(gt=0, le=3600)] = 10.0
    memory_limit_MB: int = -1
    files: dict[str, str | None] = Field(default_factory=dict)
    fetch_files: list[str] = Field(default_factory=list)


def refused_code(request: RunCodeRequest) -> dict[str, Any] | None:
    """The answer to what isn't run here, or None."""
    if request.language != "python":
        why = f"language: {request.language!r} is not offered here, only 'python'"
    elif request.files or request.fetch_files:
        why = "files, fetch_files: not offered here"
    else:
        return None
    return _fusion("SandboxError", why, None)


def memory_mib(request: RunCodeRequest, most: int) -> int | None:
    """What the program may hold; `most` is the pool's own limit, which always holds."""
    return min(request.memory_limit_MB, most) if request.memory_limit_MB > 0 else None


def run_code_answer(result: CallResult) -> dict[str, Any]:
    """A result in SandboxFusion's words."""
    if result.status.infrastructure:
        return _fusion("SandboxError", result.error.message if result.error else "", None)
    timed_out = result.status is CallStatus.TIMEOUT
    code = result.exit_code if result.exit_code is not None else -(result.signal or 1)
    run = {
        "status": "TimeLimitExceeded" if timed_out else "Finished",
        "execution_time": result.run_s,
        "return_code": None if timed_out else code,
        "stdout": result.stdout,
        "stderr": _stderr(result),
    }
    return _fusion("Success" if result.ok else "Failed", "", run)


def _fusion(status: str, message: str, run: dict[str, Any] | None) -> dict[str, Any]:
    return {
        "status": status,
        "message": message,
        "compile_result": None,
        "run_result": run,
        "executor_pod_name": None,
        "files": {},
    }


def _stderr(result: CallResult) -> str:
    """What the program wrote; where it never ran, why."""
    failed = result.status.infrastructure and result.error
    return failed.message if failed else result.stderr
