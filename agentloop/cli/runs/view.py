"""`agentloop runs view RUN`, or `--sample`: serve or export the web page of a run."""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from functools import partial
from pathlib import Path
from urllib.parse import quote

import anyio
import pydantic
from aiohttp import web

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.analysis.run_list import RunKind, RunState, summarize
from agentloop.cli import console
from agentloop.config import load_known, load_settings, with_values
from agentloop.distribution import version
from agentloop.errors import ModelError, NotThere, RunFolderError, SettingsError
from agentloop.launch.progress import ProgressLine
from agentloop.models import SMALL
from agentloop.observe.archive import Archive
from agentloop.observe.bottleneck import ServedOn, served_on
from agentloop.observe.one_file import one_file
from agentloop.observe.page import Page
from agentloop.observe.perfetto import trace_of
from agentloop.observe.runs import origin_of, read_metrics
from agentloop.observe.sample import SAMPLE
from agentloop.plain_json import dumps
from agentloop.serving.access import ApiGuard, ServeSettings
from agentloop.serving.listen import bind, serving
from agentloop.training.run.folder import RunFolder, config_of
from agentloop.training.run.learning import headline
from agentloop.training.run.status import count_of

_NUM_EXPORTED = 500


class ViewSettings(pydantic.BaseModel):
    """The settings of `agentloop runs view`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    serve: ServeSettings = pydantic.Field(default_factory=ServeSettings)


class _ModelSettings(pydantic.BaseModel):
    """The settings of a run that determine how its tokens are decoded, and what sampled them."""

    model: str | None = None
    chat: ChatSettings = pydantic.Field(default_factory=ChatSettings)
    servers: list[str] = []
    server: dict[str, object] = {}
    endpoint: dict[str, object] = {}

    @property
    def served_on(self) -> ServedOn:
        if self.endpoint.get("url"):
            return ServedOn.ENDPOINT
        return served_on(self.servers, str(self.server.get("device", "auto")))


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="agentloop runs view",
        description="Show a run as a web page: its curves, groups and trajectories.",
    )
    parser.add_argument("run", type=Path, nargs="?", help="the run's folder, such as runs/latest")
    parser.add_argument(
        "--sample",
        action="store_true",
        help="show the small recorded run that ships with agentloop",
    )
    parser.add_argument(
        "--export",
        metavar="FILE.html",
        type=Path,
        help="write the page and its data into one HTML file, and exit",
    )
    parser.add_argument(
        "--perfetto",
        metavar="FILE.json",
        type=Path,
        help="write the rollouts' timelines into a file for https://ui.perfetto.dev, and exit",
    )
    parser.add_argument(
        "--rollouts",
        metavar="N",
        type=console.at_least(0),
        default=_NUM_EXPORTED,
        help="with --export: include the texts of the newest N rollouts "
        f"(default: {_NUM_EXPORTED})",
    )
    console.add_settings_arguments(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.list_settings:
        print(console.settings_text(ViewSettings))
        return 0
    run: Path | None = options.run
    if options.sample:
        if run is not None:  # it is a setting then, if anything
            options.settings.insert(0, str(run))
        run = SAMPLE
    if run is None:
        parser.error("expected the run's folder, such as runs/latest, or --sample")
    if options.perfetto is not None and options.export is not None:
        parser.error("--perfetto and --export: give one of them")
    if options.perfetto is not None:
        return console.run(lambda: _export_trace(run, options.perfetto))
    if options.export is not None:
        return console.run(lambda: _export(run, options.export, options.rollouts))
    return console.run(lambda: _view(run, options.settings))


async def _view(run: Path, arguments: list[str]) -> int:
    settings = load_settings(ViewSettings, *console.split_settings(arguments))
    archive = await _open_archive(run)
    with bind(settings.serve, or_free=True) as bound:
        app = web.Application()
        ApiGuard(settings.serve).add_to(app)
        Page(archive, io_timeout_s=settings.serve.io_timeout_s).add_to(app)
        async with serving(app, bound) as url:
            print(f"Showing {archive.folder.name} at {url}/; press Ctrl-C to stop.", flush=True)
            await anyio.sleep_forever()  # no deadline: serves until it is stopped
    return 0


async def _export(run: Path, out: Path, num_rollouts: int) -> int:
    with ProgressLine(f"Reading {run}", after_s=2.0) as progress:
        archive = await _open_archive(run)
        frame = await archive.frame()
        bodies: dict[str, object] = {"api/frame": frame, "api/runs": {"runs": []}}
        bodies[f"api/curves?run={_quote_name(archive.folder.name)}"] = {
            "run": archive.folder.name,
            "rows": frame["steps"],
            **origin_of(archive.folder),
        }
        for group in frame["groups"]:
            bodies[f"api/groups/{_quote_name(group['id'])}"] = await archive.group(group["id"])
        keys = [row["id"] for row in frame["rollouts"]][-num_rollouts:] if num_rollouts else []
        for number, key in enumerate(keys, 1):
            progress(f"Reading rollout {number} of {len(keys)}")
            with contextlib.suppress(NotThere):  # the rollout's record is damaged
                bodies[f"api/rollouts/{_quote_name(key)}"] = await archive.rollout(key)
    num_texts = sum(path.startswith("api/rollouts/") for path in bodies)
    html = await anyio.to_thread.run_sync(one_file, bodies)
    await _write(html, out, "--export")
    print(f"{out}: {len(html.encode()) / 1e6:.1f} MB, {count_of(num_texts, 'rollout')} with text")
    return 0


async def _export_trace(run: Path, out: Path) -> int:
    with ProgressLine(f"Reading {run}", after_s=2.0):
        frame = await (await _open_archive(run)).frame()
        trace = await anyio.to_thread.run_sync(trace_of, frame)
    await _write(dumps(trace).decode(), out, "--perfetto")
    print(
        f"{out}: {count_of(len(frame['rollouts']), 'rollout')}; open it at https://ui.perfetto.dev"
    )
    return 0


async def _write(text: str, out: Path, option: str) -> None:
    """Write a file.

    Raises:
        SettingsError: it cannot be written.
    """
    try:
        await anyio.Path(out).write_text(text, "utf-8")
    except OSError as error:
        raise SettingsError(f"{option}: {out}: {error.strerror or error}") from error


def _quote_name(name: str) -> str:
    """Quote a name as the page does, with JavaScript's `encodeURIComponent`."""
    return quote(name, safe="!~*'()")


async def _open_archive(run: Path) -> Archive:
    """Open a run's folder.

    Raises:
        RunFolderError: there is no run.
        SettingsError: the run's settings are invalid.
    """
    return await anyio.to_thread.run_sync(_read_archive, run)


def _read_archive(run: Path) -> Archive:
    config = config_of(run.expanduser())
    folder = config.parent.resolve()
    description: dict[str, object] = {
        "kind": "view",
        "of": str(summarize(folder).kind),
        "title": folder.name,
        "version": f"agentloop {version()}",
        "can_ask": False,
        "controls": [],
        "has_sandbox": False,
    }
    values = load_known(_ModelSettings, config)
    settings = with_values(_ModelSettings(), values, source=str(config))
    description |= origin_of(folder)
    return Archive(
        folder,
        description,
        _chat_of(folder, settings),
        partial(_progress, folder),
        settings.served_on,
        _read_archive,
    )


def _progress(folder: Path) -> dict[str, object]:
    """Return the total of a run's steps, and how it has ended, in the words of the live page."""
    summary = summarize(folder)
    progress: dict[str, object] = {}
    if learning := headline(read_metrics(folder)):
        progress["learning"] = asdict(learning)
    if summary.num_steps is not None:
        progress["num_steps"] = summary.num_steps
    has_end = summary.kind in (RunKind.TRAIN, RunKind.SFT, RunKind.EVALUATE)
    if has_end and summary.state is not RunState.RUNNING:
        progress["ended"] = {"state": str(summary.state), "text": ". ".join(summary.problems)}
    return progress


def _chat_of(folder: Path, settings: _ModelSettings) -> ChatFormat | None:
    """Return the chat format of the run's newest or initial model, or None if both are missing."""
    candidates = [Path(settings.model or SMALL), SMALL]
    with contextlib.suppress(RunFolderError):  # it has published no weights
        candidates.insert(0, RunFolder.model_in(folder))
    for model in filter(Path.is_dir, candidates):
        with contextlib.suppress(ModelError):
            return ChatFormat.load(model, settings.chat)
    return None
