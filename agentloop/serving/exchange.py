"""A request and its answer in a client's protocol, in terms of chat completions.

body ──parse──> Exchange.chat ──> rollouts ──> chunks ──events──> bytes of a stream
                                                 └──joined, whole──> a body
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol, Self

from aiohttp import web

from agentloop.serving.http import event_line, id_of
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, completion
from agentloop.serving.protocols.messages import answers as messages
from agentloop.serving.protocols.messages.messages import MessagesRequest
from agentloop.serving.protocols.responses import stream as responses
from agentloop.serving.protocols.responses.responses import ResponsesRequest
from agentloop.serving.protocols.responses.store import ResponseStore
from agentloop.serving.requests import ChatRequest
from agentloop.serving.schemas import ChatCompletionChunk, ErrorBody
from agentloop.trajectory import Trajectory

_COMMENT = b": nothing new\n\n"

Choices = Sequence[tuple[ChunkWriter, Trajectory]]
"""The choices of an answer, each with the writer of its chunks."""


def named_event(name: str, data: object) -> bytes:
    """Return one event of a stream whose events have names."""
    return b"event: " + name.encode() + b"\n" + event_line(data)


class Exchange(Protocol):
    """A request in a client's protocol, and how its answer is written.

    Attributes:
        chat: The request, as chat completions have it.
        tells_executed: Whether the protocol has no other form that clients display for calls that
            the agent has run, so that they are told in the reasoning.
        ping: The event that a stream sends while there is nothing new.
    """

    chat: ChatRequest
    tells_executed: bool
    ping: bytes

    @classmethod
    def parse(cls, body: bytes, store: ResponseStore) -> Self:
        """Parse a request's body.

        Args:
            store: Responses that it may continue.

        Raises:
            RequestError: A field is invalid or unsupported; the message names it.
        """
        ...

    def events(self, chunk: ChatCompletionChunk) -> Iterator[bytes]:
        """Yield what a stream says for a chunk; the last one has the usage and no choices."""
        ...

    def end(self) -> bytes:
        """Return what a stream ends with."""
        ...

    def fail(self, status: int, body: ErrorBody, request_id: str) -> bytes:
        """Return what a stream ends with after an error."""
        ...

    def whole(self, choices: Choices) -> object:
        """Return the body of an answer without a stream."""
        ...


class ChatExchange:
    """OpenAI's chat completions."""

    tells_executed = True
    ping = _COMMENT

    def __init__(self, chat: ChatRequest) -> None:
        self.chat = chat
        options = chat.stream_options
        self._with_usage = bool(options and options.include_usage)

    @classmethod
    def parse(cls, body: bytes, store: ResponseStore) -> Self:
        return cls(ChatRequest.parse(body))

    def events(self, chunk: ChatCompletionChunk) -> Iterator[bytes]:
        if chunk["choices"] or self._with_usage:
            yield event_line(chunk)

    def end(self) -> bytes:
        return b"data: [DONE]\n\n"

    def fail(self, status: int, body: ErrorBody, request_id: str) -> bytes:
        return event_line(body)

    def whole(self, choices: Choices) -> object:
        return completion(choices)


class MessagesExchange:
    """Anthropic's Messages."""

    tells_executed = False
    ping = named_event("ping", {"type": "ping"})

    def __init__(self, request: MessagesRequest) -> None:
        self.chat = request.to_chat()
        self._stream = messages.MessagesStream()

    @classmethod
    def parse(cls, body: bytes, store: ResponseStore) -> Self:
        return cls(MessagesRequest.parse(body))

    def events(self, chunk: ChatCompletionChunk) -> Iterator[bytes]:
        for event in self._stream.feed(chunk):
            yield named_event(*event)

    def end(self) -> bytes:
        return b""

    def fail(self, status: int, body: ErrorBody, request_id: str) -> bytes:
        return named_event("error", messages.error_form(status, body, request_id))

    def whole(self, choices: Choices) -> object:
        ((writer, trajectory),) = choices
        return messages.whole([*writer.whole(trajectory), writer.usage([trajectory])])


class ResponsesExchange:
    """OpenAI's Responses."""

    tells_executed = False
    ping = _COMMENT

    def __init__(self, request: ResponsesRequest, store: ResponseStore) -> None:
        self._request, self._store = request, store
        before = request.previous_response_id
        self._previous = store[before] if before is not None else ()
        self.chat = request.to_chat(self._previous)
        self._stream = responses.ResponsesStream(request)

    @classmethod
    def parse(cls, body: bytes, store: ResponseStore) -> Self:
        return cls(ResponsesRequest.parse(body, store.item), store)

    def events(self, chunk: ChatCompletionChunk) -> Iterator[bytes]:
        for event in self._stream.feed(chunk):
            yield named_event(*event)

    def end(self) -> bytes:
        assert self._stream.response is not None
        self._remember(self._stream.response)
        return b""

    def fail(self, status: int, body: ErrorBody, request_id: str) -> bytes:
        return b"".join(named_event(*event) for event in self._stream.fail(status, body))

    def whole(self, choices: Choices) -> object:
        ((writer, trajectory),) = choices
        response = responses.whole(
            self._request, [*writer.whole(trajectory), writer.usage([trajectory])]
        )
        self._remember(response)
        return response

    def _remember(self, response: responses.ResponseObject) -> None:
        if self._request.store is not False:
            conversation = self._request.conversation(self._previous)
            self._store.add(
                response["id"],
                [*conversation, *responses.messages_of(response)],
                responses.without_logprobs(response["output"]),
            )


def error_in_form_of(request: web.Request, status: int, body: ErrorBody) -> object:
    """Return an error in the form of the protocol that a request's path belongs to."""
    path = request.path
    if path.rstrip("/").endswith(("/v1/messages", "/v1/messages/count_tokens")):
        return messages.error_form(status, body, id_of(request))
    if path.rstrip("/").endswith("/v1/responses"):
        return responses.error_form(body)
    return body
