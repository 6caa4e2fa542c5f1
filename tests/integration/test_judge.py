"""A judge and a simulated user on a real server."""

from __future__ import annotations

from contextlib import suppress

import pytest

from agentloop.environments.endpoint import Endpoint
from agentloop.environments.judge import Judge
from agentloop.environments.simulated_user import SimulatedUser
from agentloop.errors import AgentFailed

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]


async def test_a_model_that_cannot_judge_costs_money_and_gives_no_score(sglang_url: str) -> None:
    """The small model only knows arithmetic, and the server counts its tokens."""
    model = Endpoint(
        f"{sglang_url}/v1",
        options={"max_tokens": 8, "temperature": 0},
        prices=(1e6, 1e6),
        max_cost=1e6,
        max_requests=3,
    )
    with pytest.raises(AgentFailed, match="the judge gave no verdict in 2 tries"):
        await Judge(model, "1: right. 0: wrong.")("1 + 1 = 2")
    assert model.num_requests == 2
    assert model.cost > 100  # the prompts alone have as many tokens
    user = SimulatedUser(model, "You want to know what 37 times 48 is.")
    with suppress(AgentFailed):  # it may say nothing
        assert await user.begin()
    assert model.num_requests == 3
