"""How the learner's ranks come to be: which processes are started here, and with what.

    processes   a process for each rank, on this machine
    torchrun    torchrun; with several nodes the same command, with another --node-rank, is started
                on each of the others by whoever has them: Slurm, a person
    deepspeed   DeepSpeed's launcher; with a hostfile it starts the other nodes' ranks by pdsh

Rank 0 is on this machine, for it is asked over a unix socket. Whatever else the ranks read and
write (settings, batches, weights, checkpoints) is in the run's folder: with several nodes, on a
file system that all of them see at the same path.
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

# Below what Linux gives to connections that go out: none of them takes it before rank 0 does.
_PORTS = range(20_000, 32_768)
_SOCKET_VARIABLE = "AGENTLOOP_LEARNER_SOCKET"


class RanksSettings(pydantic.BaseModel):
    """The learner's processes."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    count: int = pydantic.Field(1, ge=1, description="Ranks on each machine, a process each.")
    launcher: Literal["processes", "torchrun", "deepspeed"] = pydantic.Field(
        "processes",
        description="Who starts them: agentloop itself, on this machine alone; torchrun; or "
        "DeepSpeed's launcher.",
    )
    nodes: int = pydantic.Field(
        1,
        ge=1,
        description="Machines. With torchrun, what is to be started on the others stands in "
        "logs/learner-nodes.txt; with deepspeed, `hostfile` names them. run.folder must be the "
        "same on all of them.",
    )
    hostfile: Path | None = pydantic.Field(
        None, description="DeepSpeed's list of machines, `NAME slots=N` a line, this one first."
    )
    address: str = pydantic.Field(
        "", description="Of this machine, for the other nodes' ranks; with one node, loopback."
    )
    port: int = pydantic.Field(
        0, ge=0, lt=65_536, description="Where the ranks meet, at rank 0; 0: one that is free."
    )
    threads: int = pydantic.Field(1, ge=1, description="OpenMP threads of a rank, on a CPU.")
    start_timeout_s: float = pydantic.Field(
        300.0, gt=0, description="From the start until all ranks are ready."
    )
    max_restarts: int = pydantic.Field(
        3,
        ge=0,
        description="How often in ten minutes the ranks are started again after one has died; they "
        "load the newest checkpoint and do the steps since then again.",
    )

    @pydantic.model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.nodes > 1 and self.launcher == "processes":
            raise ValueError("nodes: several need launcher = torchrun or deepspeed")
        if self.nodes > 1 and not self.address:
            raise ValueError("address: with several nodes the others must be told where this is")
        if (self.hostfile is not None) != (self.launcher == "deepspeed" and self.nodes > 1):
            raise ValueError("hostfile: for launcher = deepspeed and several nodes; they need it")
        return self


@dataclass(frozen=True, slots=True)
class Start:
    """A process that is to be started on this machine."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str]


def starts(
    settings: RanksSettings, learner: Sequence[str], *, socket_path: Path, port: int
) -> list[Start]:
    """What makes all ranks, or this machine's.

    Args:
        learner: the command of one rank, Python first.
        socket_path: where rank 0 finds who asks it.

    Raises:
        SettingsError: CUDA_VISIBLE_DEVICES lacks a device for each rank of DeepSpeed's launcher.
    """
    common = {
        "OMP_NUM_THREADS": str(settings.threads),
        "PYTHONUNBUFFERED": "1",
        _SOCKET_VARIABLE: str(socket_path),
    }
    if settings.launcher == "torchrun":
        return [Start("torchrun", _torchrun(settings, learner, port, node_rank=0), common)]
    if settings.launcher == "deepspeed":
        # Its launcher hands few variables on to other nodes, and to this one too if there are some.
        command = (*learner, "--socket", str(socket_path))
        return [Start("deepspeed", _deepspeed(settings, command, port), common)]
    size = str(settings.count)
    world = {"WORLD_SIZE": size, "LOCAL_SIZE": size}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        Start(
            f"rank {rank}",
            tuple(learner),
            {
                **common,
                **world,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
        )
        for rank in range(settings.count)
    ]


def on_other_nodes(settings: RanksSettings, learner: Sequence[str], port: int) -> list[str]:
    """The commands that somebody has to start on the other nodes, one for each."""
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
    if settings.nodes > 1:  # else it gives the other nodes up after ten minutes
        meet = (f"--rdzv-conf=timeout={math.ceil(settings.start_timeout_s)}",)
    return (
        *(learner[0], "-P", "-m", "torch.distributed.run"),
        *(f"--nnodes={settings.nodes}", f"--node-rank={node_rank}"),
        *(f"--nproc-per-node={settings.count}", *meet),
        *(f"--master-addr={settings.address or '127.0.0.1'}", f"--master-port={port}"),
        *("--no-python", *learner),  # its own way to call Python leaves out -P
    )


def _deepspeed(settings: RanksSettings, learner: Sequence[str], port: int) -> tuple[str, ...]:
    if settings.hostfile is not None:
        hosts, nodes = settings.hostfile.absolute(), [f"--num_nodes={settings.nodes}"]
    else:
        hosts, nodes = Path(os.devnull), []  # no file: /job/hostfile is not taken either
    return (
        *(learner[0], "-P", "-m", "deepspeed.launcher.runner", f"--hostfile={hosts}", *nodes),
        _devices(settings),
        *(f"--master_addr={settings.address or '127.0.0.1'}", f"--master_port={port}"),
        *("--no_local_rank", "--no_python", *learner),
    )


def _devices(settings: RanksSettings) -> str:
    """Which ones DeepSpeed's launcher takes. Told a number, it forgets CUDA_VISIBLE_DEVICES and
    takes the first ones of the machine."""
    visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    if settings.nodes > 1 or not visible or not has_accelerator():
        return f"--num_gpus={settings.count}"
    taken = [one.strip() for one in visible[: settings.count]]
    if len(taken) < settings.count or not all(one.isdecimal() for one in taken):
        raise SettingsError(
            f"ranks.launcher: DeepSpeed's needs CUDA_VISIBLE_DEVICES={','.join(visible)} to have "
            f"the number of a device for each of {settings.count} ranks (ranks.count)"
        )
    return f"--include=localhost:{','.join(taken)}"


def free_port() -> int:
    """One that nobody listens on now, and no connection that goes out will have."""
    while True:
        port = random.choice(_PORTS)
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
