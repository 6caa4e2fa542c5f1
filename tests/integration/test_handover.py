"""New weights into real SGLang servers, from a real learner, by disk and by group."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from safetensors.numpy import load_file

from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang import Chunk, Sampling, SGLangServer, http_session
from agentloop.inference.supervise import ServerProcess, ServerSettings, sglang_servers
from agentloop.models import SMALL
from agentloop.training.batch import Sample, write_batch
from agentloop.training.handover import (
    Handover,
    WeightsSettings,
    hand_over,
    keep_up,
    publisher,
)
from agentloop.training.learner import Learner, RanksSettings, started
from agentloop.training.learner_settings import LearnerSettings, OptimizerSettings
from tests.support import eventually

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.real,
    pytest.mark.timeout(480),  # servers are started, and one of them twice
    pytest.mark.usefixtures("sglang_installed"),
]

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop[train]'")

SETTINGS = LearnerSettings(
    model=SMALL,
    zero_stage=3,
    publish_dtype="float32",
    micro_batch_tokens=256,
    bucket_mib=1,  # of the small model's 2.5 MiB
    collective_timeout_s=60,
    optimizer=OptimizerSettings(lr=3e-3, warmup_steps=0),
    # The small model's tensors are so small that ZeRO 3 would not share them out.
    deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
)
GROUP = WeightsSettings(by="group", group_timeout_s=20)
TIMEOUT_S = 120.0


@dataclass
class Parts:
    """Servers, a learner, and what is between them."""

    folder: Path
    processes: list[ServerProcess]
    servers: list[SGLangServer]
    router: Router
    learner: Learner
    num: int = 0

    def states(self) -> list[str]:
        return [view.state.value for view in self.router.view()]

    async def hand_over(self, settings: WeightsSettings) -> Handover:
        self.num += 1
        way = publisher(settings, self.learner, self.folder)
        begun = time.monotonic()
        published = await way.publish(str(self.num), timeout_s=60)
        came = await hand_over(self.router, published, timeout_s=TIMEOUT_S)
        print(f"by {settings.by}: {time.monotonic() - begun:.2f} s, of them {came.seconds:.2f}")
        return came

    async def step(self) -> None:
        """Weights that differ from the last ones."""
        path = self.folder / "step"
        rng = random.Random(self.num)
        ids = rng.choices(range(3, 500), k=100)
        sample = Sample(ids, [0] * 50 + [1] * 50, [0.0] * 50 + [-6.0] * 50, 1.0, 0)
        await anyio.to_thread.run_sync(write_batch, path, [sample])
        await self.learner.ask("step", timeout_s=60, batch=str(path))

    async def mismatch(self, server: SGLangServer) -> float:
        """The largest difference between what the engine says of the tokens that it samples, at
        temperature 1, and what the learner says of them."""
        prompt = random.Random(1).choices(range(3, 500), k=40)
        ids: list[int] = []
        logprobs: list[float] = []

        def take(chunk: Chunk) -> None:
            ids.extend(chunk.ids)
            logprobs.extend(chunk.logprobs)

        params = Sampling().to_sglang(max_new_tokens=60, stop_ids=())
        params["ignore_eos"] = True
        await server.generate(prompt, params, rid=f"check-{random.random()}", on_chunk=take)
        assert len(ids) == 60
        sample = Sample([*prompt, *ids], [0] * 40 + [1] * 60, [0.0] * 40 + logprobs, 1.0, 0)
        batch, out = self.folder / "check", self.folder / "scored"
        await anyio.to_thread.run_sync(write_batch, batch, [sample])
        await self.learner.ask("logprobs", timeout_s=60, batch=str(batch), out=str(out))
        found = load_file(out)["logprobs"][40:]
        return float(np.abs(found - np.asarray(logprobs, np.float32)).max())


@asynccontextmanager
async def parts(folder: Path, *, num_servers: int) -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        settings = ServerSettings(count=num_servers, max_total_tokens=8192, dtype="float32")
        processes = await stack.enter_async_context(
            sglang_servers(SMALL, settings, log_dir=folder / "logs", on_progress=print)
        )
        learner, _ = await stack.enter_async_context(
            started(
                SETTINGS.model_dump(mode="json"),
                RanksSettings(count=2),
                log_dir=folder / "logs",
                on_progress=print,
            )
        )
        session = await stack.enter_async_context(http_session())
        servers = [SGLangServer(process.url, session) for process in processes]
        router = await stack.enter_async_context(Router.open(servers, RouterSettings()))
        yield Parts(folder, processes, servers, router, learner)


async def test_the_engine_has_what_the_learner_has_whichever_way(tmp_path: Path) -> None:
    async with parts(tmp_path, num_servers=1) as here:
        (server,) = here.servers
        assert await here.mismatch(server) < 1e-4, "both begin with the same model"
        checksums = []
        for settings, other in ((GROUP, WeightsSettings()), (WeightsSettings(), GROUP)):
            await here.step()
            assert await here.mismatch(server) > 1e-3, "a step changes the learner alone"
            first = await here.hand_over(settings)
            assert (first.failed, here.states()) == ({}, ["healthy"])
            assert await here.mismatch(server) < 1e-4
            again = await here.hand_over(other)
            assert again.checksum == first.checksum
            assert await here.mismatch(server) < 1e-4
            assert await server.weight_version() == str(here.num)
            checksums.append(first.checksum)
        assert checksums[0] != checksums[1]


def send(process: ServerProcess, number: signal.Signals) -> None:
    """To a server's first process and its children."""
    assert process.pid is not None
    os.killpg(os.getpgid(process.pid), number)


async def test_a_server_that_dies_or_freezes_while_it_receives_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parts(tmp_path, num_servers=2) as here:
        assert not (await here.hand_over(GROUP)).failed
        victim = here.processes[0]
        receive = SGLangServer.receive

        async def dying(self: SGLangServer, *arguments: Any, **more: Any) -> None:
            if self.url == victim.url and victim.alive:
                send(victim, signal.SIGKILL)
                await victim.wait_dead()
            await receive(self, *arguments, **more)

        monkeypatch.setattr(SGLangServer, "receive", dying)
        await here.step()
        came = await here.hand_over(GROUP)
        assert came.loaded == [here.processes[1].url]
        assert list(came.failed) == [victim.url]
        assert here.states()[0] in ("stale", "dead")
        assert here.states()[1] == "healthy"
        assert await here.mismatch(here.servers[1]) < 1e-4

        # It comes back, with the weights of its start.
        monkeypatch.undo()
        here.router.exited(victim.url, "killed")
        here.router.restarting(victim.url)
        await victim.restart(print)
        await eventually(lambda: here.states()[0] == "stale", within_s=10)
        assert await keep_up(here.router, came, timeout_s=TIMEOUT_S)
        assert here.states() == ["healthy", "healthy"]
        assert await here.mismatch(here.servers[0]) < 1e-4

        async def freezing(self: SGLangServer, *arguments: Any, **more: Any) -> None:
            if self.url == victim.url:
                send(victim, signal.SIGSTOP)
            await receive(self, *arguments, **more)

        monkeypatch.setattr(SGLangServer, "receive", freezing)
        await here.step()
        came = await here.hand_over(GROUP.model_copy(update={"group_timeout_s": 5}))
        assert came.loaded == [here.processes[1].url]
        assert await here.mismatch(here.servers[1]) < 1e-4
        monkeypatch.undo()
        send(victim, signal.SIGCONT)
        await eventually(lambda: here.states()[0] == "stale", within_s=30)
        assert await keep_up(here.router, came, timeout_s=TIMEOUT_S)
        assert here.states() == ["healthy", "healthy"]
        assert await here.mismatch(here.servers[0]) < 1e-4

        # Once the learner has others, a server that is stale waits for those.
        await here.step()
        checksums, failed = await came.published.give(here.servers, timeout_s=TIMEOUT_S)
        assert not checksums
        assert all("updates are gone" in why for why in failed.values())
