"""Generations without a template: their text, its tokens, and where it stops."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.agent.channels import StopFinder
from agentloop.agent.raw_generation import GeneratedPiece, RawGeneration
from agentloop.inference.sglang.frames import Chunk, PromptLogprobs
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.trajectory import TurnEnd
from tests.support import END, ScriptedEngine, Step, chat_format, chunks, logprob, written

pytestmark = pytest.mark.anyio

CHAT = chat_format()


async def generate(
    *script: Step, stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] = CHAT.stop_ids
) -> list[GeneratedPiece]:
    engine, pieces = ScriptedEngine(script), list[GeneratedPiece]()
    await RawGeneration(
        engine,
        CHAT,
        Generation("r", "k", [1, 2], Sampling(), 50, stop_ids),
        vocab_size=CHAT.vocab_size,
        stop=stop,
        on_piece=pieces.append,
    ).run()
    assert engine.forgotten == ["k"]
    assert [bool(piece.end) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    return pieces


def text_of(pieces: list[GeneratedPiece]) -> str:
    return "".join(piece.text for piece in pieces)


def ids_of(pieces: list[GeneratedPiece]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_is_cut_before_the_stop_sequence_that_is_complete_first(
    pieces: list[str], stop: list[str]
) -> None:
    finder, text = StopFinder(stop), "".join(pieces)
    returned = "".join([*map(finder.feed, pieces), finder.flush()])
    ends = [(at + len(sequence), at) for sequence in stop if (at := text.find(sequence)) >= 0]
    assert (finder.matched is not None) == bool(ends)
    assert returned == (text[: min(ends)[1]] if ends else text)


def test_text_is_held_back_no_longer_than_needed() -> None:
    finder = StopFinder(["abc"])
    assert [finder.feed(piece) for piece in ("xa", "b", "xab", "ab")] == ["x", "", "abx", "ab"]
    assert finder.flush() == "ab"


async def test_the_token_that_ends_it_is_reported_but_is_no_text() -> None:
    ids = written(CHAT, f"<tool_call> it is é{END}")
    pieces = await generate(*chunks(ids, range(1, len(ids))))
    assert text_of(pieces) == "<tool_call> it is é"
    assert ids_of(pieces) == ids
    assert [value for piece in pieces for value in piece.logprobs] == [
        logprob(at) for at in range(len(ids))
    ]
    assert pieces[-1].end is TurnEnd.STOP


@pytest.mark.parametrize("cuts", [(), (1, 2, 3), range(1, 9)])
async def test_offsets_are_where_the_texts_of_tokens_begin(cuts: tuple[int, ...]) -> None:
    text = "the é result"
    ids = written(CHAT, text)
    inside = [cut for cut in cuts if cut < len(ids)]
    pieces = await generate(*chunks(ids, inside, end=TurnEnd.LENGTH))
    offsets = [offset for piece in pieces for offset in piece.offsets]
    for offset, token in zip(offsets, ids, strict=True):
        spelled = CHAT.decode([token])
        assert "\ufffd" in spelled or text[offset:].startswith(spelled)
    assert offsets == sorted(offsets)


@pytest.mark.parametrize("by_token", [False, True])
async def test_a_stop_sequence_ends_it(by_token: bool) -> None:
    ids = written(CHAT, "the answer is 1776.")

    async def never() -> None:
        await anyio.sleep_forever()

    script = chunks(ids, range(1, len(ids)) if by_token else (), end=None)
    pieces = await generate(*script, never, stop=("r is",))
    assert text_of(pieces) == "the answe"
    assert pieces[-1].end is TurnEnd.STOP
    assert CHAT.decode(ids_of(pieces)).startswith("the answer is")
    assert len(ids_of(pieces)) < len(ids)


async def test_half_a_character_and_half_a_stop_sequence_come_at_the_end() -> None:
    half = written(CHAT, "x stop é")[:-1]
    pieces = await generate(*chunks(half, end=TurnEnd.LENGTH), stop=("stop é!",))
    assert text_of(pieces) == CHAT.decode(half)


async def test_the_prompts_log_probabilities_come_with_the_first_piece() -> None:
    scores = PromptLogprobs([None, -1.0], [[], []])
    first = Chunk([5], [-0.5], "v0", prompt=scores)
    empty, last = Chunk([], [], "v0"), Chunk([6], [-0.5], "v0", end=TurnEnd.LENGTH)
    pieces = await generate(empty, first, last)
    assert [piece.prompt for piece in pieces] == [scores, None]


async def test_a_generation_that_is_cut_off_reports_the_text_held_back() -> None:
    pieces: list[GeneratedPiece] = []
    waiting = anyio.Event()

    async def hang() -> None:
        waiting.set()
        await anyio.sleep_forever()

    run = RawGeneration(
        ScriptedEngine([*chunks(written(CHAT, "x ab"), end=None), hang]),
        CHAT,
        Generation("r", "k", [1, 2], Sampling(), 50, CHAT.stop_ids),
        vocab_size=CHAT.vocab_size,
        stop=("abc",),
        on_piece=pieces.append,
    )
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run.run)
        await waiting.wait()
        tasks.cancel_scope.cancel()
    assert text_of(pieces) == "x "
    run.cut_off()
    assert (text_of(pieces), pieces[-1].end) == ("x ab", TurnEnd.LENGTH)
