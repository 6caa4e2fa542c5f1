"""Settings of the learner: loss, optimizer, LoRA and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic

Objective = Literal["grpo", "gspo", "cispo", "sft"]
_Decay = Annotated[float, pydantic.Field(ge=0, lt=1)]


class RlLossSettings(pydantic.BaseModel):
    """Settings of the objective for rollouts. `learner/loss.py` has the formulas."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    clip_low: float = pydantic.Field(
        0.2, ge=0, description="Ratios are clipped below at 1 - clip_low; for gspo, try 3e-4."
    )
    clip_high: float = pydantic.Field(
        0.28, ge=0, description="Ratios are clipped above at 1 + clip_high; for gspo, try 4e-4."
    )
    dual_clip: float | None = pydantic.Field(
        None,
        gt=1,
        description="Upper bound of the ratio for negative advantages (dual-clip PPO), often 3. By "
        "default, none.",
    )
    old_logprobs_from: Literal["learner", "engine"] = pydantic.Field(
        "learner",
        description="Log-probabilities in the denominator of the ratio. learner: the learner's "
        "before the step, which takes another forward pass if updates_per_batch is above 1; "
        "engine: those that the servers reported with the tokens.",
    )
    tis_cap: float = pydantic.Field(
        2.0,
        ge=0,
        description="Truncated importance sampling: upper bound of the importance weight between "
        "engine and learner. 0: no importance weight.",
    )
    entropy_coef: float = pydantic.Field(
        0.0, ge=0, description="Coefficient of the entropy bonus. 0: none."
    )
    kl_coef: float = pydantic.Field(
        0.0,
        ge=0,
        description="Coefficient of the KL divergence to the weights that training started from, "
        "as in GRPO: estimated for each token (k3) and added to the loss, where its gradient is "
        "that of KL(reference || policy). 0: none. With LoRA the "
        "reference is the model without its adapters; otherwise it takes memory for a frozen copy.",
    )


class LossSettings(RlLossSettings):
    """Settings of the objective, as passed to the learner's processes."""

    kind: Objective = pydantic.Field(
        "grpo",
        description="Objective. grpo: PPO's clip with token-level ratios; gspo: the same with "
        "sequence-level ratios; cispo: policy gradient with clipped, detached importance weights; "
        "sft: cross-entropy, regardless of advantages.",
    )


class SftOptimizerSettings(pydantic.BaseModel):
    """Settings of AdamW where the loop sets the learning rate of each step."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    betas: tuple[_Decay, _Decay] = pydantic.Field(
        (0.9, 0.999), description="AdamW's betas: decay rates of its moments."
    )
    eps: float = pydantic.Field(1e-8, gt=0, description="AdamW's epsilon.")
    weight_decay: float = pydantic.Field(
        0.0,
        ge=0,
        description="AdamW's weight decay. It is applied to matrices, not to norms and biases.",
    )
    max_grad_norm: float = pydantic.Field(
        1.0,
        ge=0,
        description="Maximum norm of the gradients; larger ones are scaled down. 0: no clipping.",
    )


class OptimizerSettings(SftOptimizerSettings):
    """Settings of AdamW."""

    lr: float = pydantic.Field(
        1e-6, ge=0, lt=1, description="Learning rate; constant after the warm-up."
    )
    warmup_steps: int = pydantic.Field(
        2, ge=0, description="Number of updates in which the learning rate rises linearly from 0."
    )


class LoraSettings(pydantic.BaseModel):
    """Settings of LoRA. Adapters are merged into the weights when weights are published or saved.

    There is no dropout, since log-probabilities must match those of the same weights when they
    sampled.
    """

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    rank: int = pydantic.Field(
        0, ge=0, description="Rank of the LoRA adapters. 0: no LoRA, train all weights."
    )
    alpha: float = pydantic.Field(
        32.0, gt=0, description="The adapters' output is scaled by alpha / rank."
    )
    targets: tuple[str, ...] = pydantic.Field(
        (),
        description="Linear layers that get adapters, by the ends of their names, such as q_proj. "
        "By default, all but the output layer.",
    )


class TrainingSettings(pydantic.BaseModel):
    """Settings of a learner that apply to dialogues and to rollouts."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    zero_stage: Literal[1, 2, 3] = pydantic.Field(
        2,
        description="DeepSpeed's ZeRO stage. 1: shard the optimizer's state; 2: also the "
        "gradients; 3: also the weights.",
    )
    offload: Literal["none", "optimizer", "optimizer+parameters"] = pydantic.Field(
        "none",
        description="What to keep in the host's memory. optimizer: the optimizer's state, whose "
        "step then runs on the CPU; optimizer+parameters: also the weights, which needs "
        "zero_stage = 3.",
    )
    dtype: Literal["float32", "bfloat16"] = pydantic.Field(
        "float32",
        description="Data type of the forward and backward pass. The optimizer always keeps "
        "float32 weights.",
    )
    attention: str = pydantic.Field(
        "packed",
        description="Attention over packed samples. packed: torch's FlashAttention on a "
        "GPU in bfloat16, elsewhere its scaled_dot_product_attention, one sample at a time. "
        "Otherwise an implementation of transformers: flash_attention_2, or sdpa (slow, for "
        "comparison).",
    )
    activation_checkpointing: bool = pydantic.Field(
        False,
        description="Recompute activations in the backward pass, which takes less memory and more "
        "time.",
    )
    micro_batch_tokens: int | None = pydantic.Field(
        None,
        ge=2,
        description="Maximum number of tokens in a forward pass of a rank; gradients are "
        "accumulated over the micro-batches of a batch. Longer samples are left out and counted in "
        "num_too_long. By default 16384; on a GPU, passes then grow to what its memory holds, up "
        "to 65536.",
    )
    head_chunk_tokens: int = pydantic.Field(
        1024,
        ge=1,
        description="Number of tokens whose logits are computed at once. Fewer take less memory.",
    )
    peak_tflops: float = pydantic.Field(
        0.0,
        ge=0,
        description="Peak performance of one device in TFLOP/s, for the metric mfu. 0: looked up "
        "by the device's name, if it is known and dtype is bfloat16.",
    )
    publish_dtype: Literal["float32", "bfloat16"] = pydantic.Field(
        "bfloat16", description="Data type of the weights that the servers get."
    )
    keep_checkpoints: int = pydantic.Field(
        3, ge=0, description="Number of checkpoints to keep, the newest ones. 0: all."
    )
    collective_timeout_s: float = pydantic.Field(
        300.0,
        gt=0,
        description="Timeout of collective operations; a rank that is later than this counts as "
        "lost.",
    )
    seed: int = pydantic.Field(
        0,
        ge=0,
        lt=2**63,
        description="Random seed of random weights, and of dropout if the model has any.",
    )
    deepspeed: dict[str, Any] = pydantic.Field(
        default_factory=dict,
        description="Further DeepSpeed configuration. It takes precedence over what agentloop "
        "sets.",
    )
    lora: LoraSettings = pydantic.Field(default_factory=LoraSettings)

    @property
    def max_sample_tokens(self) -> int:
        """Number of tokens of the longest sample that is trained on."""
        return self.micro_batch_tokens or 16_384

    @pydantic.model_validator(mode="after")
    def _shared_out(self) -> Self:
        if self.offload == "optimizer+parameters" and self.zero_stage != 3:
            raise ValueError(
                f"offload: {self.offload} needs zero_stage = 3 to shard the weights, not "
                f"{self.zero_stage}"
            )
        return self


class RlLearnerSettings(TrainingSettings):
    """Settings of a learner that trains on rollouts; it starts from the servers' model."""

    updates_per_batch: int = pydantic.Field(
        1,
        ge=1,
        description="Optimizer steps per batch, each on its share of the batch's groups (PPO's "
        "mini-batches).",
    )
    routing_replay: bool = pydantic.Field(
        False,
        description="For a mixture of experts: train each token with the experts that the servers "
        "sent it to. Servers of your own need --enable-return-routed-experts.",
    )
    loss: RlLossSettings = pydantic.Field(default_factory=RlLossSettings)
    optimizer: OptimizerSettings = pydantic.Field(default_factory=OptimizerSettings)


class InitSettings(pydantic.BaseModel):
    """Settings of the weights that supervised fine-tuning starts from."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    init: Literal["pretrained", "random"] = pydantic.Field(
        "pretrained",
        description="Initial weights. pretrained: the model's. random: random weights, drawn with "
        "the seed of the learner, or of `sft`; only the folder's configuration and tokenizer are "
        "used.",
    )
    config: dict[str, Any] = pydantic.Field(
        default_factory=dict,
        description="With init = random: values that replace those of the folder's config.json, "
        "such as num_hidden_layers.",
    )
    optimizer: SftOptimizerSettings = pydantic.Field(default_factory=SftOptimizerSettings)

    @pydantic.field_validator("config")
    @classmethod
    def _of_random_weights(
        cls, value: dict[str, Any], info: pydantic.ValidationInfo
    ) -> dict[str, Any]:
        if value and info.data.get("init") != "random":
            raise ValueError("only used with init = random: existing weights have a fixed shape")
        return value


class SftLearnerSettings(TrainingSettings, InitSettings):
    """Settings of a learner that imitates dialogues, with the cross-entropy as its loss."""


class LearnerSettings(RlLearnerSettings, SftLearnerSettings):
    """All settings of the learner's processes, which read them from learner.json."""

    model: Path = pydantic.Field(Path(), description="Folder of the model to start from.")
    chat_template: str | None = pydantic.Field(
        None,
        description="Text of the Jinja chat template to publish with the model instead of the "
        "folder's.",
    )
    temperature: float = pydantic.Field(
        1.0, gt=0, description="The engine's sampling temperature, applied to log-probabilities."
    )
    bucket_mib: int = pydantic.Field(
        512,
        ge=1,
        description="Approximate size of the buckets sent through a process group.",
    )
    max_shard_mib: int = pydantic.Field(
        4096, ge=1, description="Approximate size of the files of published weights."
    )
    close_timeout_s: float = pydantic.Field(
        60.0,
        ge=0,
        description="Time that a learner waits at its end for a checkpoint being written.",
    )
    loss: LossSettings = pydantic.Field(default_factory=LossSettings)

    @classmethod
    def of(
        cls,
        settings: TrainingSettings,
        *,
        model: Path,
        chat_template: str | None,
        temperature: float = 1.0,
        objective: Objective = "grpo",
    ) -> Self:
        """Complete the settings that a user sets with what the model, the engine and the rule of
        credit assignment determine."""
        values = settings.model_dump()
        if isinstance(settings, SftLearnerSettings):
            values["loss"] = {"kind": "sft"}
        else:
            values["loss"]["kind"] = objective
        shared = {"model": model, "chat_template": chat_template, "temperature": temperature}
        return cls.model_validate(values | shared)
