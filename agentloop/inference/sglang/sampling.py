"""Sampling parameters, as users set them and as SGLang takes them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import pydantic


class Sampling(pydantic.BaseModel):
    """Sampling parameters. The defaults sample from the policy unchanged, as in training."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    temperature: float = pydantic.Field(
        1.0, ge=0, le=100, description="Sampling temperature. 0: greedy."
    )
    top_p: float = pydantic.Field(
        1.0,
        gt=0,
        le=1,
        description="Nucleus sampling: sample from the most likely tokens that have this "
        "probability together.",
    )
    # A number beyond 32 bits would crash the server.
    top_k: int = pydantic.Field(
        -1,
        ge=-1,
        le=1 << 30,
        description="Number of most likely tokens to sample from. -1 or 0: all.",
    )
    min_p: float = pydantic.Field(
        0.0,
        ge=0,
        le=1,
        description="Minimum probability of a token, relative to that of the most likely one.",
    )
    seed: int | None = pydantic.Field(
        None,
        ge=0,
        lt=1 << 63,
        description="Random seed. SGLang only uses it with deterministic inference.",
    )

    _replays_routing: bool = pydantic.PrivateAttr(False)
    _is_for_training: bool = pydantic.PrivateAttr(False)

    @property
    def truncates(self) -> bool:
        """True if top-p, top-k or min-p is set."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0

    @property
    def records_kept_ids(self) -> bool:
        """True if servers are to report the kept ids."""
        return self._is_for_training and self.truncates

    @property
    def records_experts(self) -> bool:
        """True if servers are to report the experts of each token."""
        return self._is_for_training and self._replays_routing

    def for_training(self) -> Sampling:
        """Return them for rollouts to train on."""
        copied = self.model_copy()
        copied._is_for_training = True
        return copied

    def with_routing_replay(self) -> Sampling:
        """Return them for a learner that replays the experts of rollouts to train on."""
        copied = self.model_copy()
        copied._replays_routing = True
        return copied

    def of_group(self, name: str) -> Sampling:
        """Return the parameters for a group, with a seed derived from its name if there is one.

        Otherwise a repeated task would get identical rollouts.
        """
        if self.seed is None:
            return self
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return self.model_copy(update={"seed": int.from_bytes(digest[:8]) >> 1})

    def of_sibling(self, index: int) -> Sampling:
        """Return the parameters for the `index`-th sibling, with a seed of its own if there is one.

        Otherwise all siblings would be identical.
        """
        if self.seed is None or not index:
            return self
        return self.model_copy(update={"seed": (self.seed + index) % (1 << 63)})

    def to_sglang(self, *, max_new_tokens: int, stop_ids: Sequence[int]) -> dict[str, object]:
        params: dict[str, object] = {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,  # SGLang refuses 0
            "min_p": self.min_p,
            "stop_token_ids": list(stop_ids),
            "skip_special_tokens": False,
        }
        if not stop_ids:
            params["ignore_eos"] = True  # otherwise the model's own end token would still apply
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params
