"""Sample any endpoint with OpenAI's chat completions API, for comparison.

The endpoint gets the same prompts, sampling settings and token budget as our own agent loop, but no
tools; it may run its own. One request is one sample. Requests to an endpoint that is busy, failing
or slow are retried with exponential backoff; a sample without an answer has no reward.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from email.utils import parsedate_to_datetime
from typing import Any, Literal
from urllib.parse import urlsplit

import anyio
import httpx
import orjson
import pydantic

from agentloop.agent.channels import answer_in
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError, ServerRefused, ServerUnavailable, SettingsError
from agentloop.evaluation.loop import EvaluatedSample
from agentloop.events import Emit, RolloutAbandoned, RolloutFinished, RolloutStarted, ignore
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import ValidText, loads
from agentloop.trajectory import Message, StopReason, Trajectory, Turn, TurnEnd

__all__ = ["Endpoint", "EndpointCompletion", "EndpointSettings", "delay_s", "parse_completion"]

_BUSY = (408, 409, 425, 429)
_SEEDS = 1 << 31  # some endpoints accept no larger seeds
_MAX_ERROR_CHARS = 300  # of an error's body


class EndpointSettings(pydantic.BaseModel):
    """An endpoint to sample instead of our own agent loop."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    url: str = pydantic.Field(
        "",
        description="Base URL of an OpenAI-compatible API to evaluate, such as "
        "http://127.0.0.1:8000/v1. By default, the model is evaluated with our own agent loop.",
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
    backoff_s: float = pydantic.Field(
        1.0,
        gt=0,
        description="Maximum delay before the second attempt; it doubles with each further "
        "attempt.",
    )
    max_backoff_s: float = pydantic.Field(
        120.0,
        gt=0,
        description="Maximum delay before any attempt, even if the endpoint asks for more.",
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


class _Message(pydantic.BaseModel):
    content: ValidText | None = None
    reasoning_content: ValidText | None = None  # used by SGLang, DeepSeek and agentloop
    reasoning: ValidText | None = None  # used by vLLM and OpenRouter


class _Choice(pydantic.BaseModel):
    message: _Message
    finish_reason: str | None = None
    stop_reason: Any = None  # agentloop's; other servers use it differently


class _Usage(pydantic.BaseModel):
    completion_tokens: int | None = None


class _Body(pydantic.BaseModel):
    choices: list[_Choice] = pydantic.Field(min_length=1)
    usage: _Usage | None = None


class EndpointCompletion(pydantic.BaseModel):
    """An endpoint's answer; `text` includes its reasoning in <think>...</think>, as in our loop."""

    text: str
    stop_reason: StopReason
    num_tokens: int | None


def parse_completion(body: bytes) -> EndpointCompletion:
    """Parse a response body.

    Raises:
        ValueError: The body is not a chat completion.
    """
    try:
        found = _Body.model_validate(loads(body))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    choice = found.choices[0]
    message = choice.message
    reasoning = message.reasoning_content or message.reasoning
    content = message.content or ""
    text = f"<think>{reasoning}</think>\n{content}" if reasoning else content
    return EndpointCompletion(
        text=text,
        stop_reason=_stop_reason(choice),
        num_tokens=found.usage.completion_tokens if found.usage else None,
    )


def _stop_reason(choice: _Choice) -> StopReason:
    if isinstance(choice.stop_reason, str) and choice.stop_reason in set(StopReason):
        return StopReason(choice.stop_reason)
    match choice.finish_reason:
        case "length":
            return StopReason.TOKEN_BUDGET
        case "tool_calls" | "function_call":
            return StopReason.CALLER_TOOLS
        case "error":
            return StopReason.INFRASTRUCTURE
    return StopReason.ANSWERED


def delay_s(
    settings: EndpointSettings, tries: int, requested_s: float | None, draw: float
) -> float:
    """Return the delay before the next attempt, at most `max_backoff_s`.

    This is the delay that the endpoint requested, or a share `draw` (0 to 1) of a bound that
    doubles with each attempt ("full jitter").
    """
    if requested_s is not None:
        return min(max(requested_s, 0.0), settings.max_backoff_s)
    # A power beyond 1023 would overflow a float.
    bound = settings.backoff_s * 2.0 ** min(tries - 1, 60)
    return draw * min(bound, settings.max_backoff_s)


class Endpoint:
    """Samples an endpoint; implements `Sampler`. Create it with `Endpoint.open`."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        settings: EndpointSettings,
        sampling: Sampling,
        max_response_tokens: int,
        emit: Emit,
    ) -> None:
        self._client = client
        self._emit = emit
        self._settings = settings
        self._sampling = sampling
        self._max_tokens = max_response_tokens
        self._slots = anyio.CapacityLimiter(settings.max_concurrent)
        self.model = settings.model

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: EndpointSettings,
        sampling: Sampling,
        *,
        max_response_tokens: int,
        emit: Emit = ignore,
    ) -> AsyncIterator[Endpoint]:
        """Connect to an endpoint.

        Args:
            emit: Receives events when a sample starts and ends.

        Raises:
            SettingsError: The endpoint refuses access, or the model must be named.
            ServerUnavailable: The endpoint cannot be reached.
        """
        headers = {}
        if settings.api_key is not None:
            headers["Authorization"] = f"Bearer {settings.api_key.get_secret_value()}"
        async with httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(settings.timeout_s, connect=30.0, pool=None),
            limits=httpx.Limits(max_connections=settings.max_concurrent),
        ) as client:
            endpoint = cls(client, settings, sampling, max_response_tokens, emit)
            if not settings.model:
                endpoint.model = await endpoint._only_model()
            yield endpoint

    async def wait_for_capacity(self, size: int) -> None:
        async with self._slots:  # no deadline: each request has one, and earlier ones go first
            return

    async def group(
        self, task: Task, *, name: str, size: int, on_queued: Callable[[], None]
    ) -> Sequence[EvaluatedSample]:
        """Return samples as `Sampler.group` does.

        Raises:
            SettingsError: The endpoint refuses all requests.
            RequestError: The endpoint rejects the task.
        """
        samples: dict[int, EvaluatedSample] = {}
        messages: Sequence[Message] = (
            [{"role": "user", "content": task.prompt}]
            if isinstance(task.prompt, str)
            else task.prompt
        )
        sampling = self._sampling.of_group(name)

        async def ask(index: int) -> None:
            samples[index] = await self._sample(name, index, messages, sampling.of_sibling(index))

        on_queued()
        try:
            async with anyio.create_task_group() as tasks:
                for index in range(size):
                    tasks.start_soon(ask, index)
        except ExceptionGroup as errors:
            raise _first_cause(errors) from None
        return [samples[index] for index in range(size)]

    async def _sample(
        self, group: str, index: int, messages: Sequence[Message], sampling: Sampling
    ) -> EvaluatedSample:
        body = self._body(messages, sampling)
        async with self._slots:  # no deadline: each request has one
            trajectory = Trajectory(f"{group}.{index}", [], created_unix_s=time.time())
            self._emit(RolloutStarted(trajectory, group))
            try:
                num_tokens = await self._record(trajectory, body)
            except BaseException:
                self._emit(RolloutAbandoned(trajectory.id))
                raise
            self._emit(RolloutFinished(trajectory.id, trajectory, num_tokens))
        return EvaluatedSample([trajectory], num_tokens)

    async def _record(self, trajectory: Trajectory, body: bytes) -> int | None:
        """Send a request, store the answer in `trajectory` and return its token count, if known."""
        started_s = time.monotonic()
        try:
            found = await self._request_with_retries(trajectory.id, body)
        except (ServerRefused, ServerUnavailable) as error:
            trajectory.error = str(error)
            return None
        finally:
            trajectory.elapsed_s = time.monotonic() - started_s
        trajectory.stop_reason = found.stop_reason
        if found.stop_reason.is_unscorable:
            trajectory.error = "the endpoint reports a failure of its own infrastructure"
        cut = found.stop_reason is StopReason.TOKEN_BUDGET
        turn = Turn(
            text=found.text,
            end=TurnEnd.LENGTH if cut else TurnEnd.STOP,
            servers=[self._settings.url],
            generated_s=trajectory.elapsed_s,
            ended_s=trajectory.elapsed_s,
        )
        trajectory.turns.append(turn)
        trajectory.answer = answer_in(found.text, reasoning=False)
        return found.num_tokens

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> bytes:
        """Encode a request, without sampling settings that have their default.

        Not every endpoint supports all of them.

        Raises:
            RequestError: The messages cannot be encoded.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": sampling.temperature,
            self._settings.token_limit: self._max_tokens,
            **sampling.model_dump(exclude_defaults=True, exclude_none=True),
        }
        if sampling.seed is not None:
            body["seed"] = sampling.seed % _SEEDS
        try:
            return orjson.dumps(body)
        except TypeError as error:  # for example a lone surrogate
            raise RequestError(f"messages: they cannot be encoded: {error}") from error

    async def _request_with_retries(self, id: str, body: bytes) -> EndpointCompletion:
        """Send a request, retrying it up to `max_tries` times.

        Raises:
            ServerRefused: The last attempt was refused.
            ServerUnavailable: The last attempt got no answer.
            RequestError: The endpoint rejects the prompt.
            SettingsError: The endpoint rejects all requests.
        """
        draw = random.Random(id)
        for tries in range(1, self._settings.max_tries + 1):
            requested_s = None
            try:
                answer = await self._request("POST", "chat/completions", body)
                if answer.status_code == 200:
                    return parse_completion(answer.content)
                error: Exception = self._refusal(answer)
                requested_s = retry_after_s(answer.headers, time.time())
            except ServerUnavailable as unavailable:
                error = unavailable
            except ValueError as malformed:
                error = ServerUnavailable(f"{self._where}: not a chat completion: {malformed}")
            if tries == self._settings.max_tries:
                raise error
            await anyio.sleep(delay_s(self._settings, tries, requested_s, draw.random()))
        raise AssertionError("unreachable")

    async def _request(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        """Send a request.

        Raises:
            ServerUnavailable: There was no answer.
        """
        url = f"{self._settings.url}/{path}"
        headers = {"Content-Type": "application/json"} if body is not None else {}
        try:
            with anyio.fail_after(self._settings.timeout_s):
                return await self._client.request(method, url, content=body, headers=headers)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerUnavailable(
                f"{self._where}: no answer within {self._settings.timeout_s:g} s "
                "(endpoint.timeout_s)"
            ) from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            what = str(error) or type(error).__name__
            raise ServerUnavailable(f"{self._where}: {what}") from error

    def _refusal(self, answer: httpx.Response) -> ServerRefused:
        """Return the error of a request that may succeed later.

        Raises:
            RequestError: The endpoint rejects this prompt.
            SettingsError: The endpoint rejects all requests.
        """
        status = answer.status_code
        description = f"{self._where}: {status} {_message(answer)}"
        if status in _BUSY or status >= 500:
            return ServerRefused(description, status=status)
        if status in (401, 403):
            raise SettingsError(f"endpoint.api_key: {description}")
        if status in (400, 413, 422):
            raise RequestError(description)
        raise SettingsError(f"endpoint.url, endpoint.model: {description}")

    @property
    def _where(self) -> str:
        return self._settings.url

    async def _only_model(self) -> str:
        answer = await self._request("GET", "models")
        if answer.status_code != 200:
            raise self._refusal(answer)
        try:
            names = [str(one["id"]) for one in orjson.loads(answer.content)["data"]]
        except (ValueError, KeyError, TypeError) as error:
            raise SettingsError(
                f"endpoint.model: {self._where} does not list its models: set it"
            ) from error
        if len(names) != 1:
            names_ = ", ".join(names[:20]) or "none"
            raise SettingsError(
                f"endpoint.model: set it to one of the models of {self._where}: {names_}"
            )
        return names[0]


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


def _first_cause(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to raise for a group of samples: one that ends the run, or else the first.

    All samples of a task usually fail with the same error.
    """
    leaves: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    return next((one for one in leaves if not isinstance(one, RequestError)), leaves[0])
