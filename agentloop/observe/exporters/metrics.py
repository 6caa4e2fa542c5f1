"""Prometheus metrics, from events and, at each scrape, from the state of other parts.

    events ──seen──> counters and histograms ─┐
    servers, sandbox, queue ──at a scrape─────┴──render──> /metrics

Names and units follow Prometheus's conventions: base units, `_total` for counters. Label values
come from small fixed sets and from the servers and tools in use, never from text of a model or a
client. docs/observability.md lists the metrics and docs/grafana.json shows them; tests compare both
with this module.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

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
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnStarted,
    WeightsLoaded,
)
from agentloop.inference.replicas import ServerView
from agentloop.observe.in_flight import InFlight
from agentloop.observe.latency import Duration, of_turn
from agentloop.plain_json import number_of
from agentloop.trajectory import Trajectory, Turn

_SECONDS = (0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300)
_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)
_LONG_SECONDS = (0.1, 0.3, 1, 3, 10, 30, 60, 120, 300, 600, 1800)
_TOKENS = (64, 256, 1024, 2048, 4096, 8192, 12_288, 16_384, 32_768, 65_536)
_TURNS = (1, 2, 3, 4, 6, 8, 10, 15, 20, 30)
# No bucket below 0: prometheus_client would omit the sum.
_REWARDS = (0, 0.1, 0.25, 0.5, 0.75, 0.9, 1)

# Key in metrics rows, metric, help. The gauge shows the last row that has the key.
_ROLLOUT_GAUGES = (
    ("reward", "mean_reward", "Mean reward in the last step or evaluation."),
    (
        "pass_at_k",
        "pass_at_k_ratio",
        "Share of groups with a reward above 0 in the last step or evaluation.",
    ),
    (
        "tool_errors_in_correct",
        "tool_errors_in_correct_ratio",
        "Share of failed tool calls in rollouts with a reward above 0, in the last step.",
    ),
    (
        "truncated",
        "truncated_rollouts_ratio",
        "Share of rollouts cut off by a budget, in the last step or evaluation.",
    ),
    (
        "length_mean",
        "mean_rollout_tokens",
        "Mean number of sampled tokens per rollout, in the last step or evaluation.",
    ),
    (
        "turns_mean",
        "mean_rollout_turns",
        "Mean number of turns per rollout, in the last step or evaluation.",
    ),
)
_TASKS = {"": "trained", "held_out/": "held_out"}
_VERSION = "weights/version"  # not a key of metrics rows: set by WeightsLoaded
_UNITS = {"learner/peak_memory_gib": 2**30}
_STEP_GAUGES = (
    (_VERSION, "policy_version", "Version of the weights that the servers loaded last."),
    ("step", "train_step", "The learner's last step."),
    ("stage", "train_stage", "The stage of the last step."),
    (
        "staleness_mean",
        "mean_staleness_versions",
        "Mean staleness of the last step's groups, in versions.",
    ),
    (
        "staleness_max",
        "max_staleness_versions",
        "Maximum staleness of the last step's groups, in versions.",
    ),
    (
        "curriculum/solve_rate",
        "curriculum_solve_ratio",
        "Mean solve rate of the tasks tried so far.",
    ),
    (
        "curriculum/num_retired",
        "curriculum_retired_tasks",
        "Tasks that are retired because every rollout solved them.",
    ),
    (
        "versions_mean",
        "mean_rollout_versions",
        "Mean number of policy versions per rollout of the last step.",
    ),
    (
        "loop_lag_s",
        "step_event_loop_lag_seconds",
        "Largest lag of the event loop in the last step.",
    ),
    ("learner/loss", "learner_loss", "Loss of the last step."),
    ("learner/entropy", "learner_entropy_nats", "Policy entropy per token in the last step."),
    (
        "learner/mismatch_kl",
        "learner_mismatch_kl_nats",
        "KL divergence per token between servers and learner in the last step.",
    ),
    (
        "learner/grad_norm",
        "learner_gradient_norm",
        "Mean gradient norm of the last step's updates, before clipping.",
    ),
    ("learner/lr", "learner_learning_rate", "Learning rate of the last update."),
    ("learner/clipped", "learner_clipped_ratio", "Share of clipped tokens in the last step."),
    (
        "learner/tis_capped",
        "learner_tis_capped_ratio",
        "Share of importance weights at their cap in the last step.",
    ),
    ("learner/mfu", "learner_mfu_ratio", "Model FLOPs utilization of the last batch."),
    (
        "learner/peak_memory_gib",
        "learner_peak_memory_bytes",
        "Peak memory of rank 0's accelerator in the last step.",
    ),
)
# Keys in the rows of steps that are summed: key, metric, help.
_SUMMED = (
    ("num_learned", "trained_samples", "Rollouts that were trained on."),
    ("learner/num_tokens", "trained_tokens", "Sampled tokens that were trained on."),
    ("num_groups_rejected", "rejected_groups", "Groups of which no sample was selected."),
    (
        "num_groups_replaced",
        "replaced_groups",
        "Groups that dynamic sampling replaced by another one.",
    ),
    ("learner/skipped", "skipped_updates", "Updates skipped because gradients were not finite."),
    ("step_s", "step_seconds", "Duration of training steps, including all waits."),
)
# Key in `Pool.stats`, metric, help.
_SANDBOX_GAUGES = (
    ("workers", "sandbox_workers", "Sandbox workers that accept calls."),
    ("slots", "sandbox_slots", "Maximum number of concurrent sandbox calls."),
    ("busy", "sandbox_busy_slots", "Running sandbox calls."),
    ("waiting", "sandbox_waiting_calls", "Sandbox calls that wait for a slot."),
    ("sessions", "sandbox_sessions", "Open notebook sessions in the sandbox."),
)
_PHASES = {"wait_s": "wait", "learn_s": "learn", "sync_s": "sync"}


class Metrics(Collector):
    """The metrics of a run or service; pass every event to `on_event` and serve `render()`."""

    def __init__(
        self,
        servers: Callable[[], Sequence[ServerView]],
        num_waiting: Callable[[], int],
        *,
        sandbox: Callable[[], Mapping[str, object]] = dict,
        no_progress_s: Callable[[], float] = lambda: 0.0,
        queue: Callable[[], tuple[int, int]] | None = None,
        num_refused: Callable[[], int] | None = None,
        dropped: Mapping[str, Callable[[], int]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            servers: Called at each scrape, like all other functions; None omits the metrics.
            num_waiting: Number of queued requests.
            sandbox: `Pool.stats`; may return nothing if there is no pool yet.
            no_progress_s: `Stalls.no_progress_s`.
            queue: Number of finished groups that wait for the learner, and their bytes.
            num_refused: Number of requests refused while the service was paused.
            dropped: Number of items that other readers of events have dropped, by their names.
        """
        self._servers = servers
        self._num_waiting = num_waiting
        self._sandbox = sandbox
        self._no_progress_s = no_progress_s
        self._queue = queue
        self._num_refused = num_refused
        self._dropped = {} if dropped is None else dropped  # may be empty now and be filled later
        self._clock = clock
        self._turn_begun_s: dict[str, float] = {}  # by rollout, until the turn is placed
        # Tokens are by far the most frequent event, so count them without a lock.
        self._num_tokens = 0
        self._rows: dict[str, object] = {}
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._define_rollout_metrics()
        self._define_turn_metrics()
        self._define_training_metrics()

    def on_event(self, event: Event) -> None:
        self._in_flight.on_event(event)
        match event:
            case TokensSampled(ids=ids):
                self._num_tokens += len(ids)
            case RolloutFinished(trajectory=trajectory):
                self._turn_begun_s.pop(event.rollout_id, None)
                self._record_rollout(trajectory)
            case RolloutAbandoned():
                self._turn_begun_s.pop(event.rollout_id, None)
                self._abandoned.inc()
            case TurnStarted():
                self._turn_begun_s[event.rollout_id] = self._clock()
            case TurnPlaced():
                begun_s = self._turn_begun_s.pop(event.rollout_id, None)
                if begun_s is not None:  # otherwise the turn was moved
                    self._turn_wait_s.observe(self._clock() - begun_s)
            case CallFinished(result=result):
                # Names made up by the model or a client must not become labels.
                is_tool = result.status not in ("unknown_tool", "malformed", "caller")
                self._calls.labels(result.name if is_tool else "", result.status).inc()
                self._call_s.observe(result.ended_s - result.dispatched_s)
                self._call_wait_s.observe(max(0.0, result.started_s - result.dispatched_s))
            case TurnMoved():
                self._moves.inc()
            case TurnFinished(record=turn):
                self._record_turn(turn)
            case RolloutScored(reward=reward):
                self._reward_s.observe(event.seconds)
                if reward is None:
                    self._unscored.inc()
                else:
                    self._reward.observe(reward)
            case GroupStarted():
                self._groups_started.inc()
            case GroupFinished():
                self._record_group(event)
            case Measured(row=row):
                self._record_row(row)
            case WeightsLoaded():
                self._record_weights(event)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    # --- definitions ------------------------------------------------------------------------------

    def _define_rollout_metrics(self) -> None:
        self._in_flight = InFlight()
        gauge = self._gauge("rollouts_in_flight", "Rollouts in flight.")
        gauge.set_function(lambda: len(self._in_flight))
        self._rollouts = self._counter("rollouts", "Rollouts that ended.", "stop_reason")
        self._abandoned = self._counter(
            "rollouts_abandoned", "Rollouts that were cancelled or raised an error."
        )
        self._rollout_s = self._histogram(
            "rollout_seconds", "Duration of a rollout.", _LONG_SECONDS
        )
        self._rollout_tokens = self._histogram(
            "rollout_tokens", "Sampled tokens per rollout.", _TOKENS
        )
        self._rollout_turns = self._histogram("rollout_turns", "Turns per rollout.", _TURNS)
        self._reward = self._histogram(
            "rollout_reward",
            "Rewards of rollouts; the sum may decrease if some are negative.",
            _REWARDS,
        )
        self._reward_s = self._histogram(
            "reward_seconds", "Time from the end of a rollout to its reward.", _SECONDS
        )
        self._unscored = self._counter(
            "rollouts_without_reward",
            "Rollouts without a reward, such as those lost to infrastructure.",
        )
        self._prompt_tokens = self._counter(
            "prompt_tokens", "Prompt tokens of the turns of rollouts that ended."
        )
        self._cached_tokens = self._counter(
            "cached_tokens", "Prompt tokens of turns that were in a prefix cache."
        )

    def _define_turn_metrics(self) -> None:
        self._turns = self._counter("turns", "Turns that ended.", "end")
        self._moves = self._counter("turns_moved", "Turns that moved to another server.")
        self._turn_wait_s = self._histogram(
            "turn_wait_seconds",
            "Time from the start of a turn to its placement on a server.",
            _SECONDS,
        )
        self._first_token_s = self._histogram(
            "first_token_seconds",
            "Time from the start of a turn to its first token, including waits.",
            _SECONDS,
        )
        self._token_s = self._histogram(
            "output_token_seconds",
            "Mean time per token of a turn after its first one.",
            _TOKEN_SECONDS,
        )
        self._turn_s = self._histogram(
            "turn_seconds", "Time from the start of a turn to its last token.", _LONG_SECONDS
        )
        self._calls = self._counter("tool_calls", "Tool calls that ended.", "tool", "status")
        self._call_s = self._histogram(
            "tool_call_seconds", "Time from the dispatch of a call to its result.", _SECONDS
        )
        self._call_wait_s = self._histogram(
            "tool_wait_seconds", "Time from the dispatch of a call until the tool runs.", _SECONDS
        )

    def _define_training_metrics(self) -> None:
        self._groups_started = self._counter("groups_started", "Groups that started.")
        self._groups = self._counter(
            "groups",
            "Groups that ended, with or without a learning signal, without any reward, or not "
            "rolled out.",
            "outcome",
        )
        self._group_reward = self._histogram(
            "group_mean_reward", "Mean reward of a group.", _REWARDS
        )
        self._choice = self._counter(
            "group_rollouts", "Rollouts of groups, kept for training or dropped.", "choice"
        )
        self._steps = self._counter("steps", "Training steps.")
        self._summed = {key: self._counter(name, text) for key, name, text in _SUMMED}
        self._phase_s = self._counter(
            "step_phase_seconds",
            "Time of training steps, by phase: waiting for rollouts, training, weight sync.",
            "phase",
        )
        self._load_s = self._histogram(
            "weight_sync_seconds", "Duration of a weight sync.", _LONG_SECONDS
        )
        self._loads = self._counter(
            "weight_loads", "Servers that loaded new weights, or failed to.", "outcome"
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"agentloop_{name}", text, registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"agentloop_{name}", text, labels, registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(f"agentloop_{name}", text, buckets=buckets, registry=self._registry)

    # --- events -----------------------------------------------------------------------------------

    def _record_rollout(self, trajectory: Trajectory) -> None:
        self._rollouts.labels(trajectory.stop_reason).inc()
        self._rollout_s.observe(trajectory.elapsed_s)
        if trajectory.prompt_ids:  # not from an endpoint or a script
            self._rollout_tokens.observe(trajectory.num_sampled_tokens)
        self._rollout_turns.observe(len(trajectory.turns))
        num_context, num_prompt, num_cached = len(trajectory.prompt_ids), 0, 0
        for turn in trajectory:
            num_prompt += num_context
            num_cached += turn.cached_tokens
            num_context += len(turn.output_ids) + len(turn.observation_ids)
        self._prompt_tokens.inc(num_prompt)
        self._cached_tokens.inc(num_cached)

    def _record_turn(self, turn: Turn) -> None:
        self._turns.labels(turn.end).inc()
        histograms = {
            Duration.FIRST_TOKEN: self._first_token_s,
            Duration.TOKEN: self._token_s,
            Duration.TURN: self._turn_s,
        }
        times = turn.started_s, turn.first_token_s, turn.generated_s
        for kind, seconds in of_turn(*times, len(turn.output_ids)):
            histograms[kind].observe(seconds)

    def _record_group(self, event: GroupFinished) -> None:
        outcome = "has_signal" if event.has_signal else "no_signal"
        if event.mean_reward is not None:
            self._group_reward.observe(event.mean_reward)
        else:
            outcome = "no_reward" if event.kept or event.dropped else "not_rolled_out"
        self._groups.labels(outcome).inc()
        self._choice.labels("kept").inc(len(event.kept))
        self._choice.labels("dropped").inc(len(event.dropped))

    def _record_row(self, row: Mapping[str, object]) -> None:
        self._rows.update(row)
        if "step_s" not in row:  # from an evaluation
            return
        self._steps.inc()
        for key, counter in self._summed.items():
            counter.inc(_amount(row.get(key)))
        for key, phase in _PHASES.items():
            self._phase_s.labels(phase).inc(_amount(row.get(key)))

    def _record_weights(self, event: WeightsLoaded) -> None:
        if event.version.isdecimal():
            self._rows[_VERSION] = int(event.version)
        self._load_s.observe(event.seconds)
        self._loads.labels("loaded").inc(len(event.loaded))
        self._loads.labels("failed").inc(len(event.failed))

    # --- at a scrape ------------------------------------------------------------------------------

    def collect(self) -> Iterator[Metric]:
        """Implement `Collector`: return what is kept as plain numbers, here or elsewhere."""
        yield _gauge("waiting_requests", "Requests that wait for KV capacity.", self._num_waiting())
        yield from self._of_servers()
        if stats := self._sandbox():
            yield from _of_sandbox(stats)
        text = "Time without progress while something is waiting."
        yield _gauge("no_progress_seconds", text, self._no_progress_s())
        if self._queue is not None:
            num_groups, num_bytes = self._queue()
            yield _gauge("queue_groups", "Finished groups that wait for the learner.", num_groups)
            yield _gauge(
                "queue_bytes", "Size on disk of the groups that wait for the learner.", num_bytes
            )
        if self._num_refused is not None:
            text = "Requests refused while the service was paused."
            num = self._num_refused()
            yield CounterMetricFamily("agentloop_refused_requests", text, value=num)
        if self._dropped:
            text = "Items (lines, traces, rows) that a slow reader of events dropped."
            dropped = CounterMetricFamily("agentloop_reader_dropped", text, labels=["reader"])
            for reader, num_dropped in self._dropped.items():
                dropped.add_metric([reader], num_dropped())
            yield dropped
        yield CounterMetricFamily(
            "agentloop_sampled_tokens", "Sampled tokens.", value=self._num_tokens
        )
        for key, name, text in _STEP_GAUGES:
            if (value := number_of(self._rows.get(key))) is not None:
                yield _gauge(name, text, value * _UNITS.get(key, 1))
        for key, name, text in _ROLLOUT_GAUGES:
            family = GaugeMetricFamily(f"agentloop_{name}", text, labels=["tasks"])
            for prefix, tasks in _TASKS.items():
                if (value := number_of(self._rows.get(prefix + key))) is not None:
                    family.add_metric([tasks], value)
            if family.samples:
                yield family

    def _of_servers(self) -> Iterator[Metric]:
        families = {
            "healthy": "Whether the server accepts requests.",
            "running_requests": "Requests running on the server.",
            "kv_held_tokens": "Tokens in the server's KV cache that belong to running requests.",
            "kv_reserved_tokens": "Tokens in the server's KV cache reserved for running requests "
            "to grow.",
            "kv_parked_tokens": "Tokens in the server's KV cache of rollouts that are running a "
            "tool.",
            "kv_cached_tokens": "Tokens in the server's KV cache of finished turns, which can be "
            "reused or evicted.",
            "kv_capacity_tokens": "Capacity of the server's KV cache.",
            "policy_version": "Version of the server's weights.",
        }
        gauges = {
            name: GaugeMetricFamily(f"agentloop_server_{name}", text, labels=["server"])
            for name, text in families.items()
        }
        state = GaugeMetricFamily(
            "agentloop_server_state",
            "1 for the server's current state.",
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


def _amount(value: object) -> float:
    """Return a value by which a counter may be increased."""
    number = number_of(value)
    return number if number is not None and math.isfinite(number) and number > 0 else 0.0


def _of_sandbox(stats: Mapping[str, object]) -> Iterator[Metric]:
    for key, name, text in _SANDBOX_GAUGES:
        yield _gauge(name, text, number_of(stats[key]) or 0)
    text = "Sandbox workers that ended without having been retired."
    yield CounterMetricFamily(
        "agentloop_sandbox_lost_workers", text, value=number_of(stats["lost"])
    )
    calls = CounterMetricFamily(
        "agentloop_sandbox_calls",
        "Sandbox calls that ended, including those of rewards.",
        labels=["status"],
    )
    by_status = stats["calls"]
    assert isinstance(by_status, Mapping)
    for status, count in by_status.items():
        calls.add_metric([status], count)
    yield calls


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"agentloop_{name}", text, value=value)
