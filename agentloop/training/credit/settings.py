"""The rules of credit assignment by name, their settings, and what they assign. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import ClassVar, Literal

import pydantic

from agentloop.errors import SettingsError
from agentloop.rollouts.record import TokenCredit
from agentloop.training.credit import distill, grpo, per_turn
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.rule import (
    Aggregate,
    CreditArguments,
    CreditRule,
    RewardedRollout,
    token_weights,
)

RULES: Mapping[str, CreditRule] = {
    "grpo": grpo.GRPO,
    "gspo": grpo.GSPO,
    "cispo": grpo.CISPO,
    "per_turn": per_turn.RULE,
    "distill": distill.RULE,
}


class CreditSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of credit assignment. `credit = "gspo"` is short for `credit.name`."""

    SHORT_FORM: ClassVar = "name"

    name: Literal["grpo", "gspo", "cispo", "per_turn", "distill"] = pydantic.Field(
        "grpo",
        description="How the rewards of a group become advantages of tokens. grpo: the rollout's, "
        "with PPO's clip of token-level ratios; gspo: the same with sequence-level ratios; cispo: "
        "policy gradient with clipped, detached importance weights; per_turn: like grpo, plus "
        "rewards that the environment gives to turns and tokens; distill: on-policy distillation, "
        "each token by the log-probability that a teacher gives it.",
    )
    args: dict[str, object] = pydantic.Field(
        default_factory=dict,
        validate_default=True,
        description="Arguments of the rule, by name. All take aggregate, the unit over which token "
        "losses are averaged first: group, batch or sequence (by default sequence for gspo, "
        "otherwise group), and shuffle_rewards = true, a control experiment in which rollouts, "
        "turns and tokens are trained with the rewards of others of their group. per_turn takes "
        "discount (1.0), by which the reward of a turn counts less for each earlier turn. distill "
        "takes teacher, the URL of an SGLang server with the same tokenizer, timeout_s (300) for "
        "the log-probabilities of a rollout, retries included, and reward_coef (0), the "
        "coefficient with which grpo's advantage is added; it trains on all rollouts of a group.",
    )

    @pydantic.field_validator("args")
    @classmethod
    def _check_arguments(
        cls, args: dict[str, object], info: pydantic.ValidationInfo
    ) -> dict[str, object]:
        rule = RULES.get(info.data.get("name", ""))
        if rule is None:  # the name is invalid, and has its own error
            return args
        try:
            rule.arguments.model_validate(args)
        except pydantic.ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
                for problem in error.errors()
            )
            names = ", ".join(rule.arguments.model_fields)
            raise ValueError(f"{problems} (arguments of {info.data['name']}: {names})") from error
        return args

    @property
    def rule(self) -> CreditRule:
        return RULES[self.name]

    def problems(self, *, temperature: float, clip_low: float) -> Iterator[str]:
        """Yield what is wrong with settings of other sections under this rule.

        Args:
            temperature: sampling.temperature.
            clip_low: learner.loss.clip_low.
        """
        if self.rule.needs_teacher and temperature != 1:
            yield (
                f"sampling.temperature: {temperature:g} must be 1 with credit = {self.name}: the "
                "teacher's log-probabilities are those at temperature 1"
            )
        if clip_low > 1 and self.rule.objective != "cispo":
            yield (
                f"learner.loss.clip_low: {clip_low:g} must be at most 1, since a ratio is never "
                "negative"
            )

    def selection(self, roc: RocSettings, *, has_turn_rewards: bool) -> RocSettings:
        """Return how the rollouts of a group to train on are selected.

        Where there is more to learn from than rewards of rollouts, these may all be equal.
        """
        if self.rule.needs_teacher:
            return RocSettings(down_sample_to_n=0, reject_equal_reward=False)
        if self.rule.uses_turn_rewards and has_turn_rewards:
            return roc.model_copy(update={"reject_equal_reward": False})
        return roc

    @property
    def arguments(self) -> CreditArguments:
        return self.rule.arguments.model_validate(self.args)

    @property
    def aggregate(self) -> Aggregate:
        return self.arguments.aggregate or self.rule.aggregate

    def check_resumed(self, before: CreditSettings) -> None:
        """Check that groups which were finished with the settings `before` can be in our batches.

        Raises:
            SettingsError: their tokens have weights of another scale.
        """
        if self.aggregate != before.aggregate:
            raise SettingsError(
                f"--resume: credit.args.aggregate: the run's finished groups have weights for "
                f"{before.aggregate!r}, not {self.aggregate!r}: keep it, or go back to a "
                "checkpoint with --from, which has them rolled out again"
            )


def assign(
    group: Sequence[RewardedRollout], settings: CreditSettings, random: Random
) -> list[list[TokenCredit]]:
    """Return the credit of each trajectory, by rollout, of the rollouts to train on.

    Args:
        random: used with `shuffle_rewards` only.
    """
    arguments = settings.arguments
    shuffler = random if arguments.shuffle_rewards else None
    advantages = settings.rule.advantages(group, arguments, shuffler)
    weights = token_weights(group, settings.aggregate)
    return [
        [TokenCredit.of(*trajectory) for trajectory in zip(*rollout, strict=True)]
        for rollout in zip(advantages, weights, strict=True)
    ]
