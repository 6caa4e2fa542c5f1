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
        group: number of the sample's group in the batch.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    advantage: float
    group: int


def write_batch(path: Path, samples: Sequence[Sample]) -> None:
    """Write a batch atomically; needs the extra `train`.

    For N samples of T tokens in total, the tensors are ids, mask and logprobs [T], and lengths,
    advantages and groups [N].

    Raises:
        RunFolderError: the file cannot be written, for example because the disk is full.
    """
    import numpy as np
    from safetensors.numpy import save

    def flat(name: str, dtype: str) -> np.ndarray[Any, Any]:
        return np.concatenate([np.asarray(getattr(sample, name), dtype) for sample in samples])

    tensors = {
        "ids": flat("ids", "int32"),
        "mask": flat("mask", "uint8"),
        "logprobs": flat("logprobs", "float32"),
        "lengths": np.array([len(s.ids) for s in samples], "int32"),
        "advantages": np.array([s.advantage for s in samples], "float32"),
        "groups": np.array([s.group for s in samples], "int32"),
    }
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(save(tensors))
        os.replace(partial, path)
    except OSError as error:
        raise RunFolderError(f"run.folder: {path}: {error.strerror or error}") from error
