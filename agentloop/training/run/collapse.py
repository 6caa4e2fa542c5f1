"""Detect that a run has collapsed, and write a report about it. Pure.

    metrics of each step ──> running medians ──> rules ──> violated for `patience` steps ──> Verdict

The policy and reward of rStar2-Agent collapsed after step 510 (arXiv 2508.20722); training beyond
such a point is wasted. The rules:

    reward       the reward has fallen by more than half of its best value
    entropy_low  the entropy has fallen to a fiftieth of its highest value although the tasks are
                 not solved: without exploration there is no further progress
    entropy_high the reward is declining, and the entropy is five times its value at the best reward
    gradient     the reward is declining, and the gradient norm is ten times its value at the best
                 reward; that of a skipped step counts as infinite
    truncated    the reward is declining, and the share of truncated rollouts has risen by 0.3 since
                 the best reward
    mismatch     the KL divergence between engine and learner is above 0.1 nats per token

The reward is declining if it has fallen by more than 15% of its best value.

False alarms are rare:

- Each rule looks at the running median of `window` steps, so outliers have no effect as long as
  they are fewer than half of the window; and it must be violated for `patience` steps in a row.
- A policy that learns changes its entropy, gradient norm and answer length, by a factor of ten in
  runs of the small model. So these metrics count only together with a declining reward, and are
  compared with their values at the best reward, not at the start. The two rules that do not need a
  declining reward start counting again with each new best.
- A fall of the reward counts only from 0.1 on, since half of a tiny reward is noise. So
  there is no alarm for a run that starts with no reward for long, nor for one that has solved all
  of its tasks.
- Each stage starts from a clean state, since its tasks differ. A step that lacks a metric is
  ignored for it: a step that trains on nothing has no entropy.

Not covered: a reward that never rose, and reward hacking, where it rises.
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
from agentloop.rollouts.metrics import percent

Row = Mapping[str, Any]
"""A row of metrics.jsonl."""


_MIN_FALL = 0.1  # a smaller fall of the reward is noise
_SOLVED = 0.9  # low entropy is expected from this reward on
_REWARD_FALL = 0.5  # of its best value
_REWARD_DECLINE = 0.15  # of its best value
_ENTROPY_LOW = 0.02  # of its highest value
_ENTROPY_HIGH = 5.0  # times its value at the best reward
_GRAD_NORM_HIGH = 10.0  # times its value at the best reward
_TRUNCATED_RISE = 0.3
_MISMATCH_MAX = 0.1  # nats per token
_NUM_REPORTED = 10  # steps


class CollapseSettings(pydantic.BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """Settings of the collapse detector."""

    window: int = pydantic.Field(
        9,
        ge=1,
        description="Number of steps in each running median. All rules compare such medians.",
    )
    patience: int = pydantic.Field(
        10,
        ge=0,
        description="Number of consecutive steps that must violate a rule before the run counts as "
        "collapsed and stops, at its last good checkpoint. 0: it never does.",
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
    """The finding that a run has collapsed.

    Attributes:
        why: explanation with the values.
        step: the step after which the collapse was detected.
        since: the first of the bad steps in a row.
        last_good: the last step at which no rule was violated, or None. A median stands for the
            middle of its window, so this is `window // 2` steps before the medians became bad.
    """

    rule: Rule
    why: str
    step: int
    since: int
    last_good: int | None


class RunCollapsed(AgentLoopError):
    """A run was stopped because it has collapsed; the message says why and names the report."""


_REWARD = "reward"
_ENTROPY = "learner/entropy"
_GRADIENT = "learner/grad_norm"
_MISMATCH = "learner/mismatch_kl"
_TRUNCATED = "truncated"
_METRICS = (_REWARD, _ENTROPY, _GRADIENT, _MISMATCH, _TRUNCATED)


@dataclass(slots=True)
class _Bad:
    """Consecutive steps at which a rule is violated."""

    since: int
    count: int = 0


class Collapse:
    """The collapse detector of a run. Pass it the metrics of each step, in order, with `seen`."""

    def __init__(self, settings: CollapseSettings) -> None:
        self._settings = settings
        self._stage: object = None
        self._last_good: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._windows = {name: deque[float](maxlen=self._settings.window) for name in _METRICS}
        self._steps: deque[int] = deque(maxlen=self._settings.window)  # steps of the rewards
        self._best = -math.inf
        self._at_best: dict[str, float] = {}
        self._highest_entropy = 0.0
        self._bad: dict[Rule, _Bad] = {}

    @classmethod
    def replay(cls, settings: CollapseSettings, rows: Iterable[Row], *, step: int) -> Self:
        """Rebuild the state after `step`, at which a run is resumed; later rows are ignored."""
        collapse = cls(settings)
        for row in rows:
            if row["step"] <= step:
                collapse.observe(row)
        return collapse

    def observe(self, row: Row) -> Verdict | None:
        """Process a row of metrics; return a verdict if the run has collapsed.

        Rows other than those of steps, such as evaluations, are ignored. A new value of `stage`,
        or a row about filtered tasks, starts a new stage.
        """
        if not self._settings.patience:
            return None
        if "filter/num_left" in row:
            self._begin()
        if _REWARD not in row:
            return None
        if row.get("stage") != self._stage:
            self._stage = row.get("stage")
            self._begin()
        values = {name: value for name in _METRICS if (value := _value(row, name)) is not None}
        for name, value in values.items():
            self._windows[name].append(value)
        step: int = row["step"]
        if _REWARD in values:
            self._steps.append(step)
        medians = {
            name: statistics.median(window)
            for name, window in self._windows.items()
            if len(window) == window.maxlen
        }
        if _REWARD not in medians:
            return None
        self._remember(medians)
        violations = {rule: (name, reason) for rule, name, reason in self._rules(medians)}
        for rule in self._bad.keys() - violations.keys():
            del self._bad[rule]
        if not violations and not self._fell_by(medians, _REWARD_DECLINE):
            self._last_good = self._steps[len(self._steps) // 2]
        return self._judge(step, violations, values)

    def _remember(self, medians: Mapping[str, float]) -> None:
        self._highest_entropy = max(self._highest_entropy, medians.get(_ENTROPY, 0.0))
        if medians[_REWARD] > self._best:
            self._bad.clear()  # a new best: the policy still improves
        if medians[_REWARD] >= self._best:
            self._best = medians[_REWARD]
            self._at_best |= medians

    def _judge(
        self, step: int, violations: Mapping[Rule, tuple[str, str]], values: Mapping[str, float]
    ) -> Verdict | None:
        verdict = None
        for rule, (name, reason) in violations.items():
            if name not in values:
                continue
            streak = self._bad.setdefault(rule, _Bad(step))
            streak.count += 1
            if streak.count >= self._settings.patience and verdict is None:
                verdict = Verdict(rule, reason, step, streak.since, self._last_good)
        return verdict

    def _fell_by(self, medians: Mapping[str, float], share: float) -> bool:
        fall = self._best - medians[_REWARD]
        return fall > max(share * abs(self._best), _MIN_FALL)

    def _rules(self, medians: Mapping[str, float]) -> Iterator[tuple[Rule, str, str]]:
        """Yield (rule, metric, explanation) for each rule that this step violates."""
        reward = f"the reward fell from {self._best:.3g} to {medians[_REWARD]:.3g}"
        if self._fell_by(medians, _REWARD_FALL):
            yield Rule.REWARD, _REWARD, reward
        entropy = medians.get(_ENTROPY, math.nan)  # comparisons with it are false
        if entropy < _ENTROPY_LOW * self._highest_entropy and medians[_REWARD] < _SOLVED:
            reason = f"the entropy fell from {self._highest_entropy:.3g} to {entropy:.3g}"
            yield Rule.ENTROPY_LOW, _ENTROPY, f"{reason}, at a reward of {medians[_REWARD]:.3g}"
        if (mismatch := medians.get(_MISMATCH, 0.0)) > _MISMATCH_MAX:
            reason = (
                f"the KL divergence between servers and learner is {mismatch:.3g} nats per token"
            )
            yield Rule.MISMATCH, _MISMATCH, reason
        if not self._fell_by(medians, _REWARD_DECLINE):
            return
        for rule, name, title, factor in (
            (Rule.ENTROPY_HIGH, _ENTROPY, "the entropy", _ENTROPY_HIGH),
            (Rule.GRADIENT, _GRADIENT, "the gradient norm", _GRAD_NORM_HIGH),
        ):
            usual = self._at_best.get(name, math.nan)
            if medians.get(name, math.nan) > factor * usual:
                yield (
                    rule,
                    name,
                    f"{title} rose from {usual:.3g} to {medians[name]:.3g}, and {reward}",
                )
        usual = self._at_best.get(_TRUNCATED, math.nan)
        if medians.get(_TRUNCATED, math.nan) > usual + _TRUNCATED_RISE:
            rise = f"from {percent(usual)} to {percent(medians[_TRUNCATED])}"
            reason = f"truncated rollouts rose {rise}, and {reward}"
            yield Rule.TRUNCATED, _TRUNCATED, reason


def _value(row: Row, name: str) -> float | None:
    """Return a metric, or None if it is missing or not a number (JSON has no infinities)."""
    if name == _GRADIENT and row.get("learner/skipped"):
        return math.inf
    value = row.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value


def checkpoint_before(verdict: Verdict, checkpoints: Iterable[int]) -> int | None:
    """Return the step of the newest checkpoint from before the collapse, or None.

    A step's rollouts are sampled with the weights after the step before it, so the last good step
    vouches only for checkpoints before it.
    """
    good = verdict.last_good
    return None if good is None else max((c for c in checkpoints if c < good), default=None)


_COLUMNS = {
    "reward": _REWARD,
    "entropy": _ENTROPY,
    "mismatch KL": _MISMATCH,
    "gradient": _GRADIENT,
    "length": "length_mean",
    "truncated": _TRUNCATED,
    "without reward": "num_without_reward",
}

_SOFTER = "a lower `learner.optimizer.lr`, or a smaller `learner.loss.clip_high`"

_TRY = {
    Rule.REWARD: (
        _SOFTER,
        "more rollouts per step (`loop.prompts_per_step`), or a lower `loop.max_staleness`",
    ),
    Rule.ENTROPY_LOW: (
        "a larger `learner.loss.clip_high`, so that rare tokens can become more likely",
        "a small `learner.loss.entropy_coef`, such as 0.001",
        "harder or different tasks: nothing is learned from tasks that are always or never solved",
    ),
    Rule.ENTROPY_HIGH: (
        _SOFTER,
        "`learner.loss.entropy_coef = 0`, unless it is 0 already",
        "the trajectories: is noise rewarded?",
    ),
    Rule.GRADIENT: (_SOFTER, "a smaller `learner.optimizer.max_grad_norm`"),
    Rule.TRUNCATED: (
        "a larger `budget.max_response_tokens`, if the rollouts would have ended by themselves",
        "the trajectories: repetition means that the policy itself has degenerated",
        _SOFTER,
    ),
    Rule.MISMATCH: (
        "the same `learner.dtype` and `server.dtype`",
        "a lower `loop.max_staleness`",
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


def report(verdict: Verdict, rows: Iterable[Row], checkpoints: Iterable[int]) -> str:
    """Return a Markdown report: what happened, the last steps and how to continue."""
    steps = [row for row in rows if _REWARD in row and row["step"] <= verdict.step]
    good = verdict.last_good
    goes_on = checkpoint_before(verdict, checkpoints)
    return "\n".join(
        [
            f"# The run has collapsed at step {verdict.step}",
            "",
            f"{verdict.why[0].upper()}{verdict.why[1:]} (medians), since step {verdict.since}. "
            f"Rule: `{verdict.rule}`.",
            "",
            "No step was good." if good is None else f"The last good step was {good}.",
            "There is no checkpoint from before the collapse: start a new run."
            if goes_on is None
            else f"Continue from the checkpoint of step {goes_on}, the last one before the "
            "collapse.",
            "",
            "## The last steps",
            "",
            *_table(steps[-_NUM_REPORTED:]),
            "",
            "## What to try or look at",
            "",
            *(f"- {hint}" for hint in _TRY[verdict.rule]),
            "- if this is no collapse: a higher `collapse.patience`, or 0",
            "",
        ]
    )
