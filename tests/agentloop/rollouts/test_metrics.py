"""What tools raise in most of their calls is said, once for ten times as many calls."""

from __future__ import annotations

import logging

import pytest

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Grader, Reward
from agentloop.environments.tasks.sources import Task
from agentloop.events import Event, ToolRaised
from agentloop.rollouts.metrics import RaisedErrors
from agentloop.rollouts.record import RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner
from agentloop.trajectory import ToolCallStatus, ToolResult, Trajectory, Turn
from tests.rollouts import GroupPlayer

ERROR = "sqlite3.ProgrammingError"


def rollout(
    num_calls: int, raised: str = ERROR, status: ToolCallStatus = ToolCallStatus.ERROR
) -> RolloutRecord:
    result = ToolResult("c", "query", status, "", 0, 0, 0, raised)
    turn = Turn([1], [-1.0], results=[result] * num_calls)
    return RolloutRecord("1.0", [Trajectory("1.0", [9], [turn])], Reward(0.0, None, ""))


def test_repeated_after_ten_times_as_many_calls() -> None:
    errors = RaisedErrors()
    stated = [
        [event.text for event in errors.add("1", [rollout(num_calls)])]
        for num_calls in (9, 3, 100, 8, 1000)
    ]
    first = f"query raised {ERROR} in 12 of 12 calls"
    again = f"query raised {ERROR} in 120 of 120 calls"
    assert stated == [[], [first], [], [again], []]


def test_half_of_the_calls_is_not_most() -> None:
    errors = RaisedErrors()
    fine = rollout(20, raised="", status=ToolCallStatus.OK)
    assert errors.add("1", [rollout(20), fine]) == []
    ignored = rollout(100, raised="", status=ToolCallStatus.BAD_ARGUMENTS)
    assert [event.num_calls for event in errors.add("2", [rollout(1), ignored])] == [41]


async def test_event_and_line_in_terminal(caplog: pytest.LogCaptureFixture) -> None:
    async def play(prompt: object, **options: object) -> list[RolloutRecord]:
        return [rollout(48), rollout(48)]

    events: list[Event] = []
    async with Grader() as grader:
        runner = GroupRunner(GroupPlayer(play), grader, emit=events.append)
        with caplog.at_level(logging.WARNING):
            await runner.run(GroupRequest(Task("t", "?", "1"), "1-t", 2, Budget()))
    assert ToolRaised("1-t", "query", ERROR, 96, 96) in events
    assert f"query raised {ERROR} in 96 of 96 calls" in caplog.messages
