"""What an evaluation says in the end: figures by set of tasks, as data and as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from agentloop.evaluation.estimate import Estimate, avg_at_k, pass_at_k, sampling_error
from agentloop.evaluation.loop import EvaluationSettings, Outcome
from agentloop.training.figures import about, percent

__all__ = ["Figures", "figures_of", "markdown", "notes", "results", "table", "text"]

_MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class Figures:
    """What is said of a set of tasks.

    Attributes:
        avg_at_k, pass_at_k: None where there is nothing to tell them of; the latter by its k.
        sampling_error: the standard error of avg@k over new samples of the same tasks.
        num_samples: those with a reward; num_missing: those without, by infrastructure; those of
            tasks that could not be asked count, too.
        num_whole: tasks none of whose samples is missing.
        length_mean: tokens sampled in a rollout; the means are over samples with a reward.
        truncated: the share that reached the budget of tokens or of turns.
        tool_errors_in_correct: failed calls by calls, the mean over right samples with a call.
    """

    num_tasks: int
    num_whole: int
    num_refused: int
    num_samples: int
    num_missing: int
    avg_at_k: Estimate | None
    pass_at_k: Mapping[int, Estimate | None]
    sampling_error: float | None
    length_mean: float
    turns_mean: float
    truncated: float
    tool_errors_in_correct: float | None


def figures_of(outcomes: Sequence[Outcome], settings: EvaluationSettings) -> Figures:
    k = settings.num_samples
    rewards = [outcome.rewards for outcome in outcomes]
    told = about([{"rejected": None, "rollouts": one.rollouts} for one in outcomes])
    num_samples = sum(map(len, rewards))
    return Figures(
        num_tasks=len(outcomes),
        num_whole=sum(len(one) >= k for one in rewards),
        num_refused=sum(bool(one.refused) for one in outcomes),
        num_samples=num_samples,
        num_missing=sum(max(0, k - len(one)) for one in rewards),
        avg_at_k=avg_at_k(rewards, settings.confidence),
        pass_at_k={k: pass_at_k(rewards, k, settings.confidence) for k in settings.all_pass_at},
        sampling_error=sampling_error(rewards),
        **{
            name: told[name]
            for name in ("length_mean", "turns_mean", "truncated", "tool_errors_in_correct")
        },
    )


def results(
    outcomes: Sequence[Outcome], settings: EvaluationSettings, about_it: Mapping[str, Any]
) -> dict[str, Any]:
    """All of it, for JSON; `about_it` comes first: who answered, and how it was asked."""
    sets: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sets.setdefault(outcome.task.source or "tasks", []).append(outcome)
    reasons = Counter(
        str(one["missing"])
        for outcome in outcomes
        for one in outcome.rollouts
        if one["reward"] is None
    )
    reasons.update(
        {f"it could not be asked: {one.refused}": settings.num_samples
         for one in outcomes if one.refused}
    )  # fmt: skip
    return {
        **about_it,
        "num_samples": settings.num_samples,
        "confidence": settings.confidence,
        "all": _data(figures_of(outcomes, settings)),
        "sets": {name: _data(figures_of(sets[name], settings)) for name in sorted(sets)},
        "missing": dict(reasons.most_common(_MAX_REASONS)),
        "versions": sorted({
            version
            for outcome in outcomes
            for one in outcome.rollouts
            for version in one.get("versions", ())
        }),
    }  # fmt: skip


def _data(figures: Figures) -> dict[str, Any]:
    told = asdict(figures)
    told["pass_at_k"] = {str(k): one for k, one in told["pass_at_k"].items()}
    return told


def table(told: Mapping[str, Any]) -> list[list[str]]:
    """Rows of cells: the first has the sets' names, the first cell of each says what it is."""
    sets: dict[str, Mapping[str, Any]] = dict(told["sets"])
    if len(sets) != 1:
        sets["all"] = told["all"]
    k = told["num_samples"]

    def row(name: str, *cells: str) -> list[str]:
        return [name, *cells]

    columns = list(sets.values())
    rows = [
        row("", *sets),
        row("tasks", *(str(one["num_tasks"]) for one in columns)),
        row(f"avg@{k}", *(_estimate(one["avg_at_k"]) for one in columns)),
    ]
    for at in told["all"]["pass_at_k"]:
        rows.append(row(f"pass@{at}", *(_estimate(one["pass_at_k"][at]) for one in columns)))
    rows += [
        row("samples", *(str(one["num_samples"]) for one in columns)),
        row("missing", *(str(one["num_missing"]) for one in columns)),
        row("tokens, mean", *(f"{one['length_mean']:,.0f}" for one in columns)),
        row("turns, mean", *(f"{one['turns_mean']:.1f}" for one in columns)),
        row("out of budget", *(percent(one["truncated"]) for one in columns)),
        row("tool errors in right", *(percent(one["tool_errors_in_correct"]) for one in columns)),
    ]
    return rows


def _estimate(one: Mapping[str, Any] | None) -> str:
    return "-" if one is None else f"{one['value']:.3f} [{one['low']:.3f}, {one['high']:.3f}]"


def notes(told: Mapping[str, Any]) -> list[str]:
    """What has to be known beside the table, a line each."""
    lines = [
        f"In brackets: the {100 * told['confidence']:g}% confidence interval over problems of "
        "which the tasks are a sample.",
    ]
    if error := told["all"]["sampling_error"]:  # 0 says that nothing differed, not that all is sure
        lines.append(
            f"avg@{told['num_samples']} of the same tasks, sampled anew: standard error "
            f"{error:.3f}."
        )
    lines += [f"Missing, {count}: {reason}" for reason, count in told["missing"].items()]
    if len(told["versions"]) > 1:
        lines.append(
            "The weights changed meanwhile: tokens are of the versions "
            f"{', '.join(told['versions'])}."
        )
    return lines


def text(told: Mapping[str, Any]) -> str:
    """The table and its notes, in columns of spaces."""
    rows = table(told)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]
    return "\n".join([*lines, "", *notes(told)]) + "\n"


def markdown(told: Mapping[str, Any]) -> str:
    """A page of it."""
    head, *rows = [[cell.replace("|", "\\|") for cell in cells] for cells in table(told)]
    lines = [f"# {told['model']}, by {told['by']}", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    asked = {**told["sampling"], **told["budget"]}
    said = ", ".join(f"{name} {value}" for name, value in asked.items() if value is not None)
    return "\n".join([*lines, "", *notes(told), "", f"Sampled with {said}.", ""])
