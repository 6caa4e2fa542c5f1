"""Errors as responses. Bodies and deadlines are tested with the whole application."""

from __future__ import annotations

import pytest

from agentloop.errors import AgentLoopError, PromptTooLong, RequestError, ServerError, UnknownModel
from agentloop.serving.http import error_of


@pytest.mark.parametrize(
    ("error", "status", "kind", "param", "code"),
    [
        (RequestError("n[0].x: missing"), 400, "invalid_request_error", "n[0].x", None),
        (RequestError("No field is named"), 400, "invalid_request_error", None, None),
        (PromptTooLong("9 tokens"), 400, "invalid_request_error", None, "context_length_exceeded"),
        (UnknownModel("model: 'x'"), 404, "invalid_request_error", "model", "model_not_found"),
        (ServerError("url: is down"), 503, "server_error", None, None),
    ],
)  # fmt: skip
def test_error_has_its_status_and_names_the_field(
    error: AgentLoopError, status: int, kind: str, param: str | None, code: str | None
) -> None:
    error_status, body = error_of(error)
    assert error_status == status
    assert body["error"] == {"message": str(error), "type": kind, "param": param, "code": code}
