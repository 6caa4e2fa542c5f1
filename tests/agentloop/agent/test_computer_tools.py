"""The tools of a computer, with one that only remembers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from agentloop.agent.computer_tools import Bash, EditFile
from agentloop.agent.tools import Tools
from agentloop.sandbox import CallStatus, CommandResult, ComputerLost
from agentloop.trajectory import ToolCallStatus

pytestmark = pytest.mark.anyio

RESULT = CommandResult(CallStatus.OK, 0, "out\n", "", 4, 0, False, False, 0.1)


class FakeComputer:
    def __init__(self, result: CommandResult | Exception = RESULT, **files: bytes) -> None:
        self.result, self.files = result, files

    async def run(self, command: str, **options: Any) -> CommandResult:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    async def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(2, "No such file or directory", path)
        return self.files[path]

    async def write(self, path: str, data: bytes) -> None:
        self.files[path] = data


async def call(box: Any, name: str, **arguments: Any) -> tuple[ToolCallStatus, str]:
    async with Tools([Bash(box), EditFile(box)]) as tools:
        output = await tools.run(name, arguments)
    return output.status, output.content


@pytest.mark.parametrize(
    ("changes", "status", "text"),
    [
        ({}, ToolCallStatus.OK, "out"),
        ({"stdout": ""}, ToolCallStatus.OK, "[no output]"),
        ({"stdout": "x" * 20_000}, ToolCallStatus.OK, "12000 characters omitted"),
        (
            {"status": CallStatus.ERROR, "exit_status": 3, "stderr": "bad"},
            ToolCallStatus.ERROR,
            "out\nbad\n[exit status 3]",
        ),
        ({"status": CallStatus.TIMEOUT}, ToolCallStatus.TIMEOUT, "stopped after 60 s"),
        ({"shell_ended": True}, ToolCallStatus.OK, "the next command starts a new one"),
    ],
)
async def test_what_a_model_reads_of_a_command(
    changes: dict[str, Any], status: ToolCallStatus, text: str
) -> None:
    got, content = await call(FakeComputer(replace(RESULT, **changes)), "bash", command="x")
    assert got is status
    assert text in content


async def test_lost_computer_is_infrastructure() -> None:
    status, _ = await call(FakeComputer(ComputerLost("gone")), "bash", command="x")
    assert status is ToolCallStatus.INFRASTRUCTURE


async def test_edit_replaces_what_occurs_once() -> None:
    box = FakeComputer(a=b"one two two")
    for old, new in (("two", "x"), ("three", "x")):
        status, text = await call(box, "edit_file", path="a", old=old, new=new)
        assert status is ToolCallStatus.ERROR
        assert "nothing was changed" in text
    assert (await call(box, "edit_file", path="a", old="one", new="1"))[0] is ToolCallStatus.OK
    assert (await call(box, "edit_file", path="b", old="", new="é"))[0] is ToolCallStatus.OK
    assert box.files == {"a": b"1 two two", "b": "é".encode()}


@pytest.mark.parametrize(
    "arguments", [{}, {"command": 1}, {"command": "x", "more": "y"}, {"comand": "x"}]
)
async def test_wrong_arguments_are_named(arguments: dict[str, Any]) -> None:
    status, text = await call(FakeComputer(), "bash", **arguments)
    assert status is ToolCallStatus.BAD_ARGUMENTS
    assert "command" in text or "more" in text


async def test_missing_file_is_the_models_to_read() -> None:
    status, text = await call(FakeComputer(), "edit_file", path="none", old="a", new="b")
    assert status is ToolCallStatus.ERROR
    assert "No such file" in text
