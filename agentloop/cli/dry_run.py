"""`--dry-run`: find what a run would find at its start, and say it before the plan.

    settings, packages, files ──> every source of data, MCP servers ──> a rollout of the teacher

Each check is the run's own, so that both find the same. Not covered: what only its servers and its
learner find, which are not started.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import anyio.to_thread

from agentloop.agent.mcp import mcp_servers
from agentloop.agent.named_tools import imported_tools
from agentloop.agent.threads import in_command_thread
from agentloop.environments.environment import Environment
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task
from agentloop.errors import AgentLoopError
from agentloop.launch.settings import EnvironmentRunSettings
from agentloop.sandbox import SandboxError
from agentloop.training.run.folder import require_new


class Findings:
    """Reasons for which a run would be refused, and parts that it would lack here."""

    def __init__(self) -> None:
        self._reasons: dict[str, list[str]] = {"refused": [], "missing": []}

    def __bool__(self) -> bool:
        return any(self._reasons.values())

    def add(self, kind: str, reason: str) -> None:
        """Add a reason of a kind, `refused` or `missing`, unless it is known."""
        if reason and not any(reason in known for known in self._reasons.values()):
            self._reasons[kind].append(reason)

    @contextmanager
    def of(self, kind: str) -> Iterator[None]:
        """Add the error with which the block ends, if it is one of a user's."""
        try:
            yield
        except (AgentLoopError, SandboxError) as error:
            self.add(kind, str(error))

    def data(self) -> dict[str, str | None]:
        """Return the reasons of each kind as one text; None: there are none."""
        return {kind: "; ".join(reasons) or None for kind, reasons in self._reasons.items()}

    def print(self) -> int:
        """Print the reasons, a line for each; return the exit status of the dry run."""
        for kind, reasons in self._reasons.items():
            for reason in reasons:
                print(f"{kind:<10} {reason}")
        return 2 if self else 0


async def check_start(
    settings: EnvironmentRunSettings,
    findings: Findings,
    open_tasks: Callable[[Sequence[Environment | None]], Iterable[Task]],
    *,
    is_new: bool,
) -> bool:
    """Add what a run with these settings would find in its folder, tools, tasks and rewards.

    MCP servers are started, and ended. Returns whether the tasks were opened.

    Args:
        open_tasks: opens the tasks of the environments, from files and hubs, and returns those
            that can be listed; called if no file is missing.
        is_new: whether the run is a new one, in a folder of its own.
    """
    s = settings
    if s.run.name and is_new:
        with findings.of("refused"):
            await anyio.to_thread.run_sync(require_new, s.run.folder / s.run.name)
    files = [path for environment in s.environments for path in environment.tasks.paths]
    lacking = [path for path in files if not path.exists()]
    for path in lacking:
        findings.add("missing", f"{path}: No such file")
    with findings.of("missing"):
        async with Grader(s.reward) as grader:
            await grader.ready()
    is_open = False
    with findings.of("refused"):
        loaded = await in_command_thread(
            lambda: [environment.load() for environment in s.environments]
        )
        await in_command_thread(imported_tools, s.tools)
        if not lacking:
            tasks = await in_command_thread(open_tasks, loaded)
            is_open = True
            await s.check_references(tasks)
    with findings.of("missing"):
        async with mcp_servers(s.mcp):
            pass
    return is_open
