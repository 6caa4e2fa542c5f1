"""Routing replay: the experts that a real SGLang server reports, in the learner."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.patience import patient

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch

from agentloop import Budget, Runtime, Sampling, Settings
from agentloop.agent.turn_reader import TurnOptions
from agentloop.inference.processes.supervise import ServerSettings
from agentloop.learner.batch import Batch, make_micro_batch
from agentloop.learner.policy import TokenScorer, load_model
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.settings import LearnerSettings
from tests.learner.families import make_model

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.gate, pytest.mark.timeout(600)]

torch.set_num_threads(1)
NUM_LAYERS, NUM_EXPERTS = 3, 8
QUESTIONS = ("What is 37 times 48?", "And 3 times 4?", "And 3 times 4?", "Why?")
# A model of random weights hardly ever ends its turn: any of these tokens ends it.
STOP_IDS = tuple(range(3, 512, 16))


async def test_learner_sends_tokens_to_the_servers_experts(
    sglang_installed: None, tmp_path: Path
) -> None:
    """Over turns of which each extends the prompt before it, which the server has cached."""
    model = make_model(
        tmp_path / "model",
        "qwen3_moe",
        num_hidden_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        norm_topk_prob=True,
        tie_word_embeddings=False,  # SGLang would not tie them
    )
    server = ServerSettings(
        start_timeout_s=patient(300), extra_args=("--enable-return-routed-experts",)
    )
    settings = Settings(model=str(tmp_path / "model"), server=server, log_dir=tmp_path, tools=[])
    sampling = Sampling().with_routing_replay().for_training()
    replies = itertools.cycle(["And then?", "Why?", None])

    async def reply(answer: str) -> str | None:
        return next(replies)

    async with Runtime(settings) as runtime:
        trajectories = [
            await runtime.rollout(
                question,
                sampling=sampling,
                budget=Budget(max_response_tokens=1000),
                options=TurnOptions(stop_ids=STOP_IDS),
                reply=reply,
            )
            for question in QUESTIONS
        ]
    assert min(len(each.turns) for each in trajectories) >= 2
    chosen: list[Any] = []  # layer by layer
    for block in model.model.layers:
        block.mlp.gate.register_forward_hook(
            lambda gate, inputs, output: chosen.append(output[2].numpy())
        )
    for trajectory in trajectories:
        assert [span.start for span in trajectory.experts][1:] == [
            span.end for span in trajectory.experts
        ][:-1]
        assert trajectory.num_routed == len(trajectory.ids) - 1
        chosen.clear()
        with torch.no_grad():
            model(torch.tensor([trajectory.ids]))
        own = np.stack(chosen, 1)[:-1]
        recorded = np.frombuffer(b"".join(span.ids for span in trajectory.experts), np.uint8)
        assert np.sort(recorded.reshape(own.shape)).tolist() == np.sort(own).tolist()

    write_batch(tmp_path / "batch", [*map(Sample.of, trajectories)])
    batch = Batch.load(tmp_path / "batch")
    learner = LearnerSettings(model=tmp_path / "model", routing_replay=True)
    scorer = TokenScorer(load_model(learner), learner)
    micro = make_micro_batch(batch, range(len(QUESTIONS)), batch.weights, share=True)
    arrays = (micro.ids, micro.positions, micro.predictors, micro.targets)
    with torch.no_grad():
        # Routers that would choose others: what is recorded counts.
        for gate in (block.mlp.gate for block in scorer.model.model.layers):
            gate.register_forward_hook(_choose_last, prepend=True)
        experts = torch.from_numpy(micro.experts)
        logprobs, _ = scorer(*map(torch.from_numpy, arrays), micro.segments, None, experts)
        astray, _ = scorer(*map(torch.from_numpy, arrays), micro.segments)
    mismatch = np.abs(logprobs.numpy() - micro.engine)
    print(f"{len(mismatch)} tokens, mismatch {mismatch.max():.2g}")
    assert mismatch.max() < 1e-5
    assert np.abs(astray.numpy() - micro.engine).max() > 0.1


def _choose_last(gate: object, inputs: object, output: tuple[torch.Tensor, ...]) -> object:
    logits, weights, chosen = output
    return logits, weights, NUM_EXPERTS - 1 - chosen
