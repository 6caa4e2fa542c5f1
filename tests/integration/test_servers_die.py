"""Real servers are killed with turns in flight: every turn ends once, with its exact ids."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path

import anyio
import pytest

from agentloop.agent.rollout import Budget
from agentloop.errors import AgentLoopError
from agentloop.events import CallStarted, Event
from agentloop.inference.processes.keep_alive import keep_alive
from agentloop.inference.processes.supervise import ServerProcess, ServerSettings, sglang_servers
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.scheduling.health import ServerState
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.runtime import Runtime, Settings
from agentloop.trajectory import StopReason, TurnEnd
from tests.support import eventually

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),  # servers are started, and one of them twice
    pytest.mark.skipif(sys.platform != "linux", reason="SGLang's wheels are for Linux"),
    pytest.mark.usefixtures("sglang_installed"),
]

GREEDY = Sampling(temperature=0.0)
START_S = 300.0


def kill(process: ServerProcess) -> None:
    """SGLang's first process and its children, as the kernel might: all at once."""
    assert process.pid is not None
    os.killpg(os.getpgid(process.pid), signal.SIGKILL)


async def test_rollouts_survive_the_death_of_their_server(tmp_path: Path) -> None:
    """The length of each reply of this model, and its ids, are known beforehand."""
    from bench import countdown_model  # needs numpy, which comes with SGLang

    countdown_model.save(tmp_path / "model")
    rng = random.Random(4)
    ends: Counter[str] = Counter()
    placed: Counter[str] = Counter()
    num_moved = num_streamed = 0

    async def rollout(router: Router, number: int) -> None:
        """Three turns, each prompt the last one's ids and what a tool might have said."""
        nonlocal num_moved, num_streamed
        key = f"r{number}"
        ids = rng.choices(countdown_model.FILLER, k=20)
        for turn in range(3):
            length = rng.randint(100, 300)
            ids = [*ids, *rng.choices(countdown_model.FILLER, k=5), length]
            received: list[int] = []

            def take(chunk: Chunk, turn: int = turn, received: list[int] = received) -> None:
                nonlocal num_streamed
                num_streamed += len(chunk.ids)
                received.extend(chunk.ids)
                if chunk.end is not None:
                    assert chunk.end is TurnEnd.STOP
                    ends[f"{key}.{turn}"] += 1

            def moved(url: str, reason: str) -> None:
                nonlocal num_moved
                num_moved += 1

            generation = Generation(f"{key}.{turn}", key, ids, GREEDY, 1000, (countdown_model.EOS,))
            await router.generate(
                generation,
                vocab_size=countdown_model.VOCAB_SIZE,
                on_chunk=take,
                on_placed=lambda url, _: placed.update([url]),
                on_moved=moved,
            )
            assert received == countdown_model.countdown(length)
            ids += received
        router.forget(key, is_complete=True)

    settings = ServerSettings(
        count=3, max_total_tokens=16_384, extra_args=("--skip-tokenizer-init",)
    )
    async with (
        sglang_servers(
            tmp_path / "model", settings, log_dir=tmp_path, on_progress=print
        ) as processes,
        http_session() as session,
        Router.open(
            [SGLangServer(process.url, session) for process in processes], RouterSettings()
        ) as router,
        anyio.create_task_group() as keeper,
    ):
        keeper.start_soon(keep_alive, processes, settings, router.replicas)
        victim = processes[1]

        def view_of_victim() -> ServerState:
            return next(view.state for view in router.view() if view.url == victim.url)

        async with anyio.create_task_group() as rollouts:
            for number in range(48):
                rollouts.start_soon(rollout, router, number)
            await eventually(lambda: num_streamed > 2000, within_s=120)
            assert next(v.num_running for v in router.view() if v.url == victim.url) > 4
            kill(victim)
            await eventually(lambda: view_of_victim() is ServerState.RESTARTING, within_s=60)
        assert num_moved > 4
        assert len(ends) == 48 * 3
        assert set(ends.values()) == {1}
        assert all(view.num_running == view.num_held_tokens == 0 for view in router.view())

        await eventually(lambda: view_of_victim() is ServerState.HEALTHY, within_s=START_S)
        before = placed[victim.url]
        async with anyio.create_task_group() as rollouts:
            for number in range(100, 112):
                rollouts.start_soon(rollout, router, number)
        assert placed[victim.url] > before, "it takes turns again"
        keeper.cancel_scope.cancel()


async def test_rollout_continues_after_the_only_server_restarts(docker_engine: None) -> None:
    """Two ranks, too: what is killed is all of them. It may be started again once."""
    question = "Compute 12*7, 8+5 and 90-3."
    settings = Settings(
        tools=["python_code_with_standard_io"],
        server=ServerSettings(max_total_tokens=16_384, dp_size=2, max_restarts=1),
        budget=Budget(timeout_s=800),
        tool_timeout_s=60,
        sampling=GREEDY,
    )
    runtime = Runtime(settings, progress=print)

    async def live_and_die() -> None:
        async with runtime:
            assert runtime.router.view()[0].capacity_tokens == 2 * 16_384
            undisturbed = await runtime.rollout(question)
            pid = runtime.processes[0].pid
            killed = False

            def on_event(event: Event) -> None:
                # In mid-turn, if what is left of it is not in our socket's buffer already.
                nonlocal killed
                if isinstance(event, CallStarted) and not killed:
                    killed = True
                    kill(runtime.processes[0])

            trajectory = await runtime.rollout(question, on_event=on_event)
            assert killed
            assert runtime.processes[0].pid != pid
            assert trajectory.ids == undisturbed.ids
            assert trajectory.stop_reason is StopReason.ANSWERED
            kill(runtime.processes[0])
            await anyio.sleep_forever()

    with pytest.raises(AgentLoopError, match=r"no server is left: http.*killed by SIGKILL"):
        await live_and_die()
