"""Training samples and the safetensors file in which a batch of them is passed to the learner."""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentloop.errors import RunFolderError
from agentloop.token_records import KeptIds, RoutedExperts
from agentloop.trajectory import Trajectory

_DTYPES = {"int32": "I32", "uint8": "U8", "float32": "F32"}


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory to train on. `ids`, `mask` and `logprobs` have the same length.

    Attributes:
        mask: 1 for each id that the policy sampled, otherwise 0.
        logprobs: the engine's log-probabilities; used where the mask is 1.
        advantages: one for each sampled id, or a number that is that of all of them.
        group: number of the sample's group in the batch.
        weights: weights in the loss, likewise; the learner divides by their sum.
        kept: the kept ids of each id, if the distribution was truncated.
        experts: the experts of ids, if they were recorded.
    """

    ids: Sequence[int]
    mask: Sequence[int]
    logprobs: Sequence[float]
    advantages: float | list[float]
    group: int
    weights: float | list[float] = 1.0
    kept: KeptIds | None = None
    experts: Sequence[RoutedExperts] = ()

    @classmethod
    def of(
        cls,
        trajectory: Trajectory,
        advantages: float | list[float] = 0.0,
        group: int = 0,
        weights: float | list[float] = 1.0,
    ) -> Sample:
        """Return a trajectory as a sample, in arrays: lists take ten times the memory."""
        return cls(
            array("i", trajectory.ids),
            array("B", trajectory.mask),
            array("f", trajectory.logprobs),
            advantages,
            group,
            weights,
            trajectory.kept,
            trajectory.experts,
        )


def write_batch(path: Path, samples: Sequence[Sample]) -> None:
    """Write a batch atomically; needs the extra `train`.

    For N samples of T tokens in total, the tensors are ids, mask, logprobs, advantages and weights
    [T], and lengths and groups [N]; with kept ids, also kept_counts [T] and kept [their sum], and
    with experts expert_counts and experts. They are written sample by sample, since a batch may be
    larger than what is free of this process's memory. Format: https://huggingface.co/docs/safetensors

    Raises:
        RunFolderError: the file cannot be written, for example because the disk is full.
    """
    import numpy as np

    def where_sampled(sample: Sample, values: float | list[float]) -> np.ndarray:
        mask = np.asarray(sample.mask, "uint8")
        all_values = np.zeros(len(mask), "float32")
        all_values[mask == 1] = values
        return all_values

    def per_sample(values: Iterable[int]) -> Iterator[np.ndarray]:
        yield np.array([*values], "int32")

    num_tokens = sum(len(sample.ids) for sample in samples)
    tensors: dict[str, tuple[str, int, Iterable[np.ndarray]]] = {
        "ids": ("int32", num_tokens, (np.asarray(s.ids, "int32") for s in samples)),
        "mask": ("uint8", num_tokens, (np.asarray(s.mask, "uint8") for s in samples)),
        "logprobs": ("float32", num_tokens, (np.asarray(s.logprobs, "float32") for s in samples)),
        "advantages": ("float32", num_tokens, (where_sampled(s, s.advantages) for s in samples)),
        "weights": ("float32", num_tokens, (where_sampled(s, s.weights) for s in samples)),
        "lengths": ("int32", len(samples), per_sample(len(s.ids) for s in samples)),
        "groups": ("int32", len(samples), per_sample(s.group for s in samples)),
    }
    if any(sample.kept for sample in samples):
        num_kept = sum(len(sample.kept.ids) for sample in samples if sample.kept)
        no_ids = np.zeros(0, "int32")
        counts = (
            np.asarray(s.kept.counts, "int32") if s.kept else np.zeros(len(s.ids), "int32")
            for s in samples
        )
        kept = (np.asarray(s.kept.ids, "int32") if s.kept else no_ids for s in samples)
        tensors |= {"kept_counts": ("int32", num_tokens, counts), "kept": ("int32", num_kept, kept)}
    if spans := [span for sample in samples for span in sample.experts]:

        def experts_of(sample: Sample) -> np.ndarray:
            counts = np.zeros(len(sample.ids), "int32")
            for span in sample.experts:
                counts[span.start : span.end] = span.width
            return counts

        num_experts = sum(len(span.ids) for span in spans)
        experts = (np.frombuffer(span.ids, "uint8") for span in spans)
        tensors["expert_counts"] = ("int32", num_tokens, map(experts_of, samples))
        tensors["experts"] = ("uint8", num_experts, experts)
    header, end = {}, 0
    for name, (dtype, size, _) in tensors.items():
        begin, end = end, end + size * np.dtype(dtype).itemsize
        header[name] = {"dtype": _DTYPES[dtype], "shape": [size], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for _, _, arrays in tensors.values():
                for values in arrays:
                    file.write(values.data)
        os.replace(partial, path)
    except OSError as error:
        raise RunFolderError(f"run.folder: {path}: {error.strerror or error}") from error
