"""The metrics of training steps, and the file that they are written to."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from agentloop.aio import in_run_thread
from agentloop.events import Emit, Measured
from agentloop.plain_json import JsonObject
from agentloop.rollouts.metrics import RolloutMetrics, about, about_each
from agentloop.training.loop.queue import Lease
from agentloop.training.run.folder import RunFolder


@dataclass(frozen=True, slots=True)
class Learned:
    """The learner's part of a step.

    Attributes:
        num_learned: number of rollouts trained on; 0: the weights have not changed.
        learn_s: duration in seconds.
        learner: the learner's own metrics, such as `loss`.
    """

    num_learned: int
    learn_s: float
    learner: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def loss(self) -> float | None:
        return self.learner.get("loss")

    def row(self) -> dict[str, float | None]:
        """Return the metrics as plain data."""
        learner = {f"learner/{name}": value for name, value in self.learner.items()}
        return {"num_learned": self.num_learned, **learner, "learn_s": self.learn_s}


@dataclass(slots=True)
class WeightSyncMetrics:
    """Metrics of the last weight sync; None: there was none yet.

    Attributes:
        publish_s, load_s: durations in seconds, of the learner and of the servers.
        num_servers, num_failed: number of servers that have the weights, and that do not.
        num_verified: number of servers that were compared with the learner, tensor by tensor.
    """

    publish_s: float | None = None
    load_s: float | None = None
    num_servers: int | None = None
    num_failed: int | None = None
    num_verified: int | None = None

    def row(self) -> dict[str, float | None]:
        """Return the metrics as plain data."""
        return {f"weights/{name}": value for name, value in _without_none(asdict(self))}


@dataclass(slots=True)
class StepMetrics:
    """The metrics of a training step.

    Attributes:
        version: version of the weights that the step started from.
        rollouts: metrics of all rollouts of the step, including those of groups that were replaced.
        environments: metrics of each environment, if the run has several, as `about_each` returns
            them.
        num_groups_replaced: number of groups without a learning signal that were replaced.
        staleness_mean, staleness_max: versions by which the groups were behind at their admission.
        wait_s, sync_s, step_s: seconds until the batch was complete, of syncing the new weights to
            the servers, and of the whole step; None: the step was repeated after a restart. An
            evaluation beside the step's rollouts shares their time, by the tokens sampled.
        loop_lag_s: longest blocking of the event loop during the step, in seconds.
        curriculum: metrics of the curriculum, `Curriculum.metrics`.
    """

    step: int
    stage: int
    version: int
    rollouts: RolloutMetrics
    environments: Mapping[str, float | None]
    num_groups_replaced: int
    staleness_mean: float
    staleness_max: int
    learned: Learned
    wait_s: float | None = None
    sync_s: float | None = None
    step_s: float | None = None
    loop_lag_s: float | None = None
    curriculum: Mapping[str, float] = field(default_factory=dict)
    weights: WeightSyncMetrics = field(default_factory=WeightSyncMetrics)

    @classmethod
    def of(cls, lease: Lease, learned: Learned) -> StepMetrics:
        """Compute the metrics of a step from its batch."""
        version = lease.notes.version
        ages = [version - group.version for group in lease.groups]
        groups = [*lease.groups, *lease.replaced]
        return cls(
            lease.step,
            lease.notes.stage,
            version,
            about([group.figures for group in groups]),
            about_each((group.task.env, group.figures) for group in groups),
            len(lease.replaced),
            sum(ages) / len(ages),
            max(ages),
            learned,
        )

    @property
    def rollout_tokens_per_s(self) -> float | None:
        return None if self.step_s is None else self.rollouts.num_sampled_tokens / self.step_s

    def row(self) -> dict[str, float | None]:
        """Return the metrics as plain data: a line of `metrics.jsonl`."""
        timings = {
            "wait_s": self.wait_s,
            "sync_s": self.sync_s,
            "step_s": self.step_s,
            "loop_lag_s": self.loop_lag_s,
            "rollout_tokens_per_s": self.rollout_tokens_per_s,
        }
        return {
            "step": self.step,
            "stage": self.stage,
            "version": self.version,
            **self.rollouts.row(),
            **self.environments,
            "num_groups_replaced": self.num_groups_replaced,
            "staleness_mean": self.staleness_mean,
            "staleness_max": self.staleness_max,
            **self.learned.row(),
            **self.curriculum,
            **self.weights.row(),
            **dict(_without_none(timings)),
        }


class MetricsLog:
    """Writes metrics to the run's folder and emits them as events."""

    def __init__(self, folder: RunFolder, emit: Emit) -> None:
        self._folder = folder
        self._emit = emit

    async def add(self, row: Mapping[str, object]) -> None:
        """Add a row, in the folder with its time. Raises RunFolderError."""
        timed = {**row, "unix_s": round(time.time(), 3)}
        await in_run_thread(self._folder.add_metrics, timed)
        self._emit(Measured(row))

    async def rows(self) -> list[JsonObject]:
        """Return all rows of the run, including those from before a restart."""
        return await in_run_thread(lambda: list(self._folder.metrics()))

    async def has(self, step: int, name: str) -> bool:
        """Return whether a row of `step` has the metric `name`, perhaps from before a restart."""
        return any(row["step"] == step and name in row for row in await self.rows())


def _without_none(values: Mapping[str, float | None]) -> Iterable[tuple[str, float]]:
    return ((name, value) for name, value in values.items() if value is not None)
