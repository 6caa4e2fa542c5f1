"""The settings of the weight sync."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pydantic


class WeightsSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of the weight sync from the learner to the servers."""

    transport: Literal["disk", "broadcast"] = pydantic.Field(
        "disk",
        description="How new weights reach the servers. disk: through a folder that the learner "
        "writes and every server reads; broadcast: in a process group of the learner and the "
        "servers, NCCL for a learner on GPUs (which must not share one with a server), otherwise "
        "gloo.",
    )
    folder: Path | None = pydantic.Field(
        None,
        description="With disk: folder for published weights, in which each run has a subfolder "
        "while it is active. By default, the run's own folder. /dev/shm keeps weights in memory, "
        "for servers on this machine.",
    )
    local_folder: Path | None = pydantic.Field(
        None,
        description="With cluster.runtimes: folder of each node, such as /dev/shm, for a copy of "
        "the published weights. From the shared folder a node then reads only what has changed, "
        "which is faster if many nodes share a slow network (docs/guides/cluster.md).",
    )
    timeout_s: float = pydantic.Field(
        300.0,
        gt=0,
        description="Time limit for a server to load new weights. A server that takes longer is "
        "stale, and gets no requests.",
    )
    verify: bool = pydantic.Field(
        True,
        description="Compare the checksum of each tensor of a server with the learner's, if the "
        "expected one is known (docs/learner.md). false: only compare servers with each other, "
        "which proves nothing for a single server.",
    )
    address: str | None = pydantic.Field(
        None,
        description="With broadcast: address of the learner as seen by all servers. By default, "
        "127.0.0.1, if all of them are on loopback.",
    )
