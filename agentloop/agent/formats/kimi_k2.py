"""Kimi K2: an id that names the function, and JSON, between control tokens."""

from __future__ import annotations

import re

from agentloop.agent.channels import Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import Whole
from agentloop.agent.formats.regions import calls_in_regions
from agentloop.agent.formats.values import Parsed, decode_arguments
from agentloop.trajectory import ToolCall

_OPEN, _CLOSE = "<|tool_call_begin|>", "<|tool_call_end|>"
_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID_RE = re.compile(r"\s*(?:functions\.)?(?P<name>.+?)(?::\d+)?\s*", re.DOTALL)


def _parse(raw: str) -> Parsed:
    id, separator, arguments = raw.partition(_ARGUMENTS)
    match = _ID_RE.fullmatch(id)
    if not separator or match is None:
        return "", {}, f"the tool call must have the form functions.NAME:INDEX{_ARGUMENTS}{{...}}"
    return match["name"], *decode_arguments(arguments)


def _call_id(call: ToolCall) -> str:
    """Return the id that the model sampled."""
    return call.raw.partition(_ARGUMENTS)[0].strip() or call.id


def _history_id(id: str, name: str, number: int) -> str:
    return id if id.startswith("functions.") else f"functions.{name}:{number}"


KIMI_K2 = Family(
    name="kimi-k2",
    models="Kimi K2, Kimi K2.5, Kimi K2.6",
    sglang_parser="kimi_k2",
    call_form=CallForm(
        begin=f"{_OPEN}functions.NAME:0{_ARGUMENTS}", end=_CLOSE, section=_SECTION, is_only_one=True
    ),
    signs=(_OPEN, _ARGUMENTS),
    make_calls=calls_in_regions(lambda schemas: Whole(_parse), opening=_OPEN, closing=_CLOSE),
    markup=Markup(
        thoughts=(("<think>", "</think>"),), calls=(_SECTION,), others=(_OPEN, _CLOSE, _ARGUMENTS)
    ),
    section_end=_SECTION[1],
    call_id=_call_id,
    history_id=_history_id,
)
