"""What the learner can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pydantic

__all__ = ["LearnerSettings", "LossSettings", "OptimizerSettings"]

Aggregate = Literal["group", "batch", "sequence"]


class LossSettings(pydantic.BaseModel):
    """The objective. The formulas stand in `learner/loss.py`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    kind: Literal["grpo", "gspo", "cispo", "sft"] = pydantic.Field(
        "grpo",
        description="grpo: token ratios; gspo: sequence ratios; cispo: clipped weights; sft: the "
        "tokens themselves, whatever they are worth.",
    )
    aggregate: Aggregate | None = pydantic.Field(
        None,
        description="How tokens are weighed: the mean over each group's tokens, over all tokens, "
        "or over each sequence's. Without one: sequence for gspo, batch for sft, else group.",
    )
    clip_low: float = pydantic.Field(
        0.2, ge=0, description="A ratio below 1 - clip_low gains nothing (gspo: try 3e-4)."
    )
    clip_high: float = pydantic.Field(
        0.28, ge=0, description="A ratio above 1 + clip_high gains nothing (gspo: try 4e-4)."
    )
    dual_clip: float | None = pydantic.Field(
        None, gt=1, description="Bound on the ratio where the advantage is negative; often 3."
    )
    ratio_to: Literal["learner", "engine"] = pydantic.Field(
        "learner",
        description="Whose log-probabilities the ratio is taken to, where the batch brings no "
        "old_logprobs: the learner's before the step, or the engine's.",
    )
    tis_cap: float | None = pydantic.Field(
        2.0,
        gt=0,
        description="Bound of the importance weight between engine and learner; none: no weight.",
    )
    kl_coef: float = pydantic.Field(
        0.0, ge=0, description="Weight of the KL to the batch's ref_logprobs."
    )
    entropy_coef: float = pydantic.Field(0.0, ge=0, description="Weight of an entropy bonus.")

    @pydantic.field_validator("clip_low")
    @classmethod
    def _below_one(cls, value: float, info: pydantic.ValidationInfo) -> float:
        if value > 1 and info.data.get("kind") != "cispo":
            raise ValueError("a ratio is never negative: at most 1")
        return value

    @property
    def weighing(self) -> Aggregate:
        usual: dict[str, Aggregate] = {"gspo": "sequence", "sft": "batch"}
        return self.aggregate or usual.get(self.kind, "group")


class OptimizerSettings(pydantic.BaseModel):
    """AdamW."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    lr: float = pydantic.Field(1e-6, ge=0, description="Learning rate after the warm-up.")
    warmup_steps: int = pydantic.Field(
        20, ge=0, description="Steps over which the rate rises linearly."
    )
    betas: tuple[float, float] = pydantic.Field((0.9, 0.999), description="AdamW's decay rates.")
    eps: float = pydantic.Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = pydantic.Field(
        0.0, ge=0, description="AdamW's decay, of matrices alone: not of norms and biases."
    )
    max_grad_norm: float = pydantic.Field(
        1.0, ge=0, description="Gradients with a larger norm are scaled down to it; 0: never."
    )


class LearnerSettings(pydantic.BaseModel):
    """A learner."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    model: Path = pydantic.Field(
        Path(), description="Folder of the model that training starts from."
    )
    init: Literal["pretrained", "random"] = pydantic.Field(
        "pretrained",
        description="random: weights are drawn by the seed; of the folder only the configuration "
        "and the tokenizer are used.",
    )
    zero_stage: Literal[1, 2, 3] = pydantic.Field(
        2, description="What the ranks share out: optimizer; gradients too; weights too."
    )
    dtype: Literal["float32", "bfloat16"] = pydantic.Field(
        "float32", description="What is computed in. The optimizer always keeps float32 weights."
    )
    attention: str = pydantic.Field(
        "packed",
        description="packed: torch's, each sample by itself; else one of transformers', which "
        "takes several samples in one: flash_attention_2, or sdpa (slow, for comparison).",
    )
    activation_checkpointing: bool = pydantic.Field(
        False, description="Recompute activations in the backward pass: less memory, more time."
    )
    micro_batch_tokens: int = pydantic.Field(
        16_384, ge=2, description="Tokens of one forward pass. No sample may be longer."
    )
    head_chunk_tokens: int = pydantic.Field(
        1024, ge=1, description="Tokens whose logits exist at the same time."
    )
    updates_per_batch: int = pydantic.Field(
        1, ge=1, description="Optimizer steps per batch; its groups are dealt out to them."
    )
    temperature: float = pydantic.Field(
        1.0, gt=0, description="What the engine sampled with: log-probabilities are of that."
    )
    publish_dtype: Literal["float32", "bfloat16"] = pydantic.Field(
        "bfloat16", description="Type of published weights."
    )
    max_shard_mib: int = pydantic.Field(
        4096, ge=1, description="Published weights are split into files of about this size."
    )
    bucket_mib: int = pydantic.Field(
        512,
        ge=1,
        description="Weights that go by a process group are sent in buckets of about this size.",
    )
    keep_checkpoints: int = pydantic.Field(
        3, ge=0, description="Older checkpoints in the same folder are removed; 0: never."
    )
    max_skipped_steps: int = pydantic.Field(
        3, ge=1, description="So many steps in a row without finite gradients end the learner."
    )
    collective_timeout_s: float = pydantic.Field(
        300.0, gt=0, description="A rank that keeps the others waiting for this long is lost."
    )
    seed: int = pydantic.Field(
        0, ge=0, description="Of random weights; and for dropout, where the model has any."
    )
    deepspeed: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="More of DeepSpeed's own configuration, merged in last."
    )
    loss: LossSettings = pydantic.Field(default_factory=LossSettings)
    optimizer: OptimizerSettings = pydantic.Field(default_factory=OptimizerSettings)
