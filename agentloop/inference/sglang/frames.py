"""The stream of /generate: from bytes to chunks of tokens.

    bytes ──FrameDecoder──> payloads of `data:` ──> frames (JSON) ──merged──> chunks

Frames that arrive together are merged, so that later stages cost the same for one token as for
many. Token ids and log-probabilities are read; the server's text is not.

Numbers are checked here and nowhere later. A frame with a log-probability that is none, which
SGLang writes as null where its own is NaN or infinite, is invalid: the turn goes on from the tokens
before it at another server.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from agentloop.errors import ServerUnavailable
from agentloop.plain_json import JsonObject
from agentloop.token_records import MAX_KEPT_IDS, RoutedExperts
from agentloop.trajectory import TurnEnd, VersionSpan

_MAX_FRAME_BYTES = 256 << 20  # the experts of a long turn are one event


TopLogprobs = list[tuple[float, int]]
"""The most likely ids at one position, each with its log-probability."""


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the ids of a prompt.

    The first id, which follows nothing, has none, and neither has one that is impossible.

    Attributes:
        top: The most likely ids at each position, if requested.
    """

    logprobs: list[float | None]
    top: list[TopLogprobs]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one or more frames that arrived together; the last chunk has `end` set."""

    ids: list[int]
    logprobs: list[float]
    version: str
    end: TurnEnd | None = None
    versions: tuple[VersionSpan, ...] = ()  # of the whole response; in the last chunk
    cached_tokens: int = 0  # prompt tokens from the cache
    num_retractions: int = 0  # times the server retracted it from its batch; in the last chunk
    error: str | None = None  # the server's message, with TurnEnd.ABORT
    top_logprobs: Sequence[TopLogprobs] = ()  # for each id, if requested
    kept: Sequence[list[int]] = ()  # the ids that could be sampled for each id, if requested
    prompt: PromptLogprobs | None = None  # in the first chunk, if requested
    experts: RoutedExperts | None = None  # of the whole response; in the last chunk, if requested


OnChunk = Callable[[Chunk], None]


class InvalidFrame(Exception):
    """A frame does not have SGLang's format."""


class ErrorFrame(Exception):
    """An error of the server, in a stream that began with status 200."""

    def __init__(self, message: object, status: object) -> None:
        super().__init__(message)
        self.status = status if isinstance(status, int) else 500


class FrameDecoder:
    """Decodes the bytes of a server-sent event stream into the payloads of `data:`.

    It takes time linear in the bytes; an event longer than 256 MiB is refused.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._half_newline = False

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the payloads that are complete.

        Raises:
            ServerUnavailable: An event is too long.
        """
        # The common case: one whole event.
        if (
            data.startswith(b"data: ")
            and data.find(b"\n") == len(data) - 2
            and data.endswith(b"\n\n")
            and not self._rest
            and not self._half_newline
        ):
            return [data[6:-2]]
        if self._half_newline or b"\r" in data:
            data = self._with_plain_newlines(data)
        if self._rest:
            # The separator may be split over two reads; earlier bytes are not searched again.
            unseen = len(self._rest) - 1
            self._rest += data
            if len(self._rest) > _MAX_FRAME_BYTES:
                raise ServerUnavailable(f"an event is longer than {_MAX_FRAME_BYTES} bytes")
            if self._rest.find(b"\n\n", unseen) < 0:
                return []
            data = bytes(self._rest)
        *events, incomplete = data.split(b"\n\n")
        self._rest = bytearray(incomplete)
        payloads = []
        for event in events:
            if event.startswith(b"data: ") and b"\n" not in event:
                payloads.append(event[6:])
            elif payload := _data_lines(event):
                payloads.append(payload)
        return payloads

    def _with_plain_newlines(self, data: bytes) -> bytes:
        if self._half_newline:
            data = b"\r" + data
        self._half_newline = data.endswith(b"\r")
        if self._half_newline:
            data = data[:-1]
        return data.replace(b"\r\n", b"\n")


def _data_lines(event: bytes) -> bytes:
    lines = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if line[:5] == b"data:")
    return b"\n".join(lines)


class ChunkReader:
    """Converts the bytes of one response into chunks.

    Attributes:
        num_tokens: Tokens received so far.
        ended: Whether the last chunk has been received.
    """

    def __init__(
        self, on_chunk: OnChunk, *, prompt_logprobs: bool = False, experts_from: int | None = None
    ) -> None:
        self.num_tokens = 0
        self.ended = False
        self._decoder = FrameDecoder()
        self._on_chunk = on_chunk
        self._awaits_prompt = prompt_logprobs
        self._experts_from = experts_from

    def feed(self, data: bytes) -> bool:
        """Add bytes; return whether the response has ended.

        Raises:
            InvalidFrame, ErrorFrame, ServerUnavailable: A frame is not a part of the response.
        """
        payloads = self._decoder.feed(data)
        for chunk in _merge_frames(payloads, self.num_tokens, self._experts_from):
            if self._awaits_prompt:
                self._awaits_prompt = False
                chunk = replace(chunk, prompt=_prompt_logprobs(payloads[0]))
            self.num_tokens += len(chunk.ids)
            self._on_chunk(chunk)
            if chunk.end is not None:
                self.ended = True
                return True
        return False


def _merge_frames(
    payloads: Sequence[bytes], num_tokens: int, experts_from: int | None
) -> list[Chunk]:
    """Merge frames that arrived together into one chunk per policy version.

    Later stages cost the same for one token as for many. `num_tokens` tokens came before.
    """
    chunks: list[Chunk] = []
    ids: list[int] = []
    logprobs: list[float] = []
    top: list[TopLogprobs] = []
    kept: list[list[int]] = []
    version, num_cached = "", 0

    def chunk() -> Chunk:
        return Chunk(ids, logprobs, version, cached_tokens=num_cached, top_logprobs=top, kept=kept)

    try:
        for payload in payloads:
            if payload == b"[DONE]":
                break
            frame = _frame(payload)
            meta = frame["meta_info"]
            if (finish := meta["finish_reason"]) is not None:
                _check_accepted(finish)
            if ids and _version(meta) != version:
                chunks.append(chunk())
                ids, logprobs, top, kept = [], [], [], []
            version, num_cached = _version(meta), int(meta.get("cached_tokens") or 0)
            # With `--incremental-streaming-output` a frame has only new ids, otherwise all so far:
            # counting from the end works for both.
            if num_new := meta["completion_tokens"] - num_tokens:
                num_tokens += num_new
                new_ids = frame["output_ids"][-num_new:]
                if (masks := meta.get("output_token_sampling_mask")) is None:
                    new_logprobs = [entry[0] for entry in meta["output_token_logprobs"][-num_new:]]
                else:
                    new_logprobs = meta["output_token_sampling_logprobs"][-num_new:]
                    kept += _checked_kept(masks[-num_new:], new_ids)
                if not len(new_ids) == len(new_logprobs) == num_new:
                    raise InvalidFrame(f"{num_new} new tokens announced, {len(new_ids)} received")
                ids += _checked_ids(new_ids)
                logprobs += _checked_logprobs(new_logprobs)
                if "output_top_logprobs" in meta:
                    top += map(_top_logprobs, meta["output_top_logprobs"][-num_new:])
            if finish is not None:
                last = _last_chunk(ids, logprobs, top, kept, meta)
                if experts_from is not None and last.end is not TurnEnd.ABORT:
                    last = replace(last, experts=_experts(meta, experts_from))
                return [*chunks, last]
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidFrame(f"{type(error).__name__}: {error}") from error
    if ids:
        chunks.append(chunk())
    return chunks


def _prompt_logprobs(payload: bytes) -> PromptLogprobs:
    meta = _frame(payload)["meta_info"]
    try:
        logprobs = meta["input_token_logprobs"]
        top = meta.get("input_top_logprobs") or [None] * len(logprobs)
        if len(logprobs) != len(top):
            raise InvalidFrame(f"{len(logprobs)} ids of the prompt, alternatives of {len(top)}")
        return PromptLogprobs([entry[0] for entry in logprobs], [*map(_top_logprobs, top)])
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise InvalidFrame(f"{type(error).__name__}: {error}") from error


def _checked_ids(ids: list[object]) -> list[int]:
    for id in ids:
        if type(id) is not int or id < 0:
            raise InvalidFrame(f"output_ids: {id!r} is no id of a token")
    return ids  # type: ignore[return-value]


def _checked_logprobs(logprobs: list[object]) -> list[float]:
    for logprob in logprobs:
        if not isinstance(logprob, float | int) or not math.isfinite(logprob):
            raise InvalidFrame(
                f"a log-probability is {logprob!r}: the server's logits are not finite"
            )
    return logprobs  # type: ignore[return-value]


def _checked_kept(rows: list[list[object]], ids: list[object]) -> list[list[int]]:
    for id, row in zip(ids, rows, strict=True):
        if id not in row or len(row) > MAX_KEPT_IDS or {*map(type, row)} != {int}:
            raise InvalidFrame(f"output_token_sampling_mask: {row!s:.100} of id {id!r}")
    return rows  # type: ignore[return-value]


def _experts(meta: JsonObject, start: int) -> RoutedExperts:
    if (text := meta.get("routed_experts")) is None:
        raise InvalidFrame("no experts: the server needs --enable-return-routed-experts")
    return RoutedExperts.decode(text, start, meta["prompt_tokens"] + meta["completion_tokens"] - 1)


def _top_logprobs(entries: Sequence[Sequence[Any]] | None) -> TopLogprobs:
    """Return the most likely ids at a position; those that a grammar rules out have no number."""
    return [(entry[0], entry[1]) for entry in entries or () if entry[0] is not None]


def _version(meta: JsonObject) -> str:
    return str(meta["weight_version"] or "default")


def _frame(payload: bytes) -> JsonObject:
    frame: JsonObject = orjson.loads(payload)
    if "error" in frame:
        error = frame["error"]
        details = error if isinstance(error, dict) else {"message": error}
        # SGLang 0.5.23 answers a bad request with status 200 and sends the true status here.
        raise ErrorFrame(details.get("message", details), details.get("code"))
    return frame


def _check_accepted(finish: object) -> None:
    """Raise ErrorFrame if the server aborted because the request is invalid.

    Such a frame may have a token without a log-probability.
    """
    if not isinstance(finish, dict):
        return
    status = finish.get("status_code")
    if isinstance(status, int) and 400 <= status < 500:
        raise ErrorFrame(finish.get("message"), status)


def _last_chunk(
    ids: list[int],
    logprobs: list[float],
    top: list[TopLogprobs],
    kept: list[list[int]],
    meta: JsonObject,
) -> Chunk:
    finish = meta["finish_reason"]
    kind = finish["type"]
    return Chunk(
        ids,
        logprobs,
        _version(meta),
        end=TurnEnd(kind) if kind in ("stop", "length") else TurnEnd.ABORT,
        versions=tuple(
            VersionSpan(str(span["version"]), int(span["start"]), int(span["end"]))
            for span in meta.get("weight_versions") or ()
        ),
        cached_tokens=int(meta.get("cached_tokens") or 0),
        num_retractions=int(meta.get("num_retractions") or 0),
        error=finish.get("message"),
        top_logprobs=top,
        kept=kept,
    )
