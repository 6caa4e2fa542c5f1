"""An evaluation, from its settings to its results.

tasks ──> the agent, or an external endpoint ──> the run's folder ──> results
"""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from pathlib import Path

import anyio
import httpx
import pydantic

from agentloop.agent.threads import in_command_thread
from agentloop.aio import task_group
from agentloop.config import load_settings, to_toml
from agentloop.environments.environment import open_tasks, set_up
from agentloop.environments.mixture import RunEnvironment
from agentloop.environments.rewards.reward import Grader
from agentloop.environments.tasks.mixed import of_environment
from agentloop.environments.tasks.sources import Task
from agentloop.errors import SettingsError
from agentloop.evaluation.endpoint import EndpointSampler
from agentloop.evaluation.loop import Evaluation, EvaluationSettings
from agentloop.evaluation.results import Results, Sampled, figures_of, markdown, results
from agentloop.events import (
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
)
from agentloop.inference.openai_client import EndpointSettings
from agentloop.launch.machine import require_servers
from agentloop.launch.progress import ProgressLine
from agentloop.launch.settings import EnvironmentRunSettings
from agentloop.launch.without_servers import open_endpoint
from agentloop.models import SMALL
from agentloop.observe.watchdog import FOR_SERVICES, Progress
from agentloop.rollouts.metrics import mean
from agentloop.rollouts.player import endpoint_player_of, player_of
from agentloop.rollouts.runner import GroupRunner
from agentloop.runtime import Runtime
from agentloop.sandbox import Pool
from agentloop.serving.access import ServeSettings
from agentloop.training.recovery.position import resume_command
from agentloop.training.run.dashboard import RunDashboard
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.status import RunStatus, count_of

_GENERATED = 64  # default number of tasks of a generator, which has no end
_LINES = 20  # progress lines printed without a terminal
_TICK_S = 0.5
# Settings that may not change on --resume: otherwise the samples would be mixed.
_FIXED = (
    *("model", "chat", "mcp", "tools", "tool_timeout_s", "tool_format", "sampling"),
    *("agent", "env", "envs", "tasks", "reward"),
)


class EvaluateSettings(EnvironmentRunSettings):
    """All settings of an evaluation, on top of those of a runtime."""

    evaluate: EvaluationSettings = pydantic.Field(default_factory=lambda: EvaluationSettings())
    endpoint: EndpointSettings = pydantic.Field(default_factory=lambda: EndpointSettings())


async def evaluate(
    settings: EvaluateSettings, progress: ProgressLine, *, resume: Path | None = None
) -> tuple[Path, Results]:
    """Run an evaluation, or continue the one at `resume`; return the run's folder and the results.

    The results are also written to the folder, as results.json and results.md.

    Raises:
        AgentLoopError: a failure that the evaluation cannot recover from.
    """
    check_settings(settings)
    if resume is not None:
        _check_same(load_settings(EvaluateSettings, [resume / "config.toml"]), settings)
    async with Grader(settings.reward) as grader:
        await grader.ready()  # report missing packages before the servers start
    tasks = await in_command_thread(chosen_tasks, settings)
    await settings.check_references(tasks)
    if not settings.endpoint.url and not settings.servers:
        require_servers(settings.server)
    async with _open_folder(settings, resume) as folder:
        return folder.path, await _evaluate_in(folder, settings, tasks, progress)


async def _evaluate_in(
    folder: RunFolder,
    settings: EvaluateSettings,
    tasks: Sequence[Task],
    progress: ProgressLine,
) -> Results:
    """Sample and score the tasks that are not done, write the results and return them."""
    report = _ProgressReport(settings.evaluate, progress)
    dashboard = RunDashboard(
        folder,
        progress,
        readers=[report.on_event],
        kind="evaluate",
        has_runtime=not settings.endpoint.url,
    )
    evaluation = Evaluation(
        settings.evaluate,
        tasks,
        folder,
        on_progress=report.report_done,
        on_refused=lambda task, error: progress.say(f"Skipped task {task.id}: {error}"),
        emit=dashboard.emit,
    )
    await evaluation.take_up()
    if evaluation.todo:
        path = folder.path
        model = settings.endpoint.model or Path(settings.model or SMALL).name
        elsewhere = dashboard.exporters(settings.otel, model=model)
        with folder.noting_failure():
            async with (
                elsewhere,
                dashboard.serve_page(_serve(settings)) if settings.page else nullcontext(),
                set_up(environment.load() for environment in settings.environments),
                _open_groups(settings, tasks, dashboard, progress) as (groups, settings),
            ):
                folder.tell(to_toml(settings))
                progress.say(f"If stopped, continue with: {resume_command('evaluate', path)}")
                async with report.of(evaluation):
                    await evaluation.run(groups, settings.budget)
    else:
        folder.tell(to_toml(settings))
    environments = [environment.env for environment in settings.environments]
    has_tools = not settings.endpoint.url and any(
        not environment.name for environment in environments
    )
    sampled = Sampled(
        model=settings.endpoint.model or settings.model or "small",
        by=settings.endpoint.url or "agentloop",
        environments=[
            environment.model_dump(mode="json") for environment in environments if environment.name
        ],
        tools=settings.tools if has_tools else [],
        sampling=settings.sampling.model_dump(mode="json"),
        budget=settings.budget.model_dump(mode="json"),
    )
    summary = results(evaluation.outcomes, settings.evaluate, sampled)
    plain = json.dumps(summary.to_dict(), indent=2, ensure_ascii=False)
    folder.write("results.json", f"{plain}\n")
    folder.write("results.md", markdown(summary))
    return summary


def chosen_tasks(settings: EvaluateSettings) -> list[Task]:
    """Return the tasks to evaluate on, of each environment. Raises the errors of `tasks_of`."""
    num_tasks = settings.evaluate.num_tasks
    return [
        task for environment in settings.environments for task in tasks_of(environment, num_tasks)
    ]


def tasks_of(environment: RunEnvironment, num_tasks: int) -> list[Task]:
    """Return the tasks to evaluate an environment on.

    These are the held-out tasks, if the environment or `tasks.held_out` says which; otherwise the
    distinct tasks of files or of a list, in order, or the first tasks of a generator. If
    `num_tasks` is smaller, and not 0, that many are drawn at random with `tasks.seed`.

    Raises:
        DataError: a task is invalid; the message names the file, the line or row, and the field.
        SettingsError: there are no tasks, or a package is missing.
    """
    s, wanted = environment.tasks, num_tasks
    source = open_tasks(s, environment.load())
    if s.held_out or source.has_split:
        tasks = source.held_out()
    elif source.distinct is not None:
        tasks = source.distinct
    else:
        wanted = wanted or _GENERATED
        tasks = list(itertools.islice(source, wanted))
    if wanted and wanted < len(tasks):
        drawn = set(random.Random(s.seed).sample(range(len(tasks)), wanted))
        tasks = [task for index, task in enumerate(tasks) if index in drawn]
    if not tasks:
        of = f" for {environment.name}" if environment.name else ""
        raise SettingsError(f"tasks: there are no tasks to evaluate on{of}")
    return [of_environment(task, environment.name) for task in tasks]


def check_settings(settings: EvaluateSettings) -> None:
    """Raise SettingsError if settings contradict each other."""
    if settings.endpoint.model and not settings.endpoint.url:
        raise SettingsError("endpoint.model: needs endpoint.url as well")
    if settings.endpoint.url and settings.agent.command:
        raise SettingsError("agent: a program needs agentloop's own servers: omit endpoint.url")
    if settings.endpoint.url and any(not env.name for env in settings.envs):
        raise SettingsError("envs: with endpoint.url, each must name an environment")
    if settings.endpoint.url and settings.servers:
        raise SettingsError("servers: not used with endpoint.url: omit one of the two")


def _serve(settings: EvaluateSettings) -> ServeSettings:
    """Return where the page is served: not at the endpoint's port, where it would be asked."""
    url, serve = httpx.URL(settings.endpoint.url), settings.serve
    return serve.model_copy(update={"port": 0}) if url.port == serve.port else serve


def _check_same(old: EvaluateSettings, new: EvaluateSettings) -> None:
    """Raise SettingsError if a setting that may not change on --resume has changed."""
    pairs = [(f"{name}", getattr(old, name), getattr(new, name)) for name in _FIXED]
    pairs += [(f"endpoint.{name}", getattr(old.endpoint, name), getattr(new.endpoint, name))
              for name in ("url", "model")]  # fmt: skip
    pairs += [(f"budget.{name}", getattr(old.budget, name), getattr(new.budget, name))
              for name in type(new.budget).model_fields if name != "timeout_s"]  # fmt: skip
    for name, before, after in pairs:
        if before != after:
            raise SettingsError(
                f"--resume: {name}: differs from the run's value, so that its samples would be "
                "mixed: keep that value, or start a new run"
            )
    if new.evaluate.num_samples < old.evaluate.num_samples:
        raise SettingsError(
            f"--resume: evaluate.num_samples: the run already has {old.evaluate.num_samples}; "
            "set at least as many"
        )


def _open_folder(
    settings: EvaluateSettings, resume: Path | None
) -> AbstractAsyncContextManager[RunFolder]:
    """Open the run's folder. `runs/latest` keeps pointing to a training run."""
    if resume is not None:
        return RunFolder.open(resume)
    name = settings.run.name or time.strftime("evaluate-%Y%m%d-%H%M%S")
    return RunFolder.open(settings.run.folder / name, to_toml(settings))


@asynccontextmanager
async def _open_groups(
    settings: EvaluateSettings,
    tasks: Sequence[Task],
    dashboard: RunDashboard,
    progress: ProgressLine,
) -> AsyncIterator[tuple[GroupRunner, EvaluateSettings]]:
    """Start what samples and scores; yield it and the settings with the model's name."""
    s = settings
    if s.endpoint.url and (s.env.name or s.envs):
        logs = dashboard.folder.path / "logs"
        async with (
            open_endpoint(s, s.endpoint, log_dir=logs, progress=progress) as (host, named),
            Grader(s.reward, pool=host.pool) as grader,
        ):
            player = endpoint_player_of(
                s.environments,
                host,
                max_groups=max(1, named.max_concurrent // s.evaluate.num_samples),
                sampling=s.sampling,
                emit=dashboard.emit,
                grader=grader,
            )
            groups = GroupRunner(player, grader, emit=dashboard.emit)
            yield groups, s.model_copy(update={"endpoint": named})
        return
    if s.endpoint.url:
        opened = EndpointSampler.open(s.endpoint, s.sampling, emit=dashboard.emit)
        async with AsyncExitStack() as stack:
            endpoint = await stack.enter_async_context(opened)
            pool = None
            if any("reasoning_gym" in task.extra for task in tasks):  # scored in the sandbox
                pool = await stack.enter_async_context(Pool(s.sandbox, on_progress=progress))
            grader = await stack.enter_async_context(Grader(s.reward, pool=pool))
            groups = GroupRunner(endpoint, grader, emit=dashboard.emit)
            yield groups, s.model_copy(update={"endpoint": endpoint.settings})
        return
    max_tokens = max(
        environment.budget_of(s.budget).max_response_tokens for environment in s.environments
    )
    update = {
        "log_dir": s.log_dir or dashboard.folder.path / "logs",
        "budget": s.budget.model_copy(update={"max_response_tokens": max_tokens}),
    }
    logged = s.model_copy(update=update)
    async with Runtime(logged, progress=progress) as runtime:
        dashboard.runtime = runtime
        async with Grader(s.reward, pool=runtime.pool) as grader, anyio.create_task_group() as tg:
            tg.start_soon(Progress(dashboard.stalls, FOR_SERVICES, may_idle=True).watch)
            player = player_of(
                s.environments, runtime, sampling=s.sampling, emit=dashboard.emit, grader=grader
            )
            model = s.model or (runtime.router.replicas.model_path if s.servers else None)
            groups = GroupRunner(player, grader, emit=dashboard.emit)
            try:
                yield groups, s.model_copy(update={"model": model})
            finally:
                dashboard.detach()
            tg.cancel_scope.cancel()


class _ProgressReport:
    """Reports progress: continuously on a terminal, otherwise in a limited number of lines."""

    def __init__(self, settings: EvaluationSettings, progress: ProgressLine) -> None:
        self._settings = settings
        self._progress = progress
        self._evaluation: Evaluation | None = None
        self._open: set[str] = set()
        self._num_tokens = 0
        self._started_s = time.monotonic()
        self._done_at_start = self._done = self._num_lines = 0
        self._values: dict[str, str] = {}

    def on_event(self, event: Event) -> None:
        match event:
            case RolloutStarted():
                self._open.add(event.rollout_id)
            case RolloutFinished() | RolloutAbandoned():
                self._open.discard(event.rollout_id)
            case TokensSampled():
                self._num_tokens += len(event.ids)

    @asynccontextmanager
    async def of(self, evaluation: Evaluation) -> AsyncIterator[None]:
        """Report the progress of `evaluation` while the context is open."""
        self._evaluation, self._started_s = evaluation, time.monotonic()
        self._done_at_start = len(evaluation.outcomes) - len(evaluation.todo)
        self.report_done(self._done_at_start)
        async with task_group() as tasks:
            tasks.start_soon(self._tick)
            yield
            tasks.cancel_scope.cancel()

    def report_done(self, num_done: int) -> None:
        """Report that `num_done` tasks are done."""
        assert self._evaluation is not None
        self._done = num_done
        outcomes = self._evaluation.outcomes
        figures = figures_of(outcomes, self._settings)
        name = f"avg@{self._settings.num_samples}"
        if figures.avg_at_k is not None:
            self._values[name] = str(figures.avg_at_k)
        missing = sum(
            rollout.reward is None for outcome in outcomes for rollout in outcome.rollouts
        )
        self._values["missing"] = str(missing)
        if _LINES * num_done // len(outcomes) > self._num_lines:
            self._num_lines = _LINES * num_done // len(outcomes)
            value = mean(figures.avg_at_k.value if figures.avg_at_k else None)
            self._progress(f"{num_done} of {count_of(len(outcomes), 'task')}, {name} {value}")
        self._show()

    async def _tick(self) -> None:
        while True:
            self._show()
            await anyio.sleep(_TICK_S)

    def _show(self) -> None:
        assert self._evaluation is not None
        elapsed_s = time.monotonic() - self._started_s
        total, fresh = len(self._evaluation.outcomes), self._done - self._done_at_start
        waits = f"{count_of(len(self._open), 'sample')} in flight"
        if self._num_tokens and elapsed_s > 0:
            waits += f", {self._num_tokens / elapsed_s:,.0f} tokens/s"
        left_s = elapsed_s / fresh * (total - self._done) if fresh else None
        self._progress.show(
            RunStatus("evaluation", self._done, total, waits, self._values, left_s, unit="task")
        )
