"""The settings of the weight sync."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic

from agentloop.inference.sglang.weight_updates import Pause

__all__ = ["WeightsSettings"]


class WeightsSettings(pydantic.BaseModel):
    """Settings of the weight sync from the learner to the servers."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    transport: Literal["disk", "group"] = pydantic.Field(
        "disk",
        description="Transport. disk: a folder that the learner writes and every server reads; "
        "group: a broadcast in a process group of the learner and the servers (gloo or NCCL).",
    )
    pause: Pause = pydantic.Field(
        "retract",
        description="Treatment of turns in progress. retract: recompute their KV cache, so that "
        "each token's log-probability is that of its version. in_place: continue at once with "
        "the KV cache of the old weights; the engine's log-probabilities are still those that "
        "tokens were sampled with, but no version of the weights reproduces them. New turns never "
        "use old KV. in_place needs server.extra_args = ['--disable-overlap-schedule'].",
    )
    folder: Path | None = pydantic.Field(
        None,
        description="With disk: folder for the newest weights while a run is active, in a "
        "subfolder for each run; none: the run's own folder. /dev/shm is in memory, for servers "
        "on this machine.",
    )
    timeout_s: float = pydantic.Field(
        300.0, gt=0, description="Time for a server to load new weights, or else it is stale."
    )
    verify: bool = pydantic.Field(
        True,
        description="Compare the checksum of each of a server's tensors with the learner's, if "
        "the expected one is known (docs/learner.md). false: only compare servers with each "
        "other, which proves nothing for a single server.",
    )
    address: str | None = pydantic.Field(
        None,
        description="With group: the learner's address as seen from all servers; none: 127.0.0.1, "
        "if all of them are on loopback.",
    )
    port: int = pydantic.Field(
        0, ge=0, le=65_535, description="With group: port of the rendezvous; 0: any free port."
    )
    backend: Literal["auto", "gloo", "nccl"] = pydantic.Field(
        "auto",
        description="With group: auto is nccl for a learner on GPUs, otherwise gloo. NCCL cannot "
        "be used if a server and the learner share a GPU.",
    )
    group_timeout_s: float = pydantic.Field(
        60.0,
        gt=0,
        description="With group: the group fails if a member keeps the others waiting for longer; "
        "must be below learner.collective_timeout_s.",
    )
