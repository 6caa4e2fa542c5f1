"""The ranks that are to be started, and the port at which they meet."""

from __future__ import annotations

from pathlib import Path

from agentloop.training.learner_client.launch import RanksSettings, free_port, starts

LEARNER = ("python", "-P", "-m", "agentloop.learner", "settings.json")


def test_ranks_on_several_nodes() -> None:
    ranks = RanksSettings(nodes=2, nproc_per_node=2, address="here")
    made = starts(ranks, LEARNER, socket_path=Path("folder/socket"), port=1234)
    assert [start.command for start in made] == [LEARNER] * 4
    assert [start.folder for start in made] == [Path("folder"), None, None, None]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [tuple(start.environment[name] for name in names) for start in made] == [
        (str(rank), str(rank % 2), "4", "2", "here", "1234") for rank in range(4)
    ]


def test_ports_are_below_those_of_outgoing_connections() -> None:
    low, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(free_port() < low for _ in range(20))
