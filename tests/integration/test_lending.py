"""A real SGLang server lends its memory to a real learner, over two training steps.

On a CPU SGLang has no memory to give back, but it takes the same requests, in the same states only.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from agentloop.config import load_settings
from agentloop.inference.processes.supervise import ServerProcess
from agentloop.inference.sglang.control import ControlClient
from agentloop.launch.progress import ProgressLine
from agentloop.training import wiring
from agentloop.training.learner_client.client import KeptLearner
from agentloop.training.learner_client.protocol import StepRequest
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.wiring import train
from tests.fakes import RecordedProgress
from tests.integration.test_train import RECIPE, coin
from tests.support import eventually

pytestmark = [
    pytest.mark.real,
    pytest.mark.full,
    pytest.mark.timeout(1800),  # two starts of a server, and one of a learner
    pytest.mark.usefixtures("sglang_installed"),
]

RELEASE = ["/pause_generation", "/pause_generation", "/release_memory_occupation"]
LOAD = [
    *("/pause_generation", "/resume_memory_occupation weights", "/update_weights_from_disk"),
    *("/weights_checker", "/resume_memory_occupation kv_cache", "/continue_generation"),
]


async def test_server_lends_memory_and_does_not_start_during_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second step, the server is killed while the learner has its memory."""
    calls: list[str] = []
    processes: list[ServerProcess] = []
    post, ask = ControlClient.post, KeptLearner.ask
    start, restart = ServerProcess.__init__, ServerProcess.restart

    async def recorded_post(self: ControlClient, path: str, body: Any, **options: Any) -> Any:
        answer = await post(self, path, body, **options)
        tags = " ".join(body.get("tags", ())) if path.startswith("/resume") else ""
        calls.append(f"{path} {tags}".strip())
        return answer

    def recorded_start(self: ServerProcess, *args: Any) -> None:
        start(self, *args)
        processes.append(self)

    async def recorded_restart(self: ServerProcess, *args: Any) -> None:
        calls.append("restart")
        await restart(self, *args)

    async def recorded_ask(self: KeptLearner, request: Any, **options: Any) -> Any:
        if not isinstance(request, StepRequest):
            return await ask(self, request, **options)
        calls.append("step")
        if calls.count("step") == 2:
            (process,) = processes
            assert process.pid is not None
            os.killpg(os.getpgid(process.pid), signal.SIGKILL)
            await eventually(lambda: not process.alive, within_s=60)
        reply = await ask(self, request, **options)
        calls.append("stepped")
        return reply

    monkeypatch.setattr(wiring, "lends_memory", lambda settings: True)
    monkeypatch.setattr(ControlClient, "post", recorded_post)
    monkeypatch.setattr(KeptLearner, "ask", recorded_ask)
    monkeypatch.setattr(ServerProcess, "__init__", recorded_start)
    monkeypatch.setattr(ServerProcess, "restart", recorded_restart)
    overrides = [
        *(f"run.folder={tmp_path}", "run.name=lending", "page=false", "tools=[]"),
        *("tasks={kind='arithmetic', held_out=2}", "loop.steps=2", "loop.prompts_per_step=2"),
        *("loop.group_size=4", "loop.evaluate_every=0", "roc.down_sample_to_n=3"),
        *("roc.reject_equal_reward=false", "sampling.temperature=2.5"),
        *("ranks.start_timeout_s=600", "server.start_timeout_s=600", "weights.timeout_s=600"),
        *("ranks.nproc_per_node=1", f"reward.function={coin.__module__}:coin"),
    ]
    settings = load_settings(TrainSettings, [RECIPE], overrides)
    folder = await train(settings, cast(ProgressLine, RecordedProgress()))
    first, second = calls.index("step"), calls.index("step", calls.index("step") + 1)
    assert calls[first - 3 : first] == RELEASE
    assert calls[first + 1 :][:7] == ["stepped", *LOAD]
    assert calls[second - 3 : second] == RELEASE
    without_memory = [call for call in LOAD if "resume" not in call]
    assert calls[second + 1 :] == ["stepped", "restart", *without_memory]
    assert await anyio.Path(folder / "weights" / "2" / "model.safetensors").exists()
