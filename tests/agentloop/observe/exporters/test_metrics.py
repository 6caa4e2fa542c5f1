"""The contents of /metrics after events."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from agentloop.agent.rollout import Rollout
from agentloop.events import (
    CallFinished,
    Event,
    GroupFinished,
    Measured,
    RolloutAbandoned,
    RolloutScored,
    RolloutStarted,
    TurnMoved,
    TurnPlaced,
    TurnStarted,
    WeightsLoaded,
)
from agentloop.inference.replicas import ServerView
from agentloop.inference.scheduling.health import ServerState
from agentloop.observe.exporters.metrics import Metrics
from agentloop.trajectory import ToolCallStatus, ToolResult, Trajectory
from tests.agentloop.observe import story
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written

DOCS = Path(__file__).parents[4] / "docs"
STATS = {
    "workers": 2,
    "slots": 4,
    "busy": 1,
    "waiting": 3,
    "sessions": 1,
    "lost": 5,
    "calls": {"ok": 6, "timeout": 1},
}


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def make_metrics(views: list[ServerView] | None = None, num_waiting: int = 0) -> Metrics:
    return Metrics(lambda: views or [], lambda: num_waiting)


def fed(events: Sequence[Event] = ()) -> Metrics:
    """Return metrics with all sources of state, after `events`."""
    view = ServerView("http://a", ServerState.HEALTHY, 2, 30, 20, 10, 100, weight_version="7")
    metrics = Metrics(
        lambda: [view],
        lambda: 7,
        sandbox=lambda: STATS,
        no_progress_s=lambda: 12.5,
        queue=lambda: (3, 4096),
        num_refused=lambda: 9,
        dropped={"event_log": lambda: 8},
    )
    for event in events:
        metrics.on_event(event)
    return metrics


def families(metrics: Metrics) -> list[Metric]:
    """Return the samples without the creation times that the client adds."""
    parsed = text_string_to_metric_families(metrics.render().decode())
    return [family for family in parsed if not family.name.endswith("_created")]


async def echo(text: str) -> str:
    """Say it again."""
    return text


async def test_rollout_is_counted() -> None:
    metrics, chat = make_metrics(), chat_format()
    texts = [call_text("echo", {"text": "x"}) + call_text("nope", {}), "done"]
    turns = [written(chat, text + END) for text in texts]
    await Rollout(
        ScriptedEngine(*(list(chunks(ids, [3])) for ids in turns)),
        chat,
        [{"role": "user", "content": "x"}],
        [echo],
        emit=metrics.on_event,
    ).run()
    samples = values(metrics)
    assert samples["agentloop_rollouts_in_flight"] == 0
    assert samples['agentloop_rollouts_total{stop_reason="answered"}'] == 1
    assert samples["agentloop_sampled_tokens_total"] == sum(map(len, turns))
    assert samples['agentloop_tool_calls_total{status="ok",tool="echo"}'] == 1
    assert samples['agentloop_tool_calls_total{status="unknown_tool",tool=""}'] == 1
    assert samples["agentloop_first_token_seconds_count"] == 2
    assert samples["agentloop_tool_call_seconds_count"] == 2


def test_abandoned_rollout_is_no_longer_in_flight() -> None:
    metrics = make_metrics()
    metrics.on_event(RolloutStarted(Trajectory("r", [])))
    assert values(metrics)["agentloop_rollouts_in_flight"] == 1
    metrics.on_event(RolloutAbandoned("r"))
    assert values(metrics)["agentloop_rollouts_in_flight"] == 0


@pytest.mark.parametrize(
    "status", [ToolCallStatus.UNKNOWN_TOOL, ToolCallStatus.MALFORMED, ToolCallStatus.CALLER]
)
def test_made_up_names_are_not_labels(status: ToolCallStatus) -> None:
    metrics = make_metrics()
    result = ToolResult("c", 'made"up\n', status, "", 0, 0, 1)
    metrics.on_event(CallFinished("r", 0, result))
    assert values(metrics)[f'agentloop_tool_calls_total{{status="{status}",tool=""}}'] == 1


def test_servers_are_queried_at_each_scrape() -> None:
    views = [
        ServerView("http://a", ServerState.HEALTHY, 2, 30, 20, 10, 100),
        ServerView("http://b", ServerState.DEAD, 0, 0, 0, 0, 50, reason="gone"),
    ]
    metrics = make_metrics(views, num_waiting=7)
    metrics.on_event(TurnMoved("r", "http://b", "gone"))
    samples = values(metrics)
    assert samples["agentloop_waiting_requests"] == 7
    assert samples["agentloop_turns_moved_total"] == 1
    assert samples['agentloop_server_healthy{server="http://a"}'] == 1
    assert samples['agentloop_server_healthy{server="http://b"}'] == 0
    assert samples['agentloop_server_kv_held_tokens{server="http://a"}'] == 30
    assert samples['agentloop_server_kv_reserved_tokens{server="http://a"}'] == 20
    assert samples['agentloop_server_kv_parked_tokens{server="http://a"}'] == 10
    assert samples['agentloop_server_state{server="http://b",state="dead"}'] == 1
    views.clear()
    assert not any("server=" in name for name in values(metrics))


def test_run_is_counted() -> None:
    samples = values(fed(story.run()))
    expected = {
        "agentloop_sampled_tokens_total": 18,
        "agentloop_rollouts_in_flight": 0,
        'agentloop_rollouts_total{stop_reason="answered"}': 2,
        'agentloop_rollouts_total{stop_reason="infrastructure"}': 1,
        "agentloop_rollouts_abandoned_total": 1,
        "agentloop_rollout_seconds_sum": 9,
        "agentloop_rollout_tokens_sum": 18,
        "agentloop_rollout_turns_sum": 6,
        # 5 of the prompt, and 5 + 4 + 2 in front of the second turn
        "agentloop_prompt_tokens_total": 3 * (5 + 11),
        "agentloop_cached_tokens_total": 3 * (2 + 9),
        'agentloop_turns_total{end="abort"}': 1,
        'agentloop_tool_calls_total{status="error",tool="python"}': 3,
        "agentloop_tool_wait_seconds_sum": 0.75,
        'agentloop_rollout_reward_bucket{le="0.0"}': 1,
        "agentloop_rollout_reward_count": 2,
        "agentloop_rollouts_without_reward_total": 1,
        "agentloop_reward_seconds_sum": 0.5,
        "agentloop_groups_started_total": 3,
        'agentloop_groups_total{outcome="has_signal"}': 1,
        'agentloop_groups_total{outcome="no_reward"}': 1,
        'agentloop_groups_total{outcome="not_rolled_out"}': 1,
        'agentloop_group_rollouts_total{choice="kept"}': 2,
        'agentloop_group_rollouts_total{choice="dropped"}': 1,
        "agentloop_group_mean_reward_sum": 0.5,
        "agentloop_policy_version": 7,
        "agentloop_weight_sync_seconds_sum": 1.25,
        'agentloop_weight_loads_total{outcome="loaded"}': 1,
        'agentloop_weight_loads_total{outcome="failed"}': 1,
        "agentloop_steps_total": 1,
        "agentloop_train_step": 1,
        'agentloop_mean_reward{tasks="trained"}': 0.5,
        'agentloop_mean_reward{tasks="held_out"}': 0.75,
        "agentloop_trained_samples_total": 2,
        "agentloop_step_seconds_total": 6,
        'agentloop_step_phase_seconds_total{phase="wait"}': 3,
        "agentloop_learner_peak_memory_bytes": 2 * 2**30,
    }
    assert {name: samples.get(name) for name in expected} == expected
    assert (
        'agentloop_tool_errors_in_correct_ratio{tasks="trained"}' not in samples
    )  # None in the row


def test_other_state_is_queried_at_each_scrape() -> None:
    samples = values(fed())
    assert samples["agentloop_sandbox_waiting_calls"] == 3
    assert samples['agentloop_sandbox_calls_total{status="timeout"}'] == 1
    assert samples["agentloop_sandbox_lost_workers_total"] == 5
    assert samples["agentloop_no_progress_seconds"] == 12.5
    assert samples["agentloop_queue_groups"] == 3
    assert samples["agentloop_queue_bytes"] == 4096
    assert samples["agentloop_refused_requests_total"] == 9
    assert samples['agentloop_server_policy_version{server="http://a"}'] == 7
    assert samples['agentloop_reader_dropped_total{reader="event_log"}'] == 8


def test_missing_parts_have_no_metrics() -> None:
    names = {name.partition("{")[0] for name in values(make_metrics())}
    assert not {name for name in names if re.search("sandbox|queue|still|learner|policy", name)}


def test_turn_waits_until_it_is_placed() -> None:
    now_s = 0.0
    metrics = Metrics(list, lambda: 0, clock=lambda: now_s)
    metrics.on_event(TurnStarted("r", 0))
    now_s = 2.5
    metrics.on_event(TurnPlaced("r", 0, "http://a", story.WHY))
    now_s = 9.0
    metrics.on_event(TurnPlaced("r", 0, "http://b", story.WHY))  # it was moved: that is no new turn
    assert values(metrics)["agentloop_turn_wait_seconds_sum"] == 2.5
    assert values(metrics)["agentloop_turn_wait_seconds_count"] == 1


def test_steps_add_up_and_the_last_one_is_shown() -> None:
    metrics = make_metrics()
    metrics.on_event(Measured({"step": 1, "step_s": 2.0, "learner/entropy": 0.5, "num_learned": 3}))
    metrics.on_event(
        Measured({"step": 2, "step_s": 4.0, "learner/entropy": 0.25, "num_learned": 0})
    )
    metrics.on_event(Measured({"step": 2, "held_out/reward": 0.5}))
    samples = values(metrics)
    assert samples["agentloop_steps_total"] == 2
    assert samples["agentloop_step_seconds_total"] == 6
    assert samples["agentloop_trained_samples_total"] == 3
    assert samples["agentloop_train_step"] == 2
    assert samples["agentloop_learner_entropy_nats"] == 0.25


@given(
    st.dictionaries(
        st.sampled_from([*story.STEP_ROW, *story.HELD_OUT_ROW, "x"]),
        st.none() | st.booleans() | st.floats() | st.integers() | st.just("x"),
    )
)
def test_unusual_rows_are_handled(row: dict[str, Any]) -> None:
    """For example gradients that are not finite, or a learner of another version."""
    metrics = make_metrics()
    metrics.on_event(Measured(row))
    metrics.render()


def test_version_that_is_not_a_number_is_not_shown() -> None:
    metrics = make_metrics()
    metrics.on_event(WeightsLoaded("default", 1.0, ["http://a"], []))
    assert "agentloop_policy_version" not in values(metrics)


def test_groups_without_signal_are_counted() -> None:
    metrics = make_metrics()
    metrics.on_event(GroupFinished("g", {}, {"a": "equal rewards"}, 1.0, False))
    assert values(metrics)['agentloop_groups_total{outcome="no_signal"}'] == 1


def test_negative_rewards() -> None:
    metrics = make_metrics()
    metrics.on_event(RolloutScored("r", -0.75, None, "", 0))
    samples = values(metrics)
    assert samples['agentloop_rollout_reward_bucket{le="0.0"}'] == 1
    assert samples["agentloop_rollout_reward_sum"] == -0.75


# --- conventions, the dashboard, the document -----------------------------------------------------

_BASE_UNITS = ("seconds", "bytes", "ratio", "tokens", "nats", "versions")
_OTHER_UNITS = (
    *("ms", "milliseconds", "us", "ns", "minutes", "hours", "days", "s"),
    *("kib", "mib", "gib", "kb", "mb", "gb", "kilobytes", "megabytes", "gigabytes", "bits"),
    *("percent", "pct", "permille"),
)


def test_names_follow_the_conventions() -> None:
    """The rules of `promtool check metrics` (prometheus.io/docs/practices/naming)."""
    metrics = families(fed(story.run()))
    assert len(metrics) > 60
    for family in metrics:
        words = family.name.split("_")
        assert re.fullmatch(r"agentloop(_[a-z0-9]+)+", family.name), family.name
        assert family.documentation.strip(), family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert words[-1] not in ("total", "count", "sum", "bucket", "info"), family.name
        assert family.type not in words, family.name
        assert not set(words) & set(_OTHER_UNITS), family.name
        units = [word for word in words if word in _BASE_UNITS]
        assert not units or words[-1] == units[-1], f"{family.name}: the unit comes last"
        for sample in family.samples:
            assert sample.name.endswith("_total") == (family.type == "counter"), sample.name
            labels = set(sample.labels) - ({"le"} if family.type == "histogram" else set())
            assert all(re.fullmatch("[a-z][a-z_]*", label) for label in labels), sample.name
            assert "le" not in labels, sample.name


def test_label_values_are_bounded() -> None:
    """Their number does not grow with rollouts, groups and tasks."""
    once = set(values(fed(story.run())))
    again = fed(story.run())
    for number in range(20):
        record = story.trajectory(f"other-{number}")
        record.turns[0].results[1] = ToolResult(
            "c", f"made-up-{number}", ToolCallStatus.UNKNOWN_TOOL, "", 0, 0, 0
        )
        for event in story.of_rollout(record, f"group-{number}"):
            again.on_event(event)
        again.on_event(
            GroupFinished(f"group-{number}", {}, {record.id: f"why {number}"}, 0.1, False)
        )
    outcome = 'agentloop_groups_total{outcome="no_signal"}'
    assert {name for name in values(again) if "_created" not in name} <= once | {outcome}


def expressions(panels: list[dict[str, Any]]) -> Iterator[str]:
    for panel in panels:
        yield from (target["expr"] for target in panel.get("targets", []))
        yield from expressions(panel.get("panels", []))


def test_dashboard_shows_every_metric_and_no_other() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text("utf-8"))
    shown = set(re.findall(r"\bagentloop_\w+", " ".join(expressions(dashboard["panels"]))))
    metrics = families(fed(story.run()))
    defined = {sample.name for family in metrics for sample in family.samples}
    assert shown - defined == set()
    forgotten = [
        family.name for family in metrics if not {sample.name for sample in family.samples} & shown
    ]
    assert forgotten == []


def test_dashboard_can_be_imported() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text("utf-8"))
    assert dashboard["schemaVersion"] == 42
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    assert variables["datasource"]["query"] == "prometheus"
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}", panel["title"]
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == "${datasource}", panel["title"]
            assert set(re.findall(r"\$(\w+)", target["expr"])) <= {*variables, "__rate_interval"}
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places), "panels lie over one another"
    assert max(x for x, _ in places) < 24
