"""What the training loop can be told: the whole of a run, and of each of its stages."""

from __future__ import annotations

import pydantic

from agentloop.agent.rollout import Budget

__all__ = ["LoopSettings", "StageSettings"]


class LoopSettings(pydantic.BaseModel):
    """How long to train, on how much."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    steps: int = pydantic.Field(
        510, ge=0, description="Steps of a run without stages; 0 only evaluates."
    )
    tasks_per_step: int = pydantic.Field(512, ge=1, description="Tasks, a group of rollouts each.")
    group_size: int = pydantic.Field(
        32, ge=1, description="Rollouts of a task; roc.down_sample_to_n of them are learned from."
    )
    max_staleness: int = pydantic.Field(
        0,
        ge=0,
        le=64,
        description="Versions by which a rollout's oldest weights may be behind those that learn "
        "from it. 0: synchronous training; 1 and more: rollouts and learner run at once.",
    )
    dynamic_sampling: bool = pydantic.Field(
        False,
        description="Replace a group that teaches nothing (all of its rewards are equal) by "
        "another one, so that each step learns from tasks_per_step groups (DAPO).",
    )
    enough_of_group: int = pydantic.Field(
        0,
        ge=0,
        description="Once so many rollouts of a group have ended, the others are stopped, and have "
        "no reward: no long tail, and a bias against what takes long. 0: all are waited for.",
    )
    max_queue_bytes: int = pydantic.Field(
        8 << 30,
        ge=1,
        description="Of finished groups that wait for the learner: beyond, none is started.",
    )
    learn: bool = pydantic.Field(
        True,
        description="false: roll out and write the trajectories alone, such as for "
        "`agentloop data filter`.",
    )
    evaluate_every: int = pydantic.Field(
        10, ge=0, description="Steps between two evaluations on held-out tasks; 0: never."
    )
    evaluate_tasks: int = pydantic.Field(
        64, ge=1, description="Held-out tasks that are evaluated, a rollout each."
    )
    checkpoint_every: int = pydantic.Field(
        50, ge=0, description="Steps between two checkpoints; 0: at the end alone."
    )
    shuffle_rewards: bool = pydantic.Field(
        False,
        description="A control, which must not learn anything: what each rollout of a group is "
        "learned with is the reward of another. The metrics tell the true ones.",
    )
    seed: int = pydantic.Field(0, ge=0, description="Of what Resample-on-Correct draws.")
    step_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="For the learner's answer to one request."
    )


class StageSettings(pydantic.BaseModel):
    """A part of a run, with settings of its own; what it leaves out is as in the rest of them."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    steps: int = pydantic.Field(ge=1, description="Steps of this stage.")
    max_turns: int | None = pydantic.Field(
        None, ge=1, description="In place of budget.max_turns, in this stage."
    )
    max_response_tokens: int | None = pydantic.Field(
        None, ge=1, description="In place of budget.max_response_tokens, in this stage."
    )
    reset_optimizer: bool = pydantic.Field(
        False, description="Forget the optimizer's moments before it."
    )
    filter_tasks: int = pydantic.Field(
        0,
        ge=0,
        description="Before it, roll out so many tasks; those that every rollout solves are "
        "dropped, and the stage learns of the others, over and over. 0: it takes all as they come.",
    )
    filter_rollouts: int = pydantic.Field(
        8, ge=1, description="Rollouts of each of the tasks that are filtered."
    )

    def budget(self, usual: Budget) -> Budget:
        own = {"max_turns": self.max_turns, "max_response_tokens": self.max_response_tokens}
        return usual.model_copy(update={k: v for k, v in own.items() if v is not None})
