"""The settings of `agentloop train`."""

from __future__ import annotations

from typing import Annotated

import pydantic

from agentloop.agent.rollout import Budget
from agentloop.inference.cpu import has_accelerator
from agentloop.launch.settings import EnvironmentRunSettings
from agentloop.models import SMALL
from agentloop.observe.exporters.event_log import EventLogSettings
from agentloop.observe.exporters.sinks import SinksSettings
from agentloop.observe.watchdog import WatchdogSettings
from agentloop.training.cluster.settings import ClusterSettings
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings, RlLearnerSettings
from agentloop.training.loop.settings import LoopSettings, StageSettings
from agentloop.training.run.collapse import CollapseSettings
from agentloop.training.sft.run import model_folder
from agentloop.training.sft.stage import FineTuning, SftStageSettings
from agentloop.training.weight_sync.settings import WeightsSettings

MEMORY_SAVER = "--enable-memory-saver"  # of SGLang
_RETURN_EXPERTS = "--enable-return-routed-experts"  # of SGLang

StageName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]


class TrainBudget(Budget):
    """Limits of one rollout, with defaults for which every model has room, the small one too."""

    max_response_tokens: int = pydantic.Field(
        2048, ge=1, description=Budget.model_fields["max_response_tokens"].description
    )


class TrainSettings(EnvironmentRunSettings):
    """All settings of a training run, on top of those of a runtime."""

    budget: TrainBudget = pydantic.Field(default_factory=lambda: TrainBudget())
    sft: SftStageSettings | None = pydantic.Field(
        None, description="Supervised fine-tuning before the rollouts."
    )
    stages: dict[StageName, StageSettings] = pydantic.Field(
        default_factory=dict, description="Stages by name, run in this order."
    )
    roc: RocSettings = pydantic.Field(default_factory=lambda: RocSettings())
    credit: CreditSettings = pydantic.Field(default_factory=lambda: CreditSettings())
    learner: RlLearnerSettings = pydantic.Field(default_factory=lambda: RlLearnerSettings())
    ranks: RanksSettings = pydantic.Field(default_factory=lambda: RanksSettings())
    loop: LoopSettings = pydantic.Field(default_factory=lambda: LoopSettings())
    weights: WeightsSettings = pydantic.Field(default_factory=lambda: WeightsSettings())
    collapse: CollapseSettings = pydantic.Field(default_factory=lambda: CollapseSettings())
    watchdog: WatchdogSettings = pydantic.Field(default_factory=lambda: WatchdogSettings())
    cluster: ClusterSettings = pydantic.Field(default_factory=lambda: ClusterSettings())
    event_log: EventLogSettings = pydantic.Field(default_factory=lambda: EventLogSettings())
    sinks: SinksSettings = pydantic.Field(default_factory=lambda: SinksSettings())

    def as_one_stage(self) -> TrainSettings:
        """Merge all stages into one with the sum of their steps, and the budgets of all stages and
        environments into the largest one."""
        stages = [stage.budget(self.budget) for stage in self.stages.values()] or [self.budget]
        budgets = [
            environment.budget_of(budget) for environment in self.environments for budget in stages
        ]
        largest = {
            name: max(getattr(budget, name) for budget in budgets)
            for name in ("max_turns", "max_response_tokens")
        }
        steps = sum(stage.steps for stage in self.stages.values()) or self.loop.steps
        loop = self.loop.model_copy(update={"steps": steps})
        return self.model_copy(
            update={"stages": {}, "loop": loop, "budget": self.budget.model_copy(update=largest)}
        )


def learner_settings(settings: TrainSettings) -> LearnerSettings:
    """Return the settings of the learner's processes, including those shared with the servers."""
    return LearnerSettings.of(
        settings.learner,
        model=model_folder(settings.model or SMALL),
        chat_template=settings.chat.template,
        temperature=settings.sampling.temperature,
        objective=settings.credit.rule.objective,
    )


def fine_tuning(settings: TrainSettings) -> FineTuning | None:
    """Return the supervised fine-tuning before the rollouts, if there is one."""
    s = settings
    if s.sft is None:
        return None
    training = s.sft.within(s.learner, s.ranks, s.loop, s.budget)
    return FineTuning(training, s.environments, s, s.reward, s.budget)


def serves_on_gpus(settings: TrainSettings) -> bool:
    """Return whether servers run on GPUs."""
    device = settings.server.device
    return device == "cuda" or (device == "auto" and has_accelerator())


def lends_memory(settings: TrainSettings) -> bool:
    """Return whether servers lend their GPUs' memory to the learner in each of its steps.

    They do if they share the GPUs, and take turns with it. Weights by broadcast do not come into
    question: NCCL refuses a group with two members on a GPU.
    """
    s = settings
    shares = (s.cluster.colocated or not s.cluster.address) and serves_on_gpus(s)
    takes_turns = s.loop.learn and s.loop.max_staleness == 0
    is_ours = not s.servers and not s.cluster.runtimes
    return shares and takes_turns and is_ours and s.weights.transport == "disk"


def with_server_options(settings: TrainSettings) -> TrainSettings:
    """Return the settings with SGLang's options for what the learner needs of the servers."""
    needed = [MEMORY_SAVER] * lends_memory(settings)
    needed += [_RETURN_EXPERTS] * settings.learner.routing_replay
    given = settings.server.extra_args
    arguments = (*given, *(option for option in needed if option not in given))
    server = settings.server.model_copy(update={"extra_args": arguments})
    return settings.model_copy(update={"server": server})
