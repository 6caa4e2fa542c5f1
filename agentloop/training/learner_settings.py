"""What the learner can be told."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

__all__ = ["LearnerSettings", "LoraSettings", "LossSettings", "OptimizerSettings"]

Aggregate = Literal["group", "batch", "sequence"]
_Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]


class LossSettings(pydantic.BaseModel):
    """The objective. The formulas stand in `learner/loss.py`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

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
    tis_cap: float = pydantic.Field(
        2.0,
        ge=0,
        description="Bound of the importance weight between engine and learner; 0: no weight.",
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

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    lr: float = pydantic.Field(1e-6, ge=0, lt=1, description="Learning rate after the warm-up.")
    warmup_steps: int = pydantic.Field(
        20, ge=0, description="Steps over which the rate rises linearly."
    )
    betas: tuple[_Decay, _Decay] = pydantic.Field((0.9, 0.999), description="AdamW's decay rates.")
    eps: float = pydantic.Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = pydantic.Field(
        0.0, ge=0, description="AdamW's decay, of matrices alone: not of norms and biases."
    )
    max_grad_norm: float = pydantic.Field(
        1.0, ge=0, description="Gradients with a larger norm are scaled down to it; 0: never."
    )


class LoraSettings(pydantic.BaseModel):
    """LoRA: few weights are trained, and merged into the others where weights leave the learner.

    There is no dropout: the ratio is taken to what the same weights said when they sampled.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rank: int = pydantic.Field(0, ge=0, description="Of the matrices; 0: all weights are trained.")
    alpha: float = pydantic.Field(
        32.0, gt=0, description="What the matrices add is scaled by alpha / rank."
    )
    targets: tuple[str, ...] = pydantic.Field(
        (),
        description="Linear layers that get them, by the ends of their names (q_proj, v_proj); "
        "none: all but the output layer.",
    )


class LearnerSettings(pydantic.BaseModel):
    """A learner."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    model: Path = pydantic.Field(
        Path(), description="Folder of the model that training starts from."
    )
    init: Literal["pretrained", "random"] = pydantic.Field(
        "pretrained",
        description="random: weights are drawn by the seed; of the folder only the configuration "
        "and the tokenizer are used.",
    )
    config: dict[str, Any] = pydantic.Field(
        default_factory=dict,
        description="With init = random: what is other in this model than in the folder's "
        "config.json, such as num_hidden_layers.",
    )
    chat_template: str | None = pydantic.Field(
        None,
        description="The text of a Jinja template that the model is published with, in place of "
        "the folder's.",
    )
    zero_stage: Literal[1, 2, 3] = pydantic.Field(
        2, description="What the ranks share out: optimizer; gradients too; weights too."
    )
    offload: Literal["none", "optimizer", "optimizer+parameters"] = pydantic.Field(
        "none",
        description="What stands in the host's memory, not in the accelerator's: the optimizer's "
        "state and step; the weights too, which needs zero_stage = 3.",
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
        16_384,
        ge=2,
        description="Tokens of one forward pass of a rank. A batch is as many as it takes: their "
        "gradients add up (gradient accumulation) until the step. A longer sample is left out, and "
        "counted.",
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
    peak_tflops: float = pydantic.Field(
        0.0,
        ge=0,
        description="What a device can do at most, in 10^12 operations a second, for the metric "
        "mfu; 0: by its name, where that is known and dtype is bfloat16.",
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
    close_timeout_s: float = pydantic.Field(
        60.0,
        ge=0,
        description="A learner that is told to end waits so long for a checkpoint that is still "
        "being written.",
    )
    seed: int = pydantic.Field(
        0,
        ge=0,
        lt=2**63,
        description="Of random weights; and for dropout, where the model has any.",
    )
    deepspeed: dict[str, Any] = pydantic.Field(
        default_factory=dict, description="More of DeepSpeed's own configuration, merged in last."
    )
    lora: LoraSettings = pydantic.Field(default_factory=LoraSettings)
    loss: LossSettings = pydantic.Field(default_factory=LossSettings)
    optimizer: OptimizerSettings = pydantic.Field(default_factory=OptimizerSettings)

    @pydantic.field_validator("config")
    @classmethod
    def _of_random_weights(
        cls, value: dict[str, Any], info: pydantic.ValidationInfo
    ) -> dict[str, Any]:
        if value and info.data.get("init") != "random":
            raise ValueError("weights that are there have the form that they have: init = random")
        return value

    @pydantic.model_validator(mode="after")
    def _shared_out(self) -> Self:
        if self.offload == "optimizer+parameters" and self.zero_stage != 3:
            raise ValueError(
                f"offload: {self.offload} needs zero_stage = 3, which shares the weights out; it "
                f"is {self.zero_stage}"
            )
        return self
