"""A trajectory as the page shows it: token by token, for any split of characters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.agent.chat_format import ChatFormat
from agentloop.observe.record import RecordReader
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)
from tests.support import END, call_text, chat_format, logprob, written

CHAT = chat_format()
PER_TOKEN = ("pieces", "ids", "logprobs")


def apply_delta(state: dict[str, Any], delta: dict[str, Any]) -> dict[str, Any]:
    """Apply a delta as the page does."""
    first, token, turns = delta["turn"], delta["token"], delta["turns"]
    old = state["turns"][first] if first < len(state["turns"]) else None
    new = [dict(turn) for turn in turns]
    if new and old is not None:
        for name in PER_TOKEN:
            if new[0][name] is not None and old[name] is not None:
                assert token <= len(old[name])
                new[0][name] = old[name][:token] + new[0][name]
    return {**state, "turns": state["turns"][:first] + new}


# A turn's text, how many tokens come at once, and what its observation says.
texts = st.text("aé€🙂 \n<", max_size=12) | st.sampled_from([call_text("x", {"a": 1}), "", "�"])
turns = st.lists(
    st.tuples(texts, st.lists(st.integers(1, 4), max_size=8), st.booleans(), texts, st.booleans()),
    min_size=1,
    max_size=3,
)


class Growing:
    """A record that grows like that of a rollout and can be read after each step."""

    def __init__(self, script: Sequence[tuple[str, list[int], bool, str, bool]]) -> None:
        self.record = Trajectory("r", written(CHAT, "why?"), created_unix_s=5.0)
        self._script = script

    def steps(self) -> Any:
        for number, (text, cuts, is_cut_off, observation, has_call) in enumerate(self._script):
            turn = Turn(started_s=number + 0.1)
            self.record.turns.append(turn)
            yield
            ids = written(CHAT, text + END)
            if is_cut_off:  # in the middle of a character, perhaps
                ids = ids[: max(1, len(ids) - 2)]
            turn.servers.append("http://fake")
            yield
            for size in [*cuts, len(ids)]:
                chunk, ids = ids[:size], ids[size:]
                at = len(turn.output_ids)
                turn.output_ids += chunk
                yield  # as another thread may see it
                turn.logprobs += [logprob(at + i) for i in range(len(chunk))]
                turn.versions = [VersionSpan("0", 0, len(turn.output_ids))]
                yield
            turn.text = CHAT.decode(turn.output_ids)
            if has_call:
                turn.calls.append(ToolCall(f"c{number}", "x", {"n": 2**70}, "", 0, 1))
                yield
                result = ToolResult(f"c{number}", "x", ToolCallStatus.OK, "y", 0.0, 0.5, 1.0)
                turn.results = [result]
            turn.end = TurnEnd.LENGTH if is_cut_off else TurnEnd.STOP
            turn.generated_s = turn.ended_s = number + 0.9
            yield
            turn.observation_ids = written(CHAT, observation)
            yield
        self.record.stop_reason = StopReason.ANSWERED


@pytest.mark.parametrize("chat", [CHAT, None])
@settings(max_examples=50, deadline=None)
@given(turns, st.lists(st.booleans(), max_size=60), st.integers(0, 20))
def test_deltas_add_up_to_the_whole_trajectory(
    chat: ChatFormat | None, script: list[Any], looks: list[bool], joins: int
) -> None:
    growing = Growing(script)
    reader = RecordReader(growing.record, chat)
    state: dict[str, Any] | None = None
    for number, _ in enumerate(growing.steps()):
        if number == joins:
            state = reader.whole()
        elif state is not None and (not looks or looks[number % len(looks)]):
            delta = reader.delta()
            state = state if delta is None else apply_delta(state, delta)
    if state is None:
        state = reader.whole()
    if (delta := reader.delta()) is not None:
        state = apply_delta(state, delta)
    assert reader.delta() is None
    expected = RecordReader(growing.record, chat).whole()
    assert state["turns"] == expected["turns"]
    assert reader.whole() == expected


@settings(max_examples=50, deadline=None)
@given(turns)
def test_there_is_one_piece_of_text_per_token(script: list[Any]) -> None:
    growing = Growing(script)
    for _ in growing.steps():
        pass
    for sent, turn in zip(
        RecordReader(growing.record, CHAT).whole()["turns"], growing.record.turns, strict=True
    ):
        assert len(sent["pieces"]) == len(sent["ids"]) == len(sent["logprobs"])
        assert sent["ids"] == turn.output_ids
        assert "".join(sent["pieces"]) == CHAT.decode(turn.output_ids)


def test_character_of_several_tokens_is_sent_when_complete() -> None:
    ids = written(CHAT, "🙂")
    assert len(ids) > 1
    turn = Turn(output_ids=ids, logprobs=[0.0] * len(ids))
    reader = RecordReader(Trajectory("r", [], [turn]), CHAT)
    assert reader.whole()["turns"][0]["pieces"] == [""] * (len(ids) - 1) + ["🙂"]


def test_incomplete_character_is_sent_at_the_end() -> None:
    ids = written(CHAT, "a🙂")[:-1]
    turn = Turn(output_ids=ids, logprobs=[0.0] * len(ids))
    reader = RecordReader(Trajectory("r", [], [turn]), CHAT)
    state = reader.whole()
    assert "".join(state["turns"][0]["pieces"]) == "a"
    turn.ended_s = 1.0
    delta = reader.delta()
    assert delta is not None
    text = "".join(apply_delta(state, delta)["turns"][0]["pieces"])
    assert text == CHAT.decode(ids)
    assert "�" in text


def test_verdict_is_included() -> None:
    verdict: dict[str, Any] = {"state": "live", "reward": None}
    reader = RecordReader(Trajectory("r", [1, 2]), None, lambda: verdict)
    assert reader.whole()["state"] == "live"
    verdict["reward"] = 1.0
    assert reader.whole()["reward"] == 1.0
    assert reader.whole()["prompt_tokens"] == 2


@settings(max_examples=25, deadline=None)
@given(turns)
def test_written_trajectory_can_be_read_back(script: list[Any]) -> None:
    growing = Growing(script)
    for _ in growing.steps():
        pass
    read = Trajectory.from_dict(json.loads(json.dumps(growing.record.to_dict())))
    assert asdict(read) == asdict(growing.record)


@pytest.mark.parametrize(
    "change",
    [
        {"turns": None}, {"turns": [{}]}, {"stop_reason": "tired"}, {"turns": [{"end": "stop"}]},
        {"turns": "ab"}, {"stop_reason": None},
    ],
)  # fmt: skip
def test_invalid_trajectories_raise_documented_errors(change: dict[str, Any]) -> None:
    row = Trajectory("r", [1]).to_dict() | change
    with pytest.raises((KeyError, TypeError, ValueError)):
        Trajectory.from_dict(row)
