"""Traces as received by a collector: over HTTP, in protobuf."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import anyio
import pydantic
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from agentloop.errors import SettingsError
from agentloop.events import Event, RolloutAbandoned, RolloutFinished, RolloutScored, RolloutStarted
from agentloop.observe.exporters import otel
from agentloop.observe.exporters.otel import (
    Attribute,
    CallerSpan,
    OtelSettings,
    Traces,
    caller_span,
)
from agentloop.trajectory import ToolCallStatus, ToolResult, Trajectory
from tests.agentloop.observe import story
from tests.patience import patient
from tests.support import eventually, serving


@dataclass
class Collector:
    """Takes what comes, or answers with `status`; `gate` holds every answer back."""

    url: str = ""
    status: int = 200
    gate: anyio.Event | None = None
    requests: list[ExportTraceServiceRequest] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Collector]:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/traces", self._take)
        async with serving(app) as url:
            self.url = url
            yield self

    async def _take(self, request: web.Request) -> web.Response:
        body = await request.read()  # aiohttp has undone the compression
        if body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        self.headers.append({name.title(): value for name, value in request.headers.items()})
        if self.gate is not None:
            await self.gate.wait()
        if self.status != 200:
            return web.Response(status=self.status)
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        answer = ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


def value_of(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [value_of(element) for element in value.array_value.values]
    return getattr(value, kind)


def attributes(span: Any) -> dict[str, Any]:
    return {attribute.key: value_of(attribute.value) for attribute in span.attributes}


class FrequentTraces(Traces):
    EVERY_S = 0.001
    CLOSE_S = 15.0


class ImpatientTraces(FrequentTraces):
    TIMEOUT_S = 0.2
    CLOSE_S = 0.1
    MAX_WAITING = 10


class PatientTraces(FrequentTraces):
    """Has patience with a request, but none at the end."""

    TIMEOUT_S = 60
    CLOSE_S = 0.05


def settings(collector: Collector, **more: Any) -> OtelSettings:
    return OtelSettings(endpoint=collector.url, **more)


async def export_events(
    events: Sequence[Event], *, is_scored: bool = False, **more: Any
) -> tuple[Collector, Traces]:
    async with Collector().serving() as collector:
        async with FrequentTraces.open(
            settings(collector, **more),
            model="small",
            run="a-run",
            is_scored=is_scored,
            decode=lambda ids: "prompt of " + " ".join(map(str, ids)),
        ) as traces:
            for event in events:
                traces.on_event(event)
    return collector, traces


def ns(seconds: float) -> int:
    return round(story.BEGUN_UNIX_S * 1e9) + round(seconds * 1e9)


async def test_rollout_is_a_trace() -> None:
    collector, traces = await export_events(story.of_rollout(story.trajectory(), "1-task"))
    assert (traces.num_sent, traces.num_dropped) == (1, 0)
    root, first, failed, made_up, second = collector.spans
    assert len({span.trace_id for span in collector.spans}) == 1
    assert len({span.span_id for span in collector.spans}) == 5
    assert root.parent_span_id == b""
    assert {span.parent_span_id for span in collector.spans[1:]} == {root.span_id}
    assert [span.name for span in collector.spans] == [
        "invoke_agent agentloop",
        "chat small",
        "execute_tool python",
        "execute_tool",  # the model has made its name up
        "chat small",
    ]
    assert [(span.start_time_unix_nano, span.end_time_unix_nano) for span in collector.spans] == [
        (ns(0), ns(3)),
        (ns(0.5), ns(2.25)),
        (ns(1.5), ns(2.5)),
        (ns(2), ns(2)),
        (ns(2.5), ns(3)),
    ]
    kinds = {span.name: span.kind for span in collector.spans}
    assert kinds["chat small"] == 3  # CLIENT
    assert kinds["invoke_agent agentloop"] == kinds["execute_tool python"] == 1  # INTERNAL
    assert attributes(root) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.provider.name": "sglang",
        "gen_ai.agent.name": "agentloop",
        "gen_ai.request.model": "small",
        "gen_ai.conversation.id": "1-task.0",
        "gen_ai.usage.input_tokens": 5 + 11,
        "gen_ai.usage.output_tokens": 6,
        "gen_ai.response.finish_reasons": ["stop"],
        "agentloop.stop_reason": "answered",
        "agentloop.group": "1-task",
    }
    assert attributes(first) == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "sglang",
        "gen_ai.request.model": "small",
        "gen_ai.conversation.id": "1-task.0",
        "gen_ai.request.stream": True,
        "gen_ai.response.finish_reasons": ["tool_call"],
        "gen_ai.response.time_to_first_chunk": 0.5,
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "server.address": "127.0.0.1",
        "server.port": 30000,
        "agentloop.turn": 0,
        "agentloop.servers": ["http://127.0.0.1:30001", "http://127.0.0.1:30000"],
        "agentloop.policy_versions": ["6", "7"],
    }
    assert attributes(second)["gen_ai.usage.input_tokens"] == 11
    assert attributes(failed) == {
        "gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "python",
        "gen_ai.tool.type": "function", "gen_ai.tool.call.id": "c0",
        "gen_ai.conversation.id": "1-task.0", "error.type": "error", "agentloop.turn": 0,
        "agentloop.tool.status": "error", "agentloop.tool.queued_s": 0.25,
    }  # fmt: skip
    assert attributes(made_up)["gen_ai.tool.name"] == "unknown"
    assert [span.status.code for span in collector.spans] == [0, 0, 2, 2, 0]
    (resource,) = collector.requests[0].resource_spans
    resource_attributes = {
        attribute.key: value_of(attribute.value) for attribute in resource.resource.attributes
    }
    assert resource_attributes["service.name"] == "agentloop"
    assert resource_attributes["agentloop.run"] == "a-run"
    (scope,) = resource.scope_spans
    assert scope.scope.name == "agentloop"
    assert scope.schema_url == "https://opentelemetry.io/schemas/1.41.1"


@pytest.mark.parametrize("flags", ["00", "01", "03"])
async def test_callers_trace_is_continued(flags: str) -> None:
    trace_id, span_id = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    token = caller_span.set(CallerSpan.parse(f"00-{trace_id}-{span_id}-{flags}"))
    try:
        # The caller has decided whether it is traced, and not the rollout's id.
        collector, _ = await export_events(
            story.of_rollout(story.trajectory(), "1"), sampling_ratio=1e-9
        )
    finally:
        caller_span.reset(token)
    if flags == "00":
        assert collector.spans == []
        return
    root, *children = collector.spans
    assert {span.trace_id.hex() for span in collector.spans} == {trace_id}
    assert root.parent_span_id.hex() == span_id
    assert {span.parent_span_id for span in children} == {root.span_id}


@pytest.mark.parametrize(
    "header",
    [
        "", "nonsense", f"00-{'0' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'0' * 16}-01",
        f"ff-{'1' * 32}-{'1' * 16}-01", f"00-{'1' * 32}-{'1' * 16}-01-more",
        f"00-{'A' * 32}-{'1' * 16}-01", f"00-{'1' * 31}-{'1' * 16}-01",
    ],
)  # fmt: skip
def test_invalid_traceparent_is_ignored(header: str) -> None:
    assert CallerSpan.parse(header) is None


def test_later_traceparent_version_may_have_more_fields() -> None:
    assert CallerSpan.parse(f"01-{'1' * 32}-{'2' * 16}-00-more") == CallerSpan(
        int("1" * 32, 16), int("2" * 16, 16), False
    )


async def test_content_is_sent_only_if_enabled() -> None:
    record = story.trajectory()
    events = [
        *story.of_rollout(record),
        RolloutScored(record.id, 1.0, "1776", "1776 is right", 0.1),
    ]
    collector, _ = await export_events(events, is_scored=True)
    sent = b"".join(request.SerializeToString() for request in collector.requests)
    for text in (b"1/0", b"ZeroDivision", b"I compute", b"1776", b"rm -rf", b"prompt of"):
        assert text not in sent
    collector, _ = await export_events(events, is_scored=True, content=True)
    root, first, failed, made_up, _ = map(attributes, collector.spans)
    assert json.loads(root["gen_ai.input.messages"]) == [
        {"role": "user", "parts": [{"type": "text", "content": "prompt of 1 2 3 4 5"}]}
    ]
    assert json.loads(first["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": record.turns[0].text}],
            "finish_reason": "tool_call",
        }
    ]
    assert json.loads(failed["gen_ai.tool.call.arguments"]) == {"code": "1/0"}
    assert failed["gen_ai.tool.call.result"] == "ZeroDivisionError"
    assert made_up["gen_ai.tool.name"] == "rm -rf"
    assert root["agentloop.reward.reason"] == "1776 is right"


async def test_long_and_strange_content_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otel, "_MAX_CONTENT_CHARS", 20)
    record = story.trajectory()
    turn = record.turns[0]
    turn.text = "\ud800" + "x" * 1000
    turn.calls[0].arguments["code"] = 2**70
    turn.results[0] = ToolResult("c0", "python", ToolCallStatus.OK, "y" * 1000, 0, 0, 1)
    collector, _ = await export_events(story.of_rollout(record), content=True)
    _, first, call, *_ = map(attributes, collector.spans)
    text = json.loads(first["gen_ai.output.messages"])[0]["parts"][0]["content"]
    assert text == "?" + "x" * 19
    assert call["gen_ai.tool.call.result"] == "y" * 20
    assert len(call["gen_ai.tool.call.arguments"]) <= 20


async def test_trace_waits_for_the_reward() -> None:
    record = story.trajectory()
    async with Collector().serving() as collector:
        async with FrequentTraces.open(
            settings(collector), model="small", is_scored=True
        ) as traces:
            for event in story.of_rollout(record):
                traces.on_event(event)
            trajectory = story.trajectory("other")
            for event in story.of_rollout(trajectory):
                traces.on_event(event)
            traces.on_event(RolloutScored("other", 0.25, None, "", 0))
            traces.on_event(RolloutScored("nobody", 1.0, None, "", 0))
            await eventually(lambda: traces.num_sent == 1)
        # Nobody has scored the first: it is sent at the end, without.
        roots = [attributes(span) for span in collector.spans if not span.parent_span_id]
    rewards = {root["gen_ai.conversation.id"]: root.get("agentloop.reward") for root in roots}
    assert rewards == {"other": 0.25, record.id: None}


async def test_failed_rollout_has_an_error_status() -> None:
    broken = story.trajectory(infrastructure=True)
    collector, _ = await export_events(story.of_rollout(broken))
    root, *_, last = collector.spans
    assert attributes(root)["error.type"] == "infrastructure"
    assert root.status.message == "the server has gone"
    assert attributes(last)["error.type"] == "aborted"
    assert attributes(last)["gen_ai.response.finish_reasons"] == ["error"]
    record = story.trajectory()
    record.elapsed_s = 0.0
    events: list[Event] = [RolloutStarted(record, "g"), RolloutAbandoned(record.id)]
    collector, _ = await export_events(events, is_scored=True)
    root = collector.spans[0]
    assert attributes(root)["error.type"] == "abandoned"
    assert root.end_time_unix_nano == ns(3)


async def test_headers_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20secret")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    collector, _ = await export_events(story.of_rollout(story.trajectory()))
    assert collector.headers[0]["Authorization"] == "Bearer secret"
    resource = collector.requests[0].resource_spans[0].resource
    resource_attributes = {
        attribute.key: value_of(attribute.value) for attribute in resource.attributes
    }
    assert resource_attributes["service.name"] == "mine"


async def test_share_of_the_rollouts_is_traced() -> None:
    events = [
        event
        for number in range(200)
        for event in story.of_rollout(Trajectory(f"{number}-task.0", [1]))
    ]
    collector, traces = await export_events(events, sampling_ratio=0.25)
    assert 20 < traces.num_sent < 80
    again, _ = await export_events(events, sampling_ratio=0.25)
    ids = [
        {attributes(span)["gen_ai.conversation.id"] for span in collected.spans}
        for collected in (collector, again)
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(("status", "reason"), [(404, "Not Found"), (413, HTTPStatus(413).phrase)])
async def test_refused_traces_are_counted_and_logged(
    status: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with Collector(status=status).serving() as collector:
        async with FrequentTraces.open(settings(collector), model="small") as traces:
            for number in range(3):
                for event in story.of_rollout(story.trajectory(str(number))):
                    traces.on_event(event)
                await eventually(lambda num=number + 1: traces.num_dropped == num)  # type: ignore[misc]
            collector.status = 200
            for event in story.of_rollout(story.trajectory("last")):
                traces.on_event(event)
            await eventually(lambda: traces.num_sent == 1)
    assert traces.num_dropped == 3
    first, later = caplog.messages
    assert "dropped 1 (1 in total)" in first
    assert reason in first
    assert "dropped 2 (3 in total)" in later


async def test_unavailable_collector_does_not_block_loop(caplog: pytest.LogCaptureFixture) -> None:
    async with Collector().serving() as collector:
        away = settings(collector)
    async with ImpatientTraces.open(away, model="small") as traces:
        for number in range(100):
            for event in story.of_rollout(story.trajectory(str(number))):
                traces.on_event(event)
        assert len(traces._waiting) <= 10
    assert traces.num_sent == 0
    await eventually(lambda: traces.num_dropped == 100)
    assert "10 traces are already queued" in caplog.text


async def test_hanging_collector_does_not_delay_the_end() -> None:
    gate = anyio.Event()
    async with Collector(gate=gate).serving() as collector:
        with anyio.fail_after(patient(15)):
            async with PatientTraces.open(settings(collector), model="small") as traces:
                for event in story.of_rollout(story.trajectory()):
                    traces.on_event(event)
                await eventually(lambda: bool(collector.headers))
                for event in story.of_rollout(story.trajectory("late")):
                    traces.on_event(event)
            assert traces.num_dropped == 1  # the other one is under way still
        gate.set()
        await eventually(lambda: traces.num_sent == 1)


async def test_without_an_endpoint_nothing_is_sent() -> None:
    async with Traces.open(OtelSettings(), model="small") as traces:
        for event in story.run():
            traces.on_event(event)
    assert (traces.num_sent, traces.num_dropped, traces._open) == (0, 0, {})


async def test_extra_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(SettingsError, match=r"agentloop-rl\[otel\]"):
        async with Traces.open(OtelSettings(endpoint="http://127.0.0.1:1"), model="small"):
            pass


@pytest.mark.parametrize("endpoint", ["collector:4318", "ftp://x", "http://", "http://a:b@c"])
def test_invalid_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(pydantic.ValidationError, match=r"HOST:PORT|OTEL_EXPORTER_OTLP_HEADERS"):
        OtelSettings(endpoint=endpoint)


def test_names_are_those_of_the_conventions() -> None:
    conventional = {
        value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")
    }
    ours = {name for name in Attribute if name.startswith("gen_ai.")}
    assert ours - conventional == set()


def test_no_state_remains_after_a_rollout() -> None:
    """No state remains after a rollout has ended, with or without a trace."""
    traces = Traces(OtelSettings(), model="small")
    record = story.trajectory()
    traces.on_event(RolloutFinished(record.id, record))
    traces.on_event(RolloutAbandoned("nobody"))
    assert (traces._open, traces._unscored, len(traces._waiting)) == ({}, {}, 0)
