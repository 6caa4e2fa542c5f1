"""Every family: streamed calls equal those of the whole turn, and what was written."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence

import pytest

from agentloop.agent.channels import Channel, answer_in
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import FAMILIES, detect, get_family, harmony, regions
from agentloop.errors import ModelError
from agentloop.trajectory import ToolCall
from tests.agentloop.agent.call_forms import FORMS, Call
from tests.agentloop.agent.random_conversations import (
    EXAMPLES,
    chunks_of,
    conversations,
    damage,
    some_calls,
)
from tests.agentloop.agent.real_models import TEMPLATES, control_tokens, template_of
from tests.support import END, template, tokenizer, written

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "number": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "tree": {"type": "object"},
                    "list": {"type": "array"},
                },
            },
        },
    }
    for name in ("search", "python_code")
]
spelled = sorted({token for name in TEMPLATES for token in control_tokens(template_of(name))})


@functools.cache
def chat_of(name: str, *, single_tokens: bool = True) -> ChatFormat:
    """A small tokenizer, with the control tokens of all families or with none of them."""
    tags = [tag for tag in spelled if tag not in ("<|im_start|>", END)]
    chat = ChatFormat(tokenizer(tags if single_tokens else ()), template(), end_token=END)
    chat.family = get_family(name)
    return chat


def stream_calls(chat: ChatFormat, ids: Sequence[int], edges: Sequence[int]) -> list[ToolCall]:
    stream = chat.family.calls(chat, TOOLS)
    calls = [call for a, b in itertools.pairwise(edges) for call in stream.feed(ids[a:b])]
    return calls + stream.finish()


def found_in(chat: ChatFormat, ids: Sequence[int]) -> list[ToolCall]:
    return stream_calls(chat, ids, [0, len(ids)])


def split(chat: ChatFormat, text: str, edges: Sequence[int]) -> dict[Channel, str]:
    splitter = chat.family.channels(False)
    texts = dict.fromkeys(Channel, "")
    for a, b in itertools.pairwise(edges):
        for channel, piece in splitter.feed(text[a:b]):
            texts[channel] += piece
    for channel, piece in splitter.flush():
        texts[channel] += piece
    assert not [*splitter.flush()]  # as after a second call that a client is told of
    return texts


def test_each_family_has_a_form() -> None:
    assert {family.name for family in FAMILIES} == set(FORMS)


@pytest.mark.timeout(60 + EXAMPLES // 10)
@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.full
def test_calls_are_found_as_they_were_written_however_they_arrive(name: str) -> None:
    form = FORMS[name]
    for example, dice in conversations(name, EXAMPLES):
        # harmony's messages are bounded by control tokens
        chat = chat_of(name, single_tokens=name == "harmony" or dice.random() < 0.7)
        made = some_calls(dice, form, ("search", "python_code"), spelled)
        is_damaged = dice.random() < 0.4
        text = f"{form.before}{form.text(made)}{END}"
        if is_damaged:
            text = damage(dice, text, spelled)
        ids = written(chat, text)
        calls = stream_calls(chat, ids, chunks_of(dice, len(ids)))
        assert calls == found_in(chat, ids), example
        parsed = [(call.name, call.arguments, call.error) for call in calls]
        if not is_damaged:
            assert parsed == [(name, arguments, None) for name, arguments in made], example
        for call in calls:
            assert 0 <= call.start < call.end <= len(ids), example
            assert call.error is not None or call.name, example
            json.dumps([call.arguments, call.raw])  # it can be kept
        edges = chunks_of(dice, len(text))
        assert split(chat, text, edges) == split(chat, text, [0, len(text)]), example


@pytest.mark.parametrize("name", sorted(FORMS))
def test_call_runs_before_the_turn_ends(name: str) -> None:
    form, chat = FORMS[name], chat_of(name)
    calls: list[Call] = [("search", {"text": "x"}), ("python_code", {"number": 7})]
    made = calls[: 1 if form.one_call else 2]
    ids = written(chat, f"{form.before}{form.text(made)}")
    stream = chat.family.calls(chat, TOOLS)
    closed = [number for number, token in enumerate(ids) for _ in stream.feed([token])]
    assert len(closed) == len(made)
    assert len(made) == 1 or closed[0] < closed[1]


# The tags that close an argument and a call.
TAGGED = {
    "qwen3-coder": ("</parameter>", "\n</function>"),
    "glm": ("</arg_value>", ""),
    "minimax-m2": ("</parameter>", "\n</invoke>"),
    "deepseek-v3.2": ("</｜DSML｜parameter>", "\n</｜DSML｜invoke>"),
    "deepseek-v4": ("</｜DSML｜parameter>", "\n</｜DSML｜invoke>"),
}


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_argument_may_contain_the_tags_that_close_it(name: str) -> None:
    form, chat, (argument_end, call_end) = FORMS[name], chat_of(name), TAGGED[name]
    close = argument_end + call_end
    for text in (argument_end, f"a{argument_end}b", f"{close} a", f"a{close}b{close}", "</b>"):
        made: list[Call] = [("search", {"text": text, "number": 7}), ("search", {"text": text})]
        ids = written(chat, form.text(made))
        for edges in ([0, len(ids)], range(len(ids) + 1)):
            calls = [(call.name, call.arguments) for call in stream_calls(chat, ids, edges)]
            assert calls == made, text


@pytest.mark.parametrize("name", sorted(TAGGED))
def test_call_never_runs_with_a_part_of_an_argument(name: str) -> None:
    """Where text cannot be told from markup, the call is malformed."""
    form, chat, (argument_end, _) = FORMS[name], chat_of(name), TAGGED[name]
    for inner in ({"text": "x"}, {"other": "x"}):
        complete = form.text([("search", inner)]).partition("search")[2]
        opening = (
            complete[complete.index("<") :].partition(f"x{argument_end}")[0].removesuffix("\n")
        )
        text = f"a{argument_end}\n{opening}b"
        calls = found_in(chat, written(chat, form.text([("search", {"text": text})])))
        assert calls
        assert all(call.error for call in calls), (text, calls)


@pytest.mark.parametrize("name", sorted(FORMS))
def test_call_that_does_not_end_is_malformed(name: str) -> None:
    form, chat = FORMS[name], chat_of(name)
    text = form.before + form.text([("search", {"text": "a long text", "number": 7})])
    cut = text[: text.rindex("7")]
    (call,) = found_in(chat, written(chat, cut))
    assert call.error is not None
    assert not call.arguments


@pytest.mark.parametrize("name", sorted(FORMS))
def test_turn_goes_on_after_a_call_that_is_too_long(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(regions, "_MAX_REGION_TOKENS", 20)
    monkeypatch.setattr(harmony, "_MAX_CALL_TOKENS", 20)
    form, chat = FORMS[name], chat_of(name)
    text = form.text([("search", {"text": "a very long text " * 20})])
    call, *more_calls = found_in(chat, written(chat, f"{form.before}{text} And so on.{END}"))
    assert call.error is not None
    assert not more_calls


@pytest.mark.parametrize("name", sorted(FORMS))
def test_calls_and_markup_are_not_shown(name: str) -> None:
    form, chat = FORMS[name], chat_of(name)
    text = form.before + form.text([("search", {"text": "secret"})])
    splitter = chat.family.channels(False)
    # A client is told of a call that has run before the turn is over: both flush.
    pieces = [*splitter.feed(text), *splitter.flush(), *splitter.flush()]
    shown = "".join(piece for channel, piece in pieces if channel is Channel.CONTENT)
    assert shown.strip() == form.before.strip()


@pytest.mark.parametrize(
    "text", ['{"name": "Ada", "parameters": {"born": 1815}}', "[ada(born=1815)]"]
)
@pytest.mark.parametrize("name", ["llama-json", "llama-pythonic"])
def test_unmarked_call_is_an_answer_if_there_are_no_tools(name: str, text: str) -> None:
    split = functools.partial(chat_of(name).family.channels, has_tools=False)
    assert answer_in(text, reasoning=False, split=split) == text


@pytest.mark.parametrize("name", sorted(FORMS))
def test_text_alone_is_no_call(name: str) -> None:
    chat = chat_of(name)
    for text in ('{"name": "Bob", "age": 7}', "[1, 2, 3]", "A sentence.", "", '{"a": [1', "[f, g]"):
        assert found_in(chat, written(chat, text + END)) == []


def expected_family(template_name: str) -> str:
    for part, family in (
        ("Coder", "qwen3-coder"),
        ("Qwen3.5", "qwen3-coder"),
        ("Qwen3.6", "qwen3-coder"),
        ("Qwen", "hermes"),
        ("Hermes", "hermes"),
        ("GLM", "glm"),
        ("DeepSeek-V3.1", "deepseek-v3.1"),
        ("DeepSeek-V3.2", "deepseek-v3.2"),
        ("Kimi", "kimi-k2"),
        ("MiniMax", "minimax-m2"),
        ("gpt-oss", "harmony"),
        ("pythonic", "llama-pythonic"),
        ("Llama", "llama-json"),
        ("Mistral-7B", "mistral"),
        ("Mistral-Nemo", "mistral"),
        ("stral", "mistral-v11"),
        ("Nemotron-3", "qwen3-coder"),
        ("Nemotron", "nemotron"),
    ):
        if part in template_name:
            return family
    raise AssertionError(template_name)


@pytest.mark.parametrize("template_name", TEMPLATES)
def test_family_is_known_from_the_template(template_name: str) -> None:
    assert detect(template_of(template_name)).name == expected_family(template_name)


def test_unknown_form_is_named() -> None:
    with pytest.raises(ModelError, match=r"shows no known form .* chat\.format .* hermes"):
        detect("{{ messages }}")
    with pytest.raises(ModelError, match=r"chat\.format: 'none' is not one of auto, .*hermes"):
        get_family("none")
