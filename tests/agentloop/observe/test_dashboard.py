"""The wiring that all commands share: readers, exporters, questions and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp.test_utils import make_mocked_request

from agentloop.events import Emit, Event, RolloutAbandoned, RolloutStarted
from agentloop.observe.dashboard import Dashboard
from agentloop.observe.live import Sources
from agentloop.trajectory import Trajectory


class PlayedExporter:
    num_dropped = 5

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.is_open = False

    def on_event(self, event: Event) -> None:
        assert self.is_open
        self.events.append(event)

    @asynccontextmanager
    async def open_exporter(self) -> AsyncIterator[PlayedExporter]:
        self.is_open = True
        yield self
        self.is_open = False


async def metrics_of(dashboard: Dashboard) -> str:
    body = (await dashboard.serve_metrics(make_mocked_request("GET", "/metrics"))).body
    assert isinstance(body, bytes)
    return body.decode()


async def test_events_reach_the_board_the_stalls_and_further_readers() -> None:
    heard: list[Event] = []
    dashboard = Dashboard(Sources({}), readers=[heard.append])
    event = RolloutStarted(Trajectory("r", []))
    dashboard.emit(event)
    assert heard == [event]
    assert list(dashboard.board.rows) == ["r"]
    assert "agentloop_rollouts_in_flight 1.0" in await metrics_of(dashboard)


async def test_exporter_gets_events_while_open() -> None:
    dashboard, exporter = Dashboard(Sources({})), PlayedExporter()
    inside = RolloutAbandoned("inside")
    dashboard.emit(RolloutAbandoned("before"))
    async with dashboard.exporting("sinks", exporter.open_exporter()):
        dashboard.emit(inside)
    dashboard.emit(RolloutAbandoned("after"))
    assert exporter.events == [inside]
    (line,) = (line for line in (await metrics_of(dashboard)).splitlines() if '"sinks"' in line)
    assert line.endswith(" 5.0")


async def test_visitors_question_is_answered_and_its_events_are_shown() -> None:
    async def answer(question: str, emit: Emit) -> Any:
        emit(RolloutStarted(Trajectory(f"about {question}", [])))

    dashboard = Dashboard(Sources({}))
    async with dashboard.running(answer) as ask:
        assert await ask("ants") == "about ants"
    assert list(dashboard.board.rows) == ["about ants"]
