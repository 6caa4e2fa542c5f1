"""A tool that keeps state for the length of one rollout: a notepad.

The small model does not know this tool. Name a model that can use new tools:

    AGENTLOOP_MODEL=models/Qwen3-0.6B python examples/stateful_tool.py
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import ClassVar

import anyio

import agentloop
from agentloop.agent.tools import RunTool, Schema, ToolOutput


class Notepad:
    """Notes that the model writes, and reads back in later turns."""

    name = "note"
    schema: ClassVar[Schema] = {
        "type": "function",
        "function": {
            "name": name,
            "description": "Write a line on the notepad; returns all of its lines.",
            "parameters": {
                "type": "object",
                "properties": {"line": {"type": "string"}},
                "required": ["line"],
            },
        },
    }

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        """Entered at the first call of a rollout, left at its end."""
        lines: list[str] = []

        async def run(arguments: Mapping[str, object], /) -> ToolOutput:
            line = arguments.get("line")
            if not isinstance(line, str):
                text = "[bad arguments] line: a string is expected"
                return ToolOutput(agentloop.ToolCallStatus.BAD_ARGUMENTS, text)
            lines.append(line)
            return ToolOutput(agentloop.ToolCallStatus.OK, "\n".join(lines))

        yield run


async def main() -> None:
    question = "Note the numbers 3 and 4, then tell me their sum."
    async with agentloop.Runtime(progress=print) as runtime:
        trajectory = await runtime.rollout(question, tools=[Notepad()])
        print([result.content for result in trajectory.results], trajectory.answer)


if __name__ == "__main__":
    anyio.run(main)
