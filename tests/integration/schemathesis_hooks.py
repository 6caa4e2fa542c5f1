"""For schemathesis (`SCHEMATHESIS_HOOKS`): what is sampled is little, and what it cannot know.

Valid requests are cut down to what a small context takes and a slow machine answers soon; they stay
valid. Invalid ones are left alone.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

_MAX_CHARS = 1000  # of a conversation or a list of tools: 4096 tokens at the most
_LITTLE = {"max_turns": 1, "max_response_tokens": 2}


def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    if is_valid and isinstance(case.body, dict):
        match case.operation.path:
            case "/v1/rollouts":
                _rollouts(case.body)
            case "/v1/chat/completions":
                _chat(case.body)


def _chat(body: dict[str, Any]) -> None:
    body.pop("model", None)
    if body.get("n"):
        body["n"] = min(body["n"], 2)
    if messages := body.get("messages"):
        body["messages"] = _few(messages) or [{"role": "user", "content": "x"}]
    if tools := body.get("tools"):
        # No two have one name, which JSON Schema cannot say.
        body["tools"] = list({tool["function"]["name"]: tool for tool in _few(tools)}.values())


def _rollouts(body: dict[str, Any]) -> None:
    if "n" in body:
        body["n"] = min(body["n"], 2)
    if prompts := body.get("prompts"):
        body["prompts"] = prompts[:2]
    body["budget"] = body.get("budget", {}) | _LITTLE


def _few(things: list[Any]) -> list[Any]:
    few: list[Any] = []
    for thing in things:
        if len(json.dumps([*few, thing])) > _MAX_CHARS:
            break
        few.append(thing)
    return few


def lines(context: Any, response: schemathesis.Response) -> Any:
    """As the document has them: an array."""
    return [json.loads(line) for line in response.content.splitlines()]


schemathesis.hook(before_call)
schemathesis.deserializer("application/x-ndjson")(lines)
