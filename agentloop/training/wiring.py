"""The only composer of a training run: settings become a plan, and the plan the parts of the run.

    TrainSettings ──checked──> placed on a cluster ──RunPlan.of──> a section for each part
    fine-tuning ──model──> learner, runtime or runtimes on a cluster ──> TrainingLoop

No part of a run gets the settings as a whole. What starts first is closed last.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from agentloop.agent.named_tools import imported_tools
from agentloop.agent.rollout import Budget
from agentloop.agent.threads import in_command_thread
from agentloop.aio import exempt_from_collection
from agentloop.analysis.plots import plot_runs
from agentloop.config import load_settings, to_toml
from agentloop.environments.environment import Environment, set_up
from agentloop.environments.mixture import RunEnvironment, open_mixture
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import TaskSource
from agentloop.errors import RunFolderError
from agentloop.events import Emit
from agentloop.inference.cpu import has_accelerator
from agentloop.inference.sglang.sampling import Sampling
from agentloop.launch.progress import ProgressLine
from agentloop.models import SMALL
from agentloop.observe.exporters.otel import Traces
from agentloop.observe.watchdog import WatchdogSettings, watching
from agentloop.rollouts.player import player_of
from agentloop.rollouts.request import WaitForCapacity
from agentloop.rollouts.runner import GroupRunner
from agentloop.runtime import Runtime, Settings
from agentloop.training.cluster.rollout_host import OpenedRollouts
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.learner_client.client import KeptLearner, spawn_here
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.loop.queue import GroupQueue, TaskCursor
from agentloop.training.loop.settings import LoopSettings, StageSettings
from agentloop.training.loop.steps import Steps
from agentloop.training.loop.training_loop import TrainingLoop
from agentloop.training.plan.checks import check_settings
from agentloop.training.plan.cluster import OnCluster, on_cluster
from agentloop.training.plan.settings import (
    TrainSettings,
    fine_tuning,
    learner_settings,
    lends_memory,
    with_server_options,
)
from agentloop.training.recovery.learner_record import LearnerRecord, record_learner
from agentloop.training.recovery.position import telling_how_to_continue
from agentloop.training.recovery.respawn import tell_run
from agentloop.training.recovery.resume import load_newest
from agentloop.training.recovery.undo import finish_undo, undo
from agentloop.training.rollouts import NUM_TRIES, Rollouts
from agentloop.training.run.collapse import CollapseSettings
from agentloop.training.run.context import RunContext
from agentloop.training.run.control import RunControl
from agentloop.training.run.dashboard import RunDashboard
from agentloop.training.run.folder import RunFolder, config_of
from agentloop.training.run.status import count_of
from agentloop.training.sft.run import model_folder
from agentloop.training.sft.stage import FineTuning, check_teachers
from agentloop.training.teacher_client import open_teacher
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served, Serving

log = logging.getLogger(__name__)


# --- the plan -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RolloutPlan:
    """The part of a run that generates, scores and selects rollouts; sent to nodes of a cluster."""

    environments: Sequence[RunEnvironment]
    sampling: Sampling
    reward: RewardSettings
    roc: RocSettings
    credit: CreditSettings
    seed: int
    enough: int

    @classmethod
    def of(cls, settings: TrainSettings) -> RolloutPlan:
        s = settings
        sampling = s.sampling.with_routing_replay() if s.learner.routing_replay else s.sampling
        return cls(
            s.environments, sampling, s.reward, s.roc, s.credit, s.loop.seed, s.loop.early_stop_at
        )


@dataclass(frozen=True)
class RunPlan:
    """A training run: a section for each of its parts, made once from settings that are checked.

    Attributes:
        runtime: servers, router, sandbox and tools, for the longest rollouts of any stage.
        fine_tuning: the supervised fine-tuning before the rollouts, if there is one.
        lends_memory: whether servers lend their GPUs' memory to the learner for each step.
        num_runtimes: runtimes on nodes of a cluster; 0: one in this process.
    """

    runtime: Settings
    rollouts: RolloutPlan
    learner: LearnerSettings
    ranks: RanksSettings
    loop: LoopSettings
    stages: dict[str, StageSettings]
    budget: Budget
    weights: WeightsSettings
    collapse: CollapseSettings
    watchdog: WatchdogSettings
    fine_tuning: FineTuning | None
    lends_memory: bool
    num_runtimes: int

    @classmethod
    def of(cls, settings: TrainSettings, *, log_dir: Path) -> RunPlan:
        """Return the plan of a run that is placed, with the logs of its servers in `log_dir`."""
        s = settings
        return cls(
            runtime=s.as_one_stage().model_copy(update={"log_dir": log_dir}),
            rollouts=RolloutPlan.of(s),
            learner=learner_settings(s),
            ranks=s.ranks,
            loop=s.loop,
            stages=s.stages,
            budget=s.budget,
            weights=s.weights,
            collapse=s.collapse,
            watchdog=s.watchdog,
            fine_tuning=fine_tuning(s),
            lends_memory=lends_memory(s),
            num_runtimes=s.cluster.runtimes,
        )

    def starting_from(self, model: Path) -> RunPlan:
        """Return the plan with another model to start from."""
        return replace(
            self,
            runtime=self.runtime.model_copy(update={"model": str(model)}),
            learner=self.learner.model_copy(update={"model": model_folder(model)}),
        )


# --- before anything starts -----------------------------------------------------------------------


async def train(
    settings: TrainSettings,
    progress: ProgressLine,
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
    loaded = await in_command_thread(lambda: [environment.load() for environment in environments])
    await in_command_thread(imported_tools, settings.tools)  # before there is a run's folder
    if settings.sft is not None:
        check_teachers(settings.sft.data, environments, loaded)
    open_at = partial(open_tasks, settings, loaded)
    if resume is None:
        tasks = await in_command_thread(open_at)
        await settings.check_references(tasks.listed())
    async with (
        _open_folder(settings, config, resume) as folder,
        GroupQueue.open(folder.path / "queue.sqlite") as queue,
    ):
        if resume is not None:
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
            tasks = await in_command_thread(open_at, await queue.cursor())
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


def open_tasks(
    settings: TrainSettings,
    loaded: Sequence[Environment | None],
    cursor: TaskCursor | None = None,
) -> TaskSource:
    """Open the tasks of a run, at a position. Raises DataError if there are none to train on."""
    position = None if cursor is None else cursor.get("tasks")
    tasks = open_mixture(settings.environments, loaded, position)
    if settings.loop.steps or settings.stages:
        tasks.check_training()
    return tasks


async def _run(
    settings: TrainSettings,
    tasks: TaskSource,
    queue: GroupQueue,
    dashboard: RunDashboard,
    progress: ProgressLine,
) -> None:
    """Place the run, fine-tune its model if it says so, and train, with page and exporters."""
    logs = dashboard.folder.path / "logs"
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
        on_cluster(settings, log_dir=logs, say=progress.say) as cluster,
    ):
        settings = cluster.settings if cluster else with_server_options(settings)
        run = RunPlan.of(settings, log_dir=logs)
        if run.fine_tuning is not None:
            spawn = cluster.spawn_sft_rank if cluster else spawn_here
            run = run.starting_from(
                await run.fine_tuning.make_start_model(dashboard, progress, spawn)
            )
        await _roll_out_and_learn(run, tasks, queue, dashboard, progress, cluster)


# --- rollouts and learner -------------------------------------------------------------------------


async def _roll_out_and_learn(
    run: RunPlan,
    tasks: TaskSource,
    queue: GroupQueue,
    dashboard: RunDashboard,
    progress: ProgressLine,
    cluster: OnCluster | None,
) -> None:
    folder = dashboard.folder
    async with AsyncExitStack() as stack:
        learner = KeptLearner(
            run.learner,
            run.ranks,
            log_dir=folder.path / "logs",
            on_progress=progress,
            spawn=cluster.spawn_rank if cluster else spawn_here,
        )
        # On a GPU, servers measure how much memory is free when they start.
        is_alone = cluster.servers_first if cluster else has_accelerator()
        if not is_alone:
            await stack.enter_async_context(learner.starting())
        (rollouts, wait_for_capacity, serving), describe = await stack.enter_async_context(
            _rolling_out(run, dashboard, progress, cluster)
        )
        if is_alone:
            await stack.enter_async_context(learner)
        stack.push_async_callback(learner.close)  # before the servers, which may share a group
        if folder.checkpoint is not None:
            progress(f"Loading {folder.checkpoint.name}")
        timeout_s = run.loop.step_timeout_s
        restored = await load_newest(learner, folder, timeout_s=timeout_s)
        after = 0 if restored is None else restored.step
        ready = await learner.about()
        await record_learner(queue, LearnerRecord.of(run.learner, run.ranks, ready, after=after))
        watching_servers = watching(run.watchdog, dashboard.stalls, describe)
        watch = await stack.enter_async_context(watching_servers)
        context = RunContext(
            run.loop,
            tasks,
            rollouts,
            wait_for_capacity,
            queue,
            folder,
            progress,
            stages=run.stages,
            budget=run.budget,
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
            max_restarts=run.ranks.max_restarts,
            lending=_lending(run, serving),
        )
        loop = TrainingLoop(context, steps, serving, weights=run.weights, collapse=run.collapse)
        dashboard.loop = loop
        stack.callback(dashboard.detach)
        if cluster:
            await stack.enter_async_context(cluster.leaving_nodes(steps.move))
        exempt_from_collection()
        await loop.run()


def _lending(run: RunPlan, serving: Serving) -> Callable[[], AbstractAsyncContextManager[None]]:
    """Return what has servers lend their memory to the learner for a step, if they share GPUs."""
    if isinstance(serving, Served) and run.lends_memory:
        return partial(serving.lending, timeout_s=run.weights.timeout_s)
    return nullcontext


@asynccontextmanager
async def _rolling_out(
    run: RunPlan, dashboard: RunDashboard, progress: ProgressLine, cluster: OnCluster | None
) -> AsyncIterator[tuple[OpenedRollouts, Callable[[], str]]]:
    """Start a runtime here, or runtimes on nodes; yield them, and what describes their state."""
    if cluster is not None and run.num_runtimes:
        open_rollouts = partial(remote_rollouts, run.rollouts)
        size = run.loop.group_size
        async with cluster.runtimes(run.runtime, open_rollouts, size, progress.say) as runtimes:
            yield (runtimes, runtimes.wait_for_capacity, runtimes), runtimes.describe
        return
    async with AsyncExitStack() as stack:
        settings = run.runtime
        if cluster is not None:
            services = cluster.start_services(settings, say=progress)
            settings = await stack.enter_async_context(services)
        runtime = await stack.enter_async_context(Runtime(settings, progress=progress))
        if cluster is not None:
            await stack.enter_async_context(cluster.kept_alive(runtime))
        dashboard.runtime = runtime
        stack.callback(dashboard.detach)  # also if the learner fails to start
        async with rollouts_of(run.rollouts, runtime, dashboard.emit) as parts:
            yield parts, partial(_servers_in_words, runtime)


def _servers_in_words(runtime: Runtime) -> str:
    return "\n".join(
        f"{view.url}: {view.state}, {count_of(view.num_running, 'request')} running"
        for view in runtime.router.view()
    )


@asynccontextmanager
async def rollouts_of(
    plan: RolloutPlan, runtime: Runtime, emit: Emit, *, num_tries: int = NUM_TRIES
) -> AsyncIterator[tuple[Rollouts, WaitForCapacity, Served]]:
    """Generate, score and select rollouts on a runtime, and serve new weights to its servers.

    Args:
        num_tries: see `Rollouts`.
    """
    # On a node of a cluster, this imports them.
    loaded = await in_command_thread(
        lambda: [environment.load() for environment in plan.environments]
    )
    async with (
        set_up(loaded),
        Grader(plan.reward, pool=runtime.pool) as grader,
        open_teacher(plan.credit, runtime.chat.tokenizer) as teacher,
    ):
        serving = Served(runtime.router)
        player = player_of(
            plan.environments, runtime, sampling=plan.sampling, emit=emit, grader=grader
        )
        rollouts = Rollouts(
            GroupRunner(player, grader, enough=plan.enough, emit=emit),
            plan.roc,
            plan.credit,
            teacher,
            seed=plan.seed,
            is_tainted=serving.is_tainted,
            num_tries=num_tries,
        )
        yield rollouts, runtime.router.gate.wait_for_capacity, serving


@asynccontextmanager
async def remote_rollouts(
    plan: RolloutPlan, settings: Settings
) -> AsyncIterator[tuple[Rollouts, WaitForCapacity, Served]]:
    """Start a runtime on this node of a cluster, with logs in `log_dir` (`OpenRollouts`).

    Of its events, only traces are exported.
    """
    assert settings.log_dir is not None
    run = settings.log_dir.parents[1]
    with _logging_to(settings.log_dir / "runtime.log"):
        async with (
            Runtime(settings, progress=log.info) as runtime,
            Traces.open(
                settings.otel,
                model=Path(settings.model or SMALL).name,
                run=run.name,
                is_scored=True,
                decode=lambda ids: runtime.chat.decode(ids),
            ) as traces,
            # A group that is lost to the infrastructure goes to another runtime.
            rollouts_of(plan, runtime, traces.on_event, num_tries=1) as parts,
        ):
            yield parts


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("agentloop")
    ours.addHandler(handler)
    log.setLevel(logging.INFO)  # of the others, warnings
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()
