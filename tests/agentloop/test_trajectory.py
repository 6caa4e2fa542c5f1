"""The properties of trajectories."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.plain_json import dumps, loads
from agentloop.token_records import KeptIds, RoutedExperts
from agentloop.trajectory import (
    Message,
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
    rollout_of,
)

MADE = Trajectory(
    "t",
    [1, 2],
    [
        Turn(
            output_ids=[3, 4, 5],
            logprobs=[-0.1, -0.2, -0.3],
            versions=[VersionSpan("v1", 0, 2), VersionSpan("v2", 2, 3)],
            end=TurnEnd.STOP,
            calls=[ToolCall("c", "f", {"a": 1}, "{}", 0, 3)],
            results=[ToolResult("c", "f", ToolCallStatus.OK, "x", 0.0, 0.1, 0.2)],
            observation_ids=[6],
            text="first",
        ),
        Turn(output_ids=[7], logprobs=[-0.4], versions=[VersionSpan("v2", 0, 1)], text="last"),
    ],
)


def test_everything_beside_the_ids_is_as_long_as_they() -> None:
    assert MADE.ids == [1, 2, 3, 4, 5, 6, 7]
    assert MADE.mask == [0, 0, 1, 1, 1, 0, 1]
    assert MADE.logprobs == [0, 0, -0.1, -0.2, -0.3, 0, -0.4]
    assert MADE.versions == [None, None, "v1", "v1", "v2", None, "v2"]
    assert (MADE.num_response_tokens, MADE.num_sampled_tokens) == (5, 4)
    assert [call.id for call in MADE.calls] == [result.call_id for result in MADE.results]
    assert MADE.text == "last"
    assert list(MADE) == MADE.turns


def test_empty_one_is_one_too() -> None:
    empty = Trajectory("t", [])
    assert (empty.ids, empty.mask, empty.logprobs, empty.versions, empty.text) == (
        [],
        [],
        [],
        [],
        "",
    )
    assert empty.stop_reason.is_unscorable  # until it is known better


def test_lists_of_all_tokens_are_added_to_plain_data() -> None:
    data = MADE.to_dict_per_token()
    assert (data["ids"], data["mask"]) == (MADE.ids, MADE.mask)
    assert (data["logprobs"], data["versions"]) == (MADE.logprobs, MADE.versions)


def test_plain_data_is_json_and_can_be_read_again() -> None:
    data = json.loads(json.dumps(MADE.to_dict()))
    assert "ids" not in data
    assert Trajectory.from_dict(data) == MADE
    assert data["stop_reason"] == "infrastructure"
    assert data["turns"][0]["calls"][0]["arguments"] == {"a": 1}


@pytest.mark.parametrize("status", list(ToolCallStatus))
def test_model_is_not_blamed_for_what_others_did(status: ToolCallStatus) -> None:
    not_failures = {"ok", "caller", "cancelled", "infrastructure"}
    assert status.failed == (status.value not in not_failures)


def test_only_what_we_broke_or_stopped_goes_unscored() -> None:
    ours = {"infrastructure", "straggler", "cancelled", "environment"}
    assert {str(reason) for reason in StopReason if reason.is_unscorable} == ours


def ran(*spans: tuple[float, float], elapsed_s: float = 10.0) -> Trajectory:
    results = [ToolResult("c", "f", ToolCallStatus.OK, "", 0.0, *span) for span in spans]
    return Trajectory("t", [1], [Turn(results=results)], elapsed_s=elapsed_s)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ((), 0.0),
        (((1.0, 3.0), (5.0, 6.0)), 3.0),
        (((1.0, 4.0), (2.0, 3.0), (2.0, 6.0)), 5.0),  # side by side
    ],
)
def test_time_in_which_tools_ran(spans: tuple[tuple[float, float], ...], seconds: float) -> None:
    assert ran(*spans).tool_run_s == seconds


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=8))
@settings(deadline=None)
def test_time_in_which_tools_ran_is_that_of_any(spans: list[list[int]]) -> None:
    seconds = {second for start, end in spans for second in range(start, end)}
    assert ran(*((float(start), float(end)) for start, end in spans)).tool_run_s == len(seconds)


def test_calls_that_took_half_the_time_used_it_up() -> None:
    assert ran((0.0, 2.0), (4.0, 7.0)).used_its_time
    assert not ran((0.0, 4.9)).used_its_time  # the rest was waited for
    assert not ran(elapsed_s=10.0).used_its_time
    assert not ran(elapsed_s=0.0).used_its_time  # nothing is known


@given(
    st.text(), st.integers(0, 99), st.lists(st.from_regex(r"[a-z_][a-z_0-9]*|\d+", fullmatch=True))
)
def test_conversations_id_begins_with_its_rollouts(
    group: str, index: int, later: list[str]
) -> None:
    rollout = f"{group}.{index}"
    assert rollout_of("+".join([rollout, *later])) == rollout


roles = st.lists(st.sampled_from(["system", "user", "assistant", "tool"]), max_size=4)
later_roles = st.lists(st.lists(st.sampled_from(["user", "tool"]), max_size=3), max_size=4)


@given(roles, later_roles, st.booleans())
@settings(deadline=None)
def test_messages_are_those_before_and_after_each_turn(
    before: list[str], after: list[list[str]], is_cut_off: bool
) -> None:
    prompt: list[Message] = [{"role": role} for role in before]
    between: list[list[Message]] = [[{"role": role} for role in roles_of] for roles_of in after]
    answer: Message = {"role": "assistant"}
    messages = [
        *prompt,
        *(message for messages_heard in between for message in [answer, *messages_heard]),
    ]
    turns = [Turn(end=TurnEnd.STOP) for _ in between] + [Turn()] * is_cut_off
    assert Trajectory("t", [], turns, messages=messages).messages_between == [prompt, *between]


def test_experts_of_a_token_are_those_recorded_first() -> None:
    turns = [
        Turn([3, 9], observation_ids=[6], experts=RoutedExperts(0, 2, bytes(6)), end=TurnEnd.STOP),
        Turn([4], observation_ids=[5]),  # its stream broke before its last frame
        Turn([7, 8], experts=RoutedExperts(2, 2, bytes(range(12)))),
    ]
    trajectory = Trajectory("t", [1, 2], turns)
    assert trajectory.experts == [turns[0].experts, RoutedExperts(3, 2, bytes(range(2, 12)))]
    assert trajectory.num_routed == len(trajectory.ids) - 1 == 8
    assert Trajectory.from_dict(loads(dumps(trajectory))) == trajectory
    assert Trajectory.from_dict(trajectory.to_dict()) == trajectory


def test_kept_ids_are_as_long_as_all_ids() -> None:
    kept = KeptIds([[4, 3], [9]])
    turn = Turn([3, 9], [-0.1, 0.0], observation_ids=[6], end=TurnEnd.STOP, kept=kept)
    assert Turn.from_dict(loads(dumps(turn))) == turn  # as the journal keeps it
    trajectory = Trajectory("t", [1, 2], [turn, Turn([7], [-0.4])])
    assert trajectory.kept == KeptIds([[], [], [4, 3], [9], [], []])
    for row in (trajectory.to_dict(), loads(dumps(trajectory)), loads(dumps(trajectory.to_dict()))):
        assert Trajectory.from_dict(row) == trajectory
    assert loads(dumps(trajectory)) == loads(dumps(trajectory.to_dict()))


def test_turns_of_the_whole_distribution_have_no_kept_ids() -> None:
    assert Trajectory.from_dict(loads(dumps(MADE))).kept is None
