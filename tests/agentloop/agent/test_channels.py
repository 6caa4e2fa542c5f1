"""Reasoning, content and markup are separated for any chunking of the text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from agentloop.agent.channels import Channel, Channels, Speech, answer_in

TAGS = ["<think>", "</think>", "<reason>", "</reason>", "<answer>", "</answer>", "<|im_end|>"]
MARKUP = [*TAGS, "<tool_call>", "</tool_call>", "<", "</", "<|", "|>", f"<|{'a' * 30}|>"]
texts = st.lists(st.one_of(st.sampled_from(MARKUP), st.text(max_size=5)), max_size=10).map("".join)


def split_text(text: str, cuts: list[int], *, reasoning: bool = False) -> dict[Channel, str]:
    channels = Channels(reasoning=reasoning)
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    texts = dict.fromkeys(Channel, "")
    for start, stop in itertools.pairwise(edges):
        for channel, piece in channels.feed(text[start:stop]):
            texts[channel] += piece
    for channel, piece in channels.flush():
        texts[channel] += piece
    return texts


@settings(max_examples=100, deadline=None)
@given(texts, st.lists(st.integers(0, 60), max_size=6), st.booleans())
@example(f"<|{'a' * 30}|>", list(range(40)), False)
def test_channels_do_not_depend_on_chunking(text: str, cuts: list[int], reasoning: bool) -> None:
    assert split_text(text, cuts, reasoning=reasoning) == split_text(text, [], reasoning=reasoning)


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
def test_text_is_split_into_reasoning_and_content(
    text: str, reasoning: bool, thought: str, answer: str
) -> None:
    texts = split_text(text, [], reasoning=reasoning)
    assert (texts[Channel.REASONING], texts[Channel.CONTENT]) == (thought, answer)


def test_text_is_emitted_as_soon_as_it_is_unambiguous() -> None:
    channels = Channels(reasoning=False)
    assert list(channels.feed("abc <")) == [(Channel.CONTENT, "abc ")]
    assert list(channels.feed("/t")) == []  # it may become one of two tags
    assert list(channels.feed("x")) == [(Channel.CONTENT, "</tx")]
    assert list(channels.feed("<|a_")) == []
    assert list(channels.feed("-")) == [(Channel.CONTENT, "<|a_-")]


Said = list[tuple[Channel, str]]
THOUGHT, CONTENT = Channel.REASONING, Channel.CONTENT


def speak(turns: list[str], cuts: list[int], *, reasoning: bool, stop: list[str]) -> Said:
    """Return the output of a `Speech` for these turns, each cut at the same places."""
    pieces: Said = []
    speech = Speech(reasoning=reasoning, stop=stop)
    for text in turns:
        edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
        for start, end in itertools.pairwise(edges):
            pieces += speech.feed(text[start:end])
        pieces += speech.end_turn()
    return pieces


def join_channel(pieces: Said, channel: Channel) -> str:
    return "".join(piece for of, piece in pieces if of is channel)


stops = st.lists(st.text("ab\n ", min_size=1, max_size=4), max_size=4)
passages = st.lists(
    st.one_of(st.sampled_from(MARKUP), st.text("ab\n \u3000", max_size=6)), max_size=8
).map("".join)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(passages, max_size=3), st.lists(st.integers(0, 40), max_size=8), st.booleans(), stops
)
@example(["aab"], [1, 2], False, ["ab"])
@example(["abc"], [1, 2], False, ["abc", "b"])
@example(["a", "b"], [], False, ["\n\n", "ab"])
@example([" \n\nb"], [1, 2, 3], False, ["\n\n", "\nb"])
def test_speech_does_not_depend_on_chunking(
    turns: list[str], cuts: list[int], reasoning: bool, stop: list[str]
) -> None:
    expected = speak(turns, [], reasoning=reasoning, stop=stop)
    cut = speak(turns, cuts, reasoning=reasoning, stop=stop)
    for channel in Channel:
        text = join_channel(expected, channel)
        assert join_channel(cut, channel) == text
        assert text == text.strip()
    channels: set[Channel] = set()
    for channel, piece in cut:
        assert piece.strip()  # whitespace opens nothing, and follows nothing
        assert channel in channels or piece == piece.lstrip()
        assert piece == piece.rstrip()
        channels.add(channel)


@settings(max_examples=300, deadline=None)
@given(st.text("ab\n ", max_size=12), st.lists(st.integers(0, 12), max_size=6), stops)
def test_content_ends_before_the_first_stop_sequence_that_is_complete(
    text: str, cuts: list[int], stop: list[str]
) -> None:
    num_leading = len(text) - len(text.lstrip())
    ends = [
        (end, end - len(sequence))
        for end in range(num_leading + 1, len(text) + 1)
        for sequence in stop
        if text[:end].endswith(sequence)
    ]
    expected = text[: min(ends)[1]] if ends else text
    pieces = speak([text], cuts, reasoning=False, stop=stop)
    assert join_channel(pieces, CONTENT) == expected.strip()


@pytest.mark.parametrize(
    ("turns", "reasoning", "thought", "content"),
    [
        (["hm\n</think>\n\n42\n<|im_end|>"], True, "hm", "42"),
        (["\nhm\n<tool_call>{}</tool_call>\n", "\nso</think>\n42"], True, "hm\n\nso", "42"),
        (["Wait.\n<tool_call>{}</tool_call>", "42"], False, "", "Wait.\n\n42"),
        (["a <tool_call>{}</tool_call> b"], False, "", "a  b"),
        (["\n<tool_call>{}</tool_call>\n"], False, "", ""),
        (["a<think>x</think>b<think>y</think>\n"], False, "x\n\ny", "a\n\nb"),
    ],
)
def test_passages_have_no_whitespace_around_them(
    turns: list[str], reasoning: bool, thought: str, content: str
) -> None:
    pieces = speak(turns, list(range(40)), reasoning=reasoning, stop=[])
    assert (join_channel(pieces, THOUGHT), join_channel(pieces, CONTENT)) == (thought, content)


@pytest.mark.parametrize(
    ("text", "stop", "content"),
    [
        ("so\n\nfirst\n\nsecond", ["\n\n"], ""),  # of the thought, it stops nothing
        ("so</think>\n\nfirst\n\nsecond", ["\n\n"], "first"),
        ("so</think>\nQ: why?", ["\nQ:"], ""),
        ("so</think>1 </code> 2", ["</code>"], "1"),
        ("so</think>1 2 3", ["3", "2 "], "1"),
        ("so</think>END<tool_call>END</tool_call>", ["ENDE"], "END"),
        ("so</think>a<tool_call>STOP</tool_call>", ["STOP"], "a"),
    ],
)
def test_stop_sequences_are_searched_only_in_content(
    text: str, stop: list[str], content: str
) -> None:
    assert (
        join_channel(speak([text], list(range(40)), reasoning=True, stop=stop), CONTENT) == content
    )
    assert answer_in(text, reasoning=True, stop=stop) == content


def test_stop_sequence_is_found_at_its_last_character() -> None:
    speech = Speech(reasoning=False, stop=["</code>"])
    for character in "1 </code":
        list(speech.feed(character))
        assert not speech.stopped
    list(speech.feed(">"))
    assert speech.stopped
    assert list(speech.feed("more")) == list(speech.end_turn()) == []
