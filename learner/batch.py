"""Batches: the file format, and how a batch is split over ranks into micro-batches.

    file ──> Batch ──plan──> per rank: lists of samples ──> MicroBatch, MicroBatch, ... (padding)

Samples are packed end to end; positions restart at 0 with each sample, which is how transformers'
attention finds the boundaries. This module needs only numpy, so batches can be written without
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from agentloop.learner.errors import BatchError

__all__ = [
    "Array",
    "Batch",
    "MicroBatch",
    "make_micro_batch",
    "normalized_weights",
    "parts",
    "plan",
]

Array = np.ndarray[Any, Any]
_TYPES = {
    "ids": np.int32,
    "mask": np.uint8,
    "logprobs": np.float32,
    "advantages": np.float32,
    "weights": np.float32,
    "lengths": np.int32,
    "groups": np.int32,
    "old_logprobs": np.float32,
    "ref_logprobs": np.float32,
}
_OPTIONAL = ("old_logprobs", "ref_logprobs")
_PER_SAMPLE = ("lengths", "groups")


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """N samples with T tokens in total, stored flat; each sample is contiguous, prompt first.

    Attributes:
        ids: int32 [T].
        mask: uint8 [T], 1 where the model sampled the token; only those are trained on.
        logprobs: float32 [T], the engine's; read where `mask` is 1.
        advantages: float32 [T], 0 where `mask` is 0.
        weights: float32 [T], 0 where `mask` is 0, otherwise not negative: the loss of an update is
            the mean over its tokens with these weights.
        lengths: int32 [N], sum(lengths) = T.
        groups: int32 [N], equal for samples of the same task.
        old_logprobs: float32 [T] or None: denominator of the ratio.
        ref_logprobs: float32 [T] or None: of the reference policy of the KL term.
    """

    ids: Array
    mask: Array
    logprobs: Array
    advantages: Array
    weights: Array
    lengths: Array
    groups: Array
    old_logprobs: Array | None = None
    ref_logprobs: Array | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def starts(self) -> Array:
        """int64 [N]: offset of each sample's first token."""
        return np.cumsum(self.lengths, dtype=np.int64) - self.lengths

    def up_to(self, max_tokens: int) -> Batch | None:
        """Return the samples of at most `max_tokens` tokens, or None if there are none."""
        fits_N = self.lengths <= max_tokens
        if fits_N.all():
            return self
        if not fits_N.any():
            return None
        fits_T = np.repeat(fits_N, self.lengths)
        kept: dict[str, Any] = {}
        for name in _TYPES:
            array = getattr(self, name)
            fits = fits_N if name in _PER_SAMPLE else fits_T
            kept[name] = None if array is None else array[fits]
        return Batch(**kept)

    def save(self, path: Path) -> None:
        arrays = {f.name: getattr(self, f.name) for f in fields(self)}
        path.write_bytes(
            save({k: np.ascontiguousarray(a) for k, a in arrays.items() if a is not None})
        )

    @classmethod
    def load(cls, path: Path) -> Batch:
        """Read a batch from a safetensors file.

        Raises:
            BatchError: The file cannot be read or is invalid; the message names it.
        """
        try:
            tensors = load(path.read_bytes())
        except OSError as error:
            raise BatchError(f"{path}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise BatchError(f"{path}: not a safetensors file: {error}") from error
        except (KeyError, TypeError, ValueError) as error:  # bfloat16: numpy has no such type
            raise BatchError(f"{path}: a tensor has an unsupported type: {error}") from error
        if missing := set(_TYPES) - set(_OPTIONAL) - set(tensors):
            raise BatchError(f"{path}: missing tensor {', '.join(sorted(missing))}")
        if unknown := set(tensors) - set(_TYPES):
            raise BatchError(f"{path}: unknown tensor {', '.join(sorted(unknown))}")
        try:
            return cls(**tensors)
        except BatchError as error:
            raise BatchError(f"{path}: {error}") from error


def _check(batch: Batch) -> None:
    sizes = {"token": batch.ids.size, "sample": batch.lengths.size}
    for name, dtype in _TYPES.items():
        array = getattr(batch, name)
        if array is None and name in _OPTIONAL:
            continue
        of = "sample" if name in _PER_SAMPLE else "token"
        if array.dtype != dtype or array.shape != (sizes[of],):
            wanted = f"{np.dtype(dtype)} [{sizes[of]}], one for each {of}"
            raise BatchError(f"{name}: expected {wanted}, not {array.dtype} {list(array.shape)}")
    if not sizes["sample"]:
        raise BatchError("lengths: the batch has no samples")
    if batch.lengths.min() < 2 or batch.lengths.sum(dtype=np.int64) != sizes["token"]:
        raise BatchError(f"lengths: each must be at least 2, their sum {sizes['token']}")
    if batch.ids.min() < 0 or batch.mask.max() > 1:
        raise BatchError("ids, mask: ids must not be negative, mask must be 0 or 1")
    if batch.mask[batch.starts].any():
        first = int(np.flatnonzero(batch.mask[batch.starts])[0])
        raise BatchError(f"mask: sample {first} begins with a sampled token: nothing predicts it")
    num_sampled = np.add.reduceat(batch.mask, batch.starts, dtype=np.int64)
    if not num_sampled.all():
        raise BatchError(f"mask: sample {int(num_sampled.argmin())} has no sampled token")
    sampled = batch.mask == 1
    for name in ("advantages", "weights"):
        array = getattr(batch, name)
        if not np.isfinite(array).all():
            raise BatchError(
                f"{name}: token {_first(~np.isfinite(array))} of the batch is not finite"
            )
        if array[~sampled].any():
            at = _first(~sampled & (array != 0))
            raise BatchError(f"{name}: token {at} of the batch was not sampled, but is not 0")
    if batch.weights.min() < 0:
        raise BatchError(f"weights: token {_first(batch.weights < 0)} of the batch is negative")
    for name in ("logprobs", *_OPTIONAL):
        array = getattr(batch, name)
        if array is not None and not np.isfinite(array[sampled]).all():
            at = _first(~np.isfinite(array) & sampled)
            raise BatchError(f"{name}: token {at} of the batch is not finite")


def _first(where: Array) -> int:
    return int(np.flatnonzero(where)[0])


def normalized_weights(batch: Batch, samples: Sequence[int]) -> Array:
    """Return the weight of each token in the loss of an update on `samples`, float32 [T].

    These are the batch's weights, divided by their sum over `samples`; 0 for all other tokens.
    """
    chosen_N = np.zeros(len(batch.lengths), bool)
    chosen_N[list(samples)] = True
    weights = np.where(np.repeat(chosen_N, batch.lengths), batch.weights, 0).astype(np.float64)
    total = weights.sum()
    return (weights / total if total else weights).astype(np.float32)


def parts(groups: Sequence[int], num_parts: int) -> list[list[int]]:
    """Split the samples' indices into at most `num_parts` parts, keeping groups whole."""
    order = list(dict.fromkeys(groups))
    dealt = [set(order[i::num_parts]) for i in range(min(num_parts, len(order)))]
    return [[i for i, group in enumerate(groups) if group in part] for part in dealt]


def plan(lengths: Sequence[int], budget: int, world_size: int) -> list[list[list[int]]]:
    """Assign samples to ranks: per rank, equally many micro-batches, each a list of indices.

    No micro-batch holds more than `budget` tokens (first fit, longest first). If their number is
    not a multiple of the ranks, the fullest are halved; then empty ones are added as padding,
    because every rank must do the same number of backward passes.

    Raises:
        BatchError: A sample is longer than the budget.
    """
    bins: list[list[int]] = []
    free: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        length = lengths[index]
        if length > budget:
            raise BatchError(
                f"sample {index} has {length} tokens: raise micro_batch_tokens ({budget})"
            )
        at = next((i for i, room in enumerate(free) if room >= length), len(bins))
        if at == len(bins):
            bins.append([])
            free.append(budget)
        bins[at].append(index)
        free[at] -= length
    _halve_until_even(bins, lengths, world_size)
    bins.sort(key=lambda indices: -_num_tokens(indices, lengths))
    ranks: list[list[list[int]]] = [[] for _ in range(world_size)]
    for first in range(0, len(bins), world_size):
        # Each rank takes one; the least loaded rank takes the fullest.
        turn = sorted(
            ranks, key=lambda rank: sum(_num_tokens(indices, lengths) for indices in rank)
        )
        for rank, indices in zip(turn, bins[first : first + world_size], strict=False):
            rank.append(indices)
    num_bins = max(map(len, ranks))
    return [rank + [[]] * (num_bins - len(rank)) for rank in ranks]


def _halve_until_even(bins: list[list[int]], lengths: Sequence[int], world_size: int) -> None:
    while len(bins) % world_size:
        splittable = [indices for indices in bins if len(indices) > 1]
        if not splittable:
            return
        fullest = max(splittable, key=lambda indices: _num_tokens(indices, lengths))
        halves: tuple[list[int], list[int]] = ([], [])
        for index in fullest:  # longest first
            min(halves, key=lambda half: _num_tokens(half, lengths)).append(index)
        bins.remove(fullest)
        bins.extend(halves)


def _num_tokens(indices: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[index] for index in indices)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The L tokens of one forward pass, M of them sampled.

    Attributes:
        ids, positions: int64 [L]; positions restart at 0 with each sample.
        segments: Lengths of the samples; they sum to L.
        predictors: int64 [M]: index in L whose output predicts a sampled token.
        targets: int64 [M]: the sampled tokens.
        source: int64 [M]: their indices in the batch; -1 in padding.
        sample: int64 [M]: index of their sample in this micro-batch.
        weights, advantages, engine: float32 [M].
        old, reference: float32 [M] or None.
    """

    ids: Array
    positions: Array
    segments: tuple[int, ...]
    predictors: Array
    targets: Array
    source: Array
    sample: Array
    weights: Array
    advantages: Array
    engine: Array
    old: Array | None
    reference: Array | None


def make_micro_batch(batch: Batch, samples: Sequence[int], weights_T: Array) -> MicroBatch:
    """Pack `samples`. An empty list gives padding: two tokens with weight 0."""
    if not samples:
        return _padding(batch)
    starts = batch.starts
    spans = [np.arange(starts[i], starts[i] + batch.lengths[i]) for i in samples]
    at_L = np.concatenate(spans)
    predicted = np.flatnonzero(batch.mask[at_L] == 1)
    source = at_L[predicted]
    sample = np.repeat(np.arange(len(samples)), [len(span) for span in spans])[predicted]
    return MicroBatch(
        ids=batch.ids[at_L].astype(np.int64),
        positions=np.concatenate([span - span[0] for span in spans]),
        segments=tuple(map(len, spans)),
        predictors=predicted - 1,
        targets=batch.ids[source].astype(np.int64),
        source=source,
        sample=sample,
        weights=weights_T[source],
        advantages=batch.advantages[source],
        engine=batch.logprobs[source],
        old=None if batch.old_logprobs is None else batch.old_logprobs[source],
        reference=None if batch.ref_logprobs is None else batch.ref_logprobs[source],
    )


def _padding(batch: Batch) -> MicroBatch:
    zero, none = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return MicroBatch(
        ids=np.zeros(2, np.int64),
        positions=np.arange(2),
        segments=(2,),
        predictors=zero,
        targets=zero,
        source=zero - 1,
        sample=zero,
        weights=none,
        advantages=none,
        engine=none,
        old=None if batch.old_logprobs is None else none,
        reference=None if batch.ref_logprobs is None else none,
    )
