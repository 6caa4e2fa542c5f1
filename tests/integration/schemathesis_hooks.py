"""For schemathesis (`SCHEMATHESIS_HOOKS`): what is sampled is little, and what it cannot know.

Valid requests are cut down to what a small context takes and a slow machine answers soon; they stay
valid. Invalid ones are left alone.
"""

from __future__ import annotations

import json
from typing import Any

import schemathesis

_MAX_CHARS = 1000  # of a conversation or a list of tools: 4096 tokens at the most
_BARE = (
    *("frequency_penalty", "presence_penalty", "repetition_penalty"),
    *("logit_bias", "min_tokens", "stop_token_ids"),
)
_LITTLE = {"max_turns": 1, "max_response_tokens": 2}


def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    is_valid = case.meta is not None and case.meta.generation.mode.is_positive
    if is_valid and isinstance(case.body, dict):
        match case.operation.path.removeprefix("/v1/sessions/{key}"):
            case "/v1/rollouts":
                _rollouts(case.body)
            case "/v1/chat/completions":
                _chat(case.body)
            case "/v1/messages" | "/v1/messages/count_tokens":
                _anthropic(case.body)
            case "/v1/responses":
                _responses(case.body)
            case "/v1/completions":
                _completion(case.body)


def _completion(body: dict[str, Any]) -> None:
    body.pop("model", None)
    for name in (*_BARE, "ignore_eos"):  # they may contradict each other, or name unknown ids
        body.pop(name, None)
    body["max_tokens"] = 1
    match body.get("prompt"):
        case str(text):
            body["prompt"] = text[:_MAX_CHARS]
        case [int() | float(), *_] as ids:
            body["prompt"] = [int(id) % 256 for id in ids[:_MAX_CHARS]]
        case [str(), *_] as texts:
            body["prompt"] = [text[:_MAX_CHARS] for text in texts[:2]]
        case [[*_], *_] as lists:
            body["prompt"] = [[int(id) % 256 for id in ids[:_MAX_CHARS]] for ids in lists[:2]]


def _chat(body: dict[str, Any]) -> None:
    body.pop("model", None)
    for name in _BARE:  # not for the agent
        body.pop(name, None)
    if body.get("n"):
        body["n"] = min(body["n"], 2)
    if messages := body.get("messages"):
        body["messages"] = _few(messages) or [{"role": "user", "content": "x"}]
    if tools := body.get("tools"):
        # No two have one name, which JSON Schema cannot say.
        body["tools"] = list({tool["function"]["name"]: tool for tool in _few(tools)}.values())
    # Which tools there are, and that a schema is one, JSON Schema cannot say either.
    if body.get("tool_choice") not in (None, "auto", "none"):
        body.pop("tools", None)
        if isinstance(body["tool_choice"], dict):
            body["tool_choice"]["function"]["name"] = "python_code_with_standard_io"
    if (answer := body.get("response_format")) and answer.get("type") == "json_schema":
        answer["json_schema"]["schema"] = {"type": "object"}
    if body.get("chat_template_kwargs"):
        body["chat_template_kwargs"] = {"enable_thinking": False}


def _responses(body: dict[str, Any]) -> None:
    body.pop("model", None)
    # Which responses and tools there are, and that an input has a message the model may read, JSON
    # Schema cannot say.
    for name in (*_BARE, "previous_response_id", "tools", "tool_choice", "text"):
        body.pop(name, None)
    body["input"] = "x"
    if body.get("instructions"):
        body["instructions"] = body["instructions"][:_MAX_CHARS]
    if body.get("chat_template_kwargs"):
        body["chat_template_kwargs"] = {"enable_thinking": False}


def _anthropic(body: dict[str, Any]) -> None:
    body.pop("model", None)
    # A last message of the assistant is refused, which JSON Schema cannot say.
    body["messages"] = [*_few(body["messages"]), {"role": "user", "content": "x"}]
    if tools := body.get("tools"):
        body["tools"] = list({tool["name"]: tool for tool in _few(tools)}.values())
    if (body.get("tool_choice") or {}).get("type") in ("any", "tool"):
        body.pop("tools", None)
        if "name" in body["tool_choice"]:
            body["tool_choice"]["name"] = "python_code_with_standard_io"
    for holder, name in ((body.get("output_config") or {}, "format"), (body, "output_format")):
        if holder.get(name):
            holder[name]["schema"] = {"type": "object"}
    if body.get("chat_template_kwargs"):
        body["chat_template_kwargs"] = {"enable_thinking": False}
    if isinstance(body.get("system"), list):
        body["system"] = _few(body["system"])


def _rollouts(body: dict[str, Any]) -> None:
    if "n" in body:
        body["n"] = min(body["n"], 2)
    if prompts := body.get("prompts"):
        body["prompts"] = prompts[:2]
    body["budget"] = body.get("budget", {}) | _LITTLE


def _few(things: list[Any]) -> list[Any]:
    few: list[Any] = []
    for value in things:
        if len(json.dumps([*few, value])) > _MAX_CHARS:
            break
        few.append(value)
    return few


def lines(context: Any, response: schemathesis.Response) -> Any:
    """As the document has them: an array."""
    return [json.loads(line) for line in response.content.splitlines()]


schemathesis.hook(before_call)
schemathesis.deserializer("application/x-ndjson")(lines)
