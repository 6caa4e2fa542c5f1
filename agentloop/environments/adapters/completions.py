"""Completions of the model for a library that drives the rollout itself.

Each completion is a conversation of its own: its prompt is rendered from the library's messages,
and its sampled ids are recorded and trained on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from agentloop.agent.tools import CallerTool, Schema
from agentloop.environments.agent import Agent
from agentloop.trajectory import Message, StopReason, ToolCall

__all__ = ["Completion", "complete", "openai_call"]


@dataclass(frozen=True, slots=True)
class Completion:
    """A message of the model.

    Attributes:
        calls: tool calls, for the library to run.
        finish_reason: the same value as in OpenAI's API.
    """

    text: str
    calls: Sequence[ToolCall] = ()
    finish_reason: Literal["stop", "length", "tool_calls"] = "stop"
    num_prompt_tokens: int = 0
    num_sampled_tokens: int = 0

    def usage(self, prompt: str = "prompt", sampled: str = "completion") -> dict[str, int]:
        """Return the numbers of tokens by these names."""
        num_prompt, num_sampled = self.num_prompt_tokens, self.num_sampled_tokens
        return {
            f"{prompt}_tokens": num_prompt,
            f"{sampled}_tokens": num_sampled,
            "total_tokens": num_prompt + num_sampled,
        }


def openai_call(id: str, name: str, arguments: Mapping[str, object]) -> dict[str, object]:
    """Return a tool call in OpenAI's form."""
    return {
        "id": id,
        "type": "function",
        "function": {"name": name, "arguments": json.dumps(arguments)},
    }


async def complete(
    agent: Agent,
    messages: Sequence[Message],
    tools: Sequence[Schema] = (),
    *,
    max_tokens: int | None = None,
) -> Completion:
    """Return the model's next message.

    Args:
        messages: a conversation as OpenAI messages.
        tools: schemas of tools in OpenAI's form, which the library runs.

    Raises:
        InfrastructureFailed: the infrastructure failed.
        PromptTooLong: no token of an answer fits after the messages.
        RequestError: a message or a tool is invalid.
    """
    trajectory = await agent.run(
        messages,
        tools=[CallerTool(schema) for schema in tools],
        max_turns=1,
        max_tokens=max_tokens,
    )
    is_called = trajectory.stop_reason is StopReason.CALLER_TOOLS
    is_cut = trajectory.stop_reason in (StopReason.TOKEN_BUDGET, StopReason.TIME_BUDGET)
    return Completion(
        trajectory.answer,
        [call for call in trajectory.calls if call.error is None] if is_called else (),
        "tool_calls" if is_called else "length" if is_cut else "stop",
        len(trajectory.prompt_ids),
        trajectory.num_sampled_tokens,
    )
