"""OpenAI's completions: the bare model continues text or token ids, as evaluation harnesses ask.

    prompts ──encoded──> ids ──RawGeneration──> a choice for each

Nothing is added to a prompt but what the model's tokenizer adds to any text, and a text that spells
control tokens has them: its author writes all of the prompt, markup included. An echoed prompt has
log-probabilities, from which harnesses compute those of an answer that it ends with.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated

import anyio
import anyio.to_thread
import pydantic
from aiohttp import web

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.raw_generation import RawGeneration
from agentloop.agent.rollout import Budget
from agentloop.aio import task_group
from agentloop.errors import PromptTooLong, RequestError, ServerUnavailable
from agentloop.inference.router import Router
from agentloop.inference.sglang.frames import TopLogprobs
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.serving.http import json_response
from agentloop.serving.requests import (
    UNSUPPORTED,
    Only,
    describe_unsupported,
    load_object,
    refuse_unsupported,
    validate,
)
from agentloop.serving.sampling_fields import SamplingFields
from agentloop.serving.schemas import TextChoice, TextCompletion, TextLogprobs, usage_of
from agentloop.trajectory import TurnEnd

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_PROMPTS = 4096  # per request
_LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have

# Parameters that would change the answer, with the values that do not.
NOT_FOR_COMPLETIONS: dict[str, Only] = {
    **{
        name: Only(only.values)
        for name, only in UNSUPPORTED.items()
        if name not in ("echo", "enable_thinking")
    },
    "best_of": Only((1,)),
    "functions": Only(([],), "use chat completions"),
    "n": Only((1,), "send the prompt as often in a list"),
    "prompt_logprobs": Only((), "use echo and logprobs"),
    "response_format": Only(({"type": "text"},), "use chat completions"),
    "skip_special_tokens": Only((False,)),
    "stop_regex": Only(([],), "use stop"),
    "stream": Only((False,), "use chat completions"),
    "stream_options": Only((), "use chat completions"),
    "suffix": Only(("",)),
    "tools": Only(([],), "use chat completions"),
}

_Id = Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], pydantic.Field(min_length=1)]
_Text = Annotated[str, pydantic.Field(min_length=1)]
_Texts = Annotated[list[_Text], pydantic.Field(min_length=1, max_length=_MAX_PROMPTS)]
_Lists = Annotated[list[_Ids], pydantic.Field(min_length=1, max_length=_MAX_PROMPTS)]


class CompletionRequest(SamplingFields):
    """The supported parameters of OpenAI's `POST /v1/completions`."""

    model_config = pydantic.ConfigDict(json_schema_extra=describe_unsupported(NOT_FOR_COMPLETIONS))

    prompt: _Text | _Texts | _Ids | _Lists
    max_tokens: int | None = pydantic.Field(None, ge=0)
    echo: bool | None = None
    logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    add_special_tokens: bool | None = None

    @classmethod
    def parse(cls, body: bytes) -> CompletionRequest:
        """Parse a request body.

        Raises:
            RequestError: A field is invalid or unsupported; the message names it.
        """
        value = load_object(body)
        refuse_unsupported(value, NOT_FOR_COMPLETIONS)
        request = validate(cls, value)
        if request.token_limit == 0 and not request.echo:
            raise RequestError("max_tokens: 0 leaves nothing to return; use 1 or more, or echo")
        if request.token_limit > 1 and request.echo:
            raise RequestError("max_tokens: with echo, it may be 0 or 1")
        request.server_parameters()
        return request

    @property
    def token_limit(self) -> int:
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each of which gets a choice."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        ids = [part for part in self.prompt if isinstance(part, int)]
        return [ids] if ids else [part for part in self.prompt if not isinstance(part, int)]


class Completions:
    """Answers requests for completions."""

    def __init__(
        self,
        router: Router,
        chat: ChatFormat,
        *,
        name: str,
        sampling: Sampling,
        budget: Budget,
        slots: anyio.CapacityLimiter,
        token_text: Callable[[int], str],
    ) -> None:
        """
        Args:
            name: The model's, in the answers.
            sampling: Parameters of requests that bring none of their own.
            budget: Limits of each choice.
            slots: Limits concurrent generations.
            token_text: Returns the text of one token.
        """
        self._router = router
        self._chat = chat
        self._name = name
        self._sampling = sampling
        self._budget = budget
        self._slots = slots
        self._token_text = token_text

    async def answer(self, parameters: CompletionRequest) -> web.Response:
        """Answer a request.

        Raises:
            RequestError: It is invalid.
            ServerError: It could not be served.
        """
        prompts = await self._prompts(parameters)
        generations = [self._generation(parameters, prompt) for prompt in prompts]
        async with task_group(only_first=True) as tasks:
            for generation in generations:
                tasks.start_soon(self._run, generation)
        # In a thread: writing the log-probabilities of many tokens takes long.
        return await anyio.to_thread.run_sync(self._response, parameters, generations)

    async def _prompts(self, parameters: CompletionRequest) -> list[list[int]]:
        """Encode the prompts and check them.

        Raises:
            RequestError: A prompt is empty, too long, or has an id outside of the vocabulary.
        """
        chat, longest = self._chat, self._router.context_length
        adds_special = parameters.add_special_tokens is not False
        prompts = []
        for number, prompt in enumerate(parameters.prompts):
            field = f"prompt[{number}]" if len(parameters.prompts) > 1 else "prompt"
            ids = prompt
            if isinstance(ids, str):
                encode = partial(chat.tokenizer.encode, ids, add_special_tokens=adds_special)
                ids = (await anyio.to_thread.run_sync(encode)).ids
            if not ids:
                raise RequestError(f"{field}: has no tokens; send at least one")
            if max(ids) >= chat.vocab_size:
                raise RequestError(
                    f"{field}: {max(ids)} is outside of the vocabulary of {chat.vocab_size}"
                )
            if len(ids) >= longest:
                # Clients detect this error by "this model's maximum context length is".
                raise PromptTooLong(
                    f"{field}: this model's maximum context length is {longest} tokens, but the "
                    f"prompt has {len(ids)}: shorten it ({PromptTooLong.code})"
                )
            prompts.append(ids)
        return prompts

    def _generation(self, parameters: CompletionRequest, ids: list[int]) -> RawGeneration:
        budget, limit = self._budget, parameters.token_limit
        limits = (
            max(1, limit),  # a server samples a token anyway when it computes a prompt
            budget.max_response_tokens,
            budget.max_sampled_tokens,
            self._router.context_length - len(ids),
        )
        name = uuid.uuid4().hex
        generation = Generation(
            rid=name,
            key=name,
            ids=ids,
            sampling=self._sampling.model_copy(update=parameters.sampling_overrides()),
            max_new_tokens=min(x for x in limits if x is not None),
            stop_ids=(
                *(() if parameters.ignore_eos else self._chat.stop_ids),
                *(parameters.stop_token_ids or ()),
            ),
            num_top_logprobs=parameters.logprobs or 0,
            parameters=parameters.server_parameters() if limit else {},
            prompt_logprobs=bool(parameters.echo) and parameters.logprobs is not None,
        )
        return RawGeneration(
            self._router,
            self._chat,
            generation,
            vocab_size=self._chat.vocab_size,
            stop=parameters.stop_sequences,
        )

    async def _run(self, run: RawGeneration) -> None:
        async with self._slots:  # no deadline: until another generation ends, which has one
            await run.run(self._budget.timeout_s)
        num_scored = len(run.prompt.logprobs) if run.prompt else 0
        if run.generation.prompt_logprobs and num_scored != len(run.generation.ids):
            raise ServerUnavailable("the server did not report log-probabilities of the prompt")

    def _response(
        self, parameters: CompletionRequest, generations: Sequence[RawGeneration]
    ) -> web.Response:
        num_prompt = sum(len(run.generation.ids) for run in generations)
        num_cached = sum(min(run.cached_tokens, len(run.generation.ids)) for run in generations)
        num_sampled = sum(len(run.ids) for run in generations) if parameters.token_limit else 0
        body: TextCompletion = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [
                self._choice(index, parameters, run) for index, run in enumerate(generations)
            ],
            "usage": usage_of(num_prompt, num_cached, num_sampled),
        }
        return json_response(body)

    def _choice(self, index: int, parameters: CompletionRequest, run: RawGeneration) -> TextChoice:
        text, ids = "", list[int]()
        logprobs, top = list[float | None](), list[TopLogprobs]()
        if parameters.echo:
            text, ids = self._chat.decode(run.generation.ids), list(run.generation.ids)
            if run.prompt is not None:
                logprobs, top = [None, *map(_finite, run.prompt.logprobs[1:])], [*run.prompt.top]
        if parameters.token_limit:
            text, ids = text + run.text, ids + run.ids
            logprobs += map(_finite, run.logprobs)
            top += run.top_logprobs or [[] for _ in run.ids]
        is_stop = run.end is TurnEnd.STOP and parameters.token_limit
        return {
            "index": index,
            "text": text,
            "logprobs": None if parameters.logprobs is None else self._logprobs(ids, logprobs, top),
            "finish_reason": "stop" if is_stop else "length",
        }

    def _logprobs(
        self, ids: Sequence[int], logprobs: list[float | None], top: Sequence[TopLogprobs]
    ) -> TextLogprobs:
        return {
            "tokens": [self._token_text(token) for token in ids],
            "token_logprobs": logprobs,
            "top_logprobs": [
                None if logprob is None else self._alternatives([(logprob, token), *likely])
                for token, logprob, likely in zip(ids, logprobs, top, strict=True)
            ],
        }

    def _alternatives(self, likely: Sequence[tuple[float, int]]) -> dict[str, float]:
        """Return log-probabilities by text; tokens that are parts of characters share a text."""
        by_text: dict[str, float] = {}
        for logprob, token in likely:
            text = self._token_text(token)
            by_text[text] = max(by_text.get(text, _LEAST_LOGPROB), _finite(logprob))
        return by_text


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)
