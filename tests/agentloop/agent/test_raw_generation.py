"""Generations without a template: their text, its tokens, and where it stops."""

from __future__ import annotations

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.agent.channels import StopFinder
from agentloop.agent.raw_generation import RawGeneration
from agentloop.errors import ServerUnavailable
from agentloop.inference.sglang.frames import Chunk, PromptLogprobs
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.trajectory import TurnEnd
from tests.support import END, ScriptedEngine, Step, chat_format, chunks, logprob, written

CHAT = chat_format()


def generation(
    *script: Step, stop: tuple[str, ...] = (), stop_ids: tuple[int, ...] = CHAT.stop_ids
) -> RawGeneration:
    requests = Generation("r", "k", [1, 2], Sampling(), 50, stop_ids)
    return RawGeneration(ScriptedEngine(script), CHAT, requests, CHAT.vocab_size, stop)


async def generate(*script: Step, stop: tuple[str, ...] = ()) -> RawGeneration:
    run = generation(*script, stop=stop)
    await run.run(30)
    assert isinstance(run.engine, ScriptedEngine)
    assert run.engine.forgotten == ["k"]
    return run


@given(
    st.lists(st.text("ab", max_size=4), max_size=8),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
)
def test_text_is_cut_before_the_first_complete_stop_sequence(
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


async def test_ending_token_is_reported_but_is_no_text() -> None:
    ids = written(CHAT, f"<tool_call> it is é{END}")
    run = await generate(*chunks(ids, range(1, len(ids))))
    assert run.text == "<tool_call> it is é"
    assert run.ids == ids
    assert run.logprobs == [logprob(at) for at in range(len(ids))]
    assert run.end is TurnEnd.STOP


@pytest.mark.parametrize("by_token", [False, True])
async def test_stop_sequence_ends_it(by_token: bool) -> None:
    ids = written(CHAT, "the answer is 1776.")

    async def never() -> None:
        await anyio.sleep_forever()

    script = chunks(ids, range(1, len(ids)) if by_token else (), end=None)
    run = await generate(*script, never, stop=("r is",))
    assert run.text == "the answe"
    assert run.end is TurnEnd.STOP
    assert CHAT.decode(run.ids).startswith("the answer is")
    assert len(run.ids) < len(ids)


async def test_half_a_character_comes_at_the_end() -> None:
    half = written(CHAT, "x stop é")[:-1]
    run = await generate(*chunks(half, end=TurnEnd.LENGTH), stop=("stop é!",))
    assert run.text == CHAT.decode(half)


async def test_log_probabilities_of_the_prompt_are_kept() -> None:
    scores = PromptLogprobs([None, -1.0], [[], []])
    first = Chunk([5], [-0.5], "v0", prompt=scores)
    empty, last = Chunk([], [], "v0"), Chunk([6], [-0.5], "v0", end=TurnEnd.LENGTH)
    assert (await generate(empty, first, last)).prompt == scores


async def test_late_generation_is_cut_off() -> None:
    async def hang() -> None:
        await anyio.sleep_forever()

    run = generation(*chunks(written(CHAT, "x ab"), end=None), hang, stop=("abc",))
    await run.run(0.05)
    assert (run.text, run.end) == ("x ab", TurnEnd.LENGTH)
    with pytest.raises(ServerUnavailable, match="no token was sampled within"):
        await generation(hang).run(0.05)
