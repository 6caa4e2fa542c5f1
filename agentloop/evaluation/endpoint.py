"""Samples of any endpoint that speaks OpenAI's chat completions, for comparison.

It gets the same prompts, sampling settings and token budget as our own loop. It is given no tools;
what it runs by itself, it runs. One request is one sample. Where it is busy, broken or slow it is
asked again, later and later; what it does not answer in the end has no reward.
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
from agentloop.errors import RequestError, ServerRefused, ServerUnavailable, SettingsError
from agentloop.evaluation.loop import Sample
from agentloop.events import Emit, RolloutAbandoned, RolloutFinished, RolloutStarted, ignore
from agentloop.groups.tasks import Task
from agentloop.inference.sglang import Sampling
from agentloop.plain_json import ValidText, loads
from agentloop.trajectory import Message, StopReason, Trajectory, Turn, TurnEnd

__all__ = ["Completion", "Endpoint", "EndpointSettings", "delay_s", "parse_completion"]

_BUSY = (408, 409, 425, 429)
_SEEDS = 1 << 31  # some take no larger ones
_MAX_SAID = 300  # characters of an error's body


class EndpointSettings(pydantic.BaseModel):
    """Who answers in place of our own loop."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    url: str = pydantic.Field(
        "",
        description='The base of its addresses, such as "http://127.0.0.1:8000/v1"; none: our own '
        "loop answers.",
    )
    model: str = pydantic.Field("", description="Its model's name; none: the only one that it has.")
    api_key: pydantic.SecretStr | None = pydantic.Field(
        None, description="Of the environment: AGENTLOOP_ENDPOINT__API_KEY."
    )
    max_concurrent: int = pydantic.Field(32, ge=1, description="Requests in flight, at most.")
    timeout_s: float = pydantic.Field(1800.0, gt=0, description="For one answer.")
    max_tries: int = pydantic.Field(
        5, ge=1, description="Of one request, where the endpoint is busy, broken or slow."
    )
    backoff_s: float = pydantic.Field(
        1.0, gt=0, description="Before the second try, at most; it doubles with each."
    )
    max_backoff_s: float = pydantic.Field(
        120.0, gt=0, description="Before any try, also where the endpoint asks for more."
    )
    token_limit: Literal["max_tokens", "max_completion_tokens"] = pydantic.Field(
        "max_tokens", description="The name by which budget.max_response_tokens is sent."
    )

    @pydantic.field_validator("url")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        parts = urlsplit(url)
        if url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.query):
            raise ValueError(f"{url!r} is not of the form http://HOST:PORT/v1")
        return url.rstrip("/")

    @pydantic.field_validator("api_key")
    @classmethod
    def _fits_a_header(cls, key: pydantic.SecretStr | None) -> pydantic.SecretStr | None:
        said = key.get_secret_value() if key is not None else ""
        if not (said.isascii() and said.isprintable()):
            raise ValueError("printable ASCII is expected")
        return key


class _Message(pydantic.BaseModel):
    content: ValidText | None = None
    reasoning_content: ValidText | None = None  # as SGLang, DeepSeek and we have it
    reasoning: ValidText | None = None  # as vLLM and OpenRouter


class _Choice(pydantic.BaseModel):
    message: _Message
    finish_reason: str | None = None
    stop_reason: Any = None  # ours; other servers put other things there


class _Usage(pydantic.BaseModel):
    completion_tokens: int | None = None


class _Body(pydantic.BaseModel):
    choices: list[_Choice] = pydantic.Field(min_length=1)
    usage: _Usage | None = None


class Completion(pydantic.BaseModel):
    """What an endpoint answered. `text` has its thoughts, too, in <think>...</think>, as our own
    loop's text has them."""

    text: str
    stop_reason: StopReason
    num_tokens: int | None


def parse_completion(body: bytes) -> Completion:
    """Raises ValueError: it is no chat completion."""
    try:
        found = _Body.model_validate(loads(body))
    except pydantic.ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from error
    choice = found.choices[0]
    said = choice.message
    thought = said.reasoning_content or said.reasoning
    text = f"<think>{thought}</think>\n{said.content or ''}" if thought else said.content or ""
    return Completion(
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


def delay_s(settings: EndpointSettings, tries: int, asked_s: float | None, draw: float) -> float:
    """How long to wait after so many tries: what the endpoint asked for, or a share `draw` (from 0
    to 1) of a bound that doubles with each try ("full jitter"); never beyond max_backoff_s."""
    if asked_s is not None:
        return min(max(asked_s, 0.0), settings.max_backoff_s)
    # A power beyond 1023 would be no float.
    bound = settings.backoff_s * 2.0 ** min(tries - 1, 60)
    return draw * min(bound, settings.max_backoff_s)


class Endpoint:
    """See `agentloop.evaluation.loop.Sampler`. Use `Endpoint.open`."""

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
        self._places = anyio.CapacityLimiter(settings.max_concurrent)
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
        """`emit` is told when a sample begins and ends.

        Raises:
            SettingsError: it refuses us, or it has not one model, and none is named.
            ServerUnavailable: it cannot be reached.
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

    async def has_room(self, size: int) -> None:
        """See `Sampler`."""
        async with self._places:  # no deadline: each request has one, and it is their turn first
            return

    async def group(
        self, task: Task, *, name: str, size: int, at_gate: Callable[[], None]
    ) -> Sequence[Sample]:
        """See `Sampler`.

        Raises:
            SettingsError: the endpoint refuses whatever it is asked.
        """
        samples: dict[int, Sample] = {}
        messages: Sequence[Message] = (
            [{"role": "user", "content": task.prompt}]
            if isinstance(task.prompt, str)
            else task.prompt
        )
        sampling = self._sampling.of_group(name)

        async def ask(index: int) -> None:
            samples[index] = await self._sample(name, index, messages, sampling.of_sibling(index))

        at_gate()
        try:
            async with anyio.create_task_group() as tasks:
                for index in range(size):
                    tasks.start_soon(ask, index)
        except ExceptionGroup as errors:
            raise _one_of(errors) from None
        return [samples[index] for index in range(size)]

    async def _sample(
        self, group: str, index: int, messages: Sequence[Message], sampling: Sampling
    ) -> Sample:
        body = self._body(messages, sampling)
        async with self._places:  # no deadline: each request has one
            trajectory = Trajectory(f"{group}.{index}", [], created_unix_s=time.time())
            self._emit(RolloutStarted(trajectory, group))
            try:
                num_tokens = await self._record(trajectory, body)
            except BaseException:
                self._emit(RolloutAbandoned(trajectory.id))
                raise
            self._emit(RolloutFinished(trajectory.id, trajectory, num_tokens))
        return Sample(trajectory, num_tokens)

    async def _record(self, trajectory: Trajectory, body: bytes) -> int | None:
        """What comes of a request goes into `trajectory`; returns how many tokens that took."""
        started_s = time.monotonic()
        try:
            found = await self._tried(trajectory.id, body)
        except (ServerRefused, ServerUnavailable) as error:
            trajectory.error = str(error)
            return None
        finally:
            trajectory.elapsed_s = time.monotonic() - started_s
        trajectory.stop_reason = found.stop_reason
        if found.stop_reason.infrastructure:
            trajectory.error = "the endpoint says that its own infrastructure failed"
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
        """What is as by default is left out: not every endpoint knows it.

        Raises:
            RequestError: the messages cannot be sent.
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
        except TypeError as error:  # such as half of a surrogate pair
            raise RequestError(f"messages: they cannot be sent: {error}") from error

    async def _tried(self, id: str, body: bytes) -> Completion:
        """
        Raises:
            ServerRefused, ServerUnavailable: at the last try, too.
            RequestError, SettingsError: to try again would not help.
        """
        draw = random.Random(id)
        for tries in range(1, self._settings.max_tries + 1):
            asked_s = None
            try:
                answer = await self._request("POST", "chat/completions", body)
                if answer.status_code == 200:
                    return parse_completion(answer.content)
                error: Exception = self._refusal(answer)
                asked_s = retry_after_s(answer.headers, time.time())
            except ServerUnavailable as unavailable:
                error = unavailable
            except ValueError as malformed:
                error = ServerUnavailable(f"{self._where}: no chat completion: {malformed}")
            if tries == self._settings.max_tries:
                raise error
            await anyio.sleep(delay_s(self._settings, tries, asked_s, draw.random()))
        raise AssertionError("unreachable")

    async def _request(self, method: str, path: str, body: bytes | None = None) -> httpx.Response:
        """Raises ServerUnavailable."""
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
        """What may go better another time.

        Raises:
            RequestError: it will not have this prompt.
            SettingsError: it will have none.
        """
        status = answer.status_code
        said = f"{self._where}: {status} {_message(answer)}"
        if status in _BUSY or status >= 500:
            return ServerRefused(said, status=status)
        if status in (401, 403):
            raise SettingsError(f"endpoint.api_key: {said}")
        if status in (400, 413, 422):
            raise RequestError(said)
        raise SettingsError(f"endpoint.url, endpoint.model: {said}")

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
                f"endpoint.model: {self._where} does not say which it has"
            ) from error
        if len(names) != 1:
            there = ", ".join(names[:20]) or "none"
            raise SettingsError(f"endpoint.model: name one of those of {self._where}: {there}")
        return names[0]


def retry_after_s(headers: Mapping[str, str], now_unix_s: float) -> float | None:
    """Seconds that a Retry-After asks for (RFC 9110, 10.2.3); None where it asks for none."""
    said = headers.get("retry-after", "").strip()
    if said.isdecimal():
        return float(said)
    try:
        return parsedate_to_datetime(said).timestamp() - now_unix_s
    except (ValueError, OverflowError):
        return None


def _message(answer: httpx.Response) -> str:
    """What an error says of itself, in OpenAI's form or in another."""
    try:
        said = orjson.loads(answer.content)["error"]
        said = said["message"] if isinstance(said, Mapping) else said
    except (ValueError, KeyError, TypeError):
        said = answer.text
    return " ".join(str(said).split())[:_MAX_SAID] or answer.reason_phrase


def _one_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """All samples of a task are told the same: one says it. What ends the run goes first."""
    leaves: list[BaseException] = []
    pending: list[BaseException] = [errors]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    return next((one for one in leaves if not isinstance(one, RequestError)), leaves[0])
