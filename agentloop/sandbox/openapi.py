"""The routes of an HTTP service: a table from which its router and its OpenAPI document are made.

    Route         a method and a path, the handler, and the types of the request and the responses
    add_routes()  registers routes with aiohttp's router
    document()    the OpenAPI 3.1 document of routes

Source: https://spec.openapis.org/oas/v3.1.1, which does not define streams: here the schema of a
stream of server-sent events is that of one event, and the schema of JSON lines is that of an array.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import pydantic
from aiohttp import web
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

JSON = "application/json"
JSON_LINES = "application/x-ndjson"
EVENTS = "text/event-stream"
TEXT = "text/plain"


@dataclass(frozen=True, slots=True)
class Response:
    """A response: its description, and the type of its body by media type.

    For JSON lines it is the type of a line, and for server-sent events that of an event's data.
    """

    description: str
    content: Mapping[str, Any] = field(default_factory=dict)
    last_event: str | None = None  # data of a stream's last event, which is not JSON


Responses = Mapping[int | Literal["default"], Response]
"""Responses by status."""


@dataclass(frozen=True, slots=True)
class Route:
    """A route of a service.

    Attributes:
        path: Path in aiohttp's syntax; `{name:regex}` is `{name}` in the document.
        handler: Called with the service and the request.
        responses: A route without any, such as that of a WebSocket, is not in the document.
        request: Model of the request's body, if it has one.
        parameters: Descriptions of the path's parameters by their names.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handler: Callable[[Any, web.Request], Awaitable[web.StreamResponse]]
    summary: str
    responses: Responses
    request: type[pydantic.BaseModel] | None = None
    is_body_optional: bool = False
    parameters: Mapping[str, str] = field(default_factory=dict)

    @property
    def template(self) -> str:
        """The path in OpenAPI's syntax."""
        return re.sub(r"{(\w+):(?:[^{}]|{[^{}]*})*}", r"{\1}", self.path)

    @property
    def id(self) -> str:
        return "_".join([self.method.lower(), *re.findall(r"\w+", self.template)])


def add_routes(router: web.UrlDispatcher, routes: Iterable[Route], service: object) -> None:
    """Register routes whose handlers are methods of `service`; HEAD works wherever GET does."""
    router.add_routes(
        web.route(route.method, route.path, partial(route.handler, service)) for route in routes
    )


def document(
    routes: Sequence[Route],
    *,
    info: Mapping[str, str],
    needs_token: Callable[[str], bool],
    refusals: Responses,
    headers: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return the OpenAPI document as plain data.

    Args:
        info: Title, version and description of the service.
        needs_token: Returns whether a path requires the token.
        refusals: Further responses of every route; 401 only of those that require the token.
        headers: Header objects of all responses.
    """
    schemas, definitions = _schemas(routes, refusals)
    paths: dict[str, dict[str, object]] = {}
    components: dict[str, object] = {"schemas": definitions}
    for route in routes:
        if not route.responses:
            continue
        is_guarded = needs_token(route.template)
        responses = {**refusals, **route.responses}
        if not is_guarded:
            responses.pop(401, None)
        operation = _operation(route, responses, schemas, headers)
        if is_guarded:
            operation["security"] = [{"token": []}]
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        paths.setdefault(route.template, {})[route.method.lower()] = operation
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": components}


def _operation(
    route: Route, responses: Responses, schemas: _Schemas, headers: Mapping[str, object] | None
) -> dict[str, object]:
    operation: dict[str, object] = {
        "operationId": route.id,
        "summary": route.summary,
        "responses": {
            str(status): _response(response, schemas) | ({"headers": headers} if headers else {})
            for status, response in sorted(responses.items(), key=lambda item: str(item[0]))
        },
    }
    if route.parameters:
        operation["parameters"] = [
            {
                "name": name,
                "in": "path",
                "required": True,
                "description": description,
                "schema": {"type": "string", "minLength": 1},
            }
            for name, description in route.parameters.items()
        ]
    if route.request is not None:
        operation["requestBody"] = {
            "required": not route.is_body_optional,
            "content": {JSON: {"schema": schemas[route.request, "validation"]}},
        }
    return operation


def _response(response: Response, schemas: _Schemas) -> dict[str, object]:
    content: dict[str, object] = {}
    for media_type, type_ in response.content.items():
        schema = schemas[type_, "serialization"]
        if media_type == JSON_LINES:
            schema = {"type": "array", "items": schema}
        elif media_type == EVENTS:
            schema = _event(schema, response.last_event)
        content[media_type] = {"schema": schema}
    return {"description": response.description} | ({"content": content} if content else {})


def _event(schema: JsonSchemaValue, last: str | None) -> JsonSchemaValue:
    data: JsonSchemaValue = {"type": "string", "contentMediaType": JSON, "contentSchema": schema}
    if last is not None:
        data = {"anyOf": [data, {"const": last}]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


_Mode = Literal["validation", "serialization"]
_Field = core_schema.ModelField | core_schema.DataclassField | core_schema.TypedDictField
_Schemas = dict[tuple[Any, _Mode], JsonSchemaValue]


def _schemas(routes: Sequence[Route], refusals: Responses) -> tuple[_Schemas, JsonSchemaValue]:
    """Return the JSON schemas of all types of the routes, and the named ones that they refer to."""
    types: list[tuple[Any, _Mode]] = []
    types += [(route.request, "validation") for route in routes if route.request is not None]
    for responses in (refusals, *(route.responses for route in routes)):
        for response in responses.values():
            types += [(type_, "serialization") for type_ in response.content.values()]
    schemas, generated = pydantic.TypeAdapter.json_schemas(
        [(type_, mode, pydantic.TypeAdapter(type_)) for type_, mode in dict.fromkeys(types)],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Generator,
    )
    return schemas, generated.get("$defs", {})


class _Generator(GenerateJsonSchema):
    """Omits titles that repeat field names, and requires all fields of sent dataclasses."""

    def field_title_should_be_set(self, schema: object) -> bool:
        return False

    def field_is_required(self, field: _Field, total: bool) -> bool:
        if self.mode == "serialization" and field["type"] == "dataclass-field":
            return True
        return super().field_is_required(field, total)

    def default_schema(self, schema: core_schema.WithDefaultSchema) -> JsonSchemaValue:
        if self.mode == "serialization":
            return self.generate_inner(schema["schema"])
        return super().default_schema(schema)
