"""The service's OpenAPI 3.1 document, made from the types that its handlers use.

    service()   the operations of the service, one for each route
    document()  the document of these, and of others that a service has beside them

Source: https://spec.openapis.org/oas/v3.1.1. What it has no words for: `schema` is that of one
server-sent event, and of lines of JSON it is that of an array of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pydantic
from pydantic.json_schema import GenerateJsonSchema

from agentloop.api.bodies import (
    Chunk,
    Completion,
    ErrorBody,
    Health,
    Model,
    ModelList,
    RolloutLine,
    UsageChunk,
)
from agentloop.api.requests import ChatRequest

__all__ = ["Answer", "Body", "Operation", "document", "service"]

Json = dict[str, Any]

_ABOUT = (
    "The agent answers in OpenAI's protocol, running its own tools; and it gives whole "
    "trajectories. Details: docs/http.md."
)


@dataclass(frozen=True, slots=True)
class Body:
    """What is sent in one content type: of a type that pydantic can describe, or, of events, one of
    several. Of none: text."""

    types: tuple[Any, ...]
    content_type: str = "application/json"
    ends_with: str | None = None  # the data of the last event, which is not JSON


@dataclass(frozen=True, slots=True)
class Answer:
    """What comes with a status."""

    meaning: str
    bodies: tuple[Body, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """A route. Those of `/healthz` and its like are open: they want no token."""

    method: Literal["get", "post"]
    path: str
    summary: str
    answers: Mapping[int, Answer]
    asks: type[pydantic.BaseModel] | None = None
    parameters: Mapping[str, str] = field(default_factory=dict)  # of the path, and what they are
    is_open: bool = False

    @property
    def id(self) -> str:
        words = self.path.replace("{", "").replace("}", "").replace(".", "_").split("/")
        return "_".join([self.method, *filter(None, words)])


def _error(meaning: str) -> Answer:
    return Answer(meaning, (Body((ErrorBody,)),))


def _gives(meaning: str, given: Any) -> Answer:
    return Answer(meaning, (Body((given,)),))


_REQUEST_ID: Json = {
    "description": "That of the request, where it has a plain one; else a new one.",
    "required": True,
    "schema": {"type": "string"},
}
_BAD = _error("The request is wrong; the message names the field.")
_LATE = _error("The body did not arrive in time.")
_LARGE = _error("The body is larger than `serve.max_body_mib`.")
_FAILED = _error("The infrastructure failed, or nothing new is begun.")
_NO_MODEL = _error("Another model than the one that is served.")
_NO_TOKEN = _error("No token, or another one.")
_FOREIGN = _error("The `Host` is not the server's, or the `Origin` is another site.")


def service(*, rollouts: type[pydantic.BaseModel], waits: Any) -> list[Operation]:
    """The operations of `agentloop serve`.

    Args:
        rollouts: what `POST /v1/rollouts` asks.
        waits: what `GET /v1/waits` gives.
    """
    asking = {400: _BAD, 408: _LATE, 413: _LARGE, 503: _FAILED}
    events = (Chunk, UsageChunk, ErrorBody)
    answered = Answer(
        "The answer; with `stream`, as it is written. An error that comes too late for a status "
        "is the last event.",
        (Body((Completion,)), Body(events, "text/event-stream", ends_with="[DONE]")),
    )
    lines = Answer(
        "Trajectories, each as it ends.", (Body((RolloutLine,), "application/x-ndjson"),)
    )
    return [
        Operation(
            "post",
            "/v1/chat/completions",
            "The agent answers, running its own tools",
            {200: answered, 404: _NO_MODEL, **asking},
            asks=ChatRequest,
        ),
        Operation(
            "post",
            "/v1/rollouts",
            "Prompts in, trajectories out",
            {200: lines, **asking},
            asks=rollouts,
        ),
        Operation("get", "/v1/models", "The one model", {200: _gives("It.", ModelList)}),
        Operation(
            "get",
            "/v1/models/{model}",
            "The one model, by its name",
            {200: _gives("It.", Model), 404: _NO_MODEL},
            parameters={"model": "Its name; slashes in it may stay."},
        ),
        Operation(
            "get",
            "/v1/waits",
            "What is waiting for what, and since when; the servers",
            {200: _gives("As the router knows them.", waits)},
        ),
        *(
            Operation(
                "get",
                path,
                "Whether it is well",
                {
                    200: _gives("An inference server is healthy.", Health),
                    503: _gives("None is.", Health),
                },
                is_open=True,
            )
            for path in ("/healthz", "/health")
        ),
        Operation(
            "get",
            "/metrics",
            "Prometheus's metrics",
            {200: Answer("In its text format.", (Body((), "text/plain"),))},
        ),
        Operation(
            "get",
            "/openapi.json",
            "This document",
            {200: _gives("OpenAPI 3.1.", dict[str, Any])},
        ),
    ]


def document(operations: Iterable[Operation], *, version: str, has_token: bool) -> Json:
    """The document, as plain data.

    Args:
        version: the service's.
        has_token: callers must send one.
    """
    operations = [_with_refusals(operation, has_token) for operation in operations]
    schemas = _Schemas(operations)
    paths: Json = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _described(
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


def _described(operation: Operation, schemas: _Schemas, has_token: bool) -> Json:
    described: Json = {
        "operationId": operation.id,
        "summary": operation.summary,
        "responses": {
            str(status): {
                "description": answer.meaning,
                "headers": {"X-Request-Id": _REQUEST_ID},
                "content": {body.content_type: schemas.sent(body) for body in answer.bodies},
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
            "content": {"application/json": {"schema": schemas.asked(operation.asks)}},
        }
    if has_token and not operation.is_open:
        described["security"] = [{"token": []}]
    return described


class _Schemas:
    """The schemas of all types of some operations, the named ones once."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        asked = [(one.asks, "validation") for one in operations if one.asks is not None]
        bodies = [body for one in operations for to in one.answers.values() for body in to.bodies]
        sent = [(each, "serialization") for body in bodies for each in body.types]
        self._found, rest = pydantic.TypeAdapter.json_schemas(
            [
                (each, mode, pydantic.TypeAdapter(each))
                for each, mode in dict.fromkeys(asked + sent)
            ],
            ref_template="#/components/schemas/{model}",
            schema_generator=_Generator,
        )
        self.named: Json = rest.get("$defs", {})

    def asked(self, model: type[pydantic.BaseModel]) -> Json:
        return self._found[model, "validation"]

    def sent(self, body: Body) -> Json:
        """What OpenAPI calls a media type."""
        schemas = [self._found[each, "serialization"] for each in body.types]
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
    """Without titles that say a field's name again; what is sent has all fields of its record."""

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
