"""The protocols of two other sandbox services, so that their clients work unchanged.

Code Judge (github.com/0xWJ/code-judge): submissions with a `type`, judged by comparing standard
output with `expected_output`, both stripped. Its client rejects unknown fields, and models have
been trained on its texts, so both are reproduced exactly. SandboxFusion
(github.com/bytedance/SandboxFusion): `/run_code`.

Not covered: Code Judge's `math` and `options`; SandboxFusion's `files`, `fetch_files`, notebooks
and further languages. Each is refused as its protocol does, never ignored. Both services keep a
program's whole output in memory; here it is bounded (MAX_OUTPUT_BYTES).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from agentloop.sandbox.api import MAX_BATCH, from_integral
from agentloop.sandbox.languages import COMPILE_ERROR, Language
from agentloop.sandbox.pool import ProgramArguments
from agentloop.sandbox.results import CallResult, CallStatus
from agentloop.sandbox.settings import MAX_KEPT_BYTES, OutputLimits

MAX_OUTPUT_BYTES = 64 << 20  # a program that writes more has failed
KEEP_BYTES = 64 * 1024  # at least; more if expected_output is longer
TIMEOUT_LINE = "Suicide from timeout.\n"  # written by Code Judge's programs on a timeout


def new_id() -> str:
    return str(uuid.uuid4())


class Submission(pydantic.BaseModel, strict=True):
    """The body of Code Judge's `/run` and `/judge`."""

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"]
    options: dict[str, str] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(pydantic.BaseModel, strict=True):
    """The body of Code Judge's `/run/batch` and similar paths."""

    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: Annotated[
        list[Submission], Field(min_length=1, max_length=MAX_BATCH), pydantic.FailFast()
    ]


@dataclass(frozen=True)
class SubmissionResult:
    """Exactly the fields of Code Judge's SubmissionResult."""

    sub_id: str
    success: bool = False
    run_success: bool = False
    cost: float = 0.0
    reason: str = ""
    stdout: str = ""
    stderr: str = ""


_REASONS = {
    CallStatus.TIMEOUT: "worker_timeout",
    CallStatus.OVERLOADED: "queue_timeout",
    CallStatus.SANDBOX_ERROR: "internal_error",
    CallStatus.CANCELLED: "internal_error",
}


def language_of(submission: Submission) -> Language | None:
    """Return the language of a submission; None if calls have none such."""
    return None if submission.type == "math" else submission.type


def refused_submission(submission: Submission, lacks: str) -> SubmissionResult | None:
    """Return the response to a submission that cannot be run here, or None.

    Args:
        lacks: why calls can't be in its language; "" if they can.
    """
    if language_of(submission) is None:
        reason = f"the type {submission.type!r} is not supported here, only 'python' and 'cpp'"
    elif lacks:
        reason = lacks
    elif submission.options:
        reason = "options are not supported here"
    elif _size(submission.expected_output) > MAX_KEPT_BYTES:
        reason = f"expected_output has more than {MAX_KEPT_BYTES} bytes"
    else:
        return None
    sub_id = submission.sub_id or new_id()
    return SubmissionResult(sub_id, reason="invalid_input", stderr=reason)


def submitted_call(submission: Submission, timeout_s: float) -> ProgramArguments:
    """Return the arguments of the call, which keeps as much output as the comparison needs."""
    keep_bytes = min(KEEP_BYTES + _size(submission.expected_output), MAX_KEPT_BYTES)
    return {
        "code": submission.solution,
        "stdin": submission.input or "",
        "timeout_s": timeout_s,
        "memory_mib": None,
        "language": language_of(submission) or "python",
        "output": OutputLimits(MAX_OUTPUT_BYTES, keep_bytes),
    }


def submission_result(
    submission: Submission, result: CallResult, num_chars: int
) -> SubmissionResult:
    """Convert a result to Code Judge's format, with the first `num_chars` of each stream."""
    expected = submission.expected_output
    timeout_line = TIMEOUT_LINE if result.status is CallStatus.TIMEOUT else ""
    return SubmissionResult(
        submission.sub_id or new_id(),
        reason=_REASONS.get(result.status, ""),
        success=result.ok and (expected is None or result.stdout.strip() == expected.strip()),
        run_success=result.ok,
        cost=result.run_s,
        stdout=(result.stdout + timeout_line)[:num_chars],
        stderr=_stderr(result)[:num_chars],
    )


def _size(text: str | None) -> int:
    return len((text or "").encode())


class RunCodeRequest(pydantic.BaseModel, strict=True):
    """The body of SandboxFusion's `/run_code`."""

    code: str
    language: str = "python"
    stdin: str | None = None
    compile_timeout: Annotated[float, Field(gt=0, le=3600)] = 10.0
    run_timeout: Annotated[float, Field(gt=0, le=3600)] = 10.0
    memory_limit_MB: Annotated[int, Field(ge=-1, le=1 << 30), from_integral] = -1
    files: dict[str, str | None] = Field(default_factory=dict)
    fetch_files: list[str] = Field(default_factory=list)


FUSION_LANGUAGES: dict[str, Language] = {
    "python": "python",
    "bash": "bash",
    "cpp": "cpp",
    "nodejs": "javascript",
    "javascript": "javascript",
}


def refused_code(request: RunCodeRequest, lacks: str) -> dict[str, object] | None:
    """Return the response to a request that cannot be run here, or None; see above."""
    if request.language not in FUSION_LANGUAGES:
        supported = ", ".join(FUSION_LANGUAGES)
        reason = f"language: {request.language!r} is not supported here, only {supported}"
    elif lacks:
        reason = lacks
    elif request.files or request.fetch_files:
        reason = "files, fetch_files: not supported here"
    else:
        return None
    return _fusion("SandboxError", reason, None)


def memory_mib(request: RunCodeRequest, limit: int) -> int | None:
    """Return the memory limit of a request in MiB; `limit`, the pool's, always applies."""
    return min(request.memory_limit_MB, limit) if request.memory_limit_MB > 0 else None


RUN_CODE_OUTPUT = OutputLimits(MAX_OUTPUT_BYTES, MAX_KEPT_BYTES)
MAX_RUN_CODE_BYTES = 2 * 6 * MAX_KEPT_BYTES  # of both streams, if each byte becomes \uXXXX


def run_code_answer(result: CallResult, language: Language | None) -> dict[str, object]:
    """Convert a result to SandboxFusion's format.

    Truncated output is an error, since clients compare the output.
    """
    if result.status.is_unscorable:
        return _fusion("SandboxError", result.error.message if result.error else "", None)
    if result.ok and result.stdout_bytes > MAX_KEPT_BYTES:
        reason = f"the output has {result.stdout_bytes} bytes; the maximum is {MAX_KEPT_BYTES}"
        return _fusion("SandboxError", reason, None)
    timed_out = result.status is CallStatus.TIMEOUT
    code = result.exit_code if result.exit_code is not None else -(result.signal or 1)
    run: dict[str, object] = {
        "status": "TimeLimitExceeded" if timed_out else "Finished",
        "execution_time": result.run_s,
        "return_code": None if timed_out else code,
        "stdout": result.stdout,
        "stderr": _stderr(result),
    }
    if language == "cpp" and result.error is not None and result.error.type == COMPILE_ERROR:
        return _fusion("Failed", "", None, run)
    return _fusion("Success" if result.ok else "Failed", "", run)


def _fusion(
    status: str,
    message: str,
    run: dict[str, object] | None,
    compiled: dict[str, object] | None = None,
) -> dict[str, object]:
    return {
        "status": status,
        "message": message,
        "compile_result": compiled,
        "run_result": run,
        "executor_pod_name": None,
        "files": {},
    }


def _stderr(result: CallResult) -> str:
    """Return the program's standard error, or the reason why it never ran."""
    if result.status.is_unscorable and result.error:
        return result.error.message
    return result.stderr
