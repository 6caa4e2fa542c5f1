"""Client of one SGLang server, over SGLang's own protocol (0.5.23).

Source of the protocol: SGLang's `/generate`, `/abort_request`, `/v1/models`, `/server_info`,
`/model_info` and `/v1/loads`; for weight sync `/pause_generation`, `/update_weights_from_disk` and
the endpoints of its update groups. Token ids are sent and received; the server's text is not used.
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
from agentloop.inference.ranks import LoadReport
from agentloop.inference.sglang.http_stream import PostStream, StreamBroken
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
_MAX_ANSWER_BYTES = 16 << 20  # the answer of /server_info is long
_CONTROL_TIMEOUT = aiohttp.ClientTimeout(total=10)
# Settings of a server that make its tensors differ from those of the model.
_UNUSUAL = ("quantization", "enable_dp_attention", "enable_fp32_lm_head", "cpu_offload_gb")
_UNUSUAL_ABOVE_1 = ("attn_cp_size", "dcp_size")


class Sampling(pydantic.BaseModel):
    """Sampling parameters. The defaults sample from the policy unchanged, as in training."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    temperature: float = pydantic.Field(
        1.0, ge=0, le=100, description="Sampling temperature; 0: greedy."
    )
    top_p: float = pydantic.Field(
        1.0, gt=0, le=1, description="Probability mass of nucleus sampling."
    )
    # A number beyond 32 bits would crash the server.
    top_k: int = pydantic.Field(
        -1,
        ge=-1,
        le=1 << 30,
        description="Number of most likely tokens to sample from; -1 or 0: all.",
    )
    min_p: float = pydantic.Field(
        0.0, ge=0, le=1, description="Minimum probability relative to the most likely token."
    )
    seed: int | None = pydantic.Field(
        None, ge=0, lt=1 << 63, description="Random seed, if the server supports it."
    )

    def of_group(self, name: str) -> Sampling:
        """Return the parameters for a group, with a seed derived from its name if there is one.

        Otherwise a repeated task would get identical rollouts.
        """
        if self.seed is None:
            return self
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        return self.model_copy(update={"seed": int.from_bytes(digest[:8]) >> 1})

    def of_sibling(self, index: int) -> Sampling:
        """Return the parameters for the `index`-th sibling, with a seed of its own if there is one.

        Otherwise all siblings would be identical.
        """
        if self.seed is None or not index:
            return self
        return self.model_copy(update={"seed": (self.seed + index) % (1 << 63)})

    def to_sglang(self, *, max_new_tokens: int, stop_ids: Sequence[int]) -> dict[str, Any]:
        params: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k or -1,  # SGLang refuses 0
            "min_p": self.min_p,
            "stop_token_ids": list(stop_ids),
            "skip_special_tokens": False,
        }
        if not stop_ids:
            params["ignore_eos"] = True  # otherwise the model's own end token would still apply
        if self.seed is not None:
            params["sampling_seed"] = self.seed
        return params


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one or more frames that arrived together; the last chunk has `end` set."""

    ids: list[int]
    logprobs: list[float]
    version: str
    end: TurnEnd | None = None
    versions: tuple[VersionSpan, ...] = ()  # of the whole response; in the last chunk
    cached_tokens: int = 0  # of the prompt
    num_retractions: int = 0  # times the server retracted it from its batch; in the last chunk
    error: str | None = None  # the server's message, with TurnEnd.ABORT
    top_logprobs: Sequence[list[tuple[float, int]]] = ()  # for each id, if requested


OnChunk = Callable[[Chunk], None]

Pause = Literal["retract", "in_place"]
"""How running requests are treated in a weight sync. retract: they are recomputed from their ids,
and the prefix cache is flushed. in_place: they keep the KV of the old weights, and so does the
prefix cache, but new requests do not find its entries (see `SGLangServer.update_weights`)."""


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The properties of a server. `context_length` includes prompt and response.

    The server has `dp_size` data-parallel ranks, each with a KV cache of `max_total_num_tokens` and
    up to `max_running_requests` sequences in its batch.
    """

    model_path: str
    context_length: int
    max_total_num_tokens: int
    version: str
    dp_size: int = 1
    max_running_requests: int | None = None


@dataclass(frozen=True, slots=True)
class WeightsGroup:
    """A process group for weight sync; its rank 0, the sender, is at `address`."""

    name: str
    address: str
    port: int
    backend: str
    world_size: int
    pause: Pause = "retract"


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """The way a server stores its weights.

    Attributes:
        num_ranks: Tensor-parallel ranks; each is a member of a group.
        device: "cpu", "cuda", ...
        dtype: The configured one; may be "auto".
        sglang: The version of SGLang.
        unusual: Settings that make its tensors differ from the model's; usually empty.
    """

    num_ranks: int
    device: str
    dtype: str
    sglang: str
    unusual: str = ""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that are sent in one piece, stored end to end."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


@dataclass(frozen=True, slots=True)
class Checksum:
    """Checksums of a server's weights.

    Attributes:
        whole: Checksum of all weights.
        ranks: For each process its tensor-parallel rank and the checksums by the server's tensor
            names.
    """

    whole: str
    ranks: list[tuple[int, dict[str, str]]]


class FrameDecoder:
    """Decodes the bytes of a server-sent event stream into the payloads of `data:`.

    It takes time linear in the bytes; an event longer than 64 MiB is refused.
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
    """Open a session without aiohttp's limit of 100 connections, because streams last for
    minutes."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, json_serialize=_dumps) as session:
        yield session


class SGLangServer:
    """A client of one server."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        connect_timeout_s: float = 5.0,
        stall_timeout_s: float = 120.0,
    ) -> None:
        """Create a client; `stall_timeout_s` bounds the silence between frames, not the whole
        stream."""
        self.url = url.rstrip("/")
        self._session = session
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._streams: set[PostStream] = set()
        self._cache_key: str | None = None  # namespace of new requests in the prefix cache
        self._is_loading = False  # or loading has failed: its weights are unknown

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
        """Stream the continuation of `ids`; return after the chunk that has `end` set.

        Cancelling it closes the connection, which frees the request on the server.

        Args:
            on_chunk: Called as tokens arrive, in the event loop's callback; it must not block.
            rank: The data-parallel rank that serves it; None: the server chooses.
            num_top_logprobs: Number of most likely tokens reported for each token.

        Raises:
            ServerRefused: The server answered with an error.
            ServerUnavailable: It could not be reached, or the stream broke before its last frame.
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
            after = f", after {frames.num_tokens} tokens" if frames.num_tokens else ""
            raise ServerUnavailable(f"{self.url}: {error}{after}") from error
        except _InvalidFrame as error:
            raise ServerUnavailable(f"{self.url}: invalid frame: {error}") from error
        except _ErrorFrame as error:
            raise ServerRefused(f"{self.url}: {error}", status=error.status) from error
        finally:
            self._streams.discard(stream)
        if stream.status != 200:
            raise _refusal(self.url, stream.status, stream.error_body)
        if not frames.ended:
            raise ServerUnavailable(
                f"{self.url}: the stream ended early, after {frames.num_tokens} tokens"
            )

    def close_stalled(self) -> None:
        """Break streams that have been silent for too long; call it periodically."""
        limit = time.monotonic() - self._stall_timeout_s
        for stream in self._streams:
            if stream.heard_s < limit:
                stream.break_off(f"silent for {self._stall_timeout_s:g} s")

    def break_streams(self, why: str) -> None:
        """Break all streams, because the server is dead or its results are not wanted."""
        for stream in self._streams:
            stream.break_off(why)

    async def loads(self) -> list[LoadReport]:
        """Return the current load of each rank, as the server reports it (SGLang: GET /v1/loads).

        Raises:
            ServerUnavailable, ServerRefused: It did not report.
        """
        answer = await self._control("GET", "/v1/loads")
        try:
            return [
                LoadReport(
                    num_used=int(rank["num_used_tokens"]),
                    num_running=int(rank["num_running_reqs"]),
                    num_waiting=int(rank["num_waiting_reqs"]),
                )
                for rank in sorted(answer["loads"], key=lambda rank: int(rank["dp_rank"]))
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise ServerRefused(f"{self.url}/v1/loads: unexpected answer", status=200) from error

    async def abort(self, rid: str) -> None:
        """Ask the server to abort a request, without guarantee; takes ten seconds at most."""
        await self._control("POST", "/abort_request", {"rid": rid})

    async def weight_version(self) -> str:
        """Return the version of the server's weights; also serves as a probe that does not
        generate.

        Raises:
            ServerUnavailable, ServerRefused: It would not take a request.
        """
        # Not /server_info, which keeps reporting the version at the server's start.
        answer = await self._control("GET", "/model_info")
        try:
            return str(answer.get("weight_version") or "default")
        except AttributeError as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error

    async def info(self) -> ServerInfo:
        """Return the server's properties.

        Raises:
            ServerUnavailable: It did not answer.
            ServerRefused: It is not an SGLang server.
        """
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
                raise ValueError("no capacity")
            return found
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error

    async def update_weights(
        self, folder: str, version: str, *, timeout_s: float, pause: Pause = "retract"
    ) -> Checksum:
        """Load the weights in `folder`, which the server must be able to read, while requests run.

        SGLang finds entries of the prefix cache by ids alone, and refuses to flush while requests
        run. Without flushing, a new prompt would use KV of the old weights: for a system prompt,
        over any number of versions. So with `pause` in_place, later requests have a key of their
        own and find only each other's entries; the others are evicted as the oldest. in_place also
        needs SGLang to run without overlapped scheduling: a retraction waits for tokens in
        progress, but this pause leaves one per request in flight, which would be reported with the
        new version.

        The checksum is computed during the pause. SGLang computes it between two batches, so that
        afterwards it would stall the streams for as long. If anything fails, the streams are broken
        before the server continues, so that every received token is of known weights; the turns
        move to other servers.

        Returns:
            The checksum of the new weights; equal weights have equal ones (SGLang's own).

        Raises:
            ServerUnavailable, ServerRefused: It failed or timed out; the server's weights are
                unknown.
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
        except BaseException:  # it may be paused even if the request failed
            # no deadline: the request has one, ten seconds
            with anyio.CancelScope(shield=True), suppress(ServerError):  # in ten seconds at most
                await self._resume()
            raise
        self._mark_loaded(pause)
        await self._resume()
        return checksum

    async def weights_info(self) -> WeightsInfo:
        """Return how the server stores its weights.

        Raises:
            ServerUnavailable, ServerRefused: It did not answer as expected.
        """
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
        """Return how the server would take part in a group.

        Raises:
            ServerUnavailable: It did not answer.
            ServerRefused: It cannot be a member.
        """
        info = await self._control("GET", "/server_info")
        try:
            if max(int(info.get(name) or 1) for name in ("dp_size", "pp_size")) > 1:
                raise ServerRefused(
                    f"{self.url}: data- and pipeline-parallel ranks of SGLang load weights only "
                    "from disk: set weights.by to disk",
                    status=200,
                )
        except (AttributeError, TypeError, ValueError) as error:
            raise ServerRefused(f"{self.url} is not an SGLang server", status=200) from error
        if pause == "in_place":
            self._check_in_place(info)
        return self._weights_info(info)

    async def join_group(self, group: WeightsGroup, rank: int, *, timeout_s: float) -> None:
        """Pause the server and add its ranks to the group, from `rank` on.

        Returns when all members have joined. `finish_group` or `leave_group` must follow, even on
        failure.

        Raises:
            ServerUnavailable, ServerRefused: It failed.
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
        with suppress(ServerRefused):  # an update left over from an earlier group; usually none
            await self._control("POST", "/end_weight_update", {}, timeout)
        await self._control("POST", "/init_weights_update_group", body, timeout)
        await self._control("POST", "/begin_weight_update", {}, timeout)

    async def receive(
        self, group: WeightsGroup, bucket: Bucket, version: str | None, *, timeout_s: float
    ) -> None:
        """Load a bucket that is being sent.

        `version` is passed with the last one, which flushes the cache unless the pause is in_place:
        see `update_weights`.

        Raises:
            ServerUnavailable, ServerRefused: It failed; the server's weights are unknown.
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
        """Leave the group after the last bucket, and resume serving.

        Returns:
            The checksum of the new weights; equal weights have equal ones (SGLang's own).

        Raises:
            ServerUnavailable, ServerRefused: It failed; `leave_group` must follow.
        """
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        await self._control("POST", "/end_weight_update", {}, timeout)
        checksum = await self._checksum(timeout)
        self._mark_loaded(group.pause)
        body = {"group_name": group.name}
        await self._control("POST", "/destroy_weights_update_group", body, timeout)
        await self._resume()
        return checksum

    async def leave_group(self, group: WeightsGroup) -> None:
        """Leave a failed group at any point and resume serving.

        Running requests are broken if the server may have some of the new weights.

        Raises:
            ServerUnavailable, ServerRefused: It does not answer: it is gone, or hangs.
        """
        for path, body in (
            ("/end_weight_update", {}),
            ("/destroy_weights_update_group", {"group_name": group.name}),
        ):
            with suppress(ServerRefused):  # nothing to end
                await self._control("POST", path, body)
        await self._resume()

    def _check_in_place(self, info: Any) -> None:
        if not info.get("disable_overlap_schedule"):
            raise ServerRefused(
                f"{self.url}: weights.pause = in_place would give tokens the wrong version while "
                "SGLang overlaps batches: start it with --disable-overlap-schedule "
                "(server.extra_args), or set weights.pause to retract",
                status=200,
            )

    def _mark_loaded(self, pause: Pause) -> None:
        self._is_loading = False
        if pause == "in_place":  # a random key: another run may use the same version
            self._cache_key = uuid.uuid4().hex

    async def _resume(self) -> None:
        if self._is_loading:
            self.break_streams("its weight update is incomplete")
        await self._control("POST", "/continue_generation", {})

    async def _checksum(self, timeout: aiohttp.ClientTimeout) -> Checksum:
        answer = await self._control("POST", "/weights_checker", {"action": "checksum"}, timeout)
        try:
            ranks = answer["ranks"]
            whole = " ".join(sorted(str(rank["per_gpu_checksum"]) for rank in ranks))
            return Checksum(whole, [_rank_checksums(rank) for rank in ranks])
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
                        raise ServerRefused(
                            f"{self.url}{path}: an answer of more than {_MAX_ANSWER_BYTES} bytes",
                            status=200,
                        )
                if response.status != 200:
                    raise _refusal(self.url + path, response.status, content)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ServerUnavailable(f"{self.url}: {_describe(error)}") from error
        try:
            return orjson.loads(content) if content else None
        except orjson.JSONDecodeError as error:
            raise ServerRefused(f"{self.url}{path}: the answer is not JSON", status=200) from error


def _rank_checksums(rank: Mapping[str, Any]) -> tuple[int, dict[str, str]]:
    (place, *_) = rank.get("parallelism_info") or [{}]  # a draft model's would follow
    return int(place.get("tp_rank") or 0), dict(rank.get("checksums") or {})


class _Frames:
    """Converts the bytes of one response into chunks."""

    def __init__(self, on_chunk: OnChunk) -> None:
        self.num_tokens = 0
        self.ended = False
        self._decoder = FrameDecoder()
        self._on_chunk = on_chunk

    def feed(self, data: bytes) -> bool:
        """Add bytes; return whether the response has ended."""
        for chunk in _merge_frames(self._decoder.feed(data), self.num_tokens):
            self.num_tokens += len(chunk.ids)
            self._on_chunk(chunk)
            if chunk.end is not None:
                self.ended = True
                return True
        return False


class _InvalidFrame(Exception):
    """A frame does not have SGLang's format."""


class _ErrorFrame(Exception):
    """An error of the server, in a stream that began with status 200."""

    def __init__(self, message: object, status: object) -> None:
        super().__init__(message)
        self.status = status if isinstance(status, int) else 500


def _merge_frames(payloads: Sequence[bytes], num_tokens: int) -> list[Chunk]:
    """Merge frames that arrived together into one chunk per policy version.

    Later stages cost the same for one token as for many. `num_tokens` tokens came before.
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
            # With `--incremental-streaming-output` a frame has only new ids, otherwise all so far:
            # counting from the end works for both.
            if num_new := meta["completion_tokens"] - num_tokens:
                num_tokens += num_new
                new_ids = frame["output_ids"][-num_new:]
                new_logprobs = meta["output_token_logprobs"][-num_new:]
                if not len(new_ids) == len(new_logprobs) == num_new:
                    raise _InvalidFrame(f"{num_new} new tokens announced, {len(new_ids)} received")
                ids += new_ids
                logprobs += [entry[0] for entry in new_logprobs]
                if "output_top_logprobs" in meta:
                    new_top = meta["output_top_logprobs"][-num_new:]
                    top += [[(entry[0], entry[1]) for entry in place] for place in new_top]
            if meta["finish_reason"] is not None:
                chunks.append(_last_chunk(ids, logprobs, top, meta))
                return chunks
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise _InvalidFrame(f"{type(error).__name__}: {error}") from error
    if ids:
        chunks.append(Chunk(ids, logprobs, version, None, (), num_cached, top_logprobs=top))
    return chunks


def _frame(payload: bytes) -> Any:
    frame = orjson.loads(payload)
    if "error" in frame:
        said = frame["error"] if isinstance(frame["error"], dict) else {"message": frame["error"]}
        # SGLang 0.5.23 answers a bad request with status 200 and sends the true status here.
        raise _ErrorFrame(said.get("message", said), said.get("code"))
    return frame


def _last_chunk(
    ids: list[int], logprobs: list[float], top: list[list[tuple[float, int]]], meta: Any
) -> Chunk:
    finish = meta["finish_reason"]
    kind = finish["type"]
    status = finish.get("status_code")
    if isinstance(status, int) and 400 <= status < 500:  # aborted because the request is invalid
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
        message = body[:500].decode(errors="replace") or responses.get(status, "no message")
    return ServerRefused(f"{where}: {status}: {message}", status=status)


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _dumps(value: Any) -> str:
    return orjson.dumps(value).decode()
