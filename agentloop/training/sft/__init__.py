"""Supervised fine-tuning on dialogues, which become trajectories with the ids of rollouts."""

from __future__ import annotations

from agentloop.training.sft.fine_tuning import (
    Dialogue,
    DialogueSource,
    DialoguesSettings,
    EpochsSettings,
    FineTuningPlan,
    SupervisedSettings,
    fine_tune,
    read_dialogues,
    read_samples,
    trajectories_of,
)

__all__ = [
    "Dialogue",
    "DialogueSource",
    "DialoguesSettings",
    "EpochsSettings",
    "FineTuningPlan",
    "SupervisedSettings",
    "fine_tune",
    "read_dialogues",
    "read_samples",
    "trajectories_of",
]
