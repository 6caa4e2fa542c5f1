"""`agentloop train`: train a model on tasks by reinforcement learning.

supervised fine-tuning (optional) ──> stages of rollouts and learning ──> plots
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from pathlib import Path

import anyio

from agentloop.agent.named_tools import imported_tools
from agentloop.aio import exempt_from_collection
from agentloop.analysis.plots import plot_runs
from agentloop.cli import console
from agentloop.cli.cluster import OnCluster, on_cluster, plan_on_cluster
from agentloop.cli.dry_run import Findings, check_start
from agentloop.cli.replay import replay, step_range
from agentloop.cli.resource_plan import plan
from agentloop.cli.resource_report import report
from agentloop.cli.respawn import is_child, run_with_restarts, tell_run
from agentloop.cli.rolling_out import rollouts_of
from agentloop.cli.run_dashboard import RunDashboard
from agentloop.cli.sft import load_run_settings
from agentloop.cli.sft_stage import check_dialogues, check_teachers, make_start_model
from agentloop.cli.train_checks import check_settings, require_machine
from agentloop.cli.train_settings import (
    TrainSettings,
    learner_settings,
    lends_memory,
    with_memory_saver,
)
from agentloop.config import load_settings, to_toml
from agentloop.environments.environment import Environment
from agentloop.environments.mixture import open_mixture
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.sources import Task, TaskSource
from agentloop.errors import RunFolderError, SettingsError
from agentloop.inference.cpu import has_accelerator
from agentloop.models import SMALL
from agentloop.observe.watchdog import watching
from agentloop.plain_json import JsonObject
from agentloop.rollouts.request import WaitForCapacity
from agentloop.runtime import Runtime, Settings
from agentloop.training.learner_client.client import KeptLearner, spawn_here
from agentloop.training.learner_record import LearnerRecord, record_learner
from agentloop.training.loop import TrainingLoop
from agentloop.training.position import (
    Phase,
    Position,
    Stages,
    display_path,
    telling_how_to_continue,
)
from agentloop.training.queue import GroupQueue
from agentloop.training.resume import load_newest
from agentloop.training.rollouts import RollsOut
from agentloop.training.run_context import RunContext
from agentloop.training.run_control import RunControl
from agentloop.training.run_folder import RunFolder, config_of
from agentloop.training.run_status import count_of
from agentloop.training.steps import Steps
from agentloop.training.undo import finish_undo, undo
from agentloop.training.weight_sync.sync import Served, Serving

__all__ = ["TrainSettings", "main", "train"]

_QUESTION = "What is 37 times 48?"


async def train(
    settings: TrainSettings,
    progress: console.ProgressLine,
    *,
    resume: Path | None = None,
    from_step: int | None = None,
) -> Path:
    """Run a training run to its end and return its folder.

    Args:
        resume: The folder of a run to continue.
        from_step: The step whose checkpoint to go back to first, with `resume`.

    Raises:
        AgentLoopError: a failure that the run cannot recover from.
    """
    config = to_toml(settings)  # as given, so that --resume can load it and change something
    settings = check_settings(settings)
    async with Grader(settings.reward) as grader:
        await grader.ready()  # report missing packages before the servers start
    environments = settings.environments
    loaded = await console.in_thread(lambda: [environment.load() for environment in environments])
    await console.in_thread(imported_tools, settings.tools)  # before there is a run's folder
    if settings.sft is not None:
        check_teachers(settings.sft.data, environments, loaded)
    open_tasks = partial(_open_tasks, settings, loaded)
    if resume is None:
        tasks = await console.in_thread(open_tasks)
        await settings.check_references(tasks.listed())
    async with (
        _open_folder(settings, config, resume) as folder,
        GroupQueue.open(folder.path / "queue.sqlite") as queue,
    ):
        if resume is None:
            tell_run(folder.path)
        else:
            if folder.has_rollouts and not await queue.counts():
                raise RunFolderError(
                    f"--resume: {folder.path}: has rollouts or checkpoints, but its journal, "
                    "queue.sqlite, has no groups: restore the file, or start a new run"
                )
            if from_step is None:
                before = load_settings(TrainSettings, [config_of(folder.path)])
                settings.credit.check_resumed(before.credit)
            await anyio.to_thread.run_sync(folder.metrics)  # report damage before the servers start
            await finish_undo(folder, queue)
            tasks = await console.in_thread(open_tasks, (await queue.cursor()).get("tasks"))
            if from_step is not None:
                await undo(folder, queue, from_step)
                if (cursor := (await queue.cursor()).get("tasks")) is not None:
                    tasks.go_to(cursor)
            folder.tell(config)  # only now: rejected settings must leave the run unchanged
            tell_run(folder.path)
        with telling_how_to_continue("train", folder.path, progress.say), folder.noting_failure():
            await _run(settings, tasks, queue, RunDashboard(folder, progress), progress)
    path = folder.path / "plots.png"
    await anyio.to_thread.run_sync(plot_runs, [folder.path], path)
    return folder.path


def _open_folder(
    settings: TrainSettings, config: str, resume: Path | None
) -> AbstractAsyncContextManager[RunFolder]:
    if resume is None:
        return RunFolder.new(settings.run, config)
    # Other nodes have other working directories.
    return RunFolder.open(resume.absolute() if settings.cluster.address else resume)


async def _run(
    settings: TrainSettings,
    tasks: TaskSource,
    queue: GroupQueue,
    dashboard: RunDashboard,
    progress: console.ProgressLine,
) -> None:
    """Run the supervised fine-tuning, if there is one, and the stages, with page and exporters."""
    folder = dashboard.folder
    elsewhere = dashboard.exporters(
        settings.otel,
        model=Path(settings.model or SMALL).name,
        event_log=settings.event_log,
        sinks=settings.sinks,
        config=settings.model_dump(mode="json"),
    )
    async with (
        elsewhere,
        dashboard.serve_page(settings.serve) if settings.page else nullcontext(),
        on_cluster(settings, log_dir=folder.path / "logs", say=progress.say) as cluster,
    ):
        settings = cluster.settings if cluster else with_memory_saver(settings)
        if settings.sft is not None:
            training = settings.sft.within(
                settings.learner, settings.ranks, settings.loop, settings.budget
            )
            spawn = cluster.spawn_sft_rank if cluster else spawn_here
            model = await make_start_model(
                settings, training, settings.environments, dashboard, progress, spawn
            )
            settings = settings.model_copy(update={"model": str(model)})
        await _roll_out_and_learn(settings, tasks, queue, dashboard, progress, cluster)


async def _roll_out_and_learn(
    settings: TrainSettings,
    tasks: TaskSource,
    queue: GroupQueue,
    dashboard: RunDashboard,
    progress: console.ProgressLine,
    cluster: OnCluster | None,
) -> None:
    folder, stalls = dashboard.folder, dashboard.stalls
    logs = folder.path / "logs"
    async with AsyncExitStack() as stack:
        learner = KeptLearner(
            learner_settings(settings),
            settings.ranks,
            log_dir=logs,
            on_progress=progress,
            spawn=cluster.spawn_rank if cluster else spawn_here,
        )
        # On a GPU, servers measure how much memory is free when they start.
        is_alone = cluster.servers_first if cluster else has_accelerator()
        if not is_alone:
            await stack.enter_async_context(learner.starting())
        rollouts, wait_for_capacity, serving, words = await stack.enter_async_context(
            _rolling_out(settings, dashboard, progress, cluster)
        )
        if is_alone:
            await stack.enter_async_context(learner)
        stack.push_async_callback(learner.close)  # before the servers, which may share a group
        if folder.checkpoint is not None:
            progress(f"Loading {folder.checkpoint.name}")
        timeout_s = settings.loop.step_timeout_s
        restored = await load_newest(learner, folder, timeout_s=timeout_s)
        after = 0 if restored is None else restored.step
        ready = await learner.about()
        record = LearnerRecord.of(learner_settings(settings), settings.ranks, ready, after=after)
        await record_learner(queue, record)
        watch = await stack.enter_async_context(watching(settings.watchdog, stalls, words))
        context = RunContext(
            settings.loop,
            tasks,
            rollouts,
            wait_for_capacity,
            queue,
            folder,
            progress,
            stages=settings.stages,
            budget=settings.budget,
            control=RunControl(watch),
            emit=dashboard.emit,
        )
        steps = Steps(
            learner,
            queue,
            folder,
            restored=restored,
            timeout_s=timeout_s,
            say=progress.say,
            max_restarts=settings.ranks.max_restarts,
            lending=_lending(settings, serving),
        )
        loop = TrainingLoop(
            context, steps, serving, weights=settings.weights, collapse=settings.collapse
        )
        dashboard.loop = loop
        stack.callback(dashboard.detach)
        if cluster:
            await stack.enter_async_context(cluster.leaving_nodes(steps.move))
        exempt_from_collection()
        await loop.run()


def _lending(
    settings: TrainSettings, serving: Serving
) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Return what has servers lend their memory to the learner for a step, if they share GPUs."""
    if isinstance(serving, Served) and lends_memory(settings):
        return partial(serving.lending, timeout_s=settings.weights.timeout_s)
    return nullcontext


def _servers_in_words(runtime: Runtime) -> str:
    return "\n".join(
        f"{view.url}: {view.state}, {count_of(view.num_running, 'request')} running"
        for view in runtime.router.view()
    )


@asynccontextmanager
async def _rolling_out(
    settings: TrainSettings,
    dashboard: RunDashboard,
    progress: console.ProgressLine,
    cluster: OnCluster | None,
) -> AsyncIterator[tuple[RollsOut, WaitForCapacity, Serving, Callable[[], str]]]:
    """Start what generates rollouts: runtimes on other machines, or a runtime here.

    Yields:
        What rolls out, what waits until it may, what serves the weights, and a function that
        describes the servers' state.
    """
    s, folder = settings, dashboard.folder
    # Size servers and router for the longest rollouts of any stage.
    served = s.as_one_stage().model_copy(update={"log_dir": folder.path / "logs"})
    if cluster is not None and s.cluster.runtimes:
        async with cluster.runtimes(served, say=progress.say) as runtimes:
            yield runtimes, runtimes.wait_for_capacity, runtimes, runtimes.describe
        return
    async with AsyncExitStack() as stack:
        runs: Settings = served
        if cluster is not None:
            runs = await stack.enter_async_context(cluster.start_services(served, say=progress))
        runtime = await stack.enter_async_context(Runtime(runs, progress=progress))
        if cluster is not None:
            await stack.enter_async_context(cluster.kept_alive(runtime))
        dashboard.runtime = runtime
        stack.callback(dashboard.detach)  # also if the learner fails to start
        async with rollouts_of(s, runtime, dashboard.emit) as (rollouts, wait, serving):
            yield rollouts, wait, serving, partial(_servers_in_words, runtime)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop train",
        description="Train a model by reinforcement learning: groups of rollouts, "
        "Resample-on-Correct, GRPO.",
    )
    console.add_settings_arguments(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="find what the run would lack or be refused for, print how many tokens and how much "
        "memory and disk it would need, and exit",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: print the plan as JSON"
    )
    parser.add_argument(
        "--shape",
        metavar="NODESxCPUS[,GPUS[xGIB]][,GIB]",
        action="append",
        default=[],
        help="with --dry-run: place the processes on a cluster of this shape, such as "
        "8x128,8x80,2048 for 8 nodes of 128 CPUs, 8 GPUs of 80 GiB, and 2,048 GiB of memory; "
        "again for further nodes (default: the cluster at cluster.address)",
    )
    parser.add_argument(
        "--resume",
        metavar="RUN",
        type=Path,
        help="continue the run in this folder with its settings; further arguments override them",
    )
    parser.add_argument(
        "--from",
        dest="from_step",
        metavar="STEP",
        type=int,
        help="with --resume: go back to the checkpoint of this step; later results are set aside",
    )
    parser.add_argument(
        "--replay",
        metavar="RUN",
        type=Path,
        help="repeat the learner's steps of the run in this folder from its journal, compare "
        "losses and weights with those of the run, and exit with status 1 at the first difference",
    )
    parser.add_argument(
        "--step",
        dest="steps",
        metavar="FIRST[-LAST]",
        type=step_range,
        help="with --replay: only these steps, from the checkpoint before them; also compare the "
        "log-probabilities of servers and learner, token by token",
    )
    parser.add_argument(
        "--restarts",
        metavar="N",
        type=int,
        default=3,
        help="restart the process and resume its run when it is killed, up to N times in ten "
        "minutes (default: 3)",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.from_step is not None and options.resume is None:
        parser.error("--from: requires --resume")
    if options.steps is not None and options.replay is None:
        parser.error("--step: requires --replay")
    if options.replay is not None and (options.settings or options.resume or options.dry_run):
        parser.error("--replay: takes no settings, which are the run's, nor --resume or --dry-run")
    for name in ("json", "shape"):
        if getattr(options, name) and not options.dry_run:
            parser.error(f"--{name}: requires --dry-run")
    if options.list_settings:
        print(console.settings_text(TrainSettings))
        return 0
    if options.restarts < 0:
        parser.error(f"argument --restarts: must be at least 0, not {options.restarts}")
    if options.dry_run:
        work = partial(_plan, options.settings, options.resume, options.shape, as_json=options.json)
        return console.run(work)
    if options.replay is not None:
        return console.run(partial(replay, options.replay, options.steps))
    if options.restarts > 0 and not is_child():
        command = [sys.executable, "-m", "agentloop", "train"]
        flags = ["--explain"] if options.explain else []
        overrides = console.split_settings(options.settings)[1]  # may contain a password
        return run_with_restarts(
            [*command, *flags],
            arguments,
            options.restarts,
            _say,
            again=overrides,
            resume=options.resume,
        )
    work = partial(_train, options.settings, options.resume, options.from_step)
    return console.run(work, explain=options.explain)


async def _plan(
    arguments: list[str], resume: Path | None, shapes: list[str], *, as_json: bool = False
) -> int:
    """Print the plan of a run. The model's weights need not exist."""
    settings = load_run_settings(TrainSettings, arguments, resume)
    findings = Findings()
    await _check(settings, findings, is_new=resume is None, on_this_machine=not shapes)
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

    def open_tasks(loaded: Sequence[Environment | None]) -> Iterable[Task]:
        if s.sft is not None:
            check_teachers(s.sft.data, s.environments, loaded)
        return _open_tasks(s, loaded).listed()

    is_open = await check_start(s, findings, open_tasks, is_new=is_new)
    if s.sft is not None and is_open and is_new:
        with findings.of("missing"):
            s.sft.data.require_files()
            with findings.of("refused"), console.ProgressLine("Planning", after_s=2) as progress:
                training = s.sft.within(s.learner, s.ranks, s.loop, s.budget)
                await check_dialogues(s, training.data, s.environments, progress)


def _open_tasks(
    settings: TrainSettings,
    loaded: Sequence[Environment | None],
    cursor: JsonObject | None = None,
) -> TaskSource:
    """Open the tasks. Raises DataError if there are none to train on."""
    tasks = open_mixture(settings.environments, loaded, cursor)
    if settings.loop.steps or settings.stages:
        tasks.check_training()
    return tasks


async def _train(arguments: list[str], resume: Path | None, from_step: int | None) -> int:
    settings = load_run_settings(TrainSettings, arguments, resume)
    check_settings(settings)  # settings first: a missing package takes longer to put right
    if resume is not None and _is_complete(settings, resume, from_step):
        run = display_path(resume)
        print(f"{run} has done all of its steps. More, such as by loop.steps, continue it.")
        return 0
    if settings.sft is not None:
        settings.sft.data.require_files()
    require_machine(settings)
    with console.ProgressLine("Starting to train") as progress:
        folder = await train(settings, progress, resume=resume, from_step=from_step)
        see, question = (
            ("Watch it act", "") if settings.env.name else ("Ask its model", f' "{_QUESTION}"')
        )
        progress.say(f"The run is in {folder}; plots.png shows its metrics. {see}:")
        progress.say(f"  agentloop chat --run {shlex.quote(display_path(folder))}{question}")
    return 0


def _is_complete(settings: TrainSettings, run: Path, from_step: int | None) -> bool:
    """Return whether a run has ended after all of these steps, and is not to go back.

    Raises:
        SettingsError: It has done more, or has no step to go back to yet.
    """
    position = Position.of(run.resolve())
    if from_step is not None:
        if position.phase is Phase.FINE_TUNING:
            raise SettingsError(
                f"--from: {display_path(run)} is in supervised fine-tuning, which is before its "
                f"step 0: omit --from; there is {position}"
            )
        return False
    stages = Stages.of(settings.model_dump(mode="json"))
    return position.is_last_of(stages) and (position.run / "ended").is_file()


def _say(line: str) -> None:
    print(f"agentloop: {line}", file=sys.stderr)
