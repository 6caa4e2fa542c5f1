"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import Whole
from agentloop.agent.formats.regions import calls_in_regions
from agentloop.agent.formats.values import decode_call

OPEN, CLOSE = "<tool_call>", "</tool_call>"


HERMES = Family(
    name="hermes",
    models="Hermes, Qwen2.5, Qwen3, models trained with agentloop",
    sglang_parser="qwen25",
    call_form=CallForm(
        begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>", separator="\n"
    ),
    signs=(OPEN,),
    make_calls=calls_in_regions(lambda schemas: Whole(decode_call), opening=OPEN, closing=CLOSE),
)
