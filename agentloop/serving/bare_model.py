"""The bare model over HTTP: one message per request, in a session or by itself.

    POST /v1/sessions                        a session with base URLs for OpenAI's and Anthropic's
                                             clients
    POST /v1/sessions/KEY/v1/...             the model, recorded in that session
    GET  /v1/sessions/KEY[/trajectories]     what was recorded
    DELETE /v1/sessions/KEY                  the end of the session

Whoever knows a session's key may use it: the key cannot be guessed, and is no token of the service.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from weakref import WeakKeyDictionary

import anyio
import pydantic
from aiohttp import web
from typing_extensions import TypedDict

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import prompt_of
from agentloop.agent.sessions import ModelSession, ModelSessions, TurnRequest
from agentloop.agent.tools import CallerTool
from agentloop.aio import Slot
from agentloop.events import Emit
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import dumps
from agentloop.sandbox.openapi import EVENTS, JSON, JSON_LINES, Response, Responses, Route
from agentloop.serving.answering import Answering
from agentloop.serving.exchange import ChatExchange, Exchange, MessagesExchange, ResponsesExchange
from agentloop.serving.http import BODY_ERRORS, json_response, read_body, send
from agentloop.serving.idempotency import AnswerAttempt, IdempotentAnswers
from agentloop.serving.protocols.chat.chat_completions import completion
from agentloop.serving.protocols.messages.answers import AnthropicError, MessageAnswer, TokenCount
from agentloop.serving.protocols.messages.messages import MessagesRequest, TokenCountRequest
from agentloop.serving.protocols.responses.responses import ResponsesRequest
from agentloop.serving.protocols.responses.store import ResponseStore
from agentloop.serving.protocols.responses.stream import ResponseObject
from agentloop.serving.requests import ChatRequest, parse, with_overrides
from agentloop.serving.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorBody,
    Model,
    ModelList,
    TrajectoryLine,
    UsageChunk,
)
from agentloop.trajectory import Message, Trajectory

_SESSIONS = "/v1/sessions/"


class ModelSessionRequest(pydantic.BaseModel):
    """The body of `POST /v1/sessions`."""

    model_config = pydantic.ConfigDict(extra="forbid")

    sampling: Sampling | None = pydantic.Field(
        None, description="Parameters of requests that bring none of their own."
    )


class SessionBranch(TypedDict):
    """A branch of a session: a history whose ids are one sequence."""

    id: str
    parent: str | None
    reason: str


class SessionStatus(TypedDict):
    """The record of a session, in numbers."""

    name: str
    num_turns: int
    num_sampled_tokens: int
    num_cut: int
    branches: list[SessionBranch]


class OpenedModelSession(TypedDict):
    """A new session and its base URLs."""

    name: str
    base_url: str
    """For OpenAI's clients."""
    anthropic_base_url: str
    """For Anthropic's clients, which add /v1/messages."""
    url: str
    """The session itself."""


class BareModel:
    """The handlers of sessions, and of the model without tools of its own."""

    def __init__(
        self,
        sessions: ModelSessions,
        chat: ChatFormat,
        *,
        name: str,
        sampling: Sampling,
        context_length: Callable[[], int],
        answering: Answering,
        slots: anyio.CapacityLimiter,
        check_open: Callable[[], None] = lambda: None,
        created: int = 0,
        io_timeout_s: float = 60.0,
    ) -> None:
        """
        Args:
            name: the model's name, for clients.
            sampling: parameters of requests that bring none of their own.
            slots: how many requests may run at a time.
            check_open: raises an error if no request is accepted at present.
        """
        self.name = name
        self._sessions, self._chat = sessions, chat
        self._sampling = sampling
        self._context_length = context_length
        self._answering, self._slots = answering, slots
        self._check_open = check_open
        self._created = created
        self._io_timeout_s = io_timeout_s
        self._stores = WeakKeyDictionary[ModelSession, ResponseStore]()
        self._answers = WeakKeyDictionary[ModelSession, IdempotentAnswers]()

    async def answer(
        self,
        request: web.Request,
        exchange: Exchange,
        attempt: AnswerAttempt,
        session: ModelSession | None = None,
    ) -> web.StreamResponse:
        """Answer a request by one message of the model for each choice.

        A message whose client leaves before it is sent any of it is taken back, unless a retry
        will get it.

        Args:
            session: where it is recorded; None: in a session of its own, which ends with it.
        """
        chat_request = exchange.chat
        self._check_open()
        writers = self._answering.writers(
            chat_request, self.name, is_agent=False, frame=attempt.frame
        )
        model_session = session or self._sessions.open(is_listed=False)
        unsent: dict[int, Trajectory] = {}
        sent: set[int] = set()  # choices of which the client was sent something

        def as_message(index: int, trajectory: Trajectory) -> Message:
            writer = writers[index]
            if chat_request.stream or chat_request.logprobs:
                # The history needs no log-probabilities, and building them takes long.
                plain = chat_request.model_copy(update={"logprobs": None, "n": None})
                (writer,) = self._answering.writers(plain, self.name, is_agent=False)
            return completion([(writer, trajectory)])["choices"][0]["message"]

        async def run(index: int, emit: Emit) -> Trajectory:
            # In this order: one session may not take them all.
            # no deadline: until another request ends, which has its own
            async with Slot(model_session.slots), Slot(self._slots):
                turn_request = self._turn_request(chat_request, index, model_session)
                unsent[index] = trajectory = await model_session.complete(
                    turn_request, partial(as_message, index), emit
                )
            return trajectory

        try:
            return await self._answering.answer(
                request, exchange, writers, attempt.runs(writers, run), sent.add
            )
        finally:
            if not attempt.is_remembered:
                for index in unsent.keys() - sent:
                    model_session.discard(unsent[index])
            if session is None:
                self._sessions.close(model_session)

    def _turn_request(self, request: ChatRequest, index: int, session: ModelSession) -> TurnRequest:
        sampling, options = None, request.turn_options()
        if session.is_rollout:
            options = replace(options, parameters={})
        else:
            base = with_overrides(session.sampling, request.sampling_overrides(), "sampling")
            sampling = base.of_sibling(index)
        tools = request.tools if request.tools and request.tool_choice != "none" else []
        return TurnRequest(
            request.messages,
            tools=[CallerTool(tool) for tool in tools],
            sampling=sampling,
            has_seed=request.seed is not None and not session.is_rollout,
            max_tokens=request.token_limit,
            max_thought_tokens=request.thinking_token_budget,
            options=options,
            template_arguments=request.template_arguments,
        )

    # --- handlers -------------------------------------------------------------------------------

    async def open(self, request: web.Request) -> web.Response:
        body = await self._body(request)
        options = parse(ModelSessionRequest, body) if body.strip() else ModelSessionRequest()
        self._check_open()
        sampling = options.sampling or self._sampling
        session = self._sessions.open(sampling=sampling)
        url = f"{request.url.origin()}{_SESSIONS}{session.key}"
        opened: OpenedModelSession = {
            "name": session.name,
            "base_url": f"{url}/v1",
            "anthropic_base_url": url,
            "url": url,
        }
        return json_response(opened, status=201)

    async def status(self, request: web.Request) -> web.Response:
        return json_response(self._session(request).status())

    async def close(self, request: web.Request) -> web.Response:
        session = self._session(request)
        self._sessions.close(session)
        return json_response(session.status())

    async def trajectories(self, request: web.Request) -> web.StreamResponse:
        trajectories = self._session(request).trajectories
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        for trajectory in trajectories:
            line = dumps({"trajectory": trajectory.to_dict_per_token()}) + b"\n"
            await send(request, response, line, timeout_s=self._io_timeout_s)
        return response

    async def answer_in_session(
        self, request: web.Request, kind: type[Exchange]
    ) -> web.StreamResponse:
        session = self._session(request)
        if session not in self._stores:
            self._stores[session], self._answers[session] = ResponseStore(), IdempotentAnswers()
        store, answers = self._stores[session], self._answers[session]
        body = await self._body(request)
        exchange = kind.parse(body, store)
        async with answers.attempt(request, body) as attempt:
            return await self.answer(request, exchange, attempt, session)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """Count the tokens of a prompt, in a session or not."""
        chat_request = TokenCountRequest.parse(await self._body(request)).to_chat()
        chat = self._chat.with_arguments(chat_request.template_arguments)
        tools = [CallerTool(tool).schema for tool in chat_request.tools or ()]
        ids = await prompt_of(chat, chat_request.messages, tools, self._context_length())
        count: TokenCount = {"input_tokens": len(ids)}
        return json_response(count)

    async def models(self, request: web.Request) -> web.Response:
        self._session(request)
        body: ModelList = {"object": "list", "data": [self.entry(self.name)]}
        return json_response(body)

    def entry(self, name: str) -> Model:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "agentloop"}

    def _session(self, request: web.Request) -> ModelSession:
        return self._sessions[request.match_info["key"]]

    async def _body(self, request: web.Request) -> bytes:
        return await read_body(request, self._io_timeout_s)


_ANSWER = "The answer, with `stream` as it is generated."
COMPLETION: Responses = {
    200: Response(
        f"{_ANSWER} An error after the status was sent is the last event.",
        {JSON: ChatCompletion, EVENTS: ChatCompletionChunk | UsageChunk | ErrorBody},
        last_event="[DONE]",
    )
}
RESPONSE: Responses = {200: Response(_ANSWER, {JSON: ResponseObject, EVENTS: dict[str, object]})}
MESSAGE: Responses = {200: Response(_ANSWER, {JSON: MessageAnswer, EVENTS: dict[str, object]})}
TOKEN_COUNT: Responses = {200: Response("The number.", {JSON: TokenCount})}
_KEY = {"key": "The session's key, as in its URL."}
_UNKNOWN: Responses = {404: Response("No session is open under this key.", {JSON: ErrorBody})}
_RECORD: Responses = {200: Response("What was recorded.", {JSON: SessionStatus}), **_UNKNOWN}


def in_anthropics_form(responses: Responses) -> Responses:
    """Return the responses of a route, with errors as Anthropic's clients expect them."""
    refused = Response("The token is missing or wrong, or the host or origin is.", {})
    return {
        status: Response(response.description, {JSON: AnthropicError})
        if status != 200
        else response
        for status, response in {401: refused, 403: refused, **responses}.items()
    }


SESSION_ROUTES = [
    Route("POST", "/v1/sessions", BareModel.open, "Open a session",
          {201: Response("The session and its base URLs.", {JSON: OpenedModelSession}),
           **BODY_ERRORS},
          ModelSessionRequest, is_body_optional=True),
    Route("GET", "/v1/sessions/{key}", BareModel.status, "Describe a session", _RECORD,
          parameters=_KEY),
    Route("DELETE", "/v1/sessions/{key}", BareModel.close, "Close a session", _RECORD,
          parameters=_KEY),
    Route("GET", "/v1/sessions/{key}/trajectories", BareModel.trajectories,
          "Get a session's branches as trajectories",
          {200: Response("A line each.", {JSON_LINES: TrajectoryLine}), **_UNKNOWN},
          parameters=_KEY),
    Route("POST", "/v1/sessions/{key}/v1/chat/completions",
          partial(BareModel.answer_in_session, kind=ChatExchange),
          "Continue a conversation by one message",
          {**COMPLETION, **_UNKNOWN, **BODY_ERRORS}, ChatRequest, parameters=_KEY),
    Route("POST", "/v1/sessions/{key}/v1/responses",
          partial(BareModel.answer_in_session, kind=ResponsesExchange),
          "Continue a conversation by one message, in the protocol of OpenAI's Responses",
          {**RESPONSE, **_UNKNOWN, **BODY_ERRORS}, ResponsesRequest, parameters=_KEY),
    Route("POST", "/v1/sessions/{key}/v1/messages",
          partial(BareModel.answer_in_session, kind=MessagesExchange),
          "Continue a conversation by one message, in Anthropic's protocol",
          {**MESSAGE, **in_anthropics_form({**_UNKNOWN, **BODY_ERRORS})},
          MessagesRequest, parameters=_KEY),
    Route("POST", "/v1/sessions/{key}/v1/messages/count_tokens", BareModel.count_tokens,
          "Count the tokens of a prompt",
          {**TOKEN_COUNT, **in_anthropics_form({**_UNKNOWN, **BODY_ERRORS})},
          TokenCountRequest, parameters=_KEY),
    Route("GET", "/v1/sessions/{key}/v1/models", BareModel.models, "List the model",
          {200: Response("The model.", {JSON: ModelList}), **_UNKNOWN}, parameters=_KEY),
]  # fmt: skip
