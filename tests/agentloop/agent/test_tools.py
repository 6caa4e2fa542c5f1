"""Functions as tools, and the tools of one trajectory."""

from __future__ import annotations

import asyncio
import functools
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentloop
from agentloop.agent.tools import (
    CallerTool,
    FunctionTool,
    Reopen,
    RunTool,
    ToolOutput,
    Tools,
    as_tool,
)
from agentloop.errors import RequestError
from agentloop.trajectory import ToolCallStatus
from tests.commands import run_python
from tests.fakes import Unprintable
from tests.patience import patient
from tests.support import eventually


def multiply(a: int, b: int = 2) -> int:
    """Multiply two integers."""
    return a * b


async def greet(name: str, *, loud: bool = False) -> str:
    """
    Greet somebody.

    Args:
        name: The person to greet.
        loud: Whether to shout.
    """
    await anyio.lowlevel.checkpoint()
    return f"HELLO {name}" if loud else f"hello {name}"


async def call(function: Callable[..., Any], /, **arguments: Any) -> ToolOutput:
    async with Tools([function]) as tools:
        return await tools.run(function.__name__, arguments)


def test_one_line_docstring_is_enough_for_a_schema() -> None:
    schema = as_tool(multiply).schema
    assert schema["function"]["name"] == "multiply"
    assert schema["function"]["description"] == "Multiply two integers."
    parameters = schema["function"]["parameters"]
    assert parameters["properties"]["a"]["type"] == "integer"
    assert parameters["required"] == ["a"]
    assert multiply.__doc__ == "Multiply two integers."  # left as it was


def test_google_docstring_describes_the_arguments() -> None:
    properties = as_tool(greet).schema["function"]["parameters"]["properties"]
    assert properties["name"]["description"] == "The person to greet."
    assert properties["loud"]["type"] == "boolean"


def without_docstring(a: int) -> int:
    return a


def without_types(a) -> int:  # type: ignore[no-untyped-def]
    """Take anything."""
    return 0


def with_unknown_type(a: Nowhere) -> int:  # type: ignore[name-defined]  # noqa: F821
    """Take what does not exist."""
    return 0


def splat(*args: int) -> int:
    """Take many."""
    return 0


@pytest.mark.parametrize(
    "function",
    [
        without_docstring,
        without_types,
        with_unknown_type,
        splat,
        functools.partial(multiply, 3),
        lambda: 0,
        print,
        3,
        "python",
    ],
)
def test_unsuitable_functions_are_rejected(function: Any) -> None:
    with pytest.raises(RequestError, match="tools: "):
        as_tool(function)


def test_duplicate_tool_names_are_rejected() -> None:
    with pytest.raises(RequestError, match="two are named 'multiply'"):
        Tools([multiply, FunctionTool(multiply)])


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({}, "each must be"),
        ({"type": "function"}, "each must be"),
        ({"type": "function", "function": {}}, "function.name is missing"),
        ({"type": "function", "function": {"name": 3}}, "function.name is missing"),
    ],
)
def test_invalid_schema_is_rejected(schema: dict[str, Any], error: str) -> None:
    with pytest.raises(RequestError, match=error):
        CallerTool(schema)


async def test_sync_and_async_functions_answer() -> None:
    assert (await call(multiply, a=37, b=48)).content == "1776"
    output = await call(greet, name="you", loud=True)
    assert (output.status, output.content) == (ToolCallStatus.OK, "HELLO you")
    assert output.started_s is not None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        ({"a": [1, None]}, '{"a":[1,null]}'),
        (None, "null"),
        (2**70, str(2**70)),
        ({"a": 2**70, "b": {1: 0.5}}, '{"a":1180591620717411303424,"b":{"1":0.5}}'),
        ({1, 2}, "{1, 2}"),
        ([2**70, {1}], "[1180591620717411303424, {1}]"),
    ],
)
async def test_values_become_text(value: Any, text: str) -> None:
    def give() -> Any:
        """Give a value."""
        return value

    assert (await call(give)).content == text


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "a: Field required"),
        ({"a": "many"}, "a: Input should be a valid integer"),
        ({"a": 1, "c": 3}, "c: Extra inputs"),
        ({"a": 1, "argument_0": 3}, "argument_0: Extra inputs"),
    ],
)
async def test_model_is_told_about_bad_arguments(arguments: dict[str, Any], error: str) -> None:
    output = await call(multiply, **arguments)
    assert output.status is ToolCallStatus.BAD_ARGUMENTS
    assert error in output.content


async def test_parameters_may_have_any_name() -> None:
    def store(json: str, copy: int, model_config: bool, schema: str = "s", _hidden: int = 1) -> str:
        """Store things whose names pydantic uses itself."""
        return f"{json} {copy} {model_config} {schema} {_hidden}"

    arguments = {"json": "j", "copy": 1, "model_config": True, "_hidden": 5}
    assert (await call(store, **arguments)).content == "j 1 True s 5"
    wrong = await call(store, **{**arguments, "copy": "x"})
    assert "copy: " in wrong.content


async def test_model_reads_a_tools_exception() -> None:
    def bad() -> None:
        """Raise."""
        raise ValueError("no such thing")

    async def worse() -> None:
        """Raise too."""
        raise TimeoutError

    output = await call(bad)
    assert (output.status, output.content) == (
        ToolCallStatus.ERROR,
        "[error] ValueError: no such thing",
    )
    assert (await call(worse)).status is ToolCallStatus.ERROR


async def test_tool_that_hangs_is_stopped() -> None:
    cancelled = anyio.Event()

    async def hang() -> None:
        """Hang."""
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.set()

    async with Tools([FunctionTool(hang, timeout_s=0.01)]) as tools:
        output = await tools.run("hang", {})
    assert output.status is ToolCallStatus.TIMEOUT
    assert cancelled.is_set()


async def test_hanging_thread_is_abandoned_and_keeps_counting() -> None:
    release = threading.Event()

    def hang() -> str:
        """Hang in a thread."""
        release.wait(patient(10))
        return "late"

    try:
        async with Tools([FunctionTool(hang, timeout_s=0.01)]) as tools:
            assert (await tools.run("hang", {})).status is ToolCallStatus.TIMEOUT
    finally:
        release.set()


async def test_unknown_tool_gets_the_list_of_tools() -> None:
    async with Tools([multiply, greet]) as tools:
        output = await tools.run("nope", {})
    assert output.status is ToolCallStatus.UNKNOWN_TOOL
    assert "the tools are: multiply, greet" in output.content


async def test_caller_with_tools_gets_calls_of_unknown_tools() -> None:
    """The caller may know what the model meant, or report the error in its own way."""
    theirs = CallerTool({"type": "function", "function": {"name": "theirs"}})
    async with Tools([theirs]) as tools:
        assert (await tools.run("their", {})).status is ToolCallStatus.CALLER
    async with Tools([theirs, multiply]) as tools:
        assert (await tools.run("their", {})).status is ToolCallStatus.UNKNOWN_TOOL
    async with Tools([]) as tools:
        assert (await tools.run("their", {})).status is ToolCallStatus.UNKNOWN_TOOL


def test_abandoned_threads_do_not_count_in_another_event_loop() -> None:
    started: list[threading.Thread] = []
    release = threading.Event()

    def hang() -> None:
        """Hang in a thread."""
        started.append(threading.current_thread())
        release.wait(patient(10))

    async def fill(count: int) -> None:
        tool = FunctionTool(hang)
        tool.MAX_THREADS = 1
        async with Tools([tool]) as tools, anyio.create_task_group() as tasks:
            tasks.start_soon(tools.run, "hang", {})
            await eventually(lambda: len(started) == count)
            tasks.cancel_scope.cancel()

    for count in range(1, 6):
        release.clear()
        anyio.run(fill, count)
        release.set()
        started[-1].join(patient(10))
        gc.collect()  # so that the next loop may have this one's address


class Stateful:
    """A tool that counts its openings; `hang_at` names an await that never ends."""

    name = "stateful"
    schema: Mapping[str, Any] = {"type": "function", "function": {"name": name}}

    def __init__(self, hang_at: str = "", lose_after: int | None = None) -> None:
        self.hang_at = hang_at
        self.lose_after = lose_after
        self.num_opened = 0
        self.num_open = 0
        self.running = 0
        self.most_open = 0
        self.at = anyio.Event()

    async def _maybe(self, point: str) -> None:
        if point == self.hang_at:
            self.at.set()
            await anyio.sleep_forever()
        await anyio.lowlevel.checkpoint()

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        await self._maybe("open")
        self.num_opened += 1
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        count = 0

        async def run(arguments: Mapping[str, Any], /) -> ToolOutput:
            nonlocal count
            if self.lose_after is not None and count >= self.lose_after:
                raise Reopen
            count += 1
            self.running += 1
            try:
                await self._maybe("run")
            finally:
                self.running -= 1
            return ToolOutput(ToolCallStatus.OK, f"{self.num_opened}.{count}")

        try:
            yield run
        finally:
            self.num_open -= 1


async def test_state_lasts_for_the_trajectory_and_ends_with_it() -> None:
    tool = Stateful()
    async with Tools([tool]) as tools:
        assert tool.num_opened == 0  # not before it is called
        assert (await tools.run("stateful", {})).content == "1.1"
        assert (await tools.run("stateful", {})).content == "1.2"
        assert tool.num_open == 1
    assert tool.num_open == 0


async def test_two_first_calls_at_once_open_once() -> None:
    tool = Stateful()
    async with Tools([tool]) as tools, anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(tools.run, "stateful", {})
    assert tool.num_opened == 1


async def test_lost_state_is_closed_and_opened_anew() -> None:
    tool = Stateful(lose_after=1)
    async with Tools([tool]) as tools:
        outputs = [(await tools.run("stateful", {})).content for _ in range(4)]
        assert outputs == ["1.1", "2.1", "3.1", "4.1"]
        await anyio.wait_all_tasks_blocked()
        assert tool.num_open == 1  # a state that is lost holds nothing for the rest of it
    assert tool.num_open == 0


@pytest.mark.parametrize("point", ["open", "run"])
async def test_cancellation_at_any_point_leaves_nothing_behind(point: str) -> None:
    tool = Stateful(hang_at=point)
    with anyio.CancelScope() as scope:
        async with Tools([tool]) as tools, anyio.create_task_group() as tasks:
            tasks.start_soon(tools.run, "stateful", {})
            await tool.at.wait()
            scope.cancel()
    assert scope.cancelled_caught
    assert (tool.num_open, tool.running) == (0, 0)


@pytest.mark.parametrize("point", ["open", "run"])
async def test_after_a_cancelled_call_the_next_can_run(point: str) -> None:
    tool = Stateful(hang_at=point)
    async with Tools([tool]) as tools:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(tools.run, "stateful", {})
            await tool.at.wait()
            tasks.cancel_scope.cancel()
        tool.hang_at = ""
        assert (await tools.run("stateful", {})).status is ToolCallStatus.OK
    assert (tool.num_open, tool.running) == (0, 0)


async def test_caller_tool_runs_nothing() -> None:
    tool = CallerTool({"type": "function", "function": {"name": "theirs"}})
    async with Tools([tool]) as tools:
        assert (await tools.run("theirs", {"any": "thing"})).status is ToolCallStatus.CALLER


async def raises_unprintable() -> None:
    """Raise what cannot be told."""
    raise Unprintable


def returns_unprintable() -> Any:
    """Return what cannot be told."""
    return Unprintable()


async def cancels_itself() -> None:
    """Raise what only a caller should."""
    raise asyncio.CancelledError


async def exits() -> None:
    """Leave."""
    raise SystemExit(3)


@pytest.mark.parametrize(
    "function", [raises_unprintable, returns_unprintable, cancels_itself, exits]
)
async def test_model_reads_any_failure_of_a_tool_as_an_error(function: Callable[..., Any]) -> None:
    output = await call(function)
    assert output.status is ToolCallStatus.ERROR
    assert output.content.startswith("[error] ")


async def test_async_function_in_a_plain_wrapper_is_awaited() -> None:
    @functools.wraps(greet)
    def greet_wrapper(name: str, *, loud: bool = False) -> Any:
        return greet(name, loud=loud)

    assert (await call(greet_wrapper, name="you")).content == (
        await call(greet, name="you")
    ).content


def yields() -> Any:
    """Yield."""
    yield 1


async def yields_later() -> Any:
    """Yield."""
    yield 1


@pytest.mark.parametrize("function", [yields, yields_later])
def test_generator_is_not_a_tool(function: Any) -> None:
    with pytest.raises(RequestError, match="yields"):
        Tools([function])


class Ledger:
    """Tools that share a state and give way in the middle of their work."""

    def __init__(self) -> None:
        self.total, self.running, self.most_running = 0, 0, 0

    async def add(self, number: int) -> int:
        """Add a number and return the total."""
        before = self.total
        await self._give_way(number)
        self.total = before + number
        return self.total

    async def double(self, number: int) -> int:
        """Double the total, and add a number."""
        before = self.total
        await self._give_way(number)
        self.total = 2 * before + number
        return self.total

    @agentloop.concurrent
    async def square(self, number: int) -> int:
        """Square a number."""
        await self._give_way(number)
        return number**2

    async def _give_way(self, times: int) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        for _ in range(times):
            await anyio.lowlevel.checkpoint()
        self.running -= 1


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(["add", "double", "square"]), st.integers(0, 9))))
def test_concurrent_calls_give_the_results_of_sequential_ones(calls: list[tuple[str, int]]) -> None:
    async def results(*, at_once: bool) -> tuple[list[str], int]:
        ledger, outputs = Ledger(), dict[int, str]()
        async with Tools([ledger.add, ledger.double, ledger.square]) as tools:

            async def run(index: int, name: str, number: int) -> None:
                outputs[index] = (await tools.run(name, {"number": number})).content

            for index, (name, number) in enumerate(calls):
                async with anyio.create_task_group() as tasks:
                    if not at_once:
                        tasks.start_soon(run, index, name, number)
            async with anyio.create_task_group() as tasks:
                for index, (name, number) in enumerate(calls):
                    if at_once:
                        tasks.start_soon(run, index, name, number)
        return [outputs[index] for index in range(len(calls))], ledger.most_running

    runs = [anyio.run(partial(results, at_once=at_once)) for at_once in (False, True)]
    assert runs[0][0] == runs[1][0]


async def test_method_that_is_declared_concurrent_runs_beside_others() -> None:
    ledger = Ledger()
    async with Tools([ledger.square]) as tools, anyio.create_task_group() as tasks:
        for number in (5, 6, 7):
            arguments: dict[str, object] = {"number": number}
            tasks.start_soon(tools.run, "square", arguments)
    assert ledger.most_running == 3


async def test_tool_below_which_the_infrastructure_fails_says_so() -> None:
    async def judge(text: str) -> str:
        """Judge a text."""
        raise agentloop.InfrastructureFailed("the judge does not respond")

    async with Tools([judge]) as tools:
        output = await tools.run("judge", {"text": "x"})
    assert output.status is ToolCallStatus.INFRASTRUCTURE


@pytest.mark.timeout(120)
@pytest.mark.full
def test_first_function_imports_nothing_slow_once_the_parser_is_imported() -> None:
    program = (
        "import sys\n"
        "from agentloop.agent.tools import as_tool, import_schema_parser\n"
        "import transformers.utils.chat_template_utils as parser\n"
        "parser.is_torch_available = lambda: True\n"  # as where it is installed
        "import_schema_parser()\n"
        "before = set(sys.modules)\n"
        "def add(a: int, b: list[str] | None = None) -> str:\n"
        "    '''Add.\\n\\n    Args:\\n        a: one.\\n        b: others.\\n    '''\n"
        "as_tool(add)\n"
        "late = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(late & {'transformers'} or 'torch' in sys.modules)\n"
    )
    done = run_python("-c", program)
    assert done.stdout.strip() == "False"


def test_tensor_is_known_to_who_has_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tensor:
        pass

    def hear(sound: Any) -> str:
        """Listen.

        Args:
            sound: the sound to listen for.
        """
        return ""

    hear.__annotations__["sound"] = Tensor

    def is_audio() -> bool:
        try:
            schema = as_tool(hear).schema
        except RequestError:  # as newer versions of transformers have it, for unknown classes
            return False
        return bool(schema["function"]["parameters"]["properties"]["sound"]["type"] == "audio")

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not is_audio()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Tensor))
    assert is_audio()
