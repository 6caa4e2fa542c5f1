"""The service with the agent of an environment in place of the built-in one."""

from __future__ import annotations

from typing import Any

import pytest

import agentloop
from tests.agentloop.serving.test_app import CHAT, HELLO, THEIRS, client, says, service
from tests.support import call_text

PATH = "/v1/chat/completions"
events: list[str] = []


class Game:
    def __init__(self, number: int) -> None:
        self.number, self.tries = number, 0

    def guess(self, number: int) -> str:
        """Guess the number."""
        self.tries += 1
        return f"try {self.tries}: {'right' if number == self.number else 'wrong'}"


@agentloop.environment
async def guess(task: Any, agent: agentloop.Agent) -> float:
    events.append("begins")
    try:
        game = Game(int(task.answer))
        await agent.run(f"Below {task.top}.", tools=[game.guess], system="You guess.")
        events.append("goes on")
        return 1.0
    finally:
        events.append("ends")


@pytest.fixture(autouse=True)
def no_events() -> None:
    events.clear()


async def test_environments_tools_and_system_message_answer_a_client() -> None:
    call = says(call_text("guess", {"number": 42}))
    async with service(call, says("It is 42."), env=guess) as at, client(at) as asks:
        models = [model.id async for model in asks.models.list()]
        answer = await asks.chat.completions.create(model="fake-guess", messages=HELLO)
    assert models == ["fake-guess", "fake"]
    assert answer.choices[0].message.content == "It is 42."
    first, second = (CHAT.decode(requests.ids) for requests in at.router.asked)
    assert "<|im_start|>system\nYou guess.<|im_end|>" in first
    assert "<|im_start|>user\nhello<|im_end|>" in first
    assert "Below 100." not in first
    assert "try 1: right" in second
    assert events == ["begins", "ends"]  # without what follows the conversation


async def test_each_answer_begins_with_new_tools() -> None:
    call = says(call_text("guess", {"number": 7}))
    async with service(call, says("Wrong."), call, says("Again."), env=guess) as at:
        for _ in range(2):
            async with at.post(PATH, {"messages": HELLO}) as response:
                assert response.status == 200
            assert "try 1: wrong" in CHAT.decode(at.router.asked[-1].ids)


async def test_clients_system_message_gives_way_and_its_tools_take_precedence() -> None:
    messages = [{"role": "system", "content": "You sing."}, *HELLO]
    async with service(says("done"), env=guess) as at:
        async with at.post(PATH, {"messages": messages, "tools": [THEIRS]}) as response:
            assert response.status == 200
    observed = CHAT.decode(at.router.asked[0].ids)
    assert "You guess." in observed
    assert "You sing." not in observed
    assert '"theirs"' in observed
    assert '"guess"' not in observed


async def test_invalid_message_is_the_clients_mistake() -> None:
    async with service(env=guess) as at:
        async with at.post(PATH, {"messages": [{"role": "wizard"}]}) as response:
            assert response.status == 400
            assert "messages" in (await response.json())["error"]["message"]


@agentloop.environment
async def raises(task: Any, agent: agentloop.Agent) -> float:
    raise KeyError("board")


@agentloop.environment
async def says_nothing(task: Any, agent: agentloop.Agent) -> float:
    return 1.0


@agentloop.environment
async def runs_a_program(task: Any, agent: agentloop.Agent) -> str:
    return agent.url


@pytest.mark.parametrize(
    ("env", "reason"),
    [
        (raises, "environment raises: its agent had no conversation: it raised KeyError: 'board'"),
        (says_nothing, "environment says_nothing: its agent had no conversation"),
        (runs_a_program, "url: only an agent that our model plays has one"),
    ],
)
async def test_environment_that_asks_nothing_is_told(
    env: agentloop.Environment, reason: str
) -> None:
    async with service(env=env) as at:
        async with at.post(PATH, {"messages": HELLO}) as response:
            assert response.status == 503
            assert reason in (await response.json())["error"]["message"]


@agentloop.environment
async def with_a_helper(task: Any, agent: agentloop.Agent) -> float:
    hint = await agent.other("helper").chat("Give a hint.")
    await agent.run("Play.", system=f"Hint: {hint}")
    return 1.0


async def test_another_agent_speaks_first_but_not_to_the_client() -> None:
    async with service(says("look up"), says("done"), env=with_a_helper) as at:
        async with client(at) as asks:
            stream = await asks.chat.completions.create(
                model="fake-with_a_helper", messages=HELLO, stream=True
            )
            pieces = [piece.choices[0].delta.content or "" async for piece in stream]
    assert "".join(pieces) == "done"
    assert "Hint: look up" in CHAT.decode(at.router.asked[1].ids)
