"""The same training in plain PyTorch: one process, one sample at a time, all logits at once."""

from __future__ import annotations

from typing import Any

import torch
from transformers import Qwen3ForCausalLM

from agentloop.learner.batch import Batch
from agentloop.training.learner_client.settings import LearnerSettings

# OpenMP's threads spin while they wait for each other; on a busy machine that costs minutes.
torch.set_num_threads(1)


def load(settings: LearnerSettings) -> Any:
    return Qwen3ForCausalLM.from_pretrained(settings.model, dtype=torch.float32).train()


def scores(model: Any, batch: Batch, index: int) -> tuple[Any, Any, slice]:
    """Return log-probabilities and entropies [L - 1] of a sample after its first token, and their
    slice."""
    start = int(batch.starts[index])
    place = slice(start + 1, start + int(batch.lengths[index]))
    ids = torch.from_numpy(batch.ids[start : place.stop]).long()
    logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
    if batch.kept is not None and batch.kept_counts is not None:
        ends = batch.kept_counts.cumsum()
        for row, at in enumerate(range(place.start, place.stop)):
            if num := batch.kept_counts[at]:
                is_cut = torch.ones(logits.shape[-1], dtype=torch.bool)
                is_cut[batch.kept[ends[at] - num : ends[at]]] = False
                cut = logits[row].masked_fill(is_cut, -1e9)
                logits = logits.index_copy(0, torch.tensor([row]), cut[None])
    table = logits.log_softmax(-1)
    return table.gather(-1, ids[1:, None])[:, 0], -(table.exp() * table).sum(-1), place


class Plain:
    """GRPO with AdamW, written as in the paper; the reference of its KL term is the initial
    model."""

    def __init__(self, settings: LearnerSettings, model: Any = None) -> None:
        self.optimizer = settings.optimizer
        self.model = model or load(settings)
        self.max_grad_norm = settings.optimizer.max_grad_norm
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.kl_coef = settings.loss.kl_coef
        self.reference = load(settings) if self.kl_coef else None
        self.begin_anew()

    def begin_anew(self) -> None:
        """Reset the optimizer."""
        o = self.optimizer
        self.adamw = torch.optim.AdamW(
            self.trained, lr=o.lr, betas=o.betas, eps=o.eps, weight_decay=0.0
        )

    def step(self, batch: Batch) -> dict[str, float]:
        groups = batch.groups.tolist()
        mask_T = torch.from_numpy(batch.mask).bool()
        old_T = torch.from_numpy(batch.old_logprobs)
        tis_T = torch.exp(old_T - torch.from_numpy(batch.logprobs)).clamp(max=2.0)
        loss: Any = 0.0
        clipped, kl = 0, 0.0
        for group in set(groups):
            members = [i for i, first in enumerate(groups) if first == group]
            total: Any = 0.0
            for index in members:
                new, _, place = scores(self.model, batch, index)
                mask = mask_T[place]
                a = torch.from_numpy(batch.advantages[place])[mask]
                ratio = torch.exp(new - old_T[place])[mask]
                bounded = ratio.clamp(0.8, 1.28)
                total = total + (tis_T[place][mask] * torch.minimum(ratio * a, bounded * a)).sum()
                if self.reference is not None:
                    with torch.no_grad():
                        old = scores(self.reference, batch, index)[0]
                    d = (old - new)[mask]
                    total = total - self.kl_coef * (d.exp() - d - 1).sum()
                    kl += (d.exp() - d - 1).sum().item()
                clipped += int((ratio * a > bounded * a).sum())
            num_tokens = sum(int(mask_T[scores_place(batch, i)].sum()) for i in members)
            loss = loss - total / num_tokens / len(set(groups))
        self.adamw.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.trained, self.max_grad_norm)
        self.adamw.step()
        num_sampled = int(mask_T.sum())
        share, kl = clipped / num_sampled, kl / num_sampled
        return {"loss": loss.item(), "grad_norm": norm.item(), "clipped": share, "kl": kl}


def scores_place(batch: Batch, index: int) -> slice:
    start = int(batch.starts[index])
    return slice(start, start + int(batch.lengths[index]))
