"""Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from agentloop.agent.formats.family import CallForm, CallStream, Family
from agentloop.agent.formats.grammars import Whole
from agentloop.agent.formats.regions import RegionStream
from agentloop.agent.formats.values import Schemas, decode_call
from agentloop.agent.text_stream import TokenCodec

__all__ = ["CLOSE", "HERMES", "OPEN"]

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _calls(chat: TokenCodec, schemas: Schemas, id_prefix: str) -> CallStream:
    return RegionStream(
        chat, lambda: Whole(decode_call), opening=OPEN, closing=CLOSE, id_prefix=id_prefix
    )


HERMES = Family(
    name="hermes",
    models="Hermes, Qwen2.5, Qwen3, models trained with agentloop",
    sglang_parser="qwen25",
    call_form=CallForm(
        begin='<tool_call>\n{"name": "NAME", "arguments": ', end="}\n</tool_call>", separator="\n"
    ),
    signs=(OPEN,),
    make_calls=_calls,
)
