"""1,000 sessions of agents whose requests get lost, cut, doubled and repeated on the way.

What is recorded must equal the inference server's own log. A generation whose answer has reached
its client is in exactly one branch. One that has not is in none, if its client left before it was
sent any of it; or else it ends a branch, as far as it was sent: the service cannot tell an answer
that was lost on its way from one that was read.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any, cast

import aiohttp
import anyio
import pytest

from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.runtime import Settings
from agentloop.serving.app import AgentService, listening
from agentloop.serving.listen import bind
from tests.agentloop.serving.simulated_agents import FaultyLink, RandomSGLang, SimulatedAgent
from tests.agentloop.serving.test_app import CHAT, PlayedRouter, PlayedRuntime
from tests.support import eventually

NUM_BATCHES, BATCH = 10, 100


@dataclass
class Rig:
    url: str
    app: AgentService
    fake: RandomSGLang
    router: Router
    http: aiohttp.ClientSession

    @property
    def is_idle(self) -> bool:
        """Return whether nothing is being generated, waits or holds memory of the server."""
        (view,) = self.router.view()
        return (self.fake.num_streaming, view.num_running, self.router.num_waiting) == (0, 0, 0)


@asynccontextmanager
async def rig(random: Random) -> AsyncIterator[Rig]:
    inputs = Settings.model_validate({"tools": [], "serve": {"port": 0}})
    async with AsyncExitStack() as stack:
        fake = RandomSGLang([], random=random)
        await stack.enter_async_context(fake.serving())
        http = await stack.enter_async_context(http_session())
        servers = [SGLangServer(fake.url, http)]
        router = await stack.enter_async_context(Router.open(servers, RouterSettings()))
        app = AgentService(PlayedRuntime(inputs, cast(PlayedRouter, router), CHAT), inputs)
        bound = stack.enter_context(bind(inputs.serve))
        url = await stack.enter_async_context(listening(app, bound))
        yield Rig(url, app, fake, router, http)


@pytest.mark.full
@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(NUM_BATCHES))
async def test_records_equal_the_servers_log(seed: int) -> None:
    assert await converse(BATCH, seed) > 0


@pytest.mark.timeout(60)
async def test_records_of_a_few_sessions_equal_the_servers_log() -> None:
    await converse(18, NUM_BATCHES)


async def converse(num_sessions: int, seed: int) -> int:
    """Run simulated agents, each in a session, and check all that is recorded and left.

    Returns:
        The number of generations that were cut off while they were in flight.
    """
    random = Random(seed)
    async with rig(random) as at:
        sessions: list[dict[str, Any]] = []
        agents: list[SimulatedAgent] = []
        async with anyio.create_task_group() as tasks:
            for index in range(num_sessions):
                async with at.http.post(f"{at.url}/v1/sessions") as response:
                    sessions.append(await response.json())
                is_plain, has_keys = index % 2 == 0, index % 3 != 0
                # What appends to one history is one trajectory: if nothing is lost, or with keys.
                rate = 0.0 if is_plain and not has_keys else 0.35
                link = FaultyLink(at.http, random, tasks, rate)
                agent = SimulatedAgent(
                    sessions[-1]["url"], link, random, is_plain=is_plain, has_keys=has_keys
                )
                agents.append(agent)
                tasks.start_soon(agent.run, random.randrange(1, 5))
        await eventually(lambda: at.is_idle)
        used: set[int] = set()
        for session, agent in zip(sessions, agents, strict=True):
            records = await trajectories(at, session)
            numbers_by_record = [check_record(at.fake, record, agent.reached) for record in records]
            recorded = [number for numbers in numbers_by_record for number in numbers]
            assert agent.reached <= set(recorded)
            for number in recorded:
                assert number not in used  # in another branch, or twice in this one
                used.add(number)
            if agent.is_plain:  # whatever else there is was cut off while its client read it
                (numbers,) = [
                    numbers_of_record
                    for numbers_of_record in numbers_by_record
                    if agent.reached.intersection(numbers_of_record)
                ]
                assert len(numbers) == agent.num_asked
                assert agent.has_keys or len(numbers_by_record) == 1
            async with at.http.delete(session["url"]) as response:
                assert response.status == 200
        assert len(at.app.sessions) == 0
        (view,) = at.router.view()
        assert (view.num_running, view.num_held_tokens, view.num_reserved_tokens) == (0, 0, 0)
        assert sum(agent.link.num_faults for agent in agents) > num_sessions / 4
        return sum(not numbers_of_record.is_whole for numbers_of_record in at.fake.log)


async def trajectories(at: Rig, session: dict[str, Any]) -> list[dict[str, Any]]:
    async with at.http.get(f"{session['url']}/trajectories") as response:
        assert response.status == 200
        return [json.loads(line)["trajectory"] for line in (await response.text()).splitlines()]


def check_record(fake: RandomSGLang, record: dict[str, Any], reached: set[int]) -> list[int]:
    """Compare a branch with the server's log; return its generations.

    Args:
        reached: the generations whose answers have reached their client.
    """
    numbers: list[int] = []
    ids = list(record["prompt_ids"])
    for turn in record["turns"]:
        number = fake.number_of(turn["logprobs"][0])
        numbers.append(number)
        sampled, size = fake.log[number], len(turn["output_ids"])
        assert sampled.prompt == ids
        assert sampled.ids[:size] == turn["output_ids"]
        assert sampled.logprobs[:size] == turn["logprobs"]
        if number in reached:
            assert size == len(sampled.ids)
        else:
            assert turn is record["turns"][-1]
        ids += turn["output_ids"] + turn["observation_ids"]
    assert record["turns"][-1]["observation_ids"] == []
    return numbers
