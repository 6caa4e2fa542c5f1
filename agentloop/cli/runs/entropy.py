"""`agentloop runs entropy RUN`: find the tokens at which a run's policy is uncertain.

the last groups ──> per-token entropies, cached or computed by a learner ──> tables or JSON

A learner is started only for groups whose entropies are not cached. It needs the same hardware as
the one that trains.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio.to_thread
import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.analysis.entropy import Analysis, Kind, TokenPosition, analyze, nearest_version
from agentloop.analysis.entropy_files import (
    EntropyFolder,
    GroupScores,
    Origin,
    RecordedRollout,
    group_files,
    read_rollouts,
    score,
)
from agentloop.cli import console
from agentloop.config import load_known, load_settings
from agentloop.distribution import require
from agentloop.errors import DataError, RunFolderError, SettingsError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.models import SMALL, not_a_model
from agentloop.plain_json import JsonObject
from agentloop.training.learner_client.client import start_learner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.settings import (
    LearnerSettings,
    LoraSettings,
    RlLearnerSettings,
    RlLossSettings,
)
from agentloop.training.loop_settings import LoopSettings
from agentloop.training.run_folder import config_of
from agentloop.training.run_status import count_of

__all__ = ["EntropyReport", "EntropySettings", "entropy", "main"]

_NUM_ROLLOUTS = 64  # the number the paper analyzes
_CONTEXT = 6  # tokens shown before an example
_SPACE = "\N{OPEN BOX}"
_KINDS = {
    Kind.FORKING: "text",
    Kind.REFLECTION: "text right after a tool response",
    Kind.CALL: "tool calls",
}


class EntropySettings(pydantic.BaseModel):
    """The settings of a training run that the analysis uses."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = pydantic.Field(None, description="Folder of the initial model.")
    chat: ChatSettings = pydantic.Field(default_factory=ChatSettings)
    sampling: Sampling = pydantic.Field(default_factory=Sampling)
    learner: RlLearnerSettings = pydantic.Field(default_factory=RlLearnerSettings)
    ranks: RanksSettings = pydantic.Field(default_factory=RanksSettings)
    loop: LoopSettings = pydantic.Field(default_factory=LoopSettings)


@dataclass(frozen=True, slots=True)
class EntropyReport:
    """The result of an analysis, with the data that it covers.

    Attributes:
        groups: numbers of the analyzed groups; `rollouts` holds their rollouts in the same order.
        origin: the weights that scored the tokens.
        versions: number of tokens sampled under each policy version.
        mismatch_kl: mean over all tokens of the KL divergence, in nats, from the policy that
            sampled them to `origin`.
        top: percentage of each rollout's tokens that is marked, those of the highest entropy.
    """

    run: Path
    groups: list[int]
    rollouts: list[RecordedRollout]
    origin: Origin
    versions: Mapping[str, int]
    mismatch_kl: float
    top: float
    analysis: Analysis


async def entropy(
    run: Path,
    settings: EntropySettings,
    progress: console.ProgressLine,
    *,
    num_groups: int | None = None,
    weights: Path | None = None,
    top: float = 20.0,
) -> EntropyReport:
    """Analyze the entropies of a run's most recent groups.

    Args:
        num_groups: number of groups; None: enough groups to hold 64 rollouts.
        weights: model folder to score with; None: the weights of the run whose version is nearest
            to the versions that sampled the tokens.
        top: percentage of each rollout's tokens to mark.

    Raises:
        DataError: there are no rollouts, or they are damaged.
        RunFolderError: the run has kept no weights.
        SettingsError: `weights` is not a model folder.
        LearnerError: the learner failed, as in `agentloop.training.learner_client.client`.
    """
    progress("Reading the rollouts")
    groups = await anyio.to_thread.run_sync(partial(_last_groups, run, num_groups))
    versions = Counter[str]()
    for rollouts in groups.values():
        for rollout in rollouts:
            versions.update(rollout.versions)
    origin = await anyio.to_thread.run_sync(
        partial(_origin, run, settings, versions, weights=weights)
    )
    scores = await _score_groups(run, settings, groups, origin, progress)
    progress("Counting the tokens")
    turns = [
        rollout.with_entropies(entropies)
        for number, rollouts in groups.items()
        for rollout, entropies in zip(rollouts, scores[number].entropies, strict=True)
    ]
    return EntropyReport(
        run=run,
        groups=list(groups),
        rollouts=[rollout for rollouts in groups.values() for rollout in rollouts],
        origin=origin,
        versions=versions,
        mismatch_kl=_mean_mismatch(groups, scores),
        top=top,
        analysis=await anyio.to_thread.run_sync(analyze, turns, top / 100),
    )


def _last_groups(run: Path, num_groups: int | None) -> dict[int, list[RecordedRollout]]:
    files = group_files(run)
    if not files:
        raise DataError(f"{run}: no trajectories/group-*.jsonl: expected a run with rollouts")
    rollouts_by_group: dict[int, list[RecordedRollout]] = {}
    for number, file in reversed(files.items()):
        enough = sum(map(len, rollouts_by_group.values())) >= _NUM_ROLLOUTS
        if len(rollouts_by_group) == num_groups or (num_groups is None and enough):
            break
        rollouts_by_group[number] = read_rollouts(file)
    if not any(
        sum(rollout.mask) for rollouts in rollouts_by_group.values() for rollout in rollouts
    ):
        last = count_of(len(rollouts_by_group), "group")
        raise DataError(f"{run}: no tokens were sampled in its last {last}")
    return dict(reversed(rollouts_by_group.items()))


def _origin(
    run: Path, settings: EntropySettings, versions: Mapping[str, int], *, weights: Path | None
) -> Origin:
    temperature = settings.sampling.temperature
    if weights is not None:
        if not (weights / "config.json").is_file():
            raise SettingsError(f"--weights: {not_a_model(weights)}")
        return Origin.of(weights, version=None, temperature=temperature)
    kept = {
        int(folder.name): folder
        for folder in (run / "weights").glob("*")
        if folder.name.isdecimal() and (folder / "config.json").is_file()
    }
    numbered = {int(version): num for version, num in versions.items() if version.isdecimal()}
    first = run / "sft" / "model"
    if not (first / "config.json").is_file():
        first = Path(settings.model or SMALL).expanduser()
    if (first / "config.json").is_file():
        if not kept and not numbered:  # an evaluation: its servers keep their initial weights
            return Origin.of(first, version=None, temperature=temperature)
        kept.setdefault(0, first)
    if not kept:
        raise RunFolderError(
            f"{run}: the run has kept no weights; pass a model folder as --weights"
        )
    version = nearest_version(numbered, kept)
    return Origin.of(kept[version], version=str(version), temperature=temperature)


async def _score_groups(
    run: Path,
    settings: EntropySettings,
    groups: Mapping[int, Sequence[RecordedRollout]],
    origin: Origin,
    progress: console.ProgressLine,
) -> dict[int, GroupScores]:
    folder = EntropyFolder(run)
    scores: dict[int, GroupScores] = {}
    for number, rollouts in groups.items():
        kept = await anyio.to_thread.run_sync(folder.load, number, rollouts, origin)
        if kept is not None:
            scores[number] = kept
    missing = [number for number in groups if number not in scores]
    if not missing:
        return scores
    require("train", {"torch": "entropies", "deepspeed": "entropies"})
    longest = max(len(rollout.ids) for number in missing for rollout in groups[number])
    of_run = settings.learner.model_copy(
        update={
            "micro_batch_tokens": max(settings.learner.micro_batch_tokens, longest),
            # Published weights are merged and new adapters are zero, so outputs do not change.
            # With adapters, gradients and optimizer state need next to no memory.
            "lora": LoraSettings(rank=1),
            "loss": RlLossSettings(),
        }
    )
    learner_settings = LearnerSettings.of(
        of_run,
        model=Path(origin.weights),
        chat_template=settings.chat.template,
        temperature=origin.temperature,
    )
    try:
        await anyio.to_thread.run_sync(partial(folder.path.mkdir, exist_ok=True))
    except OSError as error:
        raise RunFolderError(f"{folder.path}: {error.strerror or error}") from error
    # A log folder of its own, since the run may still be writing to its logs.
    async with start_learner(
        learner_settings,
        settings.ranks,
        log_dir=(folder.path / "logs").absolute(),
        on_progress=progress,
    ) as (learner, ranks):

        async def score_all() -> None:
            for done, number in enumerate(missing):
                progress(f"Scoring group {number}, {done + 1} of {len(missing)}")
                group_scores = await score(
                    learner,
                    groups[number],
                    folder.path.absolute(),
                    timeout_s=settings.loop.step_timeout_s,
                )
                await anyio.to_thread.run_sync(
                    folder.save, number, groups[number], origin, group_scores
                )
                scores[number] = group_scores

        await ranks.while_alive(score_all)
    return scores


def _mean_mismatch(
    groups: Mapping[int, Sequence[RecordedRollout]], scores: Mapping[int, GroupScores]
) -> float:
    nums = {number: sum(sum(rollout.mask) for rollout in groups[number]) for number in groups}
    total = sum(scores[number].mismatch_kl * num for number, num in nums.items())
    return total / sum(nums.values())


# --- output -------------------------------------------------------------------------------------


def as_data(report: EntropyReport, chat: ChatFormat, *, num_tokens: int) -> JsonObject:
    """Return the report as plain data: entropies in nats, shares from 0 to 1.

    Each kind lists its first `num_tokens` tokens.
    """
    analysis, origin = report.analysis, report.origin
    num_sampled = sum(report.versions.values())
    kinds = {}
    for kind, figures in analysis.kinds.items():
        tokens = [
            {
                "id": token.id,
                "text": chat.decode([token.id]),
                "num_tokens": token.num,
                "num_marked": token.num_marked,
                "share_of_marked": token.num_marked / figures.num_marked,
                "mean_entropy": token.mean_entropy,
                "example": _example(report, chat, token.highest),
            }
            for token in figures.tokens[:num_tokens]
        ]
        kinds[str(kind)] = {
            "num_tokens": figures.num,
            "num_marked": figures.num_marked,
            "share_of_tokens": _share(figures.num, analysis.num),
            "share_of_marked": _share(figures.num_marked, analysis.num_marked),
            "mean_entropy": figures.mean_entropy,
            "tokens": tokens,
        }
    return {
        "run": str(report.run),
        "groups": report.groups,
        "num_rollouts": analysis.num_rollouts,
        "top_percent": report.top,
        "weights": origin.weights,
        "version": origin.version,
        "temperature": origin.temperature,
        "versions": dict(Counter(report.versions).most_common()),
        "share_of_version": _share(report.versions.get(origin.version or "", 0), num_sampled),
        "mismatch_kl": report.mismatch_kl,
        "num_tokens": analysis.num,
        "num_marked": analysis.num_marked,
        "mean_entropy": analysis.mean_entropy,
        "threshold": analysis.threshold,
        "kinds": kinds,
    }


def _share(num: int, of: int) -> float:
    return num / of if of else 0.0


def _example(report: EntropyReport, chat: ChatFormat, place: TokenPosition) -> JsonObject:
    rollout = report.rollouts[place.rollout]
    ids = rollout.turns[place.turn].ids
    return {
        "rollout": rollout.id,
        "turn": place.turn,
        "token": place.token,
        "before": chat.decode(list(ids[max(0, place.token - _CONTEXT) : place.token])),
    }


def _print(data: JsonObject) -> None:
    for line in _summary_lines(data):
        print(line)
    columns: tuple[str, ...] = ("kind", "tokens", "marked", "share of marked", "mean entropy")
    rows: list[tuple[str, ...]] = [
        (
            f"{kind}: {_KINDS[Kind(kind)]}",
            f"{figures['num_tokens']:,}",
            f"{figures['num_marked']:,}",
            f"{figures['share_of_marked']:.1%}",
            f"{figures['mean_entropy']:.3g}",
        )
        for kind, figures in data["kinds"].items()
    ]
    print()
    console.print_table(columns, rows, numbers=columns[1:])
    columns = ("token", "marked", "of", "share of marked", "mean entropy", "after")
    for kind in (Kind.FORKING, Kind.REFLECTION):
        rows = [
            (
                _mark_spaces(token["text"]),
                f"{token['num_marked']:,}",
                f"{token['num_tokens']:,}",
                f"{token['share_of_marked']:.1%}",
                f"{token['mean_entropy']:.3g}",
                _mark_spaces(token["example"]["before"]),
            )
            for token in data["kinds"][kind]["tokens"]
        ]
        if rows:
            print()
            title = f"{kind} tokens: {_KINDS[kind]}"
            console.print_table(columns, rows, title=title, numbers=columns[1:-1])


def _summary_lines(data: JsonObject) -> list[str]:
    """Return lines about the scored tokens and the weights that scored them."""
    version = data["version"]
    versions = list(data["versions"])
    sampled = ", ".join(versions[:4]) + (" ..." if len(versions) > 4 else "")
    by, share = f"the model in {data['weights']}", ""
    if version is not None:
        by = f"version {version}, {data['weights']}"
        share = f" ({data['share_of_version']:.0%} of the tokens under the scoring version)"
    groups = data["groups"]
    return [
        f"tokens   {data['num_tokens']:,}, sampled in {count_of(data['num_rollouts'], 'rollout')} "
        f"of groups {groups[0]} to {groups[-1]} of {data['run']}",
        f"scored   by {by}; temperature {data['temperature']:g}",
        f"sampled  under version {sampled}{share}; KL divergence from the scoring weights "
        f"{data['mismatch_kl']:.2g} nats per token",
        f"entropy  {data['mean_entropy']:.3g} nats on average; the top {data['top_percent']:g}% "
        f"of each rollout are marked: those above {data['threshold']:.3g} nats (median)",
    ]


def _mark_spaces(text: str) -> str:
    """Return `text` with visible leading and trailing spaces: " word" and "word" differ."""
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    after = len(text) - len(inner) - before if inner else 0
    return _SPACE * before + console.printable(inner) + _SPACE * after


def main(arguments: list[str]) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="agentloop runs entropy",
        description="Find the tokens at which a run's policy is uncertain: those with the highest "
        "entropy in each rollout, separately for text (forking tokens), for text right after a "
        "tool response (reflection tokens) and for tool calls. The entropies are cached in "
        "RUN/entropy/.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, such as runs/latest")
    parser.add_argument(
        "settings",
        nargs="*",
        default=[],  # otherwise argparse reports it as required
        metavar="key=value",
        help="override one of the run's settings, such as ranks.nproc_per_node=1",
    )
    parser.add_argument(
        "--groups",
        type=_at_least_one,
        metavar="N",
        help=f"analyze the last N groups (default: enough for {_NUM_ROLLOUTS} rollouts)",
    )
    parser.add_argument(
        "--top",
        type=_percent,
        default=20.0,
        metavar="PERCENT",
        help="percentage of each rollout's tokens to mark (default: 20)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="model folder to score with (default: the run's weights nearest to those that "
        "sampled the tokens)",
    )
    parser.add_argument(
        "--tokens", type=_at_least_one, default=20, metavar="N", help="rows per table (default: 20)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_intermixed_args(arguments)
    return console.run(partial(_entropy, options))


async def _entropy(options: argparse.Namespace) -> int:
    run = options.run.expanduser()
    base = load_known(EntropySettings, config_of(run))
    settings = load_settings(EntropySettings, (), options.settings, base=base)
    with console.ProgressLine("Starting the analysis") as progress:
        report = await entropy(
            run,
            settings,
            progress,
            num_groups=options.groups,
            weights=options.weights,
            top=options.top,
        )
        chat = await anyio.to_thread.run_sync(ChatFormat.load, report.origin.weights, settings.chat)
    data = as_data(report, chat, num_tokens=options.tokens)
    if options.json:
        console.print_json(data)
    else:
        _print(data)
    return 0


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected an integer of at least 1")
    return int(text)


def _percent(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0 and up to 100")
    return value
