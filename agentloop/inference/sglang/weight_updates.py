"""Loading new weights into a server while it serves, from disk or in a process group.

    pause ──> load from a folder, or receive bucket after bucket ──> checksum ──> continue
    release_memory ──> ... ──> memory for weights ──> load from a folder ──> for the cache ──> go on

Source of the protocol: SGLang's /pause_generation, /update_weights_from_disk, /weights_checker,
/release_memory_occupation, /resume_memory_occupation and the endpoints of its update groups
(0.5.23).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass

import anyio

from agentloop.errors import ServerError, ServerRefused
from agentloop.inference.sglang.control import ControlClient, parsing
from agentloop.plain_json import JsonObject

# Settings of a server that make its tensors differ from those of the model.
_UNUSUAL = ("quantization", "enable_dp_attention", "enable_fp32_lm_head", "cpu_offload_gb")
_UNUSUAL_ABOVE_1 = ("attn_cp_size", "dcp_size")

_UNDO_S = 10.0
_WEIGHTS, _KV_CACHE = "weights", "kv_cache"  # SGLang's tags of memory


@dataclass(frozen=True, slots=True)
class WeightsGroup:
    """A process group for weight sync; its rank 0, the sender, is at `address`."""

    name: str
    address: str
    port: int
    backend: str
    world_size: int


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
        ranks: Each process's tensor-parallel rank, and its checksums by the server's tensor names.
    """

    whole: str
    ranks: list[tuple[int, dict[str, str]]]


class WeightUpdates(ABC):
    """The part of a server's client that updates its weights."""

    def __init__(self, url: str, control: ControlClient) -> None:
        self.url = url
        self._control = control
        self._is_loading = False  # or loading has failed: its weights are unknown
        self._released = set[str]()  # tags of memory that it does not have

    @abstractmethod
    def break_streams(self, reason: str) -> None:
        """Break all streams, because the server is dead or its results are not wanted."""

    @property
    def has_released(self) -> bool:
        """True if it has given memory back, and serves nothing until it loads weights."""
        return bool(self._released)

    def process_ended(self) -> None:
        """Record that the server's process is gone: another one has all of its memory."""
        self._released.clear()

    async def release_memory(self, *, timeout_s: float) -> None:
        """Give back the memory of KV cache and weights, until `update_weights`.

        Running requests are aborted, and later ones wait in the server. Without the option
        --enable-memory-saver, SGLang keeps the memory, but the rest is the same.

        SGLang's scheduler ends with an assertion if it is not idle, and with a KeyError if memory
        is asked for that was not released. So all requests are aborted first, also those that wait
        for a grammar; the second pause takes what is left from the scheduler, and stops it.

        Raises:
            ServerUnavailable, ServerRefused: It failed; the memory may be released or not.
        """
        if self._released:
            return
        for mode in ("abort", "retract"):
            await self._control.post("/pause_generation", {"mode": mode}, timeout_s=timeout_s)
        self._released = {_KV_CACHE, _WEIGHTS}
        body = {"tags": sorted(self._released)}
        await self._control.post("/release_memory_occupation", body, timeout_s=timeout_s)

    async def _take_back(self, tag: str, timeout_s: float) -> None:
        """Take memory back that was released, if it was."""
        if tag in self._released:
            self._released.discard(tag)  # first: SGLang ends if it is asked for the same twice
            body = {"tags": [tag]}
            await self._control.post("/resume_memory_occupation", body, timeout_s=timeout_s)

    async def update_weights(self, folder: str, version: str, *, timeout_s: float) -> Checksum:
        """Load the weights in `folder`, which the server must be able to read, while requests run.

        Running requests are retracted, and recomputed from their ids under the new weights. SGLang
        finds entries of the prefix cache by ids alone, so the cache is flushed: otherwise a new
        prompt would use KV of the old weights.

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
        try:
            await self._pause(timeout_s)
            self._is_loading = True
            await self._take_back(_WEIGHTS, timeout_s)
            body = {"model_path": folder, "weight_version": version, "flush_cache": True}
            await self._control.post("/update_weights_from_disk", body, timeout_s=timeout_s)
            checksum = await self._checksum(timeout_s)
            await self._take_back(_KV_CACHE, timeout_s)
        except BaseException:  # it may be paused even if the request failed
            # no deadline: each request has one, ten seconds
            with anyio.CancelScope(shield=True), suppress(ServerError):
                if _WEIGHTS not in self._released:  # otherwise it cannot serve: it stays paused
                    await self._take_back(_KV_CACHE, _UNDO_S)
                    await self._resume()
            raise
        self._is_loading = False
        await self._resume()
        return checksum

    async def weights_info(self) -> WeightsInfo:
        """Return how the server stores its weights.

        Raises:
            ServerUnavailable, ServerRefused: It did not answer as expected.
        """
        return self._weights_info(await self._control.get("/server_info"))

    def _weights_info(self, info: JsonObject) -> WeightsInfo:
        with parsing(self.url):
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

    async def group_member(self) -> WeightsInfo:
        """Return how the server would take part in a group.

        Raises:
            ServerUnavailable: It did not answer.
            ServerRefused: It cannot be a member.
        """
        info = await self._control.get("/server_info")
        with parsing(self.url):
            num_parallel = max(int(info.get(name) or 1) for name in ("dp_size", "pp_size"))
        if num_parallel > 1:
            raise ServerRefused(
                f"{self.url}: data- and pipeline-parallel ranks of SGLang load weights only "
                "from disk: set weights.transport to disk",
                status=200,
            )
        return self._weights_info(info)

    async def join_group(self, group: WeightsGroup, rank: int, *, timeout_s: float) -> None:
        """Pause the server and add its ranks to the group, from `rank` on.

        Returns when all members have joined. `finish_group` or `leave_group` must follow, even on
        failure.

        Raises:
            ServerUnavailable, ServerRefused: It failed.
        """
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.world_size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._pause(timeout_s)
        with suppress(ServerRefused):  # an update left over from an earlier group; usually none
            await self._control.post("/end_weight_update", {}, timeout_s=timeout_s)
        await self._control.post("/init_weights_update_group", body, timeout_s=timeout_s)
        await self._control.post("/begin_weight_update", {}, timeout_s=timeout_s)

    async def receive(
        self, group: WeightsGroup, bucket: Bucket, version: str | None, *, timeout_s: float
    ) -> None:
        """Load a bucket that is being sent.

        `version` is passed with the last one, which flushes the cache: see `update_weights`.

        Raises:
            ServerUnavailable, ServerRefused: It failed; the server's weights are unknown.
        """
        body = {
            "names": bucket.names,
            "dtypes": bucket.dtypes,
            "shapes": bucket.shapes,
            "group_name": group.name,
            "load_format": "flattened_bucket",
            "flush_cache": version is not None,
            "weight_version": version,
        }
        self._is_loading = True
        await self._control.post("/update_weights_from_distributed", body, timeout_s=timeout_s)

    async def finish_group(self, group: WeightsGroup, *, timeout_s: float) -> Checksum:
        """Leave the group after the last bucket, and resume serving.

        Returns:
            The checksum of the new weights; equal weights have equal ones (SGLang's own).

        Raises:
            ServerUnavailable, ServerRefused: It failed; `leave_group` must follow.
        """
        await self._control.post("/end_weight_update", {}, timeout_s=timeout_s)
        checksum = await self._checksum(timeout_s)
        self._is_loading = False
        body = {"group_name": group.name}
        await self._control.post("/destroy_weights_update_group", body, timeout_s=timeout_s)
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
                await self._control.post(path, body)
        await self._resume()

    async def _pause(self, timeout_s: float) -> None:
        body = {"mode": "retract"}
        await self._control.post("/pause_generation", body, timeout_s=timeout_s)

    async def _resume(self) -> None:
        if self._is_loading:
            self.break_streams("its weight update is incomplete")
        await self._control.post("/continue_generation", {})

    async def _checksum(self, timeout_s: float) -> Checksum:
        answer = await self._control.post(
            "/weights_checker", {"action": "checksum"}, timeout_s=timeout_s
        )
        with parsing(self.url):
            ranks = answer["ranks"]
            checksum = " ".join(sorted(str(rank["per_gpu_checksum"]) for rank in ranks))
            return Checksum(checksum, [_rank_checksums(rank) for rank in ranks])


def _rank_checksums(rank: JsonObject) -> tuple[int, dict[str, str]]:
    (parallelism, *_) = rank.get("parallelism_info") or [{}]  # a draft model's would follow
    return int(parallelism.get("tp_rank") or 0), dict(rank.get("checksums") or {})
