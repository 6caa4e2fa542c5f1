"""Built-in tools that run a model's code in the sandbox.

`python_code_with_standard_io` runs a fresh program per call; `jupyter_code` is a notebook whose
state lasts for the trajectory. Names and parameters follow rStar2-Agent's code; its paper names the
first tool `execute_python_code_with_standard_io`. `tool_formats.py` has the texts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio

from agentloop.agent.tool_formats import (
    ToolFormat,
    bad_arguments,
    describe,
    jupyter_code_schema,
    paper_schema,
    python_code_schema,
)
from agentloop.agent.tools import (
    Arguments,
    BadArguments,
    Reopen,
    RunTool,
    Schema,
    ToolOutput,
    string_arguments,
)
from agentloop.sandbox import CallResult, LostBy, Pool, SandboxError, Session, SessionLost
from agentloop.sandbox import CallStatus as SandboxStatus
from agentloop.sandbox.settings import MAX_CODE_BYTES
from agentloop.trajectory import ToolCallStatus

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
    schema: Schema = python_code_schema(name)
    is_stateless = may_repeat = True  # a program has a sandbox of its own

    def __init__(
        self, pool: Pool, *, timeout_s: float = 4.0, tool_format: ToolFormat = "plain"
    ) -> None:
        self.schema = self._schema(tool_format)
        self._pool = pool
        self._timeout_s = timeout_s
        self._format: ToolFormat = tool_format

    def _schema(self, tool_format: ToolFormat) -> Schema:
        return python_code_schema(self.name, tool_format=tool_format)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        yield self._run

    async def _run(self, arguments: Arguments, /) -> ToolOutput:
        try:
            texts = _texts(arguments, "input")
        except BadArguments as error:
            return _bad_arguments(error, self._format)
        code, stdin = texts["code"], texts.get("input", "")
        result = await self._pool.run(code, stdin=stdin, timeout_s=self._timeout_s)
        return _output(result, code, self._format)


class PaperPythonCode(PythonCode):
    """The same tool under the name that the paper uses, with the paper's schema."""

    name = "execute_python_code_with_standard_io"
    schema: Schema = paper_schema(name)

    def _schema(self, tool_format: ToolFormat) -> Schema:
        return paper_schema(self.name)


class JupyterCode:
    """The tool `jupyter_code`: runs a notebook cell and shows the value of its last expression.

    Global variables last for the trajectory.
    """

    name = "jupyter_code"
    schema: Schema = jupyter_code_schema(name)

    def __init__(
        self, pool: Pool, *, timeout_s: float = 4.0, tool_format: ToolFormat = "plain"
    ) -> None:
        self.schema = jupyter_code_schema(self.name, tool_format=tool_format)
        self._pool = pool
        self._timeout_s = timeout_s
        self._format: ToolFormat = tool_format

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(self._pool.session())
            except SandboxError as error:
                yield _unavailable_notebook(str(error))
            else:
                yield _Notebook(session, self._timeout_s, self._format).run


def _unavailable_notebook(reason: str) -> RunTool:
    async def run(arguments: Arguments, /) -> ToolOutput:
        return ToolOutput(ToolCallStatus.INFRASTRUCTURE, f"no notebook: {reason}")

    return run


class _Notebook:
    """A sandbox session whose cells run one at a time, in the order of the calls."""

    def __init__(self, session: Session, timeout_s: float, tool_format: ToolFormat) -> None:
        self._session = session
        self._format: ToolFormat = tool_format
        self._timeout_s = timeout_s
        self._lock = anyio.Lock()
        self._ended = False

    async def run(self, arguments: Arguments, /) -> ToolOutput:
        try:
            code = _texts(arguments)["code"]
        except BadArguments as error:
            return _bad_arguments(error, self._format)
        async with self._lock:  # no deadline: each earlier call has one
            if self._ended:
                raise Reopen
            try:
                result = await self._session.run(code, timeout_s=self._timeout_s)
            except SessionLost as error:
                return self._lost_cell_output(error)
            output = _output(result, code, self._format)
            if result.status in _ENDS_SESSION or self._session.lost_by is LostBy.PROGRAM:
                self._ended = True
                return ToolOutput(output.status, output.content + _RESTARTED, output.started_s)
            return output

    def _lost_cell_output(self, error: SessionLost) -> ToolOutput:
        """Return the output of a cell that did not run because its process had already ended."""
        if error.by is not LostBy.PROGRAM:  # the model's state is lost, so the rollout must end
            return ToolOutput(ToolCallStatus.INFRASTRUCTURE, f"the notebook was lost: {error}")
        self._ended = True
        text = "[error] this cell did not run: code of an earlier cell has ended the process"
        return ToolOutput(ToolCallStatus.ERROR, text + _RESTARTED)


def _output(result: CallResult, code: str, tool_format: ToolFormat) -> ToolOutput:
    started_s = None if result.started_ns is None else result.started_ns / 1e9
    if result.status.is_unscorable:  # for the log: the rollout ends, so no model reads it
        return ToolOutput(ToolCallStatus.INFRASTRUCTURE, describe(result), started_s)
    text = describe(result, code, tool_format=tool_format)
    return ToolOutput(ToolCallStatus(result.status.value), text, started_s)


def _bad_arguments(error: BadArguments, tool_format: ToolFormat) -> ToolOutput:
    text = bad_arguments(str(error), tool_format=tool_format)
    return ToolOutput(ToolCallStatus.BAD_ARGUMENTS, text)


def _texts(arguments: Arguments, *optional: str) -> dict[str, str]:
    """Return `code`, and the optional arguments that are given. Raises BadArguments."""
    texts = string_arguments(arguments, required=("code",), optional=optional)
    if sum(len(text.encode(errors="replace")) for text in texts.values()) > MAX_CODE_BYTES:
        raise BadArguments(f"code: longer than {MAX_CODE_BYTES} bytes")
    return texts
