"""MiniMax M2: functions and parameters as tags, several calls in one section."""

from __future__ import annotations

from agentloop.agent.channels import Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import Blocks
from agentloop.agent.formats.regions import calls_in_regions
from agentloop.agent.formats.tagged import TaggedForm

_OPEN, _CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
_FORM = TaggedForm(
    r'<invoke name="?(?P<name>[^"<>\n]+)"?>',
    r'<parameter name="?(?P<key>[^"<>\n]+)"?>',
    "</parameter>",
    "</invoke>",
    example='<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>',
    trims_newlines=False,
)


MINIMAX_M2 = Family(
    name="minimax-m2",
    models="MiniMax M2, M2.1, M2.5, M2.7",
    sglang_parser="minimax-m2",
    call_form=CallForm(
        begin='<invoke name="NAME">\n',
        end="</invoke>\n",
        style="minimax_xml",
        section=(f"{_OPEN}\n", _CLOSE),
    ),
    signs=(_OPEN, "<invoke name="),
    make_calls=calls_in_regions(
        lambda schemas: Blocks("<invoke", "</invoke>", _FORM.parser(schemas)),
        opening=_OPEN,
        closing=_CLOSE,
    ),
    markup=Markup(
        thoughts=(("<think>", "</think>"),), calls=((_OPEN, _CLOSE),), others=("[e~[", "]~b]")
    ),
    section_end=_CLOSE,
)
