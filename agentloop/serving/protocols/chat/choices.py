"""Run the choices of a completion at the same time, and hand out their chunks as they come."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

import anyio
from anyio.streams.memory import MemoryObjectSendStream

from agentloop.aio import task_group
from agentloop.errors import AgentLoopError
from agentloop.events import Emit, Feed, ignore
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter
from agentloop.serving.schemas import ChatCompletionChunk
from agentloop.trajectory import Trajectory

RunChoice = Callable[[int, Emit], Awaitable[Trajectory]]
"""Runs the choice with a number to its end, emitting its events."""


async def choices_of(writers: Sequence[ChunkWriter], run: RunChoice) -> list[Trajectory]:
    """Run all choices and return their trajectories in order.

    Raises:
        AgentLoopError: that of the first choice that failed; the others are cancelled.
    """
    trajectories: dict[int, Trajectory] = {}

    async def run_choice(index: int) -> None:
        trajectories[index] = await run(index, ignore)

    async with task_group(only_first=True) as tasks:
        for index in range(len(writers)):
            tasks.start_soon(run_choice, index)
    return [trajectories[index] for index in range(len(writers))]


@asynccontextmanager
async def streamed_choices(
    writers: Sequence[ChunkWriter], run: RunChoice
) -> AsyncIterator[tuple[AsyncIterable[ChatCompletionChunk], dict[int, Trajectory]]]:
    """Run all choices; leaving the context early cancels them.

    Yields the chunks of all choices, and the trajectories of those that have ended, by number.

    Raises:
        AgentLoopError: that of the first choice that failed; the others are cancelled.
    """
    chunks_in, chunks = anyio.create_memory_object_stream[ChatCompletionChunk](0)
    trajectories: dict[int, Trajectory] = {}

    async def write(index: int, out: MemoryObjectSendStream[ChatCompletionChunk]) -> None:
        feed, writer = Feed(), writers[index]

        async def choice() -> None:
            try:
                trajectories[index] = await run(index, feed)
            except AgentLoopError as error:
                feed.close(error)
            else:
                feed.close()

        async with out, task_group() as tasks:
            tasks.start_soon(choice)
            async for event in feed:  # no deadline: the rollout has one, and then ends this
                for chunk in writer.feed(event):
                    # no deadline: the reader writes to a client, with one
                    await out.send(chunk)
            await out.send(writer.last(trajectories[index]))  # no deadline: as above

    async with task_group(only_first=True) as tasks:
        async with chunks_in:
            for index in range(len(writers)):
                tasks.start_soon(write, index, chunks_in.clone())
        try:
            async with chunks:
                yield chunks, trajectories
        finally:
            tasks.cancel_scope.cancel()
