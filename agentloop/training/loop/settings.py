"""Settings of the training loop and of its stages."""

from __future__ import annotations

import pydantic

from agentloop.agent.rollout import Budget


class LoopSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of the training loop."""

    steps: int = pydantic.Field(
        10, ge=0, description="Number of training steps of a run without stages. 0: only evaluate."
    )
    prompts_per_step: int = pydantic.Field(
        8, ge=1, description="Tasks per step, each of which is rolled out as a group."
    )
    group_size: int = pydantic.Field(
        16, ge=1, description="Rollouts per task; roc.down_sample_to_n of them are trained on."
    )
    max_staleness: int = pydantic.Field(
        0,
        ge=0,
        le=64,
        description="Maximum number of policy versions between a sample's oldest token and the "
        "weights that are trained on it. 0: synchronous, rollouts and learner take turns. 1 or "
        "more: asynchronous, they run concurrently.",
    )
    dynamic_sampling: bool = pydantic.Field(
        False,
        description="Replace groups whose rewards are all equal by groups of other tasks, so that "
        "every group of a step has a learning signal, as in DAPO.",
    )
    curriculum: bool = pydantic.Field(
        False,
        description="Draw tasks by their solve rate: tasks that are always or never solved are "
        "drawn rarely. A task that every rollout of three groups in a row has solved is retired, "
        "and only rechecked occasionally.",
    )
    early_stop_at: int = pydantic.Field(
        0,
        ge=0,
        description="Once this many rollouts of a group have ended, stop the others, which get no "
        "reward. This shortens the long tail, but biases training towards short rollouts. 0: wait "
        "for all.",
    )
    learn: bool = pydantic.Field(
        True,
        description="Train. false: only write the trajectories, for instance for `agentloop data "
        "filter`.",
    )
    evaluate_every: int = pydantic.Field(
        10,
        ge=0,
        description="Steps between evaluations on held-out tasks; each stage also ends with one. "
        "0: never.",
    )
    evaluate_tasks: int = pydantic.Field(
        64,
        ge=1,
        description="Number of held-out tasks per evaluation and environment, with one rollout "
        "each.",
    )
    checkpoint_every: int = pydantic.Field(
        50, ge=0, description="Steps between checkpoints. 0: only at the end."
    )
    seed: int = pydantic.Field(
        0,
        ge=0,
        description="Random seed of Resample-on-Correct, shuffled rewards, the curriculum and the "
        "order of filtered tasks.",
    )
    step_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="Time limit of one request to the learner, such as a step."
    )


class StageSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of one stage of a run, which override those of the run."""

    steps: int = pydantic.Field(ge=1, description="Number of training steps of this stage.")
    max_turns: int | None = pydantic.Field(
        None, ge=1, description="Replaces budget.max_turns in this stage."
    )
    max_response_tokens: int | None = pydantic.Field(
        None, ge=1, description="Replaces budget.max_response_tokens in this stage."
    )
    reset_optimizer: bool = pydantic.Field(
        False,
        description="Reset AdamW's moments and the warm-up of the learning rate at the start of "
        "this stage.",
    )
    filter_tasks: int = pydantic.Field(
        0,
        ge=0,
        description="Before this stage, roll out this many tasks eight times each; then train, "
        "for as many epochs as it takes, on those that not every rollout solved. 0: train on all "
        "tasks.",
    )

    def budget(self, usual: Budget) -> Budget:
        overrides = {"max_turns": self.max_turns, "max_response_tokens": self.max_response_tokens}
        return usual.model_copy(update={k: v for k, v in overrides.items() if v is not None})
