"""Completions by a real SGLang server: log-probabilities of prompts, biases, penalties."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from agentloop import Runtime

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PROMPT = "<|im_start|>user\nWhat is 37 times 48?<|im_end|>\n<|im_start|>assistant\n<reason>"


async def ask(client: openai.AsyncOpenAI, prompt: Any = PROMPT, **options: Any) -> Any:
    made = await client.completions.create(model="small", prompt=prompt, **options)
    return made.choices[0]


@pytest.fixture(scope="module")
async def greedy(client: openai.AsyncOpenAI) -> Any:
    return await ask(client, max_tokens=40, logprobs=2)


@pytest.mark.parametrize("max_tokens", [0, 1])
async def test_echo_has_the_log_probabilities_of_the_generation(
    client: openai.AsyncOpenAI, runtime: Runtime, greedy: Any, max_tokens: int
) -> None:
    encode = runtime.chat.tokenizer.encode
    prompt: list[int] = encode(PROMPT).ids
    sampled: list[int] = encode(greedy.text).ids
    num = len(prompt) + len(sampled)
    assert [runtime.chat.decode([id]) for id in sampled] == greedy.logprobs.tokens[: len(sampled)]
    echoed = await ask(client, prompt + sampled, echo=True, max_tokens=max_tokens, logprobs=1)
    reported = echoed.logprobs
    assert len(reported.token_logprobs) == num + max_tokens or echoed.finish_reason == "stop"
    assert reported.token_logprobs[0] is None
    of_sampled = reported.token_logprobs[len(prompt) : num]
    assert of_sampled == pytest.approx(greedy.logprobs.token_logprobs[: len(sampled)], abs=1e-3)
    for value, likely in zip(of_sampled, reported.top_logprobs[len(prompt) : num], strict=True):
        assert value == max(likely.values())  # it was greedy, and a harness sees that
    assert echoed.text.startswith(PROMPT + greedy.text)


async def test_bias_forbids_and_forces_a_token(
    client: openai.AsyncOpenAI, runtime: Runtime, greedy: Any
) -> None:
    first = runtime.chat.tokenizer.encode(greedy.text).ids[0]
    free = await ask(client, max_tokens=1, logprobs=0)
    assert free.logprobs.tokens == [runtime.chat.decode([first])]
    without = await ask(client, max_tokens=1, logprobs=0, logit_bias={str(first): -100})
    assert without.logprobs.tokens != free.logprobs.tokens
    seven = runtime.chat.token_id("7")
    assert seven is not None
    forced = await ask(client, max_tokens=5, logit_bias={str(seven): 100})
    assert forced.text == "77777"


@pytest.mark.parametrize(
    "penalty",
    [{"frequency_penalty": 2}, {"presence_penalty": 2}, {"repetition_penalty": 2}],
    ids=lambda single: next(iter(single)),
)
async def test_penalty_changes_what_is_repeated(
    client: openai.AsyncOpenAI, runtime: Runtime, penalty: dict[str, Any]
) -> None:
    seven, eight = runtime.chat.token_id("7"), runtime.chat.token_id("8")
    bias = {str(seven): 30, str(eight): 29}
    free = await ask(client, max_tokens=8, logit_bias=bias)
    assert set(free.text) <= {"7", "8"}
    extra = {"extra_body": penalty} if "repetition_penalty" in penalty else penalty
    punished = await ask(client, max_tokens=8, logit_bias=bias, **extra)
    assert punished.text != free.text


async def test_no_end_comes_before_the_least_number_of_tokens(client: openai.AsyncOpenAI) -> None:
    complete = await ask(client, max_tokens=200)
    assert complete.finish_reason == "stop"
    num = len((await ask(client, max_tokens=200, logprobs=0)).logprobs.tokens)
    longer = await ask(client, max_tokens=num + 20, logprobs=0, extra_body={"min_tokens": num + 5})
    assert len(longer.logprobs.tokens) >= num + 5


async def test_token_of_the_callers_ends_it(
    client: openai.AsyncOpenAI, runtime: Runtime, greedy: Any
) -> None:
    ids = runtime.chat.tokenizer.encode(greedy.text).ids
    at = next(at for at in range(2, len(ids)) if ids[at] not in ids[:at])
    cut = await ask(client, max_tokens=40, logprobs=0, extra_body={"stop_token_ids": [ids[at]]})
    assert cut.finish_reason == "stop"
    assert len(cut.logprobs.tokens) == at + 1
    assert cut.text == runtime.chat.decode(ids[:at])


async def test_logit_bias_holds_for_the_bare_model_and_the_agent(
    client: openai.AsyncOpenAI, runtime: Runtime
) -> None:
    seven = runtime.chat.token_id("7")
    options: Any = {
        "messages": [{"role": "user", "content": "What is 37 times 48?"}],
        "logit_bias": {str(seven): 100},
        "max_tokens": 5,
        "logprobs": True,
    }
    for model in ("small", "small-agent"):
        made = await client.chat.completions.create(model=model, **options)
        tokens = made.choices[0].logprobs
        assert tokens is not None
        assert [single.token for single in tokens.content or ()] == ["7"] * 5
    too_high = {**options, "logit_bias": {"100000": 1}}
    with pytest.raises(openai.BadRequestError, match="logit_bias: 100000 is outside"):
        await client.chat.completions.create(model="small", **too_high)
