"""Calls are found in a token stream as soon as they close, for any chunking."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import HERMES, regions
from agentloop.agent.formats.values import decode_call
from agentloop.trajectory import ToolCall
from tests.support import call_text, chat_format, written

FAST = settings(max_examples=80, deadline=None)
BY_ID_AND_BY_TEXT = pytest.mark.parametrize("tags", [True, False], ids=["by id", "by text"])

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
calls_in_text = st.builds(
    call_text,
    st.sampled_from(["multiply", "añadir"]),
    st.dictionaries(st.text(max_size=5), json_values),
)
broken = st.sampled_from(["<tool_call>{nope</tool_call>", "<tool_call></tool_call>"])
prose = st.text("abc <>/_\n{}é🐍", max_size=12)
turns = st.lists(st.one_of(prose, calls_in_text, broken), max_size=6).map("".join)


def feed(
    chat: ChatFormat, ids: Sequence[int], cuts: Sequence[int] = (), *, stop: bool = True
) -> list[ToolCall]:
    stream = HERMES.calls(chat)
    edges = [0, *sorted(cuts), len(ids)]
    calls = [call for a, b in itertools.pairwise(edges) for call in stream.feed(ids[a:b])]
    return calls + (stream.finish() if stop else [])


@BY_ID_AND_BY_TEXT
@FAST
@given(text=turns, cuts=st.lists(st.integers(0, 200), max_size=10))
def test_calls_do_not_depend_on_chunking(tags: bool, text: str, cuts: list[int]) -> None:
    chat = chat_format(tags=tags)
    ids = written(chat, text)
    expected = feed(chat, ids, range(len(ids)))  # one token at a time
    assert feed(chat, ids, [min(cut, len(ids)) for cut in cuts]) == expected
    assert feed(chat, ids) == expected


@FAST
@given(turns)
def test_scanning_ids_and_text_finds_the_same_calls(text: str) -> None:
    def read_calls(tags: bool) -> list[Any]:
        chat = chat_format(tags=tags)
        return [(c.name, c.arguments, c.error) for c in feed(chat, written(chat, text))]

    assert read_calls(True) == read_calls(False)


@FAST
@given(st.lists(st.one_of(prose, calls_in_text), max_size=6).map("".join))
def test_start_and_end_delimit_the_call_in_the_output(text: str) -> None:
    chat = chat_format()
    ids = written(chat, text)
    for call in feed(chat, ids):
        if call.error is None:
            assert chat.decode(ids[call.start : call.end]) == f"<tool_call>{call.raw}</tool_call>"


@BY_ID_AND_BY_TEXT
def test_call_is_returned_with_its_last_token(tags: bool) -> None:
    chat = chat_format(tags=tags)
    before = written(chat, call_text("f", {"a": 1}))
    stream = HERMES.calls(chat, id_prefix="call_x")
    assert stream.feed(before[:-1]) == []
    (call,) = stream.feed(before[-1:])
    assert (call.id, call.name, call.arguments) == ("call_x_0", "f", {"a": 1})
    assert call.end == len(before)
    assert stream.feed(written(chat, " and more")) == []
    (second,) = stream.feed(written(chat, call_text("g", {})))
    assert (second.id, second.name) == ("call_x_1", "g")
    assert stream.finish() == []


@BY_ID_AND_BY_TEXT
def test_unclosed_call_at_the_end_of_a_turn_is_malformed(tags: bool) -> None:
    chat = chat_format(tags=tags)
    (call,) = feed(chat, written(chat, 'so <tool_call>\n{"name": "f"'))
    assert call.error is not None
    assert "not closed" in call.error
    assert '{"name": "f"' in call.raw


def test_opening_tag_within_a_malformed_call_starts_another() -> None:
    chat = chat_format()
    first, second = feed(chat, written(chat, '<tool_call>{"name": ' + call_text("f", {})))
    assert first.error is not None
    assert "another one opened inside it" in first.error
    assert (second.name, second.error) == ("f", None)
    assert first.end == second.start


@BY_ID_AND_BY_TEXT
def test_closing_marker_alone_is_only_text(tags: bool) -> None:
    chat = chat_format(tags=tags)
    assert feed(chat, written(chat, "</tool_call> hi </tool_call>")) == []


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_oversize_call_is_malformed_for_any_chunking(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(regions, "_MAX_REGION_TOKENS", 20)
    chat = chat_format()
    ids = written(chat, call_text("f", {"code": "x" * 200}) + call_text("g", {}))
    first, second = feed(chat, ids, range(0, len(ids), size))
    assert first.error is not None
    assert "exceeds 20 tokens" in first.error
    assert first.end <= 25
    assert second.name == "g"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("", "not valid JSON"),
        ("{nope}", "not valid JSON"),
        ('{"name": "f"} and more', "not valid JSON"),
        ("[1]", "must be a JSON object"),
        ("{}", 'has no "name"'),
        ('{"name": ""}', 'has no "name"'),
        ('{"name": 3}', 'has no "name"'),
        ('{"name": "f", "arguments": [1]}', '"arguments" must be a JSON object'),
        ('{"name": "f", "arguments": "{nope"}', '"arguments" is not valid JSON'),
        ('{"name": "f", "arguments": {"a": NaN}}', "NaN"),
        ('{"name": "f", "arguments": {"a": -Infinity}}', "Infinity"),
        ('{"name": "f", "arguments": {"a": 1e999}}', "1e999 is too large"),
        ('{"name": "f", "arguments": {"a": [-1e400, 99999999999999999999]}}', "too large"),
        ('{"name": "f", "arguments": "{\\"a\\": 1e999}"}', "too large"),
        ('{"name": "f", "arguments": {"a": 1' + "0" * 5000 + ".5}}", "too large"),
        ('{"name": "f", "arguments": {"a": "\\ud800"}}', "surrogate"),
        ('{"name": "f", "arguments": "{\\"a\\": \\"\\\\udc00\\"}"}', "surrogate"),
        ('{"name": "f", "arguments": {"a": ' + "9" * 5000 + "}}", "not valid JSON"),
    ],
)
def test_model_is_told_why_a_call_is_malformed(raw: str, reason: str) -> None:
    _, arguments, error = decode_call(raw)
    assert arguments == {}
    assert error is not None
    assert reason in error


@pytest.mark.parametrize("depth", [150, 100_000])
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
def test_deeply_nested_arguments_are_malformed(depth: int, opening: str, closing: str) -> None:
    value = opening * depth + ("1" if closing == "}" else "") + closing * depth
    _, _, error = decode_call(f'{{"name": "f", "arguments": {{"a": {value}}}}}')
    assert error is not None
    assert "nested too deeply" in error


def test_brackets_in_a_string_are_not_nesting() -> None:
    _, arguments, error = decode_call(json.dumps({"name": "f", "arguments": {"a": "[{" * 500}}))
    assert error is None
    assert arguments == {"a": "[{" * 500}


@pytest.mark.parametrize(
    ("raw", "arguments"),
    [
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": {}}', {}),
        ('{"arguments": {"a": 1}, "name": "f"}', {"a": 1}),
        ('{"name": "f", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "f", "arguments": {"code": "a = 1\nprint()\t"}}', {"code": "a = 1\nprint()\t"}),
        ('{"name": "f", "arguments": {"n": 123456789012345678901234567890}}',
         {"n": 123456789012345678901234567890}),
        ('{"name": "f", "arguments": {"s": "\\ud83d\\udc0d \\u00e9"}}', {"s": "🐍 é"}),
    ],
)  # fmt: skip
def test_valid_calls_are_decoded(raw: str, arguments: dict[str, Any]) -> None:
    assert decode_call(raw) == ("f", arguments, None)
