"""GLM-4.5 to GLM-5: a name, and keys and values as tags in <tool_call>.

No token ends a message: the model samples the token that opens the next one.
"""

from __future__ import annotations

from agentloop.agent.channels import Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import Whole
from agentloop.agent.formats.hermes import CLOSE, OPEN
from agentloop.agent.formats.regions import calls_in_regions
from agentloop.agent.formats.tagged import TaggedForm

_FORM = TaggedForm(
    r"\s*(?P<name>[^<>\n]+)",
    r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>",
    "</arg_value>",
    "",
    example="NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>",
    trims_newlines=False,
)


GLM = Family(
    name="glm",
    models="GLM-4.5, GLM-4.6, GLM-4.7, GLM-5",
    sglang_parser="glm47",
    call_form=CallForm(begin="<tool_call>NAME", end="</tool_call>", style="glm_xml"),
    signs=(OPEN, "<arg_key>", "<|observation|>"),
    make_calls=calls_in_regions(
        lambda schemas: Whole(_FORM.parser(schemas)), opening=OPEN, closing=CLOSE
    ),
    markup=Markup(thoughts=(("<think>", "</think>"),), others=()),
    end_of_calls="<|observation|>",
)
