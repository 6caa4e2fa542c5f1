"""A judge and a simulated user on a real server."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

import agentloop
from agentloop.environments.endpoint import Endpoint
from agentloop.environments.judge import Judge
from agentloop.environments.simulated_user import SimulatedUser
from agentloop.errors import InfrastructureFailed
from agentloop.trajectory import StopReason

pytestmark = pytest.mark.timeout(300)


async def test_model_that_cannot_judge_costs_money_and_gives_no_score(sglang_url: str) -> None:
    """The small model only knows arithmetic, and the server counts its tokens."""
    model = Endpoint(
        f"{sglang_url}/v1",
        options={"max_tokens": 8, "temperature": 0},
        prices=(1e6, 1e6),
        max_cost=1e6,
        max_requests=3,
    )
    with pytest.raises(InfrastructureFailed, match="the judge gave no verdict in 2 tries"):
        await Judge(model, "1: right. 0: wrong.")("1 + 1 = 2")
    assert model.num_requests == 2
    assert model.cost > 100  # the prompts alone have as many tokens
    user = SimulatedUser(model, "You want to know what 37 times 48 is.")
    with suppress(InfrastructureFailed):  # it may say nothing
        assert await user.begin()
    assert model.num_requests == 3


async def test_opponent_that_a_real_server_plays(sglang_url: str) -> None:
    """The small model answers in text, as the server parses no tool calls."""

    def double(number: int) -> int:
        """Return twice the number."""
        return 2 * number

    model = Endpoint(f"{sglang_url}/v1", options={"temperature": 0})

    @agentloop.environment
    async def against(task: Any, agent: agentloop.Agent) -> float:
        opponent = agent.other("opponent", player=model)
        async with opponent.conversation(tools=[double], max_tokens=32) as talk:
            answers = [await talk.ask("What is 2 plus 3?")]
            if not talk.has_ended:  # by the limit of tokens
                answers.append(await talk.ask("And 4 plus 4?"))
        return len(answers)

    played = await agentloop.play(against, {}, lambda messages: "It is their turn.")
    (record,) = played.record.others["opponent"].trajectories
    assert record.stop_reason in (StopReason.ANSWERED, StopReason.TOKEN_BUDGET)
    assert played.reward.value == len(record.turns) == model.num_requests
    assert len(record.messages_between[0]) == 1
    assert record.ids == []
    assert all(turn.text and turn.servers == [f"{sglang_url}/v1"] for turn in record)
