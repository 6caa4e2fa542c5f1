"""Prometheus metrics, read from events and, when scraped, from what others know.

    events ──seen──> counts and histograms ─┐
    servers, sandbox, queue ──asked─────────┴──render──> /metrics

Names and units follow Prometheus's conventions: base units, `_total` for counters. Values of
labels come from short lists: of ours, of the servers, of the tools; never from what a model or a
client wrote. The metrics are listed in docs/observability.md, and shown by docs/grafana.json; tests
hold both against this module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from agentloop.events import (
    CallFinished,
    Event,
    GroupFinished,
    GroupStarted,
    Measured,
    RolloutAbandoned,
    RolloutFinished,
    RolloutScored,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnStarted,
    WeightsLoaded,
)
from agentloop.inference.router import ServerView
from agentloop.trajectory import Trajectory

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_LONG_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 12_288, 16_384, 32_768, 65_536)
_TURNS = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
# None below 0, or the client would leave out the sum.
_REWARDS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)

# Of rows of a run's metrics: the row's name, ours, its help; the last row that has it is shown.
_OF_ROLLOUTS = (
    ("reward", "mean_reward", "Mean reward in the last step, or evaluation."),
    (
        "pass_at_k",
        "pass_at_k_ratio",
        "Share of groups with a reward above 0 in the last step, or evaluation.",
    ),
    (
        "tool_errors_in_correct",
        "tool_errors_in_correct_ratio",
        "Share of tool calls that failed, in rollouts with a reward above 0, in the last step.",
    ),
    (
        "truncated",
        "truncated_rollouts_ratio",
        "Share of rollouts that a budget cut off, in the last step, or evaluation.",
    ),
    (
        "length_mean",
        "mean_rollout_tokens",
        "Tokens sampled in a rollout, on average, in the last step, or evaluation.",
    ),
    (
        "turns_mean",
        "mean_rollout_turns",
        "Turns of a rollout, on average, in the last step, or evaluation.",
    ),
)
_TASKS = {"": "trained", "held_out/": "held_out"}
_VERSION = "weights/version"  # stands in no row: it is told by itself
_OF_STEP = (
    (_VERSION, "policy_version", "Version of the weights that servers loaded last.", 1),
    ("step", "train_step", "The learner's last step.", 1),
    ("stage", "train_stage", "The stage of the last step.", 1),
    (
        "staleness_mean",
        "mean_staleness_versions",
        "Versions that groups of the last step were behind.",
        1,
    ),
    (
        "staleness_max",
        "max_staleness_versions",
        "Versions that the last step's oldest group was behind.",
        1,
    ),
    (
        "versions_mean",
        "mean_rollout_versions",
        "Versions that sampled a rollout of the last step.",
        1,
    ),
    (
        "loop_lag_s",
        "step_event_loop_lag_seconds",
        "The event loop's largest lag in the last step.",
        1,
    ),
    ("learner/loss", "learner_loss", "Loss of the last step.", 1),
    (
        "learner/entropy",
        "learner_entropy_nats",
        "Entropy of the policy per token, in the last step.",
        1,
    ),
    (
        "learner/mismatch_kl",
        "learner_mismatch_kl_nats",
        "KL per token between engine and learner, in the last step.",
        1,
    ),
    (
        "learner/grad_norm",
        "learner_gradient_norm",
        "Norm of the last gradients before clipping.",
        1,
    ),
    ("learner/lr", "learner_learning_rate", "Learning rate of the last update.", 1),
    (
        "learner/clipped",
        "learner_clipped_ratio",
        "Share of tokens that the clip took out, in the last step.",
        1,
    ),
    (
        "learner/tis_capped",
        "learner_tis_capped_ratio",
        "Share of importance weights at their cap, in the last step.",
        1,
    ),
    (
        "learner/mfu",
        "learner_mfu_ratio",
        "Operations that the last batch needed by what the devices could do.",
        1,
    ),
    (
        "learner/peak_memory_gib",
        "learner_peak_memory_bytes",
        "Most memory of rank 0's accelerator in the last step.",
        2**30,
    ),
)
# Of the rows of steps, summed up.
_SUMMED = (
    ("num_learned", "learned_rollouts", "Rollouts that were learned from."),
    ("learner/num_tokens", "learned_tokens", "Sampled tokens that were learned from."),
    ("num_groups_rejected", "rejected_groups", "Groups that nothing was chosen from."),
    ("num_groups_replaced", "replaced_groups", "Groups that another was rolled out for."),
    ("learner/skipped", "skipped_updates", "Updates that were left out: gradients not finite."),
    ("step_s", "step_seconds", "Time that the learner's steps took, with all waits."),
)
_PHASES = {"wait_s": "wait", "learn_s": "learn", "hand_over_s": "load"}


class Metrics:
    """Feed it every event by `seen`; `render()` is what /metrics answers."""

    def __init__(
        self,
        servers: Callable[[], Sequence[ServerView]],
        num_waiting: Callable[[], int],
        *,
        sandbox: Callable[[], Mapping[str, Any]] | None = None,
        still_s: Callable[[], float] | None = None,
        queue: Callable[[], tuple[int, int]] | None = None,
        num_refused: Callable[[], int] | None = None,
        dropped: Mapping[str, Callable[[], int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """All are asked when it is scraped; what is None has no metrics.

        Args:
            num_waiting: requests in the waiting room.
            sandbox: `Pool.stats`; nothing where there is no pool yet.
            still_s: `Stalls.still_s`.
            queue: finished groups that wait for the learner, and their bytes.
            num_refused: requests that were refused while the service was paused.
            dropped: of other readers, by their names, what they had to leave out.
        """
        registry = CollectorRegistry()
        asked = _Asked(servers, num_waiting, sandbox, still_s, queue, num_refused, dropped or {})
        registry.register(asked)
        self._registry = registry
        self._clock = clock
        self._turn_begun_s: dict[str, float] = {}  # by rollout, until the turn has a place
        # Tokens are the most frequent event by far: an addition, not a lock.
        self._num_tokens = 0
        self._rows: dict[str, Any] = {}
        registry.register(_Told(lambda: self._num_tokens, self._rows))
        self._of_rollouts()
        self._of_turns_and_calls()
        self._of_training()

    def seen(self, event: Event) -> None:
        match event:
            case TokensSampled(ids=ids):
                self._num_tokens += len(ids)
            case RolloutStarted():
                self._in_flight.inc()
            case RolloutFinished(trajectory=trajectory):
                self._in_flight.dec()
                self._turn_begun_s.pop(event.rollout_id, None)
                self._finished(trajectory)
            case RolloutAbandoned():
                self._in_flight.dec()
                self._turn_begun_s.pop(event.rollout_id, None)
                self._abandoned.inc()
            case TurnStarted():
                self._turn_begun_s[event.rollout_id] = self._clock()
            case TurnPlaced():
                begun_s = self._turn_begun_s.pop(event.rollout_id, None)
                if begun_s is not None:  # else the rest of one that was moved
                    self._turn_wait_s.observe(self._clock() - begun_s)
            case CallFinished(result=result):
                # A name that the model or a client made up must not become a label.
                known = result.status not in ("unknown_tool", "malformed", "caller")
                self._calls.labels(result.name if known else "", result.status).inc()
                self._call_s.observe(result.ended_s - result.dispatched_s)
                self._call_wait_s.observe(max(0.0, result.started_s - result.dispatched_s))
            case TurnMoved():
                self._moves.inc()
            case TurnFinished(record=turn):
                self._turns.labels(turn.end).inc()
                if turn.first_token_s is not None:
                    self._first_token_s.observe(turn.first_token_s - turn.started_s)
            case RolloutScored(reward=reward):
                self._reward_s.observe(event.seconds)
                if reward is None:
                    self._unscored.inc()
                else:
                    self._reward.observe(reward)
            case GroupStarted():
                self._groups_started.inc()
            case GroupFinished():
                self._group_finished(event)
            case Measured(row=row):
                self._measured(row)
            case WeightsLoaded():
                self._loaded(event)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    # --- what there is ----------------------------------------------------------------------------

    def _of_rollouts(self) -> None:
        self._in_flight = self._gauge("rollouts_in_flight", "Rollouts that have begun, not ended.")
        self._rollouts = self._counter("rollouts", "Rollouts that ended.", "stop_reason")
        self._abandoned = self._counter(
            "rollouts_abandoned", "Rollouts that were cancelled, or that raised."
        )
        self._rollout_s = self._histogram(
            "rollout_seconds", "From a rollout's start to its end.", _LONG_SECONDS
        )
        self._rollout_tokens = self._histogram(
            "rollout_tokens", "Tokens that were sampled in a rollout.", _TOKENS
        )
        self._rollout_turns = self._histogram("rollout_turns", "Turns of a rollout.", _TURNS)
        self._reward = self._histogram(
            "rollout_reward",
            "Rewards of rollouts; the sum may fall where some are below 0.",
            _REWARDS,
        )
        self._reward_s = self._histogram(
            "reward_seconds", "From a rollout's end to its reward.", _SECONDS
        )
        self._unscored = self._counter(
            "rollouts_without_reward", "Rollouts that say nothing about the model."
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Tokens that turns began with, of rollouts that ended."
        )
        self._cached_tokens = self._counter(
            "cached_tokens", "Tokens that turns began with and that prefix caches held."
        )

    def _of_turns_and_calls(self) -> None:
        self._turns = self._counter("turns", "Turns that ended.", "end")
        self._moves = self._counter("turns_moved", "Turns that went on elsewhere.")
        self._turn_wait_s = self._histogram(
            "turn_wait_seconds", "From a turn's start until it has a place on a server.", _SECONDS
        )
        self._first_token_s = self._histogram(
            "first_token_seconds",
            "From a turn's start to its first token, waiting included.",
            _SECONDS,
        )
        self._calls = self._counter("tool_calls", "Tool calls that ended.", "tool", "status")
        self._call_s = self._histogram(
            "tool_call_seconds", "From a call's dispatch to its result.", _SECONDS
        )
        self._call_wait_s = self._histogram(
            "tool_wait_seconds", "From a call's dispatch until the tool runs.", _SECONDS
        )

    def _of_training(self) -> None:
        self._groups_started = self._counter("groups_started", "Groups that were begun.")
        self._groups = self._counter(
            "groups",
            "Groups that ended: they teach or do not, have no reward, or were not rolled out.",
            "outcome",
        )
        self._group_reward = self._histogram(
            "group_mean_reward", "Mean reward of a group.", _REWARDS
        )
        self._choice = self._counter(
            "group_rollouts", "Rollouts of groups: kept to learn from, or dropped.", "choice"
        )
        self._steps = self._counter("steps", "Steps of the learner.")
        self._summed = {key: self._counter(name, text) for key, name, text in _SUMMED}
        self._phase_s = self._counter(
            "step_phase_seconds",
            "Time of steps: waiting for rollouts, learning, loading weights.",
            "phase",
        )
        self._load_s = self._histogram(
            "weights_load_seconds", "For the servers to load new weights.", _LONG_SECONDS
        )
        self._loads = self._counter(
            "weights_server_loads", "Servers that were given new weights.", "outcome"
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"agentloop_{name}", text, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"agentloop_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"agentloop_{name}", text, buckets=buckets, registry=self._registry)

    # --- what is told -----------------------------------------------------------------------------

    def _finished(self, trajectory: Trajectory) -> None:
        self._rollouts.labels(trajectory.stop_reason).inc()
        self._rollout_s.observe(trajectory.elapsed_s)
        self._rollout_tokens.observe(trajectory.num_sampled_tokens)
        self._rollout_turns.observe(len(trajectory.turns))
        num_context, num_prompt, num_cached = len(trajectory.prompt_ids), 0, 0
        for turn in trajectory:
            num_prompt += num_context
            num_cached += turn.cached_tokens
            num_context += len(turn.output_ids) + len(turn.observation_ids)
        self._prompt_tokens.inc(num_prompt)
        self._cached_tokens.inc(num_cached)

    def _group_finished(self, event: GroupFinished) -> None:
        outcome = "teaches" if event.teaches else "teaches_nothing"
        if event.mean_reward is not None:
            self._group_reward.observe(event.mean_reward)
        else:
            outcome = "no_reward" if event.kept or event.dropped else "not_rolled_out"
        self._groups.labels(outcome).inc()
        self._choice.labels("kept").inc(len(event.kept))
        self._choice.labels("dropped").inc(len(event.dropped))

    def _measured(self, row: Mapping[str, Any]) -> None:
        self._rows.update(row)
        if "step_s" not in row:  # of an evaluation
            return
        self._steps.inc()
        for key, counter in self._summed.items():
            counter.inc(_amount(row.get(key)))
        for key, phase in _PHASES.items():
            self._phase_s.labels(phase).inc(_amount(row.get(key)))

    def _loaded(self, event: WeightsLoaded) -> None:
        if event.version.isdecimal():
            self._rows[_VERSION] = int(event.version)
        self._load_s.observe(event.seconds)
        self._loads.labels("loaded").inc(len(event.loaded))
        self._loads.labels("failed").inc(len(event.failed))


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def _amount(value: Any) -> float:
    """What a counter may be increased by."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) and number > 0 else 0.0


class _Told(Collector):
    """What is kept as plain numbers: tokens, and the last row of a run's metrics."""

    def __init__(self, num_tokens: Callable[[], int], rows: Mapping[str, Any]) -> None:
        self._num_tokens = num_tokens
        self._rows = rows

    def collect(self) -> Iterator[Metric]:
        yield CounterMetricFamily(
            "agentloop_sampled_tokens", "Tokens sampled.", value=self._num_tokens()
        )
        for key, name, text, unit in _OF_STEP:
            if (value := _number(self._rows.get(key))) is not None:
                yield GaugeMetricFamily(f"agentloop_{name}", text, value=value * unit)
        for key, name, text in _OF_ROLLOUTS:
            family = GaugeMetricFamily(f"agentloop_{name}", text, labels=["tasks"])
            for prefix, tasks in _TASKS.items():
                if (value := _number(self._rows.get(prefix + key))) is not None:
                    family.add_metric([tasks], value)
            if family.samples:
                yield family


class _Asked(Collector):
    def __init__(
        self,
        servers: Callable[[], Sequence[ServerView]],
        num_waiting: Callable[[], int],
        sandbox: Callable[[], Mapping[str, Any]] | None,
        still_s: Callable[[], float] | None,
        queue: Callable[[], tuple[int, int]] | None,
        num_refused: Callable[[], int] | None,
        dropped: Mapping[str, Callable[[], int]],
    ) -> None:
        self._servers = servers
        self._num_waiting = num_waiting
        self._sandbox = sandbox
        self._still_s = still_s
        self._queue = queue
        self._num_refused = num_refused
        self._dropped = dropped

    def collect(self) -> Iterator[Metric]:
        yield _gauge("waiting_requests", "Requests in the waiting room.", self._num_waiting())
        yield from self._of_servers()
        if self._sandbox is not None and (stats := self._sandbox()):
            yield from _of_sandbox(stats)
        if self._still_s is not None:
            text = "For how long nothing has moved while somebody waits."
            yield _gauge("still_seconds", text, self._still_s())
        if self._queue is not None:
            num_groups, num_bytes = self._queue()
            yield _gauge("queue_groups", "Finished groups that wait for the learner.", num_groups)
            yield _gauge(
                "queue_bytes", "Size of the groups that wait for the learner, on disk.", num_bytes
            )
        if self._num_refused is not None:
            text = "Requests that were refused while the service was paused."
            num = self._num_refused()
            yield CounterMetricFamily("agentloop_refused_requests", text, value=num)
        if self._dropped:
            text = "What a reader of events was too slow for: lines, traces, rows."
            family = CounterMetricFamily("agentloop_reader_dropped", text, labels=["reader"])
            for reader, num_dropped in self._dropped.items():
                family.add_metric([reader], num_dropped())
            yield family

    def _of_servers(self) -> Iterator[Metric]:
        families = {
            "healthy": "Whether the server takes requests.",
            "running_requests": "Requests that the server is generating for.",
            "kv_held_tokens": "Tokens of running requests in the server's KV cache.",
            "kv_reserved_tokens": "Tokens kept free in the server's KV cache for their growth.",
            "kv_parked_tokens": "Tokens in the server's KV cache of rollouts at a tool.",
            "kv_cached_tokens": "Tokens in the server's KV cache of turns that are over: reusable.",
            "kv_capacity_tokens": "Size of the server's KV cache.",
            "policy_version": "Version of the server's weights.",
        }
        gauges = {
            name: GaugeMetricFamily(f"agentloop_server_{name}", text, labels=["server"])
            for name, text in families.items()
        }
        state = GaugeMetricFamily(
            "agentloop_server_state",
            "1 for the state that the server is in.",
            labels=["server", "state"],
        )
        for view in self._servers():
            gauges["healthy"].add_metric([view.url], view.healthy)
            gauges["running_requests"].add_metric([view.url], view.num_running)
            gauges["kv_held_tokens"].add_metric([view.url], view.num_held_tokens)
            gauges["kv_reserved_tokens"].add_metric([view.url], view.num_reserved_tokens)
            gauges["kv_parked_tokens"].add_metric([view.url], view.num_parked_tokens)
            gauges["kv_cached_tokens"].add_metric([view.url], view.num_cached_tokens)
            gauges["kv_capacity_tokens"].add_metric([view.url], view.capacity_tokens)
            if view.weight_version is not None and view.weight_version.isdecimal():
                gauges["policy_version"].add_metric([view.url], int(view.weight_version))
            state.add_metric([view.url, view.state], 1)
        yield state
        yield from gauges.values()


def _of_sandbox(stats: Mapping[str, Any]) -> Iterator[Metric]:
    yield _gauge("sandbox_workers", "Sandbox workers that take calls.", stats["workers"])
    yield _gauge("sandbox_slots", "Calls that the sandbox can run at once.", stats["slots"])
    yield _gauge("sandbox_busy_slots", "Calls that the sandbox runs now.", stats["busy"])
    yield _gauge(
        "sandbox_waiting_calls", "Calls that wait for a slot in the sandbox.", stats["waiting"]
    )
    yield _gauge("sandbox_sessions", "Notebooks that the sandbox keeps.", stats["sessions"])
    text = "Sandbox workers that were lost, or had run their share."
    yield CounterMetricFamily("agentloop_sandbox_replaced_workers", text, value=stats["replaced"])
    calls = CounterMetricFamily(
        "agentloop_sandbox_calls",
        "Sandbox calls that ended, those of rewards included.",
        labels=["status"],
    )
    for status, count in stats["calls"].items():
        calls.add_metric([status], count)
    yield calls


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentloop_{name}", text, value=value)
