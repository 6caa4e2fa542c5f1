"""Report the results of an evaluation by set of tasks, as data and as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agentloop.evaluation.estimate import Estimate, avg_at_k, pass_at_k, sampling_error
from agentloop.evaluation.loop import EvaluationSettings, Outcome
from agentloop.plain_json import JsonObject
from agentloop.rollouts.metrics import GroupFigures, about, mean, mean_parts, mean_recorded, percent

_MAX_REASONS = 20


@dataclass(frozen=True, slots=True)
class Figures:
    """Results of a set of tasks: those of an environment, or of a source.

    Attributes:
        avg_at_k: None if no task has a sample.
        pass_at_k: Estimate for each k, or None if no task has k samples.
        sampling_error: Standard error of avg@k over new samples of the same tasks.
        num_samples: Number of samples with a reward.
        num_missing: Number of samples without one, because of infrastructure failures or tasks that
            could not be sampled.
        parts: Mean of each named part of the reward.
        recorded: Mean of each value that the environment records.
        num_whole: Number of tasks without missing samples.
        length_mean: Mean number of sampled tokens; None: the endpoint does not count them. Means
            are over samples with a reward.
        truncated: Share of samples that reached the budget of tokens or turns.
        num_filtered: Number of samples that an endpoint's content filter cut off; they are scored.
        tool_errors_in_correct: Share of failed calls, averaged over correct samples with calls.
    """

    num_tasks: int
    num_whole: int
    num_refused: int
    num_samples: int
    num_missing: int
    avg_at_k: Estimate | None
    pass_at_k: Mapping[int, Estimate | None]
    sampling_error: float | None
    length_mean: float | None
    turns_mean: float | None
    truncated: float | None
    num_filtered: int
    tool_errors_in_correct: float | None
    parts: Mapping[str, float]
    recorded: Mapping[str, float]


def figures_of(outcomes: Sequence[Outcome], settings: EvaluationSettings) -> Figures:
    k = settings.num_samples
    rewards = [outcome.rewards for outcome in outcomes]
    groups = [GroupFigures(outcome.rollouts) for outcome in outcomes]
    metrics = about(groups)
    num_samples = sum(map(len, rewards))
    return Figures(
        num_tasks=len(outcomes),
        num_whole=sum(len(task_rewards) >= k for task_rewards in rewards),
        num_refused=sum(bool(outcome.refused) for outcome in outcomes),
        num_samples=num_samples,
        num_missing=sum(max(0, k - len(task_rewards)) for task_rewards in rewards),
        avg_at_k=avg_at_k(rewards, settings.confidence),
        pass_at_k={k: pass_at_k(rewards, k, settings.confidence) for k in settings.all_pass_at},
        sampling_error=sampling_error(rewards),
        length_mean=metrics.length_mean,
        turns_mean=metrics.turns_mean,
        truncated=metrics.truncated,
        num_filtered=sum(
            rollout.filtered
            for group in groups
            for rollout in group.rollouts
            if rollout.reward is not None
        ),
        tool_errors_in_correct=metrics.tool_errors_in_correct,
        parts=mean_parts(groups),
        recorded=mean_recorded(groups),
    )


def results(
    outcomes: Sequence[Outcome], settings: EvaluationSettings, description: Mapping[str, object]
) -> JsonObject:
    """Return all results for JSON, starting with `description`: the model and its settings."""
    sets: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sets.setdefault(outcome.task.env or outcome.task.source or "tasks", []).append(outcome)
    reasons = Counter(
        rollout.reason
        for outcome in outcomes
        for rollout in outcome.rollouts
        if rollout.reward is None
    )
    reasons.update(
        {f"the task could not be sampled: {outcome.refused}": settings.num_samples
         for outcome in outcomes if outcome.refused}
    )  # fmt: skip
    return {
        **description,
        "num_samples": settings.num_samples,
        "confidence": settings.confidence,
        "all": _data(figures_of(outcomes, settings)),
        "sets": {name: _data(figures_of(sets[name], settings)) for name in sorted(sets)},
        "missing": dict(reasons.most_common(_MAX_REASONS)),
        "versions": sorted({
            version
            for outcome in outcomes
            for rollout in outcome.rollouts
            for version in rollout.versions
        }),
    }  # fmt: skip


def _data(figures: Figures) -> dict[str, object]:
    data = asdict(figures)
    data["pass_at_k"] = {str(k): estimate for k, estimate in data["pass_at_k"].items()}
    return data


def table(data: JsonObject) -> list[list[str]]:
    """Return rows of cells; the first row names the sets, the first column the metrics."""
    sets: dict[str, JsonObject] = dict(data["sets"])
    if len(sets) != 1:
        sets["all"] = data["all"]
    k = data["num_samples"]

    def row(name: str, *cells: str) -> list[str]:
        return [name, *cells]

    columns = list(sets.values())
    rows = [
        row("", *sets),
        row("tasks", *(str(figures["num_tasks"]) for figures in columns)),
        row(f"avg@{k}", *(_estimate(figures["avg_at_k"]) for figures in columns)),
    ]
    for at in data["all"]["pass_at_k"]:
        rows.append(
            row(f"pass@{at}", *(_estimate(figures["pass_at_k"][at]) for figures in columns))
        )
    for part in data["all"]["parts"]:
        rows.append(row(f"part {part}", *(mean(figures["parts"].get(part)) for figures in columns)))
    for key in data["all"]["recorded"]:
        rows.append(
            row(f"recorded {key}", *(mean(figures["recorded"].get(key)) for figures in columns))
        )
    rows += [
        row("samples", *(str(figures["num_samples"]) for figures in columns)),
        row("missing", *(str(figures["num_missing"]) for figures in columns)),
        row("tokens, mean", *(_figure(figures["length_mean"], ",.0f") for figures in columns)),
        row("turns, mean", *(_figure(figures["turns_mean"], ".1f") for figures in columns)),
        row("out of budget", *(percent(figures["truncated"]) for figures in columns)),
        row(
            "tool errors in correct rollouts",
            *(percent(figures["tool_errors_in_correct"]) for figures in columns),
        ),
    ]
    return rows


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _estimate(estimate: dict[str, object] | None) -> str:
    return (
        "-"
        if estimate is None
        else f"{estimate['value']:.3f} [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    )


def notes(data: JsonObject) -> list[str]:
    """Return explanations of the table, one per line."""
    lines = [
        f"In brackets: the {100 * data['confidence']:g}% confidence interval for the population of "
        "problems from which the tasks are drawn.",
    ]
    if error := data["all"]["sampling_error"]:  # 0 means equal samples, not certainty
        lines.append(
            f"Standard error of avg@{data['num_samples']} over new samples of the same tasks: "
            f"{error:.3f}."
        )
    if num_filtered := data["all"]["num_filtered"]:
        lines.append(
            "Samples that the endpoint's content filter cut off, scored as they are: "
            f"{num_filtered}."
        )
    lines += [f"Missing samples, {count}: {reason}" for reason, count in data["missing"].items()]
    if len(data["versions"]) > 1:
        lines.append(
            "The weights changed during the evaluation: tokens were sampled with the versions "
            f"{', '.join(data['versions'])}."
        )
    return lines


def text(data: JsonObject) -> str:
    """Return the table and its notes as plain text."""
    rows = table(data)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]
    return "\n".join([*lines, "", *notes(data)]) + "\n"


def markdown(data: JsonObject) -> str:
    """Return the table and its notes as a Markdown page."""
    head, *rows = [[cell.replace("|", "\\|") for cell in cells] for cells in table(data)]
    lines = [f"# {data['model']}, by {data['by']}", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    options = {**data["sampling"], **data["budget"]}
    settings = ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    return "\n".join([*lines, "", *notes(data), "", f"Sampled with {settings}.", ""])
