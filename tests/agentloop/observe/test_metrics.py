"""What /metrics says after what happened."""

from __future__ import annotations

import pytest

from agentloop.agent.rollout import Rollout
from agentloop.events import CallFinished, RolloutAbandoned, RolloutStarted, TurnMoved
from agentloop.inference.health import ServerState
from agentloop.inference.router import ServerView
from agentloop.observe.metrics import Metrics
from agentloop.trajectory import CallStatus, ToolResult
from tests.support import END, ScriptedEngine, call_text, chat_format, chunks, written


def values(metrics: Metrics) -> dict[str, float]:
    lines = metrics.render().decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def made(views: list[ServerView] | None = None, num_waiting: int = 0) -> Metrics:
    return Metrics(lambda: views or [], lambda: num_waiting)


async def echo(text: str) -> str:
    """Say it again."""
    return text


@pytest.mark.anyio
async def test_a_rollout_is_counted() -> None:
    metrics, chat = made(), chat_format()
    texts = [call_text("echo", {"text": "x"}) + call_text("nope", {}), "done"]
    turns = [written(chat, text + END) for text in texts]
    await Rollout(
        ScriptedEngine(*(list(chunks(ids, [3])) for ids in turns)),
        chat,
        [{"role": "user", "content": "x"}],
        [echo],
        emit=metrics.seen,
    ).run()
    seen = values(metrics)
    assert seen["agentloop_rollouts_in_flight"] == 0
    assert seen['agentloop_rollouts_total{stop_reason="answered"}'] == 1
    assert seen["agentloop_sampled_tokens_total"] == sum(map(len, turns))
    assert seen['agentloop_tool_calls_total{status="ok",tool="echo"}'] == 1
    assert seen['agentloop_tool_calls_total{status="unknown_tool",tool=""}'] == 1
    assert seen["agentloop_first_token_seconds_count"] == 2
    assert seen["agentloop_tool_call_seconds_count"] == 2


def test_an_abandoned_rollout_is_no_longer_in_flight() -> None:
    metrics = made()
    metrics.seen(RolloutStarted("r", 3))
    assert values(metrics)["agentloop_rollouts_in_flight"] == 1
    metrics.seen(RolloutAbandoned("r"))
    assert values(metrics)["agentloop_rollouts_in_flight"] == 0


@pytest.mark.parametrize(
    "status", [CallStatus.UNKNOWN_TOOL, CallStatus.MALFORMED, CallStatus.CALLER]
)
def test_names_that_others_make_up_are_no_labels(status: CallStatus) -> None:
    metrics = made()
    result = ToolResult("c", 'made"up\n', status, "", 0, 0, 1)
    metrics.seen(CallFinished("r", 0, result))
    assert values(metrics)[f'agentloop_tool_calls_total{{status="{status}",tool=""}}'] == 1


def test_servers_are_asked_when_it_is_scraped() -> None:
    views = [
        ServerView("http://a", ServerState.HEALTHY, 2, 30, 20, 10, 100),
        ServerView("http://b", ServerState.DEAD, 0, 0, 0, 0, 50, reason="gone"),
    ]
    metrics = made(views, num_waiting=7)
    metrics.seen(TurnMoved("r", "http://b", "gone"))
    seen = values(metrics)
    assert seen["agentloop_waiting_requests"] == 7
    assert seen["agentloop_turns_moved_total"] == 1
    assert seen['agentloop_server_healthy{server="http://a"}'] == 1
    assert seen['agentloop_server_healthy{server="http://b"}'] == 0
    assert seen['agentloop_server_kv_held_tokens{server="http://a"}'] == 30
    assert seen['agentloop_server_kv_reserved_tokens{server="http://a"}'] == 20
    assert seen['agentloop_server_kv_parked_tokens{server="http://a"}'] == 10
    assert seen['agentloop_server_state{server="http://b",state="dead"}'] == 1
    views.clear()
    assert not any("server=" in name for name in values(metrics))
