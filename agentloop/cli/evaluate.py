"""`agentloop evaluate`: estimate avg@k and pass@k of a model on tasks, with confidence intervals.

tasks ──> the agent, or an external endpoint ──> the run's folder ──> results
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from agentloop.cli import console
from agentloop.cli.dry_run import Findings, check_start
from agentloop.config import load_known, load_settings
from agentloop.environments.environment import Environment
from agentloop.environments.tasks.sources import Task
from agentloop.errors import AgentLoopError, ServerError, SettingsError
from agentloop.evaluation.results import Results, notes, table, text
from agentloop.evaluation.wiring import (
    EvaluateSettings,
    check_settings,
    chosen_tasks,
    evaluate,
)
from agentloop.inference.openai_client import EndpointSettings, OpenAIClient
from agentloop.launch.machine import require_servers
from agentloop.launch.progress import ProgressLine
from agentloop.training.run.folder import RunFolder, config_of

_ENDPOINT_S = 10.0  # in which an endpoint must list its models, in a dry run


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
        help="a .jsonl or .parquet file, such as one written by `agentloop data prepare`; may be "
        "repeated",
    )
    run_options = parser.add_mutually_exclusive_group()
    run_options.add_argument(
        "--run",
        metavar="RUN",
        type=Path,
        help="evaluate the newest model of this run of `agentloop train`, such as runs/latest, "
        "with the run's tasks, tools and budget",
    )
    run_options.add_argument(
        "--resume",
        metavar="RUN",
        type=Path,
        help="continue the evaluation in this folder; samples that have a reward are kept",
    )
    parser.add_argument("--json", action="store_true", help="print the results as a JSON object")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="find what the evaluation would lack or be refused for, print what would be sampled, "
        "and exit",
    )
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(EvaluateSettings))
        return 0
    read = partial(
        _read_settings, options.settings, options.tasks or [], options.run, options.resume
    )
    if options.dry_run:
        return console.run(lambda: _plan(read(), is_new=options.resume is None))
    work = partial(_evaluate, read, options.resume, options.json)
    return console.run(work, explain=options.explain)


def _read_settings(
    arguments: list[str], paths: Sequence[Path], run: Path | None, resume: Path | None
) -> EvaluateSettings:
    """Return the settings of the command line, on top of those of the run.

    Raises:
        SettingsError: a setting is invalid.
        RunFolderError: `run` or `resume` is not a run's folder.
    """
    files, overrides = console.split_settings(arguments)
    base: dict[str, object] = {}
    if resume is not None:
        files = [str(config_of(resume, "--resume")), *files]
    if run is not None:
        base = load_known(EvaluateSettings, config_of(run, "--run"))
        for key in ("run", "log_dir", "evaluate"):
            base.pop(key, None)
        base |= {"model": str(RunFolder.model_in(run)), "servers": []}
    if paths:
        kinds = {"parquet" if path.suffix == ".parquet" else "jsonl" for path in paths}
        if len(kinds) > 1:
            raise SettingsError("--tasks: give files of one kind only, .jsonl or .parquet")
        paths_json = json.dumps([str(path) for path in paths], ensure_ascii=False)
        overrides = [f"tasks.kind={kinds.pop()}", f"tasks.paths={paths_json}", "tasks.held_out=0",
                     "tasks.held_out_split=", *overrides]  # fmt: skip
    return load_settings(EvaluateSettings, files, overrides, base=base)


async def _plan(settings: EvaluateSettings, *, is_new: bool) -> int:
    """Print what the evaluation would find at its start, and how much it would sample."""
    tasks: list[Task] = []
    findings = Findings()
    with findings.of("refused"):
        check_settings(settings)
    if settings.endpoint.url:
        await _check_endpoint(settings.endpoint, findings)
    elif not settings.servers:
        with findings.of("missing"):
            require_servers(settings.server)

    def open_tasks(_: Sequence[Environment | None]) -> list[Task]:
        tasks.extend(chosen_tasks(settings))
        return tasks

    await check_start(settings, findings, open_tasks, is_new=is_new)
    status = findings.print()
    if not tasks:
        return status
    k, max_tokens = settings.evaluate.num_samples, settings.budget.max_response_tokens
    by = settings.endpoint.url or "agentloop"
    sets = sorted({task.env or task.source for task in tasks})
    print(f"tasks      {len(tasks):,} ({', '.join(sets)})")
    print(f"samples    {k} per task, {len(tasks) * k:,} in total, by {by}")
    print(f"tokens     at most {max_tokens:,} per sample, {len(tasks) * k * max_tokens:,} in total")
    return status


async def _check_endpoint(settings: EndpointSettings, findings: Findings) -> None:
    """Add why an endpoint cannot be asked; a model that is named need not be listed."""
    soon = settings.model_copy(update={"timeout_s": min(settings.timeout_s, _ENDPOINT_S)})
    try:
        client = OpenAIClient(soon)
        try:
            await client.only_model()
        finally:
            await client.aclose()
    except ServerError as error:
        findings.add("missing", str(error))
    except AgentLoopError as error:
        if not settings.model:
            findings.add("refused", str(error))


async def _evaluate(
    read: Callable[[], EvaluateSettings], resume: Path | None, as_json: bool
) -> int:
    settings = read()
    with ProgressLine("Starting to evaluate") as progress:
        if settings.sampling.temperature == 0 and settings.evaluate.num_samples > 1:
            progress.say("At temperature 0 all samples of a task are practically the same")
        folder, summary = await evaluate(settings, progress, resume=resume)
        progress.say(f"The run is in {folder}")
    if as_json:
        print(json.dumps(summary.to_dict(), ensure_ascii=False))
    elif sys.stdout.isatty():
        _print_table(summary)
    else:
        print(text(summary), end="")
    return 1 if summary.all.num_missing else 0


def _print_table(summary: Results) -> None:
    from rich.console import Console
    from rich.table import Table

    head, *rows = table(summary)
    grid = Table(*head, title=f"{summary.sampled.model}, by {summary.sampled.by}")
    for cells in rows:
        grid.add_row(*cells)
    out = Console()
    out.print(grid)
    for note in notes(summary):
        out.print(note, markup=False, highlight=False)
