"""Sampling an endpoint: requests, answers and failures."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any

import anyio
import pydantic
import pytest
from hypothesis import given
from hypothesis import settings as given_settings
from hypothesis import strategies as st

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.answers import final_answer
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError, ServerUnavailable, SettingsError
from agentloop.evaluation.endpoint import EndpointSampler
from agentloop.inference.openai_client import (
    EndpointSettings,
    delay_s,
    parse_completion,
    retry_after_s,
)
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.metrics import RolloutFigures
from agentloop.rollouts.record import NoReward, RolloutRecord
from agentloop.trajectory import StopReason, TurnEnd
from tests.agentloop.evaluation.fake_endpoint import Answer, FakeEndpoint, saying
from tests.rollouts import records_of
from tests.support import eventually

ANY_TIME = given_settings(deadline=None)
TASK = Task("one", "What is 1?", "1")


@pytest.fixture(autouse=True)
def short_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.inference.openai_client.BACKOFF_S", 1e-6)


async def sampled(
    fake: FakeEndpoint,
    *,
    size: int = 1,
    task: Task = TASK,
    sampling: Sampling | None = None,
    max_tokens: int = 100,
    **fields: Any,
) -> Sequence[RolloutRecord]:
    settings = EndpointSettings(**{"url": fake.url, "model": "fake", "timeout_s": 10.0, **fields})
    sampler = EndpointSampler.open(settings, sampling or Sampling())
    async with sampler as endpoint:
        budget = Budget(max_response_tokens=max_tokens)
        return await records_of(endpoint, task, name="1-one", size=size, budget=budget)


async def test_requests_have_the_sampling_settings_of_the_agent_loop() -> None:
    async with FakeEndpoint().serving() as fake:
        sampling = Sampling(temperature=0.6, top_p=0.9, seed=3)
        samples = await sampled(fake, size=3, sampling=sampling, max_tokens=77, api_key="secret")
    assert len(samples) == 3
    for request in fake.requests:
        seed = request.pop("seed")
        assert 0 <= seed < 1 << 31  # more is not taken everywhere
        assert request == {
            "model": "fake",
            "messages": [{"role": "user", "content": "What is 1?"}],
            "temperature": 0.6,
            "top_p": 0.9,
            "max_tokens": 77,
        }
    assert fake.keys == ["Bearer secret"] * 3


async def test_samples_have_distinct_reproducible_seeds() -> None:
    seeds = []
    for _ in range(2):
        async with FakeEndpoint().serving() as fake:
            await sampled(fake, size=4, sampling=Sampling(seed=3))
        seeds.append(sorted(request["seed"] for request in fake.requests))
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4


async def test_only_changed_values_and_the_configured_limit_are_sent() -> None:
    async with FakeEndpoint().serving() as fake:
        await sampled(fake, token_limit="max_completion_tokens")
    (request,) = fake.requests
    assert request.keys() == {"model", "messages", "temperature", "max_completion_tokens"}


async def test_conversation_is_sent_unchanged() -> None:
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "1?"}]
    async with FakeEndpoint().serving() as fake:
        await sampled(fake, task=Task("one", messages, "1"))
    assert fake.requests[0]["messages"] == messages


async def test_answer_becomes_a_trajectory() -> None:
    async with FakeEndpoint(deque([saying("\\boxed{1}")])).serving() as fake:
        ((sample),) = await sampled(fake)
    assert sample.trajectories[0].text == "\\boxed{1}"
    assert sample.trajectories[0].stop_reason is StopReason.ANSWERED
    assert sample.num_tokens == 7
    assert sample.trajectories[0].id == "1-one.0"


@pytest.mark.parametrize(
    "first",
    [
        Answer(429, {"error": {"message": "slow down"}}, {"Retry-After": "0"}),
        Answer(429, b"", {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Answer(500),
        Answer(503, {"error": "overloaded"}),
        Answer(408),
        Answer(200, b"<html>"),
        Answer(200, {"choices": []}),
        Answer(200, {"object": "error"}),
    ],
)
async def test_transient_errors_are_retried(first: Answer) -> None:
    async with FakeEndpoint(deque([first, first])).serving() as fake:
        (sample,) = await sampled(fake)
    assert len(fake.requests) == 3
    assert sample.trajectories[0].stop_reason is StopReason.ANSWERED


async def test_request_without_an_answer_is_an_infrastructure_failure() -> None:
    answer = Answer(503, {"error": {"message": "no server is healthy"}})
    async with FakeEndpoint(deque([answer] * 3)).serving() as fake:
        (sample,) = await sampled(fake, max_tries=3)
    assert len(fake.requests) == 3
    assert sample.trajectories[0].stop_reason is StopReason.INFRASTRUCTURE
    assert sample.trajectories[0].error == f"{fake.url}: 503 no server is healthy"
    assert sample.trajectories[0].turns == []


async def test_what_an_endpoint_says_in_place_of_an_answer_is_told() -> None:
    answer = Answer(200, {"error": {"message": "no credits", "code": 402}})
    async with FakeEndpoint(deque([answer])).serving() as fake:
        (sample,) = await sampled(fake, max_tries=1)
    assert (sample.trajectories[0].error or "").endswith("choices: Field required: no credits")


async def test_slow_answer_is_an_infrastructure_failure() -> None:
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        (sample,) = await sampled(fake, max_tries=1, timeout_s=0.05)
    assert sample.trajectories[0].stop_reason is StopReason.INFRASTRUCTURE
    assert "no answer within 0.05 s (endpoint.timeout_s)" in (sample.trajectories[0].error or "")


async def test_unreachable_endpoint_is_named() -> None:
    async with FakeEndpoint().serving() as fake:
        pass
    (sample,) = await sampled(fake, max_tries=2)
    assert fake.url in (sample.trajectories[0].error or "")
    with pytest.raises(ServerUnavailable, match=fake.url):
        await sampled(fake, model="")


@pytest.mark.parametrize(
    ("status", "error", "said_of_it"),
    [
        (400, RequestError, "400 too many tokens"),
        (422, RequestError, "422 too many tokens"),
        (401, SettingsError, r"endpoint.api_key: .*401 too many tokens"),
        (403, SettingsError, r"endpoint.api_key: .*403"),
        (404, SettingsError, r"endpoint.url, endpoint.model: .*404"),
        (302, SettingsError, r"endpoint.url, endpoint.model: .*302"),
    ],
)
async def test_permanent_errors_are_not_retried(
    status: int, error: type[Exception], said_of_it: str
) -> None:
    answer = Answer(status, {"error": {"message": "too many\n tokens"}})
    async with FakeEndpoint(deque([answer])).serving() as fake:
        with pytest.raises(error, match=said_of_it):
            await sampled(fake)
    assert len(fake.requests) == 1


async def test_url_without_its_version_is_explained() -> None:
    async with FakeEndpoint().serving() as fake:
        url = fake.url.removesuffix("/v1")
        with pytest.raises(SettingsError, match=f"did you mean {fake.url}\\?"):
            await sampled(fake, url=url)


async def test_messages_that_cannot_be_encoded_are_rejected() -> None:
    async with FakeEndpoint().serving() as fake:
        with pytest.raises(RequestError, match="messages: they cannot be encoded"):
            await sampled(fake, task=Task("one", "half a pair: \ud800", "1"))
    assert fake.requests == []


async def test_number_of_requests_in_flight_is_bounded() -> None:
    async with FakeEndpoint(gate=anyio.Event()).serving() as fake:
        settings = EndpointSettings(url=fake.url, max_concurrent=3)
        opened = EndpointSampler.open(settings, Sampling())
        async with opened as endpoint, anyio.create_task_group() as tasks:

            async def group() -> None:
                await records_of(endpoint, TASK, name="1", size=8)

            tasks.start_soon(group)
            await eventually(lambda: fake.num_in_flight == 3)
            assert fake.gate is not None
            fake.gate.set()
    assert fake.most_in_flight == 3
    assert len(fake.requests) == 8


async def test_only_model_need_not_be_named() -> None:
    async with FakeEndpoint(models=["sole"]).serving() as fake:
        await sampled(fake, model="")
        assert fake.requests[0]["model"] == "sole"
        for models, available in ([["a", "b"], "a, b"], [[], "none"]):
            fake.models = list(models)
            with pytest.raises(SettingsError, match=f"endpoint.model: set it .*: {available}"):
                await sampled(fake, model="")


@pytest.mark.parametrize(
    ("choice", "stop_reason"),
    [
        ({"finish_reason": "stop"}, StopReason.ANSWERED),
        ({"finish_reason": "stop", "stop_reason": 151645}, StopReason.ANSWERED),
        ({"finish_reason": "content_filter"}, StopReason.CONTENT_FILTER),
        ({"finish_reason": "length"}, StopReason.TOKEN_BUDGET),
        ({"finish_reason": "tool_calls"}, StopReason.CALLER_TOOLS),
        ({"finish_reason": "error"}, StopReason.INFRASTRUCTURE),
        ({"finish_reason": "abort"}, StopReason.INFRASTRUCTURE),
        ({"finish_reason": "insufficient_system_resource"}, StopReason.INFRASTRUCTURE),
        ({"finish_reason": None}, StopReason.INFRASTRUCTURE),
        ({}, StopReason.INFRASTRUCTURE),
        ({"finish_reason": "length", "stop_reason": "time_budget"}, StopReason.TIME_BUDGET),
        ({"finish_reason": "length", "stop_reason": "turn_budget"}, StopReason.TURN_BUDGET),
    ],
)
def test_stop_reason_of_an_answer(choice: dict[str, Any], stop_reason: StopReason) -> None:
    body = {"choices": [{"message": {"content": "x"}, **choice}]}
    completion = parse_completion(json.dumps(body).encode())
    assert completion.stop_reason is stop_reason
    assert completion.text == "x"
    assert completion.num_tokens is None


async def test_unknown_end_is_no_answer() -> None:
    async with FakeEndpoint(deque([saying("It is", "abort")])).serving() as fake:
        (sample,) = await sampled(fake)
    assert sample.no_reward is NoReward.INFRASTRUCTURE
    (trajectory,) = sample.trajectories
    assert trajectory.error == "the endpoint broke off the answer (finish_reason 'abort')"
    assert trajectory.turns[0].end is TurnEnd.ABORT


async def test_filtered_answer_is_scored_and_marked() -> None:
    async with FakeEndpoint(deque([saying("It", "content_filter")])).serving() as fake:
        (sample,) = await sampled(fake)
    assert sample.may_count
    assert sample.trajectories[0].turns[0].end is TurnEnd.FILTER
    sample.reward = Reward(0.0, None, "")
    assert RolloutFigures.of(sample).filtered


@pytest.mark.parametrize("count", [None, 0, -1])
def test_token_count_that_cannot_be_is_unknown(count: int | None) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count}
    choice = {"message": {"content": "x"}, "finish_reason": "stop"}
    completion = parse_completion(json.dumps({"choices": [choice], "usage": usage}).encode())
    assert (completion.num_prompt_tokens, completion.num_tokens) == (None, None)


async def test_uncounted_tokens_are_unknown_in_figures() -> None:
    choice = {"message": {"content": "x"}, "finish_reason": "stop"}
    async with FakeEndpoint(deque([Answer(body={"choices": [choice]})])).serving() as fake:
        (sample,) = await sampled(fake)
    sample.reward = Reward(1.0, None, "")
    assert RolloutFigures.of(sample).num_tokens is None


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_reasoning_comes_before_the_answer(field: str) -> None:
    message = {"content": "It is \\boxed{2}.", field: "perhaps \\boxed{1}"}
    completion = parse_completion(json.dumps({"choices": [{"message": message}]}).encode())
    assert completion.text == "<think>perhaps \\boxed{1}</think>\nIt is \\boxed{2}."
    assert final_answer(completion.text) == "2"


def test_answer_may_be_in_parts() -> None:
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}
    parts = [thought, {"type": "text", "text": "It is "}, {"type": "text", "text": "4."}]
    body = {"choices": [{"message": {"content": parts}}]}
    assert parse_completion(json.dumps(body).encode()).text == "It is 4."


def test_tool_calls_have_ids_and_json_arguments() -> None:
    tool_calls = [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1'}},
        {"function": {"name": "g\ud83d", "arguments": {"x": [1]}}},
        {"id": None, "function": {"name": "h", "arguments": ""}},
        {"id": "d", "function": {"arguments": None}},
    ]
    body = {"choices": [{"message": {"content": None, "tool_calls": tool_calls}}]}
    completion = parse_completion(json.dumps(body).encode())
    assert completion.text == ""
    assert [(call.id, call.name, call.arguments) for call in completion.tool_calls] == [
        ("a", "f", '{"x": 1'),
        ("call_1", "g?", '{"x":[1]}'),
        ("call_2", "h", "{}"),
        ("d", "", "{}"),
    ]


def test_lone_surrogate_does_not_invalidate_an_answer() -> None:
    """A model may well produce one, byte by byte."""
    body = {"choices": [{"message": {"content": "\ud83d 4", "reasoning": "\udc00"}}], "n": 2**80}
    assert parse_completion(json.dumps(body).encode()).text == "<think>?</think>\n? 4"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"{", "Expecting"),
        (b"[]", "valid dictionary"),
        (b"{}", "choices: Field required"),
        (b'{"choices": [{}]}', "choices.0.message: Field required"),
        (b'{"choices": [{"message": {"content": 3}}]}', "choices.0.message.content"),
    ],
)
def test_invalid_completion_is_rejected_by_field(body: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        parse_completion(body)


@ANY_TIME
@given(st.integers(1, 5000), st.none() | st.floats(-10, 1e9), st.floats(0, 1))
def test_delays_are_within_their_bounds(tries: int, asked_s: float | None, draw: float) -> None:
    delay = delay_s(tries, asked_s, draw)
    assert 0 <= delay <= 120
    if asked_s is not None and 0 <= asked_s <= 120:
        assert delay == asked_s


def test_delays_double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.inference.openai_client.BACKOFF_S", 2.0)
    assert [delay_s(tries, None, 1.0) for tries in range(1, 9)] == [
        2, 4, 8, 16, 32, 64, 120, 120
    ]  # fmt: skip
    assert delay_s(3, None, 0.25) == 2


@pytest.mark.parametrize(
    ("value", "seconds"),
    [("12", 12), ("Wed, 21 Oct 2015 07:28:10 GMT", 10), ("soon", None), ("", None), ("-1", None)],
)
def test_retry_after(value: str, seconds: float | None) -> None:
    assert retry_after_s({"retry-after": value}, 1445412480.0) == seconds
    assert retry_after_s({}, 0.0) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"url": "localhost:8000"}, "does not have the form http://HOST:PORT/v1"),
        ({"url": "ftp://a/v1"}, "does not have the form"),
        ({"url": "http://a/v1?key=1"}, "does not have the form"),
        ({"api_key": "a\nb"}, "printable ASCII"),
    ],
)
def test_bad_settings_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=message):
        EndpointSettings(**fields)


def test_trailing_slash_of_the_url_is_ignored() -> None:
    assert EndpointSettings(url="http://a:1/v1/").url == "http://a:1/v1"
