"""The optimizer, and how DeepSpeed shards and steps it."""

from __future__ import annotations

import torch

from agentloop.plain_json import JsonObject
from agentloop.training.learner_client.settings import LearnerSettings

__all__ = ["adamw", "deepspeed_config"]


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
