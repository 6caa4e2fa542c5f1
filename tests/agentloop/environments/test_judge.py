"""Judges: scores, malformed verdicts, the cache, the endpoint's limits, and who is to blame."""

from __future__ import annotations

import json
import math
import sqlite3
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import agentloop
from agentloop.environments.endpoint import Endpoint
from agentloop.environments.judge import Judge, Rating, parse_rating
from agentloop.errors import InfrastructureFailed, LimitReached, RequestError, SettingsError
from agentloop.trajectory import Message
from tests.agentloop.evaluation.fake_endpoint import Answer, FakeEndpoint
from tests.agentloop.rollouts.test_player import run
from tests.rollouts import reward_in
from tests.support import eventually

RUBRIC = "1: right. 0: wrong. Not {formatted}."


def saying(text: str, *, usage: dict[str, int] | None = None) -> Answer:
    usage = {"prompt_tokens": 1000, "completion_tokens": 100} if usage is None else usage
    choice = {"message": {"content": text}, "finish_reason": "stop"}
    return Answer(body={"choices": [choice], "usage": usage})


def verdict(score: Any, **more: Any) -> Answer:
    return saying(f"Hm.\n{json.dumps({'reason': 'so it is', 'score': score})}", **more)


def endpoint(fake: FakeEndpoint, **options: Any) -> Endpoint:
    usual: dict[str, Any] = {"model": "m", "max_tries": 1}
    return Endpoint(fake.url, **(usual | options))


# --- verdicts -------------------------------------------------------------------------------------


@given(
    before=st.text(),
    score=st.floats(-2, 5) | st.integers(-2, 5),
    reason=st.text(),
    fenced=st.booleans(),
)
@settings(deadline=None)
@pytest.mark.full
def test_verdict_at_the_end_is_found(before: str, score: float, reason: str, fenced: bool) -> None:
    line = json.dumps({"score": score, "reason": reason})
    text = f"{before}\n```json\n{line}\n```\n" if fenced else f"{before}\n{line}"
    assert parse_rating(text, low=-2, high=5) == Rating(score, reason)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "must end with a JSON object"),
        ("The score is 1.", "must end with a JSON object, not 'The score is 1.'"),
        ('{"score": 1} I am sure.', "must end with a JSON object"),
        ("[1]", "must end with a JSON object"),
        ('{"score": "1"}', "must be a number from 0 to 1, not '1'"),
        ('{"score": true}', "must be a number"),
        ('{"score": null}', "must be a number"),
        ('{"score": NaN}', "must be a number"),
        ('{"score": 1.01}', "from 0 to 1, not 1.01"),
        ('{"score": -1}', "must be a number"),
        ('{"reason": "x"}', "must be a number"),
        ('{"score": 1, "more": 2}', "must have the keys"),
        ('{"score": 1, "reason": 2}', "must have the keys"),
        ('{"score": 1, "reason": "' + "[" * 100_000, "must end with a JSON object"),
        ('{"a": ' * 10_000, "must end with a JSON object"),
    ],
)
def test_malformed_verdict_is_named(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_rating(text, low=0, high=1)


async def test_judge_is_told_the_rubric_the_range_and_the_content() -> None:
    async with FakeEndpoint(deque([verdict(7)])).serving() as fake:
        judge = Judge(
            endpoint(fake, api_key="key", options={"temperature": 0}), RUBRIC, low=1, high=10
        )
        assert await judge.rate("37 * 48 = 1776") == Rating(7, "so it is")
    (request,) = fake.requests
    system, content = request["messages"]
    assert RUBRIC in system["content"]
    assert "a number from 1 to 10" in system["content"]
    assert content == {"role": "user", "content": "37 * 48 = 1776"}
    assert (request["model"], request["temperature"]) == ("m", 0)
    assert fake.keys == ["Bearer key"]


async def test_malformed_verdict_is_repeated_with_the_mistake() -> None:
    async with FakeEndpoint(deque([verdict(7), verdict(0.5)])).serving() as fake:
        judge = Judge(endpoint(fake), RUBRIC)
        assert await judge("x") == 0.5
        first, second = (request["messages"] for request in fake.requests)
        assert second[:2] == first
        assert second[2]["role"] == "assistant"
        assert "the score must be a number from 0 to 1, not 7" in second[3]["content"]
        fake.script.extend([saying("no"), saying("no")])
        problem = r"no verdict in 2 tries: it must end .* not 'no'"
        with pytest.raises(InfrastructureFailed, match=problem):
            await judge("y")
    assert len(fake.requests) == 4


async def test_reasoning_is_not_part_of_the_verdict() -> None:
    text = '<think>{"score": 0}</think>{"score": 1}'
    async with FakeEndpoint(deque([saying(text), saying('<think>{"score": 0}')])).serving() as fake:
        judge = Judge(endpoint(fake), RUBRIC, max_tries=1)
        assert await judge("x") == 1
        with pytest.raises(InfrastructureFailed, match="no verdict in 1 tries"):
            await judge("y")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"low": 1, "high": 1}, r"Judge: low \(1\) must be below high \(1\)"),
        ({"max_tries": 0}, "Judge: max_tries"),
    ],
)
def test_judges_arguments_are_checked(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Judge(Endpoint("http://a/v1"), RUBRIC, **arguments)


# --- the cache ------------------------------------------------------------------------------------


async def test_equal_content_is_judged_once_also_at_the_same_time() -> None:
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        fake.script.extend([verdict(1), verdict(0)])
        judge = Judge(endpoint(fake), RUBRIC)
        scores: list[float] = []

        async def score(text: str) -> None:
            scores.append(await judge(text))

        async with anyio.create_task_group() as tasks:
            for _ in range(4):
                tasks.start_soon(score, "x")
            await eventually(lambda: fake.num_in_flight == 1)
            assert fake.gate is not None
            fake.gate.set()
        assert scores == [1.0] * 4
        assert await judge("x") == 1.0
        assert await judge("y") == 0.0
    assert len(fake.requests) == 2
    assert judge._cache._asking == {}


async def test_waiting_call_asks_if_the_call_before_it_is_cancelled() -> None:
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        model = endpoint(fake)
        judge = Judge(model, RUBRIC)
        fake.script.extend([verdict(0), verdict(1)])
        scores: list[float] = []

        async def score(scope: anyio.CancelScope) -> None:
            with scope:
                scores.append(await judge("x"))

        first, second = anyio.CancelScope(), anyio.CancelScope()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(score, first)
            await eventually(lambda: len(fake.requests) == 1)
            tasks.start_soon(score, second)
            await anyio.wait_all_tasks_blocked()
            first.cancel()
            await eventually(lambda: len(fake.requests) == 2)
            assert fake.gate is not None
            fake.gate.set()
    assert scores == [1.0]
    assert judge._cache._asking == {}
    assert model._client is None


async def test_least_recently_used_score_is_forgotten() -> None:
    async with FakeEndpoint().serving() as fake:
        judge = Judge(endpoint(fake), RUBRIC, max_cached=2)
        for text, num_requests in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):
            fake.script.clear()
            fake.script.append(verdict(1))
            await judge(text)
            assert len(fake.requests) == num_requests


async def test_scores_outlast_the_process_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "ratings.sqlite"
    async with FakeEndpoint().serving() as fake:
        fake.script.extend([verdict(0.25), verdict(0.5), verdict(0.75), verdict(1)])

        def judge(rubric: str = RUBRIC, **options: Any) -> Judge:
            return Judge(endpoint(fake, **options), rubric, cache=file, max_cached=2)

        assert await judge().rate("x") == Rating(0.25, "so it is")
        assert await judge().rate("x") == Rating(0.25, "so it is")
        assert len(fake.requests) == 1
        # Whatever the answer depends on is part of the key.
        assert await judge("Another.")("x") == 0.5
        assert await judge(options={"temperature": 1})("x") == 0.75
        with closing(sqlite3.connect(file)) as db:
            assert db.execute("SELECT score FROM ratings").fetchall() == [(0.5,), (0.75,)]
        assert await judge()("x") == 1
    with pytest.raises(SettingsError, match=r"Judge: cache: .*unable to open"):
        await Judge(endpoint(fake), RUBRIC, cache=tmp_path / "no" / "file")("x")


async def test_full_disk_of_the_cache_is_an_infrastructure_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = sqlite3.connect

    def connect_to_full_disk(*arguments: Any, **options: Any) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*arguments, **options)
        connection.execute("PRAGMA max_page_count = 1")  # SQLite then reports a full disk
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_to_full_disk)
    async with FakeEndpoint(deque([verdict(1)])).serving() as fake:
        judge = Judge(endpoint(fake), RUBRIC, cache=tmp_path / "ratings.sqlite")
        with pytest.raises(InfrastructureFailed, match=r"Judge: cache: .*sqlite: .* is full"):
            await judge("x")


async def test_file_that_is_no_database_is_a_settings_error(tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("These are notes, and no database. " * 40)
    async with FakeEndpoint().serving() as fake:
        with pytest.raises(SettingsError, match=r"Judge: cache: .*notes\.txt: .* not a database"):
            await Judge(endpoint(fake), RUBRIC, cache=file)("x")


async def test_function_is_asked_each_time() -> None:
    requests: list[Sequence[Message]] = []

    async def ask(messages: Sequence[Message]) -> str:
        requests.append(messages)
        return '{"score": 1}'

    judge = Judge(ask, RUBRIC)
    assert [await judge("x"), await judge("x")] == [1, 1]
    assert len(requests) == 2


# --- the endpoint ---------------------------------------------------------------------------------


async def test_number_of_requests_is_never_exceeded() -> None:
    async with FakeEndpoint(deque(verdict(1) for _ in range(9))).serving() as fake:
        model = endpoint(fake, max_requests=3)
        judge = Judge(model, RUBRIC)
        refused: list[str] = []

        async def score(text: str) -> None:
            try:
                await judge(text)
            except LimitReached as error:
                refused.append(str(error))

        async with anyio.create_task_group() as tasks:
            for text in "abcdef":
                tasks.start_soon(score, text)
    assert (len(fake.requests), model.num_requests) == (3, 3)
    assert refused == [f"{fake.url}: 3 requests were made (max_requests)"] * 3


async def test_cost_ends_further_requests() -> None:
    async with FakeEndpoint(deque([verdict(1), verdict(1)])).serving() as fake:
        model = endpoint(fake, max_cost=0.004, prices=(2.0, 10.0))
        judge = Judge(model, RUBRIC)
        await judge("x")
        assert model.cost == pytest.approx(0.003)
        await judge("y")
        with pytest.raises(LimitReached, match=r"answers cost 0.006 so far \(max_cost\)"):
            await judge("z")
        fake.script.append(verdict(1, usage={"completion_tokens": 4}))
        with pytest.raises(SettingsError, match=r"no token counts: max_cost cannot be held"):
            await Judge(endpoint(fake, max_cost=1.0), RUBRIC)("x")


async def test_cost_is_unknown_without_token_counts() -> None:
    async with FakeEndpoint(deque([verdict(1), verdict(1, usage={})])).serving() as fake:
        model = endpoint(fake, prices=(2.0, 10.0))
        judge = Judge(model, RUBRIC)
        await judge("x")
        assert model.cost == pytest.approx(0.003)
        await judge("y")
        assert math.isnan(model.cost)


async def test_cached_scores_are_those_of_the_model_in_effect(tmp_path: Path) -> None:
    async with FakeEndpoint(deque([verdict(1), verdict(0)])).serving() as fake:
        for name, score in [("old", 1.0), ("new", 0.0), ("new", 0.0), ("old", 1.0)]:
            fake.models = [name]
            judge = Judge(endpoint(fake, model=""), RUBRIC, cache=tmp_path / "scores.db")
            assert await judge("x") == score
    assert [request["model"] for request in fake.requests] == ["old", "new"]


async def test_filtered_answer_is_no_verdict() -> None:
    filtered = {"message": {"content": '{"score": 0}'}, "finish_reason": "content_filter"}
    script = deque([Answer(body={"choices": [filtered]})])
    async with FakeEndpoint(script).serving() as fake:
        with pytest.raises(InfrastructureFailed, match="content filter withheld the answer"):
            await Judge(endpoint(fake), RUBRIC)("x")


async def test_number_of_requests_in_flight_is_bounded() -> None:
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        model = endpoint(fake, max_concurrent=2)
        async with anyio.create_task_group() as tasks:
            for text in "abcde":
                tasks.start_soon(model.chat, [{"role": "user", "content": text}])
            await eventually(lambda: fake.num_in_flight == 2)
            await anyio.wait_all_tasks_blocked()
            assert fake.gate is not None
            fake.gate.set()
    assert (fake.most_in_flight, len(fake.requests)) == (2, 5)
    assert model._client is None


async def test_equal_conversations_with_a_user_get_equal_replies() -> None:
    async with FakeEndpoint().serving() as fake:
        lines = ["I need a seat.", "By the window.", "", "On the aisle."]
        fake.script.extend(saying(line) for line in lines)
        model = endpoint(fake, max_cached=10)

        async def talk(*answers: str) -> list[str | None]:
            user = agentloop.SimulatedUser(model, "You want a seat.")
            return [await user.begin(), *[await user(answer) for answer in answers]]

        assert await talk("Where?") == ["I need a seat.", "By the window."]
        assert await talk("Where?") == ["I need a seat.", "By the window."]
        with pytest.raises(InfrastructureFailed, match="said nothing"):
            await talk("Which one?")
        assert await talk("Which one?") == ["I need a seat.", "On the aisle."]
    assert len(fake.requests) == model.num_requests == 4


async def test_answer_has_a_deadline_that_includes_the_wait_for_others() -> None:
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        model = endpoint(fake, timeout_s=0.2, max_concurrent=1)
        failed: list[str] = []

        async def ask() -> None:
            try:
                await model.chat([{"role": "user", "content": "x"}])
            except InfrastructureFailed as error:
                failed.append(str(error))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            tasks.start_soon(ask)
    assert failed == [f"{fake.url}: no answer within 0.2 s (timeout_s)"] * 2


async def test_only_model_need_not_be_named() -> None:
    async with FakeEndpoint(deque([verdict(1)]), models=["only"]).serving() as fake:
        assert await Judge(Endpoint(fake.url), RUBRIC)("x") == 1
    assert fake.requests[0]["model"] == "only"


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (503, InfrastructureFailed),
        (429, InfrastructureFailed),
        (401, SettingsError),
        (404, SettingsError),
        (400, RequestError),
    ],
)
async def test_only_what_may_pass_is_the_infrastructures_fault(
    status: int, error: type[Exception]
) -> None:
    async with FakeEndpoint(deque([Answer(status)])).serving() as fake:
        with pytest.raises(error):
            await Judge(endpoint(fake), RUBRIC)("x")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"url": ""}, "Endpoint: url: must not be empty"),
        ({"url": "localhost:1"}, "Endpoint: url: .*does not have the form"),
        ({"timeout_s": 0}, "Endpoint: timeout_s: "),
        ({"max_concurrent": 0}, "Endpoint: max_concurrent: "),
    ],
)
def test_endpoints_arguments_are_checked(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(SettingsError, match=problem):
        Endpoint(**({"url": "http://a/v1"} | arguments))


def test_endpoint_outlasts_an_event_loop() -> None:
    """A judge is made in an environment's module, when no event loop runs."""

    async def use(reported: list[Endpoint]) -> None:
        async with FakeEndpoint(deque([verdict(1)])).serving() as fake:
            if not reported:
                reported.append(endpoint(fake))
            reported[0]._settings = reported[0]._settings.model_copy(update={"url": fake.url})
            assert await Judge(reported[0], RUBRIC)("x") == 1

    reported: list[Endpoint] = []
    for _ in range(2):
        anyio.run(use, reported)
    assert reported[0].num_requests == 2


# --- in an environment ----------------------------------------------------------------------------


async def test_judge_that_fails_gives_no_reward_and_never_0() -> None:
    async with FakeEndpoint(deque([Answer(503), verdict(0)])).serving() as fake:
        judge = Judge(endpoint(fake, max_concurrent=1), RUBRIC)

        @agentloop.environment
        async def judged(task: Any, agent: Any) -> float:
            await agent.run("?")
            return await judge(agent.id)

        episodes = await run(judged)
    rewards = sorted(
        (single.reward for single in episodes if single.reward),
        key=lambda reward: str(reward.value),
    )
    assert [single.value for single in rewards] == [0.0, None]
    assert rewards[1].reason.startswith(f"infrastructure: {fake.url}: 503")


async def test_judge_that_nobody_may_ask_any_more_ends_the_run() -> None:
    async with FakeEndpoint().serving() as fake:
        judge = Judge(endpoint(fake, max_requests=0), RUBRIC)

        @agentloop.environment
        async def judged(task: Any, agent: Any) -> float:
            return await judge("x")

        with pytest.raises(RequestError, match=r"environment judged: .*\(max_requests\)"):
            await run(judged)


async def test_another_agent_may_be_the_judge() -> None:
    """`Agent.chat` is a function of a conversation."""

    @agentloop.environment
    async def judged(task: Any, agent: agentloop.Agent) -> float:
        return await Judge(agent.chat, RUBRIC, low=-1, high=9, max_tries=1)("x")

    for single in await run(judged):
        assert reward_in(single).value is None  # the fake model says how many messages it has seen
        assert "the judge gave no verdict" in reward_in(single).reason
