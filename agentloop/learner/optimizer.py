"""The optimizer, and how DeepSpeed shards and steps it."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.utils import get_total_norm

from agentloop.plain_json import JsonObject
from agentloop.training.learner_client.settings import LearnerSettings


def adamw(scorer: torch.nn.Module, settings: LearnerSettings) -> torch.optim.AdamW:
    """Return AdamW over what is trained; norms and biases do not decay."""
    o = settings.optimizer
    trained = [p for p in scorer.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim > 1]
    vectors = [p for p in trained if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": o.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # A fused step passes over the parameters once, not once per operation.
    fused = settings.offload != "none" or torch.cuda.is_available()
    return torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps, fused=fused or None)


def deepspeed_config(settings: LearnerSettings) -> JsonObject:
    """Return DeepSpeed's configuration, with the user's on top."""
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": 1,
        # The number of backward passes per step varies.
        "managed_gradient_accumulation": False,
        "gradient_clipping": settings.optimizer.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage, **_offloads(settings)},
        "zero_force_ds_cpu_optimizer": False,  # it would be compiled
        "timers": {"throughput": {"enabled": False}},  # it would wait for the GPU before each pass
    }
    if settings.dtype == "bfloat16":
        # ZeRO 1 adds each gradient to its float32 sum as soon as it is computed, and drops it.
        config["bf16"] = {
            "enabled": True, "check_grad_overflow": True, "immediate_grad_update": True,
        }  # fmt: skip
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merge(config, settings.deepspeed)


def batch_operations(optimizer: Any) -> None:
    """Let DeepSpeed's optimizer of ZeRO 1 in bfloat16 measure and clip gradients in few operations.

    It keeps their sums end to end in float32, but converts, adds, measures and clips that of each
    parameter by itself: on a GPU hundreds of launches. Sums, and so the weights of a step that
    clips nothing, stay the same bit by bit; the norm may differ in its last bits.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if not isinstance(optimizer, BF16_Optimizer):
        return
    sums, flat = optimizer.fp32_groups_gradients, optimizer.fp32_groups_actual_gradients_flat
    every = [each for group in sums for each in group]

    def take(parameter: Any, group: int, index: int) -> None:
        if parameter.grad is not None:
            sums[group][index].add_(parameter.grad.reshape(-1))  # converts without a copy
            parameter.grad = None

    def gradients(for_clipping: bool = False) -> Any:
        # The norm of all is that of their norms; of one long buffer it would be inexact on a CPU.
        return flat if for_clipping else ([get_total_norm(every, foreach=True)], {})

    optimizer.accumulate_hp_grads_and_remove_lp = take
    optimizer.get_grads_for_norm = gradients


def _offloads(settings: LearnerSettings) -> dict[str, object]:
    host = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    names = {"optimizer": "offload_optimizer", "parameters": "offload_param"}
    return {name: host for part, name in names.items() if part in settings.offload.split("+")}


def _merge(config: dict[str, object], more: dict[str, object]) -> dict[str, object]:
    merged = dict(config)
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(old := merged.get(key), dict):
            value = _merge(old, value)
        merged[key] = value
    return merged
