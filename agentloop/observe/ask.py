"""Questions of visitors: each is a rollout, which goes on when they have left."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc

from agentloop.errors import AgentLoopError, RequestError, sole
from agentloop.events import Emit, Event, RolloutStarted

__all__ = ["Ask", "asking"]

_MAX_OPEN = 64
_START_S = 30.0

Ask = Callable[[str], Awaitable[str]]
"""Starts a rollout of a question and returns its id. Raises AgentLoopError: it does not begin."""


@asynccontextmanager
async def asking(rollout: Callable[[str, Emit], Awaitable[Any]], emit: Emit) -> AsyncIterator[Ask]:
    """`rollout` runs one, and tells of it by the emitter that it is given; leaving cancels all."""
    is_open: set[object] = set()

    async def run(
        question: str,
        one: object,
        *,
        task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        has_begun = False

        def tell(event: Event) -> None:
            nonlocal has_begun
            emit(event)
            if isinstance(event, RolloutStarted) and not has_begun:
                has_begun = True
                task_status.started(event.rollout_id)

        try:
            await rollout(question, tell)
        except AgentLoopError:
            if not has_begun:
                raise  # whoever asked is told; later it stands in the trajectory
        finally:
            is_open.discard(one)

    async def ask(question: str) -> str:
        if len(is_open) >= _MAX_OPEN:
            raise RequestError(f"{_MAX_OPEN} questions are being answered: wait for one of them")
        one = object()
        is_open.add(one)
        try:
            with anyio.fail_after(_START_S):
                key: str = await tasks.start(run, question, one)
        except BaseException as error:
            is_open.discard(one)  # it may have been cancelled before its first step
            if isinstance(error, TimeoutError):
                raise RequestError(f"it did not begin within {_START_S:g} s") from None
            raise
        return key

    try:
        async with anyio.create_task_group() as tasks:
            yield ask
            tasks.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        raise sole(group) from None
