"""A real SGLang server as a teacher: its log-probabilities, and a step of distillation."""

from __future__ import annotations

import httpx
import pytest
from tokenizers import Tokenizer

from agentloop.models import SMALL
from agentloop.training.credit.rule import RewardedRollout
from agentloop.training.credit.settings import CreditSettings, assign
from agentloop.training.teacher_client import open_teacher
from agentloop.trajectory import Trajectory, Turn

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(300)]

TOKENIZER = Tokenizer.from_file(str(SMALL / "tokenizer.json"))


async def sampled(url: str, ids: list[int]) -> Turn:
    """Return a turn that the server samples after `ids`."""
    body = {
        "input_ids": ids,
        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
    }
    async with httpx.AsyncClient(timeout=60) as client:
        answer = (await client.post(f"{url}/generate", json=body)).raise_for_status().json()
    logprobs = [one[0] for one in answer["meta_info"]["output_token_logprobs"]]
    return Turn(answer["output_ids"], logprobs)


async def test_a_teacher_agrees_with_itself(sglang_url: str) -> None:
    """The model is its own teacher, so there is nothing to learn, over both turns."""
    prompt = TOKENIZER.encode("What is 37 times 48?", add_special_tokens=False).ids
    first = await sampled(sglang_url, prompt)
    first.observation_ids = TOKENIZER.encode("1776", add_special_tokens=False).ids
    second = await sampled(sglang_url, [*prompt, *first.output_ids, *first.observation_ids])
    trajectory = Trajectory("t", prompt, [first, second])
    credit = CreditSettings(name="distill", args={"teacher": sglang_url})
    async with open_teacher(credit, TOKENIZER) as teacher:
        assert teacher is not None
        for _ in range(2):  # the second time the server has it in its cache
            found = await teacher(trajectory)
            assert found == pytest.approx([*first.logprobs, *second.logprobs], abs=1e-3)
    ((one,),) = assign([RewardedRollout(0.0, [trajectory], [found])], credit)
    assert one.mean_advantage == pytest.approx(0, abs=1e-3)
    other = Turn(first.output_ids[::-1], [-1.0] * 24)  # tokens that it would not sample
    async with open_teacher(credit, TOKENIZER) as teacher:
        assert teacher is not None
        found = await teacher(Trajectory("t", prompt, [other]))
    assert sum(found) < sum(first.logprobs) - 10
