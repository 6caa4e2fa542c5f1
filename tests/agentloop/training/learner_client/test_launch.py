"""The processes that start the learner's ranks, without running launchers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from agentloop.errors import SettingsError
from agentloop.training.learner_client.launch import RanksSettings, on_other_nodes, starts

LEARNER = ("python", "-P", "-m", "agentloop.learner", "settings.json")


def command(**settings: Any) -> tuple[str, ...]:
    ranks = RanksSettings.model_validate(settings)
    (start,) = starts(ranks, LEARNER, socket_path=Path("socket"), port=1234)
    return start.command


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize("launcher", ["processes", "torchrun", "deepspeed"])
def test_a_rank_is_started_with_the_whole_command(launcher: str) -> None:
    """Launchers would otherwise call Python themselves, without its option."""
    made = command(launcher=launcher)
    there = made.index("-P", 2) - 1 if launcher != "processes" else 0
    assert made[there : there + len(LEARNER)] == LEARNER
    if launcher != "processes":
        assert made[:3] == ("python", "-P", "-m")
        assert made[there - 1] in ("--no-python", "--no_python")


def test_deepspeed_takes_the_devices_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--num_gpus=2" in command(launcher="deepspeed", nproc_per_node=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5, 3,7")
    made = command(launcher="deepspeed", nproc_per_node=2)
    assert "--include=localhost:5,3" in made
    assert "--num_gpus=2" not in made  # both are refused
    hosts: dict[str, Any] = {"nodes": 2, "address": "a", "hostfile": "hosts"}
    assert "--num_gpus=2" in command(launcher="deepspeed", nproc_per_node=2, **hosts)
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "0")
    assert "--num_gpus=2" in command(launcher="deepspeed", nproc_per_node=2)


@pytest.mark.parametrize("visible", ["5", "GPU-8932f937,GPU-1,GPU-2"])
def test_visible_devices_that_deepspeed_cannot_take(
    monkeypatch: pytest.MonkeyPatch, visible: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(
        SettingsError, match=rf"ranks\.nproc_per_node: 2.*CUDA_VISIBLE_DEVICES is {visible}"
    ):
        command(launcher="deepspeed", nproc_per_node=2)


def test_no_hostfile_is_read_with_one_node() -> None:
    (one,) = [part for part in command(launcher="deepspeed") if part.startswith("--hostfile=")]
    assert not os.path.isfile(one.partition("=")[2])
    made = command(launcher="deepspeed", nodes=2, address="a", hostfile="hosts")
    assert f"--hostfile={Path('hosts').absolute()}" in made


def test_torchrun_waits_for_other_nodes_as_long_as_the_start_may_take() -> None:
    nodes: dict[str, Any] = {"nodes": 2, "address": "a", "start_timeout_s": 1800.5}
    assert "--rdzv-conf=timeout=1801" in command(launcher="torchrun", **nodes)
    ranks = RanksSettings(launcher="torchrun", **nodes)
    (other,) = on_other_nodes(ranks, LEARNER, 1234)
    assert "--rdzv-conf=timeout=1801" in other
