"""Real ranks started by each launcher through `start_learner`, on one node and on two.

Both nodes are this machine. pdsh is a script that runs commands locally, in an environment as bare
as a login's.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.patience import patient

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from agentloop.learner.weights import verify
from agentloop.training.learner_client.client import KeptLearner, LearnerError, start_learner
from agentloop.training.learner_client.launch import RanksSettings, free_port
from agentloop.training.learner_client.protocol import PublishRequest, StepRequest
from tests.learner.ranks import ROOT, make_batch
from tests.learner.test_ranks import SETTINGS
from tests.support import eventually

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]
NODES = {"nodes": 2, "address": "127.0.0.1"}
PDSH = """#!{python}
import subprocess, sys
command = sys.argv[sys.argv.index("-w") + 2 :]
bare = {{"PATH": {path!r}, "HOME": {home!r}}}
nodes = [
    subprocess.Popen(["sh", "-c", " ".join(command).replace("%n", str(n))], env=bare)
    for n in range(2)
]
sys.exit(max(node.wait() for node in nodes))
"""


@pytest.fixture(autouse=True)
def found_by_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.fixture
def hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    bin_path = tmp_path / "bin"
    bin_path.mkdir()
    pdsh = PDSH.format(python=sys.executable, path=os.environ["PATH"], home=str(tmp_path))
    (bin_path / "pdsh").write_text(pdsh)
    (bin_path / "ssh").write_text("#!/bin/sh\n")  # the launcher tests the connection with it
    for file in bin_path.iterdir():
        file.chmod(0o755)
    monkeypatch.setenv("PATH", f"{bin_path}:{os.environ['PATH']}")
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("one slots=1\ntwo slots=1\n")
    return hostfile


def say_nothing(line: str) -> None:
    pass


async def trained(folder: Path, ranks_settings: RanksSettings) -> None:
    """Run a step of two ranks and publish the weights."""
    settings = SETTINGS.model_copy(update={"zero_stage": 3})
    make_batch().save(folder / "batch")
    async with start_learner(
        settings, ranks_settings, log_dir=folder / "logs", on_progress=say_nothing
    ) as (learner, ranks):

        async def work() -> None:
            reply = await learner.ask(StepRequest(batch=folder / "batch"), timeout_s=60)
            found = reply.metrics()
            assert (found["num_updates"], found["skipped"]) == (1, 0)
            await learner.ask(PublishRequest(folder=folder / "w", version="1"), timeout_s=60)

        await ranks.while_alive(work)
    assert verify(folder / "w") == "1"


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
async def test_two_ranks_by_a_launcher(tmp_path: Path, launcher: Any) -> None:
    await trained(tmp_path, RanksSettings(launcher=launcher, nproc_per_node=2))
    assert (tmp_path / "logs" / f"learner-{launcher}.log").exists()


async def test_two_nodes_by_torchrun(tmp_path: Path) -> None:
    """The other node runs the line that is written in a loop. With a fixed port, as in
    the recipe `paper`, it rejoins after a restart: nobody has to copy the line again."""
    loops: list[subprocess.Popen[bytes]] = []
    statuses = tmp_path / "statuses"

    def start_other(line: str) -> None:
        _, found, path = line.partition("start its command from ")
        if found and not loops:
            (command,) = Path(path).read_text().splitlines()
            loop = f"while :; do {command}; echo $? >>{statuses}; sleep 1; done"
            with (tmp_path / "other.log").open("wb") as log:
                loops.append(
                    subprocess.Popen(
                        ["sh", "-c", loop], stdout=log, stderr=log, start_new_session=True
                    )
                )

    make_batch().save(tmp_path / "batch")
    settings = SETTINGS.model_copy(update={"zero_stage": 3})
    ranks = RanksSettings(launcher="torchrun", port=free_port(), **NODES)
    step = StepRequest(batch=tmp_path / "batch")
    try:
        async with KeptLearner(
            settings, ranks, log_dir=tmp_path / "logs", on_progress=start_other
        ) as learner:
            before = await learner.ask(step, timeout_s=60)
            learner._processes._processes[0].terminate()  # the guardian kills the ranks
            await learner.wait_lost()
            await learner.restart()
            after = await learner.ask(step, timeout_s=60)
            assert after.loss == before.loss
            await learner.ask(PublishRequest(folder=tmp_path / "w", version="1"), timeout_s=60)
            num_ends = len(statuses.read_text().split())
        await eventually(lambda: len(statuses.read_text().split()) > num_ends, within_s=100)
        assert statuses.read_text().split()[num_ends] == "0", "it ends when this node does"
    finally:
        for one in loops:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()
    assert verify(tmp_path / "w") == "1"


async def test_two_nodes_by_deepspeed(tmp_path: Path, hostfile: Path) -> None:
    await trained(tmp_path, RanksSettings(launcher="deepspeed", hostfile=hostfile, **NODES))


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
async def test_a_failed_start_by_a_launcher_is_explained(tmp_path: Path, launcher: Any) -> None:
    settings = SETTINGS.model_copy(update={"model": tmp_path})
    ranks = RanksSettings(launcher=launcher, nproc_per_node=2)
    with (
        anyio.fail_after(patient(250)),
        pytest.raises(LearnerError, match=f"ModelError: {tmp_path}"),
    ):
        async with start_learner(
            settings, ranks, log_dir=tmp_path / "logs", on_progress=say_nothing
        ):
            pass


def test_ports_are_below_those_of_connections_that_go_out() -> None:
    low, _ = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    assert all(free_port() < low for _ in range(20))
