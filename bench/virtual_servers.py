"""Servers of the discrete-event model on asyncio's clock, and rollouts on them.

    group ──gate──> rollouts ──turn──> a server's model ──> tools, asleep ──> the next turn
                                              ▲ new weights: all turns restart from their ids

Provides the part of `Router` and `SGLangServer` that the training loop needs, and a `Player`, with
the runtime's own admission of groups; for bench/async_train.py, in virtual time. There is no queue
in front: a turn goes to its server at once and waits there. It stays with its cache unless another
server has far fewer sequences.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from agentloop.environments.rewards.reward import Reward
from agentloop.inference.replicas import ServerView
from agentloop.inference.scheduling.admission import Admission, AdmissionLimits, Forecast
from agentloop.inference.scheduling.group_gate import GroupGate
from agentloop.inference.scheduling.health import ServerState
from agentloop.inference.sglang.weight_updates import Checksum
from agentloop.rollouts.record import RolloutRecord
from agentloop.rollouts.request import GroupRequest
from agentloop.trajectory import StopReason, Trajectory, Turn, TurnEnd, VersionSpan
from bench.router import RolloutSpec
from bench.server_model import Job, ServerModel, ServerParams

__all__ = ["TOKENS_PER_ID", "Server", "Servers"]

TOKENS_PER_ID = 100
"""Tokens that one id stands for, which keeps files small."""

_TICK_S = 5.0  # time between two updates of the gate on the rollouts' progress
_FAR_FEWER = 8  # difference in sequences for which a turn leaves its cache
_TARGET = 0.8  # of the KV capacity: without a queue nothing else protects parked tokens


@dataclass(slots=True)
class _Turn:
    """A job that may continue after a weight sync."""

    job: Job
    spans: list[VersionSpan] = field(default_factory=list)
    ended: anyio.Event = field(default_factory=anyio.Event)

    def add_tokens(self, version: str, num_tokens: int) -> None:
        if num_tokens:
            start = self.spans[-1].end if self.spans else 0
            self.spans.append(VersionSpan(version, start, start + num_tokens))


class Server:
    """A model of a server on the loop's clock, with the part of `SGLangServer` that loads
    weights."""

    def __init__(self, url: str, params: ServerParams, load_s: float) -> None:
        self.url = url
        self.capacity = params.capacity
        self.version = ""
        self.is_loading = False
        self.num_rollouts = 0  # in flight, including those in a tool
        self._params = params
        self._load_s = load_s
        self._model = ServerModel(params)
        self._turns: dict[str, _Turn] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._busy_s = self._settled_s = 0.0
        self._num_sampled = 0  # of turns that ended or were interrupted by loading
        self._num_retracted = 0  # before the last loading

    @property
    def busy_s(self) -> float:
        """Return the time during which it had something to compute."""
        self._settle()
        return self._busy_s

    @property
    def num_sampled(self) -> int:
        return self._num_sampled + sum(map(self.num_emitted, self._turns))

    @property
    def num_retracted(self) -> int:
        return self._num_retracted + self._model.num_retracted

    async def generate(self, job: Job) -> list[VersionSpan]:
        """Run a job; return the versions that sampled it."""
        turn = self._turns[job.name] = _Turn(job)
        if not self.is_loading:
            self._submit(turn)
        try:
            await turn.ended.wait()
        except BaseException:
            self._drop(turn)
            raise
        return turn.spans

    def _drop(self, turn: _Turn) -> None:
        """Cancel a turn."""
        name = turn.job.name
        if self._turns.get(name) is turn:
            self._settle()
            self._num_sampled += self.num_emitted(name)
            del self._turns[name]
            self._model.cancel(turn.job, _current_s())
            self._schedule()

    async def update_weights(self, folder: str, version: str, *, timeout_s: float) -> Checksum:
        """Load weights like `SGLangServer`: running turns restart from their ids, with an empty
        cache."""
        self._settle()
        self.is_loading = True
        for name, turn in self._turns.items():
            num_done = self.num_emitted(name)
            self._num_sampled += num_done
            turn.add_tokens(self.version, num_done)
            job = turn.job
            turn.job = Job(
                job.name,
                job.key,
                job.group,
                job.num_prompt + num_done,
                job.num_shared,
                job.num_output - num_done,
                job.max_new - num_done,
            )
        self._num_retracted = self.num_retracted
        self._model = ServerModel(self._params)
        self._schedule()
        await anyio.sleep(self._load_s)
        self.version, self.is_loading = version, False
        for turn in self._turns.values():
            self._submit(turn)
        return Checksum("the same for all", [])

    def num_emitted(self, name: str) -> int:
        """Return the tokens of a running turn since the last loading; the last token ends it."""
        job = self._turns[name].job
        if name not in self._model.running:  # queued, perhaps again
            return job.num_emitted
        return min(self._model.num_emitted(job, _current_s()), job.num_output - 1)

    def in_flight(self) -> list[tuple[str, int]]:
        """Return the rollouts with a running turn, and their tokens besides their prompts."""
        return [
            (turn.job.key, turn.job.num_prompt - turn.job.num_shared + self.num_emitted(name))
            for name, turn in self._turns.items()
        ]

    def _submit(self, turn: _Turn) -> None:
        self._settle()
        self._model.submit(turn.job, _current_s())
        self._schedule()

    def _advance(self) -> None:
        self._settle()
        self._timer = None
        for job in self._model.advance():
            if job.name not in self._turns:  # cancelled
                continue
            turn = self._turns.pop(job.name)
            self._num_sampled += job.num_output
            turn.add_tokens(self.version, job.num_output)
            turn.ended.set()
        self._schedule()

    def _schedule(self) -> None:
        when = self._model.next_s
        if self._timer is not None:
            if self._timer.when() == when:
                return
            self._timer.cancel()
            self._timer = None
        if when < math.inf:
            self._timer = asyncio.get_running_loop().call_at(when, self._advance)

    def _settle(self) -> None:
        now_s = _current_s()
        if self._model.next_s < math.inf:
            self._busy_s += now_s - self._settled_s
        self._settled_s = now_s


class Servers:
    """The part of router and runtime that the loop uses, with the runtime's own gate."""

    def __init__(
        self,
        servers: Sequence[Server],
        specs: Callable[[int], Sequence[RolloutSpec]],
        *,
        longest: int,
    ) -> None:
        """`specs` returns the rollouts of a group by its number.

        None of them has more than `longest` tokens besides its prompt.
        """
        self.servers = servers
        self.num_ended = 0  # rollouts
        self._specs = specs
        self._longest = longest
        self._live = set[str]()
        self.gate = GroupGate(
            Admission(AdmissionLimits(target=_TARGET), Forecast(longest=longest)),
            capacity=lambda: sum(server.capacity for server in servers if server.url in self._live),
            clock=_current_s,
        )

    # --- as the router ----------------------------------------------------------------------------

    @property
    def replicas(self) -> Servers:
        return self

    def require_weights(self, version: str, *, verified: bool) -> None:
        self._live.clear()

    def weights_loaded(self, url: str, version: str) -> None:
        self._live.add(url)
        self.gate.admit()

    def view(self) -> list[ServerView]:
        live, stale = ServerState.HEALTHY, ServerState.STALE
        return [
            ServerView(
                server.url, live if server.url in self._live else stale, 0, 0, 0, 0, 0, 0, ""
            )
            for server in self.servers
        ]

    # --- as the player ----------------------------------------------------------------------------

    @asynccontextmanager
    async def group(self, request: GroupRequest) -> AsyncIterator[list[_Rollout]]:
        """Implement `Player`."""
        name, size = request.name, request.size
        specs = self._specs(int(name.partition("-")[0]))[:size]
        request.queued.set()
        async with self.gate.group(name, size, specs[0].num_prompt) as group:
            yield [
                _Rollout(self, key, name, spec) for key, spec in zip(group.keys, specs, strict=True)
            ]

    async def keep_told(self) -> None:
        """Update the gate on the rollouts' progress; the runtime does so with each token."""
        num_retracted = 0
        while True:
            await anyio.sleep(_TICK_S)
            for server in self.servers:
                for key, num_tokens in server.in_flight():
                    self.gate.record_length(key, num_tokens)
            before, num_retracted = (
                num_retracted,
                sum(server.num_retracted for server in self.servers),
            )
            self.gate.observe(_current_s(), num_retracted - before, _current_s())

    async def play(self, key: str, group: str, spec: RolloutSpec) -> Trajectory:
        """Run a rollout to its end."""
        at: list[Server] = []  # its current server
        try:
            trajectory = await self._turns(key, group, spec, at)
        finally:
            for server in at:
                server.num_rollouts -= 1
        self.num_ended += 1
        self.gate.end_conversation(key, is_complete=True)
        return trajectory

    async def _turns(self, key: str, group: str, spec: RolloutSpec, at: list[Server]) -> Trajectory:
        num_own, remaining = 0, self._longest
        record = Trajectory(key, [0] * _num_ids(spec.num_prompt), stop_reason=StopReason.ANSWERED)
        for number, turn in enumerate(spec.turns):
            job = Job(
                f"{key}.{number}",
                key,
                group,
                spec.num_prompt + num_own,
                spec.num_prompt,
                turn.num_output,
                max(remaining, turn.num_output),
            )
            spans = await self._place(at).generate(job)
            num_own += turn.num_output + turn.num_tool
            remaining -= turn.num_output + turn.num_tool
            self.gate.record_length(key, num_own)
            is_last = turn is spec.turns[-1]
            record.turns.append(_as_turn(spans, 0 if is_last else turn.num_tool))
            if not is_last:
                await anyio.sleep(turn.tool_s)
        return record

    def _place(self, at: list[Server]) -> Server:
        least = min(self.servers, key=lambda server: server.num_rollouts)
        if at and at[0].num_rollouts - least.num_rollouts < _FAR_FEWER:
            return at[0]
        for earlier in at:
            earlier.num_rollouts -= 1
        least.num_rollouts += 1
        at[:] = [least]
        return least


@dataclass(frozen=True, slots=True)
class _Rollout:
    """A rollout on the servers (`Sibling`)."""

    servers: Servers
    key: str
    group: str
    spec: RolloutSpec

    async def play(self) -> RolloutRecord:
        trajectory = await self.servers.play(self.key, self.group, self.spec)
        return RolloutRecord(self.key, [trajectory], to_grade=trajectory)

    def cut_off(self) -> RolloutRecord:
        trajectory = Trajectory(self.key, [0], stop_reason=StopReason.STRAGGLER)
        return RolloutRecord(self.key, [trajectory], Reward(None, None, "stopped"))


def _as_turn(spans: Sequence[VersionSpan], num_tool: int) -> Turn:
    """Return a turn whose ids are the versions that sampled them."""
    ids: list[int] = []
    short = []
    for span in spans:
        end = max(len(ids) + 1, round(span.end / TOKENS_PER_ID))
        short.append(VersionSpan(span.version, len(ids), end))
        ids += [int(span.version)] * (end - len(ids))
    observation_ids = [0] * _num_ids(num_tool) if num_tool else []
    return Turn(ids, [-1.0] * len(ids), short, TurnEnd.STOP, observation_ids=observation_ids)


def _num_ids(num_tokens: int) -> int:
    return max(1, round(num_tokens / TOKENS_PER_ID))


def _current_s() -> float:
    return asyncio.get_running_loop().time()
