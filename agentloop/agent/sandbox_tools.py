"""Built-in tools that run a model's code in the sandbox.

`python_code_with_standard_io` runs a fresh program per call; `jupyter_code` is a notebook whose
state lasts for the trajectory. Names and parameters follow rStar2-Agent.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, ClassVar

import anyio

from agentloop.agent.tools import Reopen, RunTool, Schema, ToolOutput
from agentloop.sandbox import CallResult, LostBy, Pool, SandboxError, Session, SessionLost
from agentloop.sandbox import CallStatus as SandboxStatus
from agentloop.trajectory import ToolCallStatus

__all__ = ["JupyterCode", "PythonCode", "describe"]

_STRING = {"type": "string"}
_RESTARTED = "\n[note] the notebook was restarted: its variables are gone"
# Ends of a cell that are the model's own doing; the notebook is restarted after them.
_ENDS_SESSION = (
    SandboxStatus.TIMEOUT,
    SandboxStatus.OOM,
    SandboxStatus.KILLED,
    SandboxStatus.OUTPUT_LIMIT,
)


class PythonCode:
    """The tool `python_code_with_standard_io`: runs a program with the given standard input."""

    name = "python_code_with_standard_io"
    schema: ClassVar[Schema] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Execute Python code with standard input and capture standard output. "
            "Each call is a program of its own.",
            "parameters": {
                "type": "object",
                "properties": {
                    "code": {**_STRING, "description": "The Python program."},
                    "input": {**_STRING, "description": "Its standard input. Default: empty."},
                },
                "required": ["code"],
            },
        },
    }

    def __init__(self, pool: Pool, *, timeout_s: float = 4.0) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._max_code = pool.settings.max_code_bytes

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        yield self._run

    async def _run(self, arguments: Mapping[str, Any], /) -> ToolOutput:
        if argument_error := _argument_error(
            arguments, self._max_code, required="code", optional="input"
        ):
            return argument_error
        result = await self._pool.run(
            arguments["code"], stdin=arguments.get("input", ""), timeout_s=self._timeout_s
        )
        return _output(result)


class JupyterCode:
    """The tool `jupyter_code`: runs a notebook cell and shows the value of its last expression.

    Global variables last for the trajectory.
    """

    name = "jupyter_code"
    schema: ClassVar[Schema] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Execute Python code in a Jupyter-like notebook. State persists between "
            "calls; the value of the last expression is shown.",
            "parameters": {
                "type": "object",
                "properties": {"code": {**_STRING, "description": "The cell's code."}},
                "required": ["code"],
            },
        },
    }

    def __init__(self, pool: Pool, *, timeout_s: float = 4.0) -> None:
        self._pool = pool
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(self._pool.session())
            except SandboxError as error:
                yield _unavailable_notebook(str(error))
            else:
                yield _Notebook(session, self._timeout_s, self._pool.settings.max_code_bytes).run


def _unavailable_notebook(why: str) -> RunTool:
    async def run(arguments: Mapping[str, Any], /) -> ToolOutput:
        return ToolOutput(ToolCallStatus.INFRASTRUCTURE, f"no notebook: {why}")

    return run


class _Notebook:
    """A sandbox session whose cells run one at a time, in the order of the calls."""

    def __init__(self, session: Session, timeout_s: float, max_code: int) -> None:
        self._session = session
        self._max_code = max_code
        self._timeout_s = timeout_s
        self._lock = anyio.Lock()
        self._ended = False

    async def run(self, arguments: Mapping[str, Any], /) -> ToolOutput:
        if argument_error := _argument_error(arguments, self._max_code, required="code"):
            return argument_error
        async with self._lock:  # no deadline: each earlier call has one
            if self._ended:
                raise Reopen
            try:
                result = await self._session.run(arguments["code"], timeout_s=self._timeout_s)
            except SessionLost as error:
                return self._lost(error)
            output = _output(result)
            if result.status in _ENDS_SESSION or self._session.lost_by is LostBy.PROGRAM:
                self._ended = True
                return ToolOutput(output.status, output.content + _RESTARTED, output.started_s)
            return output

    def _lost(self, error: SessionLost) -> ToolOutput:
        """Return the output of a cell that did not run because its process had already ended."""
        if error.by is not LostBy.PROGRAM:  # the model's state is lost, so the rollout must end
            return ToolOutput(ToolCallStatus.INFRASTRUCTURE, f"the notebook was lost: {error}")
        self._ended = True
        text = "[error] this cell did not run: code of an earlier cell has ended the process"
        return ToolOutput(ToolCallStatus.ERROR, text + _RESTARTED)


def describe(result: CallResult) -> str:
    """Return the text that a model reads of a call: its output, then its error, if any."""
    parts = []
    if result.stdout.strip():
        parts.append(result.stdout.rstrip("\n"))
    if result.result is not None:
        parts.append(result.result)
    if result.stderr.strip():
        parts.append("[stderr]\n" + result.stderr.rstrip("\n"))
    if ending := _ending(result):
        parts.append(ending)
    return "\n".join(parts) or "(no output)"


def _ending(result: CallResult) -> str:
    match result.status:
        case SandboxStatus.OK:
            return ""
        case SandboxStatus.ERROR if result.error is not None:
            where = f" (line {result.error.line})" if result.error.line else ""
            return f"[error] {result.error.type}: {result.error.message}{where}"
        case SandboxStatus.ERROR:
            return f"[error] exit code {result.exit_code}"
        case SandboxStatus.TIMEOUT:
            return f"[timeout] stopped after {result.run_s:.3g} s"
        case SandboxStatus.OOM:
            return "[out of memory]"
        case SandboxStatus.OUTPUT_LIMIT:
            return f"[output limit] stopped after {result.stdout_bytes + result.stderr_bytes} bytes"
        case SandboxStatus.KILLED:
            return f"[killed] by signal {result.signal}"
        case _:
            why = f": {result.error.message}" if result.error else ""
            return f"[{result.status}]{why}"


def _output(result: CallResult) -> ToolOutput:
    started_s = None if result.started_ns is None else result.started_ns / 1e9
    if result.status.is_unscorable:
        return ToolOutput(ToolCallStatus.INFRASTRUCTURE, describe(result), started_s)
    return ToolOutput(ToolCallStatus(result.status.value), describe(result), started_s)


def _argument_error(
    arguments: Mapping[str, Any], max_code: int, *, required: str, optional: str = ""
) -> ToolOutput | None:
    problems = [f"{required}: missing"] if required not in arguments else []
    for name, value in arguments.items():
        if name not in (required, optional):
            problems.append(f"{name}: unknown")
        elif not isinstance(value, str):
            problems.append(f"{name}: a string is expected")
    if not problems:
        if sum(len(value.encode(errors="replace")) for value in arguments.values()) <= max_code:
            return None
        problems.append(f"{required}: longer than {max_code} bytes")
    return ToolOutput(ToolCallStatus.BAD_ARGUMENTS, f"[bad arguments] {'; '.join(problems)}")
