"""An endpoint that plays judges, users and other agents, with limits on requests and cost."""

from __future__ import annotations

import hashlib
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import anyio
import pydantic

from agentloop.agent.channels import answer_in
from agentloop.agent.tools import Schema
from agentloop.environments.answer_cache import AnswerCache
from agentloop.errors import InfrastructureFailed, LimitReached, ServerError, SettingsError
from agentloop.inference.openai_client import EndpointCompletion, EndpointSettings, OpenAIClient
from agentloop.plain_json import dumps
from agentloop.trajectory import Message, StopReason

__all__ = ["Ask", "Endpoint", "asking"]

_NEW_LIMIT = "max_completion_tokens"  # OpenAI's newer models accept no other name

Ask = Callable[[Sequence[Message]], Awaitable[str]]
"""An async function of a conversation that returns the next message, such as `Agent.chat`."""


class Endpoint:
    """A model with OpenAI's chat completions API, for judges, simulated users and other agents.

    The limits hold for all that ask it, in this process. Connections are open only while somebody
    waits for an answer: an endpoint may be made in an environment's module, and needs no closing.

        model = agentloop.Endpoint("http://127.0.0.1:30000/v1", max_requests=100_000)

    Attributes:
        num_requests: requests so far; a request that is repeated after a failure counts once.
        cost: cost of the answers so far, by `prices`; NaN (unknown) after one without token counts.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        api_key: str | None = None,
        options: Mapping[str, object] | None = None,
        max_concurrent: int = 32,
        timeout_s: float = 50.0,
        max_tries: int = 3,
        max_requests: int | None = None,
        max_cost: float | None = None,
        prices: tuple[float, float] = (0.0, 0.0),
        max_cached: int = 0,
    ) -> None:
        """
        Args:
            url: base URL, such as https://api.openai.com/v1.
            model: name of the model; by default, the only one that the endpoint has.
            api_key: read it from the environment: `os.environ["..."]`.
            options: further fields of each request, such as `{"temperature": 0}`.
            max_concurrent: maximum number of requests in flight; others wait.
            timeout_s: time limit of an answer, including waits and all attempts. It should be
                below a tenth of `budget.timeout_s`, the part that is the environment's own.
            max_tries: attempts at a request while the endpoint is busy, failing or slow.
            max_requests, max_cost: further requests raise LimitReached, which ends the run.
                Requests in flight when the cost is reached are completed.
            prices: cost of a million tokens of the prompt, and of the answer.
            max_cached: number of answers of `chat` to remember: equal conversations then get the
                same answer, and are requested once. A `Judge` remembers its scores by itself.

        Raises:
            SettingsError: an argument is invalid.
        """
        try:
            self._settings = EndpointSettings(
                url=url,
                model=model,
                api_key=pydantic.SecretStr(api_key) if api_key else None,
                max_concurrent=max_concurrent,
                timeout_s=timeout_s,
                max_tries=max_tries,
            )
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False)[0]
            raise SettingsError(f"Endpoint: {problem['loc'][0]}: {problem['msg']}") from error
        if not url:
            raise SettingsError("Endpoint: url: must not be empty")
        self._named = ""  # what precedes the names of settings in messages
        self.num_requests = 0
        self.cost = 0.0
        self._model = model
        self._options = dict(options or {})
        self._max_requests = max_requests
        self._max_cost = max_cost
        self._prices = prices
        self._cache: AnswerCache[str] | None = AnswerCache(max_cached) if max_cached else None
        self._client: OpenAIClient | None = None
        self._num_users = 0

    @classmethod
    def of(cls, settings: EndpointSettings, options: Mapping[str, object]) -> Endpoint:
        """Return the endpoint of a command's settings, with further fields of each request."""
        endpoint = cls(settings.url, model=settings.model, options=options)
        endpoint._settings, endpoint._named = settings, "endpoint."
        return endpoint

    async def model_name(self) -> str:
        """Return the name of the model.

        Raises:
            SettingsError: the endpoint refuses access, or has several models.
            ServerUnavailable: the endpoint cannot be reached.
        """
        if not self._model:
            async with self._connect() as client:
                self._model = await client.only_model()
        return self._model

    @property
    def url(self) -> str:
        """The base URL."""
        return self._settings.url

    async def identity(self) -> Mapping[str, object]:
        """Return everything besides the messages that an answer depends on, as plain data.

        The model is the one that is asked, also if no name was given.

        Raises:
            InfrastructureFailed: the endpoint, which has to tell its name, cannot be reached.
            SettingsError: as `model_name`.
        """
        try:
            return {"url": self.url, "model": await self.model_name(), **self._options}
        except ServerError as error:
            raise InfrastructureFailed(str(error)) from error

    async def chat(self, messages: Sequence[Message]) -> str:
        """Return the text of the model's next message. Raises the errors of `complete`."""
        if self._cache is None:
            return await self._request_text(messages)
        key = hashlib.sha256(dumps(list(messages))).hexdigest()
        return await self._cache.get(key, partial(self._request_text, messages))

    async def _request_text(self, messages: Sequence[Message]) -> str:
        completion = await self.complete(messages)
        if completion.stop_reason is StopReason.CONTENT_FILTER:
            raise InfrastructureFailed(f"{self.url}: its content filter withheld the answer")
        return answer_in(completion.text, reasoning=False)

    async def complete(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Schema] = (),
        max_tokens: int | None = None,
        seed: int | None = None,
    ) -> EndpointCompletion:
        """Return the model's next message, with its reasoning and its tool calls.

        Args:
            tools: the schemas of the tools that it may call.
            max_tokens: token limit of the message; a lower one in `options` takes precedence.
            seed: seed of the sampling, for endpoints that have one.

        Raises:
            InfrastructureFailed: there was no answer in time; the rollout gets no reward.
            RequestError: the endpoint rejects these messages.
            LimitReached: `max_requests` or `max_cost` is reached.
            SettingsError: the endpoint rejects all requests.
        """
        url, timeout_s = self._settings.url, self._settings.timeout_s
        fields: dict[str, object] = {"messages": list(messages), **self._options}
        if tools:
            fields["tools"] = list(tools)
        if max_tokens is not None:
            name = _NEW_LIMIT if _NEW_LIMIT in fields else "max_tokens"
            lower = fields.get(name)
            fields[name] = min(max_tokens, lower) if isinstance(lower, int) else max_tokens
        if seed is not None:
            fields["seed"] = seed
        try:
            with anyio.fail_after(timeout_s):
                return await self._answer(fields)
        except TimeoutError as error:
            raise InfrastructureFailed(
                f"{url}: no answer within {timeout_s:g} s (timeout_s)"
            ) from error
        except ServerError as error:
            raise InfrastructureFailed(str(error)) from error

    async def _answer(self, fields: Mapping[str, object]) -> EndpointCompletion:
        async with self._connect() as client, client.slots:
            model = await self.model_name()
            self._count()
            completion = await client.complete(
                {"model": model, **fields}, id=f"{self.num_requests}"
            )
        self.cost += self._cost_of(completion)
        if completion.failure:
            raise InfrastructureFailed(f"{self.url}: {completion.failure}")
        return completion

    def _cost_of(self, completion: EndpointCompletion) -> float:
        """Return the cost of an answer; NaN if it is unknown.

        Raises:
            SettingsError: it is unknown, so that `max_cost` cannot be held.
        """
        tokens = completion.num_prompt_tokens, completion.num_tokens
        if self._max_cost is not None and None in tokens:
            raise SettingsError(
                f"{self.url}: the answer has no token counts: max_cost cannot be held; set "
                "max_requests"
            )
        return sum(
            price * (math.nan if num is None else num) / 1e6
            for price, num in zip(self._prices, tokens, strict=True)
            if price
        )

    def _count(self) -> None:
        """Count a request. Raises LimitReached if there may be no further one."""
        url = self._settings.url
        if self._max_requests is not None and self.num_requests >= self._max_requests:
            raise LimitReached(f"{url}: {self.num_requests} requests were made (max_requests)")
        if self._max_cost is not None and self.cost >= self._max_cost:
            raise LimitReached(f"{url}: answers cost {self.cost:.6g} so far (max_cost)")
        self.num_requests += 1

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[OpenAIClient]:
        """Share the connections with all who ask at the same time; the last one closes them."""
        client = self._client = self._client or OpenAIClient(self._settings, prefix=self._named)
        self._num_users += 1
        try:
            yield client
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._client = None
                await client.aclose()


def asking(model: Endpoint | Ask) -> Ask:
    """Return the function that asks a model."""
    return model.chat if isinstance(model, Endpoint) else model
