"""One SGLang server, over its own protocol (0.5.23): stream, abort, information, loads.

Source of the protocol: SGLang's `/generate`, `/abort_request`, `/v1/models`, `/server_info`,
`/model_info` and `/v1/loads`; for new weights `/pause_generation`, `/update_weights_from_disk` and
those of its update groups. Token ids go in and come out; the server's text is not used.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from http.client import responses
from typing import Any, Literal

import aiohttp
import anyio
import orjson
import pydantic

from agentloop.errors import ServerError, ServerRefused, ServerUnavailable
from agentloop.inference.kv_ledger import Report
from agentloop.inference.stream import PostStream, StreamBroken
from agentloop.trajectory import TurnEnd, VersionSpan

__all__ = [
    "Bucket",
    "Checksum",
    "Chunk",
    "FrameDecoder",
    "Pause",
    "SGLangServer",
    "Sampling",
    "ServerInfo",
    "WeightsGroup",
    "WeightsInfo",
    "http_session",
]

_MAX_FRAME_BYTES = 64 << 20
_MAX_ANSWER_BYTES = 16 << 20  # /server_info is long
_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=10)
# Settings by which the tensors of a server are others than those of its model, if they are set.
_UNUSUAL = ("quantization", "enable_dp_attention", "enable_fp32_lm_head", "cpu_offload_gb")
_UNUSUAL_ABOVE_1 = ("attn_cp_size", "dcp_size")


class Sampling(pydantic.BaseModel):
    """How tokens are drawn. The defaults are those of training: the policy as it is."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    temperature: float = pydantic.Field(1.0, ge=0, le=100, description="0 is greedy.")
    top_p: float = pydantic.Field(1.0, gt=0, le=1, description="Nucleus of this mass.")
    # A number beyond 32 bits would kill the server.
    top_k: int = pydantic.Field(
        -1, ge=-1, le=1 << 30, description="The k likeliest; -1 or 0 for all."
    )
    min_p: float = pydantic.Field(0.0, ge=0, le=1, description="Relative to the likeliest.")
    seed: int | None = pydantic.Field(
        None, ge=0, lt=1 << 63, description="Where the server supports it."
    )

    def of_group(self, name: str) -> Sampling:
        """The same for the group of this name: with a seed of its own, where there is one, or a
        task that comes again would have the same rollouts."""
        if self.seed is None:
            return self
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return self.model_copy(update={"seed": int.from_bytes(digest[:8]) >> 1})

    def of_sibling(self, index: int) -> Sampling:
        """The same for the `index`-th of a group: with a seed of its own, or all would be alike."""
        if self.seed is None or not index:
            return self
        return self.model_copy(update={"seed": (self.seed + index) % (1 << 63)})

    def to_sglang(self, *, max_new_tokens: int, stop_ids: Sequence[int]) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,  # it refuses 0
            "min_p": self.min_p,
            "stop_token_ids": list(stop_ids),
            "skip_special_tokens": False,
        }
        if not stop_ids:
            params["ignore_eos"] = True  # or the model's own would end it still
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens, of one frame or of several that arrived together; the last has `end` set."""

    ids: list[int]
    logprobs: list[float]
    version: str
    end: TurnEnd | None = None
    versions: tuple[VersionSpan, ...] = ()  # of the whole response; on the last frame
    cached_tokens: int = 0  # of the prompt
    num_retractions: int = 0  # on the last frame: how often the server threw it out of its batch
    error: str | None = None  # with TurnEnd.ABORT: what the server said
    top_logprobs: Sequence[list[tuple[float, int]]] = ()  # of each id, where they are asked for


OnChunk = Callable[[Chunk], None]

Pause = Literal["retract", "in_place"]
"""What becomes of running requests when the weights change under them. retract: they are computed
anew from their ids, and the cache is emptied. in_place: they keep the KV of the old weights, and
so does the prefix cache, where new requests do not find it (see `SGLangServer.update_weights`)."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server is. `context_length` counts prompt and response.

    It has `dp_size` data-parallel ranks, each with a KV cache of `max_total_num_tokens` and room
    for `max_running_requests` sequences in its batch.
    """

    model_path: str
    context_length: int
    max_total_num_tokens: int
    version: str
    dp_size: int = 1
    max_running_requests: int | None = None


@dataclass(frozen=True, slots=True)
class WeightsGroup:
    """A process group by which weights come; its rank 0, who sends, is at `address`."""

    name: str
    address: str
    port: int
    backend: str
    world_size: int
    pause: Pause = "retract"


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """How a server holds its weights.

    Attributes:
        num_ranks: of tensor parallelism; each is a member of a group.
        device: "cpu", "cuda", ...
        dtype: as it was told; may be "auto".
        sglang: its version.
        unusual: a setting by which its tensors are not simply those of the model; none as a rule.
    """

    num_ranks: int
    device: str
    dtype: str
    sglang: str
    unusual: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent in one piece, end to end."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True, slots=True)
class Checksum:
    """Of the weights that a server has: of all; and of each tensor by its name there, for each of
    its processes, with the process's tensor-parallel rank."""

    whole: str
    ranks: list[tuple[int, dict[str, str]]]


class FrameDecoder:
    """Bytes of a server-sent event stream in, payloads of `data:` out, however they are cut.

    Linear in the bytes; an event that never ends is refused at 64 MiB.
    """

    def __init__(self) -> None:
        self._rest = bytearray()
        self._half_newline = False

    def feed(self, data: bytes) -> list[bytes]:
        """Raises ServerUnavailable where an event outgrows its bound."""
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
            # An end may have been cut in two; what lies before it is not looked at again.
            unseen = len(self._rest) - 1
            self._rest += data
            if len(self._rest) > _MAX_FRAME_BYTES:
                raise ServerUnavailable(f"an event of more than {_MAX_FRAME_BYTES} bytes")
            if self._rest.find(b"\n\n", unseen) < 0:
                return []
            data = bytes(self._rest)
        *events, rest = data.split(b"\n\n")
        self._rest = bytearray(rest)
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


@asynccontextmanager
async def http_session() -> AsyncIterator[aiohttp.ClientSession]:
    """A session without aiohttp's limit of 100 connections: streams are held for minutes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, json_serialize=_dumps) as session:
        yield session


class SGLangServer:
    """A client of one server. Knows nothing of the others."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 120.0,
    ) -> None:
        """`stall_timeout_s` bounds the silence before and between frames, not the whole stream."""
        self.url = url.rstrip("/")
        self._session = session
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._streams: set[PostStream] = set()
        self._cache_key: str | None = None  # of the prefix cache's entries that new requests share
        self._is_loading = False  # or has failed to: its weights are unknown

    async def generate(
        self,
        ids: Sequence[int],
        params: dict[str, Any],
        *,
        rid: str,
        on_chunk: OnChunk,
        rank: int | None = None,
        num_top_logprobs: int = 0,
    ) -> None:
        """Stream the continuation of `ids`; returns after the chunk that has `end` set.

        Cancelling it closes the connection, which frees the request on the server.

        Args:
            on_chunk: called as tokens arrive, in the event loop's callback: must not block.
            rank: the data-parallel rank that serves it; none: the server chooses.
            num_top_logprobs: how many of the likeliest tokens are told in the place of each token.

        Raises:
            ServerRefused: the server answered with an error.
            ServerUnavailable: it could not be reached, or the stream broke before its last frame.
        """
        body = {
            "input_ids": ids,
            "sampling_params": params,
            "stream": True,
            "return_logprob": True,
            "rid": rid,
        }
        if num_top_logprobs:
            body["top_logprobs_num"] = num_top_logprobs
        if rank is not None:
            body["routed_dp_rank"] = rank
        if self._cache_key is not None:
            body["extra_key"] = self._cache_key
        frames = _Frames(on_chunk)
        stream = PostStream(self.url + "/generate", orjson.dumps(body), frames.feed)
        self._streams.add(stream)
        try:
            await stream.run(connect_timeout_s=self._connect_timeout_s)
        except StreamBroken as error:
            after = f", after {frames.seen} tokens" if frames.seen else ""
            raise ServerUnavailable(f"{self.url}: {error}{after}") from error
        except _NoFrame as error:
            raise ServerUnavailable(f"{self.url}: a frame that is none: {error}") from error
        except _ErrorFrame as error:
            raise ServerRefused(f"{self.url}: {error}", status=error.status) from error
        finally:
            self._streams.discard(stream)
        if stream.status != 200:
            raise _refusal(self.url, stream.status, stream.error_body)
        if not frames.ended:
            raise ServerUnavailable(
                f"{self.url}: the stream ended after {frames.seen} tokens, unfinished"
            )

    def close_stalled(self) -> None:
        """Break the streams that have been silent for too long; to be called now and then."""
        limit = time.monotonic() - self._stall_timeout_s
        for stream in self._streams:
            if stream.heard_s < limit:
                stream.break_off(f"silent for {self._stall_timeout_s:g} s")

    def break_streams(self, why: str) -> None:
        """Break all streams: the server counts as dead, or what it computes is not wanted."""
        for stream in self._streams:
            stream.break_off(why)

    async def loads(self) -> list[Report]:
        """What each rank holds and does now, as it says itself (SGLang: GET /v1/loads).

        Raises:
            ServerUnavailable, ServerRefused: it did not say.
        """
        answer = await self._control("GET", "/v1/loads")
        try:
            return [
                Report(
                    num_used=int(rank["num_used_tokens"]),
                    num_running=int(rank["num_running_reqs"]),
                    num_waiting=int(rank["num_waiting_reqs"]),
                )
                for rank in sorted(answer["loads"], key=lambda rank: int(rank["dp_rank"]))
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerRefused(
                f"{self.url}/v1/loads: not what was expected", status=200
            ) from error

    async def abort(self, rid: str) -> None:
        """Tell the server to drop a request; best effort, bounded to ten seconds."""
        await self._control("POST", "/abort_request", {"rid": rid})

    async def weight_version(self) -> str:
        """The version of the weights that it has; also a probe, which does not generate.

        Raises:
            ServerUnavailable, ServerRefused: it would not take a request.
        """
        # Not /server_info, which goes on saying what the server was started with.
        answer = await self._control("GET", "/model_info")
        try:
            return str(answer.get("weight_version") or "default")
        except AttributeError as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error

    async def info(self) -> ServerInfo:
        """Raises ServerUnavailable, or ServerRefused where this is no SGLang server."""
        info = await self._control("GET", "/server_info")
        models = await self._control("GET", "/v1/models")
        try:
            (rank, *_) = info.get("internal_states") or [{}]
            most = rank.get("effective_max_running_requests_per_dp")
            found = ServerInfo(
                model_path=info["model_path"],
                context_length=int(models["data"][0]["max_model_len"]),
                max_total_num_tokens=int(info["max_total_num_tokens"]),
                version=info["version"],
                dp_size=int(info.get("dp_size") or 1),
                max_running_requests=None if most is None else int(most),
            )
            if min(found.context_length, found.max_total_num_tokens, found.dp_size) < 1:
                raise ValueError("no room at all")
            return found
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error

    async def update_weights(
        self, folder: str, version: str, *, timeout_s: float, pause: Pause = "retract"
    ) -> Checksum:
        """Load the weights in `folder`, which the server can read too, under what runs.

        SGLang finds the prefix cache's entries by ids alone. Without flushing, which it refuses
        while requests run, a new prompt would be given what the old weights computed of it: a
        system prompt for as long as it is in use, over any number of versions. So in place, the
        requests from now on have a key of their own, under which they find only each other's; what
        is left of the others is evicted as the oldest. And in place it has to run without SGLang's
        overlapped scheduling: a retraction waits for the tokens under way, but this pause leaves
        one of each request in flight, which would be told as the new version's.

        The checksum is taken in the pause. SGLang computes it between two batches, so that after
        the pause it would silence the streams for as long, and they would by then have gone on.
        Where anything fails, the streams are broken before it goes on: all that came of them is of
        weights that are known, and their turns go on elsewhere.

        Returns:
            Of what it has now; equal weights have equal ones (SGLang's own).

        Raises:
            ServerUnavailable, ServerRefused: it did not, or not in time: what it has is unknown.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        if pause == "in_place":
            self._check_in_place(await self._control("GET", "/server_info"))
        try:
            await self._control("POST", "/pause_generation", {"mode": pause}, timeout)
            self._is_loading = True
            flush = pause == "retract"
            body = {"model_path": folder, "weight_version": version, "flush_cache": flush}
            await self._control("POST", "/update_weights_from_disk", body, timeout)
            checksum = await self._checksum(timeout)
        except BaseException:  # it may be paused, also where it did not say so
            # no deadline: the request has one, ten seconds
            with anyio.CancelScope(shield=True), suppress(ServerError):  # in ten seconds at most
                await self._go_on()
            raise
        self._has_loaded(pause)
        await self._go_on()
        return checksum

    async def weights_info(self) -> WeightsInfo:
        """How it holds its weights. Raises ServerUnavailable, ServerRefused."""
        return self._weights_info(await self._control("GET", "/server_info"))

    def _weights_info(self, info: Any) -> WeightsInfo:
        try:
            unusual = [name for name in _UNUSUAL if info.get(name)]
            unusual += [name for name in _UNUSUAL_ABOVE_1 if int(info.get(name) or 1) > 1]
            unusual += ["model_impl"] * (info.get("model_impl") not in (None, "auto", "sglang"))
            return WeightsInfo(
                num_ranks=int(info.get("tp_size") or 1),
                device=str(info.get("device")),
                dtype=str(info.get("dtype")),
                sglang=str(info.get("version")),
                unusual=", ".join(f"{name} = {info[name]}" for name in unusual),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error

    async def group_member(self, pause: Pause = "retract") -> WeightsInfo:
        """What it would be in a group.

        Raises:
            ServerUnavailable: it did not say.
            ServerRefused: it cannot be in one.
        """
        info = await self._control("GET", "/server_info")
        try:
            if max(int(info.get(name) or 1) for name in ("dp_size", "pp_size")) > 1:
                raise ServerRefused(
                    f"{self.url}: SGLang gives data- and pipeline-parallel ranks weights by disk "
                    "alone: set weights.by to disk",
                    status=200,
                )
        except (AttributeError, TypeError, ValueError) as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error
        if pause == "in_place":
            self._check_in_place(info)
        return self._weights_info(info)

    async def join_group(self, group: WeightsGroup, rank: int, *, timeout_s: float) -> None:
        """Pause it and make it members of the group, from `rank` on. It answers once all members
        are there; `finish_group` or `leave_group` must follow, also where this fails.

        Raises:
            ServerUnavailable, ServerRefused: it did not.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._control("POST", "/pause_generation", {"mode": group.pause}, timeout)
        with suppress(ServerRefused):  # of a group that it was too late to leave, as a rule of none
            await self._control("POST", "/end_weight_update", {}, timeout)
        await self._control("POST", "/init_weights_update_group", body, timeout)
        await self._control("POST", "/begin_weight_update", {}, timeout)

    async def receive(
        self, group: WeightsGroup, bucket: Bucket, version: str | None, *, timeout_s: float
    ) -> None:
        """Load a bucket that is being sent; `version` with the last one, which empties the cache
        unless the pause is in place: see `update_weights`.

        Raises:
            ServerUnavailable, ServerRefused: it did not: what it has is unknown.
        """
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": version is not None and group.pause == "retract",
            "weight_version": version,
        }
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._is_loading = True
        await self._control("POST", "/update_weights_from_distributed", body, timeout)

    async def finish_group(self, group: WeightsGroup, *, timeout_s: float) -> Checksum:
        """After the last bucket: leave the group, and serve again.

        Returns:
            Of what it has now; equal weights have equal ones (SGLang's own).

        Raises:
            ServerUnavailable, ServerRefused: it did not; `leave_group` must follow.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        await self._control("POST", "/end_weight_update", {}, timeout)
        checksum = await self._checksum(timeout)
        self._has_loaded(group.pause)
        body = {"group_name": group.name}
        await self._control("POST", "/destroy_weights_update_group", body, timeout)
        await self._go_on()
        return checksum

    async def leave_group(self, group: WeightsGroup) -> None:
        """Leave a group that failed, from whatever point, and go on; without what runs, where it
        may have some of the new weights.

        Raises:
            ServerUnavailable, ServerRefused: it does not answer: it is gone, or hangs.
        """
        for path, body in (
            ("/end_weight_update", {}),
            ("/destroy_weights_update_group", {"group_name": group.name}),
        ):
            with suppress(ServerRefused):  # nothing of the kind was open
                await self._control("POST", path, body)
        await self._go_on()

    def _check_in_place(self, info: Any) -> None:
        if not info.get("disable_overlap_schedule"):
            raise ServerRefused(
                f"{self.url}: weights.pause = in_place would give tokens the wrong version while "
                "SGLang overlaps batches: start it with --disable-overlap-schedule "
                "(server.extra_args), or set weights.pause to retract",
                status=200,
            )

    def _has_loaded(self, pause: Pause) -> None:
        self._is_loading = False
        if pause == "in_place":  # not the version: another run may have given it to others
            self._cache_key = uuid.uuid4().hex

    async def _go_on(self) -> None:
        if self._is_loading:
            self.break_streams("it did not get its new weights whole")
        await self._control("POST", "/continue_generation", {})

    async def _checksum(self, timeout: aiohttp.ClientTimeout) -> Checksum:
        answer = await self._control("POST", "/weights_checker", {"action": "checksum"}, timeout)
        try:
            ranks = answer["ranks"]
            whole = " ".join(sorted(str(rank["per_gpu_checksum"]) for rank in ranks))
            return Checksum(whole, [_tensors(rank) for rank in ranks])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ServerRefused(f"{self.url}/weights_checker: {answer}", status=200) from error

    async def _control(
        self,
        method: str,
        path: str,
        body: Any = None,
        timeout: aiohttp.ClientTimeout = _CONTROL_TIMEOUT,
    ) -> Any:
        try:
            async with self._session.request(
                method, self.url + path, json=body, timeout=timeout
            ) as response:
                content = b""
                # no deadline: the request has one, timeout
                async for piece in response.content.iter_any():
                    content += piece
                    if len(content) > _MAX_ANSWER_BYTES:
                        raise ServerRefused(f"{self.url}{path}: an endless answer", status=200)
                if response.status != 200:
                    raise _refusal(self.url + path, response.status, content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnavailable(f"{self.url}: {_say(error)}") from error
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise ServerRefused(f"{self.url}{path} did not answer in JSON", status=200) from error


def _tensors(rank: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
    (place, *_) = rank.get("parallelism_info") or [{}]  # a draft model's would come behind
    return int(place.get("tp_rank") or 0), dict(rank.get("checksums") or {})


class _Frames:
    """The bytes of one response in, its chunks out."""

    def __init__(self, on_chunk: OnChunk) -> None:
        self.seen = 0  # tokens
        self.ended = False
        self._decoder = FrameDecoder()
        self._on_chunk = on_chunk

    def feed(self, data: bytes) -> bool:
        """Returns whether the response has ended."""
        for chunk in _together(self._decoder.feed(data), self.seen):
            self.seen += len(chunk.ids)
            self._on_chunk(chunk)
            if chunk.end is not None:
                self.ended = True
                return True
        return False


class _NoFrame(Exception):
    """What came is not what SGLang sends."""


class _ErrorFrame(Exception):
    """The server's own error, in a stream that had begun with status 200."""

    def __init__(self, message: object, status: object) -> None:
        super().__init__(message)
        self.status = status if isinstance(status, int) else 500


def _together(payloads: Sequence[bytes], seen: int) -> list[Chunk]:
    """Frames that arrived together, as one chunk per policy version.

    What comes after costs the same for one token as for many. `seen` tokens came before.
    """
    chunks: list[Chunk] = []
    ids: list[int] = []
    logprobs: list[float] = []
    top: list[list[tuple[float, int]]] = []
    version, num_cached = "", 0
    try:
        for payload in payloads:
            if payload == b"[DONE]":
                break
            frame = _frame(payload)
            meta = frame["meta_info"]
            if ids and meta["weight_version"] != version:
                chunks.append(Chunk(ids, logprobs, version, None, (), num_cached, top_logprobs=top))
                ids, logprobs, top = [], [], []
            version, num_cached = meta["weight_version"], meta.get("cached_tokens") or 0
            # Increments with `--incremental-streaming-output`, the whole response so far
            # without: counting from the end reads both.
            if num_new := meta["completion_tokens"] - seen:
                seen += num_new
                new_ids = frame["output_ids"][-num_new:]
                new_logprobs = meta["output_token_logprobs"][-num_new:]
                if not len(new_ids) == len(new_logprobs) == num_new:
                    raise _NoFrame(f"{num_new} new tokens, {len(new_ids)} of them in it")
                ids += new_ids
                logprobs += [entry[0] for entry in new_logprobs]
                if "output_top_logprobs" in meta:
                    new_top = meta["output_top_logprobs"][-num_new:]
                    top += [[(entry[0], entry[1]) for entry in place] for place in new_top]
            if meta["finish_reason"] is not None:
                chunks.append(_last_chunk(ids, logprobs, top, meta))
                return chunks
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _NoFrame(f"{type(error).__name__}: {error}") from error
    if ids:
        chunks.append(Chunk(ids, logprobs, version, None, (), num_cached, top_logprobs=top))
    return chunks


def _frame(payload: bytes) -> Any:
    frame = orjson.loads(payload)
    if "error" in frame:
        said = frame["error"] if isinstance(frame["error"], dict) else {"message": frame["error"]}
        # 0.5.23 streams even a bad request with status 200, and tells the true one here.
        raise _ErrorFrame(said.get("message", said), said.get("code"))
    return frame


def _last_chunk(
    ids: list[int], logprobs: list[float], top: list[list[tuple[float, int]]], meta: Any
) -> Chunk:
    finish = meta["finish_reason"]
    kind = finish["type"]
    status = finish.get("status_code")
    if isinstance(status, int) and 400 <= status < 500:  # an abort that was the request's fault
        raise _ErrorFrame(finish.get("message"), status)
    return Chunk(
        ids,
        logprobs,
        meta["weight_version"],
        end=TurnEnd(kind) if kind in ("stop", "length") else TurnEnd.ABORT,
        versions=tuple(
            VersionSpan(span["version"], span["start"], span["end"])
            for span in meta.get("weight_versions") or ()
        ),
        cached_tokens=meta.get("cached_tokens") or 0,
        num_retractions=meta.get("num_retractions") or 0,
        error=finish.get("message"),
        top_logprobs=top,
    )


def _refusal(where: str, status: int, body: bytes) -> ServerRefused:
    try:
        message = orjson.loads(body)["error"]["message"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message = body[:500].decode(errors="replace") or responses.get(status, "no reason given")
    return ServerRefused(f"{where}: {status}: {message}", status=status)


def _say(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
