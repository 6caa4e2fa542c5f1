"""The rollouts of a group, as far as their conversations begin alike."""

from __future__ import annotations

from collections.abc import Sequence

from agentloop.agent.tools import Tool, ToolFunction
from agentloop.trajectory import Message

__all__ = ["Siblings", "names_of"]


class Siblings:
    """Tells which rollouts of a group begin with the same prompt, and so share KV cache.

    Attributes:
        prompt_ids: the token ids of the first conversation's prompt, if they are known.
    """

    def __init__(self, group: str, prompt_ids: list[int] | None = None) -> None:
        self._group = group
        self._first: object = None
        self.prompt_ids = prompt_ids

    def group_of(
        self, messages: Sequence[Message], tools: Sequence[Tool | ToolFunction | str]
    ) -> str:
        """Return the group's name if a conversation begins like the first one, otherwise ""."""
        names = names_of(tools)
        if self._first is None:
            self._first = messages, names
        return self._group if self._first == (messages, names) else ""


def names_of(tools: Sequence[Tool | ToolFunction | str]) -> list[str]:
    """Return the names of tools, as an environment gives them."""
    return [str(getattr(tool, "name", getattr(tool, "__name__", tool))) for tool in tools]
