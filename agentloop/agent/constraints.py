"""Constrain a turn: to a tool call, or to an answer that is JSON.

A constraint is a structural tag, in which xgrammar describes text by tags and JSON schemas. SGLang
samples nothing else. The log-probabilities that it reports are those of the constrained
distribution, so constraints are for serving, and training has none.

A tag's text may be sampled as any tokens that spell it. xgrammar also has tags that are token ids,
but it confuses them with those of other requests in its cache of compiled grammars (0.2.7).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import Family
from agentloop.agent.formats.values import parameters_of
from agentloop.agent.text_stream import TokenCodec
from agentloop.errors import RequestError

_Format = dict[str, object]
_FEW_SPACES = {"max_whitespace_cnt": 2}  # otherwise a model may write spaces without end
_SPACE: _Format = {"type": "regex", "pattern": r"[ \n]{0,4}"}

# Keywords of JSON Schema that xgrammar ignores, and those whose values are not schemas.
_NOT_ENFORCED = {
    *("contains", "maxContains", "minContains", "uniqueItems", "multipleOf"),
    *("dependentRequired", "dependentSchemas", "if", "then", "else", "not"),
}
_BY_NAME = {"$defs", "definitions", "patternProperties", "properties"}
_VALUES = {"const", "default", "enum", "examples", "required"}


@dataclass(frozen=True)
class OutputRules:
    """Constraints on the turns of a rollout.

    Attributes:
        tool: "required": the first message calls a tool. Any other name: it calls that tool. None:
            it may call one.
        schema: JSON schema of the answer. None: it is text.
    """

    tool: str | None = None
    schema: Mapping[str, object] | None = None

    def must_call(self, message: int) -> bool:
        """Return whether a message, by its number, must call a tool."""
        return self.tool is not None and message == 0

    def bind(self, message: int) -> bool:
        """Return whether a message, by its number, is constrained at all."""
        return self.schema is not None or self.must_call(message)


class Constraints:
    """The constraints on the turns of one rollout: see `check_rules` and `constraint_of`."""

    def __init__(
        self,
        rules: OutputRules,
        chat: ChatFormat,
        tools: Sequence[Mapping[str, object]],
        single_call: bool,
    ) -> None:
        check_rules(rules, chat.family, tools)
        self._rules, self._chat, self._tools = rules, chat, tools
        self._single_call = single_call

    def of(self, message: int, opened_thought: str) -> dict[str, str]:
        return constraint_of(
            self._rules,
            self._chat.family,
            self._tools,
            opened_thought=opened_thought,
            message=message,
            single_call=self._single_call,
            ends=[self._chat.decode([token]) for token in self._chat.stop_ids],
        )

    def codec(self, message: int) -> TokenCodec:
        """Return what decodes the calls of a message."""
        return _SpelledMarkers(self._chat) if self._rules.must_call(message) else self._chat

    def explain(self, error: RequestError, message: int) -> RequestError:
        """Return the error with the field that caused it, if a server has refused a grammar."""
        text = str(error).strip()
        if "rammar" not in text:
            return error
        if self._rules.must_call(message):
            return RequestError(f"tool_choice: a tool's parameters cannot be enforced: {text}")
        tools = " or a tool's parameters" if self._tools else ""
        return RequestError(f"response_format: its schema{tools} cannot be enforced: {text}")


class _SpelledMarkers:
    """A chat format in which the markers of calls are text, to read a turn that must call.

    Elsewhere a marker that is a token of the vocabulary is recognised by its id alone, so that text
    of others, repeated by the model, does not become a call. The marker of a forced call stands
    where it must, but may be spelled by other tokens.
    """

    def __init__(self, chat: ChatFormat) -> None:
        self.tokenizer = chat.tokenizer
        self.stop_ids = chat.stop_ids
        self._chat = chat
        self._markers = {marker for pair in chat.family.markup.calls for marker in pair}

    def token_id(self, text: str) -> int | None:
        return None if text in self._markers else self._chat.token_id(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._chat.decode(ids)


def check_rules(rules: OutputRules, family: Family, tools: Sequence[Mapping[str, object]]) -> None:
    """Check that the rules can be kept with these tools.

    Raises:
        RequestError: They cannot.
    """
    if rules.schema is not None and (keyword := _not_enforced(rules.schema)):
        raise RequestError(
            f"response_format.json_schema.schema: {keyword!r} cannot be enforced: leave it out"
        )
    if rules.tool is None:
        return
    names = list(parameters_of(tools))
    if not names:
        raise RequestError("tool_choice: there are no tools to call")
    if rules.tool not in ("required", *names):
        raise RequestError(
            f"tool_choice: there is no tool {rules.tool!r}; the tools are {', '.join(names)}"
        )
    if family.call_form is None:
        raise RequestError(
            f"tool_choice: a call cannot be forced with the chat format {family.name!r}"
        )


def constraint_of(
    rules: OutputRules,
    family: Family,
    tools: Sequence[Mapping[str, object]],
    *,
    opened_thought: str,
    message: int,
    single_call: bool = False,
    ends: Sequence[str] = (),
) -> dict[str, str]:
    """Return the sampling parameters of SGLang that constrain a turn; none if it is free.

    Args:
        tools: JSON schemas of the tools, in OpenAI's form.
        opened_thought: The tag with which the prompt opens a thought, or an empty string.
        message: The number of the assistant's message in its rollout.
        single_call: Whether the turn ends with its first call.
        ends: Tokens that end a turn, which therefore must not be in a thought.
    """
    if not rules.bind(message):
        return {}
    must_call = rules.must_call(message)
    choices: list[_Format] = []
    if family.call_form is not None and tools and (must_call or rules.schema is not None):
        schemas = parameters_of(tools)
        if must_call and rules.tool in schemas:  # one call, as clients of OpenAI's expect
            schemas, single_call = {str(rules.tool): schemas[str(rules.tool)]}, True
        choices.append(_calls(family, schemas, single_call))
    if not must_call:
        choices.append(
            {"type": "json_schema", "json_schema": dict(rules.schema or {}), **_FEW_SPACES}
        )
    body = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
    elements = [*_thought(family, opened_thought, ends), body]
    tag = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    return {"structural_tag": json.dumps(tag, ensure_ascii=False)}


def _not_enforced(schema: object) -> str | None:
    """Return a keyword of the schema that xgrammar would ignore, if there is one."""
    if isinstance(schema, list):
        return next(filter(None, map(_not_enforced, schema)), None)
    if not isinstance(schema, Mapping):
        return None
    for keyword, value in schema.items():
        if keyword in _NOT_ENFORCED and value not in (False, None):
            return str(keyword)
        if keyword in _BY_NAME and isinstance(value, Mapping):
            value = list(value.values())
        if keyword not in _VALUES and (nested := _not_enforced(value)):
            return nested
    return None


def _thought(family: Family, opened: str, ends: Sequence[str]) -> list[_Format]:
    """Return what may stand before a call or an answer: the rest of a thought, or a whole one."""
    thoughts = family.markup.thoughts
    # A call inside of a thought would run as well.
    excluded = [*(opening for opening, _ in family.markup.calls), *ends]
    text: _Format = {"type": "any_text", "excludes": excluded}
    if opened:
        closing = next((close for start, close in thoughts if start == opened.strip()), "")
        end_of_thought: _Format = {"type": "tag", "begin": "", "content": text, "end": closing}
        return [end_of_thought, _SPACE] if closing else []
    if not thoughts:
        return []
    thought_tags: list[_Format] = [
        {"type": "tag", "begin": start, "content": text, "end": close} for start, close in thoughts
    ]
    choice = thought_tags[0] if len(thought_tags) == 1 else {"type": "or", "elements": thought_tags}
    return [{"type": "optional", "content": choice}, _SPACE]


def _calls(
    family: Family, schemas: Mapping[str, Mapping[str, object]], single_call: bool
) -> _Format:
    form = family.call_form
    assert form is not None
    tags = [
        {
            "type": "tag",
            "begin": _begin(form.begin, name),
            "content": {
                "type": "json_schema",
                "json_schema": {"type": "object", **schema},
                "style": form.style,
                **_FEW_SPACES,
            },
            "end": form.end,
        }
        for name, schema in schemas.items()
    ]
    calls: _Format = {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": form.separator,
        "at_least_one": True,
        "stop_after_first": single_call or form.is_only_one,
    }
    if not form.section[0]:
        return calls
    return {"type": "tag", "begin": form.section[0], "content": calls, "end": form.section[1]}


def _begin(form: str, name: str) -> str:
    """Return the text before the arguments of a call; a name in a JSON object is escaped."""
    if '{"name": "NAME"' in form:
        name = json.dumps(name, ensure_ascii=False)[1:-1]
    return form.replace("NAME", name)
