"""`agentloop evaluate`: a model and tasks in; avg@k and pass@k out, and how sure they are.

tasks ──> our own loop, or an endpoint of others ──> a run's folder ──> results
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pydantic

from agentloop import console
from agentloop.config import load_known, load_settings, to_toml
from agentloop.errors import SettingsError, sole
from agentloop.evaluation.agent import Agent
from agentloop.evaluation.endpoint import Endpoint, EndpointSettings
from agentloop.evaluation.loop import Evaluation, EvaluationSettings, Sampler
from agentloop.evaluation.results import figures_of, markdown, notes, results, table, text
from agentloop.events import (
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
)
from agentloop.groups.problems import GENERATORS
from agentloop.groups.reward import RewardSettings, Scorer
from agentloop.groups.tasks import Task, TaskSource, TasksSettings, read_tasks
from agentloop.inference.supervise import require_device
from agentloop.models import SMALL
from agentloop.runtime import Runtime, Settings
from agentloop.scene import Scene
from agentloop.training.figures import mean
from agentloop.training.run_folder import RunFolder, RunSettings
from agentloop.training.standing import Standing
from sandbox import Pool

__all__ = ["EvaluateSettings", "chosen_tasks", "evaluate", "main"]

_GENERATED = 64  # tasks of a generator, which has no end
_LINES = 20  # of progress, where there is no terminal
_TICK_S = 0.5
# What may not change within a run: its samples would be of both.
_OF_ONE_RUN = ("model", "chat", "tools", "tool_timeout_s", "sampling", "tasks", "reward")


class EvaluateSettings(Settings):
    """Everything that an evaluation can be told, and all that serving can be."""

    evaluate: EvaluationSettings = pydantic.Field(default_factory=lambda: EvaluationSettings())
    endpoint: EndpointSettings = pydantic.Field(default_factory=lambda: EndpointSettings())
    tasks: TasksSettings = pydantic.Field(default_factory=lambda: TasksSettings())
    reward: RewardSettings = pydantic.Field(default_factory=lambda: RewardSettings())
    run: RunSettings = pydantic.Field(default_factory=lambda: RunSettings())
    page: bool = pydantic.Field(
        True,
        description="Whether the run is shown as a page, at serve.host and serve.port, or at a "
        "free port where that one is taken.",
    )


async def evaluate(
    settings: EvaluateSettings, progress: console.Progress, *, resume: Path | None = None
) -> tuple[Path, dict[str, Any]]:
    """Run it to the end, or on to the end from where the run at `resume` is; returns its folder
    and its results, which stand in it, too.

    Raises:
        AgentLoopError: what it cannot go on from, by its name.
    """
    _check(settings)
    if resume is not None:
        _check_same(load_settings(EvaluateSettings, [resume / "config.toml"]), settings)
    async with Scorer(settings.reward) as scorer:
        await scorer.ready()  # what it lacks it says now, not when the servers run
    tasks = await anyio.to_thread.run_sync(chosen_tasks, settings, abandon_on_cancel=True)
    folder = _folder(settings, resume)
    showing = _Showing(settings.evaluate, progress)
    scene = Scene(
        folder,
        progress,
        readers=[showing.seen],
        kind="evaluate",
        has_runtime=not settings.endpoint.url,
    )
    evaluation = Evaluation(
        settings.evaluate,
        tasks,
        folder,
        on_progress=showing.done,
        on_refused=lambda task, error: progress.say(f"Left out: task {task.id}: {error}"),
        emit=scene.emit,
    )
    await evaluation.take_up()
    if evaluation.todo:
        path = folder.path
        model = settings.endpoint.model or Path(settings.model or SMALL).name
        elsewhere = scene.told_elsewhere(settings.otel, model=model)
        with folder.noting_failure():
            async with (
                elsewhere,
                scene.shown(settings.serve) if settings.page else nullcontext(),
                _answering(settings, tasks, scene, progress) as (sampler, scorer, settings),
            ):
                folder.tell(to_toml(settings))
                progress.say(f"If it is stopped it goes on by: agentloop evaluate --resume {path}")
                async with showing.of(evaluation):
                    await evaluation.run(sampler, scorer)
    else:
        folder.tell(to_toml(settings))
    about_it = {
        "model": settings.endpoint.model or settings.model or "small",
        "by": settings.endpoint.url or "agentloop",
        "tools": [] if settings.endpoint.url else settings.tools,
        "sampling": settings.sampling.model_dump(mode="json"),
        "budget": settings.budget.model_dump(mode="json"),
    }
    told = results(evaluation.outcomes, settings.evaluate, about_it)
    folder.write("results.json", json.dumps(told, indent=2, ensure_ascii=False) + "\n")
    folder.write("results.md", markdown(told))
    return folder.path, told


def chosen_tasks(settings: EvaluateSettings) -> list[Task]:
    """The tasks that are held out, where some are; else all of the files, each once, in their
    order; of a generator the first. A smaller number is drawn of them by `tasks.seed`.

    Raises:
        DataError: names the file, the line or row, and the field; or there are none.
        SettingsError: a package is missing.
    """
    s, wanted = settings.tasks, settings.evaluate.num_tasks
    if s.held_out:
        tasks = TaskSource.open(s).held_out()
    elif s.kind in GENERATORS:
        source = TaskSource.open(s)
        wanted = wanted or _GENERATED
        tasks = [next(source) for _ in range(wanted)]
    else:
        first: dict[str, Task] = {}
        for task in read_tasks(s):
            first.setdefault(task.id, task)
        tasks = list(first.values())
    if wanted and wanted < len(tasks):
        drawn = set(random.Random(s.seed).sample(range(len(tasks)), wanted))
        tasks = [task for place, task in enumerate(tasks) if place in drawn]
    if not tasks:
        raise SettingsError("tasks: there are none to evaluate on")
    return tasks


def _check(settings: EvaluateSettings) -> None:
    """Raises SettingsError: it names settings that do not go together."""
    if settings.endpoint.model and not settings.endpoint.url:
        raise SettingsError("endpoint.model: it is of no use without endpoint.url")
    if settings.endpoint.url and settings.servers:
        raise SettingsError("servers: endpoint.url answers, not servers of ours")


def _check_same(old: EvaluateSettings, new: EvaluateSettings) -> None:
    """Raises SettingsError: names what the run that goes on was told otherwise."""
    pairs = [(f"{name}", getattr(old, name), getattr(new, name)) for name in _OF_ONE_RUN]
    pairs += [(f"endpoint.{name}", getattr(old.endpoint, name), getattr(new.endpoint, name))
              for name in ("url", "model")]  # fmt: skip
    pairs += [(f"budget.{name}", getattr(old.budget, name), getattr(new.budget, name))
              for name in type(new.budget).model_fields if name != "timeout_s"]  # fmt: skip
    for name, was, told in pairs:
        if was != told:
            raise SettingsError(
                f"--resume: {name}: it is another in the run, whose samples would be of both"
            )
    if new.evaluate.num_samples < old.evaluate.num_samples:
        raise SettingsError(
            f"--resume: evaluate.num_samples: the run has {old.evaluate.num_samples} already"
        )


def _folder(settings: EvaluateSettings, resume: Path | None) -> RunFolder:
    """`runs/latest` goes on to lead to what was trained. Raises SettingsError."""
    if resume is not None:
        return RunFolder.again(resume)
    name = settings.run.name or time.strftime("evaluate-%Y%m%d-%H%M%S")
    path = (settings.run.folder.expanduser() / name).absolute()
    return RunFolder(path, to_toml(settings))


@asynccontextmanager
async def _answering(
    settings: EvaluateSettings, tasks: Sequence[Task], scene: Scene, progress: console.Progress
) -> AsyncIterator[tuple[Sampler, Scorer, EvaluateSettings]]:
    """Whoever answers, and whoever scores that; and the settings, with the model's name."""
    s = settings
    if s.endpoint.url:
        most = s.budget.max_response_tokens
        opened = Endpoint.open(s.endpoint, s.sampling, max_response_tokens=most, emit=scene.emit)
        async with AsyncExitStack() as stack:
            endpoint = await stack.enter_async_context(opened)
            pool = None
            if any("reasoning_gym" in task.extra for task in tasks):  # scored in the sandbox
                made = Pool(s.sandbox, on_progress=progress)
                pool = await stack.enter_async_context(made)
            scorer = await stack.enter_async_context(Scorer(s.reward, pool=pool))
            named = s.endpoint.model_copy(update={"model": endpoint.model})
            yield endpoint, scorer, s.model_copy(update={"endpoint": named})
        return
    logged = s.model_copy(update={"log_dir": s.log_dir or scene.folder.path / "logs"})
    async with Runtime(logged, progress=progress) as runtime:
        scene.runtime = runtime
        async with Scorer(s.reward, pool=runtime.pool) as scorer, anyio.create_task_group() as tg:
            tg.start_soon(scene.stalls.watch, s.serve.stall_after_s)
            run_group = partial(runtime.run_group, on_event=scene.emit, with_text=False)
            model = s.model or (runtime.router.model_path if s.servers else None)
            agent = Agent(run_group, runtime.router.has_room)
            try:
                yield agent, scorer, s.model_copy(update={"model": model})
            finally:
                scene.leave()
            tg.cancel_scope.cancel()


class _Showing:
    """Tells how far it is: on a terminal always, else now and then."""

    def __init__(self, settings: EvaluationSettings, progress: console.Progress) -> None:
        self._settings = settings
        self._progress = progress
        self._evaluation: Evaluation | None = None
        self._open: set[str] = set()
        self._num_tokens = 0
        self._begun_s = time.monotonic()
        self._done_at_start = self._done = self._told = 0
        self._values: dict[str, str] = {}

    def seen(self, event: Event) -> None:
        match event:
            case RolloutStarted():
                self._open.add(event.rollout_id)
            case RolloutFinished() | RolloutAbandoned():
                self._open.discard(event.rollout_id)
            case TokensSampled():
                self._num_tokens += len(event.ids)

    @asynccontextmanager
    async def of(self, evaluation: Evaluation) -> AsyncIterator[None]:
        """Shown within."""
        self._evaluation, self._begun_s = evaluation, time.monotonic()
        self._done_at_start = len(evaluation.outcomes) - len(evaluation.todo)
        self.done(self._done_at_start)
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._tick)
                yield
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            raise sole(group) from None

    def done(self, num_done: int) -> None:
        """So many tasks are."""
        assert self._evaluation is not None
        self._done = num_done
        outcomes = self._evaluation.outcomes
        told = figures_of(outcomes, self._settings)
        name = f"avg@{self._settings.num_samples}"
        if told.avg_at_k is not None:
            one = told.avg_at_k
            self._values[name] = f"{one.value:.3f} [{one.low:.3f}, {one.high:.3f}]"
        missing = sum(one["reward"] is None for each in outcomes for one in each.rollouts)
        self._values["missing"] = str(missing)
        if _LINES * num_done // len(outcomes) > self._told:
            self._told = _LINES * num_done // len(outcomes)
            value = mean(told.avg_at_k.value if told.avg_at_k else None)
            self._progress(f"{num_done} of {len(outcomes)} tasks, {name} {value}")
        self._show()

    async def _tick(self) -> None:
        while True:
            self._show()
            await anyio.sleep(_TICK_S)

    def _show(self) -> None:
        assert self._evaluation is not None
        elapsed_s = time.monotonic() - self._begun_s
        total, fresh = len(self._evaluation.outcomes), self._done - self._done_at_start
        waits = f"{len(self._open)} samples in flight"
        if self._num_tokens and elapsed_s > 0:
            waits += f", {self._num_tokens / elapsed_s:,.0f} tokens/s"
        left_s = elapsed_s / fresh * (total - self._done) if fresh else None
        self._progress.show(
            Standing("evaluation", self._done, total, waits, self._values, left_s, unit="task")
        )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop evaluate",
        description="Sample each task k times and estimate avg@k and pass@k. Exits with status "
        "1 if samples are missing; --resume retries them.",
    )
    console.add_settings_arguments(parser)
    parser.add_argument(
        "--tasks",
        action="append",
        type=Path,
        metavar="FILE",
        help="a .jsonl or .parquet file, as of `agentloop data prepare`; may be given again",
    )
    told = parser.add_mutually_exclusive_group()
    told.add_argument(
        "--run",
        metavar="RUN",
        type=Path,
        help="a run of `agentloop train`, such as runs/latest: its newest model, with its tasks, "
        "tools and budget",
    )
    told.add_argument(
        "--resume",
        metavar="RUN",
        type=Path,
        help="go on with the evaluation in this folder: what has a reward is not sampled again",
    )
    parser.add_argument("--json", action="store_true", help="print the results as a JSON object")
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be sampled, and exit"
    )
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(EvaluateSettings))
        return 0
    read = partial(_told, options.settings, options.tasks or [], options.run, options.resume)
    if options.dry_run:
        return console.run(lambda: _plan(read()))
    work = partial(_evaluate, read, options.resume, options.json)
    return console.run(work, explain=options.explain)


def _told(
    arguments: list[str], paths: Sequence[Path], run: Path | None, resume: Path | None
) -> EvaluateSettings:
    """What was told on the command line, on top of what a run was told. Raises SettingsError."""
    files, overrides = console.split_settings(arguments)
    base: dict[str, Any] = {}
    if resume is not None:
        if not (resume / "config.toml").is_file():
            raise SettingsError(
                f"--resume: {resume} is not a run (no config.toml). Try `agentloop ls`."
            )
        files = [str(resume / "config.toml"), *files]
    if run is not None:
        base = load_known(EvaluateSettings, run / "config.toml")
        for own in ("run", "log_dir", "evaluate"):
            base.pop(own, None)
        base |= {"model": str(RunFolder.model_in(run)), "servers": []}
    if paths:
        kinds = {"parquet" if path.suffix == ".parquet" else "jsonl" for path in paths}
        if len(kinds) > 1:
            raise SettingsError("--tasks: files of one kind, .jsonl or .parquet")
        named = json.dumps([str(path) for path in paths], ensure_ascii=False)
        overrides = [f"tasks.kind={kinds.pop()}", f"tasks.paths={named}", "tasks.held_out=0",
                     *overrides]  # fmt: skip
    return load_settings(EvaluateSettings, files, overrides, base=base)


async def _plan(settings: EvaluateSettings) -> int:
    _check(settings)
    tasks = await anyio.to_thread.run_sync(chosen_tasks, settings, abandon_on_cancel=True)
    k, most = settings.evaluate.num_samples, settings.budget.max_response_tokens
    by = settings.endpoint.url or "our own loop"
    print(f"tasks      {len(tasks)}, of {', '.join(sorted({task.source for task in tasks}))}")
    print(f"samples    {k} of each: {len(tasks) * k:,}, by {by}")
    print(f"tokens     {most:,} a sample at most: {len(tasks) * k * most:,}")
    return 0


async def _evaluate(read: Any, resume: Path | None, as_json: bool) -> int:
    settings: EvaluateSettings = read()
    if not settings.endpoint.url and not settings.servers:
        require_device(settings.server)
    with console.Progress("Starting to evaluate") as progress:
        if settings.sampling.temperature == 0 and settings.evaluate.num_samples > 1:
            progress.say("At temperature 0 the samples of a task are as good as all the same")
        folder, told = await evaluate(settings, progress, resume=resume)
        progress.say(f"The run is in {folder}")
    if as_json:
        print(json.dumps(told, ensure_ascii=False))
    elif sys.stdout.isatty():
        _print_table(told)
    else:
        print(text(told), end="")
    return 1 if told["all"]["num_missing"] else 0


def _print_table(told: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    head, *rows = table(told)
    drawn = Table(*head, title=f"{told['model']}, by {told['by']}")
    for cells in rows:
        drawn.add_row(*cells)
    out = Console()
    out.print(drawn)
    for note in notes(told):
        out.print(note, markup=False, highlight=False)
