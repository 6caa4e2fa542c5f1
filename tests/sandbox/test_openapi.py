"""Routes: a table from which the router and the OpenAPI document are made."""

from __future__ import annotations

import json
from typing import Any

import pydantic
from aiohttp import web
from aiohttp.test_utils import make_mocked_request

from agentloop.sandbox.openapi import (
    EVENTS,
    JSON,
    JSON_LINES,
    TEXT,
    Response,
    Responses,
    Route,
    add_routes,
    document,
)
from agentloop.sandbox.service import ROUTES


class Question(pydantic.BaseModel):
    text: str = "why?"


class Answerer:
    def __init__(self, text: str) -> None:
        self.text = text

    async def answer(self, request: web.Request) -> web.Response:
        return web.Response(text=f"{self.text} {dict(request.match_info)}")


DONE: Responses = {200: Response("Done.")}


def route(
    path: str = "/a", responses: Responses = DONE, request: type[Question] | None = None
) -> Route:
    return Route("GET", path, Answerer.answer, "Answer", responses, request)


def made(*routes: Route, refusals: Responses | None = None, guarded: str = "") -> dict[str, Any]:
    return document(
        routes, info={}, needs_token=lambda path: path == guarded, refusals=refusals or {}
    )


async def test_handler_is_called_with_its_service() -> None:
    app = web.Application()
    add_routes(app.router, [route("/files/{name:.+}")], Answerer("It is"))
    for method in ("GET", "HEAD"):
        request = make_mocked_request(method, "/files/a/b")
        result = await app.router.resolve(request)
        request._match_info = result
        response = await result.handler(request)
        assert isinstance(response, web.Response)
        assert response.text == "It is {'name': 'a/b'}"


def test_patterns_are_left_out_of_the_document() -> None:
    first = route("/v1/{name:[a-z]{2}.+}/long-batch/{id}")
    assert first.template == "/v1/{name}/long-batch/{id}"
    assert first.id == "get_v1_name_long_batch_id"


def test_route_without_responses_is_not_in_the_document() -> None:
    assert list(made(route("/a"), route("/socket", {}))["paths"]) == ["/a"]


def test_refusals_are_added_unless_the_route_has_its_own() -> None:
    refusals: Responses = {"default": Response("Refused."), 404: Response("Unknown.")}
    local: Responses = {200: Response("Done."), 404: Response("No such file.")}
    responses = made(route("/a", local), refusals=refusals)["paths"]["/a"]["get"]["responses"]
    assert {status: first["description"] for status, first in responses.items()} == {
        "200": "Done.",
        "404": "No such file.",
        "default": "Refused.",
    }


def test_401_is_a_response_of_routes_that_need_the_token() -> None:
    refusals: Responses = {401: Response("No token.")}
    complete = made(route("/a"), route("/b"), refusals=refusals, guarded="/b")
    free, guarded = (complete["paths"][path]["get"] for path in ("/a", "/b"))
    assert list(free["responses"]) == ["200"]
    assert "security" not in free
    assert list(guarded["responses"]) == ["200", "401"]
    assert guarded["security"] == [{"token": []}]
    assert "token" in complete["components"]["securitySchemes"]
    assert "securitySchemes" not in made(route("/a"), refusals=refusals)["components"]


def test_body_is_described_by_its_media_type() -> None:
    response = Response(
        "Done.", {JSON: int, JSON_LINES: int, EVENTS: int | None, TEXT: str}, last_event="end"
    )
    complete = made(route("/a", {200: response}))
    content = complete["paths"]["/a"]["get"]["responses"]["200"]["content"]
    event = {
        "type": "string",
        "contentMediaType": JSON,
        "contentSchema": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }
    assert {name: form["schema"] for name, form in content.items()} == {
        JSON: {"type": "integer"},
        JSON_LINES: {"type": "array", "items": {"type": "integer"}},
        EVENTS: {
            "type": "object",
            "properties": {"data": {"anyOf": [event, {"const": "end"}]}},
            "required": ["data"],
        },
        TEXT: {"type": "string"},
    }


def test_model_is_defined_once_for_requests_and_once_for_responses() -> None:
    schemas = made(route("/a", {200: Response("Done.", {JSON: Question})}, Question))
    named = schemas["components"]["schemas"]
    assert sorted(named) == ["Question-Input", "Question-Output"]
    assert named["Question-Input"]["properties"]["text"]["default"] == "why?"
    assert "default" not in named["Question-Output"]["properties"]["text"]


def test_sandboxs_routes_have_unique_ids_and_their_models() -> None:
    complete = document(ROUTES, info={}, needs_token=lambda _: True, refusals={})
    operations = [first for methods in complete["paths"].values() for first in methods.values()]
    ids = {first["operationId"] for first in operations}
    assert len(ids) == len(operations) == len(ROUTES) - 2  # not the WebSockets
    assert all(name.isidentifier() for name in ids)
    bodies = {
        path: methods["post"]["requestBody"]
        for path, methods in complete["paths"].items()
        if "post" in methods
    }
    assert [path for path, body in bodies.items() if not body["required"]] == ["/v1/sessions"]
    named = {
        ref.partition('"')[0] for ref in json.dumps(complete).split("/components/schemas/")[1:]
    }
    assert named == set(complete["components"]["schemas"])
