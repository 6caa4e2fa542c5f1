"""Completions: prompts of every kind, echoes with log-probabilities, streams, refusals."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import anyio
import pytest

from agentloop.errors import ServerUnavailable, Unsupported
from agentloop.inference.sglang.frames import Chunk, PromptLogprobs
from agentloop.serving.protocols.chat.completions import NOT_FOR_COMPLETIONS, CompletionRequest
from agentloop.trajectory import TurnEnd
from tests.agentloop.serving.test_app import CHAT, Service, client, says, service
from tests.support import END, Step, chunks, logprob, written

HELLO = written(CHAT, "hello world")


def prompt_script(prompt: Sequence[int], text: str, *, num_top: int = 0) -> list[Step]:
    """Return a script: the prompt's log-probabilities, and the first token of `text`."""
    (token, *_) = written(CHAT, text)
    top = [[(-0.25 * (1 + rank), rank) for rank in range(num_top)] for _ in prompt]
    scores = PromptLogprobs([None, *map(logprob, range(1, len(prompt)))], [[], *top[1:]])
    return [Chunk([token], [logprob(0)], "v0", end=TurnEnd.LENGTH, prompt=scores)]


def continues(text: str) -> list[Step]:
    ids = written(CHAT, text)
    return list(chunks(ids, range(1, len(ids)), end=TurnEnd.LENGTH))


async def complete(at: Service, **body: Any) -> Any:
    async with at.post("/v1/completions", body) as response:
        answer = await response.json()
        assert response.status == 200, answer
    return answer


async def complete_refused(at: Service, status: int = 400, **body: Any) -> dict[str, Any]:
    async with at.post("/v1/completions", body) as response:
        error: dict[str, Any] = (await response.json())["error"]
        assert response.status == status, error
    return error


def parse(**body: Any) -> CompletionRequest:
    return CompletionRequest.parse(json.dumps({"prompt": "x", **body}).encode())


async def test_openais_client_gets_its_text() -> None:
    async with service(says("It is 1776.")) as at, client(at) as asks:
        completion = await asks.completions.create(model="fake", prompt="hello world", max_tokens=9)
        (choice,) = completion.choices
        assert (choice.text, choice.finish_reason, choice.logprobs) == ("It is 1776.", "stop", None)
        num_sampled = len(written(CHAT, "It is 1776." + END))
        assert completion.usage is not None
        assert completion.usage.prompt_tokens == len(HELLO)
        assert completion.usage.completion_tokens == num_sampled
    (generation,) = at.router.asked
    assert (generation.ids, generation.max_new_tokens) == (HELLO, 9)
    assert generation.stop_ids == CHAT.stop_ids


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("hello world", [HELLO]),
        (["hello world", "hello world<|im_end|>"], [HELLO, written(CHAT, "hello world<|im_end|>")]),
        ([5, 6], [[5, 6]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
)
async def test_prompts_are_texts_or_ids(prompt: Any, ids: list[list[int]]) -> None:
    async with service(*[says("x")] * 4) as at:
        answer = await complete(at, prompt=prompt, seed=3)
        assert [choice["index"] for choice in answer["choices"]] == [*range(len(ids))]
        assert answer["usage"]["prompt_tokens"] == sum(map(len, ids))
        generations = at.router.asked
        assert [generation.ids for generation in generations] == ids
        assert [generation.sampling.seed for generation in generations] == [3] * len(ids)
        assert len({generation.key for generation in generations}) == len(generations)


async def test_parameters_are_passed_on() -> None:
    async with service(says("x")) as at:
        await complete(
            at,
            prompt=[5],
            temperature=0,
            top_k=3,
            frequency_penalty=1,
            presence_penalty=0,
            logit_bias={"7": 2},
            min_tokens=2,
            stop_token_ids=[9],
            logprobs=2,
        )
        (generation,) = at.router.asked
    assert (generation.sampling.temperature, generation.sampling.top_k) == (0, 3)
    assert generation.parameters == {
        "frequency_penalty": 1,
        "logit_bias": {"7": 2},
        "min_new_tokens": 2,
    }
    assert generation.stop_ids == (*CHAT.stop_ids, 9)
    assert generation.num_top_logprobs == 2


async def test_no_token_ends_it_if_ends_are_ignored() -> None:
    async with service(continues(f"x{END}y")) as at:
        answer = await complete(at, prompt=[5], ignore_eos=True)
        assert at.router.asked[0].stop_ids == ()
    assert answer["choices"][0]["text"] == f"x{END}y"


async def test_text_ends_before_a_stop_sequence() -> None:
    async with service(continues("the answer is 1776.")) as at:
        answer = await complete(at, prompt="x", stop=["r i", "s 1"], logprobs=0)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("the answe", "stop")
    assert "the answer i" in "".join(choice["logprobs"]["tokens"])  # all that were sampled


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_harness_gets_log_probabilities_of_a_prompt_in_one_request(max_tokens: int) -> None:
    async with service(prompt_script(HELLO, "x", num_top=1)) as at:
        answer = await complete(
            at, prompt=HELLO, echo=True, max_tokens=max_tokens, logprobs=1, seed=1
        )
        (generation,) = at.router.asked
    assert (generation.prompt_logprobs, generation.max_new_tokens) == (True, 1)
    (choice,) = answer["choices"]
    assert choice["text"] == "hello world" + "x" * max_tokens
    assert choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    after = [logprob(0)] * max_tokens
    assert logprobs["token_logprobs"] == [None, *map(logprob, range(1, len(HELLO))), *after]
    texts = [CHAT.decode([token]) for token in HELLO]
    assert logprobs["tokens"] == texts + ["x"] * max_tokens
    assert logprobs["top_logprobs"][0] is None
    for text, value, likely in zip(
        texts[1:], logprobs["token_logprobs"][1:], logprobs["top_logprobs"][1:], strict=False
    ):
        assert likely == {text: value, CHAT.decode([0]): -0.25}
    assert answer["usage"]["completion_tokens"] == max_tokens


async def test_echo_without_log_probabilities() -> None:
    async with service(continues("x")) as at:
        answer = await complete(at, prompt="hello world", echo=True, max_tokens=0)
        assert not at.router.asked[0].prompt_logprobs
    assert answer["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "length"}
    ]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": []}, "prompt: "),
        ({"prompt": ""}, "prompt: "),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [5, 100_000]}, "prompt: 100000 is outside of the vocabulary"),
        ({"prompt": [[5], [100_000]]}, "prompt[1]: 100000 is outside of the vocabulary"),
        ({"prompt": [[5], [5] * 200_000]}, "prompt[1]: this model's maximum context length is"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens: 0 leaves nothing to return"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens: "),
        ({"prompt": "x", "logprobs": 21}, "logprobs: "),
        ({"prompt": "x", "logprobs": True}, "logprobs: "),
        ({"prompt": "x", "min_tokens": 17}, "min_tokens: 17 are more than the limit of 16"),
        ({"prompt": ["x"] * 4097}, "prompt"),
        ({"prompt": "x", "echo": True}, "max_tokens: with echo, it may be 0 or 1"),
        ({"prompt": "x", "n": 2}, "n: "),
        ({"prompt": "x", "stream": True}, "use chat completions"),
        ({"prompt": "x", "suffix": "y"}, "suffix: "),
        ({"prompt": "x", "best_of": 2}, "best_of: "),
        ({"prompt": "x", "response_format": {"type": "json_object"}}, "use chat completions"),
        ({"prompt": "x", "prompt_logprobs": 1}, "use echo and logprobs"),
        ({"messages": [{"role": "user", "content": "x"}]}, "prompt: Field required"),
    ],
)
async def test_bad_request_names_the_field(body: dict[str, Any], message: str) -> None:
    async with service() as at:
        error = await complete_refused(at, **body)
    assert message in error["message"]


async def test_another_model_is_not_served() -> None:
    async with service() as at:
        error = await complete_refused(at, 404, prompt="x", model="other")
    assert error["code"] == "model_not_found"


@pytest.mark.parametrize("name", NOT_FOR_COMPLETIONS)
def test_parameters_without_effect_are_accepted(name: str) -> None:
    for value in NOT_FOR_COMPLETIONS[name].values:
        remaining = parse().model_dump(exclude={name})
        assert parse(**{name: value}).model_dump(exclude={name}) == remaining
    with pytest.raises(Unsupported, match=f"^{name}: "):
        parse(**{name: "something else"})


async def test_failed_generation_fails_the_request() -> None:
    async with service(says("It"), [ServerUnavailable("gone")], says("It")) as at:
        error = await complete_refused(at, 503, prompt=["x", "y", "z"])
    assert "gone" in error["message"]


async def test_missing_log_probabilities_are_the_infrastructures_failure() -> None:
    async with service(continues("x"), continues("x")) as at:
        for max_tokens in (0, 1):
            error = await complete_refused(
                at, 503, prompt=HELLO, echo=True, logprobs=1, max_tokens=max_tokens
            )
            assert "did not report log-probabilities" in error["message"]


async def test_generation_that_takes_too_long_is_cut_off() -> None:
    async def hang() -> None:
        await anyio.sleep_forever()

    script: list[Step] = [*chunks(written(CHAT, "the answer"), end=None), hang]
    async with service(script, [hang], budget={"timeout_s": 0.05}) as at:
        answer = await complete(at, prompt="x", stop="answer is")
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("the answer", "length")
        error = await complete_refused(at, 503, prompt="x")
        assert "no token was sampled" in error["message"]
        assert at.router.num_open == 0


async def test_bare_model_takes_these_parameters_in_chat_completions_too() -> None:
    async with service(says("x")) as at:
        body = {
            "messages": [{"role": "user", "content": "hello"}],
            "presence_penalty": 1,
            "stop_token_ids": [9],
        }
        for model in (None, "fake-agent"):
            async with at.post("/v1/chat/completions", {**body, "model": model}) as response:
                error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "stop_token_ids")
        async with at.post("/v1/chat/completions", {**body, "model": "fake"}) as response:
            assert response.status == 200
        (generation,) = at.router.asked
    assert generation.parameters == {"presence_penalty": 1}
    assert generation.stop_ids == (*CHAT.stop_ids, 9)


async def test_agent_has_no_completions() -> None:
    async with service() as at:
        error = await complete_refused(at, prompt="x", model="fake-agent")
    assert error["message"] == "model: only 'fake' has completions"


async def test_settings_limit_tokens_as_well() -> None:
    async with service(says("x"), budget={"max_response_tokens": 5}) as at:
        await complete(at, prompt="x", max_tokens=100)
        assert at.router.asked[0].max_new_tokens == 5
