"""Checkpoints that are written while training goes on."""

from __future__ import annotations

import builtins
import resource
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import patient

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from tests.learner.ranks import Ranks, make_batch, started
from tests.learner.test_ranks import SETTINGS

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def slow_disk(folder: Path) -> None:
    """Writing an optimizer's file blocks as long as there is a file `hold`."""
    usual, hold = builtins.open, folder / "hold"

    def slow_open(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        while "w" in mode and str(file).endswith("optim_states.pt") and hold.exists():
            time.sleep(0.01)
        return usual(file, mode, *rest, **named)

    builtins.open = slow_open


def slow(folder: Path, zero_stage: int = 1) -> AbstractContextManager[Ranks]:
    make_batch().save(folder / "batch")
    settings = SETTINGS.model_copy(update={"zero_stage": zero_stage, "keep_checkpoints": 2})
    return started(folder, settings, 2, slow_disk)


@pytest.fixture(scope="module", params=[1, 3], ids=["zero1", "zero3"])
def two(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Path]]:
    folder = tmp_path_factory.mktemp("two")
    with slow(folder, request.param) as ranks:
        yield ranks, folder


def names(folder: Path) -> set[str]:
    return {first.name for first in folder.iterdir()}


def test_steps_neither_wait_for_the_write_nor_change_it(two: tuple[Ranks, Path]) -> None:
    ranks, folder = two
    nothing = {"ok": True, "folder": None, "writing": None, "failed": None}
    assert ranks.ask("saved") == ranks.ask("saved", wait=True) == nothing
    target, batch = folder / "beside" / "1", folder / "batch"
    ranks.ask("step", batch=batch)
    weights = ranks.ask("publish", folder=folder / "then", version="1")["sha256"]
    (folder / "hold").touch()
    saved = ranks.ask("save", folder=target, state={"step": 1}, beside=True)
    assert (saved["folder"], saved["num_updates"]) == (str(target), 1)
    losses = [ranks.ask("step", batch=batch)["loss"] for _ in range(2)]
    assert ranks.ask("logprobs", batch=batch, out=folder / "out")["ok"]
    assert ranks.ask("publish", folder=folder / "now", version="3")["sha256"] != weights
    assert ranks.ask("saved") == {**nothing, "writing": str(target)}
    assert names(target.parent) == {".1.partial"}
    (folder / "hold").unlink()
    assert ranks.ask("saved", wait=True) == {**nothing, "folder": str(target)}
    assert names(target.parent) == {"1"}
    loaded = ranks.ask("load", folder=target)
    assert (loaded["num_updates"], loaded["state"]["step"]) == (1, 1)
    assert ranks.ask("publish", folder=folder / "again", version="1")["sha256"] == weights
    assert [ranks.ask("step", batch=batch)["loss"] for _ in range(2)] == losses


def test_saves_wait_for_each_other_and_the_latest_are_kept(two: tuple[Ranks, Path]) -> None:
    ranks, folder = two
    for name in ("a", "b", "c", "c"):
        assert ranks.ask("save", folder=folder / "kept" / name, beside=True)["ok"]
    assert ranks.ask("load", folder=folder / "kept" / "c")["ok"], (
        "loading waits for the write as well"
    )
    assert names(folder / "kept") == {"b", "c"}


@pytest.mark.parametrize("full", [0, 1])
def test_full_disk_is_reported_and_training_goes_on(two: tuple[Ranks, Path], full: int) -> None:
    """Either rank's disk may be full; here a file grows beyond the system's limit."""
    ranks, folder = two
    complete, target = folder / "full" / "whole", folder / "full" / "target"
    assert ranks.ask("save", folder=complete)["ok"]
    pid = ranks.processes[full].pid
    usual = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (100_000, usual[1]))
    assert ranks.ask("save", folder=target, beside=True)["ok"]
    assert ranks.ask("step", batch=folder / "batch")["ok"]
    result = ranks.ask("saved", wait=True)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, usual)
    assert (result["folder"], result["writing"]) == (str(complete), None)
    assert result["failed"].startswith(f"{target}: ")
    assert "File too large" in result["failed"]
    assert names(complete.parent) == {"whole"}, "the partial folder is removed"
    assert ranks.ask("save", folder=complete, beside=True)["ok"]
    assert ranks.ask("saved", wait=True)["failed"] is None


def test_closing_waits_for_the_write(tmp_path: Path) -> None:
    with slow(tmp_path) as ranks:
        (tmp_path / "hold").touch()
        assert ranks.ask("save", folder=tmp_path / "saved" / "1", beside=True)["ok"]
        ranks.tell("close")
        assert names(tmp_path / "saved") == {".1.partial"}
        (tmp_path / "hold").unlink()
        assert ranks.answer() == {"ok": True}
        assert names(tmp_path / "saved") == {"1"}
        assert [process.wait(patient(100)) for process in ranks.processes] == [0, 0]


def test_leftovers_of_a_dead_rank_are_removed_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "saved" / ".mine.partial").mkdir(parents=True)
    with slow(tmp_path) as ranks:
        (tmp_path / "hold").touch()
        assert ranks.ask("save", folder=tmp_path / "saved" / "1", beside=True)["ok"]
        ranks.processes[1].send_signal(signal.SIGKILL)
        assert ranks.answer()["fatal"]
        assert names(tmp_path / "saved") == {".1.partial", ".mine.partial"}
    (tmp_path / "hold").unlink()
    with slow(tmp_path) as ranks:
        assert ranks.ask("save", folder=tmp_path / "saved" / "2")["ok"]
        assert names(tmp_path / "saved") == {"2", ".mine.partial"}
