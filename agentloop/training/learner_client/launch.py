"""The learner's ranks as processes to start: their commands and environments.

They start on this machine, or on the nodes of a Ray cluster. Rank 0 runs on this machine, since it
receives requests over a unix socket. All other data of the ranks (settings, batches, weights,
checkpoints) is in the run's folder; with several nodes it must be on a file system that all of them
mount at the same path.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pydantic

from agentloop.errors import SettingsError

# Below Linux's ephemeral ports, so that no outgoing connection takes the port before rank 0 does.
_PORTS = range(20_000, 32_768)
_SOCKET_VARIABLE = "AGENTLOOP_LEARNER_SOCKET"


class RanksSettings(pydantic.BaseModel, extra="forbid", frozen=True):
    """Settings of the learner's processes."""

    nproc_per_node: int = pydantic.Field(
        1, ge=1, description="Ranks (processes) per machine; on GPUs, one per GPU."
    )
    nodes: int = pydantic.Field(
        1,
        ge=1,
        description="Number of machines. More than one needs a cluster (cluster.address), and "
        "run.folder at the same path on all of them.",
    )
    address: str = pydantic.Field(
        "",
        description="Address of this machine at which the ranks meet. By default, loopback; on a "
        "cluster always that of this node.",
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

    def require_one_machine(self) -> None:
        """Check that no cluster is needed. Raises SettingsError."""
        if self.nodes > 1:
            raise SettingsError("ranks.nodes: more than one needs a cluster (cluster.address)")


@dataclass(frozen=True, slots=True)
class Start:
    """A rank to start.

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
    """Return all ranks, rank 0 first.

    Args:
        learner: the command of one rank, Python first.
        socket_path: unix socket to which rank 0 connects for requests, in a folder of its own.
        port: port of the rendezvous.
    """
    num_local = settings.nproc_per_node
    num_ranks = num_local * settings.nodes
    common = {
        "OMP_NUM_THREADS": str(settings.threads),
        "PYTHONUNBUFFERED": "1",
        _SOCKET_VARIABLE: str(socket_path),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_local),
        "MASTER_ADDR": settings.address or "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        Start(
            f"rank {rank}",
            tuple(learner),
            {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % num_local)},
            None if rank else socket_path.parent,
        )
        for rank in range(num_ranks)
    ]


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
