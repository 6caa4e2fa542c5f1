"""On-policy distillation: the student's own tokens, judged by a teacher's log-probabilities. Pure.

The advantage of a sampled token is the teacher's log-probability of it minus the one with which it
was sampled. Its mean is minus the reverse KL divergence from the teacher, estimated on the
student's samples (on-policy distillation, Thinking Machines, 2025; GKD, arXiv 2306.13649, with
lambda = 1 and the reverse KL). Future tokens do not count: the discount is 0.

`reward_coef` adds that many times GRPO's advantage, to distill and learn from rewards at once. By
default rewards are only a metric.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from urllib.parse import urlsplit

import pydantic

from agentloop.training.credit.grpo import group_advantages
from agentloop.training.credit.rule import Advantages, CreditArguments, CreditRule, RewardedRollout
from agentloop.trajectory import Trajectory


class DistillArguments(CreditArguments):
    """Arguments of on-policy distillation.

    Attributes:
        teacher: URL of the teacher, an SGLang server with the same tokenizer.
        timeout_s: time to get the log-probabilities of a trajectory, retries included.
        reward_coef: coefficient of GRPO's advantage.
    """

    teacher: str
    timeout_s: float = pydantic.Field(300.0, gt=0)
    reward_coef: float = pydantic.Field(0.0, ge=0)

    @pydantic.field_validator("teacher")
    @classmethod
    def _is_a_url(cls, teacher: str) -> str:
        if urlsplit(teacher).scheme not in ("http", "https"):
            raise ValueError(f"{teacher!r} is not of the form http://HOST:PORT")
        return teacher.rstrip("/")


def _advantages(
    group: Sequence[RewardedRollout], arguments: DistillArguments, shuffler: Random | None
) -> Advantages:
    scores = group_advantages([rollout.reward for rollout in group], shuffler)
    return [
        [
            [
                by_teacher - by_student + arguments.reward_coef * score
                for by_teacher, by_student in zip(
                    teacher, _sampled_logprobs(trajectory), strict=True
                )
            ]
            for trajectory, teacher in zip(rollout.trajectories, rollout.teacher, strict=True)
        ]
        for rollout, score in zip(group, scores, strict=True)
    ]


def _sampled_logprobs(trajectory: Trajectory) -> list[float]:
    return [logprob for turn in trajectory for logprob in turn.logprobs]


RULE = CreditRule(_advantages, DistillArguments, needs_teacher=True)
