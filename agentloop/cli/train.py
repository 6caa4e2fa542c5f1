"""`agentloop train`: train a model on tasks by reinforcement learning.

supervised fine-tuning (optional) ──> stages of rollouts and learning ──> plots
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import anyio
import pydantic

from agentloop.analysis.plots import plot_runs
from agentloop.cli import console
from agentloop.cli.resource_plan import plan
from agentloop.cli.resource_report import report
from agentloop.cli.respawn import is_child, revived, tell_run
from agentloop.cli.run_dashboard import RunDashboard
from agentloop.cli.sft import (
    SftStageSettings,
    how_to_go_on,
    imitate,
    model_folder,
    require_learner,
    samples_of,
    shown,
    told,
)
from agentloop.config import to_toml
from agentloop.distribution import is_installed
from agentloop.environments.environment import EnvSettings
from agentloop.environments.mixture import (
    Envs,
    RunEnvironment,
    environments_of,
    mixed_runner,
    open_mixture,
)
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import TaskSource, TasksSettings
from agentloop.errors import DataError, RunFolderError, SettingsError
from agentloop.inference.processes.server_log import NOT_INSTALLED
from agentloop.inference.processes.supervise import require_device
from agentloop.inference.sglang.sampling import Sampling
from agentloop.models import SMALL
from agentloop.observe.exporters.event_log import EventLogSettings
from agentloop.observe.exporters.sinks import SinksSettings
from agentloop.observe.watchdog import WatchdogSettings, watching
from agentloop.runtime import Runtime, Settings
from agentloop.training.collapse import CollapseSettings
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.fleet.coordinator import Fleet
from agentloop.training.fleet.messages import Recipe
from agentloop.training.fleet.settings import FleetSettings
from agentloop.training.learner_client.client import KeptLearner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import LearnerSettings, RlLearnerSettings
from agentloop.training.loop import TrainingLoop
from agentloop.training.loop_settings import LoopSettings, StageSettings
from agentloop.training.queue import GroupQueue
from agentloop.training.resume import load_newest
from agentloop.training.rollouts import Rollouts, RollsOut
from agentloop.training.run_folder import RunFolder, RunSettings
from agentloop.training.sft import FineTuning
from agentloop.training.teacher_client import open_teacher
from agentloop.training.undo import finish_undo, undo
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served, Serving

__all__ = ["TrainSettings", "main", "train"]

StageName = Annotated[str, pydantic.StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_MIN_TEMPERATURE = 1e-5  # SGLang samples greedily below it


class TrainSettings(Settings):
    """All settings of a training run, on top of those of a runtime."""

    sft: SftStageSettings | None = pydantic.Field(
        None, description="Supervised fine-tuning before the rollouts."
    )
    stages: dict[StageName, StageSettings] = pydantic.Field(
        default_factory=dict, description="Stages by name, run in this order."
    )
    env: EnvSettings = pydantic.Field(default_factory=lambda: EnvSettings())
    envs: Envs = pydantic.Field(default_factory=list)
    tasks: TasksSettings = pydantic.Field(default_factory=lambda: TasksSettings())
    reward: RewardSettings = pydantic.Field(default_factory=lambda: RewardSettings())
    roc: RocSettings = pydantic.Field(default_factory=lambda: RocSettings())
    credit: CreditSettings = pydantic.Field(default_factory=lambda: CreditSettings())
    learner: RlLearnerSettings = pydantic.Field(default_factory=lambda: RlLearnerSettings())
    ranks: RanksSettings = pydantic.Field(default_factory=lambda: RanksSettings())
    loop: LoopSettings = pydantic.Field(default_factory=lambda: LoopSettings())
    weights: WeightsSettings = pydantic.Field(default_factory=lambda: WeightsSettings())
    collapse: CollapseSettings = pydantic.Field(default_factory=lambda: CollapseSettings())
    watchdog: WatchdogSettings = pydantic.Field(default_factory=lambda: WatchdogSettings())
    fleet: FleetSettings = pydantic.Field(default_factory=lambda: FleetSettings())
    run: RunSettings = pydantic.Field(default_factory=lambda: RunSettings())
    event_log: EventLogSettings = pydantic.Field(default_factory=lambda: EventLogSettings())
    sinks: SinksSettings = pydantic.Field(default_factory=lambda: SinksSettings())
    page: bool = pydantic.Field(
        True,
        description="Serve a web page of the run at serve.host and serve.port, or at a free port "
        "if that one is taken.",
    )

    @property
    def environments(self) -> list[RunEnvironment]:
        """The environments of the run. Raises SettingsError if their settings are invalid."""
        return environments_of(self.env, self.envs, self.tasks, self.budget)

    def as_one_stage(self) -> TrainSettings:
        """Merge all stages into one with the sum of their steps, and the budgets of all stages and
        environments into the largest one."""
        stages = [stage.budget(self.budget) for stage in self.stages.values()] or [self.budget]
        budgets = [one.budget_of(budget) for one in self.environments for budget in stages]
        most = {
            name: max(getattr(budget, name) for budget in budgets)
            for name in ("max_turns", "max_response_tokens")
        }
        steps = sum(stage.steps for stage in self.stages.values()) or self.loop.steps
        loop = self.loop.model_copy(update={"steps": steps})
        return self.model_copy(
            update={"stages": {}, "loop": loop, "budget": self.budget.model_copy(update=most)}
        )


async def train(
    settings: TrainSettings,
    progress: console.ProgressLine,
    *,
    resume: Path | None = None,
    from_step: int | None = None,
) -> Path:
    """Run a training run to its end and return its folder.

    Args:
        resume: folder of a run to continue.
        from_step: with `resume`, go back to the checkpoint of this step first.

    Raises:
        AgentLoopError: a failure that the run cannot recover from.
    """
    config = to_toml(settings)  # as given, so that --resume can load it and change something
    settings = _whole(settings)
    async with Grader(settings.reward) as grader:
        await grader.ready()  # report missing packages before the servers start
    environments = settings.environments
    opened = partial(open_mixture, environments, [one.load() for one in environments])
    if resume is None:
        tasks = await anyio.to_thread.run_sync(opened, abandon_on_cancel=True)
    async with (
        RunFolder.open(resume) if resume else RunFolder.new(settings.run, config) as folder,
        GroupQueue.open(folder.path / "queue.sqlite") as queue,
    ):
        if resume is not None:
            if folder.has_rollouts and not await queue.counts():
                raise RunFolderError(
                    f"--resume: {folder.path}: there are rollouts or checkpoints, and no group in "
                    "queue.sqlite, the run's journal: restore the file, or start a new run"
                )
            await anyio.to_thread.run_sync(folder.metrics)  # report damage before the servers start
            await finish_undo(folder, queue)
            cursor = (await queue.noted("cursor") or {}).get("tasks")
            tasks = await anyio.to_thread.run_sync(opened, cursor, abandon_on_cancel=True)
            if from_step is not None:
                await undo(folder, queue, from_step)
                if (cursor := (await queue.noted("cursor") or {}).get("tasks")) is not None:
                    tasks.go_to(cursor)
            folder.tell(config)  # only now: rejected settings must leave the run unchanged
        tell_run(folder.path)
        with folder.noting_failure():
            await _run(settings, tasks, queue, RunDashboard(folder, progress), progress)
    path = folder.path / "plots.png"
    await anyio.to_thread.run_sync(plot_runs, [folder.path], path)
    return folder.path


async def _run(
    settings: TrainSettings,
    tasks: TaskSource,
    queue: GroupQueue,
    scene: RunDashboard,
    progress: console.ProgressLine,
) -> None:
    """Run the supervised fine-tuning, if there is one, and the stages, with page and exporters."""
    folder = scene.folder
    elsewhere = scene.exporters(
        settings.otel,
        model=Path(settings.model or SMALL).name,
        event_log=settings.event_log,
        sinks=settings.sinks,
        config=settings.model_dump(mode="json"),
    )
    try:
        async with elsewhere, scene.serve_page(settings.serve) if settings.page else nullcontext():
            if settings.sft is not None:
                model = await _start(settings, settings.sft, scene, progress)
                settings = settings.model_copy(update={"model": str(model)})
            await _roll_out_and_learn(settings, tasks, queue, scene, progress)
    except anyio.get_cancelled_exc_class():
        progress.say(how_to_go_on("train", folder.path))
        raise


async def _start(
    settings: TrainSettings,
    sft: SftStageSettings,
    scene: RunDashboard,
    progress: console.ProgressLine,
) -> Path:
    """Make the model that the rollouts start from, unless it exists, and return its folder."""
    folder = scene.folder
    made = folder.path / "sft" / "model"
    if not (made / "config.json").is_file():  # the folder is renamed into place when complete
        model, chat = model_folder(settings.model or SMALL), settings.chat
        training = sft.within(settings.learner, settings.ranks)
        samples = await samples_of(training, model, chat, progress)
        async with folder.within("sft") as part:
            tuning = await anyio.to_thread.run_sync(FineTuning, sft.loop, samples, part)
            await imitate(training, model, chat, tuning, part, progress, scene.on_start_event)
    checkpoints = made.with_name("checkpoints")  # not needed any more
    await anyio.to_thread.run_sync(partial(shutil.rmtree, checkpoints, ignore_errors=True))
    return made


async def _roll_out_and_learn(
    settings: TrainSettings,
    tasks: TaskSource,
    queue: GroupQueue,
    scene: RunDashboard,
    progress: console.ProgressLine,
) -> None:
    folder, stalls = scene.folder, scene.stalls
    logs = folder.path / "logs"
    async with AsyncExitStack() as stack:
        rollouts, serving, words = await stack.enter_async_context(
            _rolling_out(settings, scene, progress)
        )
        learner = await stack.enter_async_context(
            KeptLearner(
                learner_settings(settings),
                settings.ranks,
                log_dir=logs,
                on_progress=progress,
            )
        )
        if folder.checkpoint is not None:
            progress(f"Loading {folder.checkpoint.name}")
        timeout_s = settings.loop.step_timeout_s
        restored = await load_newest(learner, folder, timeout_s=timeout_s)
        watch = await stack.enter_async_context(watching(settings.watchdog, stalls, words))
        loop = TrainingLoop(
            settings.loop,
            rollouts=rollouts,
            serving=serving,
            learner=learner,
            tasks=tasks,
            queue=queue,
            folder=folder,
            report=progress,
            stages=settings.stages,
            budget=settings.budget,
            weights=settings.weights,
            restored=restored,
            kept=learner,
            max_restarts=settings.ranks.max_restarts,
            collapse=settings.collapse,
            watch=watch,
            emit=scene.emit,
        )
        scene.loop = loop
        stack.callback(scene.detach)
        await loop.run()


def _servers_in_words(runtime: Runtime) -> str:
    return "\n".join(
        f"{view.url}: {view.state}, {view.num_running} turns run" for view in runtime.router.view()
    )


@asynccontextmanager
async def _rolling_out(
    settings: TrainSettings, scene: RunDashboard, progress: console.ProgressLine
) -> AsyncIterator[tuple[RollsOut, Serving, Callable[[], str]]]:
    """Start what generates rollouts: a fleet if `fleet.redis` is set, otherwise a runtime here.

    Yields:
        What rolls out, what serves the weights, and a function that describes the servers' state.
    """
    s, folder = settings, scene.folder
    # Size servers and router for the longest rollouts of any stage.
    served = s.as_one_stage().model_copy(update={"log_dir": folder.path / "logs"})
    if s.fleet.redis:
        async with Fleet.open(
            s.fleet,
            run=s.fleet.run or folder.path.name,
            recipe=recipe_of(served),
            folder=folder.path / "fleet",
            say=progress.say,
        ) as fleet:
            yield fleet, fleet, lambda: ""
        return
    async with Runtime(served, progress=progress) as runtime, AsyncExitStack() as stack:
        scene.runtime = runtime
        stack.callback(scene.detach)  # also if the learner fails to start
        async with (
            Grader(s.reward, pool=runtime.pool) as grader,
            open_teacher(s.credit, runtime.chat.tokenizer) as teacher,
        ):
            serving = Served(runtime.router)
            rollouts = Rollouts(
                mixed_runner(s.environments, runtime, s.sampling, scene.emit),
                runtime.router.wait_for_capacity,
                grader,
                s.roc,
                s.credit,
                teacher,
                seed=s.loop.seed,
                enough=s.loop.early_stop_at,
                is_tainted=serving.is_tainted,
                emit=scene.emit,
            )
            yield rollouts, serving, partial(_servers_in_words, runtime)


def recipe_of(settings: TrainSettings) -> Recipe:
    """Return the settings that runtimes on other machines take from the trainer."""
    return Recipe(
        model=str(settings.model or SMALL),
        chat=settings.chat,
        env=settings.env,
        envs=[one.model_copy(update={"tasks": {}}) for one in settings.envs],
        mcp=settings.mcp,
        tools=settings.tools,
        tool_timeout_s=settings.tool_timeout_s,
        sampling=settings.sampling,
        budget=settings.budget,
        reward=settings.reward,
        roc=settings.roc,
        credit=settings.credit,
        group_size=settings.loop.group_size,
        seed=settings.loop.seed,
        early_stop_at=settings.loop.early_stop_at,
    )


def learner_settings(settings: TrainSettings) -> LearnerSettings:
    """Return what the learner's processes are told, including what they share with the servers."""
    return LearnerSettings.of(
        settings.learner,
        model=model_folder(settings.model or SMALL),
        chat_template=settings.chat.template,
        temperature=settings.sampling.temperature,
        objective=settings.credit.rule.objective,
    )


def _whole(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the model's folder resolved.

    Raises:
        SettingsError: names the settings that contradict each other.
    """
    s = settings
    model = model_folder(s.model or SMALL)
    if s.servers and s.sft:
        raise SettingsError("sft: `servers` have a model already: run `agentloop sft` first")
    if s.servers and not s.model:
        raise SettingsError("model: the learner needs the folder of the model that `servers` have")
    if s.sampling.temperature < _MIN_TEMPERATURE:
        raise SettingsError(
            f"sampling.temperature: {s.sampling.temperature:g} is greedy: every rollout of a task "
            "would be the same"
        )
    for name in ("top_p", "top_k", "min_p"):
        if getattr(s.sampling, name) != Sampling.model_fields[name].default:
            raise SettingsError(
                f"sampling.{name}: training needs all tokens: the servers' log-probabilities, "
                "and the learner's, are of the policy before any is left out"
            )
    group_s, ranks_s = s.weights.group_timeout_s, s.learner.collective_timeout_s
    if s.weights.transport == "group" and group_s >= ranks_s:
        raise SettingsError(
            f"weights.group_timeout_s: {group_s:g} must be below learner.collective_timeout_s "
            f"({ranks_s:g}): the other ranks wait for rank 0 no longer"
        )
    if s.fleet.redis and s.weights.transport == "group":
        raise SettingsError(
            "weights.transport: a fleet loads weights from a folder: set it to disk"
        )
    if s.fleet.redis and s.servers:
        raise SettingsError("servers: with fleet.redis each runtime is told its own")
    give_up_s, step_s = s.watchdog.give_up_s, s.loop.step_timeout_s
    if 0 < give_up_s <= step_s:
        raise SettingsError(
            f"watchdog.give_up_s: {give_up_s:g} must be above loop.step_timeout_s ({step_s:g}), "
            "or a long step ends the run"
        )
    s.credit.check(temperature=s.sampling.temperature, clip_low=s.learner.loss.clip_low)
    learns = s.loop.learn and (s.loop.steps or s.stages) and not s.credit.rule.needs_teacher
    if learns and s.loop.group_size < max(2, s.roc.down_sample_to_n):
        raise SettingsError(
            f"loop.group_size: {s.loop.group_size} rollouts, of which roc.down_sample_to_n "
            f"({s.roc.down_sample_to_n}), and two at least, are to be learned from: every group "
            "would be rejected"
        )
    if learns and 0 < s.loop.early_stop_at < s.roc.down_sample_to_n:
        raise SettingsError(
            f"loop.early_stop_at: {s.loop.early_stop_at} are fewer than "
            f"roc.down_sample_to_n ({s.roc.down_sample_to_n})"
        )
    if learns and s.loop.early_stop_at > s.loop.group_size:
        raise SettingsError(
            f"loop.early_stop_at: {s.loop.early_stop_at} are more than loop.group_size "
            f"({s.loop.group_size}): set 0 to wait for all of them"
        )
    most = s.as_one_stage().budget.max_response_tokens
    if s.learner.micro_batch_tokens <= most:
        raise SettingsError(
            f"learner.micro_batch_tokens: {s.learner.micro_batch_tokens} do not hold a prompt and "
            f"max_response_tokens ({most})"
        )
    if s.stages and s.loop.steps != LoopSettings().steps:
        raise SettingsError("loop.steps: each of the stages has its own")
    held_out = any(one.tasks.held_out for one in s.environments)
    if not s.loop.steps and not s.stages and not held_out:
        raise SettingsError("tasks.held_out: without steps there is nothing else to do")
    return s.model_copy(update={"model": str(model)})


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
        help="print the tokens, memory and disk that the run would take, and exit",
    )
    parser.add_argument(
        "--json", action="store_true", help="with --dry-run: print the plan as JSON"
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
    if options.json and not options.dry_run:
        parser.error("--json: requires --dry-run")
    if options.list_settings:
        print(console.settings_text(TrainSettings))
        return 0
    if options.restarts < 0:
        parser.error(f"argument --restarts: must be at least 0, not {options.restarts}")
    if options.dry_run:
        return console.run(lambda: _plan(options.settings, options.resume, as_json=options.json))
    if options.restarts > 0 and not is_child():
        command = [sys.executable, "-m", "agentloop", "train"]
        flags = ["--explain"] if options.explain else []
        overrides = console.split_settings(options.settings)[1]  # may contain a password
        return revived([*command, *flags], arguments, options.restarts, _say, again=overrides)
    work = partial(_train, options.settings, options.resume, options.from_step)
    return console.run(work, explain=options.explain)


async def _plan(arguments: list[str], resume: Path | None, *, as_json: bool = False) -> int:
    """Print the plan of a run. The model's weights need not exist."""
    settings = told(TrainSettings, arguments, resume)
    sft, stages = settings.sft, settings.stages
    refused, missing = _refusal(settings), await _missing(settings)
    changes = sft.learner.config if sft is not None else {}
    made = await anyio.to_thread.run_sync(partial(plan, settings.as_one_stage(), changes=changes))
    if as_json:
        data = {**made.to_dict(), "refused": refused or None, "missing": missing or None}
        console.print_json(data)
        return 2 if refused else 0
    if sft is not None:
        sources = [*map(str, sft.data.paths)]
        sources += [f"{sft.data.teacher:,} of the teacher"] if sft.data.teacher else []
        print(f"sft        {sft.loop.epochs} epoch(s) of dialogues: {', '.join(sources)}")
    for name, stage in stages.items():
        budget = stage.budget(settings.budget)
        print(
            f"stage      {name}: {stage.steps} steps, {budget.max_turns} turns and "
            f"{budget.max_response_tokens:,} tokens at most"
            + (f", on the hard ones of {stage.filter_tasks} tasks" if stage.filter_tasks else "")
        )
    print(report(made), end="")
    if missing:
        print(f"missing    {missing}")
    if refused:
        print(f"refused    {refused}")
    return 2 if refused else 0


def _refusal(settings: TrainSettings) -> str:
    """Why it would not start, for all that the settings say."""
    try:
        _whole(settings)
    except SettingsError as error:
        return str(error)
    return ""


async def _missing(settings: TrainSettings) -> str:
    """Return what a start on this machine would lack: packages, task files, the reward function."""

    async def read_tasks() -> None:
        environments = settings.environments
        loaded = [one.load() for one in environments]
        if any(one.tasks.paths for one in environments) or any(loaded):
            await anyio.to_thread.run_sync(open_mixture, environments, loaded)

    async def import_reward() -> None:
        async with Grader(settings.reward) as grader:
            await grader.ready()

    found = []
    for check in (
        partial(anyio.to_thread.run_sync, _require_machine, settings),
        read_tasks,
        import_reward,
    ):
        try:
            await check()
        except (SettingsError, DataError) as error:
            found.append(str(error))
    return "; ".join(found)


def _require_machine(settings: TrainSettings) -> None:
    """Check for the packages and the GPU that the learner needs, and the servers that this process
    would start.

    Raises:
        SettingsError: some are missing; names them and what to do.
    """
    starts_servers = not settings.servers and not settings.fleet.redis
    if starts_servers:
        require_device(settings.server)
    require_learner(settings.learner)
    if starts_servers and not is_installed("sglang"):
        raise SettingsError(NOT_INSTALLED)


async def _train(arguments: list[str], resume: Path | None, from_step: int | None) -> int:
    settings = told(TrainSettings, arguments, resume)
    _whole(settings)  # settings first: a missing package takes longer to put right
    if settings.sft is not None:
        settings.sft.data.require_files()
    _require_machine(settings)
    with console.ProgressLine("Starting to train") as progress:
        folder = await train(settings, progress, resume=resume, from_step=from_step)
        progress.say(f"The run is in {folder}; plots.png shows its metrics. Ask its model:")
        progress.say(f'  agentloop chat --run {shown(folder)} "What is 37 times 48?"')
    return 0


def _say(line: str) -> None:
    print(f"agentloop: {line}", file=sys.stderr)
