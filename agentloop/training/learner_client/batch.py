"""Training samples and the safetensors file in which a batch of them is passed to the learner."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentloop.errors import RunFolderError

__all__ = ["Sample", "write_batch"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory to train on. `ids`, `mask` and `logprobs` have the same length.

    Attributes:
        mask: 1 for each id that the policy sampled, otherwise 0.
        logprobs: the engine's log-probabilities; used where the mask is 1.
        advantages: one for each sampled id, or a number that is that of all of them.
        group: number of the sample's group in the batch.
        weights: weights in the loss, likewise; the learner divides by their sum.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    advantages: float | list[float]
    group: int
    weights: float | list[float] = 1.0


def write_batch(path: Path, samples: Sequence[Sample]) -> None:
    """Write a batch atomically; needs the extra `train`.

    For N samples of T tokens in total, the tensors are ids, mask, logprobs, advantages and weights
    [T], and lengths and groups [N].

    Raises:
        RunFolderError: the file cannot be written, for example because the disk is full.
    """
    import numpy as np
    from safetensors.numpy import save

    def flat(name: str, dtype: str) -> np.ndarray[Any, Any]:
        return np.concatenate([np.asarray(getattr(sample, name), dtype) for sample in samples])

    def where_sampled(name: str) -> np.ndarray[Any, Any]:
        values = np.zeros(len(mask), "float32")
        values[mask == 1] = np.concatenate(
            [
                np.broadcast_to(np.asarray(getattr(sample, name), "float32"), sum(sample.mask))
                for sample in samples
            ]
        )
        return values

    mask = flat("mask", "uint8")
    tensors = {
        "ids": flat("ids", "int32"),
        "mask": mask,
        "logprobs": flat("logprobs", "float32"),
        "advantages": where_sampled("advantages"),
        "weights": where_sampled("weights"),
        "lengths": np.array([len(s.ids) for s in samples], "int32"),
        "groups": np.array([s.group for s in samples], "int32"),
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(save(tensors))
        os.replace(partial, path)
    except OSError as error:
        raise RunFolderError(f"run.folder: {path}: {error.strerror or error}") from error
