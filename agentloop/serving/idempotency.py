"""Requests that a client repeats with the same `Idempotency-Key`: sampled once, answered alike.

    a request with a key ──attempt──> the first one samples, and what it finds is remembered
                                      the same again waits for the first one and gets its answer
                                      another request with that key is refused

An attempt that fails, or whose client leaves before it has finished, is forgotten: the next one
samples anew. One that has finished is remembered, whether or not its client got the answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b

import anyio
from aiohttp import web

from agentloop.errors import RequestError
from agentloop.events import Emit, events_of
from agentloop.serving.protocols.chat.chat_completions import ChunkWriter
from agentloop.serving.protocols.chat.choices import RunChoice
from agentloop.serving.schemas import Frame
from agentloop.trajectory import Trajectory

_HEADER = "Idempotency-Key"
_MAX_KEY_CHARS = 255


@dataclass(frozen=True, slots=True)
class _SampledAnswer:
    """The choices that an attempt has sampled: enough to write the same answer again.

    Attributes:
        frame: the id, time and model of the answer.
    """

    frame: Frame
    choices: Sequence[Trajectory]

    @property
    def num_ids(self) -> int:
        """Number of ids that it holds in memory, those of likely tokens included."""
        return sum(
            len(choice.prompt_ids)
            + choice.num_response_tokens
            + sum(len(likely) for turn in choice.turns for likely in turn.top_logprobs or ())
            for choice in self.choices
        )


class AnswerAttempt:
    """An attempt to answer a request.

    Attributes:
        is_remembered: whether a retry gets what this attempt found.
    """

    def __init__(
        self,
        earlier: _SampledAnswer | None = None,
        remember: Callable[[_SampledAnswer], None] | None = None,
    ) -> None:
        self._earlier = earlier
        self._remember = remember
        self.is_remembered = earlier is not None

    @property
    def frame(self) -> Frame | None:
        """The frame of an earlier attempt's answer, if it has finished."""
        return self._earlier.frame if self._earlier is not None else None

    def runs(self, writers: Sequence[ChunkWriter], run: RunChoice) -> RunChoice:
        """Return what runs a choice: `run`, or what repeats an earlier attempt's events."""
        if (earlier := self._earlier) is not None:

            async def repeat(index: int, emit: Emit) -> Trajectory:
                for _, event in events_of(earlier.choices[index]):
                    emit(event)
                return earlier.choices[index]

            return repeat
        if (remember := self._remember) is None:
            return run
        trajectories: dict[int, Trajectory] = {}

        async def first(index: int, emit: Emit) -> Trajectory:
            trajectories[index] = await run(index, emit)
            if len(trajectories) == len(writers):
                self.is_remembered = True
                remember(
                    _SampledAnswer(
                        writers[0].frame, [trajectories[at] for at in sorted(trajectories)]
                    )
                )
            return trajectories[index]

        return first


@dataclass(slots=True)
class _KeyEntry:
    """A key that is in use."""

    digest: bytes
    answer: _SampledAnswer | None = None  # None: its attempt is in flight
    changed: anyio.Event = field(default_factory=anyio.Event)


class IdempotentAnswers:
    """The newest answers to requests with a key."""

    def __init__(
        self, *, is_shared: bool = False, max_answers: int = 256, max_ids: int = 1 << 20
    ) -> None:
        """
        Args:
            is_shared: whether clients that do not know each other use it. Then two of them may
                choose the same key, so only those who send the same token and body share an answer.
            max_answers, max_ids: how many answers and token ids are remembered.
        """
        self._is_shared = is_shared
        self._max_answers, self._max_ids = max_answers, max_ids
        self._entries: dict[Hashable, _KeyEntry] = {}
        self._num_ids: OrderedDict[Hashable, int] = OrderedDict()  # of the remembered answers

    def __len__(self) -> int:
        return len(self._entries)

    @asynccontextmanager
    async def attempt(self, request: web.Request, body: bytes) -> AsyncIterator[AnswerAttempt]:
        """Begin an attempt; wait first until an earlier one with the same key has ended.

        Raises:
            RequestError: the key is invalid, or is that of another request.
        """
        key = request.headers.get(_HEADER)
        if key is None:
            yield AnswerAttempt()
            return
        if not 1 <= len(key) <= _MAX_KEY_CHARS:
            raise RequestError(
                f"{_HEADER}: expected 1 to {_MAX_KEY_CHARS} characters, not {len(key)}; "
                "a UUID for each request is best"
            )
        digest = blake2b(request.path.encode() + b"\0" + body, digest_size=32).digest()
        name: Hashable = key
        if self._is_shared:
            headers = request.headers
            name = key, digest, headers.get("Authorization"), headers.get("X-Api-Key")
        while (entry := self._entries.get(name)) is not None:
            if entry.digest != digest:
                raise RequestError(
                    f"{_HEADER}: this key belongs to another request, with another body; "
                    "send a new key with each new request"
                )
            if entry.answer is not None:
                self._num_ids.move_to_end(name)
                yield AnswerAttempt(entry.answer)
                return
            await entry.changed.wait()  # no deadline: the earlier attempt's rollouts have theirs
        entry = self._entries[name] = _KeyEntry(digest)

        def remember(answer: _SampledAnswer) -> None:
            entry.answer = answer
            entry.changed.set()
            self._num_ids[name] = answer.num_ids
            self._forget_oldest()

        try:
            yield AnswerAttempt(remember=remember)
        finally:
            if entry.answer is None:
                del self._entries[name]
                entry.changed.set()

    def _forget_oldest(self) -> None:
        while len(self._num_ids) > self._max_answers or (
            len(self._num_ids) > 1 and sum(self._num_ids.values()) > self._max_ids
        ):
            name, _ = self._num_ids.popitem(last=False)
            del self._entries[name]
