"""An environment whose conversations are those of an unmodified client at `agent.url`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aiohttp
import anyio
import openai
import pytest

import agentloop
from agentloop.agent.rollout import Budget
from agentloop.environments.agent import Agent
from agentloop.environments.tasks.sources import Task
from agentloop.errors import ServerUnavailable
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.record import RolloutRecord
from agentloop.serving.sessions import listening_for_sessions
from agentloop.trajectory import StopReason, rollout_of
from tests.agentloop.serving.test_app import CHAT, HELLO, says
from tests.fakes import NoModel
from tests.patience import patient
from tests.rollouts import records_of, reward_in
from tests.support import ScriptedEngine, Step

TASK = Task("t", "hello", "")
SAMPLING = Sampling(temperature=0.75, seed=3)


async def played(
    environment: Any, *turns: Sequence[Step], timeout_s: float = 60.0
) -> RolloutRecord:
    """Run a rollout of an environment on scripted turns."""
    return await played_by(ScriptedEngine(*turns), environment, Budget(timeout_s=timeout_s))


async def played_by(engine: ScriptedEngine, environment: Any, budget: Budget) -> RolloutRecord:
    async with listening_for_sessions(
        engine, CHAT, model_name="fake", sampling=Sampling(), budget=budget
    ) as listener:
        player = EnvironmentPlayer(
            environment, NoModel(session_listener=listener), sampling=SAMPLING
        )
        (episode,) = await records_of(player, TASK, name="7-t", budget=budget)
        assert len(listener.sessions) == 0
    return episode


async def ask(agent: Agent, messages: Any = HELLO) -> str:
    async with openai.AsyncOpenAI(base_url=agent.url, api_key=agent.key, max_retries=0) as client:
        answer = await client.chat.completions.create(model="any", messages=messages)
    return answer.choices[0].message.content or ""


@pytest.mark.full
async def test_tokens_that_a_client_samples_are_recorded() -> None:
    @agentloop.environment
    async def asks(task: Task, agent: Agent) -> float:
        first = await ask(agent)
        stated = {"role": "assistant", "content": first}
        second = await ask(agent, [*HELLO, stated, {"role": "user", "content": "more"}])
        return float(first + second == "onetwo")

    episode = await played(asks, says("one"), says("two"))
    assert reward_in(episode).value == 1.0
    (record,) = episode.trained
    assert len(record.turns) == 2
    assert record.stop_reason is StopReason.ANSWERED
    assert rollout_of(record.id) == "7-t.0"
    assert len(record.ids) == len(record.mask) == len(record.logprobs)


async def test_client_cannot_change_how_the_policy_is_sampled() -> None:
    @agentloop.environment
    async def asks(task: Task, agent: Agent) -> float:
        async with openai.AsyncOpenAI(base_url=agent.url, api_key=agent.key) as client:
            for _ in range(2):
                await client.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": "hello"}],
                    temperature=0,
                    top_p=0.5,
                    seed=1,
                    presence_penalty=1,
                    logit_bias={"5": 3},
                    extra_body={"min_tokens": 4},
                )
        return 1.0

    engine = ScriptedEngine(says("one"), says("two"))
    await played_by(engine, asks, Budget())
    first, second = engine.asked
    assert first.sampling.model_copy(update={"seed": 3}) == SAMPLING
    assert second.sampling.model_copy(update={"seed": 3}) == SAMPLING
    assert first.sampling.seed != second.sampling.seed
    assert not first.parameters


async def test_conversation_keeps_to_the_budget_of_its_rollout() -> None:
    @agentloop.environment
    async def asks(task: Task, agent: Agent) -> float:
        history, refused = list(HELLO), ""
        while not refused:
            try:
                stated = {"role": "assistant", "content": await ask(agent, history)}
            except openai.BadRequestError as error:
                refused = str(error)
            else:
                history += [stated, {"role": "user", "content": "more"}]
        return float("maximum context length" in refused)

    engine = ScriptedEngine(*(says("one") for _ in range(9)))
    episode = await played_by(engine, asks, Budget(max_response_tokens=60))
    assert reward_in(episode).value == 1.0
    (record,) = episode.trained
    assert 1 < len(record.turns) < 9
    assert record.num_response_tokens <= 60
    limits = [single.max_new_tokens for single in engine.asked]
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == 60


async def test_server_that_fails_a_client_is_infrastructure() -> None:
    @agentloop.environment
    async def asks(task: Task, agent: Agent) -> float:
        with pytest.raises(openai.InternalServerError):
            await ask(agent)
        return 0.0  # the program gave up

    episode = await played(asks, [ServerUnavailable("gone")])
    assert reward_in(episode).value is None
    assert "gone" in reward_in(episode).reason


async def test_client_that_asks_again_and_is_answered_has_lost_nothing() -> None:
    @agentloop.environment
    async def asks(task: Task, agent: Agent) -> float:
        with pytest.raises(openai.InternalServerError):
            await ask(agent)
        await ask(agent)
        return 1.0

    episode = await played(asks, [ServerUnavailable("gone")], says("one"))
    assert reward_in(episode).value == 1.0
    assert len(episode.trained) == 1


async def test_request_in_flight_ends_with_its_rollout() -> None:
    started, ended = anyio.Event(), anyio.Event()

    async def hang() -> None:
        started.set()
        try:
            await anyio.sleep_forever()
        finally:
            ended.set()

    @agentloop.environment
    async def leaves(task: Task, agent: Agent) -> float:
        await ask(agent)
        async with aiohttp.ClientSession() as http, anyio.create_task_group() as tasks:
            body = {"messages": [{"role": "user", "content": "other"}]}
            request = http.post(f"{agent.url}/chat/completions", json=body)
            tasks.start_soon(_sent, request)
            await started.wait()
            agent.close()
            tasks.cancel_scope.cancel()
        return 1.0

    async def _sent(request: Any) -> None:
        async with request:
            pass

    episode = await played(leaves, says("one"), [hang])
    with anyio.fail_after(patient(5)):
        await ended.wait()
    (record,) = episode.trained
    assert len(record.turns) == 1


async def test_session_of_a_rollout_serves_nothing_but_the_model() -> None:
    @agentloop.environment
    async def tries(task: Task, agent: Agent) -> float:
        base = agent.anthropic_url
        origin = base.partition("/v1/")[0]
        async with aiohttp.ClientSession() as http:
            for method, url in (
                ("DELETE", base),
                ("GET", f"{base}/trajectories"),
                ("POST", f"{origin}/v1/sessions"),
                ("POST", f"{origin}/v1/chat/completions"),
            ):
                async with http.request(method, url, json={}) as response:
                    assert response.status == 404
        return float(await ask(agent) == "one")

    episode = await played(tries, says("one"))
    assert reward_in(episode).value == 1.0
