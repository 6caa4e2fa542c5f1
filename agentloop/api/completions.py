"""OpenAI's completions: the bare model continues text or token ids.

    prompts ──encoded──> ids ──RawGeneration──> pieces ──ChoiceWriter──> chunks ──> stream or whole

Nothing is added to a prompt but what the model's tokenizer adds to any text, and a text that spells
control tokens has them: its author writes all of the prompt, markup included. An echoed prompt has
log-probabilities, which evaluation harnesses read.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

import anyio
import pydantic
from aiohttp import web
from anyio.streams.memory import MemoryObjectSendStream

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.raw_generation import GeneratedPiece, RawGeneration
from agentloop.agent.rollout import Budget
from agentloop.agent.text_stream import TextStream
from agentloop.aio import task_group
from agentloop.api.http import EventStream, error_of, event_line, json_response
from agentloop.api.requests import (
    UNSUPPORTED,
    Only,
    describe_unsupported,
    load_object,
    refuse_unsupported,
    validate,
)
from agentloop.api.sampling_fields import SamplingFields
from agentloop.api.schemas import (
    TextChoice,
    TextChunk,
    TextCompletion,
    TextLogprobs,
    Usage,
    usage_of,
)
from agentloop.errors import AgentLoopError, PromptTooLong, RequestError, ServerUnavailable
from agentloop.inference.router import Router
from agentloop.inference.sglang.frames import PromptLogprobs, TopLogprobs
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.trajectory import TurnEnd

_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_MAX_CHOICES = 4096  # per request
_LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON does not have

# Parameters that would change the answer, with the values that do not.
NOT_FOR_COMPLETIONS: dict[str, Only] = {
    **{
        name: Only(only.values)
        for name, only in UNSUPPORTED.items()
        if name not in ("echo", "enable_thinking")
    },
    "best_of": Only((1,), "use n"),
    "functions": Only(([],), "use chat completions"),
    "prompt_logprobs": Only((), "use echo and logprobs"),
    "response_format": Only(({"type": "text"},), "use chat completions"),
    "skip_special_tokens": Only((False,)),
    "stop_regex": Only(([],), "use stop"),
    "suffix": Only(("",)),
    "tools": Only(([],), "use chat completions"),
}

_Id = Annotated[int, pydantic.Field(ge=0, lt=1 << 31)]
_Ids = Annotated[list[_Id], pydantic.Field(min_length=1)]
_Text = Annotated[str, pydantic.Field(min_length=1)]
_Texts = Annotated[list[_Text], pydantic.Field(min_length=1, max_length=_MAX_CHOICES)]
_Lists = Annotated[list[_Ids], pydantic.Field(min_length=1, max_length=_MAX_CHOICES)]


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
        if (num := len(request.prompts) * (request.n or 1)) > _MAX_CHOICES:
            raise RequestError(f"n: {num} choices are more than {_MAX_CHOICES}; send fewer prompts")
        request.server_parameters()
        return request

    @property
    def token_limit(self) -> int:
        return _DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each of which gets `n` choices."""
        prompt: Any = self.prompt
        is_one = isinstance(prompt, str) or isinstance(prompt[0], int)
        return [prompt] if is_one else prompt

    @property
    def wants_prompt_logprobs(self) -> bool:
        return bool(self.echo) and self.logprobs is not None


class ChoiceWriter:
    """Converts a prompt and the pieces of its continuation to chunks of one choice."""

    def __init__(
        self,
        index: int,
        ids: Sequence[int],
        chat: ChatFormat,
        *,
        num_logprobs: int | None,
        token_text: Callable[[int], str],
    ) -> None:
        """
        Args:
            num_logprobs: Number of most likely tokens at each position; None: no log-probabilities.
            token_text: Returns the text of one token.
        """
        self._index = index
        self._ids = ids
        self._chat = chat
        self._num_logprobs = num_logprobs
        self._token_text = token_text
        self._num_echoed = 0  # characters

    def prompt(self, scores: PromptLogprobs | None, *, is_last: bool) -> TextChoice:
        """Return the chunk that echoes the prompt.

        Args:
            is_last: Whether nothing follows it.
        """
        stream, text, offsets = TextStream(self._chat), "", []
        for token in self._ids:
            offsets.append(len(text))
            text += stream.feed([token])
        text += stream.flush()
        self._num_echoed = len(text)
        logprobs = None
        if scores is not None:
            token_logprobs = [None, *map(_finite, scores.logprobs[1:])]
            logprobs = self._logprobs(self._ids, token_logprobs, scores.top, offsets)
        return self._choice(text, logprobs, "length" if is_last else None)

    def piece(self, piece: GeneratedPiece) -> TextChoice:
        logprobs = None
        if self._num_logprobs is not None:
            offsets = [self._num_echoed + offset for offset in piece.offsets]
            top = piece.top_logprobs or [[]] * len(piece.ids)
            logprobs = self._logprobs(piece.ids, [*map(_finite, piece.logprobs)], top, offsets)
        return self._choice(piece.text, logprobs, _FINISH[piece.end])

    def _choice(
        self, text: str, logprobs: TextLogprobs | None, finish: Literal["stop", "length"] | None
    ) -> TextChoice:
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def _logprobs(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float | None],
        top: Sequence[TopLogprobs],
        offsets: list[int],
    ) -> TextLogprobs:
        return {
            "tokens": [self._token_text(token) for token in ids],
            "token_logprobs": list(logprobs),
            "top_logprobs": [
                None if logprob is None else self._alternatives([(logprob, token), *likely])
                for token, logprob, likely in zip(ids, logprobs, top, strict=True)
            ],
            "text_offset": offsets,
        }

    def _alternatives(self, likely: Sequence[tuple[float, int]]) -> dict[str, float]:
        """Return log-probabilities by text; tokens that are parts of characters share a text."""
        by_text: dict[str, float] = {}
        for logprob, token in likely:
            text = self._token_text(token)
            by_text[text] = max(by_text.get(text, _LEAST_LOGPROB), _finite(logprob))
        return by_text


_FINISH: dict[TurnEnd | None, Literal["stop", "length"] | None] = {
    None: None,
    TurnEnd.STOP: "stop",
    TurnEnd.LENGTH: "length",
}

Send = Callable[[TextChoice], Awaitable[None]]


@dataclass(slots=True)
class _EncodedPrompt:
    """A prompt, and what its choices have cost."""

    number: int
    ids: list[int]
    name: str
    cached_tokens: int | None = None
    num_sampled: int = 0


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
        io_timeout_s: float,
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
        self._io_timeout_s = io_timeout_s
        self._slots = slots
        self._token_text = token_text

    async def answer(
        self, request: web.Request, parameters: CompletionRequest
    ) -> web.StreamResponse:
        """Answer a request.

        Raises:
            RequestError: It is invalid.
            ServerError: It could not be served.
        """
        prompts = await self._prompts(parameters)
        frame: TextChunk = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._name,
            "choices": [],
        }
        try:
            if parameters.stream:
                return await self._stream(request, parameters, prompts, frame)
            return await self._whole(parameters, prompts, frame)
        finally:
            for prompt in prompts:
                self._router.forget_group(prompt.name)

    async def _whole(
        self, parameters: CompletionRequest, prompts: Sequence[_EncodedPrompt], frame: TextChunk
    ) -> web.Response:
        chunks: dict[int, list[TextChoice]] = {}

        async def keep(chunk: TextChoice) -> None:
            chunks.setdefault(chunk["index"], []).append(chunk)

        async with task_group(only_first=True) as tasks:
            for prompt in prompts:
                tasks.start_soon(self._continue, parameters, prompt, keep)
        choices = [_join(chunks[index]) for index in sorted(chunks)]
        body: TextCompletion = {**frame, "choices": choices, "usage": _usage(prompts)}
        if parameters.logprobs is not None:  # writing them takes long for many tokens
            return await anyio.to_thread.run_sync(json_response, body)
        return json_response(body)

    async def _stream(
        self,
        request: web.Request,
        parameters: CompletionRequest,
        prompts: Sequence[_EncodedPrompt],
        frame: TextChunk,
    ) -> web.StreamResponse:
        stream = EventStream(request, timeout_s=self._io_timeout_s)
        chunks_in, chunks = anyio.create_memory_object_stream[TextChoice](0)

        async def write_event(body: object) -> None:
            await stream.send(event_line(body))  # no deadline: it has one

        async def run(prompt: _EncodedPrompt, out: MemoryObjectSendStream[TextChoice]) -> None:
            async with out:
                await self._continue(parameters, prompt, out.send)

        try:
            async with stream.alive(), task_group(only_first=True) as tasks:
                async with chunks_in:
                    for prompt in prompts:
                        tasks.start_soon(run, prompt, chunks_in.clone())
                async with chunks:
                    async for chunk in chunks:  # no deadline: the generations have theirs
                        await write_event({**frame, "choices": [chunk]})
        except AgentLoopError as error:
            if not stream.has_begun:
                raise
            await write_event(error_of(error)[1])
            return stream.response
        if parameters.stream_options and parameters.stream_options.include_usage:
            await write_event({**frame, "usage": _usage(prompts)})
        await stream.send(b"data: [DONE]\n\n")  # no deadline: it has one
        return stream.response

    async def _prompts(self, parameters: CompletionRequest) -> list[_EncodedPrompt]:
        """Encode the prompts and check them.

        Raises:
            RequestError: A prompt is empty, too long, or has an id outside of the vocabulary.
        """
        chat, longest = self._chat, self._router.context_length
        adds_special = parameters.add_special_tokens is not False
        name, prompts = uuid.uuid4().hex, []
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
            prompts.append(_EncodedPrompt(number, ids, f"{name}.{number}"))
        return prompts

    async def _continue(
        self, parameters: CompletionRequest, prompt: _EncodedPrompt, out: Send
    ) -> None:
        """Generate the choices of a prompt."""
        num_choices, limit = parameters.n or 1, parameters.token_limit
        writers = [
            ChoiceWriter(
                prompt.number * num_choices + index,
                prompt.ids,
                self._chat,
                num_logprobs=parameters.logprobs,
                token_text=self._token_text,
            )
            for index in range(num_choices)
        ]
        if parameters.wants_prompt_logprobs and num_choices == 1 and limit <= 1:
            await self._choice(parameters, prompt, 0, writers[0], out, prompt_logprobs=True)
            return
        if parameters.echo:
            scores = None
            if parameters.wants_prompt_logprobs:
                scores = await self._scores(parameters, prompt)
            for writer in writers:
                await out(await _echo(writer, scores, is_last=limit == 0))
            if limit == 0:
                return
        async with task_group(only_first=True) as tasks:
            for index, writer in enumerate(writers):
                tasks.start_soon(self._choice, parameters, prompt, index, writer, out)

    async def _choice(
        self,
        parameters: CompletionRequest,
        prompt: _EncodedPrompt,
        index: int,
        writer: ChoiceWriter,
        out: Send,
        prompt_logprobs: bool = False,
    ) -> None:
        """Generate a choice, after an echo of its prompt with log-probabilities if requested."""
        generation = self._generation(parameters, prompt, index, prompt_logprobs=prompt_logprobs)
        # Each piece has a token or is the last.
        pieces_in, pieces = anyio.create_memory_object_stream[GeneratedPiece](
            generation.max_new_tokens + 2
        )

        async def run() -> None:
            with pieces_in:
                await self._run(parameters, generation, pieces_in.send_nowait)

        # no deadline for the slot: until another generation ends, which has one
        async with self._slots:
            with pieces:
                async with task_group(only_first=True) as tasks:
                    tasks.start_soon(run)
                    async for piece in pieces:  # no deadline: the generation has one
                        if prompt.cached_tokens is None:
                            prompt.cached_tokens = min(piece.cached_tokens, len(prompt.ids))
                        if prompt_logprobs and piece.ids:
                            scores = _scores_of(piece, prompt.ids)
                            await out(
                                await _echo(writer, scores, is_last=parameters.token_limit == 0)
                            )
                        if parameters.token_limit:
                            prompt.num_sampled += len(piece.ids)
                            await out(writer.piece(piece))

    async def _scores(
        self, parameters: CompletionRequest, prompt: _EncodedPrompt
    ) -> PromptLogprobs:
        """Return the log-probabilities of a prompt, which all of its choices echo."""
        generation = self._generation(parameters, prompt, 0, prompt_logprobs=True)
        pieces: list[GeneratedPiece] = []
        async with self._slots:  # no deadline: until another generation ends, which has one
            await self._run(parameters, generation, pieces.append)
        return _scores_of(pieces[0], prompt.ids)

    async def _run(
        self,
        parameters: CompletionRequest,
        generation: Generation,
        on_piece: Callable[[GeneratedPiece], None],
    ) -> None:
        num_tokens = 0

        def count(piece: GeneratedPiece) -> None:
            nonlocal num_tokens
            num_tokens += len(piece.ids)
            on_piece(piece)

        chat = self._chat
        run = RawGeneration(
            self._router,
            chat,
            generation,
            vocab_size=chat.vocab_size,
            stop=parameters.stop_sequences,
            on_piece=count,
        )
        timeout_s = self._budget.timeout_s
        with anyio.move_on_after(timeout_s) as scope:
            await run.run()
        if scope.cancelled_caught:
            if not num_tokens:  # it only waited for a server
                raise ServerUnavailable(f"no token was sampled within {timeout_s:g} s")
            run.cut_off()

    def _generation(
        self,
        parameters: CompletionRequest,
        prompt: _EncodedPrompt,
        index: int,
        *,
        prompt_logprobs: bool,
    ) -> Generation:
        budget = self._budget
        num_prompt = len(prompt.ids)
        stop_ids = () if parameters.ignore_eos else self._chat.stop_ids
        limits = (
            parameters.token_limit,
            budget.max_response_tokens,
            budget.max_sampled_tokens,
            self._router.context_length - num_prompt,
        )
        name = uuid.uuid4().hex
        is_returned = not prompt_logprobs or parameters.token_limit == 1
        return Generation(
            rid=name,
            key=name,
            ids=prompt.ids,
            sampling=self._sampling.model_copy(update=parameters.sampling_overrides()).of_sibling(
                index
            ),
            # A server samples a token anyway when it computes a prompt.
            max_new_tokens=1 if prompt_logprobs else min(x for x in limits if x is not None),
            stop_ids=(*stop_ids, *(parameters.stop_token_ids or ())),
            group=prompt.name,
            num_shared=num_prompt,
            num_top_logprobs=parameters.logprobs or 0,
            parameters=parameters.server_parameters() if is_returned else {},
            prompt_logprobs=prompt_logprobs,
        )


async def _echo(
    writer: ChoiceWriter, scores: PromptLogprobs | None, *, is_last: bool
) -> TextChoice:
    """Return a prompt's chunk, made in a thread: a long prompt takes a while."""
    return await anyio.to_thread.run_sync(partial(writer.prompt, scores, is_last=is_last))


def _scores_of(piece: GeneratedPiece, ids: Sequence[int]) -> PromptLogprobs:
    if piece.prompt is None or len(piece.prompt.logprobs) != len(ids):
        raise ServerUnavailable("the server did not report log-probabilities of the prompt")
    return piece.prompt


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)


def _join(chunks: Sequence[TextChoice]) -> TextChoice:
    """Return a choice from its chunks."""
    logprobs: TextLogprobs | None = None
    for chunk in chunks:
        if chunk["logprobs"] is not None:
            logprobs = logprobs or {
                "tokens": [],
                "token_logprobs": [],
                "top_logprobs": [],
                "text_offset": [],
            }
            for name, values in chunk["logprobs"].items():
                logprobs[name] += values  # type: ignore[literal-required]
    return {
        "index": chunks[0]["index"],
        "text": "".join(chunk["text"] for chunk in chunks),
        "logprobs": logprobs,
        "finish_reason": chunks[-1]["finish_reason"],
    }


def _usage(prompts: Sequence[_EncodedPrompt]) -> Usage:
    num_prompt = sum(len(prompt.ids) for prompt in prompts)
    num_sampled = sum(prompt.num_sampled for prompt in prompts)
    num_cached = sum(prompt.cached_tokens or 0 for prompt in prompts)
    return usage_of(num_prompt, num_cached, num_sampled)
