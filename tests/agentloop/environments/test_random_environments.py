"""Random environments on servers that fail: each rollout ends with a reward, or names who failed.

An environment does a few random things with its agent, some of them mistakes, and returns something
random. Its servers, its tools and its judge fail at random. Whatever happens, a rollout has a
finite reward, or none and a reason; nothing that was cut off is trained on; the KV ledger returns
to zero; and no task is left running.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from fractions import Fraction
from random import Random
from typing import Any, cast

import anyio
import anyio.to_thread
import numpy as np
import pytest

import agentloop
from agentloop.agent.rollout import Budget
from agentloop.environments.agent import Agent
from agentloop.environments.environment import Environment
from agentloop.environments.rewards.reward import Grader, Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import EnvironmentFailed, ServerError
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import dumps, loads
from agentloop.rollouts.player import EnvironmentPlayer
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.runtime import Settings
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.rollouts import Rollouts
from tests.agentloop.serving.simulated_agents import RandomSGLang
from tests.agentloop.serving.test_app import CHAT, PlayedRouter, PlayedRuntime
from tests.patience import patient
from tests.support import Fault, eventually

NUM_GROUPS, SIZE = 6, 4
REASONS = (
    "infrastructure: ", "the environment ", "stopped: ", "its agent did not run",
    "nothing was sampled", "timed out in the queue", "a reason of its own",
)  # fmt: skip
Act = Callable[[Agent, Random], Awaitable[object]]
ACTS: dict[str, Act] = {}


def act(function: Act) -> Act:
    ACTS[function.__name__] = function
    return function


async def note(a: str, b: int) -> str:
    """Note something."""
    await anyio.lowlevel.checkpoint()
    if b:
        raise ValueError(a)
    return a


@act
async def asks(agent: Agent, random: Random) -> None:
    await agent.run(f"{random.random()}?", tools=[note])


@act
async def replies(agent: Agent, random: Random) -> None:
    answers = [None, *random.choices(["more", "again"], k=2)]
    await agent.run("?", reply=lambda answer: answers.pop())


@act
async def asks_two_questions_at_once(agent: Agent, random: Random) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(agent.run, "first?")
        tasks.start_soon(agent.chat, "second?")
        if random.random() < 0.2:
            tasks.cancel_scope.cancel()


@act
async def leaves_a_conversation_running(agent: Agent, random: Random) -> None:
    LEAKED.append(asyncio.ensure_future(agent.run("left?")))
    await anyio.lowlevel.checkpoint()


@act
async def gives_up_a_conversation(agent: Agent, random: Random) -> None:
    with anyio.move_on_after(random.choice([0, 0.001, 0.01])):
        await agent.run("slow?")


@act
async def swallows_everything(agent: Agent, random: Random) -> None:
    with suppress(BaseException):
        await agent.run("anything?")


@act
async def plays_against_another(agent: Agent, random: Random) -> None:
    second = agent.other(random.choice(["black", "white"]))
    await second.run("your turn?")
    rewards: list[Any] = [None, 1, True, Fraction(1, 3), np.float32(0.5), math.nan, 1e200]
    second.reward = random.choice(rewards)


@act
async def rewards_turns(agent: Agent, random: Random) -> None:
    result = await agent.run("and?")
    for turn in result.turns:
        turn.reward = random.choice([None, 1, -0.5, math.inf, 1e300])
        if random.random() < 0.3:
            turn.token_rewards = [random.choice([0.0, 1.0, 1e39]) for _ in turn.output_ids]


@act
async def waits_for_a_thread(agent: Agent, random: Random) -> None:
    await anyio.to_thread.run_sync(lambda: None)


@act
async def hangs(agent: Agent, random: Random) -> None:
    if random.random() < 0.3:
        await anyio.sleep_forever()


@act
async def cancels_a_helper(agent: Agent, random: Random) -> None:
    helper = asyncio.ensure_future(anyio.sleep_forever())
    helper.cancel()
    await helper


@act
async def raises(agent: Agent, random: Random) -> None:
    raise random.choice(
        [
            KeyError("board"),
            ExceptionGroup("several", [ValueError("a"), TypeError("b")]),
            SystemExit(0),
            TimeoutError(),
            StopAsyncIteration(),
            RecursionError(),
            agentloop.RequestError("no"),
        ]
    )


@act
async def its_judge_is_down(agent: Agent, random: Random) -> None:
    raise ServerError("the judge does not answer")


VALUES = [
    *(0, 1, 0.3, True, None, "bad", [1], math.nan, math.inf, 1e308, 10**400, 1e29),
    *({"a": 1, "b": 2}, {"a": math.inf}, {}, np.float64(0.5), np.int64(1), Fraction(1, 2)),
    *(Reward(cast(float, np.float32(1)), "x", "y"), Reward(math.nan, None, "nan")),
    Reward(None, None, "a reason of its own"),
]
LEAKED: list[asyncio.Future[Any]] = []


def environment(seed: int) -> Environment:
    @agentloop.environment(weights={"a": 2})
    async def does_anything(task: Any, agent: Agent) -> Any:
        random = Random(f"{seed} {agent.id}")
        for name in random.choices(["asks", *ACTS], [len(ACTS), *[1] * len(ACTS)], k=3):
            await ACTS[name](agent, random)
        return random.choice(VALUES)

    return does_anything


async def check_groups(seed: int) -> Counter[str]:
    """Roll out random groups, check each rollout, and return how often what happened."""
    random, counts = Random(seed), Counter[str]()
    async with AsyncExitStack() as stack:
        fake = RandomSGLang([], random=random, version="0")
        await stack.enter_async_context(fake.serving())
        http = await stack.enter_async_context(http_session())
        settings = RouterSettings(probe_interval_s=0.01, max_migrations=1)
        router = await stack.enter_async_context(
            Router.open([SGLangServer(fake.url, http)], settings)
        )
        host = PlayedRuntime(
            Settings.model_validate({"tools": []}), cast(PlayedRouter, router), CHAT
        )
        grader = await stack.enter_async_context(Grader())
        player = EnvironmentPlayer(environment(seed), host, sampling=Sampling(), gate=router)
        rollouts = Rollouts(
            GroupRunner(player, grader, enough=random.choice([0, 2])),
            RocSettings(down_sample_to_n=random.choice([0, 2])),
            CreditSettings(name=random.choice(["grpo", "per_turn", "gspo"])),
            seed=seed,
            num_tries=1,
        )
        running = asyncio.all_tasks()
        for number in range(NUM_GROUPS):
            fake.faults.extend(
                Fault(random.choice(["cut", "refuse", "abort"]))
                for _ in range(random.choice([0, 0, 3]))
            )
            budget = Budget(max_turns=4, max_response_tokens=400, timeout_s=1)
            try:
                with anyio.fail_after(patient(60)):
                    task = Task(f"t{number}", "?", "1")
                    request = GroupRequest(task, str(number), SIZE, budget, 0, Purpose.TRAIN)
                    group = await rollouts.run(request)
            except EnvironmentFailed:
                counts["refused"] += 1
                continue
            except ServerError:  # all rollouts were lost
                counts["lost"] += 1
                continue
            for row in loads(dumps([row.to_dict() for row in group.rows])):
                counts[check_row(row)] += 1
        await asyncio.gather(*LEAKED, return_exceptions=True)
        LEAKED.clear()
        await eventually(lambda: asyncio.all_tasks() <= running)
        (view,) = router.view()
        assert (view.num_running, view.num_reserved_tokens, router.num_waiting) == (0, 0, 0)
    return counts


def check_row(row: dict[str, Any]) -> str:
    """Check the record of a conversation; return what became of it."""
    reward, record = row["reward"], row["trajectory"]
    if row["credit"] is not None:
        assert reward is not None
        assert record["stop_reason"] not in ("environment", "infrastructure", "straggler")
    if reward is None:
        assert row["reason"].startswith(REASONS), row["reason"]
        return "no reward"
    assert math.isfinite(reward)
    assert abs(reward) <= 1e30
    return "trained on" if row["credit"] is not None else "not chosen"


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(20))
async def test_every_rollout_has_a_reward_or_names_who_failed(seed: int) -> None:
    counts = await check_groups(seed)
    assert counts["no reward"] + counts["refused"]


async def test_few_random_environments_end_well() -> None:
    await check_groups(100)
