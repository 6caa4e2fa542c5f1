"""Qwen3-Coder, Qwen3.5 and later, Nemotron 3: functions and parameters as tags in <tool_call>."""

from __future__ import annotations

from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import Whole
from agentloop.agent.formats.hermes import CLOSE, OPEN
from agentloop.agent.formats.regions import calls_in_regions
from agentloop.agent.formats.tagged import TaggedForm

_FORM = TaggedForm(
    r"\s*<function=(?P<name>[^<>\n]+)>",
    r"<parameter=(?P<key>[^<>\n]+)>",
    "</parameter>",
    "</function>",
    example="<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>",
    trims_newlines=True,
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
    make_calls=calls_in_regions(
        lambda schemas: Whole(_FORM.parser(schemas)), opening=OPEN, closing=CLOSE
    ),
)
