"""Adapters: what happens when a library, or the agent below it, fails."""

from __future__ import annotations

import inspect
import json
import sys
import threading
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import anyio
import pytest
from aiohttp import web

from agentloop.environments.adapters import (
    inspect_ai,
    openenv,
    reasoning_gym,
    textworld,
    verifiers_v1,
)
from agentloop.environments.environment import Environment
from agentloop.errors import RequestError, ServerUnavailable, SettingsError
from agentloop.rollouts.record import RolloutRecord
from agentloop.trajectory import Message
from tests import support
from tests.agentloop.environments.adapters.scripted import Said, Scripted, play, task_of
from tests.fakes import scoring_pool
from tests.patience import patient
from tests.rollouts import reward_in
from tests.support import eventually


@pytest.mark.parametrize("adapter", [inspect_ai, openenv, reasoning_gym, textworld, verifiers_v1])
def test_adapter_is_short(adapter: ModuleType) -> None:
    assert len(inspect.getsource(adapter).splitlines()) <= 180


class Closable:
    def __init__(self) -> None:
        self.num_closed = 0

    def close(self) -> None:
        self.num_closed += 1

    def fail(self) -> None:
        raise KeyError("board")


async def test_object_of_a_library_is_closed_also_after_an_error() -> None:
    item = Closable()
    library = textworld.Library(5)
    with pytest.raises(KeyError, match="board"):
        async with library.open(lambda: item):
            await library.call(item.fail)
    assert item.num_closed == 1
    library = textworld.Library(5)
    with anyio.CancelScope() as scope:
        async with library.open(lambda: item):
            scope.cancel()
            await anyio.sleep_forever()
    assert item.num_closed == 2


async def test_hanging_call_ends_at_its_deadline_without_closing_its_resources() -> None:
    item, release = Closable(), threading.Event()

    def hang() -> None:
        release.wait(patient(10))

    library = textworld.Library(0.05)
    with pytest.raises(TimeoutError, match=r"textworld: hang took more than 0.05 s"):
        async with library.open(lambda: item):
            await library.call(hang)
    assert item.num_closed == 0
    release.set()


@pytest.mark.parametrize(
    ("environment", "arguments", "extra"),
    [
        (reasoning_gym.puzzle, {"families": ["countdown"]}, "reasoning-gym"),
        (textworld.game, {"file": "game.z8"}, "textworld"),
        (verifiers_v1.episode, {"taskset": "wordle"}, "verifiers-v1"),
        (inspect_ai.sample, {"name": "tasks.py@one"}, "inspect"),
    ],
)
def test_library_that_is_missing_is_named_with_its_extra(
    environment: Environment, arguments: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.distribution.is_installed", lambda module: False)
    with pytest.raises(SettingsError, match=rf"not installed: pip install '.*\[{extra}\]'"):
        task_of(environment.with_arguments(arguments))


@pytest.fixture
def gym(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A reasoning-gym whose only puzzle is a sum; returns the options of its data sets."""
    requests: list[dict[str, Any]] = []

    def create_dataset(family: str, **options: Any) -> Any:
        if "levle" in options:
            raise TypeError("unexpected keyword argument 'levle'")
        requests.append({"family": family, **options})
        return [{"question": "1 + 1?", "answer": "2"}]

    monkeypatch.setattr("agentloop.distribution.is_installed", lambda module: True)
    module = type("gym", (), {"create_dataset": staticmethod(create_dataset)})
    monkeypatch.setattr(reasoning_gym, "import_module", lambda name: module)
    return requests


@pytest.mark.parametrize(
    ("answer", "score", "partial", "value"),
    [
        ("<answer>2</answer>", 0.0, True, 1.0),
        ("<answer>two</answer>", 0.25, True, 0.25),
        ("<answer>two</answer>", 0.25, False, 0.0),
        ("<answer>1+1</answer>", 1.0, False, 1.0),
        ("<answer>forged</answer>", 1e9, True, 0.0),
        ("2", 1.0, True, 0.0),
    ],
)
async def test_puzzle_gives_its_score(
    gym: Any, answer: str, score: object, partial: bool, value: float
) -> None:
    options = {"sum": {"level": 3}}
    arguments = {"families": ["sum"], "options": options, "partial_credit": partial}
    puzzle = reasoning_gym.puzzle.with_arguments(arguments)
    (episode,) = await play(
        puzzle, Scripted(lambda observed: answer, scoring_pool({"score": score}))
    )
    assert reward_in(episode).value == value
    assert gym[0]["level"] == 3


def test_option_that_a_puzzle_does_not_have_is_refused(gym: Any) -> None:
    arguments = {"families": ["sum"], "options": {"sum": {"levle": 3}}}
    with pytest.raises(SettingsError, match=r"env.args: reasoning-gym's 'sum': .*'levle'"):
        task_of(reasoning_gym.puzzle.with_arguments(arguments))


async def test_unknown_game_or_game_without_points_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.distribution.is_installed", lambda module: True)
    with pytest.raises(SettingsError, match=r"env.args.file: no/\*.z8: there is no such file"):
        task_of(textworld.game.with_arguments({"file": "no/*.z8"}))
    opened = SimpleNamespace(reset=lambda: {"max_score": None}, close=lambda: None)
    library = SimpleNamespace(EnvInfos=dict, start=lambda *_: opened)
    monkeypatch.setitem(sys.modules, "textworld", library)
    (tmp_path / "1.z8").touch()
    environment = textworld.game.with_arguments({"file": str(tmp_path / "1.z8")})
    with pytest.raises(RequestError, match=r"1.z8: the game does not say what points it has"):
        await play(environment, numbers("look"))


def test_unknown_score_of_inspect_is_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = SimpleNamespace(value_to_float=lambda: lambda value: float(value == "C"))
    monkeypatch.setattr(inspect_ai, "_module", lambda _: scorer)
    scores = [
        SimpleNamespace(value=value, answer=None, explanation="") for value in ("C", "I", "?")
    ]
    assert [inspect_ai._reward(score).value for score in scores[:2]] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"'\?'"):
        inspect_ai._reward(scores[2])


class Lock:
    """An OpenEnv server: a lock that opens at the right number, and a hand that it may bite."""

    def __init__(self) -> None:
        number = {"type": "integer"}
        self.schema: Any = {"properties": {"number": number}, "required": ["number"]}
        self.num_open = self.most_open = 0
        self.reward: float | None = 0.5  # of a step
        self.state: Any = {}
        self.awaited = 0  # sessions that must have been open at a time before any is answered

    async def describe(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self.schema})

    async def session(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            await eventually(lambda: self.most_open >= self.awaited)
            async for message in socket:
                requests = json.loads(message.data)
                if '"number": 13' in message.data:
                    break
                if requests == {"type": "state"}:
                    await socket.send_json({"type": "state", "data": self.state})
                else:
                    await socket.send_json(self.answer(requests["type"], requests["data"]))
        finally:
            self.num_open -= 1
        return socket

    def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            stated: Any = {"text": f"seed {data['seed']} {data['size']}", "other": None}
            return {"type": "observation", "data": {"observation": stated, "reward": None}}
        number = data.get("number")
        if not isinstance(number, int):
            error = {"message": "Invalid message", "code": "VALIDATION_ERROR", "errors": ["int"]}
            return {"type": "error", "data": error}
        if number == 7:
            return {"type": "error", "data": {"message": "ouch", "code": "EXECUTION_ERROR"}}
        observed = {"a": number, "b": "closed"}
        data = {"observation": observed, "reward": self.reward, "done": number == 3}
        return {"type": "observation", "data": data}


def serving(lock: Lock) -> AbstractAsyncContextManager[str]:
    app = web.Application()
    app.add_routes([web.get("/schema", lock.describe), web.get("/ws", lock.session)])
    return support.serving(app)


def lock_environment(url: str, **arguments: Any) -> Environment:
    return openenv.episode.with_arguments({"url": url, "reset": {"size": 2}, **arguments})


async def play_lock(
    lock: Lock, host: Scripted, *, size: int = 1, **arguments: Any
) -> Sequence[RolloutRecord]:
    """Play episodes of that server."""
    async with serving(lock) as url:
        return await play(lock_environment(url, **arguments), host, size=size)


def numbers(*answers: str) -> Scripted:
    return Scripted(lambda observed: answers[(len(observed) - 1) // 2])


async def test_rewards_are_added_until_the_server_ends_the_episode() -> None:
    lock = Lock()
    async with serving(lock) as url:
        environment = lock_environment(url)
        host = numbers("I say five.", 'So: {"number": 5}', '{"number": 3}')
        (episode,) = await play(environment, host)
        seed = task_of(environment).seed
    assert reward_in(episode).parts == {"reward": 1.0, "steps": 3}
    assert reward_in(episode).value == 1.0
    (_, (system, first), _) = host.asked[0]
    assert '"number"' in system["content"]
    assert first["content"] == f"seed {seed} 2"
    assert lock.num_open == 0


@pytest.mark.parametrize("forged", [1.0, -1.0, float("nan"), float("inf")])
async def test_servers_checks_count_and_not_a_forged_reward(forged: float) -> None:
    lock = Lock()
    lock.reward = forged  # as of a file that the agent has written
    lock.state = {"verify_results": [{"success": True}, {"success": False}, {"success": "yes"}, 1]}
    (episode,) = await play_lock(lock, numbers('{"number": 3}'))
    assert reward_in(episode).value == 0.25


async def test_missing_rewards_are_not_zero() -> None:
    lock = Lock()
    lock.reward = None
    with pytest.raises(RequestError, match="done, and no step of it had a reward"):
        await play_lock(lock, numbers('{"number": 3}'))


async def test_text_is_an_action_without_json() -> None:
    lock = Lock()
    lock.schema = {"properties": {"say": {"type": "string"}}, "required": ["say"]}
    requests: list[Any] = []

    def answer(kind: str, data: Any) -> dict[str, Any]:
        requests.append((kind, data))
        data = {"observation": {"text": "hm"}, "done": kind == "step", "reward": 0.0}
        return {"type": "observation", "data": data}

    lock.answer = answer  # type: ignore[method-assign]
    async with serving(lock) as url:
        environment = openenv.episode.with_arguments({"url": url, "system": "Speak."})
        host = numbers("friend")
        await play(environment, host)
        lock.schema["properties"]["say"]["enum"] = ["friend", "foe"]
        await play(environment, numbers('{"say": "foe"}'))
    assert [data for kind, data in requests if kind == "step"] == [
        {"say": "friend"},
        {"say": "foe"},
    ]
    assert [single["content"] for single in host.asked[0][1]] == ["Speak.", "hm"]


@pytest.mark.parametrize("mcp", [False, True], ids=["by messages", "by tools"])
async def test_environment_of_openenv_that_raises_has_failed_itself(mcp: bool) -> None:
    host = Scripted(lambda observed: ("turn", {"number": 7}) if mcp else '{"number": 7}')
    with pytest.raises(RequestError, match=r"openenv: step: ouch \(EXECUTION_ERROR\)"):
        await play_lock(Tooled() if mcp else Lock(), host)


@pytest.mark.parametrize("mcp", [False, True], ids=["by messages", "by tools"])
async def test_server_of_openenv_that_is_gone_is_the_infrastructures_failure(mcp: bool) -> None:
    async with serving(Tooled() if mcp else Lock()) as url:
        environment = lock_environment(url)
        host = Scripted(lambda observed: ("turn", {"number": 13}) if mcp else '{"number": 13}')
        (lost,) = await play(environment, host)
    (refused,) = await play(environment, host)
    for episode, reason in ((lost, "closed the connection at step"), (refused, "Cannot connect")):
        assert reward_in(episode).reason.startswith("infrastructure: openenv: ")
        assert reason in reward_in(episode).reason


class Tooled(Lock):
    """An OpenEnv server whose actions are calls of MCP tools."""

    def __init__(self) -> None:
        super().__init__()
        kind = {"type": "string", "const": "call_tool"}
        fields = {"type": kind, "tool_name": {"type": "string"}, "arguments": {"type": "object"}}
        self.schema = {"properties": fields, "required": ["tool_name"]}
        self.called: list[Any] = []

    def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            return super().answer(kind, data)
        if data["type"] == "list_tools":
            number = {"type": "object", "properties": {"number": {"type": "integer"}}}
            tools: Any = [
                {"name": "turn", "description": "Turn it.", "input_schema": number},
                {"name": "look", "input_schema": {}},
            ]
            return {"type": "observation", "data": {"observation": {"tools": tools}}}
        self.called.append((data["tool_name"], data["arguments"]))
        number = data["arguments"].get("number")
        if number == 7:
            return super().answer(kind, {"number": number})
        observed: dict[str, Any] = {"tool_name": data["tool_name"], "result": None, "error": None}
        if data["tool_name"] == "look":
            observed["result"] = {"at": 1}
        elif number is None:
            observed["error"] = {"error_type": "invalid_args", "message": "a number is needed"}
        else:
            observed["result"] = {
                "content": [{"type": "text", "text": "closed"}],
                "is_error": False,
            }
        return {
            "type": "observation",
            "data": {"observation": observed, "reward": 0.5, "done": number == 3},
        }


async def test_mcp_tools_of_openenv_are_called_with_arguments() -> None:
    server = Tooled()
    stated: list[Said] = [
        ("look", {}), ("turn", {}), ("turn", {"number": 5}), ("turn", {"number": 3}),
        ("turn", {"number": 5}), "It is open.",
    ]  # fmt: skip
    host = Scripted(lambda observed: stated[len(observed) - 2])
    async with serving(server) as url:
        arguments = {"url": url, "reset": {"size": 2}, "system": "Open it."}
        environment = openenv.episode.with_arguments(arguments)
        (episode,) = await play(environment, host)
        seed = task_of(environment).seed
    assert reward_in(episode).parts == {"reward": 2.0, "steps": 4}
    assert server.called == stated[:4]
    ((_, requests, tools),) = host.asked
    assert tools == ["turn", "look"]
    assert [message["content"] for message in requests] == ["Open it.", f"seed {seed} 2"]
    assert [message["content"] for message in host.seen if message["role"] == "tool"] == [
        'ok: {"at": 1}',
        "error: [error] a number is needed",
        "ok: closed",
        "ok: closed",
        "error: [error] the episode is over",
    ]


async def test_episode_by_tools_ends_after_its_most_steps() -> None:
    server = Tooled()
    host = Scripted(lambda observed: ("look", {}) if len(observed) < 6 else "I give up.")
    (episode,) = await play_lock(server, host, max_steps=2)
    assert reward_in(episode).parts == {"reward": 1.0, "steps": 2}
    assert len(server.called) == 2


async def test_server_gets_as_many_sessions_as_it_may_have() -> None:
    for maximum in (1, 3):
        lock = Lock()
        lock.awaited = maximum
        host = numbers('{"number": 3}')
        episodes = await play_lock(lock, host, size=6, max_sessions=maximum)
        assert [single.reward and single.reward.value for single in episodes] == [0.5] * 6
        assert lock.most_open == maximum


async def test_session_ends_with_its_rollout() -> None:
    lock = Lock()

    def hang(observed: list[Message]) -> Said:
        scope.cancel()
        return '{"number": 1}'

    async with serving(lock) as url:
        environment = lock_environment(url)
        with anyio.CancelScope() as scope:
            await play(environment, Scripted(hang))
        with anyio.fail_after(patient(10)):
            while lock.num_open:
                await anyio.lowlevel.checkpoint()


async def test_failure_below_the_agent_is_not_the_librarys() -> None:
    def gone(observed: list[Message]) -> Said:
        raise ServerUnavailable("gone")

    (episode,) = await play_lock(Lock(), Scripted(gone))
    assert reward_in(episode).reason == "infrastructure: gone"
