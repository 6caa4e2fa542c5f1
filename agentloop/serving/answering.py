"""Answer requests for completions, in a stream or whole, whatever the protocol and the model."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from functools import lru_cache

import anyio
from aiohttp import web

from agentloop.agent.chat_format import ChatFormat
from agentloop.errors import AgentLoopError
from agentloop.serving.exchange import Exchange
from agentloop.serving.http import (
    EventStream,
    error_of,
    has_left,
    id_of,
    json_response,
    send_whole,
)
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter, chunk_frame, is_first
from agentloop.serving.protocols.chat.choices import RunChoice, choices_of, streamed_choices
from agentloop.serving.requests import ChatRequest
from agentloop.serving.schemas import ChatCompletionChunk, Frame

OnSending = Callable[[int], None]
"""Called with the number of a choice before its client is sent any of it."""

_MAX_TOKEN_TEXTS = 1 << 16


class Answering:
    """Runs the choices of a request and writes the answer."""

    def __init__(self, chat: ChatFormat, *, io_timeout_s: float) -> None:
        """
        Args:
            io_timeout_s: time for a client to accept a part of the answer.
        """
        self._chat = chat
        self._io_timeout_s = io_timeout_s
        self.token_text = lru_cache(_MAX_TOKEN_TEXTS)(lambda token: chat.decode([token]))

    def writers(
        self,
        request: ChatRequest,
        model_name: str,
        *,
        is_agent: bool,
        tells_executed: bool = False,
        frame: Frame | None = None,
    ) -> list[ChunkWriter]:
        """Return a chunk writer for each choice.

        Args:
            is_agent: whether calls are the agent's own, unless the request has tools.
            tells_executed: whether the calls that the agent ran are told in the reasoning, too.
            frame: fields of an earlier answer, to repeat it.
        """
        frame = frame or chunk_frame(f"chatcmpl-{uuid.uuid4().hex}", model_name)
        return [
            ChunkWriter(
                frame,
                index,
                chat=self._chat.with_arguments(request.template_arguments),
                stop=request.stop_sequences,
                has_caller_tools=request.has_caller_tools or not is_agent,
                has_tools=is_agent or request.has_caller_tools,
                shows_malformed=not is_agent,
                tells_executed=tells_executed,
                token_text=self.token_text if request.logprobs else None,
            )
            for index in range(request.n or 1)
        ]

    async def answer(
        self,
        request: web.Request,
        exchange: Exchange,
        writers: Sequence[ChunkWriter],
        run: RunChoice,
        on_sending: OnSending = lambda index: None,
    ) -> web.StreamResponse:
        """Run a request's choices and answer it.

        Args:
            run: runs one choice to its end.

        Raises:
            AgentLoopError: a choice failed before the answer began.
            ConnectionError: the client has gone, or does not read.
        """
        if exchange.chat.stream:
            return await self._stream(request, exchange, writers, run, on_sending)
        choices = list(zip(writers, await choices_of(writers, run), strict=True))
        if exchange.chat.logprobs:  # building them takes seconds for many tokens
            response = await anyio.to_thread.run_sync(
                lambda: json_response(exchange.whole(choices))
            )
        else:
            response = json_response(exchange.whole(choices))
        if has_left(request):
            raise ConnectionResetError("the client has left")
        for index in range(len(choices)):
            on_sending(index)
        await send_whole(request, response, timeout_s=self._io_timeout_s)
        return response

    async def _stream(
        self,
        request: web.Request,
        exchange: Exchange,
        writers: Sequence[ChunkWriter],
        run: RunChoice,
        on_sending: OnSending,
    ) -> web.StreamResponse:
        stream = EventStream(request, timeout_s=self._io_timeout_s, ping=exchange.ping)
        held: list[ChatCompletionChunk] = []

        async def write_event(chunk: ChatCompletionChunk) -> None:
            if not is_first(chunk):
                for choice in chunk["choices"]:
                    on_sending(choice["index"])
            if data := b"".join(exchange.events(chunk)):
                await stream.send(data)  # no deadline: it has one

        try:
            async with stream.alive(), streamed_choices(writers, run) as (chunks, ended):
                async for chunk in chunks:  # no deadline: the rollouts have theirs
                    held.append(chunk)
                    is_early = exchange.chat.is_constrained and is_first(chunk)
                    if is_early and not stream.has_begun:
                        continue  # the server may still refuse the grammar
                    for waiting in held:
                        await write_event(waiting)
                    held.clear()
        except AgentLoopError as error:
            if not stream.has_begun:
                raise
            # no deadline: it has one
            await stream.send(exchange.fail(*error_of(error), id_of(request)))
            return stream.response
        trajectories = [ended[index] for index in sorted(ended)]
        last = b"".join(exchange.events(writers[0].usage(trajectories)))
        # All at once: a client that has the last event may go on from it before `send` returns.
        # no deadline: it has one
        await stream.send(last + exchange.end())
        return stream.response
