"""A client of any endpoint with OpenAI's chat completions API.

Requests to an endpoint that is busy, failing or slow are retried with exponential backoff. The
number of requests in flight is bounded.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Annotated, Literal
from urllib.parse import urlsplit

import anyio
import httpx
import orjson
import pydantic

from agentloop.errors import (
    PromptTooLong,
    RequestError,
    ServerRefused,
    ServerUnavailable,
    SettingsError,
)
from agentloop.inference.proxies import proxy_for
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import ValidText, dumps, loads
from agentloop.trajectory import StopReason, TurnEnd

_BUSY = (408, 409, 425, 429)
# How OpenAI, Anthropic, SGLang, vLLM, llama.cpp and Google say it.
_TOO_LONG = re.compile(
    r"context.(?:length|window|size)|prompt is too long|maximum number of tokens", re.IGNORECASE
)
_MAX_ERROR_CHARS = 300  # quoted of an error's body
_CLOSE_S = 5.0
BACKOFF_S = 1.0  # before the second attempt; it doubles with each further one
_MAX_BACKOFF_S = 120.0  # even if the endpoint asks for more
_SEEDS = 1 << 31  # some endpoints accept no larger seeds


class EndpointSettings(pydantic.BaseModel):
    """An endpoint to sample instead of our own agent loop."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    url: str = pydantic.Field(
        "",
        description="Base URL of an OpenAI-compatible API to ask instead of starting servers, such "
        "as http://127.0.0.1:8000/v1: in an environment with its tools, otherwise without any.",
    )
    model: str = pydantic.Field(
        "", description="Name of the endpoint's model. By default, the only one that it has."
    )
    api_key: pydantic.SecretStr | None = pydantic.Field(
        None,
        description="API key of the endpoint. Set it in the environment: "
        "AGENTLOOP_ENDPOINT__API_KEY.",
    )
    max_concurrent: int = pydantic.Field(
        32, ge=1, description="Maximum number of requests in flight."
    )
    timeout_s: float = pydantic.Field(1800.0, gt=0, description="Time limit of one request.")
    max_tries: int = pydantic.Field(
        5,
        ge=1,
        description="Number of attempts at a request if the endpoint is busy, failing or slow.",
    )
    token_limit: Literal["max_tokens", "max_completion_tokens"] = pydantic.Field(
        "max_tokens",
        description="Name of the request parameter that carries budget.max_response_tokens.",
    )

    @pydantic.field_validator("url")
    @classmethod
    def _check_url(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query):
            raise ValueError(f"{url!r} does not have the form http://HOST:PORT/v1")
        return url.rstrip("/")

    @pydantic.field_validator("api_key")
    @classmethod
    def _check_api_key(cls, key: pydantic.SecretStr | None) -> pydantic.SecretStr | None:
        value = key.get_secret_value() if key is not None else ""
        if not (value.isascii() and value.isprintable()):
            raise ValueError("must be printable ASCII")
        return key


def sampling_fields(
    sampling: Sampling, settings: EndpointSettings, max_tokens: int
) -> dict[str, object]:
    """Return the fields of a request that say how to sample, besides the seed.

    Those that have their default are left out: not every endpoint supports all of them.
    """
    fields = sampling.model_dump(exclude_defaults=True, exclude_none=True, exclude={"seed"})
    return {"temperature": sampling.temperature, settings.token_limit: max_tokens, **fields}


def seed_of(sampling: Sampling) -> int | None:
    """Return the seed for a request, if there is one."""
    return None if sampling.seed is None else sampling.seed % _SEEDS


class _Function(pydantic.BaseModel):
    name: ValidText = ""
    arguments: ValidText | dict[str, object] | None = None  # a dictionary from some servers


class _ToolCall(pydantic.BaseModel):
    id: ValidText | None = None
    function: _Function = pydantic.Field(default_factory=_Function)


def _joined(content: object) -> object:
    """Return the text of an answer in parts, of which some are thoughts, as Mistral's are."""
    if not isinstance(content, list):
        return content
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
    return "".join(str(part.get("text")) for part in parts)


class _Message(pydantic.BaseModel):
    content: Annotated[ValidText | None, pydantic.BeforeValidator(_joined)] = None
    reasoning_content: ValidText | None = None  # used by SGLang, DeepSeek and agentloop
    reasoning: ValidText | None = None  # used by vLLM and OpenRouter
    tool_calls: list[_ToolCall] | None = None


class _Choice(pydantic.BaseModel):
    message: _Message
    finish_reason: str | None = None
    stop_reason: object = None  # agentloop's; other servers use it differently


def _known_count(count: object) -> object:
    """Return a number of tokens; None where a proxy writes 0 or -1 for a number it lacks."""
    return None if isinstance(count, int) and count <= 0 else count


_Count = Annotated[int | None, pydantic.BeforeValidator(_known_count)]


class _Usage(pydantic.BaseModel):
    prompt_tokens: _Count = None
    completion_tokens: _Count = None


class _Body(pydantic.BaseModel):
    choices: list[_Choice] = pydantic.Field(min_length=1)
    usage: _Usage | None = None


class EndpointCall(pydantic.BaseModel):
    """A tool call in an endpoint's answer; `arguments` is JSON text, which may be malformed."""

    id: str
    name: str
    arguments: str


class EndpointCompletion(pydantic.BaseModel):
    """An endpoint's answer; `text` includes its reasoning in <think>...</think>, as in our loop.

    Attributes:
        failure: why it is no answer of the model, if `stop_reason.is_unscorable`.
        num_prompt_tokens, num_tokens: tokens of the prompt and of the answer; None: the endpoint
            does not say.
    """

    text: str
    stop_reason: StopReason
    failure: str = ""
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    tool_calls: list[EndpointCall] = pydantic.Field(default_factory=list)


def parse_completion(body: bytes) -> EndpointCompletion:
    """Parse a response body.

    Raises:
        ValueError: The body is not a chat completion.
    """
    try:
        completion = _Body.model_validate(loads(body))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    choice = completion.choices[0]
    message = choice.message
    reasoning = message.reasoning_content or message.reasoning
    content = message.content or ""
    text = f"<think>{reasoning}</think>\n{content}" if reasoning else content
    reason = choice.finish_reason
    stop_reason = stop_reason_of(reason, choice.stop_reason)
    return EndpointCompletion(
        text=text,
        stop_reason=stop_reason,
        failure=f"the endpoint broke off the answer (finish_reason {reason!r})"
        if stop_reason.is_unscorable
        else "",
        num_prompt_tokens=completion.usage.prompt_tokens if completion.usage else None,
        num_tokens=completion.usage.completion_tokens if completion.usage else None,
        tool_calls=[_call(call, index) for index, call in enumerate(message.tool_calls or ())],
    )


def _call(call: _ToolCall, index: int) -> EndpointCall:
    arguments = call.function.arguments or {}
    text = arguments if isinstance(arguments, str) else dumps(arguments).decode()
    return EndpointCall(id=call.id or f"call_{index}", name=call.function.name, arguments=text)


def stop_reason_of(finish_reason: str | None, stop_reason: object = None) -> StopReason:
    """Return how an answer ended. An end that is not known to be the model's own is a failure.

    Such are `abort` of servers that restart, `insufficient_system_resource` of DeepSeek, `error` of
    OpenRouter, and none at all.

    Args:
        stop_reason: the choice's field of that name; only agentloop's own has our values.
    """
    if isinstance(stop_reason, str) and stop_reason in set(StopReason):
        return StopReason(stop_reason)
    match finish_reason:
        case "stop" | "eos" | "eos_token":  # the latter two of Together and older TGI
            return StopReason.ANSWERED
        case "stop_sequence":
            return StopReason.STOP_SEQUENCE
        case "length" | "model_length":  # the latter of Mistral, at the end of the context
            return StopReason.TOKEN_BUDGET
        case "tool_calls" | "function_call":
            return StopReason.CALLER_TOOLS
        case "content_filter":
            return StopReason.CONTENT_FILTER
    return StopReason.INFRASTRUCTURE


def turn_end_of(stop_reason: StopReason) -> TurnEnd:
    """Return how the turn ended with which an endpoint's answer ended so."""
    if stop_reason.is_unscorable:
        return TurnEnd.ABORT
    match stop_reason:
        case StopReason.ANSWERED | StopReason.STOP_SEQUENCE | StopReason.CALLER_TOOLS:
            return TurnEnd.STOP
        case StopReason.CONTENT_FILTER:
            return TurnEnd.FILTER
    return TurnEnd.LENGTH


def delay_s(tries: int, requested_s: float | None, draw: float) -> float:
    """Return the delay before the next attempt, at most `_MAX_BACKOFF_S`.

    This is the delay that the endpoint requested, or a share `draw` (0 to 1) of a bound that
    doubles with each attempt ("full jitter").
    """
    if requested_s is not None:
        return min(max(requested_s, 0.0), _MAX_BACKOFF_S)
    # A power beyond 1023 would overflow a float.
    bound = BACKOFF_S * 2.0 ** min(tries - 1, 60)
    return draw * min(bound, _MAX_BACKOFF_S)


class OpenAIClient:
    """Sends requests to an endpoint. Close it with `aclose`."""

    def __init__(self, settings: EndpointSettings, *, prefix: str = "endpoint.") -> None:
        """
        Args:
            prefix: text before the names of settings in messages.

        Raises:
            SettingsError: the environment names a proxy that cannot be used.
        """
        headers = {}
        if settings.api_key is not None:
            headers["Authorization"] = f"Bearer {settings.api_key.get_secret_value()}"
        self._client = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(settings.timeout_s, connect=30.0, pool=None),
            transport=httpx.AsyncHTTPTransport(
                limits=httpx.Limits(max_connections=settings.max_concurrent),
                # Reading the certificates takes a while, and a server nearby needs none.
                verify=settings.url.startswith("https:"),
                proxy=proxy_for(settings.url),
            ),
        )
        self._settings = settings
        self._prefix = prefix
        self.slots = anyio.CapacityLimiter(settings.max_concurrent)

    async def aclose(self) -> None:
        """Close the connections."""
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await self._client.aclose()

    async def complete(self, body: Mapping[str, object], *, id: str) -> EndpointCompletion:
        """Send a request for a completion, retrying it up to `max_tries` times.

        Hold one of the `slots` meanwhile.

        Args:
            body: the request, with a model and messages.
            id: seed of the delays between attempts.

        Raises:
            ServerRefused: The last attempt was refused.
            ServerUnavailable: The last attempt got no answer.
            RequestError: The messages cannot be encoded, or the endpoint rejects them.
            SettingsError: The endpoint rejects all requests.
        """
        try:
            content = orjson.dumps(body)
        except TypeError as unknown:  # for example a lone surrogate
            raise RequestError(f"messages: they cannot be encoded: {unknown}") from unknown
        draw = random.Random(id)
        for tries in range(1, self._settings.max_tries + 1):
            requested_s = None
            try:
                answer = await self._request("POST", "chat/completions", content)
                if answer.status_code == 200:
                    return parse_completion(answer.content)
                error: Exception = self._refusal(answer)
                requested_s = retry_after_s(answer.headers, time.time())
            except ServerUnavailable as unavailable:
                error = unavailable
            except ValueError as malformed:
                error = ServerUnavailable(
                    f"{self._where}: not a chat completion: {malformed}: {_message(answer)}"
                )
            if tries == self._settings.max_tries:
                raise error
            await anyio.sleep(delay_s(tries, requested_s, draw.random()))
        raise AssertionError("unreachable")

    async def only_model(self) -> str:
        """Return the name of the endpoint's model.

        Raises:
            SettingsError: The endpoint refuses access, or has not exactly one model.
            ServerUnavailable: The endpoint cannot be reached.
        """
        answer = await self._request("GET", "models")
        if answer.status_code != 200:
            raise self._refusal(answer)
        try:
            names = [str(model["id"]) for model in orjson.loads(answer.content)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"{self._prefix}model: {self._where} does not list its models: set it"
            ) from error
        if len(names) != 1:
            names_ = ", ".join(names[:20]) or "none"
            raise SettingsError(
                f"{self._prefix}model: set it to one of the models of {self._where}: {names_}"
            )
        return names[0]

    async def _request(
        self, method: str, path: str, content: bytes | None = None
    ) -> httpx.Response:
        """Send a request.

        Raises:
            ServerUnavailable: There was no answer.
        """
        url = f"{self._settings.url}/{path}"
        headers = {"Content-Type": "application/json"} if content is not None else {}
        try:
            with anyio.fail_after(self._settings.timeout_s):
                return await self._client.request(method, url, content=content, headers=headers)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerUnavailable(
                f"{self._where}: no answer within {self._settings.timeout_s:g} s "
                f"({self._prefix}timeout_s)"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = str(error) or type(error).__name__
            raise ServerUnavailable(f"{self._prefix}url: {self._where}: {problem}") from error

    def _refusal(self, answer: httpx.Response) -> ServerRefused:
        """Return the error of a request that may succeed later.

        Raises:
            RequestError: The endpoint rejects this prompt.
            SettingsError: The endpoint rejects all requests.
        """
        status = answer.status_code
        message = _message(answer).removeprefix(f"{status}: ")  # as aiohttp's own answers begin
        description = f"{self._where}: {status} {message}"
        if status in _BUSY or status >= 500:
            return ServerRefused(description, status=status)
        if status in (401, 403):
            raise SettingsError(f"{self._prefix}api_key: {description}")
        if status in (400, 413, 422):
            raise (PromptTooLong if _TOO_LONG.search(message) else RequestError)(description)
        if status == 404 and not urlsplit(self._where).path.endswith("/v1"):
            raise SettingsError(
                f"{self._prefix}url: {self._where} has no chat completions: "
                f"did you mean {self._where}/v1? ({status} {message})"
            )
        raise SettingsError(f"{self._prefix}url, {self._prefix}model: {description}")

    @property
    def _where(self) -> str:
        return self._settings.url


def retry_after_s(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Return the seconds of a Retry-After header (RFC 9110, 10.2.3), or None."""
    value = headers.get("retry-after", "").strip()
    if value.isdecimal():
        return float(value)
    try:
        return parsedate_to_datetime(value).timestamp() - now_unix_s
    except (ValueError, OverflowError):
        return None


def _message(answer: httpx.Response) -> str:
    """Return the message of an error response, in OpenAI's format or any other."""
    try:
        message = orjson.loads(answer.content)["error"]
        message = message["message"] if isinstance(message, Mapping) else message
    except (ValueError, KeyError, TypeError):
        message = answer.text
    return " ".join(str(message).split())[:_MAX_ERROR_CHARS] or answer.reason_phrase
