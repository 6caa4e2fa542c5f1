"""A turn on its way over one server, or several: what has been sampled, and what is left to do.

Generation ──> OngoingTurn ─remaining─> TurnStream on a server ──chunks──> the reader
                    ▲                     │
                    └───────ids───────────┘
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from agentloop.errors import ServerUnavailable
from agentloop.inference.ranks import DataParallelRank
from agentloop.inference.replicas import Replica
from agentloop.inference.scheduling.group_gate import GroupGate
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.sglang.frames import Chunk, OnChunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.trajectory import TurnEnd, VersionSpan

_STATELESS = {"logit_bias"}  # parameters that do not depend on what was sampled before


@dataclass(frozen=True, slots=True)
class Generation:
    """A turn to be generated.

    `rid` is its unique name, `key` the name of its trajectory. Siblings have the same `group` and
    share the first `num_shared` ids of the prompt.

    Attributes:
        parameters: Further sampling parameters, as SGLang takes them: a grammar, penalties, biases.
        prompt_logprobs: Whether to report the log-probabilities of the prompt's ids, with the first
            chunk. SGLang repeats them in each frame, so ask for few new tokens.
        stream_interval: Number of tokens after which the server sends a frame. The first token and
            the turn's end are sent at once. Fewer frames cost server and reader less.
        experts_from: Number of the first ids of which the experts are not wanted, if `sampling`
            records experts.
    """

    rid: str
    key: str
    ids: list[int]
    sampling: Sampling
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    group: str = ""
    num_shared: int = 0
    num_top_logprobs: int = 0
    parameters: Mapping[str, object] = field(default_factory=dict)
    prompt_logprobs: bool = False
    stream_interval: int = 1
    experts_from: int = 0

    @property
    def is_movable(self) -> bool:
        """True if another server can go on with the turn.

        A server counts what it has sampled itself: it would begin a grammar anew, and forget the
        tokens that penalties depend on.
        """
        return self.parameters.keys() <= _STATELESS


@dataclass(slots=True)
class OngoingTurn:
    """A turn and the ids that its servers have sampled so far."""

    generation: Generation
    on_chunk: OnChunk
    received: list[int] = field(default_factory=list)

    def remaining(self) -> Generation:
        """Return the part that is still to be generated."""
        return replace(
            self.generation,
            # Never reused, nor a prefix of another: SGLang aborts by prefix, and once more after a
            # stream has ended.
            rid=uuid.uuid4().hex,
            ids=self.generation.ids + self.received,
            max_new_tokens=self.generation.max_new_tokens - len(self.received),
            prompt_logprobs=self.generation.prompt_logprobs and not self.received,
        )

    def missing_end(self) -> Chunk | None:
        """Return the last chunk if a stream broke just before the frame that ends the turn."""
        if not self.received:
            return None
        if self.received[-1] in self.generation.stop_ids:
            return Chunk([], [], "", end=TurnEnd.STOP)
        if len(self.received) >= self.generation.max_new_tokens:
            return Chunk([], [], "", end=TurnEnd.LENGTH)
        return None


class TurnStream:
    """The stream of a turn's rest from one server, with the accounting of its tokens."""

    def __init__(
        self,
        turn: OngoingTurn,
        remaining: Generation,
        replica: Replica,
        rank: DataParallelRank,
        ledger: KVLedger,
        gate: GroupGate,
    ) -> None:
        self.aborted: Chunk | None = None  # the last chunk, if the server itself aborted
        self._turn = turn
        self._remaining = remaining
        self._replica = replica
        self._rank = rank
        self._ledger = ledger
        self._gate = gate
        self._start = len(turn.received)
        # Tokens of the trajectory besides its group's prompt, before this turn.
        self._num_before = len(turn.generation.ids) - turn.generation.num_shared

    async def run(self) -> None:
        """Generate the rest.

        Raises:
            ServerUnavailable, ServerRefused: The turn has not ended.
        """
        remaining, replica = self._remaining, self._replica
        # A server added after the turn began may have a smaller context.
        num_new = min(remaining.max_new_tokens, replica.context_length - len(remaining.ids))
        params = remaining.sampling.to_sglang(max_new_tokens=num_new, stop_ids=remaining.stop_ids)
        if remaining.stream_interval > 1:
            params["stream_interval"] = remaining.stream_interval
        await replica.server.generate(
            remaining.ids,
            {**params, **remaining.parameters},
            rid=remaining.rid,
            on_chunk=self._take,
            rank=self._rank.number if replica.info.dp_size > 1 else None,
            num_top_logprobs=remaining.num_top_logprobs,
            prompt_logprobs=remaining.prompt_logprobs,
            kept_ids=remaining.sampling.records_kept_ids,
            experts_from=remaining.experts_from if remaining.sampling.records_experts else None,
        )
        if self.aborted is not None:
            raise ServerUnavailable(f"{replica.url} aborted: {self.aborted.error}")

    def _take(self, chunk: Chunk) -> None:
        turn = self._turn
        self._ledger.grow(self._remaining.rid, len(chunk.ids))
        turn.received.extend(chunk.ids)
        generation = turn.generation
        num_tokens = self._num_before + len(turn.received)
        self._gate.record_length(generation.key, num_tokens, generation.num_shared)
        if chunk.num_retractions:
            self._replica.num_retracted[self._rank] += chunk.num_retractions
        if chunk.end is None:
            turn.on_chunk(chunk)
        elif chunk.end is not TurnEnd.ABORT:
            turn.on_chunk(_shift_versions(chunk, self._start))
        else:  # the server's own abort: its tokens are valid, and the turn goes on
            self.aborted = chunk
            turn.on_chunk(replace(chunk, end=None, versions=()))


def _shift_versions(chunk: Chunk, offset: int) -> Chunk:
    """Return the chunk with `versions` counted from the turn's first token."""
    if not offset:
        return chunk
    spans = tuple(
        VersionSpan(span.version, span.start + offset, span.end + offset) for span in chunk.versions
    )
    return replace(chunk, versions=spans)
