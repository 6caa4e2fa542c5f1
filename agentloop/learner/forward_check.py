"""A comparison of the learner's forward pass with the model's own, made as the learner starts.

    random samples ──┬─ the model's own logits, one sample at a time ─┐
                     ├─ the learner's scores, one sample at a time ───┼─> pack samples, do not pack
                     └─ the learner's scores, samples packed ─────────┘   them, or refuse the model

The learner calls a model's layers and output layer itself, and packs samples. Whatever a model does
besides (a factor for its logits, a state from token to token) would be lost, or would leak from one
sample into the next, without any error. Not covered: what only long samples show.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from agentloop.errors import ModelError
from agentloop.learner.batch import Array, Batch, MicroBatch, make_micro_batch
from agentloop.learner.head import Scores

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_LENGTHS = (24, 9, 15)
_NUM_SHARED = 6  # first tokens that the second and the third sample share
# Mean differences of log-probabilities and entropies, divided by their size. A model is refused
# above the first, which is far above rounding. Samples are not packed above the second, which is
# near to it: that they are not packed costs time alone.
_MAX_DIFFERENCE = {"float32": 2e-4, "bfloat16": 1e-2}
_MAX_LEAK = {"float32": 1e-6, "bfloat16": 1e-4}
_UNSUPPORTED = (NotImplementedError, AttributeError, KeyError, TypeError, ValueError)
_MAX_NOISE = 3  # times the difference between two ways to compute single samples


def _probe(config: PretrainedConfig) -> Batch:
    """Return samples of random tokens, of which two begin alike."""
    config = config.get_text_config()
    special = {v for k, v in config.to_dict().items() if k.endswith("_token_id")}
    ids = np.random.default_rng(0).permutation(config.vocab_size)
    ids = np.asarray([i for i in ids[:4096] if i not in special] or [0], np.int32)
    ids = np.resize(ids, sum(_LENGTHS))
    starts = np.cumsum(_LENGTHS) - _LENGTHS
    for offset in range(_NUM_SHARED):
        ids[starts[2] + offset] = ids[starts[1] + offset]
    mask = np.ones(len(ids), np.uint8)
    mask[starts] = 0
    zeros = np.zeros(len(ids), np.float32)
    return Batch(
        ids=ids,
        mask=mask,
        logprobs=zeros,
        advantages=zeros,
        weights=zeros,
        lengths=np.asarray(_LENGTHS, np.int32),
        groups=np.zeros(len(_LENGTHS), np.int32),
    )


class Scorer(Protocol):
    """Scores tokens in both ways: TokenScorer of policy.py."""

    model: PreTrainedModel

    def own_logits(self) -> AbstractContextManager[None]: ...


def compare(
    scorer: Scorer, score: Callable[[MicroBatch], Scores], *, share: bool
) -> ForwardComparison:
    """Score the probe in three ways (collective); the scorer must be in evaluation mode.

    Every rank scores all samples: how a batch is divided depends on the number of ranks.

    Args:
        score: calls the scorer, or DeepSpeed's engine around it.
        share: whether packed samples share tokens.

    Raises:
        ModelError: The model cannot take packed samples.
    """
    batch = _probe(scorer.model.config)

    def scores(micros: Sequence[Sequence[int]]) -> Array:
        scores_2T = np.zeros((2, len(batch.ids)), np.float32)
        for samples in micros:
            micro = make_micro_batch(batch, samples, batch.weights, share=share)
            scores_2T[:, micro.source] = torch.stack(score(micro)).cpu()
        return scores_2T

    model = type(scorer.model).__name__
    samples = range(len(_LENGTHS))
    each = [[index] for index in samples]
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        try:
            with scorer.own_logits():
                own = scores(each)
            return ForwardComparison(model, own, scores(each), scores([[*samples]]))
        except _UNSUPPORTED as error:
            text = f"{type(error).__name__}: {error}"
            raise ModelError(
                f"{model} cannot be trained: its forward pass fails: {text}"
            ) from error


class ForwardComparison:
    """Scores of the same samples in three ways, each float32 [2, T]: log-probabilities, entropies.

    Attributes:
        of_alone: mean difference between the learner's scores of single samples and the model's.
        of_packed: mean difference that packing makes.
    """

    def __init__(self, model: str, own: Array, alone: Array, packed: Array) -> None:
        self._model = model
        self._size = max(1.0, float(np.abs(own).mean()))
        self.of_alone = float(np.abs(alone - own).mean())
        self.of_packed = float(np.abs(packed - alone).mean())

    def require_same(self, dtype: str) -> None:
        """Check the learner's scores of single samples.

        Raises:
            ModelError: They are not the model's.
        """
        allowed = _MAX_DIFFERENCE[dtype] * self._size
        if not self.of_alone <= allowed:  # NaN as well
            raise ModelError(
                f"{self._model} cannot be trained: the log-probabilities that the learner computes "
                f"from its layers differ from those of its own logits, by {self.of_alone:.3g} on "
                f"average ({allowed:.1g} would be rounding). It may scale or cap its logits, or "
                "need more than token ids and positions"
            )

    def why_not_packed(self, dtype: str) -> str | None:
        """Return why samples must not be packed, or None if they may."""
        if self.of_packed <= max(_MAX_LEAK[dtype] * self._size, _MAX_NOISE * self.of_alone):
            return None
        return (
            f"packed, their log-probabilities would differ by {self.of_packed:.3g} on average, "
            "because layers pass something on from one sample to the next"
        )


def depends_on_longest(config: PretrainedConfig, max_tokens: int) -> str | None:
    """Return why a sample's logits depend on the longest one of its micro-batch, or None.

    Some rotary embeddings take other frequencies where a position is beyond a limit.
    """
    config = config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type")
    limit = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    if kind in ("dynamic", "longrope") and max_tokens > limit:
        return f"its rotary embeddings ({kind}) depend on the longest sample, above {limit} tokens"
    return None
