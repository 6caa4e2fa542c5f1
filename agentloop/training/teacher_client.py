"""A teacher: an SGLang server that says how likely it would have been to sample given tokens.

    trajectory ──ids──> POST /generate, nothing to generate ──> log-probabilities of its ids

Failures are the infrastructure's: requests are retried until their deadline, and then the rollout
has no reward.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from agentloop.errors import ServerError, ServerRefused, ServerUnavailable, SettingsError
from agentloop.inference.sglang.control import ControlClient, http_session
from agentloop.plain_json import JsonObject
from agentloop.training.credit.distill import DistillArguments
from agentloop.training.credit.settings import CreditSettings
from agentloop.trajectory import Trajectory

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_CONCURRENT = 64  # requests; more would only wait in the server's queue
_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0  # between tries
_MAX_COMPARED = 1 << 14  # log-probabilities in an answer, where ids are compared: half a MB
_PROBE = "What is 37 × 48?\n\tdef f(x): return {'a': x**2}  # Größe, Ж, 数学, 🙂 1234567890"


class TeacherClient:
    """Gets log-probabilities of sampled tokens from a teacher."""

    def __init__(self, url: str, control: ControlClient, *, timeout_s: float) -> None:
        """
        Args:
            timeout_s: time for the log-probabilities of a trajectory, retries included.
        """
        self._url = url
        self._control = control
        self._timeout_s = timeout_s
        self._slots = anyio.CapacityLimiter(_MAX_CONCURRENT)
        self._num_ids: int | None = None

    async def check(self, tokenizer: Tokenizer) -> None:
        """Check that the teacher has the same tokenizer.

        An id that the teacher does not know would end its server, so do this before anything else.

        Args:
            tokenizer: the student's.

        Raises:
            SettingsError: it has another tokenizer, or does not say.
            ServerError: it does not answer in time.
        """
        ids = tokenizer.get_vocab(with_added_tokens=True)
        probe = [_PROBE, *sorted(ids, key=ids.__getitem__)[-256:]]  # the last ones are special
        body = {"prompt": probe, "add_special_tokens": False}
        try:
            answer = await self._ask("/tokenize", body)
            theirs = answer["tokens"]
        except (ServerRefused, KeyError, TypeError) as error:
            raise SettingsError(
                f"credit.args.teacher: {self._url} does not tokenize text, so it is unknown "
                f"whether its tokenizer is the model's: {error}"
            ) from error
        for text, their_ids in zip(probe, theirs, strict=True):
            ours = tokenizer.encode(text, add_special_tokens=False).ids
            if their_ids != ours:
                raise SettingsError(
                    f"credit.args.teacher: the tokenizer of {self._url} is not that of the model: "
                    f"it encodes {text!r:.60} as {their_ids!s:.60}, not as {ours!s:.60}"
                )
        self._num_ids = max(ids.values()) + 1

    async def logprobs(self, trajectory: Trajectory) -> list[float]:
        """Return the teacher's log-probability of each sampled token.

        Where only some ids could be sampled, it is that of the teacher's distribution over these.

        Raises:
            ServerError: the teacher refused the request, or did not answer in time.
        """
        ids, mask = trajectory.ids, trajectory.mask
        if 1 not in mask:
            return []
        if self._num_ids is not None and max(ids) >= self._num_ids:
            raise ServerRefused(
                f"{self._url}: id {max(ids)} is not in the tokenizer's vocabulary", status=400
            )
        kept_ids = trajectory.kept
        kept: Sequence[Sequence[int]] = [()] * len(ids) if kept_ids is None else [*kept_ids]
        first = mask.index(1)
        logprobs: list[float] = []
        for end in _ends(kept, first):
            start = first + len(logprobs) - 1  # the log-probability of the first is not reported
            body = {
                "input_ids": ids[:end],
                "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
                "return_logprob": True,
                "logprob_start_len": start,
            }
            if compared := sorted({*chain.from_iterable(kept[start + 1 : end])}):
                body["token_ids_logprob"] = compared
            answer = await self._ask("/generate", body)
            values = _parse_logprobs(answer, ids[start:end], kept[start:end])
            if values is None:
                raise ServerRefused(
                    f"{self._url}/generate: no log-probabilities of the given ids", status=200
                )
            logprobs += values
        sampled = mask[first:]
        return [value for value, is_sampled in zip(logprobs, sampled, strict=True) if is_sampled]

    async def _ask(self, path: str, body: Mapping[str, object]) -> Any:
        """Send a request until it is answered.

        Raises:
            ServerRefused: the answer is an error that a retry would repeat.
            ServerUnavailable: there was no answer in time.
        """
        pause_s, last = _FIRST_PAUSE_S, "all of its requests took too long"
        with anyio.move_on_after(self._timeout_s):
            while True:
                try:
                    async with self._slots:  # no deadline: the whole has one
                        return await self._control.post(path, body, timeout_s=self._timeout_s)
                except ServerError as error:
                    if isinstance(error, ServerRefused) and 400 <= error.status < 500:
                        raise
                    last = str(error)
                await anyio.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
        raise ServerUnavailable(
            f"the teacher {self._url} did not answer within {self._timeout_s:g} s: {last}"
        )


@asynccontextmanager
async def open_teacher(
    credit: CreditSettings, tokenizer: Tokenizer
) -> AsyncIterator[Callable[[Trajectory], Awaitable[list[float]]] | None]:
    """Open the teacher that the rule of credit assignment needs, if it needs one.

    Yields:
        A function that returns the teacher's log-probabilities of a trajectory's sampled tokens.

    Raises:
        SettingsError, ServerError: as in `TeacherClient.check`.
    """
    arguments = credit.arguments
    if not isinstance(arguments, DistillArguments):
        yield None
        return
    async with http_session() as session:
        control = ControlClient(arguments.teacher, session)
        client = TeacherClient(arguments.teacher, control, timeout_s=arguments.timeout_s)
        await client.check(tokenizer)
        yield client.logprobs


def _ends(kept: Sequence[Sequence[int]], first: int) -> Iterator[int]:
    """Yield where each request for the tokens from `first` on ends.

    A server reports the same ids at all positions of a request, so it is not for too many of both.
    """
    compared: set[int] = set()
    start = first
    for index in range(first, len(kept)):
        compared |= {*kept[index]}
        if len(compared) * (index + 1 - start) > _MAX_COMPARED and index > start:
            yield index
            start, compared = index, {*kept[index]}
    yield len(kept)


def _parse_logprobs(
    answer: JsonObject, ids: Sequence[int], kept: Sequence[Sequence[int]]
) -> list[float] | None:
    """Return the log-probabilities of `ids` but the first, or None if the answer has others."""
    try:
        rows = answer["meta_info"]["input_token_logprobs"]
        if [row[1] for row in rows] != list(ids):
            return None
        logprobs = [float(row[0]) for row in rows[1:]]
        if any(kept[1:]):
            tables = answer["meta_info"]["input_token_ids_logprobs"][1:]
            for index, (row, table) in enumerate(zip(kept[1:], tables, strict=True)):
                if row:
                    by_id = {entry[1]: float(entry[0]) for entry in table}
                    logprobs[index] -= float(np.logaddexp.reduce([by_id[id] for id in row]))
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return logprobs if all(map(math.isfinite, logprobs)) else None
