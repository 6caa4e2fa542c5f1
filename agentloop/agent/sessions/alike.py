"""Compare messages of the assistant by how the chat template writes them."""

from __future__ import annotations

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.continuation import QUESTION
from agentloop.agent.openai_messages import tool_message
from agentloop.agent.sessions.history import has_more_fields, reasoning_of, text_of
from agentloop.agent.sessions.tree import Alike
from agentloop.errors import RequestError
from agentloop.trajectory import Message


def alike_by(chat: ChatFormat) -> Alike:
    """Return what compares messages of the assistant by how the template writes them."""

    def render(message: Message, *, with_reasoning: bool) -> list[int]:
        calls = message.get("tool_calls") or []
        plain: dict[str, object] = {"role": "assistant", "content": text_of(message)}
        if has_more_fields(message):
            plain = {**message, **plain}
            for name in ("reasoning_content", "reasoning", "tool_calls"):
                plain.pop(name, None)
        if with_reasoning:
            plain["reasoning_content"] = reasoning_of(message)
        answers: list[Message] = [] if calls else [QUESTION]
        if calls:
            ids = [f"call{index:05}" for index in range(len(calls))]
            plain["tool_calls"] = [{**call, "id": id} for call, id in zip(calls, ids, strict=True)]
            answers += [tool_message(id, "") for id in ids]
        return chat.prompt([QUESTION, plain, *answers])

    def alike(sampled: Message, from_client: Message) -> bool:
        with_reasoning = reasoning_of(from_client) is not None
        try:
            sampled_ids, given_ids = (
                render(message, with_reasoning=with_reasoning) for message in (sampled, from_client)
            )
        except RequestError:
            return False
        return sampled_ids == given_ids

    return alike
