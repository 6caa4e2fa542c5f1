"""Completions of the model for a library that drives the rollout itself.

Each completion is a conversation of its own: its prompt is rendered from the library's messages,
and its sampled ids are recorded and trained on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, Self

from agentloop.agent.tools import CallerTool, Schema
from agentloop.environments.agent import Agent
from agentloop.errors import InfrastructureFailed, RequestError
from agentloop.plain_json import JsonObject
from agentloop.trajectory import Message, StopReason, ToolCall

__all__ = ["AgentTransport", "Completion", "complete", "openai_call"]


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


def openai_call(id: str, name: str, arguments: Mapping[str, object]) -> JsonObject:
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


class AgentTransport:
    """Answers an OpenAI client's requests for chat completions with those of an agent.

        http = openai.DefaultAsyncHttpxClient(transport=AgentTransport(agent))
        client = openai.AsyncOpenAI(http_client=http, ...)

    Sampling parameters other than `max_tokens` are those of the settings. A failure of the
    infrastructure is a status of 503, and is recorded by the agent in any case. It is a transport
    of httpx and of its successor, which newer clients use.
    """

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        pass

    async def aclose(self) -> None:
        """Do nothing: there is no connection."""

    async def handle_async_request(self, request: Any) -> Any:
        """Return the completion that a request asks for."""
        response = import_module(type(request).__module__.partition(".")[0]).Response
        body = json.loads(await request.aread())
        max_tokens = body.get("max_completion_tokens") or body.get("max_tokens")
        tools = [] if body.get("tool_choice") == "none" else body.get("tools") or []
        try:
            completion = await complete(self._agent, body["messages"], tools, max_tokens=max_tokens)
        except RequestError as error:
            problem = {"message": str(error), "type": "invalid_request_error", "code": error.code}
            return response(400, json={"error": problem})
        except InfrastructureFailed as error:
            return response(503, json={"error": {"message": str(error), "code": None}})
        return response(200, json=_chat_completion(completion, body.get("model")))


def _chat_completion(completion: Completion, model: object) -> JsonObject:
    message: JsonObject = {"role": "assistant", "content": completion.text}
    if completion.calls:
        message["tool_calls"] = [
            openai_call(call.id, call.name, call.arguments) for call in completion.calls
        ]
    return {
        "id": "chatcmpl-agent",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason}],
        "usage": completion.usage(),
    }
