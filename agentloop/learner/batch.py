"""Batches: the file format, and how a batch is split over ranks into micro-batches.

    file ──> Batch ──plan──> per rank: lists of samples ──> MicroBatch, MicroBatch, ... (padding)

Samples are packed end to end; positions restart at 0 with each sample, which is how transformers'
attention finds the boundaries. Where samples begin alike, as the rollouts of a task and the
branches of a session do, the tokens that they share are there once: a micro-batch is a sequence of
segments, and each continues one before it or begins a sample.

    two samples, a b c d and a b e       tokens     a b c d e
                                         positions  0 1 2 3 2
                                         segments   [a b] [c d] [e]; the last two continue the first

This module needs only numpy, so batches can be written without torch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from agentloop.learner.errors import BatchError

Array = np.ndarray
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
    "kept_counts": np.int32,
    "kept": np.int32,
    "expert_counts": np.int32,
    "experts": np.uint8,
}
_OPTIONAL_LOGPROBS = ("old_logprobs", "ref_logprobs")
_COUNTS = {"kept": "kept_counts", "experts": "expert_counts"}  # of tensors with any for a token
_OPTIONAL = (*_OPTIONAL_LOGPROBS, *_COUNTS, *_COUNTS.values())
_PER_SAMPLE = ("lengths", "groups")
_MIN_SHARED = 1 / 32  # of a sample: attention to shared tokens has a cost of its own


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
        kept_counts: int32 [T] or None: number of ids to which top-k, top-p and min-p had cut the
            distribution that the token was sampled from; 0: it was not cut.
        kept: int32 [sum(kept_counts)] or None: these ids, for one token after the other.
        expert_counts: int32 [T] or None: number of experts, in all layers, that were recorded of
            the token; 0: none were, and otherwise the same number for all tokens.
        experts: uint8 [sum(expert_counts)] or None: these experts, layer by layer.
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
    kept_counts: Array | None = None
    kept: Array | None = None
    expert_counts: Array | None = None
    experts: Array | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def starts(self) -> Array:
        """int64 [N]: offset of each sample's first token."""
        starts: Array = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        return starts

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
            if array is not None and name in _COUNTS:
                fits = np.repeat(fits_T, getattr(self, _COUNTS[name]))
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
    for name, counts_name in _COUNTS.items():
        counts = getattr(batch, counts_name)
        if (counts is None) != (getattr(batch, name) is None):
            raise BatchError(f"{counts_name}, {name}: expected both or none")
        sizes[f"one of {counts_name}"] = 0 if counts is None else int(counts.sum(dtype=np.int64))
    for name, dtype in _TYPES.items():
        array = getattr(batch, name)
        if array is None and name in _OPTIONAL:
            continue
        of = "sample" if name in _PER_SAMPLE else "token"
        of = f"one of {_COUNTS[name]}" if name in _COUNTS else of
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
    if batch.kept_counts is not None and batch.kept is not None:
        _check_kept(batch, batch.kept_counts, batch.kept)
    if (counts := batch.expert_counts) is not None and set(np.unique(counts)) - {0, counts.max()}:
        raise BatchError("expert_counts: expected 0 or the same number for all tokens")
    for name in ("logprobs", *_OPTIONAL_LOGPROBS):
        array = getattr(batch, name)
        if array is not None and not np.isfinite(array[sampled]).all():
            at = _first(~np.isfinite(array) & sampled)
            raise BatchError(f"{name}: token {at} of the batch is not finite")


def _check_kept(batch: Batch, counts: Array, kept: Array) -> None:
    if counts.min() < 0 or counts[batch.mask == 0].any():
        raise BatchError("kept_counts: expected 0 where mask is 0, and nothing negative")
    token_of = np.repeat(np.arange(len(counts)), counts)
    num_found = np.bincount(token_of[kept == batch.ids[token_of]], minlength=len(counts))
    if (wrong := (counts > 0) & (num_found != 1)).any() or (len(kept) and kept.min() < 0):
        raise BatchError(f"kept: token {_first(wrong)} of the batch is not once among its ids")


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


def shared_prefixes(batch: Batch, samples: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return `samples` in an order in which those that begin alike are neighbours, group by group,
    and for each the number of its first tokens that it shares with the one before it.

    A small part of a sample does not count.
    """
    starts = batch.starts
    ids = {i: batch.ids[starts[i] : starts[i] + batch.lengths[i]] for i in samples}
    keys = {i: (batch.groups[i], ids[i].astype(">i4").tobytes()) for i in samples}
    order = sorted(samples, key=keys.__getitem__)
    shared = [0] * len(order[:1])
    for before, after in itertools.pairwise(order):
        num = _num_equal(ids[before], ids[after])
        shared.append(num if _is_shared(num, len(ids[after])) else 0)
    return order, shared


def _is_shared(num: int, length: int) -> bool:
    """Return whether a sample of this length shares its first tokens rather than repeats them."""
    return num >= _MIN_SHARED * length


def _num_equal(left: Array, right: Array) -> int:
    num = min(len(left), len(right))
    differs = left[:num] != right[:num]
    return int(differs.argmax()) if differs.any() else num


def plan(
    lengths: Sequence[int],
    budget: int,
    world_size: int,
    shared: Sequence[int] = (),
    *,
    packs: bool = True,
) -> list[list[list[int]]]:
    """Assign samples to ranks: per rank, equally many micro-batches, each a list of indices.

    No micro-batch holds more than `budget` tokens (first fit, longest first). If their number is
    not a multiple of the ranks, the fullest are halved; then empty ones are added as padding,
    because every rank must do the same number of backward passes.

    Args:
        shared: tokens that each sample shares with the one before it, as `shared_prefixes` returns
            them. Neighbours that share some are kept together, and a token that they share is one
            token of their micro-batch.

    Raises:
        BatchError: A sample is longer than the budget.
    """
    for index, length in enumerate(lengths):
        if length > budget:
            raise BatchError(
                f"sample {index} has {length} tokens: raise micro_batch_tokens ({budget})"
            )
    families = _Families(lengths, shared or [0] * len(lengths), budget)
    bins: list[list[range]] = []
    free: list[int] = []
    for family in sorted(families.all, key=lambda family: -families.size(family)):
        size = families.size(family)
        rooms = enumerate(free if packs else ())
        at = next((i for i, room in rooms if room >= size), len(bins))
        if at == len(bins):
            bins.append([])
            free.append(budget - families.load([]))
        bins[at].append(family)
        free[at] -= size
    _halve_until_even(bins, families, world_size)
    bins.sort(key=lambda each: -families.load(each))
    ranks: list[list[list[range]]] = [[] for _ in range(world_size)]
    for first in range(0, len(bins), world_size):
        # Each rank takes one; the least loaded rank takes the fullest.
        turn = sorted(ranks, key=lambda rank: sum(map(families.load, rank)))
        for rank, each in zip(turn, bins[first : first + world_size], strict=False):
            rank.append(each)
    num_bins = max(map(len, ranks))
    return [
        [[*itertools.chain(*each)] for each in rank] + [[]] * (num_bins - len(rank))
        for rank in ranks
    ]


class _Families:
    """Samples that begin alike: ranges of indices, of at most `budget` tokens each.

    What all samples of the batch share is no reason to keep some of them together; every
    micro-batch holds it once.
    """

    def __init__(self, lengths: Sequence[int], shared: Sequence[int], budget: int) -> None:
        self._shared = shared
        self._common = min(shared[1:], default=0)
        if not _is_shared(self._common, max(lengths, default=0)):  # each may follow any other
            self._common = 0
        pairs = zip(lengths, shared, strict=True)
        self._totals = [0, *itertools.accumulate(length - num for length, num in pairs)]
        self.all: list[range] = []
        for index, num in enumerate(shared):
            grown = range(self.all[-1].start if self.all else 0, index + 1)
            if index and num > self._common and self.load([grown]) <= budget:
                self.all[-1] = grown
            else:
                self.all.append(range(index, index + 1))

    def size(self, family: range) -> int:
        """Return the number of tokens that `family` adds to those that all samples share."""
        added = self._totals[family.stop] - self._totals[family.start]
        return added + self._shared[family.start] - self._common

    def load(self, families: Sequence[range]) -> int:
        """Return the number of tokens of a micro-batch."""
        return self._common + sum(map(self.size, families))

    def halves(self, families: Sequence[range]) -> list[list[range]]:
        """Divide families, or the samples of a single one, such that the larger half is small."""
        if len(families) > 1:
            halves: list[list[range]] = [[], []]
            for family in families:  # longest first
                min(halves, key=lambda half: (self.load(half), len(half))).append(family)
            return halves
        (family,) = families
        cuts = (
            [[range(family.start, at)], [range(at, family.stop)]]
            for at in range(family.start + 1, family.stop)
        )
        return min(cuts, key=lambda halves: max(map(self.load, halves)))


def _halve_until_even(bins: list[list[range]], families: _Families, world_size: int) -> None:
    while len(bins) % world_size:
        divisible = [each for each in bins if sum(map(len, each)) > 1]
        if not divisible:
            return
        fullest = max(divisible, key=families.load)
        bins.remove(fullest)
        bins.extend(families.halves(fullest))


class PackedSegment(NamedTuple):
    """Tokens [start, end) of a micro-batch; those of [end, last) continue them.

    The latter are segments, too, in the same way, so that what a segment continues comes before it.
    """

    start: int
    end: int
    last: int


def paths(segments: Sequence[PackedSegment]) -> Iterator[list[PackedSegment]]:
    """Yield, for each segment, those that it continues, from the first on, and itself."""
    path: list[PackedSegment] = []
    for segment in segments:
        while path and path[-1].last <= segment.start:
            path.pop()
        path.append(segment)
        yield path


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """The L tokens of one forward pass, and the M sampled ones of its samples.

    Attributes:
        ids, positions: int64 [L]; a position is the number of tokens before it in its sample.
        segments: The segments, from the first token to the last.
        predictors: int64 [M]: index in L whose output predicts a sampled token; it may be that of
            several, the first ones of siblings.
        targets: int64 [M]: the sampled tokens.
        source: int64 [M]: their indices in the batch; -1 in padding.
        sample: int64 [M]: index of their sample in this micro-batch.
        weights, advantages, engine: float32 [M].
        old, reference: float32 [M] or None.
        kept: int32 [M, K] or None: the ids to which each distribution was cut, then -1; a row of -1
            only: it was not cut.
        experts: int16 [L, W] or None: the recorded experts of each token; -1: none were.
    """

    ids: Array
    positions: Array
    segments: tuple[PackedSegment, ...]
    predictors: Array
    targets: Array
    source: Array
    sample: Array
    weights: Array
    advantages: Array
    engine: Array
    old: Array | None
    reference: Array | None
    kept: Array | None = None
    experts: Array | None = None


def make_micro_batch(
    batch: Batch, samples: Sequence[int], weights_T: Array, *, share: bool = False
) -> MicroBatch:
    """Pack `samples`. An empty list gives padding: two tokens with weight 0.

    Args:
        share: whether tokens that samples begin with alike are packed once.
    """
    if not samples:
        return _padding(batch)
    order, shared = shared_prefixes(batch, samples) if share else (samples, [0] * len(samples))
    at_L: list[Array] = []
    positions: list[Array] = []
    predictors: list[Array] = []
    sources: list[Array] = []
    places: list[tuple[Array, Array]] = []  # of each sample's tokens: in the batch, and in L
    edges, size = {0}, 0
    path = np.zeros(0, np.int64)  # where the sample's tokens are in L
    for index, num in zip(order, shared, strict=True):
        span = np.arange(batch.lengths[index]) + batch.starts[index]
        at_L.append(span[num:])
        positions.append(np.arange(num, len(span)))
        path = np.concatenate([path[:num], np.arange(size, size + len(span) - num)])
        size += len(span) - num
        edges |= {size, int(path[num - 1]) + 1 if num else size}
        sampled = np.flatnonzero(batch.mask[span] == 1)
        places.append((span, path))
        predictors.append(path[sampled - 1])
        sources.append(span[sampled])
    position_L, source = np.concatenate(positions), np.concatenate(sources)
    return MicroBatch(
        ids=batch.ids[np.concatenate(at_L)].astype(np.int64),
        positions=position_L,
        segments=_segments(sorted(edges), position_L),
        predictors=np.concatenate(predictors),
        targets=batch.ids[source].astype(np.int64),
        source=source,
        sample=np.repeat(np.arange(len(sources)), [len(each) for each in sources]),
        weights=weights_T[source],
        advantages=batch.advantages[source],
        engine=batch.logprobs[source],
        old=None if batch.old_logprobs is None else batch.old_logprobs[source],
        reference=None if batch.ref_logprobs is None else batch.ref_logprobs[source],
        kept=_kept_of(batch, source),
        experts=_experts_of(batch, places, size),
    )


def _experts_of(batch: Batch, places: Sequence[tuple[Array, Array]], size: int) -> Array | None:
    """Return the recorded experts of the tokens of a micro-batch, int16 [L, W], or None.

    Those of a token that samples share are its first sample's, if it has any.
    """
    if batch.experts is None or batch.expert_counts is None or not batch.experts.size:
        return None
    recorded = batch.experts.reshape(-1, int(batch.expert_counts.max()))
    row_T = np.cumsum(batch.expert_counts > 0) - 1
    experts = np.full((size, recorded.shape[1]), -1, np.int16)
    for span, path in reversed(places):
        is_recorded = batch.expert_counts[span] > 0
        experts[path[is_recorded]] = recorded[row_T[span[is_recorded]]]
    return experts


def _kept_of(batch: Batch, source: Array) -> Array | None:
    """Return the kept ids of tokens, int32 [M, K], or None if none of them has any."""
    if batch.kept is None or batch.kept_counts is None:
        return None
    ends_T = np.cumsum(batch.kept_counts, dtype=np.int64)
    counts_M = batch.kept_counts[source]
    if not (size := counts_M.max()):
        return None
    at_MK = (ends_T[source] - counts_M)[:, None] + np.arange(size)
    is_kept_MK = np.arange(size) < counts_M[:, None]
    return np.where(is_kept_MK, batch.kept[np.where(is_kept_MK, at_MK, 0)], -1).astype(np.int32)


def _segments(edges: Sequence[int], positions: Array) -> tuple[PackedSegment, ...]:
    """Return the segments between `edges`.

    One ends what continues another if it begins at the same position as the other, or before.
    """
    later: list[int] = []  # where segments start of which each begins before those that follow it
    segments = []
    for start, end in reversed([*itertools.pairwise(edges)]):
        while later and positions[later[-1]] > positions[start]:
            later.pop()
        segments.append(PackedSegment(start, end, later[-1] if later else edges[-1]))
        later.append(start)
    return tuple(reversed(segments))


def _padding(batch: Batch) -> MicroBatch:
    zero, none = np.zeros(1, np.int64), np.zeros(1, np.float32)
    return MicroBatch(
        ids=np.zeros(2, np.int64),
        positions=np.arange(2),
        segments=(PackedSegment(0, 2, 2),),
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
