"""Train on batches: take one, have the learner train on it, publish the weights, record the step.

buffer ──batch──> learner ──weights──> servers (weight_sync/loop.py)
                     └──metrics──> metrics.jsonl, collapse detection, display
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping

import anyio

from agentloop.agent.rollout import Budget
from agentloop.rollouts.metrics import mean, percent, rewards_of_each
from agentloop.training.loop.held_out import Evaluated, HeldOutEval
from agentloop.training.loop.queue import Lease, StepNotes
from agentloop.training.loop.steps import Steps
from agentloop.training.recovery.position import resume_command
from agentloop.training.run.collapse import (
    Collapse,
    CollapseSettings,
    RunCollapsed,
    Verdict,
    checkpoint_before,
    report,
)
from agentloop.training.run.context import RunContext
from agentloop.training.run.learning import PATIENCE, headline
from agentloop.training.run.step_metrics import Learned, StepMetrics
from agentloop.training.weight_sync.loop import WeightSyncLoop


class BatchTrainer:
    """Runs the training steps of a run, and what is due after each of them."""

    def __init__(
        self,
        run: RunContext,
        steps: Steps,
        weights: WeightSyncLoop,
        held_out: HeldOutEval,
        *,
        collapse: CollapseSettings,
        waits_for_weights: bool,
    ) -> None:
        """
        Args:
            waits_for_weights: whether a step ends only when servers have the new weights.
        """
        self._run = run
        self._steps = steps
        self._weights = weights
        self._held_out = held_out
        self._collapse_settings = collapse
        self._collapse = Collapse(collapse)
        self._last_rows: deque[Mapping[str, object]] = deque(maxlen=PATIENCE)
        self._is_stuck = False
        self._waits_for_weights = waits_for_weights
        self._waited_s = 0.0  # for the batch
        self._meanwhile_s = 0.0  # of it, before the learner began to wait
        self._since_s = time.monotonic()  # the end of the last step
        self._evaluation = Evaluated()  # since then

    @property
    def step(self) -> int:
        """The last completed step."""
        return self._steps.step

    @property
    def version(self) -> int:
        """The version of the learner's weights."""
        return self._steps.version

    async def restore(self) -> None:
        """Repeat the steps since the newest checkpoint and restore the collapse detector."""
        await self._steps.repeat_since_checkpoint(self._record_repeated)
        rows = await self._run.metrics.rows()
        self._collapse = Collapse.replay(self._collapse_settings, rows, step=self.step)

    async def _record_repeated(self, lease: Lease, learned: Learned) -> None:
        """Record the metrics of a repeated step unless they were before."""
        if not await self._run.metrics.has(lease.step, "reward"):
            metrics = StepMetrics.of(lease, learned)
            metrics.curriculum = self._run.curriculum.metrics()  # the last step's, as is this one
            await self._run.metrics.add(metrics.row())

    def begin_stage(self) -> None:
        """Take note that the first rollouts of a stage begin, from which on its step is timed."""
        self._since_s, self._evaluation = time.monotonic(), Evaluated()

    async def wait_for_batch(self) -> bool:
        """Wait for a batch; return False if there will be none because the run is draining."""
        total = self._run.settings.prompts_per_step

        def is_over() -> bool:
            num_done = min(total, self._run.buffer.num_finished)
            self._run.pace.waits(f"the learner waits for rollouts: {num_done} of {total} groups")
            is_drained = self._run.control.is_draining and not self._run.buffer.num_open
            return self._run.buffer.has_batch or is_drained

        started_s = time.monotonic()
        await self._run.control.wait_until(
            is_over, "the learner", lambda: "a batch of finished groups"
        )
        # Its rollouts went on while the last weights were evaluated or saved. Of that time, only
        # the part until they ended is this step's.
        complete_s = self._run.buffer.complete_s or started_s
        self._meanwhile_s = max(0.0, min(complete_s, started_s) - self._since_s)
        self._waited_s = self._meanwhile_s + time.monotonic() - started_s
        return self._run.buffer.has_batch

    def _evaluation_share_s(self, num_tokens: int) -> float:
        """Return how much of the time until a batch of `num_tokens` was complete is that of the
        evaluation beside it: they share the servers, and so the time, by the tokens sampled."""
        both_s = min(self._meanwhile_s, self._evaluation.seconds)
        if both_s <= 0:
            return 0.0
        evaluation_rate = self._evaluation.num_tokens / self._evaluation.seconds
        batch_rate = num_tokens / self._waited_s
        return both_s * evaluation_rate / max(1e-9, evaluation_rate + batch_rate)

    async def train(self, stage: int, *, resets: bool) -> None:
        """Train on the batch that `wait_for_batch` has found.

        Args:
            stage: number of the stage.
            resets: reset the optimizer first.

        Raises:
            LearnerError: the learner is lost for good.
            RunCollapsed: the run has collapsed.
        """
        started_s = time.monotonic()
        learns = self._run.settings.learn
        notes = StepNotes(self.version, stage, resets, learns)
        lease = await self._run.buffer.lease(self.step + 1, notes)
        if learns:
            self._run.pace.waits("the learner is training")
        metrics = StepMetrics.of(lease, await self._steps.learn(lease))
        num_tokens = metrics.rollouts.num_sampled_tokens
        metrics.wait_s = self._waited_s - self._evaluation_share_s(num_tokens)
        self._evaluation = Evaluated()
        if metrics.learned.num_learned:
            learned_s = time.monotonic()
            await self._weights.publish()
            if self._waits_for_weights:
                self._run.pace.waits("waiting for the servers to load the new weights")
                await self._weights.until_live()
            metrics.sync_s = time.monotonic() - learned_s
        else:
            self._run.buffer.learned_nothing()
        self._since_s = time.monotonic()
        metrics.step_s = metrics.wait_s + self._since_s - started_s
        metrics.weights = self._weights.metrics
        metrics.curriculum = self._run.curriculum.metrics()
        metrics.loop_lag_s = self._run.control.watch.take_lag_s()
        await self._record(metrics)

    async def _record(self, metrics: StepMetrics) -> None:
        row = metrics.row()
        await self._run.metrics.add(row)
        self._run.pace.count_step(metrics)
        rollouts = metrics.rollouts
        self._run.report.say(
            f"step {self.step}/{self._run.pace.num_steps}: reward {mean(rollouts.reward)}"
            f"{rewards_of_each(metrics.environments)}, a signal in {rollouts.with_signal} groups, "
            f"tool errors in correct rollouts {percent(rollouts.tool_errors_in_correct)}, "
            f"{metrics.learned.num_learned} of {rollouts.num_rollouts} rollouts trained on, "
            f"{metrics.rollout_tokens_per_s:,.0f} tokens/s, {metrics.step_s:.1f} s"
        )
        self._last_rows.append(row)
        learning = headline(self._last_rows)
        if learning and learning.is_stuck and not self._is_stuck:
            self._run.report.say(learning.text)
        self._is_stuck = learning is not None and learning.is_stuck
        if verdict := self._collapse.observe(row):
            await self._stop(verdict)

    async def after_step(self, *, is_last: bool, budget: Budget) -> None:
        """Evaluate and write a checkpoint if it is due after the last step.

        Args:
            is_last: whether the step was the last one of its stage.
            budget: budget of the evaluation's rollouts.
        """
        s = self._run.settings
        if s.evaluate_every and (is_last or self.step % s.evaluate_every == 0):
            await self.until_live()
            await self.evaluate(budget)
        if s.learn and s.checkpoint_every and self.step % s.checkpoint_every == 0:
            await self._steps.checkpoint()

    async def evaluate(self, budget: Budget) -> None:
        """Evaluate the current weights on the held-out tasks."""
        evaluating = self._held_out.evaluate(step=self.step, version=self.version, budget=budget)
        self._evaluation = await evaluating

    async def until_live(self) -> None:
        """Wait until servers have the learner's weights."""
        await self._weights.until_live()

    async def _stop(self, verdict: Verdict) -> None:
        """End a collapsed run with the weights of the newest checkpoint before the collapse.

        Raises:
            RunCollapsed: always; the message says why, names the report and says how to continue.
        """
        checkpoints = self._run.folder.checkpoints
        good = checkpoint_before(verdict, checkpoints)
        path = self._run.folder.path / "collapse.md"
        text = report(verdict, await self._run.metrics.rows(), checkpoints)
        await anyio.Path(path).write_text(text, "utf-8")
        advice = "there is no checkpoint from before the collapse: start a new run"
        if good is not None:
            await self.until_live()  # servers may be reading the weights that are removed
            await self._steps.go_back(checkpoints[good])
            advice = (
                f"continue with `{resume_command('train', self._run.folder.path, from_step=good)}`"
            )
        raise RunCollapsed(
            f"the run has collapsed: {verdict.why}; {path} has the details; {advice}"
        )
