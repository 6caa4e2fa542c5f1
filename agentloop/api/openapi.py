"""Generate the service's OpenAPI 3.1 document from the types that its handlers use.

    service()   the operations of the service, one for each route
    document()  the document of these operations and any others

Source: https://spec.openapis.org/oas/v3.1.1, which does not define streams: here the schema of a
stream of server-sent events is that of one event, and the schema of JSON lines is that of an array.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from agentloop.api.requests import ChatRequest
from agentloop.api.schemas import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorBody,
    HealthStatus,
    Model,
    ModelList,
    RolloutLine,
    UsageChunk,
)

__all__ = ["Answer", "Body", "Operation", "document", "service"]

Json = dict[str, Any]

_ABOUT = (
    "The agent answers in OpenAI's protocol and runs its own tools. Whole trajectories are "
    "available as well. Details: docs/http.md."
)


@dataclass(frozen=True, slots=True)
class Body:
    """A response body of one content type, described by one type or, for events, by several.

    Without types it is plain text.
    """

    types: tuple[Any, ...]
    content_type: str = "application/json"
    ends_with: str | None = None  # data of the last event, which is not JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """The response with a given status."""

    meaning: str
    bodies: tuple[Body, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """A route; an open one, such as `/healthz`, requires no token."""

    method: Literal["get", "post"]
    path: str
    summary: str
    answers: Mapping[int, Answer]
    asks: type[pydantic.BaseModel] | None = None
    # Path parameters and their descriptions.
    parameters: Mapping[str, str] = field(default_factory=dict)
    is_open: bool = False

    @property
    def id(self) -> str:
        words = self.path.replace("{", "").replace("}", "").replace(".", "_").split("/")
        return "_".join([self.method, *filter(None, words)])


def _error(meaning: str) -> Answer:
    return Answer(meaning, (Body((ErrorBody,)),))


def _answer(meaning: str, given: Any) -> Answer:
    return Answer(meaning, (Body((given,)),))


_REQUEST_ID: Json = {
    "description": "The request's own id if it is well-formed, else a new one.",
    "required": True,
    "schema": {"type": "string"},
}
_BAD = _error("The request is invalid; the message names the field.")
_LATE = _error("The body did not arrive in time.")
_LARGE = _error("The body is larger than `serve.max_body_mib`.")
_FAILED = _error("The infrastructure failed, or no new work is accepted.")
_NO_MODEL = _error("The requested model is not served.")
_NO_TOKEN = _error("The token is missing or wrong.")
_FOREIGN = _error("The `Host` is not the server's, or the `Origin` is another site.")


def service(*, rollouts: type[pydantic.BaseModel], waits: Any) -> list[Operation]:
    """Return the operations of `agentloop serve`.

    Args:
        rollouts: Type of the request body of `POST /v1/rollouts`.
        waits: Type of the response body of `GET /v1/waits`.
    """
    asking = {400: _BAD, 408: _LATE, 413: _LARGE, 503: _FAILED}
    events = (ChatCompletionChunk, UsageChunk, ErrorBody)
    answered = Answer(
        "The answer, with `stream` as it is generated. An error after the status was sent "
        "is the last event.",
        (Body((ChatCompletion,)), Body(events, "text/event-stream", ends_with="[DONE]")),
    )
    lines = Answer(
        "Trajectories, each sent when it ends.",
        (Body((RolloutLine,), "application/x-ndjson"),),
    )
    return [
        Operation(
            "post",
            "/v1/chat/completions",
            "Answer a conversation; the agent runs its own tools",
            {200: answered, 404: _NO_MODEL, **asking},
            asks=ChatRequest,
        ),
        Operation(
            "post",
            "/v1/rollouts",
            "Run rollouts of prompts and return their trajectories",
            {200: lines, **asking},
            asks=rollouts,
        ),
        Operation("get", "/v1/models", "List the model", {200: _answer("The model.", ModelList)}),
        Operation(
            "get",
            "/v1/models/{model}",
            "Get the model by name",
            {200: _answer("The model.", Model), 404: _NO_MODEL},
            parameters={"model": "Name of the model; slashes need not be escaped."},
        ),
        Operation(
            "get",
            "/v1/waits",
            "List what every rollout is waiting for and how long, and the servers",
            {200: _answer("The router's current state.", waits)},
        ),
        *(
            Operation(
                "get",
                path,
                "Check the service's health",
                {
                    200: _answer("At least one inference server is healthy.", HealthStatus),
                    503: _answer("No inference server is healthy.", HealthStatus),
                },
                is_open=True,
            )
            for path in ("/healthz", "/health")
        ),
        Operation(
            "get",
            "/metrics",
            "Get Prometheus metrics",
            {200: Answer("Metrics in the text format.", (Body((), "text/plain"),))},
        ),
        Operation(
            "get",
            "/openapi.json",
            "Get this document",
            {200: _answer("An OpenAPI 3.1 document.", dict[str, Any])},
        ),
    ]


def document(operations: Iterable[Operation], *, version: str, has_token: bool) -> Json:
    """Return the document as plain data.

    Args:
        version: Version of the service.
        has_token: Whether callers must send a token.
    """
    operations = [_with_refusals(operation, has_token) for operation in operations]
    schemas = _Schemas(operations)
    paths: Json = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation_object(
            operation, schemas, has_token
        )
    components: Json = {"schemas": schemas.named}
    if has_token:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "agentloop", "version": version, "description": _ABOUT},
        "paths": paths,
        "components": components,
    }


def _with_refusals(operation: Operation, has_token: bool) -> Operation:
    answers = {403: _FOREIGN, **operation.answers}
    if has_token and not operation.is_open:
        answers[401] = _NO_TOKEN
    return replace(operation, answers=dict(sorted(answers.items())))


def _operation_object(operation: Operation, schemas: _Schemas, has_token: bool) -> Json:
    described: Json = {
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": {
            str(status): {
                "description": answer.meaning,
                "headers": {"X-Request-Id": _REQUEST_ID},
                "content": {body.content_type: schemas.media_type(body) for body in answer.bodies},
            }
            for status, answer in operation.answers.items()
        },
    }
    if operation.parameters:
        described["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": meaning,
                "schema": {"type": "string", "minLength": 1},
            }
            for name, meaning in operation.parameters.items()
        ]
    if operation.asks is not None:
        described["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas.of_request(operation.asks)}},
        }
    if has_token and not operation.is_open:
        described["security"] = [{"token": []}]
    return described


class _Schemas:
    """The JSON schemas of all types of the operations, with named ones defined once."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        request_types = [(one.asks, "validation") for one in operations if one.asks is not None]
        bodies = [body for one in operations for to in one.answers.values() for body in to.bodies]
        response_types = [(type_, "serialization") for body in bodies for type_ in body.types]
        self._found, rest = pydantic.TypeAdapter.json_schemas(
            [
                (type_, mode, pydantic.TypeAdapter(type_))
                for type_, mode in dict.fromkeys(request_types + response_types)
            ],
            ref_template="#/components/schemas/{model}",
            schema_generator=_Generator,
        )
        self.named: Json = rest.get("$defs", {})

    def of_request(self, model: type[pydantic.BaseModel]) -> Json:
        return self._found[model, "validation"]

    def media_type(self, body: Body) -> Json:
        """Return an OpenAPI media type object for a response body."""
        schemas = [self._found[type_, "serialization"] for type_ in body.types]
        if body.content_type == "text/event-stream":
            return {"schema": _event(schemas, body.ends_with)}
        if not schemas:
            return {"schema": {"type": "string"}}
        (schema,) = schemas
        if body.content_type == "application/x-ndjson":
            return {"schema": {"type": "array", "items": schema}}
        return {"schema": schema}


def _event(schemas: list[Json], ends_with: str | None) -> Json:
    of_json = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"anyOf": schemas},
    }
    data = of_json if ends_with is None else {"anyOf": [of_json, {"const": ends_with}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


class _Generator(GenerateJsonSchema):
    """Omits titles that repeat field names, and requires all fields of sent dataclasses."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        if self.mode == "serialization" and field["type"] == "dataclass-field":
            return True
        return super().field_is_required(field, total)

    def default_schema(self, schema: Any) -> Json:
        if self.mode == "serialization":
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)
