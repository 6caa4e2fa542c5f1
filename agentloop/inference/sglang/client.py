"""Client of one SGLang server, over SGLang's own protocol (0.5.23).

    SGLangServer ──generate──> http_stream.py ──bytes──> frames.py ──> chunks
         ├── loads, info, weight_version ──> control.py
         └── weight_updates.py ──> control.py

Source of the protocol: SGLang's `/generate`, `/v1/models`, `/server_info`,
`/model_info` and `/v1/loads`. Token ids are sent and received.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from agentloop.errors import ServerRefused, ServerUnavailable
from agentloop.inference.ranks import LoadReport
from agentloop.inference.sglang.control import ControlClient, parsing, refusal
from agentloop.inference.sglang.frames import ChunkReader, ErrorFrame, InvalidFrame, OnChunk
from agentloop.inference.sglang.http_stream import PostStream, StreamBroken
from agentloop.inference.sglang.weight_updates import WeightUpdates


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The properties of a server. `context_length` includes prompt and response.

    The server has `dp_size` data-parallel ranks, each with a KV cache of `max_total_num_tokens`,
    one of `num_host_tokens` in the host's memory (SGLang's hierarchical cache; 0: none), and up to
    `max_running_requests` sequences in its batch.
    """

    model_path: str
    context_length: int
    max_total_num_tokens: int
    version: str
    dp_size: int = 1
    max_running_requests: int | None = None
    num_host_tokens: int = 0


class SGLangServer(WeightUpdates):
    """A client of one server: token streams, its state, and weight updates."""

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
        url = url.rstrip("/")
        super().__init__(url, ControlClient(url, session))
        self._headers = dict(session.headers)  # the key, if the servers require one
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._streams: set[PostStream] = set()

    async def generate(
        self,
        ids: Sequence[int],
        params: dict[str, object],
        *,
        rid: str,
        on_chunk: OnChunk,
        rank: int | None = None,
        num_top_logprobs: int = 0,
        prompt_logprobs: bool = False,
        kept_ids: bool = False,
        experts_from: int | None = None,
    ) -> None:
        """Stream the continuation of `ids`; return after the chunk that has `end` set.

        Cancelling it closes the connection, which frees the request on the server.

        Args:
            on_chunk: Called as tokens arrive, in the event loop's callback; it must not block.
            rank: The data-parallel rank that serves it; None: the server chooses.
            num_top_logprobs: Number of most likely tokens reported for each token.
            prompt_logprobs: Whether the first chunk has the log-probabilities of `ids` as well.
            kept_ids: Whether chunks have the ids that could be sampled for each token, and the
                log-probabilities of the distribution over them.
            experts_from: The last chunk has the experts of all tokens but these many first ones,
                and the last. Needs `--enable-return-routed-experts`. None: it has none.

        Raises:
            ServerRefused: The server answered with an error.
            ServerUnavailable: It could not be reached, or the stream broke before its last frame.
        """
        body = {
            "input_ids": ids,
            "sampling_params": params,
            "stream": True,
            "return_logprob": not kept_ids or num_top_logprobs > 0 or prompt_logprobs,
            "rid": rid,
        }
        if kept_ids:
            body["return_sampling_mask"] = True
        if experts_from is not None:
            body |= {"return_routed_experts": True, "routed_experts_start_len": experts_from}
        if num_top_logprobs:
            body["top_logprobs_num"] = num_top_logprobs
        if prompt_logprobs:
            body["logprob_start_len"] = 0
        if rank is not None:
            body["routed_dp_rank"] = rank
        frames = ChunkReader(on_chunk, prompt_logprobs=prompt_logprobs, experts_from=experts_from)
        stream = PostStream(
            self.url + "/generate", orjson.dumps(body), frames.feed, headers=self._headers
        )
        self._streams.add(stream)
        try:
            await stream.run(connect_timeout_s=self._connect_timeout_s)
        except StreamBroken as error:
            after = f", after {frames.num_tokens} tokens" if frames.num_tokens else ""
            raise ServerUnavailable(f"{self.url}: {error}{after}") from error
        except InvalidFrame as error:
            raise ServerUnavailable(f"{self.url}: invalid frame: {error}") from error
        except ErrorFrame as error:
            raise ServerRefused(f"{self.url}: {error}", status=error.status) from error
        finally:
            self._streams.discard(stream)
        if stream.status != 200:
            raise refusal(self.url, stream.status, stream.error_body)
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

    def break_streams(self, reason: str) -> None:
        """Break all streams, because the server is dead or its results are not wanted."""
        for stream in self._streams:
            stream.break_off(reason)

    async def loads(self) -> list[LoadReport]:
        """Return the current load of each rank, as the server reports it (SGLang: GET /v1/loads).

        Raises:
            ServerUnavailable, ServerRefused: It did not report.
        """
        answer = await self._control.get("/v1/loads")
        with parsing(self.url):
            return [
                LoadReport(
                    num_used=int(rank["num_used_tokens"]),
                    num_running=int(rank["num_running_reqs"]),
                    num_waiting=int(rank["num_waiting_reqs"]),
                )
                for rank in sorted(answer["loads"], key=lambda rank: int(rank["dp_rank"]))
            ]

    async def weight_version(self) -> str:
        """Return the version of the server's weights; also serves as a probe that does not
        generate.

        Raises:
            ServerUnavailable, ServerRefused: It would not take a request.
        """
        # Not /server_info, which keeps reporting the version at the server's start.
        answer = await self._control.get("/model_info")
        with parsing(self.url):
            return str(answer.get("weight_version") or "default")

    async def info(self) -> ServerInfo:
        """Return the server's properties.

        Raises:
            ServerUnavailable: It did not answer.
            ServerRefused: It is not an SGLang server.
        """
        info = await self._control.get("/server_info")
        models = await self._control.get("/v1/models")
        with parsing(self.url):
            (rank, *_) = info.get("internal_states") or [{}]
            max_running = rank.get("effective_max_running_requests_per_dp")
            properties = ServerInfo(
                model_path=info["model_path"],
                context_length=int(models["data"][0]["max_model_len"]),
                max_total_num_tokens=int(info["max_total_num_tokens"]),
                version=info["version"],
                dp_size=int(info.get("dp_size") or 1),
                max_running_requests=None if max_running is None else int(max_running),
                num_host_tokens=_num_host_tokens(info, rank),
            )
            sizes = properties.context_length, properties.max_total_num_tokens, properties.dp_size
            if min(sizes) < 1:
                raise ValueError("no capacity")
            return properties


def _num_host_tokens(info: Mapping[str, Any], rank: Mapping[str, Any]) -> int:
    """Return the tokens that a rank's hierarchical cache holds in the host's memory.

    A size, in GB, goes before a ratio (mem_cache/pool_host/base.py). The bytes of a token follow
    from the GiB of the rank's KV cache; without them, nothing is assumed to be cached there.
    """
    if not info.get("enable_hierarchical_cache"):
        return 0
    if info.get("hicache_host_memory_mode") == "buffer_only":  # it passes through
        return 0
    num_tokens = int(info["max_total_num_tokens"])
    if not (size_gb := float(info.get("hicache_size") or 0)):
        return int(num_tokens * float(rank.get("hicache_ratio") or info.get("hicache_ratio") or 2))
    kv_gib = float((rank.get("memory_usage") or {}).get("kvcache") or math.inf)
    return int(num_tokens * size_gb * 1e9 / (kv_gib * 2**30))
