"""Thoughts, answers and markup are told apart however the text is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentloop.agent.channels import Channel, Channels

TAGS = ["<think>", "</think>", "<reason>", "</reason>", "<answer>", "</answer>", "<|im_end|>"]
MARKUP = [*TAGS, "<tool_call>", "</tool_call>", "<", "</", "<|", "|>", f"<|{'a' * 30}|>"]
texts = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=5)), max_size=10).map("".join)


def told(text: str, cuts: list[int], *, reasoning: bool = False) -> dict[Channel, str]:
    channels = Channels(reasoning=reasoning)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    said = dict.fromkeys(Channel, "")
    for start, stop in itertools.pairwise(edges):
        for channel, piece in channels.feed(text[start:stop]):
            said[channel] += piece
    for channel, piece in channels.flush():
        said[channel] += piece
    return said


@settings(max_examples=100, deadline=None)
@given(texts, st.lists(st.integers(0, 60), max_size=6), st.booleans())
@example(f"<|{'a' * 30}|>", list(range(40)), False)
def test_any_cut_tells_the_same(text: str, cuts: list[int], reasoning: bool) -> None:
    assert told(text, cuts, reasoning=reasoning) == told(text, [], reasoning=reasoning)


@pytest.mark.parametrize(
    ("text", "reasoning", "thought", "answer"),
    [
        ("hello", False, "", "hello"),
        ("so</think>42", True, "so", "42"),
        ("<think>so</think>42<|im_end|>", False, "so", "42"),
        ("hm<answer>42</answer>", True, "hm", "42"),
        ("a <tool_call>{}</tool_call> b", False, "", "a  b"),
        ('<tool_call>print("<think>")</tool_call>b', False, "", "b"),
        ('<tool_call>"</reason>"</tool_call>b', True, "b", ""),
        ("1 < 2", False, "", "1 < 2"),
        ("ends with <tool_ca", False, "", "ends with <tool_ca"),
    ],
)
def test_who_hears_what(text: str, reasoning: bool, thought: str, answer: str) -> None:
    said = told(text, [], reasoning=reasoning)
    assert (said[Channel.REASONING], said[Channel.CONTENT]) == (thought, answer)


def test_text_is_told_as_soon_as_it_is_certain() -> None:
    channels = Channels(reasoning=False)
    assert list(channels.feed("abc <")) == [(Channel.CONTENT, "abc ")]
    assert list(channels.feed("b")) == []
    assert list(channels.feed(" c" * 12)) == [(Channel.CONTENT, "<b" + " c" * 12)]
