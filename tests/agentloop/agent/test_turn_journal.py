"""Conversations that a kill interrupts go on after their last kept turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from agentloop.agent.rollout import Budget, Rollout
from agentloop.agent.tools import as_tool
from agentloop.agent.turn_journal import TurnJournal
from agentloop.errors import RunFolderError, ServerUnavailable
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import JsonObject, dumps, loads
from agentloop.trajectory import StopReason, Trajectory
from tests.agentloop.agent.test_rollout import ASKED, CHAT, multiply, says
from tests.support import ScriptedEngine, call_text

CALL = call_text("multiply", {"a": 37, "b": 48})
LOST: Any = [ServerUnavailable("killed")]  # in place of a turn that a kill cuts off


class Disk:
    """Keeps rows as the journal of a run does."""

    def __init__(self) -> None:
        self.rows: dict[int, JsonObject] = {}
        self.error: Exception | None = None

    async def keep(self, turn: int, row: JsonObject) -> None:
        if self.error is not None:
            raise self.error
        self.rows[turn] = loads(dumps(row))

    def journal(self) -> TurnJournal:
        return TurnJournal(self.keep, dict(self.rows))


async def run(
    disk: Disk, engine: ScriptedEngine, tools: Sequence[Any] = (multiply,), **options: Any
) -> Trajectory:
    rollout = Rollout(engine, CHAT, ASKED, tools, journal=disk.journal(), id="1-t.0", **options)
    return await rollout.run()


async def test_conversation_goes_on_after_its_last_kept_turn() -> None:
    called: list[tuple[int, int]] = []

    def multiply(a: int, b: int) -> int:
        """Multiply two integers."""
        called.append((a, b))
        return a * b

    tool: Any = as_tool(multiply)
    tool.is_stateless = True
    disk = Disk()
    cut = await run(disk, ScriptedEngine(says(CALL), says(CALL), LOST), [tool])
    assert (cut.stop_reason, len(called)) == (StopReason.INFRASTRUCTURE, 2)
    engine = ScriptedEngine(says("1776"))
    complete = await run(disk, engine, [tool])
    assert (complete.stop_reason, complete.answer, len(called)) == (StopReason.ANSWERED, "1776", 2)
    assert loads(dumps(complete.turns[:2])) == loads(dumps(cut.turns[:2]))
    assert engine.asked[0].ids == cut.ids
    assert complete.elapsed_s >= cut.turns[1].ended_s
    # Now the whole conversation is kept.
    assert (await run(disk, ScriptedEngine(), [tool])).ids == complete.ids


@pytest.mark.parametrize(
    "changed",
    [{"sampling": Sampling(temperature=0.5)}, {"budget": Budget(max_tool_response_tokens=9)}],
)
async def test_other_settings_start_conversation_anew(changed: dict[str, Any]) -> None:
    disk = Disk()
    await run(disk, ScriptedEngine(says(CALL), LOST))
    engine = ScriptedEngine(says("no"))
    assert (await run(disk, engine, **changed)).answer == "no"


async def test_limit_of_turns_holds_over_kills() -> None:
    disk, budget = Disk(), Budget(max_turns=2)
    await run(disk, ScriptedEngine(says(CALL), LOST), budget=budget)
    complete = await run(disk, ScriptedEngine(says(CALL)), budget=budget)
    assert (complete.stop_reason, len(complete.turns)) == (StopReason.TURN_BUDGET, 2)


@pytest.mark.parametrize("may_repeat", [True, False])
async def test_call_in_a_killed_turn_runs_twice_only_if_it_may(may_repeat: bool) -> None:
    called: list[int] = []

    def multiply(a: int, b: int) -> int:
        """Multiply two integers."""
        called.append(a)
        return a * b

    tool: Any = as_tool(multiply)
    tool.is_stateless, tool.may_repeat = True, may_repeat
    disk = Disk()
    await run(disk, ScriptedEngine(says(CALL)[:-1] + LOST), [tool])
    again = await run(disk, ScriptedEngine(says(CALL), says("1776")), [tool])
    if may_repeat:
        assert again.answer == "1776"
    else:
        assert len(called) <= 1
        assert again.stop_reason is StopReason.INFRASTRUCTURE
        assert "a kill cut off a call of multiply" in str(again.error)


async def test_conversation_with_state_in_tools_is_not_kept() -> None:
    called: list[int] = []

    class Board:
        def multiply(self, a: int, b: int) -> int:
            """Multiply two integers."""
            return a * b

    def nested(a: int, b: int) -> int:
        """Multiply two integers."""
        called.append(a)
        return a * b

    nested.__name__ = "multiply"
    for tool in (Board().multiply, nested):
        disk = Disk()
        await run(disk, ScriptedEngine(says(CALL), says("1776")), [tool])
        assert not disk.rows


async def test_replies_to_kept_answers_are_asked_for_again() -> None:
    heard: list[str] = []
    replies = {"one": "go on", "two": "go on", "three": None}

    async def reply(answer: str) -> str | None:
        heard.append(answer)
        return replies[answer]

    disk = Disk()
    await run(disk, ScriptedEngine(says("one"), says("two"), LOST), reply=reply)
    await run(disk, ScriptedEngine(says("three")), reply=reply)
    assert heard == ["one", "two", "one", "two", "three"]
    # Another reply: the model goes on from there.
    replies["one"] = "what?"
    complete = await run(disk, ScriptedEngine(says("three")), reply=reply)
    assert [turn.text.partition("<")[0] for turn in complete] == ["one", "three"]


async def test_journal_that_is_lost_is_no_reward() -> None:
    disk = Disk()
    disk.error = RunFolderError("the disk is full")
    lost = await run(disk, ScriptedEngine(says("1776")))
    assert (lost.stop_reason, lost.error) == (StopReason.INFRASTRUCTURE, "the disk is full")
