"""The settings of a run on a Ray cluster."""

from __future__ import annotations

import pydantic


class ClusterSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of a run whose processes are placed on the nodes of a Ray cluster.

    Their number is that of a run on one machine: `server.count` servers of
    `server.tp_size * server.dp_size` GPUs, and `ranks.nodes` times `ranks.nproc_per_node` ranks.
    """

    address: str = pydantic.Field(
        "",
        description="Ray cluster to run on: auto, or HOST:PORT. This machine must be one of its "
        "nodes. By default, none: everything runs on this machine.",
    )
    nodes: int = pydantic.Field(
        1, ge=1, description="Number of nodes that the run waits for before it places anything."
    )
    colocated: bool = pydantic.Field(
        False,
        description="Let servers and ranks share GPUs: limit the servers' memory in "
        "server.extra_args. By default, each GPU belongs to one of them.",
    )
    runtimes: int = pydantic.Field(
        0,
        ge=0,
        description="Number of runtimes that generate the rollouts, each on a node with its share "
        "of the server.count servers and a sandbox of its own, or sandbox.hosts. 0: the trainer "
        "generates them.",
    )
    sandbox_hosts: int = pydantic.Field(
        1,
        ge=0,
        description="Number of sandboxes on the cluster, each with sandbox.workers workers, if the "
        "trainer generates the rollouts. 0: programs run beside the trainer, or on sandbox.hosts.",
    )
    wait_s: float = pydantic.Field(
        300.0,
        gt=0,
        description="Time that the run waits for nodes, and a process for the resources that it "
        "was placed on.",
    )
