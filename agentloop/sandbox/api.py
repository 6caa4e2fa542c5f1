"""Requests, results and errors of the HTTP service."""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, TypeVar

import orjson
import pydantic
from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from agentloop.sandbox.errors import SandboxError
from agentloop.sandbox.languages import Language
from agentloop.sandbox.results import CallResult
from agentloop.sandbox.session import CellArguments
from agentloop.sandbox.settings import MAX_KEPT_BYTES, OutputLimits

Model = TypeVar("Model", bound=pydantic.BaseModel)
MAX_BATCH = 65_536
MAX_ERRORS = 100  # with more invalid fields, none of them is named


def _integral(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


from_integral = pydantic.BeforeValidator(_integral)
"""Takes an integer in the sense of JSON Schema: also 1.0, but not a boolean or a string. It is
listed after bounds, which the document would lose otherwise."""


class Refusal(TypedDict):
    type: str
    message: str
    field: Annotated[str | None, Field(description="Name of the invalid field")]


class RefusalBody(TypedDict):
    """The body of a response to a request that is refused."""

    error: Refusal


class RequestRefused(SandboxError):
    """A request is refused with an HTTP status; `kind` identifies the error for programs."""

    def __init__(self, status: int, kind: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: RefusalBody = {"error": {"type": kind, "message": message, "field": field}}


class ValueCounter:
    """Counts the values in a JSON text as it arrives, names included.

    A short text may take long to parse, such as ten million empty lists. If the text is not JSON,
    only its valid beginning is counted.
    """

    def __init__(self) -> None:
        self.num = 0
        self._in_string = False
        self._escapes_next = False

    def feed(self, data: bytes) -> int:
        """Process more data and return the number of values so far."""
        if not data:
            return self.num
        if self._escapes_next:
            data = data[1:]
        num_backslashes = len(data) - len(data.rstrip(b"\\"))
        self._escapes_next = num_backslashes % 2 == 1
        if self._escapes_next:
            data = data[:-1]
        parts = data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(parts[self._in_string :: 2])
        self._in_string ^= len(parts) % 2 == 0
        self.num += sum(map(outside.count, (b"[", b"{", b",", b":")))
        return self.num


def has_more_values(text: bytes, limit: int) -> bool:
    """Return whether a text has more than `limit` values, without reading all of a long one."""
    if len(text) <= limit:
        return False
    counter = ValueCounter()
    starts = range(0, len(text), 1 << 18)
    return any(counter.feed(text[start : start + (1 << 18)]) > limit for start in starts)


class RunRequest(pydantic.BaseModel, extra="forbid", strict=True):
    """The body of `POST /v1/sessions/{id}/run`: one cell."""

    code: str
    stdin: str = ""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] | None = Field(
        default=None, description="Wall time limit in seconds. Default: the pool's."
    )
    memory_mib: Annotated[int, Field(ge=1), from_integral] | None = Field(
        default=None,
        description="Memory limit of all processes of the program together, in MiB. Default and "
        "maximum: the pool's.",
    )

    def arguments(self, max_memory_mib: float = math.inf) -> CellArguments:
        """Return the arguments of the call, whose memory is at most the pool's."""
        memory_mib = self.memory_mib and int(min(self.memory_mib, max_memory_mib))
        return {
            "code": self.code,
            "stdin": self.stdin,
            "timeout_s": self.timeout_s,
            "memory_mib": memory_mib,
        }


class ProgramRequest(RunRequest):
    """The body of `POST /v1/run`: a program, which may be in another language."""

    language: Language = "python"


class LinkRequest(RunRequest, extra="ignore"):
    """A `run` frame of a link (remote.py), without its `op` and `id`."""

    native: bool = False
    session: int | None = None
    opens: bool = False
    max_output_bytes: Annotated[int, Field(gt=0)] | None = None
    keep_output_bytes: Annotated[int, Field(gt=0, le=MAX_KEPT_BYTES)] | None = None

    @property
    def output(self) -> OutputLimits | None:
        if self.max_output_bytes is None or self.keep_output_bytes is None:
            return None
        return OutputLimits(self.max_output_bytes, self.keep_output_bytes)


class SessionRequest(pydantic.BaseModel, extra="forbid"):
    """The body of `POST /v1/sessions`, which has no fields."""


class OpenedSession(TypedDict):
    """The response to `POST /v1/sessions`."""

    id: str
    idle_s: float


class BatchRequest(pydantic.BaseModel, extra="forbid", strict=True):
    """The body of `POST /v1/run/batch`; the response has a line per call, as each finishes."""

    calls: Annotated[
        list[ProgramRequest], Field(min_length=1, max_length=MAX_BATCH), pydantic.FailFast()
    ]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchLine(CallResult):
    """A line of the response to `POST /v1/run/batch`: a result and its call's index."""

    index: int = dataclasses.field(kw_only=True)


def max_values(model: type[pydantic.BaseModel]) -> int:
    """Return the largest number of JSON values in a request of this kind."""
    is_batch = any(field in model.model_fields for field in ("calls", "submissions"))
    return 16 * MAX_BATCH if is_batch else 1000


def parse(model: type[Model], body: bytes | bytearray) -> Model:
    """Parse and validate a request. Raises RequestRefused, naming the first invalid field."""
    try:
        return check(model, orjson.loads(body))
    except orjson.JSONDecodeError as error:
        raise RequestRefused(400, "bad_request", f"the body is not valid JSON: {error}") from error


def check(model: type[Model], fields: object) -> Model:
    """Validate a request that is already decoded. Raises RequestRefused like `parse`."""
    try:
        return model.model_validate(fields)
    except pydantic.ValidationError as error:
        if error.error_count() > MAX_ERRORS:  # listing all of them takes seconds
            reason = f"{error.error_count()} fields are invalid"
            raise RequestRefused(400, "bad_request", reason) from None
        problem = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(map(str, problem["loc"])) or None
        message = f"{field}: {problem['msg']}" if field else problem["msg"]
        raise RequestRefused(400, "bad_request", message, field) from error


def to_line(index: int, result: CallResult) -> bytes:
    """Encode a line of a batch's response: the call's index in the request and its result."""
    line = {"index": index, **dataclasses.asdict(result)}
    return orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE)
