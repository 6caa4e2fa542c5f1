"""Chunks of chat completions, translated to the events and objects of OpenAI's Responses API.

    chunks of a rollout ──ResponsesStream.feed──> events, the last of which has the whole response
                        ──whole──> the same response

The items are in the order in which the model wrote them: a thought, text, a call, and again. A call
that the agent has run is an `mcp_call` of the server "agentloop": that is what a tool is there that
the server runs, so that clients show it, with its output, and do not run it again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NotRequired, cast

import pydantic
import pydantic_core
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from agentloop.serving.protocols.responses.items import Item, messages_of_items
from agentloop.serving.protocols.responses.responses import ResponsesRequest
from agentloop.serving.schemas import (
    AskedCall,
    ChatCompletionChunk,
    ChunkChoice,
    ErrorBody,
    ExecutedCall,
    FinishReason,
    LikelyToken,
    TokenLogprob,
    Usage,
    UsageChunk,
)
from agentloop.trajectory import Message, StopReason, ToolCallStatus

StreamEvent = tuple[str, dict[str, Any]]
"""The name of a server-sent event and its data."""

ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]

SERVER_LABEL = "agentloop"
_BETWEEN_TURNS = "\n\n"  # with which chat completions join the texts of several turns


@pydantic.with_config(extra="allow")
class ResponseObject(TypedDict):
    """A response of the Responses API; the parameters of its request are repeated in it."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: ResponseStatus
    error: dict[str, object] | None
    incomplete_details: dict[str, object] | None
    output: list[dict[str, Any]]
    usage: dict[str, object] | None
    stop_reason: NotRequired[StopReason]


@dataclass(frozen=True)
class _TextForm:
    """The wording of items that consist of streamed text."""

    prefix: str  # of the items' ids
    part: str  # the type of the only part
    text_event: str
    part_event: str
    index: str  # the name of the part's index

    def item(self, id: str, status: str, parts: list[dict[str, object]]) -> dict[str, object]:
        content: dict[str, object]
        if self is _MESSAGE:
            content = {"type": "message", "role": "assistant", "content": parts}
        elif self is _SUMMARY:
            content = {"type": "reasoning", "summary": parts, "encrypted_content": None}
        else:
            content = {"type": "reasoning", "summary": [], "content": parts}
        return {"id": id, "status": status, **content}

    def part_of(self, text: str, logprobs: list[dict[str, object]]) -> dict[str, object]:
        part: dict[str, object] = {"type": self.part, "text": text}
        return part if self is not _MESSAGE else {**part, "annotations": [], "logprobs": logprobs}


_MESSAGE = _TextForm(
    "msg", "output_text", "response.output_text", "response.content_part", "content_index"
)
_THOUGHT = _TextForm(
    "rs", "reasoning_text", "response.reasoning_text", "response.content_part", "content_index"
)
_SUMMARY = _TextForm(
    "rs",
    "summary_text",
    "response.reasoning_summary_text",
    "response.reasoning_summary_part",
    "summary_index",
)


@dataclass
class _OpenItem:
    """The text item that is being written; its index is that in the output."""

    form: _TextForm
    id: str
    index: int
    text: str = ""
    logprobs: list[dict[str, object]] = field(default_factory=list)

    @property
    def where(self) -> dict[str, object]:
        return {"item_id": self.id, "output_index": self.index, self.form.index: 0}


class ResponsesStream:
    """Converts the chunks of a chat completion with one choice to the events of a response.

    The last chunk must be the one with the usage.

    Attributes:
        response: The response so far; None before the first chunk.
    """

    def __init__(self, request: ResponsesRequest) -> None:
        self.response: ResponseObject | None = None
        self._request = request
        self._custom_tools = request.custom_tools
        self._namespaces = request.namespaces
        self._thought = _SUMMARY if request.wants_summary else _THOUGHT
        self._output: list[dict[str, object]] = []
        self._open: _OpenItem | None = None
        self._num_events = 0
        self._finish: FinishReason = "stop"  # failed rollouts have an error instead of a last chunk
        self._logprobs: list[dict[str, object]] = []  # of all tokens
        self._unsent: list[dict[str, object]] = []
        self._continued: set[_TextForm] = set()  # whose next text begins with _BETWEEN_TURNS

    def feed(self, chunk: ChatCompletionChunk) -> Iterator[StreamEvent]:
        """Take the next chunk and yield its events."""
        if self.response is None:
            self.response = _empty_response(self._request, chunk)
            for name in ("response.created", "response.in_progress"):
                yield self._event(name, response=dict(self.response))
        for choice in chunk["choices"]:
            yield from self._feed_choice(choice)
        if "usage" in chunk:
            yield from self._end(cast(UsageChunk, chunk)["usage"])

    def _end(self, usage: Usage) -> Iterator[StreamEvent]:
        assert self.response is not None
        self.response["usage"] = _usage(usage)
        is_whole = self._finish != "length"
        yield from self._close("completed" if is_whole else "incomplete")
        last = self._output[-1]["type"] if self._output else None
        if self._finish == "stop" and last in (None, "reasoning", "mcp_call"):
            yield from self._text(_MESSAGE, "")  # the answer is empty, and not missing
            yield from self._close("completed")
        if not is_whole:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        yield self._last("completed" if is_whole else "incomplete")

    def fail(self, status: int, body: ErrorBody) -> Iterator[StreamEvent]:
        """Yield the last events of a response that failed with this error of chat completions."""
        error = error_form(body)["error"]
        code, message = error["code"], error["message"]
        if self.response is None:
            yield self._event("error", code=code, message=message, param=error["param"])
            return
        yield from self._close("incomplete")
        code = code or ("server_error" if status >= 500 else "invalid_prompt")
        self.response["error"] = {"code": code, "message": message}
        yield self._last("failed")

    def _last(self, status: ResponseStatus) -> StreamEvent:
        assert self.response is not None
        self.response["status"] = status
        self.response["output"] = self._with_logprobs()
        return self._event(f"response.{status}", response=dict(self.response))

    def _with_logprobs(self) -> list[dict[str, Any]]:
        """Return the output with the log-probabilities of all tokens at its last message.

        Which tokens came with which text depends on how the text was split.
        """
        output = without_logprobs(self._output)
        for item in reversed(output):
            if item["type"] == "message":
                item["content"][0]["logprobs"] = self._logprobs
                break
        return output

    def _event(self, kind: str, **data: object) -> StreamEvent:
        self._num_events += 1
        return kind, {"type": kind, "sequence_number": self._num_events - 1, **data}

    def _feed_choice(self, choice: ChunkChoice) -> Iterator[StreamEvent]:
        delta = choice["delta"]
        if "logprobs" in choice:
            sampled = [_logprob(token) for token in choice["logprobs"]["content"]]
            self._logprobs += sampled
            self._unsent += sampled
        if reasoning := delta.get("reasoning_content"):
            yield from self._text(self._thought, reasoning)
        if content := delta.get("content"):
            yield from self._text(_MESSAGE, content)
        for executed in delta.get("executed_tools", ()):
            yield from self._executed_call(executed)
        for call in delta.get("tool_calls", ()):
            yield from self._call(call)
        if choice["finish_reason"] is not None:
            self._finish = choice["finish_reason"]
        if "stop_reason" in choice and self.response is not None:
            self.response["stop_reason"] = choice["stop_reason"]

    # --- text -------------------------------------------------------------------------------------

    def _text(self, form: _TextForm, text: str) -> Iterator[StreamEvent]:
        if self._open is None or self._open.form is not form:
            yield from self._close("completed")
            if form in self._continued:
                self._continued.discard(form)
                text = text.removeprefix(_BETWEEN_TURNS)
            yield from self._begin(form)
        assert self._open is not None
        if text:
            self._open.text += text
            yield self._event(
                f"{form.text_event}.delta", **self._open.where, delta=text, **self._taken_logprobs()
            )

    def _begin(self, form: _TextForm) -> Iterator[StreamEvent]:
        index = len(self._output)
        self._open = _OpenItem(form, self._id(form.prefix), index)
        item = form.item(self._open.id, "in_progress", [])
        yield self._event("response.output_item.added", output_index=index, item=item)
        part = form.part_of("", [])
        yield self._event(f"{form.part_event}.added", **self._open.where, part=part)

    def _close(self, status: str) -> Iterator[StreamEvent]:
        written, self._open = self._open, None
        if written is None:
            return
        form, where = written.form, written.where
        part = form.part_of(written.text, written.logprobs)
        logprobs = {"logprobs": written.logprobs} if form is _MESSAGE else {}
        yield self._event(f"{form.text_event}.done", **where, text=written.text, **logprobs)
        yield self._event(f"{form.part_event}.done", **where, part=part)
        yield self._finish_item(form.item(written.id, status, [part]))

    def _taken_logprobs(self) -> dict[str, object]:
        """Return the log-probabilities of the tokens since the last delta, if it is of text."""
        assert self._open is not None
        if self._open.form is not _MESSAGE:
            return {}
        taken, self._unsent = self._unsent, []
        self._open.logprobs += taken
        return {"logprobs": taken}

    # --- calls ------------------------------------------------------------------------------------

    def _call(self, call: AskedCall) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        function = call["function"]
        named = self._namespaces.get(function["name"], {"name": function["name"]})
        item: dict[str, object] = {"call_id": call["id"], **named}
        if function["name"] in self._custom_tools:
            item = {"id": self._id("ctc"), "type": "custom_tool_call", **item}
            text = _custom_input(function["arguments"])
            yield from self._begin_call(item, "input", text, "response.custom_tool_call_input")
        else:
            item = {"id": self._id("fc"), "type": "function_call", **item}
            text = function["arguments"]
            event = "response.function_call_arguments"
            yield from self._begin_call(item, "arguments", text, event)
        yield self._finish_item(item)

    def _executed_call(self, call: ExecutedCall) -> Iterator[StreamEvent]:
        yield from self._close("completed")
        function = call["function"]
        index, id = len(self._output), self._id("mcp")
        item: dict[str, object] = {
            "id": id,
            "type": "mcp_call",
            "server_label": SERVER_LABEL,
            "name": function["name"],
        }
        arguments = function["arguments"]
        yield from self._begin_call(item, "arguments", arguments, "response.mcp_call_arguments")
        yield self._event("response.mcp_call.in_progress", item_id=id, output_index=index)
        status = "completed" if call["status"] == ToolCallStatus.OK else "failed"
        yield self._event(f"response.mcp_call.{status}", item_id=id, output_index=index)
        # The output is what the model read, also of a call that failed: `error` has another form in
        # every version of the API.
        yield self._finish_item({**item, "status": status, "output": call["output"], "error": None})
        self._continued = {_MESSAGE, self._thought}

    def _begin_call(
        self, item: dict[str, object], name: str, text: str, event: str
    ) -> Iterator[StreamEvent]:
        """Yield the events up to a call's arguments, and add these to the item."""
        item["status"] = "in_progress"
        index = len(self._output)
        added = {**item, name: ""}
        yield self._event("response.output_item.added", output_index=index, item=added)
        where = {"item_id": item["id"], "output_index": index}
        yield self._event(f"{event}.delta", **where, delta=text)
        called = {"name": item["name"]} if name == "arguments" else {}
        yield self._event(f"{event}.done", **where, **{name: text}, **called)
        item |= {name: text, "status": "completed"}

    def _finish_item(self, item: dict[str, object]) -> StreamEvent:
        index = len(self._output)
        self._output.append(item)
        return self._event("response.output_item.done", output_index=index, item=item)

    def _id(self, prefix: str) -> str:
        assert self.response is not None
        return f"{prefix}_{self.response['id'].removeprefix('resp_')}_{len(self._output)}"


def whole(request: ResponsesRequest, chunks: Iterable[ChatCompletionChunk]) -> ResponseObject:
    """Return the answer without a stream: the response in the last event of a stream.

    It is made from chunks, because a whole completion does not tell in which order the parts came.
    A stream sends a call of the caller's as soon as it is closed. Text that follows in the same
    turn comes after it there, and before it here; as messages both are the same.
    """
    stream = ResponsesStream(request)
    for chunk in chunks:
        for _ in stream.feed(chunk):
            pass
    assert stream.response is not None
    return stream.response


def without_logprobs(output: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of a response without log-probabilities, which may be long."""
    return [
        {**item, "content": [{**part, "logprobs": []} for part in item["content"]]}
        if item["type"] == "message"
        else item
        for item in output
    ]


_ITEMS: pydantic.TypeAdapter[list[Item]] = pydantic.TypeAdapter(list[Item])


def messages_of(response: ResponseObject) -> list[Message]:
    """Return the output as messages, for a request that continues this response."""
    return messages_of_items(_ITEMS.validate_python(response["output"]))


_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
}


def error_form(body: ErrorBody) -> ErrorBody:
    """Return an error of chat completions with this protocol's names of fields."""
    error = body["error"]
    named = re.match(r"([a-z_]+)([\w.\[\]]*)(?=: )", error["message"])
    if not error["param"] or not named or named[1] not in ("messages", *_NAMES):
        return body
    # Messages are numbered differently from the items of the input.
    name = "input" if named[1] == "messages" else _NAMES[named[1]] + named[2]
    return {"error": {**error, "message": name + error["message"][named.end() :], "param": name}}


def _empty_response(request: ResponsesRequest, chunk: ChatCompletionChunk) -> ResponseObject:
    """Return a response without output, which repeats the parameters of its request."""
    text, reasoning, choice = request.text, request.reasoning, request.tool_choice
    answer_format = text.format if text and text.format else None
    response: Any = {
        "id": f"resp_{chunk['id'].removeprefix('chatcmpl-')}",
        "object": "response",
        "created_at": chunk["created"],
        "model": chunk["model"],
        "status": "in_progress",
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "reasoning": {
            "effort": reasoning.effort if reasoning else None,
            "summary": reasoning.summary if reasoning and request.wants_summary else None,
        },
        "store": request.store is not False,
        "temperature": request.temperature,
        "text": {
            "format": answer_format.model_dump(by_alias=True, exclude_none=True)
            if answer_format
            else {"type": "text"}
        },
        "tool_choice": choice.model_dump()
        if isinstance(choice, pydantic.BaseModel)
        else choice or "auto",
        "tools": [
            tool.model_dump(exclude_none=tool.type == "custom") for tool in request.offered_tools
        ],
        "top_logprobs": request.top_logprobs or 0,
        "top_p": request.top_p,
        "truncation": "disabled",
        "usage": None,
    }
    answer: ResponseObject = response
    return answer


def _usage(usage: Usage) -> dict[str, object]:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},  # not counted apart
        "total_tokens": usage["total_tokens"],
    }


def _logprob(token: TokenLogprob) -> dict[str, object]:
    return {
        **_likely(token),
        "top_logprobs": [_likely(alternative) for alternative in token["top_logprobs"]],
    }


def _likely(token: LikelyToken) -> dict[str, object]:
    # The API has no null here; a part of a character has no bytes of its own.
    return {
        "token": token["token"],
        "logprob": token["logprob"],
        "bytes": token["bytes"] or [],
    }


def _custom_input(arguments: str) -> str:
    """Return the text for a custom tool, or the arguments if the model wrote other ones."""
    try:
        match pydantic_core.from_json(arguments):
            case {"input": str(text), **more} if not more:
                return text
    except ValueError:
        pass
    return arguments
