"""A rank of the real learner is killed; training resumes from a checkpoint saved during
training."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TypeVar

import pytest

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

from agentloop.training.learner_client.client import KeptLearner, LearnerLost
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import (
    LoadRequest,
    Reply,
    Request,
    SavedRequest,
    SaveRequest,
    StepRequest,
    TrainingState,
)
from tests.learner.ranks import ROOT, make_batch
from tests.learner.test_ranks import SETTINGS

R = TypeVar("R", bound=Reply)

pytestmark = [pytest.mark.real, pytest.mark.anyio, pytest.mark.timeout(300)]


def rank_1(log_dir: Path) -> int:
    """Return the process id of rank 1, found by its environment and its log."""
    for process in Path("/proc").iterdir():
        try:
            environment = (process / "environ").read_bytes().split(b"\0")
            writes_to = (process / "fd" / "2").readlink()
        except OSError:
            continue
        if b"RANK=1" in environment and writes_to == log_dir / "learner-1.log":
            command = (process / "cmdline").read_bytes().split(b"\0")
            if b"agentloop.learner" in command and b"-m" in command[:4]:
                return int(process.name)
    raise AssertionError("there is no rank 1")


async def test_after_sigkill_it_goes_on_with_the_same_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    make_batch().save(tmp_path / "batch")
    folder, step = tmp_path / "saved" / "1", StepRequest(batch=tmp_path / "batch")
    async with KeptLearner(
        SETTINGS,
        RanksSettings(nproc_per_node=2),
        log_dir=tmp_path / "logs",
        on_progress=lambda line: None,
    ) as learner:

        async def ask(request: Request[R]) -> R:
            return await learner.ask(request, timeout_s=60)

        await ask(step)
        await ask(SaveRequest(folder=folder, state=TrainingState(step=1), beside=True))
        losses = [(await ask(step)).loss for _ in range(2)]
        assert (await ask(SavedRequest(wait=True))).folder == folder
        os.kill(rank_1(tmp_path / "logs"), signal.SIGKILL)
        with pytest.raises(LearnerLost, match="rank 1 ended with exit status 137"):
            await ask(step)
        await learner.restart()
        assert (await ask(LoadRequest(folder=folder))).state == TrainingState(step=1)
        assert [(await ask(step)).loss for _ in range(2)] == losses
