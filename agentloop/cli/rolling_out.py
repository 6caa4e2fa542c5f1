"""The rollouts of a training run by a runtime: in the trainer's process, or on a cluster's node.

settings, runtime ──rollouts_of──> Rollouts and Served
settings ──remote_rollouts, in an actor──> a runtime, and the same
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from agentloop.cli.console import in_thread
from agentloop.cli.train_settings import TrainSettings
from agentloop.environments.environment import set_up
from agentloop.environments.rewards.reward import Grader
from agentloop.events import Emit
from agentloop.models import SMALL
from agentloop.observe.exporters.otel import Traces
from agentloop.rollouts.player import player_of
from agentloop.rollouts.request import WaitForCapacity
from agentloop.rollouts.runner import GroupRunner
from agentloop.runtime import Runtime
from agentloop.training.rollouts import Rollouts
from agentloop.training.teacher_client import open_teacher
from agentloop.training.weight_sync.sync import Served

__all__ = ["remote_rollouts", "rollouts_of"]

log = logging.getLogger(__name__)


@asynccontextmanager
async def rollouts_of(
    settings: TrainSettings, runtime: Runtime, emit: Emit, **options: Any
) -> AsyncIterator[tuple[Rollouts, WaitForCapacity, Served]]:
    """Generate, score and select rollouts on a runtime, and serve new weights to its servers.

    Takes the options of `Rollouts`, too.
    """
    s = settings
    # On a node of a cluster, this imports them.
    environments = await in_thread(lambda: [environment.load() for environment in s.environments])
    async with (
        set_up(environments),
        Grader(s.reward, pool=runtime.pool) as grader,
        open_teacher(s.credit, runtime.chat.tokenizer) as teacher,
    ):
        serving = Served(runtime.router)
        player = player_of(s.environments, runtime, sampling=s.sampling, emit=emit, grader=grader)
        rollouts = Rollouts(
            GroupRunner(player, grader, enough=s.loop.early_stop_at, emit=emit),
            s.roc,
            s.credit,
            teacher,
            seed=s.loop.seed,
            is_tainted=serving.is_tainted,
            **options,
        )
        yield rollouts, runtime.router.gate.wait_for_capacity, serving


@asynccontextmanager
async def remote_rollouts(
    settings: TrainSettings,
) -> AsyncIterator[tuple[Rollouts, WaitForCapacity, Served]]:
    """Start a runtime on this node of a cluster, with logs in `log_dir` (`OpenRollouts`).

    Of its events, only traces are exported.
    """
    assert settings.log_dir is not None
    run = settings.log_dir.parents[1]
    with _logging_to(settings.log_dir / "runtime.log"):
        async with (
            Runtime(settings, progress=log.info) as runtime,
            Traces.open(
                settings.otel,
                model=Path(settings.model or SMALL).name,
                run=run.name,
                is_scored=True,
                decode=lambda ids: runtime.chat.decode(ids),
            ) as traces,
            # A group that is lost to the infrastructure goes to another runtime.
            rollouts_of(settings, runtime, traces.on_event, num_tries=1) as parts,
        ):
            yield parts


@contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("agentloop")
    ours.addHandler(handler)
    log.setLevel(logging.INFO)  # of the others, warnings
    try:
        yield
    finally:
        ours.removeHandler(handler)
        handler.close()
