"""Tools: what a model may call, and one trajectory's use of them.

A plain typed Python function with a docstring is a tool. What runs a model's own code lives in
`sandbox_tools`. A tool answers with a `ToolOutput`; only a programmer's error raises out of it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import anyio
import anyio.from_thread
import anyio.lowlevel
import pydantic

from agentloop.errors import RequestError
from agentloop.plain_json import dumps
from agentloop.trajectory import CallStatus

__all__ = [
    "CallerTool",
    "FunctionTool",
    "Reopen",
    "Schema",
    "Tool",
    "ToolFunction",
    "ToolOutput",
    "Tools",
    "as_tool",
]

Schema = Mapping[str, Any]
"""A tool's JSON schema in OpenAI's form: {"type": "function", "function": {"name", ...}}."""

ToolFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """What a tool answered. `started_s` is `time.monotonic()` when it began to run."""

    status: CallStatus
    content: str
    started_s: float | None = None


class Reopen(Exception):
    """A tool has lost its state by the model's doing: open it again and repeat this call there."""


class RunTool(Protocol):
    """Runs one call. Cancelling it must end whatever the call does; it may raise `Reopen`."""

    async def __call__(self, arguments: Mapping[str, Any], /) -> ToolOutput: ...


class Tool(Protocol):
    """Something that a model can call.

    `open()` is entered once per trajectory, when the tool is first called, so that a tool can
    keep state between the calls of one trajectory; it is left when the trajectory ends.
    """

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Schema: ...

    def open(self) -> AbstractAsyncContextManager[RunTool]: ...


def as_tool(tool: Tool | ToolFunction) -> Tool:
    """A tool as it is, or a Python function made into one.

    Raises:
        RequestError: the function's signature or docstring cannot become a schema.
    """
    if hasattr(tool, "schema") and hasattr(tool, "open"):
        return tool  # type: ignore[return-value]
    if not callable(tool):
        raise RequestError(f"tools: {tool!r} is neither a function nor a tool")
    return FunctionTool(tool)


class FunctionTool:
    """A Python function, sync or async, as a tool.

    Its arguments are checked against its type hints before it is called. A sync function runs in
    a daemon thread; one that outlives its deadline is abandoned there and keeps one of
    `MAX_THREADS` places until it returns, because Python cannot kill a thread.
    """

    MAX_THREADS = 64

    def __init__(self, function: ToolFunction, *, timeout_s: float = 30.0) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise RequestError(f"tools: {function.__name__} yields; a tool returns its answer")
        self.schema = _schema(function)
        self.name: str = function.__name__
        self.timeout_s = timeout_s
        self._function = function
        self._is_async = inspect.iscoroutinefunction(function)
        self._arguments = _arguments_model(function)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        yield self._run

    async def _run(self, arguments: Mapping[str, Any], /) -> ToolOutput:
        try:
            model = self._arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            return ToolOutput(CallStatus.BAD_ARGUMENTS, f"[bad arguments] {_explain(error)}")
        kwargs = {
            str(f.alias): getattr(model, name) for name, f in type(model).model_fields.items()
        }
        started_s = time.monotonic()
        with anyio.move_on_after(self.timeout_s):
            try:
                if self._is_async:
                    value = await self._function(**kwargs)
                else:
                    call = functools.partial(self._function, **kwargs)
                    value = await _in_daemon_thread(call, self.MAX_THREADS)
                if inspect.isawaitable(value):  # an async function in a plain wrapper
                    value = await value
                return ToolOutput(CallStatus.OK, _as_text(value), started_s)
            except (Exception, SystemExit) as error:  # it may raise anything: the model reads it
                return ToolOutput(CallStatus.ERROR, _as_error(error), started_s)
            except asyncio.CancelledError as error:
                if _cancelled_from_outside():
                    raise
                return ToolOutput(CallStatus.ERROR, _as_error(error), started_s)
        text = f"[timeout] stopped after {self.timeout_s:g} s"
        return ToolOutput(CallStatus.TIMEOUT, text, started_s)


@dataclass(frozen=True)
class CallerTool:
    """A tool that the caller runs: the rollout ends with the call and hands it over.

    Raises:
        RequestError: the schema is not one; names the field.
    """

    schema: Schema

    def __post_init__(self) -> None:
        function = self.schema.get("function")
        if self.schema.get("type") != "function" or not isinstance(function, Mapping):
            raise RequestError('tools: each must be {"type": "function", "function": {...}}')
        if not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError("tools: function.name is missing")

    @property
    def name(self) -> str:
        name: str = self.schema["function"]["name"]
        return name

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        async def run(arguments: Mapping[str, Any], /) -> ToolOutput:
            return ToolOutput(CallStatus.CALLER, "")

        yield run


@dataclass(slots=True, eq=False)
class _Opened:
    run: RunTool
    closing: anyio.Event = field(default_factory=anyio.Event)


class Tools:
    """The tools of one trajectory, opened as they are called.

    Use as `async with Tools(tools) as tools`: leaving it closes each, in its own task.
    """

    def __init__(self, tools: Sequence[Tool | ToolFunction]) -> None:
        """
        Raises:
            RequestError: a function cannot become a tool, or two tools have one name.
        """
        self._tools: dict[str, Tool] = {}
        for tool in map(as_tool, tools):
            if tool.name in self._tools:
                raise RequestError(f"tools: two are named {tool.name!r}")
            self._tools[tool.name] = tool
        self._opened: dict[str, _Opened] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._keepers = anyio.create_task_group()

    @property
    def schemas(self) -> list[Schema]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def _are_the_callers(self) -> bool:
        return bool(self._tools) and all(
            isinstance(tool, CallerTool) for tool in self._tools.values()
        )

    async def __aenter__(self) -> Tools:
        await self._keepers.__aenter__()
        return self

    async def __aexit__(self, *exc_info: Any) -> bool | None:
        for opened in self._opened.values():
            opened.closing.set()
        return await self._keepers.__aexit__(*exc_info)

    async def run(self, name: str, arguments: Mapping[str, Any]) -> ToolOutput:
        """Run one call; never raises for what the model or the tool did wrong."""
        if name not in self._tools and self._are_the_callers:
            return ToolOutput(CallStatus.CALLER, "")  # who has a way of dealing with it
        if name not in self._tools:
            known = ", ".join(self._tools) or "none"
            text = f"[unknown tool] there is no tool {name!r}; the tools are: {known}"
            return ToolOutput(CallStatus.UNKNOWN_TOOL, text)
        while True:
            opened = self._opened.get(name) or await self._open(name)
            try:
                return await opened.run(arguments)
            except Reopen:
                opened.closing.set()
                if self._opened.get(name) is opened:
                    del self._opened[name]

    async def _open(self, name: str) -> _Opened:
        # Two calls of a turn may be the first of their tool at once.
        async with self._locks.setdefault(name, anyio.Lock()):  # no deadline: the rollout has one
            if name not in self._opened:
                self._opened[name] = await self._keepers.start(self._keep, self._tools[name])
            return self._opened[name]

    async def _keep(self, tool: Tool, *, task_status: anyio.abc.TaskStatus[_Opened]) -> None:
        # A context that opens tasks must be left in the task that entered it.
        async with tool.open() as run:
            opened = _Opened(run)
            task_status.started(opened)
            await opened.closing.wait()  # no deadline: ends with the trajectory, which has one


_thread_places = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("_thread_places")


async def _in_daemon_thread(function: Callable[[], Any], max_threads: int) -> Any:
    """Run `function` in a thread that cannot keep the process from exiting."""
    loop_token = anyio.lowlevel.current_token()
    try:
        limiter = _thread_places.get()
    except LookupError:
        limiter = anyio.CapacityLimiter(max_threads)
        _thread_places.set(limiter)
    done = anyio.Event()
    outcome: list[tuple[bool, Any]] = []
    borrower = object()
    await limiter.acquire_on_behalf_of(borrower)  # no deadline: the call has one, timeout_s

    def finish() -> None:
        limiter.release_on_behalf_of(borrower)
        done.set()

    def work() -> None:
        try:
            outcome.append((True, function()))
        except BaseException as error:  # handed to the caller, whatever it is
            outcome.append((False, error))
        with suppress(RuntimeError):  # the loop is gone: nobody waits any more
            anyio.from_thread.run_sync(finish, token=loop_token)

    threading.Thread(target=work, name=f"tool {function}", daemon=True).start()
    await done.wait()  # no deadline: the call has one, timeout_s
    succeeded, value = outcome[0]
    if succeeded:
        return value
    raise value if isinstance(value, Exception) else RuntimeError(f"the tool raised {value!r}")


def _cancelled_from_outside() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _as_error(error: BaseException) -> str:
    try:
        said = str(error)
    except Exception:  # of the tool's own making, too
        said = ""
    return f"[error] {type(error).__name__}{': ' * bool(said)}{said}"


def _schema(function: ToolFunction) -> Schema:
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise RequestError(f"tools: {function!r} has no name: wrap it in a function")
    try:
        schema: Schema = get_json_schema(_with_described_arguments(function))
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise RequestError(f"tools: {name} cannot become a tool: {error}") from error
    return schema


def _with_described_arguments(function: ToolFunction) -> ToolFunction:
    """A one-line docstring is enough: its arguments are then described by their names."""
    doc = inspect.getdoc(function)
    parameters = list(inspect.signature(function).parameters)
    if not doc or "Args:" in doc or not parameters:
        return function
    wrapper = functools.wraps(function)(lambda *args, **kwargs: None)
    described = "\n".join(f"    {name}: {name.replace('_', ' ')}" for name in parameters)
    wrapper.__doc__ = f"{doc}\n\nArgs:\n{described}"
    return wrapper


def _arguments_model(function: ToolFunction) -> type[pydantic.BaseModel]:
    hints = inspect.get_annotations(function, eval_str=True)
    fields: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise RequestError(f"tools: {function.__name__}: parameter {name!r} has no plain name")
        default = ... if parameter.default is parameter.empty else parameter.default
        # By alias: as a field's own name pydantic refuses `_x`, and warns of `json` and `copy`.
        fields[f"argument_{len(fields)}"] = (
            hints.get(name, Any),
            pydantic.Field(default, alias=name),
        )
    config = pydantic.ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    return pydantic.create_model(f"{function.__name__}_arguments", __config__=config, **fields)


def _explain(error: pydantic.ValidationError) -> str:
    problems = (
        f"{'.'.join(map(str, problem['loc'])) or 'arguments'}: {problem['msg']}"
        for problem in error.errors(include_url=False)
    )
    return "; ".join(problems)


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return dumps(value, default=None).decode()
    except (TypeError, ValueError):  # not JSON: what Python would print
        return str(value)
