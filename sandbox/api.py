"""What travels over HTTP: the service's own requests and results, and how a refusal looks."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import orjson
import pydantic
from pydantic import Field

from sandbox.errors import SandboxError
from sandbox.results import CallResult

Model = TypeVar("Model", bound=pydantic.BaseModel)
MAX_BATCH = 65_536


class Refused(SandboxError):
    """A request that is not carried out: an HTTP status, a kind for programs, words for people."""

    def __init__(self, status: int, kind: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"type": kind, "message": message, "field": field}}


class RunRequest(pydantic.BaseModel, extra="forbid"):
    """`POST /v1/run`, `POST /v1/sessions/{id}/run`: one program, or one cell."""

    code: str
    stdin: str = ""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None, description="Wall time of the program in seconds. Default: the pool's."
    )
    memory_mib: Annotated[int, Field(ge=1)] | None = Field(
        default=None,
        description="What the program's processes may hold together. Default, and the most: the "
        "pool's.",
    )


class LinkRequest(RunRequest, extra="ignore", strict=True):
    """A `run` frame of a link (remote.py), without its `op` and `id`."""

    session: int | None = None
    opens: bool = False


class SessionRequest(pydantic.BaseModel, extra="forbid"):
    """`POST /v1/sessions`: nothing can be chosen."""


class BatchRequest(pydantic.BaseModel, extra="forbid"):
    """`POST /v1/run/batch`: the answer has a line for each call, as each finishes."""

    calls: Annotated[list[RunRequest], Field(min_length=1, max_length=MAX_BATCH)]


def parse(model: type[Model], body: bytes | bytearray) -> Model:
    """A checked request. Raises Refused, which names the first field that is wrong."""
    try:
        return check(model, orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise Refused(400, "bad_request", f"the body is not valid JSON: {error}") from error


def check(model: type[Model], fields: Any) -> Model:
    """Like parse, of what is no JSON any more."""
    try:
        return model.model_validate(fields)
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"])) or None
        message = f"{field}: {problem['msg']}" if field else problem["msg"]
        raise Refused(400, "bad_request", message, field) from error


def to_json(body: Any) -> bytes:
    """Also a CallResult, as it is."""
    return orjson.dumps(body)


def to_line(index: int, result: CallResult) -> bytes:
    """A line of a batch's answer: the call's place in the request, then its result."""
    fields = {name: getattr(result, name) for name in CallResult.__slots__}
    return orjson.dumps({"index": index, **fields}, option=orjson.OPT_APPEND_NEWLINE)
