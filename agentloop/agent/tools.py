"""Tools that a model may call, and the set of tools that one trajectory has open.

A typed Python function with a docstring is a tool; the tools that run a model's own code are in
`sandbox_tools`. A tool returns a `ToolOutput`; an exception means a bug in our own code.

The calls of a turn run at the same time, except those of an object's methods: they share its state,
so they run one at a time, in the order in which the model wrote them.
"""

from __future__ import annotations

import asyncio
import functools
import importlib
import inspect
import sys
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import ModuleType, TracebackType
from typing import Any, Protocol, TypeVar

import anyio
import pydantic

from agentloop.agent.threads import (
    RolloutThreads,
    current_threads,
    in_daemon_thread,
    rollout_threads,
)
from agentloop.agent.tokenizer import quiet_about_torch
from agentloop.agent.tool_formats import ToolFormat, malformed_call, unknown_tool
from agentloop.aio import is_cancelled_from_outside
from agentloop.errors import InfrastructureFailed, RequestError, message_of
from agentloop.plain_json import dumps, valid_text
from agentloop.trajectory import ToolCall, ToolCallStatus, ToolResult

Schema = Mapping[str, Any]
"""A tool's JSON schema in OpenAI's form: {"type": "function", "function": {"name", ...}}."""

Arguments = dict[str, object]
"""The arguments of a call, as the model wrote them."""

ToolFunction = Callable[..., Any]
F = TypeVar("F", bound=ToolFunction)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The result of a call.

    Attributes:
        started_s: `time.monotonic()` when the tool began to run.
        raised: type of the exception that a function raised, with its module.
    """

    status: ToolCallStatus
    content: str
    started_s: float | None = None
    raised: str = ""


class BadArguments(Exception):
    """The arguments of a call do not fit the tool; the message says why."""


class Reopen(Exception):
    """The model has destroyed the tool's state: open the tool again and repeat the call."""


class RunTool(Protocol):
    """Runs one call. Cancelling it must end all that the call has started. May raise `Reopen`."""

    async def __call__(self, arguments: Arguments, /) -> ToolOutput: ...


class Tool(Protocol):
    """A tool that a model can call.

    `open()` is entered at the first call of a trajectory and left when the trajectory ends, so a
    tool can keep state between the calls of one trajectory. One that keeps none may say so by an
    attribute `is_stateless`, and one whose calls have no effects besides by `may_repeat`.
    """

    @property
    def name(self) -> str: ...

    @property
    def schema(self) -> Schema: ...

    def open(self) -> AbstractAsyncContextManager[RunTool]: ...


def concurrent(function: F) -> F:
    """Declare that a method may run at the same time as other methods of its object."""
    function.__agentloop_concurrent__ = True  # type: ignore[attr-defined]
    return function


def as_tool(tool: Tool | ToolFunction) -> Tool:
    """Return `tool` itself, or a Python function wrapped as a tool.

    Raises:
        RequestError: The function's signature or docstring cannot be turned into a schema.
    """
    if hasattr(tool, "schema") and hasattr(tool, "open"):
        return tool  # type: ignore[return-value]
    if not callable(tool):
        raise RequestError(f"tools: {tool!r} is neither a function nor a tool")
    return FunctionTool(tool)


class FunctionTool:
    """A synchronous or asynchronous Python function as a tool.

    Arguments are validated against the type hints. A synchronous function runs in a thread of its
    rollout (`RolloutThreads`). Python cannot kill a thread, so one that outlives its deadline is
    abandoned, and counts towards `MAX_THREADS` until it returns.

    Attributes:
        state: the object whose method this is, if its calls may not run at the same time.
    """

    MAX_THREADS = 64

    def __init__(self, function: ToolFunction, *, timeout_s: float = 30.0) -> None:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise RequestError(
                f"tools: {function.__name__} is a generator; a tool must return its result"
            )
        self.schema = _schema(function)
        self.name: str = function.__name__
        self.timeout_s = timeout_s
        self._function = function
        owner = getattr(function, "__self__", None)
        has_state = not isinstance(owner, type | ModuleType)
        is_concurrent = getattr(function, "__agentloop_concurrent__", False)
        self.state: object = owner if has_state and not is_concurrent else None
        # A nested function may change the variables around it, such as a count of its calls.
        is_nested = getattr(function, "__closure__", None) is not None
        self.is_stateless = (owner is None or not has_state) and not is_nested
        self._is_async = inspect.iscoroutinefunction(function)
        self._arguments = _arguments_model(function)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        yield self._run

    async def _run(self, arguments: Arguments, /) -> ToolOutput:
        try:
            model = self._arguments.model_validate(arguments)
        except pydantic.ValidationError as error:
            return ToolOutput(ToolCallStatus.BAD_ARGUMENTS, f"[bad arguments] {_explain(error)}")
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
                    value = await self._in_thread(call)
                if inspect.isawaitable(value):  # an async function behind a synchronous wrapper
                    value = await value
                return ToolOutput(ToolCallStatus.OK, _as_text(value), started_s)
            except InfrastructureFailed as error:  # of another agent or a judge
                return ToolOutput(ToolCallStatus.INFRASTRUCTURE, str(error), started_s)
            except (
                Exception,
                SystemExit,
                asyncio.CancelledError,
            ) as error:  # for the model to read
                if isinstance(error, asyncio.CancelledError) and is_cancelled_from_outside():
                    raise
                output = ToolOutput(ToolCallStatus.ERROR, _as_error(error), started_s)
                return replace(output, raised=_type_of(error))
        text = f"[timeout] stopped after {self.timeout_s:g} s"
        return ToolOutput(ToolCallStatus.TIMEOUT, text, started_s)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        if (threads := current_threads()) is None:
            return await in_daemon_thread(call, self.MAX_THREADS)
        return await threads.run(call, self.MAX_THREADS, self.state)


@dataclass(frozen=True)
class CallerTool:
    """A tool that the caller runs: the rollout ends with the call and returns it to the caller.

    Raises:
        RequestError: The schema is invalid; the message names the field.
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

    def open(self) -> AbstractAsyncContextManager[RunTool]:
        raise NotImplementedError("its caller runs it")


@dataclass(slots=True, eq=False)
class _Opened:
    run: RunTool
    closing: anyio.Event = field(default_factory=anyio.Event)


class Tools:
    """The tools of one trajectory, each opened at its first call.

    Use as `async with Tools(tools) as tools`; leaving the block closes the tools that were opened.
    """

    def __init__(
        self,
        tools: Sequence[Tool | ToolFunction],
        *,
        tool_format: ToolFormat = "plain",
        for_caller: bool = False,
    ) -> None:
        """
        Args:
            tool_format: wording of the feedback on calls that cannot run.
            for_caller: whether the caller runs the calls, also those of tools that it lacks.

        Raises:
            RequestError: A function cannot become a tool, or two tools have the same name.
        """
        self._format: ToolFormat = tool_format
        self._for_caller = for_caller
        self._tools: dict[str, Tool] = {}
        for tool in map(as_tool, tools):
            if tool.name in self._tools:
                raise RequestError(f"tools: two are named {tool.name!r}")
            self._tools[tool.name] = tool
        self._opened: dict[str, _Opened] = {}
        self._locks: dict[str, anyio.Lock] = {}
        self._in_turn: dict[int, anyio.Lock] = {}  # by the object that tools share
        self._opens = not all(isinstance(tool, CallerTool) for tool in self._tools.values())
        self._stack = ExitStack()
        self._threads: RolloutThreads | None = None
        self._holders: anyio.abc.TaskGroup | None = None  # keeps them open

    @property
    def schemas(self) -> list[Schema]:
        return [tool.schema for tool in self._tools.values()]

    @property
    def are_stateless(self) -> bool:
        """True if what their calls do depends on nothing that was done in the trajectory before."""
        return all(getattr(tool, "is_stateless", False) for tool in self._tools.values())

    def may_repeat(self, name: str) -> bool:
        """Return whether calls of a tool may run twice."""
        return name not in self._tools or getattr(self._tools[name], "may_repeat", False)

    @property
    def _run_by_caller(self) -> bool:
        return self._for_caller or (bool(self._tools) and not self._opens)

    async def __aenter__(self) -> Tools:
        if self._opens:
            self._threads = self._stack.enter_context(rollout_threads())
            self._holders = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        for opened in self._opened.values():
            opened.closing.set()
        holders, self._holders = self._holders, None
        with self._stack:
            return None if holders is None else await holders.__aexit__(kind, error, traceback)

    async def run(self, name: str, arguments: Arguments) -> ToolOutput:
        """Run one call; report mistakes of the model and of the tool in the output."""
        tool = self._tools.get(name)
        if isinstance(tool, CallerTool) or (tool is None and self._run_by_caller):
            return ToolOutput(ToolCallStatus.CALLER, "")  # the caller handles unknown names itself
        if tool is None:
            names = ", ".join(self._tools) or "none"
            text = unknown_tool(name, names, tool_format=self._format)
            return ToolOutput(ToolCallStatus.UNKNOWN_TOOL, text)
        state = getattr(tool, "state", None)
        if state is None:
            return await self._run(name, arguments)
        # The lock is fair, and calls ask for it in the order in which they were dispatched.
        async with self._in_turn.setdefault(id(state), anyio.Lock()):  # no deadline: calls have one
            return await self._run(name, arguments)

    async def run_call(self, call: ToolCall, *, dispatched_s: float, begun_s: float) -> ToolResult:
        """Run a call as the model wrote it, which may be malformed.

        Args:
            dispatched_s: time of its dispatch, in seconds since the start of the trajectory.
            begun_s: `time.monotonic()` at the start of the trajectory.
        """
        if call.error is not None:
            text = malformed_call(call, tool_format=self._format)
            output = ToolOutput(ToolCallStatus.MALFORMED, text)
        else:
            output = await self.run(call.name, call.arguments)
        started_s = dispatched_s if output.started_s is None else output.started_s - begun_s
        # A lone surrogate, for example from a file name, cannot be encoded as UTF-8.
        content = valid_text(output.content)
        times = dispatched_s, started_s, time.monotonic() - begun_s
        return ToolResult(call.id, call.name, output.status, content, *times, output.raised)

    async def _run(self, name: str, arguments: Arguments) -> ToolOutput:
        while True:
            opened = self._opened.get(name) or await self._open(name)
            try:
                with rollout_threads(self._threads):  # a call may begin outside of the rollout
                    return await opened.run(arguments)
            except Reopen:
                opened.closing.set()
                if self._opened.get(name) is opened:
                    del self._opened[name]

    async def _open(self, name: str) -> _Opened:
        # Two calls of a turn may both be the first of their tool.
        async with self._locks.setdefault(name, anyio.Lock()):  # no deadline: the rollout has one
            if name not in self._opened:
                assert self._holders is not None, "the tools have not been entered"
                self._opened[name] = await self._holders.start(self._hold_open, self._tools[name])
            return self._opened[name]

    async def _hold_open(self, tool: Tool, *, task_status: anyio.abc.TaskStatus[_Opened]) -> None:
        # A context manager with a task group must be exited in the task that entered it.
        async with tool.open() as run:
            opened = _Opened(run)
            task_status.started(opened)
            await opened.closing.wait()  # no deadline: ends with the trajectory, which has one


def string_arguments(
    arguments: Arguments, *, required: Collection[str], optional: Collection[str] = ()
) -> dict[str, str]:
    """Return the arguments of a call, all of which are strings.

    Raises:
        BadArguments: one is missing, unknown or no string.
    """
    problems = [f"{name}: missing" for name in required if name not in arguments]
    texts: dict[str, str] = {}
    for name, value in arguments.items():
        if name not in (*required, *optional):
            problems.append(f"{name}: unknown")
        elif isinstance(value, str):
            texts[name] = value
        else:
            problems.append(f"{name}: a string is expected")
    if problems:
        raise BadArguments("; ".join(problems))
    return texts


def _type_of(error: BaseException) -> str:
    """Return the type of an error as a traceback names it."""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    return module + kind.__qualname__


def _as_error(error: BaseException) -> str:
    text = message_of(error)
    return f"[error] {type(error).__name__}{': ' * bool(text)}{text}"


def import_schema_parser() -> None:
    """Import what `as_tool` needs for a function; the first time takes a second."""
    _schema_parser().get_json_schema(_example)


@functools.cache
def _schema_parser() -> ModuleType:
    """Return the module of transformers that reads signatures and docstrings.

    It would import torch, which takes seconds and some 200 MiB, only to recognize an argument that
    is a torch.Tensor. Who defined such a function has imported torch.
    """
    quiet_about_torch()
    parser = importlib.import_module("transformers.utils.chat_template_utils")
    vars(parser)["is_torch_available"] = lambda: "torch" in sys.modules
    return parser


def _example(number: int) -> None:
    """Do nothing.

    Args:
        number: a number.
    """


def _schema(function: ToolFunction) -> Schema:
    parser = _schema_parser()
    name = getattr(function, "__name__", None)
    if not isinstance(name, str):
        raise RequestError(f"tools: {function!r} has no name: wrap it in a function")
    try:
        schema: Schema = parser.get_json_schema(_with_described_arguments(function))
    except (
        parser.DocstringParsingException, parser.TypeHintParsingException, NameError
    ) as error:  # fmt: skip
        raise RequestError(f"tools: {name} cannot become a tool: {error}") from error
    return schema


def _with_described_arguments(function: ToolFunction) -> ToolFunction:
    """Describe the arguments of a function with a one-line docstring by their names."""
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
        # Use aliases: pydantic rejects fields named `_x` and warns about `json` and `copy`.
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


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return dumps(value, default=None).decode()
    except (TypeError, ValueError):  # not serializable as JSON
        return str(value)
