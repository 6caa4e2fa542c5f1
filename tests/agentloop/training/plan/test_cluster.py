"""The plan of a run on a cluster, and what is refused, without Ray."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import cast

import pytest

from agentloop.cli.train import main
from agentloop.config import load_settings
from agentloop.errors import SettingsError
from agentloop.sandbox import PoolSettings
from agentloop.training.cluster.placement import ClusterNode, PlacementError, ProcessKind
from agentloop.training.cluster.ray_cluster import RayCluster
from agentloop.training.plan.cluster import (
    ClusterPlan,
    cluster_problems,
    nodes_from,
    on_hosts,
    plan_when_placed,
)
from agentloop.training.plan.resources import plan
from agentloop.training.plan.settings import TrainSettings
from tests.test_deploy import write_problems

pytestmark = pytest.mark.timeout(120)  # the first plan imports all that a run would

RECIPES = Path(__file__).parents[4] / "agentloop" / "cli" / "recipes"
MODEL = f"model='{RECIPES / 'qwen3-14b'}'"


def plan_for(recipe: str, shape: str, *overrides: str) -> ClusterPlan:
    settings = load_settings(TrainSettings, [RECIPES / f"{recipe}.toml"], [MODEL, *overrides])
    nodes = nodes_from([shape])
    return ClusterPlan(settings, nodes, nodes[0].name)


def test_papers_64_gpus_have_one_process_each() -> None:
    made = plan_for("paper-stage1", "8x128,8x80,2048")
    taken = [(placement.node, gpu) for placement in made.placements for gpu in placement.gpus]
    assert sorted(taken) == [(f"node-{n}", gpu) for n in range(1, 9) for gpu in range(8)]
    where = {
        kind: {s.node for s in made.placements if s.process.kind is kind} for kind in ProcessKind
    }
    assert where[ProcessKind.RANK] == {"node-1", "node-2", "node-3", "node-4"}
    assert where[ProcessKind.SERVER] == where[ProcessKind.SANDBOX]
    assert where[ProcessKind.SERVER].isdisjoint(where[ProcessKind.RANK])


def test_runtimes_of_the_papers_run_share_nodes_with_servers() -> None:
    cluster_plan = plan_for("paper-stage1", "8x128,8x80,2048", "cluster.runtimes=4")
    runtimes = [
        placement
        for placement in cluster_plan.placements
        if placement.process.kind is ProcessKind.RUNTIME
    ]
    assert {(placement.node, placement.gpus) for placement in runtimes} == {
        (f"node-{number}", tuple(range(8))) for number in range(5, 9)
    }
    assert {placement.process.kind for placement in cluster_plan.placements} == {
        ProcessKind.TRAINER,
        ProcessKind.RANK,
        ProcessKind.RUNTIME,
    }
    assert any("runtime 4" in line for line in cluster_plan.lines())


def test_fine_tuning_ranks_are_placed_before_other_processes() -> None:
    recipe = [RECIPES / "laptop.toml"]
    one_each = ["sft.ranks.nproc_per_node=1", "sft.ranks.threads=2"]
    several = [*one_each, "ranks.nodes=2", "ranks.nproc_per_node=2"]
    settings = load_settings(TrainSettings, recipe, several)
    nodes = nodes_from(["3x4"])
    made = ClusterPlan(settings, nodes, nodes[0].name)
    rows = [(row["process"], row["node"], row["cpus"]) for row in made.rows()]
    assert rows[:2] == [("sft rank 0", "node-1", 2), ("sft rank 1", "node-2", 2)]
    assert rows[2] == ("trainer", "node-1", 1)
    assert ("rank 2 to rank 3", "node-2", 2) in rows
    assert "WORLD_SIZE=2" in made.rows()[1]["command"]
    names = [placement.process.name for placement in made.sft_placements]
    assert names == ["trainer", "rank 0", "rank 1"]
    settings = load_settings(TrainSettings, recipe, [*one_each, "ranks.nproc_per_node=1"])
    with pytest.raises(PlacementError, match=r"no place for trainer to rank 0 .*needs 3 CPUs"):
        ClusterPlan(settings, [*nodes_from(["1x2"]), *nodes[1:]], "node-1")


class GrowingCluster:
    """A cluster that another node joins after each look at it."""

    home = "node-1"

    def __init__(self) -> None:
        self.num_nodes = 0

    async def usable(self) -> list[ClusterNode]:
        self.num_nodes += 1
        return nodes_from([f"{self.num_nodes}x2"])

    nodes = usable


async def test_run_waits_for_the_nodes_that_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.training.plan.cluster._POLL_S", 0.0)
    settings = load_settings(TrainSettings, overrides=["server.count=3"])
    lines: list[str] = []
    cluster = GrowingCluster()
    made = await plan_when_placed(settings, cast(RayCluster, cluster), lines.append)
    assert cluster.num_nodes == 3
    assert [placement.node for placement in made.placements][:2] == ["node-1", "node-1"]
    assert ["no place for server 1" in lines[0], "no place for server 3" in lines[1]] == [True] * 2
    settings = load_settings(TrainSettings, overrides=["server.tp_size=3", "cluster.wait_s=0.01"])
    with pytest.raises(PlacementError, match=r"no place for server 1 \(needs 3 CPUs"):
        await plan_when_placed(settings, cast(RayCluster, cluster), lines.append)


def test_releases_servers_and_ranks_share_eight_gpus() -> None:
    made = plan_for("release-8gpu", "1x128,8x80,1024", "cluster.address=auto")
    gpus = {placement.process.name: placement.gpus for placement in made.placements}
    assert gpus["server 1"] == (0, 1, 2, 3)
    assert gpus["server 2"] == (4, 5, 6, 7)
    assert [gpus[f"rank {n}"] for n in range(8)] == [(n,) for n in range(8)]
    with pytest.raises(SettingsError, match=r"no place for server 1 .*server 2"):
        plan_for("release-8gpu", "1x128,8x80,1024", "cluster.colocated=false")


@pytest.mark.parametrize(
    ("recipe", "shape", "kv_rollouts"),
    [("paper-stage1", "8x128,8x80,2048", 16), ("release-8gpu", "1x128,8x80,1024", 100)],
)
def test_memory_is_within_the_cards(recipe: str, shape: str, kv_rollouts: int) -> None:
    """With 7 GiB to spare for what an estimate leaves out: contexts, NCCL, CUDA graphs."""
    made = plan_for(recipe, shape)
    needs = plan(made.settings, made.machine)
    assert [text for text in needs.warnings if "free space" not in text] == []  # of this disk
    shared = recipe == "release-8gpu"
    for_server = (0.5 if shared else 0.8) * made.machine.gpu_bytes
    maximum = max(needs.phases) if shared else needs.learner.total
    assert maximum + (7 << 30) < made.machine.gpu_bytes
    assert for_server - needs.server.weights > kv_rollouts * needs.server.rollout


def test_host_memory_counts() -> None:
    with pytest.raises(SettingsError, match=r"no place for trainer to rank 7 .*220.* GiB"):
        plan_for("paper-stage1", "8x128,8x80,128")


def test_dry_run_prints_where_everything_goes_and_its_commands(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_problems(tmp_path / "data" / "math-42k.jsonl")
    monkeypatch.chdir(tmp_path)
    recipe = str(RECIPES / "paper-stage1.toml")
    assert main(["--dry-run", recipe, MODEL, "--shape", "8x128,8x80,2048"]) == 0
    out = capsys.readouterr().out
    assert "  rank 24 to rank 31  node-4  8 CPUs, GPUs 0-7" in out
    (line,) = (line for line in out.splitlines() if line.startswith("  server 4:"))
    assert "--host node-8 " in line
    assert "--dp-size 8" in line
    assert "64 GPUs of the cluster" in out
    assert "servers and ranks share GPUs" not in out


def test_dry_run_reports_what_has_no_place(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(RECIPES / "paper-stage1.toml")
    assert main(["--dry-run", recipe, MODEL, "--shape", "7x128,8", "--json"]) == 2
    plan = json.loads(capsys.readouterr().out)
    assert "no place for server 4 (needs 8 CPUs, 8 GPUs on one node)" in plan["refused"]
    assert "placement" not in plan
    assert main(["--dry-run", "--shape", "two nodes"]) == 2
    assert "--shape: 'two nodes' is not of the form" in capsys.readouterr().out


def test_shape_may_be_of_several_kinds_of_nodes() -> None:
    first, second, third = nodes_from(["1x16", "2x64,8x80,512"])
    assert (first.num_cpus, first.num_gpus, first.memory_bytes) == (16, 0, 0)
    assert second.name == "node-2"
    assert (third.num_gpus, third.gpu_bytes >> 30, third.memory_bytes >> 30) == (8, 80, 512)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("servers=['http://127.0.0.1:1']", "servers: on a cluster"),
        ("sandbox.hosts=['http://127.0.0.1:1']", "sandbox.hosts: .*cluster.sandbox_hosts to 0"),
        ("cluster.runtimes=2", "cluster.runtimes: 2 must be at most server.count .1."),
        ("cluster={runtimes=1, address='auto'}",
         "weights.transport: set it to disk with cluster.runtimes"),
        ("cluster={colocated=true, address='auto'}",
         "weights.transport: set it to disk with cluster.colocated"),
    ],
)  # fmt: skip
def test_settings_that_a_cluster_cannot_have_are_refused_by_name(
    override: str, message: str
) -> None:
    overrides = ["cluster.address=auto", "weights.transport=broadcast", override]
    settings = load_settings(TrainSettings, overrides=overrides)
    problems = [*cluster_problems(settings)]
    assert any(re.search(message, problem) for problem in problems)


def test_without_ray_it_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("agentloop.distribution.find_spec", lambda name: None)
    run = [f"run.folder={tmp_path}", "--restarts", "0", "cluster.address=auto"]
    assert main(run) == 2
    assert "ray (places a run on a cluster" in (err := capsys.readouterr().err)
    assert "pip install 'agentloop-rl[ray]'" in err
    assert not list(tmp_path.iterdir())


def test_calls_run_on_the_clusters_hosts_alone() -> None:
    """With another backend the pool would have workers on its own node, too."""
    settings = PoolSettings(backend="process", engines=["tcp://h:1"], workers=3)
    pool = on_hosts(settings, ["http://a:1", "http://b:2"], "hush")
    assert (pool.backend, pool.engines, pool.workers) == ("auto", [], 3)
    assert pool.hosts == ["http://a:1", "http://b:2"]
    assert pool.hosts_token is not None
    assert pool.hosts_token.get_secret_value() == "hush"
