"""Pure: which process of a run goes to which node of a cluster.

    settings ──processes_of──> RunProcesses ──place──> Placements: a node and GPUs for each
                                  nodes ──┘  └─ PlacementError: what has no place, and what is free

Processes with the same `block` share a node: the trainer with the ranks that it starts first, and
the ranks of each further learner node. A block goes where it leaves the most GPUs for the servers
after it; what needs no GPU is spread over the nodes. A runtime has its servers and its sandbox on
its node. Not covered: the memory of GPUs
(training/plan/resources.py), and servers that are larger than a node.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby

from agentloop.errors import SettingsError
from agentloop.inference.processes.supervise import ServerSettings
from agentloop.training.cluster.settings import ClusterSettings
from agentloop.training.learner_client.launch import RanksSettings

_GIB = 1 << 30


class PlacementError(SettingsError):
    """The cluster has no place for some of the processes; the message names them."""


class ProcessKind(StrEnum):
    TRAINER = "trainer"
    RANK = "rank"
    SERVER = "server"
    RUNTIME = "runtime"
    SANDBOX = "sandbox"


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of the cluster. Its memory, on the host and of a GPU, is 0 if it is unknown."""

    name: str
    num_cpus: float
    num_gpus: int = 0
    memory_bytes: int = 0
    gpu_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RunProcess:
    """A process and its needs. Those of the same `block` share a node."""

    name: str
    kind: ProcessKind
    num_cpus: float
    num_gpus: int = 0
    memory_bytes: int = 0
    block: str = ""


@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a process: a node, and which of the node's GPUs, counted from 0."""

    process: RunProcess
    node: str
    gpus: tuple[int, ...] = ()


def learner_processes(
    ranks: RanksSettings, *, on_gpus: bool, rank_bytes: int = 0
) -> list[RunProcess]:
    """Return the trainer and the ranks of a learner, in the order in which they are placed.

    Args:
        rank_bytes: memory on the host of one rank; 0: unknown.
    """
    return [RunProcess("trainer", ProcessKind.TRAINER, 1, block="learner node 1")] + [
        RunProcess(
            f"rank {number}",
            ProcessKind.RANK,
            ranks.threads,
            int(on_gpus),
            rank_bytes,
            f"learner node {number // ranks.nproc_per_node + 1}",
        )
        for number in range(ranks.nodes * ranks.nproc_per_node)
    ]


def processes_of(
    cluster: ClusterSettings,
    server: ServerSettings,
    ranks: RanksSettings,
    *,
    num_sandbox_cpus: int,
    on_gpus: bool,
    server_bytes: int = 0,
    rank_bytes: int = 0,
) -> list[RunProcess]:
    """Return the processes of a run, in the order in which they are placed.

    Args:
        num_sandbox_cpus: processors of each sandbox.
        server_bytes, rank_bytes: memory on the host of one server and of one rank; 0: unknown.
    """
    width = server.tp_size * server.dp_size
    processes = learner_processes(ranks, on_gpus=on_gpus, rank_bytes=rank_bytes)
    cpus, gpus = width * (1 if on_gpus else server.threads), width if on_gpus else 0
    if cluster.runtimes:
        return processes + [
            RunProcess(
                f"runtime {number + 1}",
                ProcessKind.RUNTIME,
                1 + count * cpus + num_sandbox_cpus,
                count * gpus,
                count * server_bytes,
            )
            for number, count in enumerate(shares(server.count, cluster.runtimes))
        ]
    processes += [
        RunProcess(f"server {number + 1}", ProcessKind.SERVER, cpus, gpus, server_bytes)
        for number in range(server.count)
    ]
    processes += [
        RunProcess(f"sandbox {number + 1}", ProcessKind.SANDBOX, num_sandbox_cpus)
        for number in range(cluster.sandbox_hosts)
    ]
    return processes


def shares(count: int, num: int) -> list[int]:
    """Return the sizes of `num` parts of `count` things; they differ by at most 1."""
    least, more = divmod(count, num)
    return [least + (number < more) for number in range(num)]


def place(
    processes: Sequence[RunProcess],
    nodes: Sequence[ClusterNode],
    *,
    home: str,
    colocated: bool = False,
    kept: Iterable[Placement] = (),
) -> list[Placement]:
    """Return a placement for each process, in their order.

    Args:
        home: name of the node of the trainer.
        colocated: servers and ranks may share GPUs; each kind's own are still disjoint.
        kept: placements that are taken already, of other processes.

    Raises:
        PlacementError: some have no place. It names all of them.
    """
    free = {node.name: _Free(node, colocated=colocated) for node in nodes}
    for placement in kept:
        if placement.node in free:
            free[placement.node].take(placement.process, placement.gpus)
    blocks = [
        list(block)
        for _, block in groupby(processes, key=lambda process: process.block or process.name)
    ]
    placements: list[Placement] = []
    missing: list[list[RunProcess]] = []
    for index, block in enumerate(blocks):
        unit = max((_num_gpus(later) for later in blocks[index + 1 :]), default=0)
        at_home = any(process.kind is ProcessKind.TRAINER for process in block)
        fitting = [
            node
            for node in free.values()
            if node.fits(block) and (not at_home or node.node.name == home)
        ]
        if not fitting:
            missing.append(block)
            continue
        best = min(fitting, key=lambda node: node.cost(block, unit))
        placements += [best.assign(process) for process in block]
    if missing:
        raise PlacementError(_what_is_missing(missing, free, home))
    return placements


class _Free:
    """The free resources of a node."""

    def __init__(self, node: ClusterNode, *, colocated: bool) -> None:
        self.node = node
        self.num_cpus = node.num_cpus
        self.memory_bytes = node.memory_bytes
        self._kinds: Counter[ProcessKind] = Counter()
        every = list(range(node.num_gpus))
        self._gpus = {ProcessKind.SERVER: every, ProcessKind.RUNTIME: every}
        self._gpus[ProcessKind.RANK] = list(every) if colocated else every

    def num_gpus(self, kind: ProcessKind) -> int:
        return len(self._gpus.get(kind, ()))

    def fits(self, block: Sequence[RunProcess]) -> bool:
        kind = block[-1].kind  # that of the ranks, if the trainer is with them
        memory = sum(process.memory_bytes for process in block)
        return (
            sum(process.num_cpus for process in block) <= self.num_cpus
            and _num_gpus(block) <= self.num_gpus(kind)
            and (not self.node.memory_bytes or memory <= self.memory_bytes)
        )

    def cost(self, block: Sequence[RunProcess], unit: int) -> tuple[float, ...]:
        """Return what to minimize: places for later processes of `unit` GPUs that this block would
        take, then the GPUs that it would leave over; without GPUs, others of its kind and ranks."""
        kind, needed = block[-1].kind, _num_gpus(block)
        gpus = self.num_gpus(kind)
        lost = gpus // unit - (gpus - needed) // unit if unit else 0
        if needed:
            return (lost, gpus - needed)
        return (0, self._kinds[kind], self._kinds[ProcessKind.RANK], -self.num_cpus)

    def assign(self, process: RunProcess) -> Placement:
        gpus = tuple(self._gpus.get(process.kind, [])[: process.num_gpus])
        self.take(process, gpus)
        return Placement(process, self.node.name, gpus)

    def take(self, process: RunProcess, gpus: Sequence[int]) -> None:
        self.num_cpus -= process.num_cpus
        self.memory_bytes -= process.memory_bytes
        self._kinds[process.kind] += 1
        for gpu in gpus:
            self._gpus[process.kind].remove(gpu)


def _num_gpus(block: Sequence[RunProcess]) -> int:
    return sum(process.num_gpus for process in block)


def _what_is_missing(
    missing: Sequence[Sequence[RunProcess]], free: Mapping[str, _Free], home: str
) -> str:
    lines = []
    for block in missing:
        names = block[0].name if len(block) == 1 else f"{block[0].name} to {block[-1].name}"
        cpus, gpus = sum(process.num_cpus for process in block), _num_gpus(block)
        needs = [f"{cpus:g} CPUs"] + [f"{gpus} GPUs"] * (gpus > 0)
        if memory := sum(process.memory_bytes for process in block):
            needs.append(f"{memory / _GIB:.1f} GiB")
        at_home = any(process.kind is ProcessKind.TRAINER for process in block)
        where = f"on the trainer's node, {home}" if at_home else "on one node"
        lines.append(f"{names} (needs {', '.join(needs)} {where})")
    free_parts = "; ".join(
        f"{node.node.name}: {node.num_cpus:g} of {node.node.num_cpus:g} CPUs, "
        f"{max(map(node.num_gpus, (ProcessKind.SERVER, ProcessKind.RANK)))} of "
        f"{node.node.num_gpus} GPUs"
        + (f", {node.memory_bytes / _GIB:.1f} GiB" if node.node.memory_bytes else "")
        for node in free.values()
    )
    return f"cluster: no place for {'; '.join(lines)}. Free: {free_parts or 'no node'}"
