"""The processes that start the learner's ranks: commands and environments.

    processes   one process per rank, on this machine or on the nodes of a cluster
    torchrun    torchrun; on each other node the same command with another --node-rank must be
                started externally, by Slurm or by a person
    deepspeed   DeepSpeed's launcher; with a hostfile it starts the other nodes' ranks by pdsh

Rank 0 runs on this machine, since it receives requests over a unix socket. All other data of the
ranks (settings, batches, weights, checkpoints) is in the run's folder; with several nodes it must
be on a file system that all of them mount at the same path.
"""

from __future__ import annotations

import math
import os
import random
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import pydantic

from agentloop.errors import SettingsError
from agentloop.inference.cpu import has_accelerator

__all__ = ["RanksSettings", "Start", "free_port", "on_other_nodes", "starts"]

# Below Linux's ephemeral ports, so that no outgoing connection takes the port before rank 0 does.
_PORTS = range(20_000, 32_768)
_SOCKET_VARIABLE = "AGENTLOOP_LEARNER_SOCKET"


class RanksSettings(pydantic.BaseModel):
    """Settings of the learner's processes."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    nproc_per_node: int = pydantic.Field(
        1, ge=1, description="Ranks (processes) per machine; on GPUs, one per GPU."
    )
    launcher: Literal["processes", "torchrun", "deepspeed"] = pydantic.Field(
        "processes",
        description="What starts the ranks. processes: agentloop itself, on this machine or on a "
        "cluster; torchrun or deepspeed: that launcher, on one machine or several.",
    )
    nodes: int = pydantic.Field(
        1,
        ge=1,
        description="Number of machines. With torchrun, start the commands in "
        "logs/learner-nodes.txt on the others; with deepspeed, ranks.hostfile lists them. All of "
        "them must see run.folder at the same path.",
    )
    hostfile: Path | None = pydantic.Field(
        None,
        description="DeepSpeed's hostfile: a line `NAME slots=N` for each machine, this one first.",
    )
    address: str = pydantic.Field(
        "",
        description="Address of this machine for the ranks of other machines; required with "
        "several. By default, loopback.",
    )
    port: int = pydantic.Field(
        0, ge=0, lt=65_536, description="Port of the rendezvous at rank 0. 0: any free port."
    )
    threads: int = pydantic.Field(1, ge=1, description="OpenMP threads per rank on a CPU.")
    start_timeout_s: float = pydantic.Field(
        300.0, gt=0, description="Time limit for all ranks to become ready."
    )
    max_restarts: int = pydantic.Field(
        3,
        ge=0,
        description="Number of restarts of the learner within ten minutes after a rank died. The "
        "ranks load the newest checkpoint and repeat the steps since then.",
    )

    @pydantic.model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.nodes > 1 and self.launcher != "processes" and not self.address:
            raise ValueError("address: with several nodes, set this machine's address")
        if (self.hostfile is not None) != (self.launcher == "deepspeed" and self.nodes > 1):
            raise ValueError(
                "hostfile: required with launcher = deepspeed and several nodes, otherwise omit it"
            )
        return self

    def require_one_machine(self) -> None:
        """Check that no cluster is needed. Raises SettingsError."""
        if self.nodes > 1 and self.launcher == "processes":
            raise SettingsError(
                "ranks.nodes: more than one needs ranks.launcher = torchrun or deepspeed, or a "
                "cluster (cluster.address)"
            )


@dataclass(frozen=True, slots=True)
class Start:
    """A process to start on this machine.

    Attributes:
        folder: the folder of its socket, to be removed when it has ended; None: it has none.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path | None = None


def starts(
    settings: RanksSettings, learner: Sequence[str], *, socket_path: Path, port: int
) -> list[Start]:
    """Return the processes that start this machine's ranks, or all ranks.

    Args:
        learner: the command of one rank, Python first.
        socket_path: unix socket to which rank 0 connects for requests, in a folder of its own.
        port: port of the rendezvous.

    Raises:
        SettingsError: CUDA_VISIBLE_DEVICES has too few devices for DeepSpeed's launcher.
    """
    num_local, folder = settings.nproc_per_node, socket_path.parent
    common = {
        "OMP_NUM_THREADS": str(settings.threads),
        "PYTHONUNBUFFERED": "1",
        _SOCKET_VARIABLE: str(socket_path),
    }
    if settings.launcher == "torchrun":
        return [Start("torchrun", _torchrun(settings, learner, port, node_rank=0), common, folder)]
    if settings.launcher == "deepspeed":
        # The launcher passes only few variables on to other nodes, and, if there are any, to this.
        command = (*learner, "--socket", str(socket_path))
        return [Start("deepspeed", _deepspeed(settings, command, port), common, folder)]
    world = {"WORLD_SIZE": str(num_local * settings.nodes), "LOCAL_SIZE": str(num_local)}
    world |= {"MASTER_ADDR": settings.address or "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        Start(
            f"rank {rank}",
            tuple(learner),
            {
                **common,
                **world,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank % num_local),
            },
            None if rank else folder,
        )
        for rank in range(num_local * settings.nodes)
    ]


def on_other_nodes(settings: RanksSettings, learner: Sequence[str], port: int) -> list[str]:
    """Return the commands that must be started on the other nodes, one for each."""
    if settings.launcher != "torchrun":
        return []
    return [
        shlex.join(_torchrun(settings, learner, port, node_rank=node))
        for node in range(1, settings.nodes)
    ]


def _torchrun(
    settings: RanksSettings, learner: Sequence[str], port: int, *, node_rank: int
) -> tuple[str, ...]:
    meet: tuple[str, ...] = ()
    if settings.nodes > 1:  # otherwise it stops waiting for other nodes after ten minutes
        meet = (f"--rdzv-conf=timeout={math.ceil(settings.start_timeout_s)}",)
    return (
        *(learner[0], "-P", "-m", "torch.distributed.run"),
        *(f"--nnodes={settings.nodes}", f"--node-rank={node_rank}"),
        *(f"--nproc-per-node={settings.nproc_per_node}", *meet),
        *(f"--master-addr={settings.address or '127.0.0.1'}", f"--master-port={port}"),
        *("--no-python", *learner),  # its own invocation of Python omits -P
    )


def _deepspeed(settings: RanksSettings, learner: Sequence[str], port: int) -> tuple[str, ...]:
    if settings.hostfile is not None:
        hosts, nodes = settings.hostfile.absolute(), [f"--num_nodes={settings.nodes}"]
    else:
        hosts, nodes = Path(os.devnull), []  # an empty file, since the default is /job/hostfile
    return (
        *(learner[0], "-P", "-m", "deepspeed.launcher.runner", f"--hostfile={hosts}", *nodes),
        _devices(settings),
        *(f"--master_addr={settings.address or '127.0.0.1'}", f"--master_port={port}"),
        *("--no_local_rank", "--no_python", *learner),
    )


def _devices(settings: RanksSettings) -> str:
    """Return the device list for DeepSpeed's launcher.

    Given only a number, it would ignore CUDA_VISIBLE_DEVICES and use the machine's first devices.
    """
    visible = [
        device for device in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device.strip()
    ]
    if settings.nodes > 1 or not visible or not has_accelerator():
        return f"--num_gpus={settings.nproc_per_node}"
    taken = [device.strip() for device in visible[: settings.nproc_per_node]]
    if len(taken) < settings.nproc_per_node or not all(device.isdecimal() for device in taken):
        raise SettingsError(
            "ranks.launcher: DeepSpeed's launcher needs a device number for each rank "
            f"(ranks.nproc_per_node: {settings.nproc_per_node}), but CUDA_VISIBLE_DEVICES is "
            f"{','.join(visible)}"
        )
    return f"--include=localhost:{','.join(taken)}"


def free_port() -> int:
    """Return a free port that outgoing connections do not use either."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
