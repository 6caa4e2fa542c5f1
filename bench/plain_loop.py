"""Training as a typical handwritten loop; bench/learner.py starts it.

python -m bench.plain_loop SETTINGS.json VARIANT          reads paths of batches, prints figures
python -m bench.plain_loop SETTINGS.json VARIANT BATCH    peak memory of one pass over the batch
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from agentloop.learner.attention import arguments
from agentloop.learner.batch import (
    Batch,
    MicroBatch,
    make_micro_batch,
    normalized_weights,
    shared_prefixes,
)
from agentloop.learner.policy import TokenScorer, load_model
from agentloop.training.learner_client.settings import LearnerSettings
from bench.micro_batches import PACKED, arrange
from bench.sandbox import peak_memory_mib, reset_peak_memory

_WITHOUT_MASK = ("packed", "compiled", "chunked", "shared")


class Plain:
    """Handwritten training. `variant` selects the way micro-batches are made and scored:

    packed     samples end to end, each attends only to itself, as in the learner
    compiled   like packed; layers and log-probabilities by torch's compiler, AdamW fused
    chunked    like packed, with the learner's head, which computes logits in chunks, and twice
    shared     like chunked; what samples begin with alike is computed once, as in the learner
    masked     like packed, with transformers' own mask
    sorted     padded to the longest, samples of similar length together
    unsorted   padded to the longest, samples in their order
    """

    def __init__(self, settings: LearnerSettings, variant: str) -> None:
        attention = "packed" if variant in _WITHOUT_MASK else "sdpa"
        self._settings = settings.model_copy(update={"attention": attention})
        self._how = variant
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._of_targets = _of_targets
        self.model = load_model(self._settings).to(self._device).train()
        has_head = variant in ("chunked", "shared")
        self._scorer = TokenScorer(self.model, self._settings) if has_head else None
        if variant == "compiled":
            self._of_targets = torch.compile(_of_targets, dynamic=True)
            for layer in self.model.base_model.layers:
                layer.compile(dynamic=True)
        o = settings.optimizer
        self._adamw = torch.optim.AdamW(
            self.model.parameters(), lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay,
            fused=variant == "compiled" or None,
        )  # fmt: skip

    def step(self, batch: Batch) -> dict[str, float]:
        """One update; its loss and gradient norm."""
        lengths = batch.lengths.tolist()
        weights = normalized_weights(batch, range(len(lengths)))
        loss_sum = 0.0
        share, samples = self._how == "shared", range(len(lengths))
        order, shared = shared_prefixes(batch, samples) if share else ([*samples], [])
        lengths = [lengths[index] for index in order]
        for indices in arrange(lengths, self._settings.max_sample_tokens, self._how, shared):
            chosen = [order[index] for index in indices]
            loss = self.loss(make_micro_batch(batch, chosen, weights, share=share))
            loss.backward()
            loss_sum += loss.item()
        max_norm = self._settings.optimizer.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()
        self._adamw.step()
        self._adamw.zero_grad()
        return {"loss": loss_sum, "grad_norm": norm}

    def loss(self, micro: MicroBatch) -> Any:
        """GRPO's: the clipped ratio times the advantage, times a truncated importance weight."""
        new = self._logprobs(micro)
        old, advantage = new.detach(), self._on(micro.advantages)
        ratio = torch.exp(new - old)
        objective = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        tis = torch.exp(old - self._on(micro.engine)).clamp(max=2.0)
        return -(self._on(micro.weights) * tis * objective).sum()

    def _logprobs(self, micro: MicroBatch) -> Any:
        on = self._on
        if self._scorer is not None:
            where = (micro.ids, micro.positions, micro.predictors, micro.targets)
            return self._scorer(*map(on, where), micro.segments)[0]
        hidden = self._hidden(micro)[on(micro.predictors)]
        return self._of_targets(hidden, self.model.lm_head.weight, on(micro.targets))

    def _hidden(self, micro: MicroBatch) -> Any:
        """[L, H]: of the micro-batch's tokens, without padding."""
        model, on = self.model.base_model, self._on
        if self._how not in PACKED:
            # No mask is needed, because padding comes after the sample and attention is causal.
            lengths = [end - start for start, end, _ in micro.segments]
            width = max(lengths)
            rows = np.repeat(np.arange(len(lengths)), lengths)
            cells = rows * width + micro.positions
            grid = np.zeros((len(lengths), width), np.int64)
            grid.flat[cells] = micro.ids
            output = model(input_ids=on(grid), use_cache=False)
            return output.last_hidden_state.flatten(0, 1)[on(cells)]
        packed = self._settings.attention == "packed"
        more = arguments(micro.segments, self._device) if packed else {}
        ids, positions = on(micro.ids)[None], on(micro.positions)[None]
        output = model(
            input_ids=ids, position_ids=positions, attention_mask=None, use_cache=False, **more
        )
        return output.last_hidden_state[0]

    def _on(self, array: np.ndarray[Any, Any]) -> Any:
        return torch.from_numpy(array).to(self._device)


def _of_targets(hidden: Any, weight: Any, targets: Any) -> Any:
    """Return the log-probabilities of the targets."""
    logits = torch.nn.functional.linear(hidden, weight).float()
    return -torch.nn.functional.cross_entropy(logits, targets, reduction="none")


def peak(plain: Plain, batch: Batch) -> dict[str, float]:
    """What a forward and a backward pass add to model and gradients; on a CPU by the process's
    peak of resident memory."""
    for parameter in plain.model.parameters():
        parameter.grad = torch.full_like(parameter, 0.0)
    samples = range(len(batch.lengths))
    shortest = int(batch.lengths.argmin())
    weights = normalized_weights(batch, samples)
    plain.loss(make_micro_batch(batch, [shortest], weights)).backward()  # buffers, threads
    micro = make_micro_batch(batch, samples, weights)
    cuda = torch.cuda.is_available()
    torch.cuda.reset_peak_memory_stats() if cuda else reset_peak_memory()
    before_mib = torch.cuda.memory_allocated() / 2**20 if cuda else peak_memory_mib()
    started = time.perf_counter()
    plain.loss(micro).backward()
    if cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    peak_mib = torch.cuda.max_memory_allocated() / 2**20 if cuda else peak_memory_mib()
    return {"peak MiB": peak_mib - before_mib, "seconds": seconds}


def main(settings_path: str, variant: str, *paths: str) -> None:
    settings = LearnerSettings.model_validate_json(Path(settings_path).read_bytes())
    plain = Plain(settings, variant)
    if paths:
        print(json.dumps(peak(plain, Batch.load(Path(paths[0])))))
        return
    for line in sys.stdin:
        print(json.dumps(plain.step(Batch.load(Path(line.strip())))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
