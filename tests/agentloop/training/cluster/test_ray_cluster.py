"""Actors of a cluster, with a fake Ray; tests/integration/test_cluster.py has the real one."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from agentloop import distribution
from agentloop.errors import ServerStartError, SettingsError
from agentloop.training.cluster.placed import rank_launch
from agentloop.training.cluster.placement import Placement, ProcessKind, RunProcess
from agentloop.training.cluster.ray_cluster import ActorLost, RayCluster, RemoteActor, Spot
from agentloop.training.cluster.settings import ClusterSettings
from agentloop.training.learner_client.launch import Start

PLACEMENT = Placement(RunProcess("runtime 1", ProcessKind.RUNTIME, 2), "node-2")


class RayError(Exception): ...


class FakeNodes:
    """A Ray that knows nodes, of which some drain."""

    def __init__(self, *nodes: tuple[str, bool], draining: dict[str, int], mine: str) -> None:
        self._private = SimpleNamespace(
            state=SimpleNamespace(state=SimpleNamespace(get_draining_nodes=lambda: draining))
        )
        self.nodes = lambda: [
            {
                "NodeID": id,
                "Alive": alive,
                "NodeManagerAddress": f"at-{id}",
                "Resources": {"CPU": 3},
            }
            for id, alive in nodes
        ]
        self.get_runtime_context = lambda: SimpleNamespace(get_node_id=lambda: mine)


class RayTaskError(RayError): ...


class FakeRay:
    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self) -> None:
        self.killed: list[Any] = []

    def kill(self, actor: Any) -> None:
        self.killed.append(actor)


def actor_with(**results: object) -> Any:
    """An actor whose methods return these results, or raise them."""

    def method(result: object) -> Any:
        spots: list[Spot] = []

        async def remote(*arguments: object) -> object:
            spots.extend(argument for argument in arguments if isinstance(argument, Spot))
            if isinstance(result, Exception):
                raise result
            return result

        return SimpleNamespace(remote=remote, spots=spots)

    return SimpleNamespace(**{name: method(result) for name, result in results.items()})


class OneActor(RayCluster):
    """A cluster on which each actor is this one."""

    def __init__(self, ray: FakeRay, actor: Any) -> None:
        super().__init__(ClusterSettings(wait_s=0.01), cast(ModuleType, ray))
        self.actor = actor

    def address_of(self, node: str) -> str:
        return f"at-{node}"

    def _make_actor(self, made: type, placement: Placement, num_gpus: int) -> Any:
        return self.actor


async def test_remote_call_returns_a_result_or_reports_a_lost_actor() -> None:
    bug = RayTaskError("ZeroDivisionError")
    actor = actor_with(group=3, lost=RayError("The actor died\nof something"), wrong=bug)
    remote = RemoteActor(cast(ModuleType, FakeRay()), actor)
    assert await remote.call("group", 1, 2) == 3
    with pytest.raises(ActorLost, match=r"^The actor died$"):
        await remote.call("lost")
    with pytest.raises(RayTaskError, match="ZeroDivisionError"):
        await remote.call("wrong")


async def test_only_the_trainers_own_node_is_usable_while_draining() -> None:
    nodes = ("one", True), ("two", True), ("lost", False), ("mine", True)
    ray = FakeNodes(*nodes, draining={"two": 0, "mine": 1, "lost": 5}, mine="mine")
    cluster = RayCluster(ClusterSettings(), cast(ModuleType, ray))
    assert [node.name for node in await cluster.usable()] == ["at-mine", "at-one"]
    assert cluster.home == "at-mine"
    assert cluster.draining == {"at-two"}


async def test_actor_that_does_not_start_is_killed() -> None:
    ray, actor = FakeRay(), actor_with(about=RayError("its node\nis gone"))
    with pytest.raises(ServerStartError, match="runtime 1 cannot be started on node-2: is gone"):
        await OneActor(ray, actor).start_actor(PLACEMENT, object)
    assert ray.killed == [actor]


async def test_rank_shares_the_reserved_gpus_of_a_started_runtime(tmp_path: Path) -> None:
    actor = actor_with(about=(distribution.version(), ("5", "7")), start=RayError("no"))
    cluster = OneActor(FakeRay(), actor)
    rank = Placement(RunProcess("rank 1", ProcessKind.RANK, 1, 1), "node-2", (1,))
    make = partial(rank_launch, Start("rank 1", (), {}), tmp_path)
    with pytest.raises(ServerStartError, match=r"rank 1: the server with which it shares GPUs"):
        await cluster.start(rank, make, shares_gpus=True)
    await cluster.start_actor(replace(PLACEMENT, gpus=(0, 1)), object)
    with pytest.raises(ServerStartError, match="rank 1 cannot be started on node-2: no"):
        await cluster.start(rank, make, shares_gpus=True)
    assert actor.start.spots == [Spot("at-node-2", ("7",))]


async def test_node_with_another_version_is_refused() -> None:
    ray, actor = FakeRay(), actor_with(about=("0.0.7", ()))
    with pytest.raises(SettingsError, match=r"node-2 has agentloop 0\.0\.7 and this machine"):
        await OneActor(ray, actor).start_actor(PLACEMENT, object)
    assert ray.killed == [actor]
    ours = actor_with(about=(distribution.version(), ("5", "7")))
    await OneActor(ray, ours).start_actor(PLACEMENT, object)
    assert ray.killed == [actor]
