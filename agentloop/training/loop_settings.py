"""Settings of the training loop and of its stages."""

from __future__ import annotations

import pydantic

from agentloop.agent.rollout import Budget

__all__ = ["LoopSettings", "StageSettings"]


class LoopSettings(pydantic.BaseModel):
    """Settings of the training loop."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    steps: int = pydantic.Field(
        510, ge=0, description="Steps of a run without stages; 0: only evaluate."
    )
    prompts_per_step: int = pydantic.Field(
        512, ge=1, description="Tasks per step, each with a group of rollouts."
    )
    group_size: int = pydantic.Field(
        32, ge=1, description="Rollouts per task; roc.down_sample_to_n of them are trained on."
    )
    max_staleness: int = pydantic.Field(
        0,
        ge=0,
        le=64,
        description="Versions by which a rollout's oldest weights may be behind the weights that "
        "are trained on it. 0: rollouts and learner take turns; 1 or more: they run concurrently.",
    )
    dynamic_sampling: bool = pydantic.Field(
        False,
        description="Replace a group without a learning signal (all of its rewards are equal) by "
        "another one, so that each step trains on prompts_per_step groups (DAPO).",
    )
    early_stop_at: int = pydantic.Field(
        0,
        ge=0,
        description="Stop the remaining rollouts of a group, without a reward, once this many have "
        "ended. This avoids the long tail but is biased against long rollouts. 0: wait for all.",
    )
    max_queue_bytes: int = pydantic.Field(
        8 << 30,
        ge=1,
        description="Bytes of finished groups in the queue at which no further groups are started.",
    )
    learn: bool = pydantic.Field(
        True,
        description="Train. false: only write the trajectories, such as for "
        "`agentloop data filter`.",
    )
    evaluate_every: int = pydantic.Field(
        10, ge=0, description="Steps between evaluations on held-out tasks; 0: never."
    )
    evaluate_tasks: int = pydantic.Field(
        64, ge=1, description="Held-out tasks to evaluate on, with one rollout each."
    )
    checkpoint_every: int = pydantic.Field(
        50, ge=0, description="Steps between checkpoints; 0: only at the end."
    )
    shuffle_rewards: bool = pydantic.Field(
        False,
        description="Control experiment in which nothing should be learned: train each rollout "
        "with the reward of another one of its group. Metrics show the true rewards.",
    )
    seed: int = pydantic.Field(0, ge=0, description="Seed of Resample-on-Correct.")
    step_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="Time limit of one request to the learner."
    )


class StageSettings(pydantic.BaseModel):
    """Settings of one stage of a run, which override those of the run."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    steps: int = pydantic.Field(ge=1, description="Steps of this stage.")
    max_turns: int | None = pydantic.Field(
        None, ge=1, description="Overrides budget.max_turns in this stage."
    )
    max_response_tokens: int | None = pydantic.Field(
        None, ge=1, description="Overrides budget.max_response_tokens in this stage."
    )
    reset_optimizer: bool = pydantic.Field(
        False, description="Reset the optimizer's moments before the stage."
    )
    filter_tasks: int = pydantic.Field(
        0,
        ge=0,
        description="Before the stage, roll out this many tasks, drop those that every rollout "
        "solves and train on the others, epoch after epoch. 0: train on all tasks.",
    )
    filter_rollouts: int = pydantic.Field(
        8, ge=1, description="Rollouts per task when tasks are filtered."
    )

    def budget(self, usual: Budget) -> Budget:
        own = {"max_turns": self.max_turns, "max_response_tokens": self.max_response_tokens}
        return usual.model_copy(update={k: v for k, v in own.items() if v is not None})
