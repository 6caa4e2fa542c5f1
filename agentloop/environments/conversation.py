"""A conversation that an environment has with the model, message by message; who stops it."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager

import anyio
import anyio.abc

from agentloop.aio import task_group
from agentloop.errors import leaves
from agentloop.trajectory import Trajectory

__all__ = ["Conversation", "ReplyClock", "Stops", "UserReply"]

UserReply = Callable[[str], "str | None | Awaitable[str | None]"]
"""A function, async or not, of the model's answer that returns the user's next message, or None."""


class Conversation:
    """A conversation with the model. Made by `Agent.conversation`.

    Attributes:
        has_ended: whether the model can say nothing more, because a budget is used up.
        trajectory: the record; None until the conversation has ended or was left.
    """

    def __init__(self, run: Callable[..., Awaitable[Trajectory]], options: Mapping[str, object]):
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
        cls, run: Callable[..., Awaitable[Trajectory]], options: Mapping[str, object]
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


class ReplyClock:
    """Calls an environment's `reply` and measures how long that takes."""

    def __init__(self, reply: UserReply) -> None:
        self._reply = reply
        self.elapsed_s = 0.0

    async def __call__(self, answer: str) -> str | None:
        begun_s = anyio.current_time()
        try:
            next_message = self._reply(answer)
            text = await next_message if inspect.isawaitable(next_message) else next_message
        finally:
            self.elapsed_s += anyio.current_time() - begun_s
        if not isinstance(text, str | None):
            raise TypeError(f"reply: expected a string or None, got {text!r}")
        return text


class Stops:
    """The errors that have gone through the conversations of a rollout, in this order.

    They say which conversations a later error of the environment has cut off.
    """

    def __init__(self) -> None:
        self._errors: list[tuple[BaseException, Trajectory | None]] = []

    def add(self, error: BaseException, cut: Trajectory | None = None) -> None:
        """Record an error and the conversation that it has stopped, if it has."""
        self._errors.append((error, cut))

    def of(self, cause: BaseException) -> list[Trajectory]:
        """Return the conversations that an error, or what followed from it, has stopped.

        It has gone through the first of them, or through the block of `Agent.conversation`.
        """
        causes = _causes_of(cause)
        for index, (error, _) in enumerate(self._errors):
            if any(id(leaf) in causes for leaf in leaves(error)):
                return [cut for _, cut in self._errors[index:] if cut is not None]
        return []


def _causes_of(error: BaseException) -> set[int]:
    """Return the identities of an error, of those inside it, and of those that it was raised for.

    A cancellation is none of them: who cancels a conversation has stopped it before.
    """
    causes: set[int] = set()
    pending = [error]
    while pending:
        cause = pending.pop()
        if id(cause) in causes or isinstance(cause, asyncio.CancelledError):
            continue
        causes.add(id(cause))
        pending += leaves(cause)
        pending += [each for each in (cause.__cause__, cause.__context__) if each is not None]
    return causes
