"""The service's OpenAPI document, generated from the models that validate its requests."""

from __future__ import annotations

from functools import cache
from typing import Any

import pydantic

from agentloop.sandbox.api import BatchRequest, RunRequest, SessionRequest
from agentloop.sandbox.compat import BatchSubmission, RunCodeRequest, Submission
from agentloop.sandbox.results import CallResult

_MODELS = (RunRequest, BatchRequest, SessionRequest, Submission, BatchSubmission, RunCodeRequest)
_OBJECT: dict[str, Any] = {"type": "object"}
_SESSION = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}


@cache
def document() -> dict[str, Any]:
    """Return the service's OpenAPI 3.1 document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "sandbox", "version": "1", "description": "Runs untrusted Python."},
        "paths": _paths(),
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}, {}],
    }


def _schemas() -> dict[str, Any]:
    template = "#/components/schemas/{model}"
    models: list[tuple[Any, Any]] = [(model, "validation") for model in _MODELS]
    result = pydantic.TypeAdapter(CallResult)
    _, made = pydantic.TypeAdapter.json_schemas(
        [(model.__name__, mode, pydantic.TypeAdapter(model)) for model, mode in models]
        + [("CallResult", "serialization", result)],
        ref_template=template,
    )
    schemas: dict[str, Any] = made["$defs"]
    for name in ("CallResult", "CallError"):  # responses include unset fields, too
        schemas[name] |= _object(schemas[name]["properties"])
    text = {"type": "string"}
    field = {"type": ["string", "null"], "description": "Name of the invalid field"}
    error = _object({"type": text, "message": text, "field": field})
    schemas["Error"] = _object({"error": error})
    schemas["Opened"] = _object({"id": text, "idle_s": {"type": "number"}})
    schemas["Line"] = {"allOf": [_ref("CallResult"), _object({"index": {"type": "integer"}})]}
    return schemas


def _paths() -> dict[str, Any]:
    result = _ref("CallResult")
    paths = {
        "/v1/run": _post("Run a program", "RunRequest", result),
        "/v1/run/batch": _post(
            "Run programs; the response has a line for each, with its `index`, as it finishes",
            "BatchRequest",
            {"type": "array", "items": _ref("Line")},
            answer_type="application/x-ndjson",
        ),
        "/v1/sessions": _post(
            "Open a session", "SessionRequest", _ref("Opened"), code="201", required=False
        ),
        "/v1/sessions/{id}/run": _post(
            "Run a cell in a session; 410 if its process is gone, possibly because of this cell",
            "RunRequest",
            result,
        )
        | {"parameters": [_SESSION]},
        "/v1/sessions/{id}": {
            "parameters": [_SESSION],
            "delete": {
                "summary": "Close a session",
                "responses": {"204": {"description": "Done"}, "default": _refused()},
            },
        },
        "/v1/stats": _get("Numbers of workers, slots, and running and waiting calls"),
        "/healthz": _get("Health check: 200 while a worker is up"),
        "/run_code": _post("SandboxFusion's", "RunCodeRequest", _OBJECT),
        "/status": _get("Code Judge"),
        "/ping": _get("Code Judge"),
    }
    for path in ("/run", "/judge"):
        paths[path] = _post("Code Judge", "Submission", _OBJECT)
        for form in ("batch", "long-batch"):
            paths[f"{path}/{form}"] = _post("Code Judge", "BatchSubmission", _OBJECT)
    return paths


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    """Return an object schema with all properties required."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


def _content(schema: dict[str, Any], media_type: str = "application/json") -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}


def _post(
    summary: str,
    body: str,
    answer: dict[str, Any],
    *,
    code: str = "200",
    required: bool = True,
    answer_type: str = "application/json",
) -> dict[str, Any]:
    done = {"description": "The result, however the program ended", **_content(answer, answer_type)}
    return {
        "post": {
            "summary": summary,
            "requestBody": {"required": required, **_content(_ref(body))},
            "responses": {code: done, "default": _refused()},
        }
    }


def _get(summary: str) -> dict[str, Any]:
    done = {"description": "An answer", **_content({})}
    return {"get": {"summary": summary, "responses": {"200": done, "default": _refused()}}}


def _refused() -> dict[str, Any]:
    return {"description": "The request was refused", **_content(_ref("Error"))}
