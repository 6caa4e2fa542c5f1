"""Slow or full disks: no rank is taken for lost, and all ranks learn of an error."""

from __future__ import annotations

import os
import resource
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tests.patience import patient

pytest.importorskip("torch", reason="needs torch: pip install 'agentloop-rl[train]'")

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from agentloop.learner.errors import WriteError
from agentloop.learner.files import writing
from agentloop.learner.world import World
from tests.learner.ranks import Forked

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

TIMEOUT_S = 8.0


def rank_of_two(rank: int, store: Path, said: Path) -> None:
    """A World with only the host's group, because DeepSpeed is slow to start."""
    dist.init_process_group("gloo", f"file://{store}", timedelta(seconds=60), 2, rank)
    world = World.__new__(World)
    world.rank, world.size, world.beat_s = rank, 2, TIMEOUT_S / 4
    world._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    world.wait()
    world.run_beside((lambda: time.sleep(1.5 * TIMEOUT_S)) if rank == 0 else None)

    def full() -> None:
        raise WriteError("folder: full")

    try:
        world.run_beside(full if rank == 1 else None)
    except WriteError as error:
        said.write_text(str(error))
    world.wait()
    dist.destroy_process_group()


def test_ranks_wait_for_slow_disks_and_report_full_ones(tmp_path: Path) -> None:
    """The disk takes longer than the timeout of a collective."""
    log, store = tmp_path / "log", tmp_path / "store"
    stated = [tmp_path / f"said-{rank}" for rank in (0, 1)]
    ranks = [
        Forked(rank_of_two, rank, store, stated[rank], environment=os.environ, log=log)
        for rank in (0, 1)
    ]
    try:
        assert [rank.wait(patient(250)) for rank in ranks] == [0, 0], log.read_text()
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [file.read_text() for file in stated] == ["folder: full"] * 2


def test_full_disk_is_named_by_any_writer(tmp_path: Path) -> None:
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
