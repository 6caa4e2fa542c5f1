"""Nemotron Nano v2: a JSON list of calls in <TOOLCALL>."""

from __future__ import annotations

from agentloop.agent.channels import Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import JsonObjects
from agentloop.agent.formats.regions import calls_in_regions

_OPEN, _CLOSE = "<TOOLCALL>", "</TOOLCALL>"


NEMOTRON = Family(
    name="nemotron",
    models="Nemotron Nano v2 (Nemotron 3: qwen3-coder)",
    call_form=CallForm(
        begin=_OPEN + '[{"name": "NAME", "arguments": ', end="}]" + _CLOSE, is_only_one=True
    ),
    signs=(_OPEN, "<AVAILABLE_TOOLS>"),
    make_calls=calls_in_regions(lambda schemas: JsonObjects(), opening=_OPEN, closing=_CLOSE),
    markup=Markup(
        thoughts=(("<think>", "</think>"),),
        calls=((_OPEN, _CLOSE),),
        others=("<SPECIAL_11>", "<SPECIAL_12>"),
    ),
    section_end="]" + _CLOSE,
)
