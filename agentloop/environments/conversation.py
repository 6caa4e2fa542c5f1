"""A conversation that an environment has with the model, message by message."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.abc

from agentloop.aio import task_group
from agentloop.trajectory import Trajectory

__all__ = ["Conversation"]


class Conversation:
    """A conversation with the model. Made by `Agent.conversation`.

    Attributes:
        has_ended: whether the model can say nothing more, because a budget is used up.
        trajectory: the record; None until the conversation has ended or was left.
    """

    def __init__(self, run: Callable[..., Awaitable[Trajectory]], options: Mapping[str, Any]):
        """
        Args:
            run: `Agent.run`.
        """
        self.has_ended = False
        self.trajectory: Trajectory | None = None
        self._run = run
        self._options = options
        self._error: BaseException | None = None
        self._has_begun = False
        self._tasks: anyio.abc.TaskGroup
        self._scope = anyio.CancelScope()
        self._send_question, self._questions = anyio.create_memory_object_stream[str](1)
        self._send_answer, self._answers = anyio.create_memory_object_stream[str](1)

    @classmethod
    @asynccontextmanager
    async def open(
        cls, run: Callable[..., Awaitable[Trajectory]], options: Mapping[str, Any]
    ) -> AsyncIterator[Conversation]:
        """Open a conversation; leaving the context ends it."""
        self = cls(run, options)
        with self._send_question, self._questions, self._send_answer, self._answers:
            async with task_group() as tasks:
                self._tasks = tasks
                yield self
                self._send_question.close()  # no further question: the model's last answer stands
        if self._error is not None:  # since the last question
            raise self._error

    async def ask(self, text: str) -> str:
        """Say something and return the model's answer.

        It is empty if the conversation has ended before the model was done (`has_ended`).

        Raises:
            InfrastructureFailed: the infrastructure failed.
            RequestError: a message is invalid.
            RuntimeError: the conversation has ended.
        """
        if self.has_ended and self._error is None:
            raise RuntimeError(f"the conversation has ended ({self._end}): check has_ended")
        answer = "" if self.has_ended else await self._next_answer(text)
        error, self._error = self._error, None
        if error is not None:
            raise error
        return answer

    @property
    def _end(self) -> str:
        return str(self.trajectory.stop_reason) if self.trajectory is not None else "it failed"

    async def _next_answer(self, text: str) -> str:
        if self._has_begun:
            self._send_question.send_nowait(text)
        else:
            self._has_begun = True
            self._tasks.start_soon(self._converse, text)
        try:
            return await self._answers.receive()  # no deadline: `run` has one
        except BaseException:  # cancelled: the next answer would be taken for that to a later one
            self._scope.cancel()
            self.has_ended = True
            raise

    async def _converse(self, first: str) -> None:
        with self._scope:
            try:
                self.trajectory = await self._run(first, reply=self._reply, **self._options)
            except Exception as error:
                self._error = error
        self.has_ended = True
        if not self._answers.statistics().current_buffer_used:
            self._send_answer.send_nowait("")  # to a question that is waiting, if there is one

    async def _reply(self, answer: str) -> str | None:
        self._send_answer.send_nowait(answer)
        try:
            return await self._questions.receive()  # no deadline: `run` has one
        except anyio.EndOfStream:
            return None
