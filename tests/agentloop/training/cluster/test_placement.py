"""The placement of a run on a cluster: nothing is overcommitted, and what has no place is named."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from agentloop.inference.processes.supervise import ServerSettings
from agentloop.training.cluster.placement import (
    ClusterNode,
    Placement,
    PlacementError,
    ProcessKind,
    RunProcess,
    place,
    processes_of,
)
from agentloop.training.cluster.settings import ClusterSettings
from agentloop.training.learner_client.launch import RanksSettings

GIB = 1 << 30
NODES = st.lists(
    st.builds(ClusterNode, name=st.just(""), num_cpus=st.integers(0, 32),
        num_gpus=st.integers(0, 8), memory_bytes=st.sampled_from([0, 16 * GIB, 64 * GIB])),
    min_size=1,
    max_size=6,
).map(
    lambda nodes: [
        ClusterNode(f"node-{n}", node.num_cpus, node.num_gpus, node.memory_bytes)
        for n, node in enumerate(nodes)
    ]
)  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> list[RunProcess]:
    count = draw(st.integers(1, 6))
    runtimes = draw(st.integers(0, count))
    return processes_of(
        ClusterSettings(sandbox_hosts=draw(st.integers(0, 4)), runtimes=runtimes),
        ServerSettings(
            count=count, tp_size=draw(st.integers(1, 4)), dp_size=draw(st.integers(1, 2))
        ),
        RanksSettings(nodes=draw(st.integers(1, 3)), nproc_per_node=draw(st.integers(1, 8))),
        num_sandbox_cpus=draw(st.integers(1, 4)),
        on_gpus=draw(st.booleans()),
        server_bytes=draw(st.sampled_from([0, 4 * GIB])),
        rank_bytes=draw(st.sampled_from([0, GIB])),
    )


def check(placements: list[Placement], nodes: list[ClusterNode], *, colocated: bool) -> None:
    """Raise AssertionError if a node has more than it offers, or two processes have one GPU."""
    for node in nodes:
        near = [placement for placement in placements if placement.node == node.name]
        assert sum(placement.process.num_cpus for placement in near) <= node.num_cpus
        if node.memory_bytes:
            assert sum(placement.process.memory_bytes for placement in near) <= node.memory_bytes
        taken = Counter(
            (placement.process.kind if colocated else "", gpu)
            for placement in near
            for gpu in placement.gpus
        )
        assert not [gpu for gpu, count in taken.items() if count > 1]
        assert all(gpu < node.num_gpus for _, gpu in taken)
    for placement in placements:
        assert len(placement.gpus) == placement.process.num_gpus


def check_named(processes: list[RunProcess]) -> None:
    assert processes, "the error names none of the processes that it is about"


@given(runs(), NODES, st.booleans())
def test_each_process_is_placed_once_where_it_fits(
    processes: list[RunProcess], nodes: list[ClusterNode], colocated: bool
) -> None:
    try:
        placements = place(processes, nodes, home="node-0", colocated=colocated)
    except PlacementError as error:
        named = [process for process in processes if process.name in str(error)]
        check_named(named)
        return
    assert [placement.process for placement in placements] == processes
    check(placements, nodes, colocated=colocated)
    assert placements[0].node == "node-0"
    blocks: dict[str, set[str]] = {}
    for placement in placements:
        if placement.process.block:
            blocks.setdefault(placement.process.block, set()).add(placement.node)
    assert all(len(where) == 1 for where in blocks.values())
    assert place(processes, nodes, home="node-0", colocated=colocated) == placements


@given(st.integers(1, 20), st.integers(1, 20), st.booleans())
def test_servers_are_divided_among_the_runtimes(count: int, num: int, on_gpus: bool) -> None:
    assume(num <= count)
    _, _, *runtimes = processes_of(
        ClusterSettings(runtimes=num),
        ServerSettings(count=count, tp_size=2),
        RanksSettings(nproc_per_node=1),
        num_sandbox_cpus=3,
        on_gpus=on_gpus,
        server_bytes=GIB,
    )
    assert [first.name for first in runtimes] == [f"runtime {number + 1}" for number in range(num)]
    sizes = [first.memory_bytes // GIB for first in runtimes]
    assert sum(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    for size, first in zip(sizes, runtimes, strict=True):
        assert first.num_gpus == (2 * size if on_gpus else 0)
        assert first.num_cpus == 1 + 2 * size + 3


@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 8), st.integers(1, 10))
def test_equal_nodes_hold_as_many_servers_as_possible(
    num_nodes: int, learner_nodes: int, num_local: int, width: int
) -> None:
    assume(learner_nodes <= num_nodes and width <= 8)
    nodes = [ClusterNode(f"node-{n}", 1000, 8) for n in range(num_nodes)]
    # Two learner nodes' ranks may share a machine, where they leave whole servers of it over.
    if num_local * 2 <= 8:
        assume(learner_nodes == 1)
    room = learner_nodes * ((8 - num_local) // width) + (num_nodes - learner_nodes) * (8 // width)
    assume(room)

    def placed(count: int) -> list[Placement]:
        processes = processes_of(
            ClusterSettings(sandbox_hosts=0),
            ServerSettings(count=count, tp_size=width),
            RanksSettings(nodes=learner_nodes, nproc_per_node=num_local),
            num_sandbox_cpus=1,
            on_gpus=True,
        )
        return place(processes, nodes, home="node-0")

    check(placed(room), nodes, colocated=False)
    with pytest.raises(PlacementError, match=f"no place for server {room + 1} "):
        placed(room + 1)


@given(runs(), NODES, st.booleans(), st.integers(0, 7))
def test_processes_of_a_lost_node_are_placed_elsewhere(
    processes: list[RunProcess], nodes: list[ClusterNode], colocated: bool, lost: int
) -> None:
    # With nodes that have room for most runs, so that something is placed.
    large = [ClusterNode(f"large-{n}", 64, 16, 256 * GIB) for n in range(2)]
    home, nodes = "large-0", [*large, *nodes]
    name = nodes[1 + lost % (len(nodes) - 1)].name
    try:
        placements = place(processes, nodes, home=home, colocated=colocated)
    except PlacementError:
        assume(False)
    remaining = [node for node in nodes if node.name != name]
    kept = [placement for placement in placements if placement.node != name]
    for placement in placements:
        if placement.node != name:
            continue
        try:
            kept += place([placement.process], remaining, home=home, colocated=colocated, kept=kept)
        except PlacementError as error:
            check_named([placement.process] if placement.process.name in str(error) else [])
    check(kept, remaining, colocated=colocated)


def test_error_names_unplaced_processes_and_free_resources() -> None:
    processes = processes_of(
        ClusterSettings(sandbox_hosts=1),
        ServerSettings(count=2, tp_size=8),
        RanksSettings(nodes=1, nproc_per_node=4),
        num_sandbox_cpus=16,
        on_gpus=True,
    )
    with pytest.raises(PlacementError) as caught:
        place(processes, [ClusterNode("a", 16, 8), ClusterNode("b", 8, 8)], home="a")
    assert str(caught.value) == (
        "cluster: no place for server 2 (needs 8 CPUs, 8 GPUs on one node); "
        "sandbox 1 (needs 16 CPUs on one node). "
        "Free: a: 11 of 16 CPUs, 4 of 8 GPUs; b: 0 of 8 CPUs, 0 of 8 GPUs"
    )


def test_trainers_node_needs_place_for_the_first_ranks() -> None:
    processes = processes_of(
        ClusterSettings(),
        ServerSettings(),
        RanksSettings(nproc_per_node=2),
        num_sandbox_cpus=1,
        on_gpus=True,
    )
    head, worker = ClusterNode("head", 8), ClusterNode("worker", 8, 8)
    with pytest.raises(PlacementError, match=r"trainer to rank 1 .*on the trainer's node, head"):
        place(processes, [head, worker], home="head")
    kinds = {
        placement.process.kind: placement.node
        for placement in place(processes, [worker], home="worker")
    }
    assert set(kinds) == set(ProcessKind) - {ProcessKind.RUNTIME}
