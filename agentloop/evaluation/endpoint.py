"""Sample any endpoint with OpenAI's chat completions API, for comparison.

The endpoint gets the same prompts, sampling settings and token budget as our own agent loop, but no
tools; it may run its own. One request is one sample. A sample without an answer has no reward.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio

from agentloop.agent.channels import answer_in
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError, ServerRefused, ServerUnavailable, culprit
from agentloop.evaluation.loop import EvaluatedSample
from agentloop.events import Emit, RolloutAbandoned, RolloutFinished, RolloutStarted, ignore
from agentloop.inference.openai_client import (
    EndpointSettings,
    OpenAIClient,
    sampling_fields,
    seed_of,
)
from agentloop.inference.sglang.sampling import Sampling
from agentloop.trajectory import Message, StopReason, Trajectory, Turn, TurnEnd

__all__ = ["EndpointSampler"]


class EndpointSampler:
    """Samples an endpoint; implements `Sampler`. Create it with `EndpointSampler.open`."""

    def __init__(
        self,
        client: OpenAIClient,
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
    ) -> AsyncIterator[EndpointSampler]:
        """Connect to an endpoint.

        Args:
            emit: Receives events when a sample starts and ends.

        Raises:
            SettingsError: The endpoint refuses access, or the model must be named.
            ServerUnavailable: The endpoint cannot be reached.
        """
        client = OpenAIClient(settings)
        try:
            sampler = cls(client, settings, sampling, max_response_tokens, emit)
            sampler.model = settings.model or await client.only_model()
            yield sampler
        finally:
            await client.aclose()

    async def wait_for_capacity(self, size: int) -> None:
        async with self._client.slots:  # no deadline: requests have one, earlier ones go first
            return

    async def group(
        self, task: Task, *, name: str, size: int, on_queued: Callable[[], None]
    ) -> Sequence[EvaluatedSample]:
        """Return samples as `Sampler.group` does.

        Raises:
            SettingsError: The endpoint refuses all requests.
            RequestError: The endpoint rejects the task.
        """
        samples: dict[int, EvaluatedSample] = {}
        messages: Sequence[Message] = (
            [{"role": "user", "content": task.prompt}]
            if isinstance(task.prompt, str)
            else task.prompt
        )
        sampling = self._sampling.of_group(name)

        async def ask(index: int) -> None:
            samples[index] = await self._sample(name, index, messages, sampling.of_sibling(index))

        on_queued()
        try:
            async with anyio.create_task_group() as tasks:
                for index in range(size):
                    tasks.start_soon(ask, index)
        except ExceptionGroup as errors:
            # Usually all fail alike. A failure that ends the run goes before a refused task.
            raise culprit(errors, RequestError) from None
        return [samples[index] for index in range(size)]

    async def _sample(
        self, group: str, index: int, messages: Sequence[Message], sampling: Sampling
    ) -> EvaluatedSample:
        body = self._body(messages, sampling)
        async with self._client.slots:  # no deadline: each request has one
            trajectory = Trajectory(f"{group}.{index}", [], created_unix_s=time.time())
            self._emit(RolloutStarted(trajectory, group))
            try:
                num_tokens = await self._record(trajectory, body)
            except BaseException:
                self._emit(RolloutAbandoned(trajectory.id))
                raise
            self._emit(RolloutFinished(trajectory.id, trajectory, num_tokens))
        return EvaluatedSample([trajectory], num_tokens)

    async def _record(self, trajectory: Trajectory, body: Mapping[str, Any]) -> int | None:
        """Send a request, store the answer in `trajectory` and return its token count, if known."""
        started_s = time.monotonic()
        try:
            found = await self._client.complete(body, id=trajectory.id)
        except (ServerRefused, ServerUnavailable) as error:
            trajectory.error = str(error)
            return None
        finally:
            trajectory.elapsed_s = time.monotonic() - started_s
        trajectory.stop_reason = found.stop_reason
        if found.stop_reason.is_unscorable:
            trajectory.error = "the endpoint reports a failure of its own infrastructure"
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

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
        body = {
            "model": self.model,
            "messages": list(messages),
            **sampling_fields(sampling, self._settings, self._max_tokens),
        }
        if (seed := seed_of(sampling)) is not None:
            body["seed"] = seed
        return body
