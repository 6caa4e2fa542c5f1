"""The OpenAPI document: generated from types, complete and consistent with the service."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from agentloop.sandbox.openapi import document
from agentloop.serving.access import ApiGuard, ServeSettings
from agentloop.serving.app import ROUTES
from agentloop.serving.http import REFUSALS, REQUEST_ID
from agentloop.trajectory import ToolCall, Trajectory, Turn


def make_document(has_token: bool = False) -> dict[str, Any]:
    guard = ApiGuard(ServeSettings.model_validate({"token": "t" if has_token else None}))
    return document(
        ROUTES, info={}, needs_token=guard.needs_token, refusals=REFUSALS, headers=REQUEST_ID
    )


def statuses(document: dict[str, Any], path: str, method: str = "get") -> set[str]:
    return set(document["paths"][path][method]["responses"])


def test_every_reference_resolves() -> None:
    document = make_document()
    text = json.dumps(document)
    named = set(re.findall(r'"\$ref": "#/components/schemas/(\w+)"', text))
    assert named
    assert named == set(document["components"]["schemas"])
    assert text.count('"$ref"') == text.count('"$ref": "#/components/schemas/')


def test_operation_ids_are_unique() -> None:
    document = make_document()
    names = [
        operation["operationId"]
        for methods in document["paths"].values()
        for operation in methods.values()
    ]
    assert len(set(names)) == len(names) == len([route for route in ROUTES if route.responses])
    assert all(name.isidentifier() for name in names)


def test_token_is_required_if_set() -> None:
    without, with_one = make_document(), make_document(has_token=True)
    assert "401" not in json.dumps(without)
    assert "securitySchemes" not in without["components"]
    assert with_one["components"]["securitySchemes"] == {
        "token": {"type": "http", "scheme": "bearer"}
    }
    assert with_one["paths"]["/v1/waits"]["get"]["security"] == [{"token": []}]
    assert "401" in statuses(with_one, "/v1/waits")
    assert "security" not in with_one["paths"]["/healthz"]["get"]
    assert statuses(with_one, "/healthz") == {"200", "403", "503"}


def test_streams_are_described() -> None:
    answers = make_document()["paths"]["/v1/chat/completions"]["post"]["responses"]["200"][
        "content"
    ]
    assert answers["application/json"] == {
        "schema": {"$ref": "#/components/schemas/ChatCompletion"}
    }
    data = answers["text/event-stream"]["schema"]["properties"]["data"]
    events = [
        reference["$ref"].rpartition("/")[2]
        for reference in data["anyOf"][0]["contentSchema"]["anyOf"]
    ]
    assert events == ["ChatCompletionChunk", "UsageChunk", "ErrorBody"]
    assert data["anyOf"][1] == {"const": "[DONE]"}
    lines = make_document()["paths"]["/v1/rollouts"]["post"]["responses"]["200"]["content"]
    assert lines["application/x-ndjson"]["schema"]["items"]["$ref"].endswith("/RolloutLine")


def test_trajectory_has_the_fields_that_are_sent() -> None:
    call = ToolCall("c", "n", {}, "raw", 0, 1)
    sent = Trajectory("t", [1], [Turn([2], [0.5], calls=[call])]).to_dict_per_token()
    schemas = make_document()["components"]["schemas"]
    for name, value in [
        ("TrajectoryRecord", sent),
        ("Turn", sent["turns"][0]),
        ("ToolCall", sent["turns"][0]["calls"][0]),
    ]:
        assert set(schemas[name]["properties"]) == set(schemas[name]["required"]) == set(value)


@pytest.mark.parametrize(
    ("field", "schema"),
    [
        ("n", {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 128}, {"type": "null"}]}),
        (
            "top_logprobs",
            {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 20}, {"type": "null"}]},
        ),
        ("regex", {"enum": [None]}),
        ("documents", {"enum": [[], None]}),
        (
            "messages",
            {
                "type": "array",
                "minItems": 1,
                "items": {"$ref": "#/components/schemas/InputMessage"},
            },
        ),
    ],
)
def test_request_is_described_as_it_is_checked(field: str, schema: dict[str, Any]) -> None:
    described = make_document()["components"]["schemas"]["ChatRequest"]["properties"][field]
    assert {key: described[key] for key in schema} == schema
