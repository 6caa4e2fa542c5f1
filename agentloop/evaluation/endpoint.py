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


@dataclass(frozen=True, slots=True)
class EndpointSampler:
    """Samples an endpoint (`Player`). Create it with `EndpointSampler.open`.

    Attributes:
        settings: the endpoint's, with the name of its model.
    """

    client: OpenAIClient
    settings: EndpointSettings
    sampling: Sampling
    emit: Emit

    @classmethod
    @asynccontextmanager
    async def open(
        cls, settings: EndpointSettings, sampling: Sampling, *, emit: Emit = ignore
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
            model = settings.model or await client.only_model()
            yield cls(client, settings.model_copy(update={"model": model}), sampling, emit)
        finally:
            await client.aclose()

    @asynccontextmanager
    async def group(self, request: GroupRequest) -> AsyncIterator[list[_Sample]]:
        """Implement `Player`.

        The samples raise SettingsError if the endpoint refuses all requests, and RequestError if it
        refuses the task.
        """
        name = request.name
        sampling = self.sampling.of_group(name)
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

    def _body(
        self, messages: Sequence[Message], sampling: Sampling, budget: Budget
    ) -> dict[str, object]:
        body = {
            "model": self.settings.model,
            "messages": list(messages),
            **sampling_fields(sampling, self.settings, budget.max_response_tokens),
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
        trajectory, emit = self.trajectory, self.sampler.emit
        record = self.cut_off()
        async with self.sampler.client.slots:  # no deadline: each request has one
            trajectory.created_unix_s = time.time()
            emit(RolloutStarted(trajectory, self.group))
            try:
                record.num_tokens = await self._ask()
            except BaseException:
                emit(RolloutAbandoned(trajectory.id))
                raise
            emit(RolloutFinished(trajectory.id, trajectory, record.num_tokens))
        if trajectory.stop_reason.is_unscorable:
            record.no_reward = NoReward.INFRASTRUCTURE
        return record

    async def _ask(self) -> int | None:
        """Send the request, store the answer in the trajectory, and return its token count."""
        trajectory, started_s = self.trajectory, time.monotonic()
        try:
            completion = await self.sampler.client.complete(self.body, id=trajectory.id)
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
            servers=[self.sampler.settings.url],
            generated_s=trajectory.elapsed_s,
            ended_s=trajectory.elapsed_s,
        )
        trajectory.turns.append(turn)
        trajectory.answer = answer_in(completion.text, reasoning=False)
        return completion.num_tokens

    def cut_off(self) -> RolloutRecord:
        return RolloutRecord(self.trajectory.id, [self.trajectory], to_grade=self.trajectory)
