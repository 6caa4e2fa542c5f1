"""Mistral: `[TOOL_CALLS]` and a JSON list (to v7), or with a name and arguments (from v11)."""

from __future__ import annotations

import re

from agentloop.agent.channels import Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import JsonObjects, NamedObject
from agentloop.agent.formats.regions import calls_in_regions
from agentloop.agent.formats.values import Parsed, decode_arguments, decode_json
from agentloop.trajectory import ToolCall

_OPEN, _ARGUMENTS, _ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_ID_RE = re.compile(r"[a-zA-Z0-9]{9}")
_HEAD_RE = re.compile(
    r"\s*(?P<name>[^\[{]+?)\s*(?:\[CALL_ID\](?P<id>[^\[{]*))?(?:\[ARGS\])?\s*(?={)"
)
_MARKUP = Markup(
    thoughts=(("[THINK]", "[/THINK]"),), calls=((_OPEN, ""),), others=("</s>", _ARGUMENTS, _ID)
)


def _parse(raw: str) -> Parsed:
    head = _HEAD_RE.match(raw)
    if head is None:
        return "", {}, f"the tool call must have the form {_OPEN}NAME{_ARGUMENTS}{{...}}"
    return head["name"], *decode_arguments(raw[head.end() :])


def _call_id(call: ToolCall) -> str:
    """Return the id that the model sampled, or another one of nine characters."""
    head = _HEAD_RE.match(call.raw)
    sampled_id = head["id"] if head else _id_in(call.raw)
    if isinstance(sampled_id, str) and _ID_RE.fullmatch(sampled_id):
        return sampled_id
    return _history_id(call.id, call.name, 0)


def _history_id(id: str, name: str, number: int) -> str:
    """Return an id of nine letters and digits, which some of the templates require."""
    return id if _ID_RE.fullmatch(id) else re.sub(r"[^a-zA-Z0-9]", "", id)[-9:].rjust(9, "0")


def _id_in(raw: str) -> object:
    try:
        value = decode_json(raw)
    except ValueError:
        return None
    return value.get("id") if isinstance(value, dict) else None


MISTRAL = Family(
    name="mistral",
    models="Mistral 7B v0.3, Mistral Nemo, Mistral Small 3.1",
    sglang_parser="mistral",
    call_form=CallForm(begin=_OPEN + '[{"name": "NAME", "arguments": ', end="}]", is_only_one=True),
    signs=("[TOOL_CALLS]", "[INST]"),
    make_calls=calls_in_regions(lambda schemas: JsonObjects(), opening=_OPEN, closing=None),
    markup=_MARKUP,
    section_end="]",
    call_id=_call_id,
    history_id=_history_id,
)
MISTRAL_V11 = Family(
    name="mistral-v11",
    models="Mistral Small 3.2, Devstral, Ministral 3, Magistral",
    sglang_parser="mistral",
    call_form=CallForm(begin=f"{_OPEN}NAME{_ARGUMENTS}", is_only_one=True),
    signs=("[TOOL_CALLS]", "[ARGS]"),
    make_calls=calls_in_regions(lambda schemas: NamedObject(_parse), opening=_OPEN, closing=None),
    markup=_MARKUP,
    call_id=_call_id,
    history_id=_history_id,
)
