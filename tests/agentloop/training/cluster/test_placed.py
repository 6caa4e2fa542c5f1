"""Processes of a placed run: they start at their placements, and elsewhere when their node is lost.

A fake cluster starts them on this machine; tests/integration/test_cluster.py has Ray.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import anyio.abc
import pytest

from agentloop.errors import ServerStartError
from agentloop.inference.processes.keep_alive import keep_alive
from agentloop.inference.processes.supervise import Launch, ServerSettings, start_guarded
from agentloop.models import SMALL
from agentloop.training.cluster.placed import PlacedRun, rank_launch, sandbox_launch, server_launch
from agentloop.training.cluster.placement import ClusterNode, RunProcess, place, processes_of
from agentloop.training.cluster.ray_cluster import MakeLaunch, RayCluster, Spot
from agentloop.training.cluster.settings import ClusterSettings
from agentloop.training.learner_client.client import LearnerLost
from agentloop.training.learner_client.launch import RanksSettings, Start, free_port
from tests.fakes import RecordedClients
from tests.support import eventually

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="the guardian looks at /proc"),
]

SERVES = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stub(folder: Path, spot: Spot) -> Launch:
    port = spot.port or free_port()
    return Launch(
        name="stub",
        command=(sys.executable, "-c", SERVES, str(port)),
        environment=dict(os.environ),
        url=f"http://{spot.address}:{port}",
        model_path="",
        log_path=folder / "stub.log",
        start_timeout_s=60,
        stop_timeout_s=0,
    )


class FakeCluster:
    home = "a"
    draining: frozenset[str] = frozenset()

    def __init__(self) -> None:
        self.nodes = [ClusterNode("a", 4, 4), ClusterNode("b", 4, 4)]
        self.started: list[tuple[str, str, bool]] = []
        self.num_views = 0

    async def usable(self) -> list[ClusterNode]:
        self.num_views += 1
        return self.nodes

    def address_of(self, node: str) -> str:
        return "127.0.0.1"

    async def start(
        self, placement: Any, make: MakeLaunch, *, port: int = 0, shares_gpus: bool = False
    ) -> tuple[Launch, anyio.abc.Process]:
        self.started.append((placement.process.name, placement.node, shares_gpus))
        launch = make(Spot("127.0.0.1", port=port))
        process = await start_guarded(
            launch.command, launch.environment, launch.log_path, stop_timeout_s=0
        )
        return launch, process

    async def start_actor(self, placement: Any, made: type) -> Any:
        self.started.append((placement.process.name, placement.node, False))
        return made()


def placed(
    fake: FakeCluster, settings: ClusterSettings | None = None, *, on_gpus: bool = False
) -> PlacedRun:
    settings = settings or ClusterSettings(address="auto", sandbox_hosts=0, wait_s=0.01)
    processes = processes_of(
        settings,
        ServerSettings(tp_size=2),
        RanksSettings(nproc_per_node=2),
        num_sandbox_cpus=1,
        on_gpus=on_gpus,
    )
    placements = place(processes, fake.nodes, home="a", colocated=settings.colocated)
    return PlacedRun(cast(RayCluster, fake), settings, placements)


@pytest.mark.full
async def test_restarted_server_keeps_its_url_only_on_the_same_node(tmp_path: Path) -> None:
    fake, clients = FakeCluster(), RecordedClients()
    run = placed(fake)
    moves: list[tuple[str, str]] = []

    async def moved(old: str, new: str) -> None:
        moves.append((old, new))

    async with (
        run.servers({"server 1": partial(stub, tmp_path)}, say=lambda line: None) as (server,),
        anyio.create_task_group() as tasks,
    ):
        server.moved = moved
        first, node = server.url, run.node_of("server 1")
        assert node == "b"  # the ranks are on the other
        tasks.start_soon(keep_alive, [server], ServerSettings(), clients)
        os.kill(server.pid or 0, 9)
        await eventually(lambda: len(fake.started) == 2, within_s=60)
        await eventually(lambda: server.pid is not None, within_s=60)
        assert server.url == first
        assert moves == []
        fake.nodes = [replace(fake.nodes[0], num_cpus=8)]
        os.kill(server.pid or 0, 9)
        await eventually(lambda: bool(moves), within_s=60)
        assert moves == [(first, server.url)]
        assert first != server.url
        tasks.cancel_scope.cancel()
    assert [where for _, where, _ in fake.started] == ["b", "b", "a"]
    exits = [call.split()[0] for call in clients.calls if " exited: " in call]
    assert exits == [first, first]


async def test_without_a_place_a_start_fails_with_what_is_missing(tmp_path: Path) -> None:
    fake = FakeCluster()
    run = placed(fake)
    fake.nodes = [ClusterNode("a", 3, 4)]
    with pytest.raises(ServerStartError, match=r"no place for server 1 .*after b was lost"):
        await run.start("server 1", partial(stub, tmp_path))
    fake.nodes = [ClusterNode("c", 0)]
    start = Start("rank 1", (sys.executable,), {})
    with pytest.raises(LearnerLost, match=r"no place for rank 1 .*after a was lost"):
        await run.spawn_rank(start, tmp_path / "rank.log")
    assert fake.started == []


async def test_processes_leave_a_draining_node_for_one_with_room() -> None:
    fake, remaining = FakeCluster(), list[list[str]]()
    run = placed(fake)
    pair = fake.nodes

    async def leave(processes: Sequence[RunProcess]) -> None:
        remaining.append([process.name for process in processes])

    assert run.node_of("server 1") == "b"
    async with anyio.create_task_group() as tasks:
        fake.nodes, fake.draining = pair[:1], frozenset("b")
        tasks.start_soon(run.leave_draining, leave)
        await eventually(lambda: fake.num_views >= 2, within_s=60)
        assert remaining == []  # the other has no place: it is better here than nowhere
        fake.nodes = [*pair[:1], ClusterNode("c", 4, 4)]
        await eventually(lambda: bool(remaining), within_s=60)
        num_views = fake.num_views
        await eventually(lambda: fake.num_views > num_views, within_s=60)
        tasks.cancel_scope.cancel()
    assert remaining == [["server 1"]]
    assert run.node_of("server 1") == "c"
    assert run.node_of("rank 1") == "a"


async def test_actor_starts_elsewhere_when_its_node_is_lost() -> None:
    fake = FakeCluster()
    run = placed(fake, ClusterSettings(address="auto", runtimes=1, wait_s=0.01))
    assert isinstance(await run.start_actor("runtime 1", list), list)
    fake.nodes = [replace(fake.nodes[0], num_cpus=6)]
    with pytest.raises(ServerStartError, match=r"no place for runtime 1 .*after b was lost"):
        await run.start_actor("runtime 1", list)
    fake.nodes = [replace(fake.nodes[0], num_cpus=8)]
    await run.start_actor("runtime 1", list)
    assert [where for _, where, _ in fake.started] == ["b", "a"]


@pytest.mark.parametrize("runtimes", [0, 1])
@pytest.mark.parametrize("colocated", [False, True])
async def test_rank_shares_gpus_only_where_a_server_has_them(
    tmp_path: Path, colocated: bool, runtimes: int
) -> None:
    fake = FakeCluster()
    fake.nodes = [ClusterNode("a", 16, 4)]
    settings = ClusterSettings(sandbox_hosts=0, colocated=colocated, runtimes=runtimes)
    run = placed(fake, settings, on_gpus=True)
    start = Start("rank 1", (sys.executable, "-c", ""), {})
    process = await run.spawn_rank(start, tmp_path / "rank.log")
    assert await process.wait() == 0
    await process.aclose()
    assert fake.started == [("rank 1", "a", colocated)]


def test_secrets_are_in_environments_and_not_on_command_lines(tmp_path: Path) -> None:
    spot = Spot("127.0.0.1")
    server = server_launch(
        str(SMALL), ServerSettings(device="cpu"), "server 1", tmp_path / "s.log", "hush", spot
    )
    host = sandbox_launch("{}", 60, "sandbox 1", tmp_path / "h.log", "hush", spot)
    for launch in (server, host):
        assert "hush" not in " ".join(launch.command)
        assert "hush" in launch.environment.values()
        assert "hush" not in repr(launch)
    assert server.command[2] == "agentloop.inference.processes.keyed"
    assert server.log_path == tmp_path / "s.log"


def test_rank_on_a_gpu_sees_one_device(tmp_path: Path) -> None:
    start = Start("rank 3", ("/elsewhere/python", "-m", "learner"), {"LOCAL_RANK": "3"})
    on_gpu = rank_launch(start, tmp_path / "r.log", Spot("10.0.0.1", ("5",)))
    assert on_gpu.environment["LOCAL_RANK"] == "0"
    assert on_gpu.command == (sys.executable, "-m", "learner")
    assert rank_launch(start, tmp_path / "r.log", Spot("10.0.0.1")).environment["LOCAL_RANK"] == "3"
