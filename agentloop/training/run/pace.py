"""The progress of a run: its stage, steps, pace and current activity."""

from __future__ import annotations

import math
import time

from agentloop.rollouts.metrics import mean, percent
from agentloop.training.run.status import Reporter, RunStatus
from agentloop.training.run.step_metrics import StepMetrics


class Pace:
    """Tracks a run's progress and shows it through a `Reporter`."""

    def __init__(self, report: Reporter, num_steps: int) -> None:
        self.report = report
        self.num_steps = self._num_left = num_steps
        self.values: dict[str, str] = {}
        self._stage, self._step, self._num_stage = "evaluation", 0, 0
        self._begun: float | None = None
        self._num_done = 0

    def enter(self, stage: str, num_steps: int, num_done: int = 0) -> None:
        """Start a stage, of which `num_done` steps were done before a restart."""
        self._stage, self._step, self._num_stage = stage, num_done, num_steps
        self._num_left -= num_done
        self._begun = self._begun or time.monotonic()

    def skip(self) -> None:
        """Skip the remaining steps of this stage."""
        self._num_left -= self._num_stage - self._step

    def count_step(self, metrics: StepMetrics) -> None:
        """Count a completed step and show its metrics."""
        self._step += 1
        self._num_done += 1
        self._num_left -= 1
        seconds = {
            "waiting for rollouts": metrics.wait_s,
            "training": metrics.learned.learn_s,
            "weight sync": metrics.sync_s,
        }
        step_s = metrics.step_s or math.inf
        shares = [
            f"{100 * (duration_s or 0.0) / step_s:.0f}% {activity}"
            for activity, duration_s in seconds.items()
        ]
        self.values |= {
            "groups with a signal": metrics.rollouts.with_signal,
            "reward": mean(metrics.rollouts.reward),
            "tool errors in correct rollouts": percent(metrics.rollouts.tool_errors_in_correct),
            "sampled tokens/s": f"{metrics.rollout_tokens_per_s or 0:,.0f}",
            "trained tokens/s": f"{metrics.learned.learner.get('tokens_per_s') or 0:,.0f}",
            "time": ", ".join(shares),
        }
        if tried := metrics.curriculum.get("curriculum/num_tasks"):
            retired = metrics.curriculum["curriculum/num_retired"]
            self.values |= {"tasks retired": f"{retired} of {tried}"}

    def waits(self, activity: str) -> None:
        left_s = None
        if self._begun is not None and self._num_done:
            left_s = (time.monotonic() - self._begun) / self._num_done * self._num_left
        self.report.show(
            RunStatus(self._stage, self._step, self._num_stage, activity, dict(self.values), left_s)
        )
