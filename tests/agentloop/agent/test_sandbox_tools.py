"""The built-in tools over a fake sandbox: responses for the model and attribution of failures."""

from __future__ import annotations

from typing import Any, cast

import anyio
import pytest

from agentloop.agent.sandbox_tools import JupyterCode, PythonCode
from agentloop.agent.tool_formats import describe
from agentloop.agent.tools import Tools
from agentloop.sandbox import CallError, CallResult, LostBy, Overloaded, Pool, SessionLost
from agentloop.sandbox import CallStatus as SandboxStatus
from agentloop.sandbox.settings import MAX_CODE_BYTES
from agentloop.trajectory import ToolCallStatus
from tests.fakes import FakePool


def result(status: SandboxStatus = SandboxStatus.OK, **fields: Any) -> CallResult:
    return CallResult(id=1, status=status, **fields)


def pool(fake: FakePool) -> Pool:
    return cast(Pool, fake)


async def test_program_gets_its_input_and_its_deadline() -> None:
    fake = FakePool(result(stdout="1776\n"))
    async with Tools([PythonCode(pool(fake), timeout_s=2.5)]) as tools:
        output = await tools.run(PythonCode.name, {"code": "print(1)", "input": "x"})
    assert (output.status, output.content) == (ToolCallStatus.OK, "1776")
    assert fake.asked == [("print(1)", "x", 2.5)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "code: missing"),
        ({"code": 3}, "code: a string is expected"),
        ({"code": "", "input": None}, "input: a string is expected"),
        ({"code": "", "cmd": ""}, "cmd: unknown"),
        (
            {"code": "\u00e9" * (MAX_CODE_BYTES // 2 + 1)},
            f"code: longer than {MAX_CODE_BYTES} bytes",
        ),
    ],
)
async def test_bad_arguments_never_reach_the_sandbox(arguments: dict[str, Any], error: str) -> None:
    fake = FakePool()
    async with Tools([PythonCode(pool(fake)), JupyterCode(pool(fake))]) as tools:
        for name in (PythonCode.name, JupyterCode.name):
            output = await tools.run(name, arguments)
            assert output.status is ToolCallStatus.BAD_ARGUMENTS
            assert error in output.content or name == JupyterCode.name
    assert fake.asked == []


@pytest.mark.parametrize(
    ("call_result", "status", "text"),
    [
        (result(), ToolCallStatus.OK, "(no output)"),
        (result(stdout="a\n", result="3"), ToolCallStatus.OK, "a\n3"),
        (result(SandboxStatus.ERROR, stderr="boom\n", exit_code=3), ToolCallStatus.ERROR,
         "[stderr]\nboom\n[error] exit code 3"),
        (result(SandboxStatus.ERROR, error=CallError("ValueError", "no", line=4)),
         ToolCallStatus.ERROR, "[error] ValueError: no (line 4)"),
        (result(SandboxStatus.TIMEOUT, run_s=4.0), ToolCallStatus.TIMEOUT,
         "[timeout] stopped after 4 s"),
        (result(SandboxStatus.OOM), ToolCallStatus.OOM, "[out of memory]"),
        (result(SandboxStatus.KILLED, signal=9), ToolCallStatus.KILLED, "[killed] by signal 9"),
    ],
)  # fmt: skip
async def test_results_of_programs_as_the_model_reads_them(
    call_result: CallResult, status: ToolCallStatus, text: str
) -> None:
    assert describe(call_result) == text
    async with Tools([PythonCode(pool(FakePool(call_result)))]) as tools:
        output = await tools.run(PythonCode.name, {"code": ""})
    assert (output.status, output.content) == (status, text)


@pytest.mark.parametrize("status", [s for s in SandboxStatus if s.is_unscorable])
async def test_sandbox_failures_are_infrastructure_failures(status: SandboxStatus) -> None:
    call_result = CallResult.failed(1, status, "worker 7 was lost")
    async with Tools([PythonCode(pool(FakePool(call_result)))]) as tools:
        output = await tools.run(PythonCode.name, {"code": ""})
    assert output.status is ToolCallStatus.INFRASTRUCTURE
    assert "worker 7 was lost" in output.content


async def test_cells_share_a_session_that_ends_with_the_trajectory() -> None:
    fake = FakePool(result(), result())
    arguments: dict[str, object] = {"code": "x"}
    async with Tools([JupyterCode(pool(fake))]) as tools, anyio.create_task_group() as tasks:
        for _ in range(2):
            tasks.start_soon(tools.run, JupyterCode.name, arguments)
    assert (fake.num_sessions, fake.num_open, fake.max_running) == (1, 0, 1)


async def test_notebook_killed_by_the_model_is_restarted_with_a_note() -> None:
    fake = FakePool(result(SandboxStatus.OOM), result(result="1"))
    async with Tools([JupyterCode(pool(fake))]) as tools:
        first = await tools.run(JupyterCode.name, {"code": "x"})
        second = await tools.run(JupyterCode.name, {"code": "x"})
        await anyio.wait_all_tasks_blocked()
        assert fake.num_open == 1  # the dead session's seat is for others
    assert "variables are gone" in first.content
    assert (second.status, second.content) == (ToolCallStatus.OK, "1")
    assert (fake.num_sessions, fake.num_open) == (2, 0)


async def test_cell_that_ends_its_process_leaves_a_note() -> None:
    fake = FakePool(result(stdout="a\n"), result(result="1"))
    async with Tools([JupyterCode(pool(fake))]) as tools:
        first = await tools.run(JupyterCode.name, {"code": "os._exit(0)"})
        second = await tools.run(JupyterCode.name, {"code": "x"})
    assert first.status is ToolCallStatus.OK
    assert "variables are gone" in first.content
    assert (second.status, second.content) == (ToolCallStatus.OK, "1")
    assert fake.num_sessions == 2


async def test_process_that_ended_itself_is_no_infrastructure_failure() -> None:
    """Otherwise a model could discard a rollout that goes wrong."""
    fake = FakePool(SessionLost("it ended", LostBy.PROGRAM), result(result="1"))
    async with Tools([JupyterCode(pool(fake))]) as tools:
        first = await tools.run(JupyterCode.name, {"code": "x"})
        second = await tools.run(JupyterCode.name, {"code": "x"})
    assert first.status is ToolCallStatus.ERROR
    assert "did not run" in first.content
    assert "variables are gone" in first.content
    assert (second.status, second.content) == (ToolCallStatus.OK, "1")
    assert fake.num_sessions == 2


@pytest.mark.parametrize("by", [LostBy.INFRASTRUCTURE, LostBy.CALLER])
async def test_notebook_lost_by_the_sandbox_is_an_infrastructure_failure(by: LostBy) -> None:
    fake = FakePool(SessionLost("worker died", by))
    async with Tools([JupyterCode(pool(fake))]) as tools:
        output = await tools.run(JupyterCode.name, {"code": "x"})
    assert output.status is ToolCallStatus.INFRASTRUCTURE


async def test_no_free_session_for_a_notebook_is_an_infrastructure_failure() -> None:
    async with Tools([JupyterCode(pool(FakePool(no_session=Overloaded("no seat"))))]) as tools:
        output = await tools.run(JupyterCode.name, {"code": "x"})
    assert output.status is ToolCallStatus.INFRASTRUCTURE
    assert "no seat" in output.content


async def test_cancelled_cell_leaves_no_session() -> None:
    fake = FakePool()
    arguments: dict[str, object] = {"code": "hang"}
    with anyio.CancelScope() as scope:
        async with Tools([JupyterCode(pool(fake))]) as tools, anyio.create_task_group() as tasks:
            tasks.start_soon(tools.run, JupyterCode.name, arguments)
            await anyio.wait_all_tasks_blocked()
            scope.cancel()
    assert (fake.num_sessions, fake.num_open, fake.num_running) == (1, 0, 0)
