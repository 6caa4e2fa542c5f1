"""`agentloop train --dry-run`: what a run would find at its start, need, and where it would run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import anyio
import anyio.to_thread

from agentloop.cli import console
from agentloop.cli.dry_run import Findings, check_start
from agentloop.cli.resource_report import report
from agentloop.environments.environment import Environment
from agentloop.environments.tasks.sources import Task
from agentloop.launch.progress import ProgressLine
from agentloop.training.plan.checks import check_settings, require_machine
from agentloop.training.plan.cluster import plan_on_cluster
from agentloop.training.plan.resources import plan
from agentloop.training.plan.settings import TrainSettings, fine_tuning
from agentloop.training.run.status import count_of
from agentloop.training.sft.stage import check_teachers
from agentloop.training.wiring import open_tasks


async def print_plan(
    settings: TrainSettings, shapes: list[str], *, is_new: bool, as_json: bool = False
) -> int:
    """Print the plan of a run; return the exit status. The model's weights need not exist.

    Args:
        shapes: nodes of a cluster that need not exist; without any, those that do.
        is_new: whether the run is a new one, in a folder of its own.
    """
    findings = Findings()
    await _check(settings, findings, is_new=is_new, on_this_machine=not shapes)
    if shapes and not settings.cluster.address:
        cluster = settings.cluster.model_copy(update={"address": "auto"})
        settings = settings.model_copy(update={"cluster": cluster})
    sft, stages = settings.sft, settings.stages
    changes = sft.learner.config if sft is not None else {}
    one_stage, machine, placed = settings.as_one_stage(), None, None
    if settings.cluster.address:
        placed, problem = await plan_on_cluster(one_stage, shapes)
        findings.add("refused", problem)
        if placed is not None:
            one_stage, machine = placed.settings, placed.machine
    estimate = await anyio.to_thread.run_sync(partial(plan, one_stage, machine, changes=changes))
    if as_json:
        data = {**estimate.to_dict(), **findings.data()}
        data |= {"placement": placed.rows()} if placed else {}
        console.print_json(data)
        return 2 if findings else 0
    status = findings.print()
    if sft is not None:
        sources = [*map(str, sft.data.paths)]
        sources += [f"{sft.data.teacher:,} by the teacher"] if sft.data.teacher else []
        epochs = count_of(sft.loop.epochs, "epoch")
        print(f"sft        {epochs} of dialogues: {', '.join(sources)}")
    for name, stage in stages.items():
        budget, num = stage.budget(settings.budget), stage.filter_tasks
        print(
            f"stage      {name}: {count_of(stage.steps, 'step')}, at most "
            f"{count_of(budget.max_turns, 'turn')} and "
            f"{count_of(budget.max_response_tokens, 'token')} per rollout"
            + (f", on the hard ones of {count_of(num, 'task')}" if num else "")
        )
    print(report(estimate), end="")
    for line in placed.lines() if placed else ():
        print(line)
    return status


async def _check(
    settings: TrainSettings, findings: Findings, *, is_new: bool, on_this_machine: bool
) -> None:
    """Add what a run with these settings would find at its start."""
    s = settings
    with findings.of("refused"):
        check_settings(s)
    if on_this_machine:
        with findings.of("missing"):
            await anyio.to_thread.run_sync(require_machine, s)

    def listed_tasks(loaded: Sequence[Environment | None]) -> Iterable[Task]:
        if s.sft is not None:
            check_teachers(s.sft.data, s.environments, loaded)
        return open_tasks(s, loaded).listed()

    is_open = await check_start(s, findings, listed_tasks, is_new=is_new)
    if s.sft is not None and is_open and is_new:
        with findings.of("missing"):
            s.sft.data.require_files()
            with findings.of("refused"), ProgressLine("Planning", after_s=2) as progress:
                before = fine_tuning(s)
                assert before is not None
                await before.check_dialogues(progress)
