"""`agentloop runs entropy RUN`: find the tokens at which a run's policy is uncertain.

the last groups ──> per-token entropies, computed by a learner ──> one table, or JSON

The learner needs the same hardware as the one that trains.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import anyio.to_thread
import pydantic

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.chat_settings import ChatSettings
from agentloop.analysis.entropy import (
    Kind,
    KindFigures,
    ScoredRollout,
    TokenFigures,
    analyze,
    last_rollouts,
    score,
)
from agentloop.cli import console
from agentloop.config import load_known, load_settings
from agentloop.distribution import require
from agentloop.errors import RunFolderError, SettingsError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.launch.progress import ProgressLine
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
from agentloop.training.loop.settings import LoopSettings
from agentloop.training.run.folder import RunFolder, config_of
from agentloop.training.run.status import count_of
from agentloop.trajectory import Trajectory

_NUM_TOKENS = 20  # of each kind
_SPACE = "\N{OPEN BOX}"


class EntropySettings(pydantic.BaseModel):
    """The settings of a training run that the analysis uses."""

    model_config = pydantic.ConfigDict(extra="forbid")

    model: str | None = pydantic.Field(None, description="Folder of the initial model.")
    chat: ChatSettings = pydantic.Field(default_factory=ChatSettings)
    sampling: Sampling = pydantic.Field(default_factory=Sampling)
    learner: RlLearnerSettings = pydantic.Field(default_factory=RlLearnerSettings)
    ranks: RanksSettings = pydantic.Field(default_factory=RanksSettings)
    loop: LoopSettings = pydantic.Field(default_factory=LoopSettings)


def _weights_of(run: Path, settings: EntropySettings, weights: Path | None) -> Path:
    """Return the folder of the weights to score with."""
    if weights is None:
        try:
            return RunFolder.model_in(run)
        except RunFolderError:  # an evaluation, or the run has published no weights
            weights = Path(settings.model or SMALL).expanduser()
    if not (weights / "config.json").is_file():
        raise SettingsError(f"--weights: {not_a_model(weights)}")
    return weights


async def _score_groups(
    groups: Mapping[int, Sequence[Trajectory]],
    settings: EntropySettings,
    weights: Path,
    progress: ProgressLine,
) -> list[ScoredRollout]:
    require("train", {"torch": "entropies", "deepspeed": "entropies"})
    longest = max(len(rollout.ids) for rollouts in groups.values() for rollout in rollouts)
    of_run = settings.learner.model_copy(
        update={
            "micro_batch_tokens": max(settings.learner.max_sample_tokens, longest),
            # Published weights are merged and new adapters are zero, so outputs do not change.
            # With adapters, gradients and optimizer state need next to no memory.
            "lora": LoraSettings(rank=1),
            "loss": RlLossSettings(),
        }
    )
    learner_settings = LearnerSettings.of(
        of_run,
        model=weights,
        chat_template=settings.chat.template,
        temperature=settings.sampling.temperature,
    )
    scored: list[ScoredRollout] = []
    # Not in the run's folder, since the run may still be writing to it.
    with tempfile.TemporaryDirectory(prefix="agentloop-entropy-") as temporary:
        folder = Path(temporary)
        async with start_learner(
            learner_settings, settings.ranks, log_dir=folder / "logs", on_progress=progress
        ) as (learner, ranks):

            async def score_all() -> None:
                for number, rollouts in groups.items():
                    if rollouts:
                        progress(f"Scoring group {number}")
                        scored.extend(
                            await score(
                                learner, rollouts, folder, timeout_s=settings.loop.step_timeout_s
                            )
                        )

            await ranks.while_alive(score_all)
    return scored


def as_data(
    scored: Sequence[ScoredRollout],
    chat: ChatFormat,
    *,
    run: Path,
    groups: Sequence[int],
    weights: Path,
    temperature: float,
) -> dict[str, object]:
    """Return the analysis as plain data: entropies in nats, shares from 0 to 1."""
    kinds = analyze(scored)
    num_marked = sum(figures.num_marked for figures in kinds.values())
    mismatch = [value for rollout in scored for value in rollout.mismatch]
    return {
        "run": str(run),
        "groups": list(groups),
        "num_rollouts": len(scored),
        "weights": str(weights),
        "temperature": temperature,
        "mismatch_kl": statistics.fmean(mismatch),
        "num_tokens": len(mismatch),
        "num_marked": num_marked,
        "kinds": {
            str(kind): {
                **_figures(figures, num_marked),
                "tokens": [
                    {
                        "id": token.id,
                        "text": chat.decode([token.id]),
                        **_figures(token, figures.num_marked),
                    }
                    for token in figures.tokens[:_NUM_TOKENS]
                ],
            }
            for kind, figures in kinds.items()
        },
    }


def _figures(figures: KindFigures | TokenFigures, num_marked: int) -> dict[str, object]:
    return {
        "num_tokens": figures.num,
        "num_marked": figures.num_marked,
        "share_of_marked": figures.num_marked / num_marked,
        "mean_entropy": figures.mean_entropy,
    }


def _print(data: JsonObject) -> None:
    groups = data["groups"]
    print(
        f"{data['num_tokens']:,} tokens of {count_of(data['num_rollouts'], 'rollout')} in groups "
        f"{groups[0]} to {groups[-1]} of {data['run']}, scored by {data['weights']} at temperature "
        f"{data['temperature']:g}.\nKL divergence of these weights from those that sampled: "
        f"{data['mismatch_kl']:.2g} nats per token. Marked are each rollout's 20% of the highest "
        "entropy.\n"
    )
    columns = ("kind", "token", "marked", "of", "share", "mean entropy")
    rows = []
    for kind in Kind:
        of_kind = data["kinds"][kind]
        rows.append(_row(kind, "(all)", of_kind))
        if kind is not Kind.CALL:
            rows += [_row(kind, _mark_spaces(row["text"]), row) for row in of_kind["tokens"]]
    console.print_table(columns, rows, numbers=columns[2:])


def _row(kind: Kind, token: str, figures: dict[str, object]) -> tuple[str, ...]:
    return (
        str(kind),
        token,
        f"{figures['num_marked']:,}",
        f"{figures['num_tokens']:,}",
        f"{figures['share_of_marked']:.1%}",
        f"{figures['mean_entropy']:.3g}",
    )


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
        description="Find the tokens at which a run's policy is uncertain: the 20% with the "
        "highest entropy in each rollout, separately for text (forking tokens), for text right "
        "after a tool response (reflection tokens) and for tool calls.",
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
        type=console.at_least(1),
        metavar="N",
        help="analyze the last N groups (default: enough for 64 rollouts)",
    )
    parser.add_argument(
        "--weights",
        type=Path,
        metavar="FOLDER",
        help="model folder to score with (default: the run's newest weights)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_intermixed_args(arguments)
    return console.run(partial(_entropy, options))


async def _entropy(options: argparse.Namespace) -> int:
    run = options.run.expanduser()
    base = load_known(EntropySettings, config_of(run))
    settings = load_settings(EntropySettings, (), options.settings, base=base)
    with ProgressLine("Reading the rollouts") as progress:
        weights = _weights_of(run, settings, options.weights)
        groups = await anyio.to_thread.run_sync(last_rollouts, run, options.groups)
        scored = await _score_groups(groups, settings, weights.absolute(), progress)
        chat = await anyio.to_thread.run_sync(ChatFormat.load, str(weights), settings.chat)
    data = as_data(
        scored,
        chat,
        run=run,
        groups=list(groups),
        weights=weights,
        temperature=settings.sampling.temperature,
    )
    if options.json:
        console.print_json(data)
    else:
        _print(data)
    return 0
