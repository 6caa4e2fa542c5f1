"""Pure: whether a run has collapsed, by stated rules, and what to tell people who find it stopped.

    metrics of each step ──> running medians ──> rules ──> bad for `patience` steps ──> Verdict

rStar2-Agent's policy and reward collapsed after step 510 (arXiv 2508.20722); what is learned from
there on is worth nothing. The rules:

    reward       the reward has fallen by more than `reward_fall` of its best
    entropy_low  the policy is sure of itself (`entropy_low` of its highest entropy) and has not
                 solved its tasks: what it never tries, it never learns
    entropy_high the reward sags, and the entropy is `entropy_high` times what it was at its best
    gradient     the reward sags, and so it is with the norm of the gradients
    truncated    the reward sags, and `truncated_rise` more of the rollouts come to no end
    mismatch     what is learned from is not what the policy samples: `mismatch_max`

Why they rarely speak without cause:

- Each looks at the running median of `window` steps, so that outliers, as long as they are fewer
  than half of it, move nothing; and it must be bad for `patience` steps in a row.
- A policy that learns gets other entropies, larger gradients and longer answers: tenfold, in runs
  of the small model. So these say something only together with a reward that sags, and are held
  against what they were when the reward was at its best, not at the start. The two rules that need
  no sagging reward begin to count anew with each new best.
- A fall counts from `min_fall` on: half of next to nothing is noise. So a run that begins with
  nothing for long, and one that has solved everything, are left alone.
- A stage begins with a clean sheet: its tasks are others. A step that lacks a metric says nothing
  of it: where nothing was learned, there is no entropy.

Not covered: a reward that never rose, and one that is hacked and goes up.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

import pydantic

from agentloop.errors import AgentLoopError
from agentloop.training.figures import percent

__all__ = [
    "Collapse",
    "CollapseSettings",
    "Rule",
    "RunCollapsed",
    "Verdict",
    "checkpoint_before",
    "report",
]

Row = Mapping[str, Any]
"""A step, as it stands in metrics.jsonl."""


class CollapseSettings(pydantic.BaseModel):
    """When a run has collapsed, and stops. All of it is about medians of the last steps."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    enabled: bool = pydantic.Field(True, description="false: a run is never stopped for this.")
    window: int = pydantic.Field(9, ge=1, description="Steps of which the median is taken.")
    patience: int = pydantic.Field(10, ge=1, description="Bad steps in a row that are a collapse.")
    reward_fall: float = pydantic.Field(
        0.5, gt=0, description="The reward has fallen by more than this share of its best."
    )
    reward_sag: float = pydantic.Field(
        0.15,
        gt=0,
        description="By more than this share: a collapse if entropy, gradients or truncated "
        "rollouts say so, too.",
    )
    min_fall: float = pydantic.Field(
        0.1, ge=0, description="A smaller fall of the reward is none, whatever its share."
    )
    reward_solved: float = pydantic.Field(
        0.9, description="From this reward on a policy may be as sure of itself as it likes."
    )
    entropy_low: float = pydantic.Field(
        0.02,
        ge=0,
        lt=1,
        description="Entropy below this fraction of its maximum counts as collapsed; 0 disables.",
    )
    entropy_high: float = pydantic.Field(
        5.0, gt=1, description="Entropy, in multiples of what it was at the best reward."
    )
    grad_norm_high: float = pydantic.Field(
        10.0,
        gt=1,
        description="Norm of the gradients, in multiples of what it was at the best reward. A step "
        "that was skipped, for it was not finite, counts as more than any.",
    )
    truncated_rise: float = pydantic.Field(
        0.3,
        gt=0,
        description="Share of rollouts that are truncated, above that at the best reward.",
    )
    mismatch_max: float = pydantic.Field(
        0.1, gt=0, description="KL per token between the engine, when it sampled, and the policy."
    )


class Rule(StrEnum):
    REWARD = "reward"
    ENTROPY_LOW = "entropy_low"
    ENTROPY_HIGH = "entropy_high"
    GRADIENT = "gradient"
    TRUNCATED = "truncated"
    MISMATCH = "mismatch"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The run has collapsed.

    Attributes:
        why: in plain words, with the numbers.
        step: the one after which it was found.
        since: the first of the bad steps in a row.
        last_good: the last step at which nothing was bad, or None. A median speaks of the middle
            of its window, so this is `window // 2` steps before the medians left the good.
    """

    rule: Rule
    why: str
    step: int
    since: int
    last_good: int | None


class RunCollapsed(AgentLoopError):
    """What a run is stopped with; the message says why, and where the report is."""


_REWARD = "reward"
_ENTROPY = "learner/entropy"
_GRADIENT = "learner/grad_norm"
_MISMATCH = "learner/mismatch_kl"
_TRUNCATED = "truncated"
_METRICS = (_REWARD, _ENTROPY, _GRADIENT, _MISMATCH, _TRUNCATED)


@dataclass(slots=True)
class _Bad:
    """Steps in a row that a rule calls bad."""

    since: int
    count: int = 0


class Collapse:
    """Tell it of each step (`seen`), in order."""

    def __init__(self, settings: CollapseSettings) -> None:
        self._settings = settings
        self._stage: object = None
        self._last_good: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._windows = {name: deque[float](maxlen=self._settings.window) for name in _METRICS}
        self._steps: deque[int] = deque(maxlen=self._settings.window)  # those of the rewards
        self._best = -math.inf
        self._at_best: dict[str, float] = {}
        self._highest_entropy = 0.0
        self._bad: dict[Rule, _Bad] = {}

    @classmethod
    def replay(cls, settings: CollapseSettings, rows: Iterable[Row], *, step: int) -> Self:
        """As it stood after `step`, from which a run goes on: what came later was undone."""
        collapse = cls(settings)
        for row in _lived(rows):
            if row["step"] <= step:
                collapse.seen(row)
        return collapse

    def seen(self, row: Row) -> Verdict | None:
        """After a step. Rows of other things, such as evaluations, are passed over.

        A `stage` that is another than before, or a row of tasks that were filtered for one, begins
        a stage.
        """
        if not self._settings.enabled:
            return None
        if "filter/num_left" in row:
            self._begin()
        if _REWARD not in row:
            return None
        if row.get("stage") != self._stage:
            self._stage = row.get("stage")
            self._begin()
        found = {name: value for name in _METRICS if (value := _value(row, name)) is not None}
        for name, value in found.items():
            self._windows[name].append(value)
        step: int = row["step"]
        if _REWARD in found:
            self._steps.append(step)
        now = {
            name: statistics.median(window)
            for name, window in self._windows.items()
            if len(window) == window.maxlen
        }
        if _REWARD not in now:
            return None
        self._remember(now)
        bad = {rule: (name, why) for rule, name, why in self._rules(now)}
        for rule in self._bad.keys() - bad.keys():
            del self._bad[rule]
        if not bad and not self._fell_by(now, self._settings.reward_sag):
            self._last_good = self._steps[len(self._steps) // 2]
        return self._judge(step, bad, found)

    def _remember(self, now: Mapping[str, float]) -> None:
        self._highest_entropy = max(self._highest_entropy, now.get(_ENTROPY, 0.0))
        if now[_REWARD] > self._best:
            self._bad.clear()  # it learns
        if now[_REWARD] >= self._best:
            self._best = now[_REWARD]
            self._at_best |= now

    def _judge(
        self, step: int, bad: Mapping[Rule, tuple[str, str]], found: Mapping[str, float]
    ) -> Verdict | None:
        verdict = None
        for rule, (name, why) in bad.items():
            if name not in found:
                continue
            one = self._bad.setdefault(rule, _Bad(step))
            one.count += 1
            if one.count >= self._settings.patience and verdict is None:
                verdict = Verdict(rule, why, step, one.since, self._last_good)
        return verdict

    def _fell_by(self, now: Mapping[str, float], share: float) -> bool:
        fall = self._best - now[_REWARD]
        return fall > max(share * abs(self._best), self._settings.min_fall)

    def _rules(self, now: Mapping[str, float]) -> Iterator[tuple[Rule, str, str]]:
        """Those that call this step bad: with the metric that they are about, and why."""
        s = self._settings
        reward = f"the reward fell from {self._best:.3g} to {now[_REWARD]:.3g}"
        if self._fell_by(now, s.reward_fall):
            yield Rule.REWARD, _REWARD, reward
        entropy = now.get(_ENTROPY, math.nan)  # of which nothing is true
        if entropy < s.entropy_low * self._highest_entropy and now[_REWARD] < s.reward_solved:
            why = f"the entropy fell from {self._highest_entropy:.3g} to {entropy:.3g}"
            yield Rule.ENTROPY_LOW, _ENTROPY, f"{why}, at a reward of {now[_REWARD]:.3g}"
        if (mismatch := now.get(_MISMATCH, 0.0)) > s.mismatch_max:
            why = f"the KL between engine and policy is {mismatch:.3g} per token"
            yield Rule.MISMATCH, _MISMATCH, why
        if not self._fell_by(now, s.reward_sag):
            return
        for rule, name, what, factor in (
            (Rule.ENTROPY_HIGH, _ENTROPY, "the entropy", s.entropy_high),
            (Rule.GRADIENT, _GRADIENT, "the norm of the gradients", s.grad_norm_high),
        ):
            usual = self._at_best.get(name, math.nan)
            if now.get(name, math.nan) > factor * usual:
                yield rule, name, f"{what} rose from {usual:.3g} to {now[name]:.3g}, and {reward}"
        usual = self._at_best.get(_TRUNCATED, math.nan)
        if now.get(_TRUNCATED, math.nan) > usual + s.truncated_rise:
            many = f"from {percent(usual)} to {percent(now[_TRUNCATED])}"
            why = f"truncated rollouts rose {many}, and {reward}"
            yield Rule.TRUNCATED, _TRUNCATED, why


def _value(row: Row, name: str) -> float | None:
    """None where it is missing, or is no number: JSON has none for what is not finite."""
    if name == _GRADIENT and row.get("learner/skipped"):
        return math.inf
    value = row.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def _lived(rows: Iterable[Row]) -> list[Row]:
    """Without the steps that were undone: a run that goes on from an earlier step writes them
    anew, below."""
    kept: list[Row] = []
    newest = -1
    for row in rows:
        if _REWARD in row:
            if row["step"] <= newest:
                kept = [old for old in kept if old["step"] < row["step"]]
            newest = row["step"]
        kept.append(row)
    return kept


def checkpoint_before(verdict: Verdict, checkpoints: Iterable[int]) -> int | None:
    """The step of the checkpoint to go on from, or None where all are too young.

    A step's rollouts are of the weights that the step before it left, so the last good step
    speaks of a checkpoint before it."""
    good = verdict.last_good
    return None if good is None else max((c for c in checkpoints if c < good), default=None)


_COLUMNS = {
    "reward": _REWARD,
    "entropy": _ENTROPY,
    "KL to the engine": _MISMATCH,
    "gradient": _GRADIENT,
    "length": "length_mean",
    "truncated": _TRUNCATED,
    "without reward": "num_without_reward",
}

_SOFTER = "a lower `learner.optimizer.lr`, or a smaller `learner.loss.clip_high`"

_TRY = {
    Rule.REWARD: (
        _SOFTER,
        "more rollouts for a step (`loop.tasks_per_step`), or younger ones, where steps overlap",
    ),
    Rule.ENTROPY_LOW: (
        "a larger `learner.loss.clip_high`, so that rare tokens can rise",
        "a small `learner.loss.entropy_coef`, such as 0.001",
        "harder tasks, or other ones: of what is always solved, or never, nothing is learned",
    ),
    Rule.ENTROPY_HIGH: (
        _SOFTER,
        "`learner.loss.entropy_coef = 0`, if it is set",
        "a look at the trajectories: noise that is rewarded is learned",
    ),
    Rule.GRADIENT: (_SOFTER, "a smaller `learner.optimizer.max_grad_norm`"),
    Rule.TRUNCATED: (
        "a larger `budget.max_response_tokens`, if the rollouts would have come to an end",
        "a look at the trajectories: rollouts that repeat themselves are a policy that has lost it",
        _SOFTER,
    ),
    Rule.MISMATCH: (
        "the same `learner.dtype` and `server.dtype`",
        "younger rollouts, where steps overlap",
        "a smaller `learner.loss.tis_cap`",
    ),
}


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield f"| step | {' | '.join(_COLUMNS)} |"
    yield "|" + "---|" * (len(_COLUMNS) + 1)
    for row in rows:
        values = [row.get(name) for name in _COLUMNS.values()]
        cells = ["-" if value is None else f"{value:.4g}" for value in values]
        yield f"| {row['step']} | {' | '.join(cells)} |"


def report(
    verdict: Verdict, rows: Iterable[Row], checkpoints: Iterable[int], *, num_steps: int = 10
) -> str:
    """For people, in Markdown: what happened, the last `num_steps` steps, where to go on from."""
    steps = [row for row in _lived(rows) if _REWARD in row and row["step"] <= verdict.step]
    good = verdict.last_good
    goes_on = checkpoint_before(verdict, checkpoints)
    return "\n".join(
        [
            f"# The run has collapsed at step {verdict.step}",
            "",
            f"{verdict.why[0].upper()}{verdict.why[1:]} (medians). So it has been since step "
            f"{verdict.since}. Rule: `{verdict.rule}`.",
            "",
            "No step was good." if good is None else f"The last good step was {good}.",
            "No checkpoint is from before it: start anew."
            if goes_on is None
            else f"Go on from the checkpoint of step {goes_on}, the last before it.",
            "",
            "## The last steps",
            "",
            *_table(steps[-num_steps:]),
            "",
            "## What to try",
            "",
            *(f"- {one}" for one in _TRY[verdict.rule]),
            "- if this is no collapse: `collapse.enabled = false`, or a bound that is further away",
            "",
        ]
    )
