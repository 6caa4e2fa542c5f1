"""What the learner reads: samples, flat, in a file of safetensors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentloop.errors import SettingsError

__all__ = ["Sample", "write_batch"]


@dataclass(frozen=True, slots=True)
class Sample:
    """A trajectory to learn from. `ids`, `mask` and `logprobs` are equally long.

    Attributes:
        mask: 1 where the policy sampled the id.
        logprobs: the engine's; read where the mask is 1.
        group: the number of its task in the batch.
    """

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    advantage: float
    group: int


def write_batch(path: Path, samples: Sequence[Sample]) -> None:
    """T tokens of N samples: ids, mask, logprobs [T]; lengths, advantages, groups [N].

    The file appears when it is whole. numpy and safetensors are of the extra `train`.

    Raises:
        SettingsError: it cannot be written, such as on a disk that is full.
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
        raise SettingsError(f"run.folder: {path}: {error.strerror or error}") from error
