"""Training samples and the safetensors file in which a batch of them is passed to the learner."""

from __future__ import annotations

import os
from collections.abc import Iterable
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


def write_batch(path: Path, samples: Iterable[Sample]) -> None:
    """Write a batch atomically, or nothing if there are no samples; needs the extra `train`.

    For N samples of T tokens in total, the tensors are ids, mask, logprobs, advantages and weights
    [T], and lengths and groups [N]. Samples are taken one by one and kept as arrays, which take a
    fraction of the memory of their lists.

    Raises:
        RunFolderError: the file cannot be written, for example because the disk is full.
    """
    import numpy as np
    from safetensors.numpy import save

    rows = [_arrays(sample) for sample in samples]
    if not rows:
        return
    tensors = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.write_bytes(save(tensors))
        os.replace(partial, path)
    except OSError as error:
        raise RunFolderError(f"run.folder: {path}: {error.strerror or error}") from error


def _arrays(sample: Sample) -> dict[str, Any]:
    import numpy as np

    mask = np.asarray(sample.mask, "uint8")

    def where_sampled(values: float | list[float]) -> np.ndarray[Any, Any]:
        array = np.zeros(len(mask), "float32")
        array[mask == 1] = values
        return array

    return {
        "ids": np.asarray(sample.ids, "int32"),
        "mask": mask,
        "logprobs": np.asarray(sample.logprobs, "float32"),
        "advantages": where_sampled(sample.advantages),
        "weights": where_sampled(sample.weights),
        "lengths": np.asarray([len(mask)], "int32"),
        "groups": np.asarray([sample.group], "int32"),
    }
