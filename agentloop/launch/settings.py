"""The settings of commands that run environments, on top of those of a runtime."""

from __future__ import annotations

from collections.abc import Iterable

import pydantic

from agentloop.environments.environment import EnvSettings
from agentloop.environments.mixture import Envs, RunEnvironment, environments_of
from agentloop.environments.program import PROGRAM, AgentProgram, ProgramSettings
from agentloop.environments.rewards.references import require_references
from agentloop.environments.rewards.reward import RewardSettings
from agentloop.environments.tasks.sources import TasksSettings
from agentloop.environments.tasks.task import Task
from agentloop.runtime import Settings
from agentloop.training.run.folder import RunSettings

PAGE = (
    "Serve a web page of the run at serve.host and serve.port, or at a free port if that one is "
    "taken."
)


class AskSettings(Settings):
    """The settings of a runtime and of an environment."""

    env: EnvSettings = pydantic.Field(default_factory=lambda: EnvSettings())
    tasks: TasksSettings = pydantic.Field(default_factory=lambda: TasksSettings())
    reward: RewardSettings = pydantic.Field(default_factory=lambda: RewardSettings())


class EnvironmentRunSettings(AskSettings):
    """The settings of a run in environments, with a folder and a page."""

    agent: AgentProgram = pydantic.Field(default_factory=lambda: ProgramSettings())
    envs: Envs = pydantic.Field(default_factory=list)
    run: RunSettings = pydantic.Field(default_factory=lambda: RunSettings())
    page: bool = pydantic.Field(True, description=PAGE)

    @property
    def environments(self) -> list[RunEnvironment]:
        """The environments of the run. Raises SettingsError if their settings are invalid."""
        return environments_of(self.environment, self.envs, self.tasks, self.budget)

    async def check_references(self, tasks: Iterable[Task]) -> None:
        """Check the answers of the tasks that the reward function scores, as `require_references`.

        An environment of the user's says itself what a rollout is worth.
        """
        scored = {it.name for it in self.environments if it.env.name in ("", PROGRAM)}
        await require_references(self.reward, (task for task in tasks if task.env in scored))

    @property
    def environment(self) -> EnvSettings:
        """The environment of the run, if it has only one, with the agent's program."""
        return self.agent.environment(self.env)
