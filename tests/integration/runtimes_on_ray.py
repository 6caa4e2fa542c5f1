"""Runtimes with fake rollouts on a real Ray cluster, of which one is killed: for test_cluster.py.

    python -m tests.integration.runtimes_on_ray ADDRESS

It is a process of its own, because it joins the cluster as a driver.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import anyio

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.request import GroupRequest, WaitForCapacity
from agentloop.training.cluster.placement import Placement, ProcessKind, RunProcess
from agentloop.training.cluster.ray_cluster import RayCluster, RemoteActor
from agentloop.training.cluster.rollout_host import RolloutActor
from agentloop.training.cluster.runtimes import RemoteRuntimes
from agentloop.training.cluster.settings import ClusterSettings
from agentloop.training.rollouts import RolledOut, RollsOut
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.sync import Serving
from tests.agentloop.training.cluster.player import Player
from tests.support import eventually

NAMES = ("runtime 1", "runtime 2")
LARGE = "y" * 1_000_000  # Ray moves it through its object store


@asynccontextmanager
async def open_player(name: str) -> AsyncIterator[tuple[RollsOut, WaitForCapacity, Serving]]:
    async with Player(name).open() as parts:
        yield parts


async def rolled_out(runtimes: RemoteRuntimes, *names: str) -> dict[str, RolledOut]:
    actual: dict[str, RolledOut] = {}

    async def ask(name: str) -> None:
        task = Task(f"task-{name}", LARGE, "3")
        actual[name] = await runtimes.run(GroupRequest(task, name, 2, Budget()))

    async with anyio.create_task_group() as tasks:
        for name in names:
            tasks.start_soon(ask, name)
    return actual


def host_of(raylet_of_home: int) -> int:
    """The process of one of the runtimes."""
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            ours = f"PPid:\t{raylet_of_home}\n" in path.read_text()
            if ours and b"ray::RolloutActor" in path.with_name("cmdline").read_bytes():
                return int(path.parent.name)
        except OSError:
            continue
    raise LookupError("there is no runtime")


async def main(address: str, raylet: int) -> None:
    async with RayCluster.join(ClusterSettings(address=address, wait_s=600)) as cluster:
        await cluster.nodes()

        def starting(name: str) -> Callable[[], Awaitable[RemoteActor]]:
            process = RunProcess(name, ProcessKind.RUNTIME, 1)
            return partial(cluster.start_actor, Placement(process, cluster.home), RolloutActor)

        runtimes = RemoteRuntimes(group_size=2, max_restarts=3, say=print)
        starts = {name: starting(name) for name in NAMES}
        async with runtimes.running(starts, {name: partial(open_player, name) for name in NAMES}):
            result = await runtimes.sync(PublishedFolder("0", Path.cwd()), timeout_s=60)
            actual = await rolled_out(runtimes, *map(str, range(10)))
            os.kill(host_of(raylet), signal.SIGKILL)
            actual |= await rolled_out(runtimes, *map(str, range(10, 20)))
            await eventually(lambda: runtimes.describe().count("running") == 2, within_s=600)
            assert await runtimes.sync_stale(result, timeout_s=60)
            last = await rolled_out(runtimes, *map(str, range(20, 40)))
        rows = [(name, row.task) for name, group in (actual | last).items() for row in group.rows]
        pair = {row.reason for group in last.values() for row in group.rows}
        print(json.dumps({"rows": sorted(rows), "both": sorted(pair), "loaded": result.loaded}))


if __name__ == "__main__":
    anyio.run(main, sys.argv[1], int(sys.argv[2]), backend_options={"use_uvloop": True})
