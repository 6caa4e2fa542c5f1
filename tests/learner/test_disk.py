"""Slow or full disks: no rank is taken for lost, and all ranks learn of an error."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch
from safetensors.torch import save_file

from agentloop.learner.errors import WriteError
from agentloop.learner.files import writing
from tests.learner.ranks import ROOT

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

# A World with only the host's group, because DeepSpeed is slow to start.
RANK = """
import os, sys, time
from datetime import timedelta
import torch.distributed as dist
from agentloop.learner.errors import WriteError
from agentloop.learner.world import World
rank, timeout_s = int(sys.argv[1]), 8.0
dist.init_process_group("gloo", f"file://{sys.argv[2]}", timedelta(seconds=60), 2, rank)
world = World.__new__(World)
world.rank, world.size, world.beat_s = rank, 2, timeout_s / 4
world._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
world.wait()
world.run_beside((lambda: time.sleep(1.5 * timeout_s)) if rank == 0 else None)
def full(): raise WriteError("folder: full")
try:
    world.run_beside(full if rank == 1 else None)
except WriteError as error:
    print(rank, error, flush=True)
world.wait()
dist.destroy_process_group()
"""


def test_ranks_wait_for_a_slow_disk_and_hear_of_a_full_one(tmp_path: Path) -> None:
    """The disk takes longer than the timeout of a collective."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, env=environment, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert said == ["0 folder: full\n", "1 folder: full\n"]


def test_a_full_disk_is_named_by_any_writer(tmp_path: Path) -> None:
    """torch's writer and safetensors' raise errors of their own. Here no file may grow beyond 10
    kB."""
    tensors, file = {"a": torch.zeros(1 << 16)}, tmp_path / "x"

    def with_torch() -> None:
        with file.open("wb") as stream:
            torch.save(tensors, stream)

    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    writers = (
        with_torch,
        lambda: save_file(tensors, file),
        lambda: file.write_bytes(bytes(20_000)),
    )
    for write in writers:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, usual[1]))
        try:
            with pytest.raises(WriteError) as failed, writing(tmp_path / "7"):
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)
        assert str(failed.value).startswith(f"{tmp_path}/7: ")
        assert "File too large" in str(failed.value)
        assert "bytes free)" in str(failed.value)
    with pytest.raises(RuntimeError, match="not the disk's"), writing(tmp_path / "7"):
        raise RuntimeError("not the disk's")
