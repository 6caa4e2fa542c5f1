"""DeepSeek V3 and V3.1: a name and JSON between control tokens; V3.2 and later: tags (DSML)."""

from __future__ import annotations

from agentloop.agent.channels import Markup
from agentloop.agent.formats.family import CallForm, Family
from agentloop.agent.formats.grammars import Blocks, Whole
from agentloop.agent.formats.regions import calls_in_regions
from agentloop.agent.formats.tagged import TaggedForm
from agentloop.agent.formats.values import Parsed, decode_arguments

_OPEN, _CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_THINK = ("<think>", "</think>")
_END = "<｜end▁of▁sentence｜>"


def _parse_v31(raw: str) -> Parsed:
    name, separator, arguments = raw.partition(_SEPARATOR)
    if not separator or not name.strip():
        return "", {}, f"the tool call must have the form NAME{_SEPARATOR}{{...}}"
    return name.strip(), *decode_arguments(arguments)


def _parse_v3(raw: str) -> Parsed:
    _, separator, call = raw.partition(_SEPARATOR)
    name, fence, arguments = call.partition("```json")
    if not separator or not fence or not name.strip():
        form = f"function{_SEPARATOR}NAME\n```json\n{{...}}\n```"
        return "", {}, f"the tool call must have the form {form}"
    return name.strip(), *decode_arguments(arguments.rpartition("```")[0] or arguments)


_MARKUP = Markup(thoughts=(_THINK,), calls=(_SECTION,), others=(_OPEN, _CLOSE, _SEPARATOR, _END))

DEEPSEEK_V31 = Family(
    name="deepseek-v3.1",
    models="DeepSeek V3.1",
    sglang_parser="deepseekv31",
    call_form=CallForm(begin=f"{_OPEN}NAME{_SEPARATOR}", end=_CLOSE, section=_SECTION),
    signs=("<｜tool▁calls▁begin｜>", _SEPARATOR),
    make_calls=calls_in_regions(lambda schemas: Whole(_parse_v31), opening=_OPEN, closing=_CLOSE),
    markup=_MARKUP,
    section_end=_SECTION[1],
)
DEEPSEEK_V3 = Family(
    name="deepseek-v3",
    models="DeepSeek V3, DeepSeek R1",
    sglang_parser="deepseekv3",
    call_form=CallForm(
        begin=f"{_OPEN}function{_SEPARATOR}NAME\n```json\n", end=f"\n```{_CLOSE}", section=_SECTION
    ),
    signs=("<｜tool▁calls▁begin｜>", _SEPARATOR, "```json"),
    make_calls=calls_in_regions(lambda schemas: Whole(_parse_v3), opening=_OPEN, closing=_CLOSE),
    markup=_MARKUP,
    section_end=_SECTION[1],
)

_DSML = "｜DSML｜"
_FORM = TaggedForm(
    rf'<{_DSML}invoke name="(?P<name>[^"<>\n]+)">',
    rf'<{_DSML}parameter name="(?P<key>[^"\n]+)"(?: string="(?P<string>true|false)")?>',
    f"</{_DSML}parameter>",
    f"</{_DSML}invoke>",
    example=f'<{_DSML}invoke name="NAME"><{_DSML}parameter name="KEY" string="true">VALUE'
    f"</{_DSML}parameter></{_DSML}invoke>",
    trims_newlines=False,
)


def _dsml(section: str) -> Family:
    opening, closing = f"<{_DSML}{section}>", f"</{_DSML}{section}>"

    return Family(
        name="deepseek-v3.2" if section == "function_calls" else "deepseek-v4",
        call_form=CallForm(
            begin=f'<{_DSML}invoke name="NAME">\n',
            end=f"</{_DSML}invoke>\n",
            style="deepseek_xml",
            section=(f"{opening}\n", closing),
        ),
        sglang_parser="deepseekv32" if section == "function_calls" else "deepseekv4",
        models="DeepSeek V3.2" if section == "function_calls" else "DeepSeek V4",
        signs=(_DSML, f"{section}>"),
        make_calls=calls_in_regions(
            lambda schemas: Blocks(f"<{_DSML}invoke", f"</{_DSML}invoke>", _FORM.parser(schemas)),
            opening=opening,
            closing=closing,
        ),
        markup=Markup(thoughts=(_THINK,), calls=((opening, closing),), others=(_END,)),
        section_end=closing,
    )


DEEPSEEK_DSML = (_dsml("function_calls"), _dsml("tool_calls"))
