"""Answer visitors' questions with rollouts that continue after the visitor leaves."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from agentloop.aio import task_group
from agentloop.errors import AgentLoopError, RequestError
from agentloop.events import Emit, Event, RolloutStarted

_MAX_OPEN = 64
_START_S = 30.0

Ask = Callable[[str], Awaitable[str]]
"""Starts a rollout of a question and returns its id; raises AgentLoopError if it cannot start."""


@asynccontextmanager
async def asking(
    rollout: Callable[[str, Emit], Awaitable[object]], emit: Emit
) -> AsyncIterator[Ask]:
    """Yield a function that starts a rollout of a question.

    Leaving the context cancels all rollouts.

    Args:
        rollout: Runs a rollout of a question and passes its events to the given emitter.
        emit: Receives the events of all rollouts.
    """
    is_open: set[object] = set()

    async def run(
        question: str,
        question_key: object,
        *,
        task_status: anyio.abc.TaskStatus[str] = anyio.TASK_STATUS_IGNORED,
    ) -> None:
        has_started = False

        def forward(event: Event) -> None:
            nonlocal has_started
            emit(event)
            if isinstance(event, RolloutStarted) and not has_started:
                has_started = True
                task_status.started(event.rollout_id)

        try:
            await rollout(question, forward)
        except AgentLoopError:
            if not has_started:
                raise  # report it to the visitor; later errors are in the trajectory
        finally:
            is_open.discard(question_key)

    async def ask(question: str) -> str:
        if len(is_open) >= _MAX_OPEN:
            raise RequestError(f"{_MAX_OPEN} questions are being answered: try again later")
        question_key = object()
        is_open.add(question_key)
        try:
            with anyio.fail_after(_START_S):
                key: str = await tasks.start(run, question, question_key)
        except BaseException as error:
            is_open.discard(question_key)  # the task may have been cancelled before it ran
            if isinstance(error, TimeoutError):
                raise RequestError(f"the rollout did not start within {_START_S:g} s") from None
            raise
        return key

    async with task_group() as tasks:
        yield ask
        tasks.cancel_scope.cancel()
