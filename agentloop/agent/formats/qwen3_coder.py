"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3: functions and parameters as tags in <tool_call>."""

from __future__ import annotations

from agentloop.agent.formats.family import CallForm, CallStream, Family
from agentloop.agent.formats.grammars import Whole
from agentloop.agent.formats.hermes import CLOSE, OPEN
from agentloop.agent.formats.regions import RegionStream
from agentloop.agent.formats.tagged import TaggedForm
from agentloop.agent.formats.values import Schemas
from agentloop.agent.text_stream import TokenCodec

__all__ = ["QWEN3_CODER"]

_FORM = TaggedForm(
    r"\s*<function=(?P<name>[^<>\n]+)>",
    r"<parameter=(?P<key>[^<>\n]+)>(?P<value>.*?)</parameter>",
    example="<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>",
    trims_newlines=True,
)


def _calls(chat: TokenCodec, schemas: Schemas, id_prefix: str) -> CallStream:
    return RegionStream(
        chat,
        lambda: Whole(lambda raw: _FORM.parse(raw, schemas)),
        opening=OPEN,
        closing=CLOSE,
        id_prefix=id_prefix,
    )


QWEN3_CODER = Family(
    name="qwen3-coder",
    models="Qwen3-Coder, Qwen3.5, Qwen3.6, Nemotron 3",
    sglang_parser="qwen3_coder",
    call_form=CallForm(
        begin="<tool_call>\n<function=NAME>\n",
        end="\n</function>\n</tool_call>",
        style="qwen_xml",
        separator="\n",
    ),
    signs=(OPEN, "<function=", "<parameter="),
    make_calls=_calls,
)
