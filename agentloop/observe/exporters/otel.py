"""OpenTelemetry: a trace for each rollout, with a span for each turn and each tool call.

    events ──a rollout has ended──> its spans, as plain data ──queue, bounded──> a thread ──OTLP──>

Spans are created from the trajectory's times after it has ended, so no events are buffered and a
span costs the event loop some microseconds. The thread encodes and sends. While the collector is
unavailable, slow or refuses, whole traces are dropped, counted and logged.

Names follow the GenAI part of the semantic conventions 1.41.1, the last release that includes it.
They are still in development, so all names that may change are in `Attribute`.

    invoke_agent agentloop      the rollout
    ├─ chat MODEL               a turn: from its start to its last token, including queueing
    └─ execute_tool NAME        a call: from its dispatch, which may be before the turn's last token

Prompts, model output and tool responses are included only with `otel.content`. A rollout requested
with a `traceparent` (W3C Trace Context) continues the caller's trace. Metrics, for which there is
Prometheus, and the callers' `tracestate` are not supported.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import zlib
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from urllib.parse import urlsplit

import anyio
import anyio.to_thread
import pydantic

from agentloop.distribution import install_hint, version
from agentloop.errors import SettingsError, summary_of
from agentloop.events import (
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutScored,
    RolloutStarted,
)
from agentloop.observe.exporters.drop_counter import DropCounter
from agentloop.plain_json import dumps, valid_text
from agentloop.trajectory import ToolCall, ToolCallStatus, ToolResult, Trajectory, Turn, TurnEnd

_SCHEMA_URL = "https://opentelemetry.io/schemas/1.41.1"
_BATCH_SPANS = 512  # per request, or slightly more, because traces are not split
_MAX_CONTENT_CHARS = 16_384  # longer texts are truncated
_PATH = "/v1/traces"
_TRACEPARENT_RE = re.compile("([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_MADE_UP = (ToolCallStatus.UNKNOWN_TOOL, ToolCallStatus.MALFORMED)  # the model made up the name


class Attribute(StrEnum):
    """Names of span attributes: those of the conventions, then our own."""

    OPERATION = "gen_ai.operation.name"
    PROVIDER = "gen_ai.provider.name"
    AGENT = "gen_ai.agent.name"
    CONVERSATION = "gen_ai.conversation.id"
    MODEL = "gen_ai.request.model"
    STREAM = "gen_ai.request.stream"
    FINISH_REASONS = "gen_ai.response.finish_reasons"
    FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
    INPUT_TOKENS = "gen_ai.usage.input_tokens"
    CACHED_TOKENS = "gen_ai.usage.cache_read.input_tokens"
    OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
    INPUT_MESSAGES = "gen_ai.input.messages"
    OUTPUT_MESSAGES = "gen_ai.output.messages"
    TOOL = "gen_ai.tool.name"
    TOOL_TYPE = "gen_ai.tool.type"
    CALL = "gen_ai.tool.call.id"
    ARGUMENTS = "gen_ai.tool.call.arguments"
    RESULT = "gen_ai.tool.call.result"
    ERROR = "error.type"
    ADDRESS = "server.address"
    PORT = "server.port"

    GROUP = "agentloop.group"
    STOP_REASON = "agentloop.stop_reason"
    REWARD = "agentloop.reward"
    REWARD_REASON = "agentloop.reward.reason"
    TURN = "agentloop.turn"
    SERVERS = "agentloop.servers"  # several if a turn was moved
    VERSIONS = "agentloop.policy_versions"  # that sampled the tokens of a turn
    STATUS = "agentloop.tool.status"
    QUEUED_S = "agentloop.tool.queued_s"


class OtelSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Export of traces to an OpenTelemetry collector."""

    endpoint: str = pydantic.Field(
        "",
        description="URL of a collector for OTLP over HTTP, such as http://127.0.0.1:4318. By "
        "default, no traces are exported. Set headers, such as a token, in the environment "
        "variable OTEL_EXPORTER_OTLP_HEADERS.",
    )
    content: bool = pydantic.Field(
        False, description="Record prompts, model output and tool responses in traces."
    )
    sampling_ratio: float = pydantic.Field(
        1.0,
        gt=0,
        le=1,
        description="Fraction of rollouts to trace, chosen by a hash of their ids. The sampled "
        "flag of a caller's `traceparent` takes precedence.",
    )

    @pydantic.field_validator("endpoint")
    @classmethod
    def _check_url(cls, endpoint: str) -> str:
        url = urlsplit(endpoint)
        if endpoint and (url.scheme not in ("http", "https") or not url.hostname):
            raise ValueError(f"{endpoint!r} does not have the form http://HOST:PORT")
        if url.password is not None:  # settings are written into a run's folder
            raise ValueError("remove the password from the URL; use OTEL_EXPORTER_OTLP_HEADERS")
        return endpoint


@dataclass(frozen=True, slots=True)
class CallerSpan:
    """The caller's span, from its `traceparent` header: https://www.w3.org/TR/trace-context."""

    trace_id: int
    span_id: int
    is_sampled: bool

    @classmethod
    def parse(cls, traceparent: str) -> CallerSpan | None:
        """Parse a `traceparent` header; return None for one that must be ignored."""
        match = _TRACEPARENT_RE.fullmatch(traceparent.strip())
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        trace_id, span_id, flags = (int(match[i], 16) for i in (2, 3, 4))
        return cls(trace_id, span_id, bool(flags & 1)) if trace_id and span_id else None


caller_span: ContextVar[CallerSpan | None] = ContextVar("caller_span", default=None)
"""Span of the caller that requested the rollouts started in this context."""


@dataclass(slots=True)
class _Span:
    """A span of a trace. Times are seconds since the start of the rollout."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, object]
    error: str = ""  # message
    is_client: bool = False


@dataclass(slots=True)
class _Trace:
    begun_unix_s: float
    spans: list[_Span]  # the root first
    prompt_ids: Sequence[int] = ()  # set with otel.content; decoded in the thread
    caller: CallerSpan | None = None


class Traces:
    """Exports traces; pass every event to `on_event`. Create it with `Traces.open`.

    Attributes:
        num_sent: Number of traces accepted by the collector.
    """

    EVERY_S = 2.0  # between two export requests, at most
    TIMEOUT_S = 10.0  # of a request, retries included; then its traces are dropped
    CLOSE_S = 5.0  # at the end, to send queued traces; the others are dropped
    MAX_WAITING = 4096  # traces; more are dropped and counted

    def __init__(
        self,
        settings: OtelSettings,
        *,
        model: str,
        is_scored: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> None:
        self._settings = settings
        self._model = model
        self._is_scored = is_scored
        self._decode = decode
        self._open: dict[str, tuple[RolloutStarted, CallerSpan | None]] = {}
        self._unscored: dict[str, tuple[Trajectory, str]] = {}  # with their groups, oldest first
        self._waiting: deque[_Trace] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._dropped = DropCounter(f"traces for otel.endpoint {settings.endpoint}")
        self._sender: _Sender | None = None
        self.num_sent = 0

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: OtelSettings,
        *,
        model: str,
        run: str = "",
        is_scored: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
    ) -> AsyncIterator[Traces]:
        """Start exporting; on leaving, wait up to `CLOSE_S` for queued traces to be sent.

        Without an endpoint nothing is exported.

        Args:
            model: Name of the model in spans.
            run: Name of the run, an attribute of everything that is sent.
            is_scored: Whether rollouts will be scored; their traces then wait for `RolloutScored`.
            decode: Decodes ids to the text of the prompt, for `otel.content`. Called in a thread.

        Raises:
            SettingsError: The extra `otel` is not installed.
        """
        traces = cls(settings, model=model, is_scored=is_scored, decode=decode)
        if not settings.endpoint:
            yield traces
            return
        # In a thread, because the import is slow.
        traces._sender = await anyio.to_thread.run_sync(
            _Sender, settings.endpoint, cls.TIMEOUT_S, run
        )
        # A daemon thread, so that a slow collector cannot keep the process from exiting.
        thread = threading.Thread(target=traces._work, name="send traces", daemon=True)
        thread.start()
        try:
            yield traces
        finally:
            await traces._close(thread)

    @property
    def num_dropped(self) -> int:
        """Number of traces that were dropped."""
        return self._dropped.num

    def on_event(self, event: Event) -> None:
        match event:
            case RolloutStarted():
                caller = caller_span.get()
                share = zlib.crc32(event.rollout_id.encode()) / 2**32
                is_chosen = caller.is_sampled if caller else share < self._settings.sampling_ratio
                if self._settings.endpoint and is_chosen:
                    self._open[event.rollout_id] = event, caller
            case RolloutFinished(trajectory=trajectory):
                if event.rollout_id not in self._open:
                    return
                started, caller = self._open.pop(event.rollout_id)
                if not self._is_scored:
                    self._add(trajectory, started.group, caller=caller)
                    return
                self._unscored[event.rollout_id] = trajectory, started.group
                if len(self._unscored) > self.MAX_WAITING:
                    self._add(*self._unscored.pop(next(iter(self._unscored))))
            case RolloutAbandoned():
                if event.rollout_id in self._open:
                    started, caller = self._open.pop(event.rollout_id)
                    self._add(started.record, started.group, is_abandoned=True, caller=caller)
            case RolloutScored():
                ended = self._unscored.pop(event.rollout_id, None)
                if ended is not None:
                    self._add(*ended, scored=event)

    def _add(
        self,
        trajectory: Trajectory,
        group: str,
        *,
        is_abandoned: bool = False,
        scored: RolloutScored | None = None,
        caller: CallerSpan | None = None,
    ) -> None:
        if len(self._waiting) >= self.MAX_WAITING:
            self._dropped.add(1, f"{self.MAX_WAITING} traces are already queued")
            return
        root = self._root(trajectory, group, is_abandoned)
        if scored is not None:
            if scored.reward is not None:
                root.attributes[Attribute.REWARD] = float(scored.reward)
            if self._settings.content:  # the reason may quote the answer
                root.attributes[Attribute.REWARD_REASON] = self._cut(scored.reason)
        spans = chain([root], self._turns_of(trajectory))
        trace = _Trace(trajectory.created_unix_s, list(spans), caller=caller)
        if self._settings.content and self._decode is not None:
            trace.prompt_ids = trajectory.prompt_ids
        self._waiting.append(trace)
        if len(self._waiting) * len(trace.spans) >= _BATCH_SPANS:
            self._wake.set()

    # --- spans ------------------------------------------------------------------------------------

    def _root(self, trajectory: Trajectory, group: str, is_abandoned: bool) -> _Span:
        ends = [turn.ended_s for turn in trajectory]
        num_context, num_prompt = len(trajectory.prompt_ids), 0
        for turn in trajectory:
            num_prompt += num_context
            num_context += len(turn.output_ids) + len(turn.observation_ids)
        attributes: dict[str, object] = {
            Attribute.OPERATION: "invoke_agent",
            Attribute.PROVIDER: "sglang",
            Attribute.AGENT: "agentloop",
            Attribute.MODEL: self._model,
            Attribute.CONVERSATION: trajectory.id,
            Attribute.STOP_REASON: "abandoned" if is_abandoned else str(trajectory.stop_reason),
        }
        if trajectory.has_ids:
            attributes[Attribute.INPUT_TOKENS] = num_prompt
            attributes[Attribute.OUTPUT_TOKENS] = trajectory.num_sampled_tokens
        if group:
            attributes[Attribute.GROUP] = group
        if trajectory.turns and not is_abandoned:
            attributes[Attribute.FINISH_REASONS] = [_finish_reason(trajectory.turns[-1])]
        error = ""
        if is_abandoned or trajectory.stop_reason.is_unscorable:
            attributes[Attribute.ERROR] = attributes[Attribute.STOP_REASON]
            error = self._cut(trajectory.error or "")
        name = "invoke_agent agentloop"
        return _Span(name, 0.0, max([trajectory.elapsed_s, *ends]), attributes, error)

    def _turns_of(self, trajectory: Trajectory) -> Iterator[_Span]:
        num_context = len(trajectory.prompt_ids)
        for index, turn in enumerate(trajectory):
            yield self._turn(trajectory.id, index, turn, num_context)
            calls = {call.id: call for call in turn.calls}
            for result in turn.results:
                yield self._call(trajectory.id, index, result, calls.get(result.call_id))
            num_context += len(turn.output_ids) + len(turn.observation_ids)

    def _turn(self, key: str, index: int, turn: Turn, num_context: int) -> _Span:
        attributes: dict[str, object] = {
            Attribute.OPERATION: "chat",
            Attribute.PROVIDER: "sglang",
            Attribute.MODEL: self._model,
            Attribute.CONVERSATION: key,
            Attribute.STREAM: True,
            Attribute.INPUT_TOKENS: num_context,
            Attribute.OUTPUT_TOKENS: len(turn.output_ids),
            Attribute.FINISH_REASONS: [_finish_reason(turn)],
            Attribute.TURN: index,
        }
        if turn.end is TurnEnd.ABORT:
            attributes[Attribute.ERROR] = "aborted"
        else:
            attributes[Attribute.CACHED_TOKENS] = turn.cached_tokens
        if turn.first_token_s is not None:
            attributes[Attribute.FIRST_CHUNK] = turn.first_token_s - turn.started_s
        if turn.servers:
            url = urlsplit(turn.servers[-1])
            attributes[Attribute.SERVERS] = list(turn.servers)
            attributes[Attribute.ADDRESS] = url.hostname or turn.servers[-1]
            attributes[Attribute.PORT] = url.port or (443 if url.scheme == "https" else 80)
        if turn.versions:
            attributes[Attribute.VERSIONS] = list({span.version: None for span in turn.versions})
        if self._settings.content:
            message = {
                "role": "assistant",
                "parts": [{"type": "text", "content": self._cut(turn.text)}],
                "finish_reason": _finish_reason(turn),
            }
            attributes[Attribute.OUTPUT_MESSAGES] = _json([message])
        end_s = max(turn.started_s, turn.generated_s)
        name = f"chat {self._model}"
        return _Span(name, turn.started_s, end_s, attributes, is_client=True)

    def _call(self, key: str, index: int, result: ToolResult, call: ToolCall | None) -> _Span:
        # Names made up by the model or a caller must not become span names.
        is_ours = result.status not in (*_MADE_UP, ToolCallStatus.CALLER)
        name = result.name
        if result.status in _MADE_UP and not self._settings.content:
            name = "unknown"
        attributes: dict[str, object] = {
            Attribute.OPERATION: "execute_tool",
            Attribute.TOOL: self._cut(name),
            Attribute.TOOL_TYPE: "function",
            Attribute.CALL: result.call_id,
            Attribute.CONVERSATION: key,
            Attribute.TURN: index,
            Attribute.STATUS: str(result.status),
            Attribute.QUEUED_S: max(0.0, result.started_s - result.dispatched_s),
        }
        if result.status.failed or result.status is ToolCallStatus.INFRASTRUCTURE:
            attributes[Attribute.ERROR] = str(result.status)
        if self._settings.content:
            attributes[Attribute.RESULT] = self._cut(result.content)
            if call is not None:
                arguments = _json(call.arguments) if call.arguments else call.raw
                attributes[Attribute.ARGUMENTS] = self._cut(arguments)
        name = f"execute_tool {result.name}" if is_ours else "execute_tool"
        return _Span(name, result.dispatched_s, result.ended_s, attributes)

    def _cut(self, text: str) -> str:
        return valid_text(text[:_MAX_CONTENT_CHARS])

    # --- the thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        while not (self._closing and not self._waiting):
            if not self._closing:
                self._wake.wait(self.EVERY_S)
                self._wake.clear()
            while traces := self._batch():
                self._send(traces)

    def _batch(self) -> list[_Trace]:
        traces: list[_Trace] = []
        num_spans = 0
        while self._waiting and num_spans < _BATCH_SPANS:
            traces.append(self._waiting.popleft())
            num_spans += len(traces[-1].spans)
        return traces

    def _send(self, traces: Sequence[_Trace]) -> None:
        assert self._sender is not None
        try:
            for trace in traces:
                self._add_prompt(trace)
            reason = self._sender.send(traces)
        except Exception as error:  # the exporter does not document what it raises
            reason = summary_of(error)
        if reason is not None:
            self._dropped.add(len(traces), reason)
        else:
            self.num_sent += len(traces)

    def _add_prompt(self, trace: _Trace) -> None:
        if trace.prompt_ids and self._decode is not None:
            content = self._cut(self._decode(trace.prompt_ids))
            # One message, as rendered by the chat template: roles cannot be recovered.
            parts = [{"type": "text", "content": content}]
            messages = _json([{"role": "user", "parts": parts}])
            trace.spans[0].attributes[Attribute.INPUT_MESSAGES] = messages

    async def _close(self, thread: threading.Thread) -> None:
        for trajectory, group in self._unscored.values():
            self._add(trajectory, group)
        self._closing = True
        self._wake.set()
        with anyio.move_on_after(self.CLOSE_S, shield=True):
            while thread.is_alive():  # noqa: ASYNC110  # threads set no events of a loop
                await anyio.sleep(0.01)
        num_left = len(self._waiting)
        self._waiting.clear()
        assert self._sender is not None
        self._sender.close()  # stops retries of the current request
        if num_left:
            self._dropped.add(num_left, f"not sent within CLOSE_S ({self.CLOSE_S:g})")
        self._dropped.report()


class _Sender:
    """Sends traces with OpenTelemetry's own exporter."""

    def __init__(self, endpoint: str, timeout_s: float, run: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http import Compression
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import OTELResourceDetector, Resource
            from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        except ImportError as error:
            raise SettingsError(
                f"otel.endpoint: OpenTelemetry is not installed: {install_hint('otel')}"
            ) from error
        attributes = {"service.name": "agentloop", "service.version": version()}
        if run:
            attributes["agentloop.run"] = run
        # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES take precedence.
        self._resource = Resource(attributes, _SCHEMA_URL).merge(OTELResourceDetector().detect())
        self._scope = InstrumentationScope("agentloop", version(), _SCHEMA_URL)
        url = endpoint.rstrip("/")
        self._exporter = OTLPSpanExporter(
            endpoint=url if url.endswith(_PATH) else url + _PATH,
            timeout=timeout_s,
            compression=Compression.Gzip,
        )
        self._last_log = _LogCapture()
        self._log = logging.getLogger(OTLPSpanExporter.__module__)
        self._log.addFilter(self._last_log)

    def send(self, traces: Sequence[_Trace]) -> str | None:
        """Send the traces; return the reason of a failure, or None."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._last_log.message = ""
        spans = [span for trace in traces for span in self._readable_spans(trace)]
        if self._exporter.export(spans) is SpanExportResult.SUCCESS:
            return None
        return self._last_log.message or "the exporter gave no reason"

    def close(self) -> None:
        self._exporter.shutdown()
        self._log.removeFilter(self._last_log)

    def _readable_spans(self, trace: _Trace) -> Iterator[object]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        sampled = TraceFlags(TraceFlags.SAMPLED)
        trace_id = trace.caller.trace_id if trace.caller else secrets.randbits(128) or 1
        begun_ns = round(trace.begun_unix_s * 1e9)
        parent: SpanContext | None = None
        if trace.caller:
            parent = SpanContext(trace_id, trace.caller.span_id, True, sampled)
        for index, span in enumerate(trace.spans):
            context = SpanContext(trace_id, secrets.randbits(64) or 1, False, sampled)
            failed = Attribute.ERROR in span.attributes
            yield ReadableSpan(
                name=span.name,
                context=context,
                parent=parent,
                resource=self._resource,
                attributes=span.attributes,
                kind=SpanKind.CLIENT if span.is_client else SpanKind.INTERNAL,
                instrumentation_scope=self._scope,
                status=Status(StatusCode.ERROR, span.error or None) if failed else Status(),
                start_time=begun_ns + round(span.start_s * 1e9),
                end_time=begun_ns + round(span.end_s * 1e9),
            )
            if index == 0:
                parent = context


class _LogCapture(logging.Filter):
    """Captures the exporter's log messages of each attempt; `Traces` logs them once."""

    message = ""

    def filter(self, record: logging.LogRecord) -> bool:
        self.message = record.getMessage()
        return False


def _finish_reason(turn: Turn) -> str:
    if turn.end is TurnEnd.ABORT:
        return "error"
    if turn.end is TurnEnd.FILTER:
        return "content_filter"
    return "tool_call" if turn.calls and turn.end is TurnEnd.STOP else str(turn.end)


def _json(value: object) -> str:
    return dumps(value).decode()
