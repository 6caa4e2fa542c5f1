"""Tools that work in a computer of the sandbox, which keeps its state from call to call.

    async with agent.sandbox.computer("my-image") as box:
        await agent.run(task.question, tools=[Bash(box), EditFile(box)])

Whoever opens the computer closes it. So it is there when the agent has gone, for its files to be
judged.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import ClassVar, Protocol

from agentloop.agent.tool_formats import bad_arguments
from agentloop.agent.tools import (
    Arguments,
    BadArguments,
    RunTool,
    Schema,
    ToolOutput,
    string_arguments,
)
from agentloop.errors import InfrastructureFailed
from agentloop.sandbox import CommandResult, ComputerLost
from agentloop.trajectory import ToolCallStatus

__all__ = ["Bash", "Box", "EditFile"]

SHOWN_CHARS = 16_000


class Box(Protocol):
    """The methods of a computer that the tools use; something smaller may have them as well."""

    async def run(self, command: str, /, *, timeout_s: float) -> CommandResult: ...

    async def read(self, path: str, /) -> bytes: ...

    async def write(self, path: str, data: bytes, /) -> None: ...


class _ComputerTool(ABC):
    """A tool whose arguments are strings.

    Attributes:
        state: the computer, whose calls of a turn run in their order.
    """

    name: ClassVar[str]
    description: ClassVar[str]
    parameters: ClassVar[dict[str, str]]

    def __init__(self, box: Box) -> None:
        self.state = box
        properties = {
            name: {"type": "string", "description": text} for name, text in self.parameters.items()
        }
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": {
                "type": "object",
                "properties": properties,
                "required": list(self.parameters),
            },
        }
        self.schema: Schema = {"type": "function", "function": function}

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        yield self._checked

    async def _checked(self, arguments: Arguments, /) -> ToolOutput:
        try:
            return await self._run(**string_arguments(arguments, required=self.parameters))
        except BadArguments as error:
            return ToolOutput(ToolCallStatus.BAD_ARGUMENTS, bad_arguments(str(error)))
        except (ComputerLost, InfrastructureFailed) as error:
            return ToolOutput(ToolCallStatus.INFRASTRUCTURE, str(error))
        except (OSError, ValueError) as error:
            return ToolOutput(ToolCallStatus.ERROR, f"[error] {error}")

    @abstractmethod
    async def _run(self, **arguments: str) -> ToolOutput:
        """Run a call whose arguments are strings, of known names."""


class Bash(_ComputerTool):
    """The tool `bash`: runs a command in the computer's first shell."""

    name = "bash"
    description = (
        "Run a command in a bash shell. The shell keeps its directory and variables from call to "
        "call. There is no terminal and no input. Start what runs on with &."
    )
    parameters: ClassVar = {"command": "The command, of any number of lines."}

    def __init__(self, box: Box, *, timeout_s: float = 60.0, max_chars: int = SHOWN_CHARS) -> None:
        super().__init__(box)
        self._timeout_s, self._max_chars = timeout_s, max_chars

    async def _run(self, **arguments: str) -> ToolOutput:
        result = await self.state.run(arguments["command"], timeout_s=self._timeout_s)
        text = describe_command(result, self._timeout_s, self._max_chars)
        return ToolOutput(ToolCallStatus(result.status.value), text)


def describe_command(result: CommandResult, timeout_s: float, max_chars: int) -> str:
    """Return the text that a model reads of a command: its output, and how it ended."""
    parts = [
        _shorten(stream.strip("\n"), max_chars // 2) for stream in (result.stdout, result.stderr)
    ]
    match result.status:
        case "ok":
            end = "" if any(parts) else "[no output]"
        case "timeout":
            end = f"[timeout] it was stopped after {timeout_s:g} s; what is in the background runs"
        case "output_limit":
            end = "[output limit] it was stopped, since it wrote too much"
        case "oom":
            end = "[out of memory] a process was killed"
        case _:
            end = f"[exit status {result.exit_status}]"
    if result.shell_ended:
        end += "\n[note] the shell has ended; the next command starts a new one"
    return "\n".join(part for part in (*parts, end.strip("\n")) if part)


def _shorten(text: str, max_chars: int) -> str:
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters omitted]\n{text[-half:]}"


class EditFile(_ComputerTool):
    """The tool `edit_file`: replaces text of a file, or writes a new file."""

    name = "edit_file"
    description = (
        "Replace text in a file. The old text must occur exactly once. If it is empty, the file is "
        "written anew."
    )
    parameters: ClassVar = {
        "path": "The file's path, absolute or from the first directory.",
        "old": "The text to replace, with enough around it to be the only one.",
        "new": "The text to put in its place.",
    }

    async def _run(self, **arguments: str) -> ToolOutput:
        path, old, new = (arguments[name] for name in self.parameters)
        if not old:
            text = new
        else:
            # no deadline: each chunk has one
            before = (await self.state.read(path)).decode("utf-8", "surrogateescape")
            if (num := before.count(old)) != 1:
                found = f"occurs {num} times" if num else "does not occur"
                text = f"[error] the old text {found} in {path}: nothing was changed"
                return ToolOutput(ToolCallStatus.ERROR, text)
            text = before.replace(old, new)
        # no deadline: each chunk has one
        await self.state.write(path, text.encode("utf-8", "surrogateescape"))
        return ToolOutput(ToolCallStatus.OK, f"{path} was written")
