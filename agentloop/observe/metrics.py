"""Prometheus metrics, read from events and, when scraped, from what the router knows.

Names and units follow Prometheus's conventions: base units, `_total` for counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from agentloop.events import (
    CallFinished,
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
)
from agentloop.inference.router import ServerView

__all__ = ["Metrics"]

_SECONDS = (0.005, 0.02, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class Metrics:
    """Feed it every event by `seen`; `render()` is what /metrics answers."""

    def __init__(
        self, servers: Callable[[], Sequence[ServerView]], num_waiting: Callable[[], int]
    ) -> None:
        registry = CollectorRegistry()
        registry.register(_Servers(servers, num_waiting))
        self._registry = registry
        self._in_flight = Gauge(
            "agentloop_rollouts_in_flight",
            "Rollouts that have begun and not ended.",
            registry=registry,
        )
        self._rollouts = Counter(
            "agentloop_rollouts", "Rollouts that ended.", ["stop_reason"], registry=registry
        )
        self._tokens = Counter("agentloop_sampled_tokens", "Tokens sampled.", registry=registry)
        self._calls = Counter(
            "agentloop_tool_calls", "Tool calls that ended.", ["tool", "status"], registry=registry
        )
        self._moves = Counter(
            "agentloop_turns_moved", "Turns that went on elsewhere.", registry=registry
        )
        self._call_s = Histogram(
            "agentloop_tool_call_seconds",
            "From dispatch to result.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._first_token_s = Histogram(
            "agentloop_first_token_seconds",
            "From a turn's start to its first token, waiting included.",
            buckets=_SECONDS,
            registry=registry,
        )

    def seen(self, event: Event) -> None:
        match event:
            case TokensSampled(ids=ids):
                self._tokens.inc(len(ids))
            case RolloutStarted():
                self._in_flight.inc()
            case RolloutFinished(trajectory=trajectory):
                self._in_flight.dec()
                self._rollouts.labels(trajectory.stop_reason).inc()
            case RolloutAbandoned():
                self._in_flight.dec()
            case CallFinished(result=result):
                # A name that the model or a client made up must not become a label.
                known = result.status not in ("unknown_tool", "malformed", "caller")
                self._calls.labels(result.name if known else "", result.status).inc()
                self._call_s.observe(result.ended_s - result.dispatched_s)
            case TurnMoved():
                self._moves.inc()
            case TurnFinished(record=turn) if turn.first_token_s is not None:
                self._first_token_s.observe(turn.first_token_s - turn.started_s)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Servers(Collector):
    def __init__(
        self, servers: Callable[[], Sequence[ServerView]], num_waiting: Callable[[], int]
    ) -> None:
        self._servers = servers
        self._num_waiting = num_waiting

    def collect(self) -> Iterator[GaugeMetricFamily]:
        yield GaugeMetricFamily(
            "agentloop_waiting_requests",
            "Requests in the waiting room.",
            value=self._num_waiting(),
        )
        families = {
            "healthy": "Whether the server takes requests.",
            "running_requests": "Requests that the server is generating for.",
            "kv_held_tokens": "Tokens that these hold in its KV cache.",
            "kv_reserved_tokens": "Tokens that are kept there for their growth.",
            "kv_parked_tokens": "Tokens there of trajectories that wait for a tool.",
            "kv_capacity_tokens": "Size of its KV cache.",
        }
        gauges = {
            name: GaugeMetricFamily(f"agentloop_server_{name}", text, labels=["server"])
            for name, text in families.items()
        }
        state = GaugeMetricFamily(
            "agentloop_server_state", "1 for the state it is in.", labels=["server", "state"]
        )
        for view in self._servers():
            gauges["healthy"].add_metric([view.url], view.healthy)
            gauges["running_requests"].add_metric([view.url], view.num_running)
            gauges["kv_held_tokens"].add_metric([view.url], view.num_held_tokens)
            gauges["kv_reserved_tokens"].add_metric([view.url], view.num_reserved_tokens)
            gauges["kv_parked_tokens"].add_metric([view.url], view.num_parked_tokens)
            gauges["kv_capacity_tokens"].add_metric([view.url], view.capacity_tokens)
            state.add_metric([view.url, view.state], 1)
        yield state
        yield from gauges.values()
