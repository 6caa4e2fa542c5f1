"""Sample any endpoint with OpenAI's chat completions API, for comparison.

The endpoint gets the same prompts, sampling settings and token budget as our own agent loop, but no
tools; it may run its own. One request is one sample. A sample without an answer has no reward.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from agentloop.agent.channels import answer_in
from agentloop.agent.rollout import Budget
from agentloop.environments.agent import conversation_of
from agentloop.errors import ServerRefused, ServerUnavailable
from agentloop.events import Emit, RolloutAbandoned, RolloutFinished, RolloutStarted, ignore
from agentloop.inference.openai_client import (
    EndpointSettings,
    OpenAIClient,
    sampling_fields,
    seed_of,
    turn_end_of,
)
from agentloop.inference.sglang.sampling import Sampling
from agentloop.rollouts.record import NoReward, RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.trajectory import Message, Trajectory, Turn


class EndpointSampler:
    """Samples an endpoint (`Player`). Create it with `EndpointSampler.open`."""

    def __init__(
        self,
        client: OpenAIClient,
        settings: EndpointSettings,
        sampling: Sampling,
        emit: Emit,
    ) -> None:
        self._client = client
        self._emit = emit
        self._settings = settings
        self._sampling = sampling
        self.model = settings.model

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: EndpointSettings,
        sampling: Sampling,
        *,
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
            sampler = cls(client, settings, sampling, emit)
            sampler.model = settings.model or await client.only_model()
            yield sampler
        finally:
            await client.aclose()

    @asynccontextmanager
    async def group(self, request: GroupRequest) -> AsyncIterator[list[_Sample]]:
        """Implement `Player`.

        The samples raise SettingsError if the endpoint refuses all requests, and RequestError if it
        refuses the task.
        """
        name = request.name
        sampling = self._sampling.of_group(name)
        messages = conversation_of(request.task.prompt)
        request.queued.set()
        yield [
            _Sample(
                self,
                Trajectory(f"{name}.{index}", []),
                name,
                self._body(messages, sampling.of_sibling(index), request.budget),
            )
            for index in range(request.size)
        ]

    async def sample(
        self, trajectory: Trajectory, group: str, body: Mapping[str, object]
    ) -> int | None:
        """Send a request, record the answer and return its number of tokens, if known."""
        async with self._client.slots:  # no deadline: each request has one
            trajectory.created_unix_s = time.time()
            self._emit(RolloutStarted(trajectory, group))
            try:
                num_tokens = await self._record(trajectory, body)
            except BaseException:
                self._emit(RolloutAbandoned(trajectory.id))
                raise
            self._emit(RolloutFinished(trajectory.id, trajectory, num_tokens))
        return num_tokens

    async def _record(self, trajectory: Trajectory, body: Mapping[str, object]) -> int | None:
        """Send a request, store the answer in `trajectory` and return its token count, if known."""
        started_s = time.monotonic()
        try:
            completion = await self._client.complete(body, id=trajectory.id)
        except (ServerRefused, ServerUnavailable) as error:
            trajectory.error = str(error)
            return None
        finally:
            trajectory.elapsed_s = time.monotonic() - started_s
        trajectory.stop_reason = completion.stop_reason
        trajectory.error = completion.failure or None
        turn = Turn(
            text=completion.text,
            end=turn_end_of(completion.stop_reason),
            servers=[self._settings.url],
            generated_s=trajectory.elapsed_s,
            ended_s=trajectory.elapsed_s,
        )
        trajectory.turns.append(turn)
        trajectory.answer = answer_in(completion.text, reasoning=False)
        return completion.num_tokens

    def _body(
        self, messages: Sequence[Message], sampling: Sampling, budget: Budget
    ) -> dict[str, object]:
        body = {
            "model": self.model,
            "messages": list(messages),
            **sampling_fields(sampling, self._settings, budget.max_response_tokens),
        }
        if (seed := seed_of(sampling)) is not None:
            body["seed"] = seed
        return body


@dataclass(frozen=True, slots=True)
class _Sample:
    """A request to the endpoint (`Sibling`)."""

    sampler: EndpointSampler
    trajectory: Trajectory
    group: str
    body: Mapping[str, object]

    async def play(self) -> RolloutRecord:
        num_tokens = await self.sampler.sample(self.trajectory, self.group, self.body)
        record = self.cut_off()
        record.num_tokens = num_tokens
        if self.trajectory.stop_reason.is_unscorable:
            record.no_reward = NoReward.INFRASTRUCTURE
        return record

    def cut_off(self) -> RolloutRecord:
        return RolloutRecord(self.trajectory.id, [self.trajectory], to_grade=self.trajectory)
