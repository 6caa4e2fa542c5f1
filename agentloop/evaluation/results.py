"""Report the results of an evaluation by set of tasks, as data and as text. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from agentloop.evaluation.estimate import Estimate, avg_at_k, pass_at_k, sampling_error
from agentloop.evaluation.loop import EvaluationSettings, Outcome
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


@dataclass(frozen=True, slots=True)
class Sampled:
    """The source of the samples: the model, who served it, its environments and settings."""

    model: str
    by: str
    environments: Sequence[Mapping[str, object]]
    tools: Sequence[str]
    sampling: Mapping[str, object]
    budget: Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Results:
    """The results of an evaluation.

    Attributes:
        all, sets: figures of all tasks, and of each set of them by its name.
        missing: number of missing samples by the reason, the most frequent reasons first.
        versions: versions of the weights that sampled.
    """

    sampled: Sampled
    num_samples: int
    confidence: float
    all: Figures
    sets: Mapping[str, Figures]
    missing: Mapping[str, int]
    versions: Sequence[str]

    def to_dict(self) -> dict[str, object]:
        """Return the results as plain data for JSON, what was sampled first."""
        row = asdict(self)
        return {**row.pop("sampled"), **row}


def results(outcomes: Sequence[Outcome], settings: EvaluationSettings, sampled: Sampled) -> Results:
    """Return all results."""
    sets: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        sets.setdefault(outcome.task.env or outcome.task.source or "tasks", []).append(outcome)
    rollouts = [rollout for outcome in outcomes for rollout in outcome.rollouts]
    reasons = Counter(rollout.reason for rollout in rollouts if rollout.reward is None)
    for outcome in outcomes:
        if outcome.refused:
            reason = f"the task could not be sampled: {outcome.refused}"
            reasons[reason] += settings.num_samples
    return Results(
        sampled,
        settings.num_samples,
        settings.confidence,
        figures_of(outcomes, settings),
        {name: figures_of(sets[name], settings) for name in sorted(sets)},
        dict(reasons.most_common(_MAX_REASONS)),
        sorted({version for rollout in rollouts for version in rollout.versions}),
    )


def table(results: Results) -> list[list[str]]:
    """Return rows of cells; the first row names the sets, the first column the metrics."""
    whole, sets = results.all, dict(results.sets)
    if len(sets) != 1:
        sets["all"] = whole
    columns = list(sets.values())
    rows = [
        ["", *sets],
        ["tasks", *(str(figures.num_tasks) for figures in columns)],
        [f"avg@{results.num_samples}", *(_estimate(figures.avg_at_k) for figures in columns)],
    ]
    for at in whole.pass_at_k:
        rows.append([f"pass@{at}", *(_estimate(figures.pass_at_k[at]) for figures in columns)])
    for part in whole.parts:
        rows.append([f"part {part}", *(mean(figures.parts.get(part)) for figures in columns)])
    for key in whole.recorded:
        rows.append([f"recorded {key}", *(mean(figures.recorded.get(key)) for figures in columns)])
    rows += [
        ["samples", *(str(figures.num_samples) for figures in columns)],
        ["missing", *(str(figures.num_missing) for figures in columns)],
        ["tokens, mean", *(_figure(figures.length_mean, ",.0f") for figures in columns)],
        ["turns, mean", *(_figure(figures.turns_mean, ".1f") for figures in columns)],
        ["out of budget", *(percent(figures.truncated) for figures in columns)],
        [
            "tool errors in correct rollouts",
            *(percent(figures.tool_errors_in_correct) for figures in columns),
        ],
    ]
    return rows


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _estimate(estimate: Estimate | None) -> str:
    return "-" if estimate is None else str(estimate)


def notes(results: Results) -> list[str]:
    """Return explanations of the table, one per line."""
    lines = [
        f"In brackets: the {100 * results.confidence:g}% confidence interval for the population of "
        "problems from which the tasks are drawn.",
    ]
    if error := results.all.sampling_error:  # 0 means equal samples, not certainty
        lines.append(
            f"Standard error of avg@{results.num_samples} over new samples of the same tasks: "
            f"{error:.3f}."
        )
    if num_filtered := results.all.num_filtered:
        lines.append(
            "Samples that the endpoint's content filter cut off, scored as they are: "
            f"{num_filtered}."
        )
    lines += [f"Missing samples, {count}: {reason}" for reason, count in results.missing.items()]
    if len(results.versions) > 1:
        lines.append(
            "The weights changed during the evaluation: tokens were sampled with the versions "
            f"{', '.join(results.versions)}."
        )
    return lines


def text(results: Results) -> str:
    """Return the table and its notes as plain text."""
    rows = table(results)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()
        for cells in rows
    ]
    return "\n".join([*lines, "", *notes(results)]) + "\n"


def markdown(results: Results) -> str:
    """Return the table and its notes as a Markdown page."""
    head, *rows = [[cell.replace("|", "\\|") for cell in cells] for cells in table(results)]
    lines = [f"# {results.sampled.model}, by {results.sampled.by}", ""]
    lines += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    lines += [f"| {' | '.join(cells)} |" for cells in rows]
    options = {**results.sampled.sampling, **results.sampled.budget}
    settings = ", ".join(f"{name} {value}" for name, value in options.items() if value is not None)
    return "\n".join([*lines, "", *notes(results), "", f"Sampled with {settings}.", ""])
