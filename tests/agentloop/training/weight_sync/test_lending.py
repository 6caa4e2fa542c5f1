"""Servers lend their GPUs' memory to the learner; tests/integration/test_lending.py has SGLang."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.environments.tasks.sources import TaskSource
from agentloop.errors import ServerError
from agentloop.training.weight_sync.sync import Served
from agentloop.trajectory import Trajectory
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    FakeRollouts,
    LostLearner,
    RecordingLearner,
    run_loop,
)
from tests.agentloop.training.weight_sync.test_sync import ANSWER, ONE, TWO, routed, states, turn
from tests.support import FakeSGLang, eventually

MEMORY = {"kv_cache", "weights"}


class WatchedRollouts(FakeRollouts):
    """Fake rollouts that check that their server can generate."""

    def __init__(self, tasks: TaskSource, fake: FakeSGLang) -> None:
        super().__init__(tasks)
        self.fake = fake

    async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
        assert not self.fake.released
        return await super().__call__(prompt, **options)


async def test_memory_alternates_between_learner_steps_and_rollouts(tmp_path: Path) -> None:
    fake, tasks = FakeSGLang([5]), TaskSource.open(ARITHMETIC)
    released: list[tuple[str, set[str]]] = []

    class Learner(RecordingLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op in ("step", "publish"):
                released.append((op, set(fake.released)))
            return await super().handle(op, **arguments)

    run_group = WatchedRollouts(tasks, fake)
    await run_loop(
        tmp_path,
        tasks=tasks,
        run_group=run_group,
        fake=fake,
        learner=Learner(),
        lends=True,
        steps=2,
    )
    assert released == [("publish", set()), *[("step", MEMORY), ("publish", MEMORY)] * 2]
    assert fake.released == set()
    assert fake.pauses == ["retract", *["abort", "retract", "retract"] * 2]
    assert fake.version == "2"


async def test_weights_are_loaded_again_after_a_recovery_without_new_ones(tmp_path: Path) -> None:
    """A learner that is lost between two steps repeats the last, beside rollouts."""
    fake, tasks = FakeSGLang([5]), TaskSource.open(ARITHMETIC)
    is_lost = anyio.Event()

    class Learner(LostLearner):
        async def wait_lost(self) -> str:
            if self.num_starts > 1:
                await anyio.sleep_forever()
            await is_lost.wait()
            return "rank 1 ended with exit status 137."

    learner = Learner("nothing", 1)

    class Rollouts(FakeRollouts):  # the router would let them wait
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            group = await super().__call__(prompt, **options)
            if len(learner.batches) == 1 and not is_lost.is_set():
                is_lost.set()
                await eventually(lambda: len(learner.batches) == 2 and not fake.released)
                assert fake.version == "1"
            return group

    await run_loop(
        tmp_path,
        tasks=tasks,
        run_group=Rollouts(tasks),
        fake=fake,
        learner=learner,
        max_restarts=1,
        lends=True,
        steps=2,
    )
    assert learner.num_starts == 2
    assert fake.version == "2"


async def test_turns_continue_when_servers_have_their_memory_again() -> None:
    fake = FakeSGLang(ANSWER, gate=anyio.Event())
    async with routed(fake) as router:
        served = Served(router)
        await served.sync(ONE, timeout_s=15)
        received: list[int] = []
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(turn, router, [], received)
            await eventually(lambda: fake.num_streaming == 1)
            async with served.lending(timeout_s=15):
                assert fake.released == MEMORY
                assert states(router) == ["stale"]
                assert not router.replicas.accepting_ranks
                assert fake.gate is not None
                fake.gate.set()
                await anyio.wait_all_tasks_blocked()
                assert received == []
            await served.sync(TWO, timeout_s=15)
        assert received == ANSWER
        assert (fake.released, fake.version, fake.paused) == (set(), "2", False)


async def test_stale_servers_load_old_weights_during_a_step() -> None:
    fake = FakeSGLang(ANSWER)
    async with routed(fake) as router:
        served = Served(router)
        result = await served.sync(ONE, timeout_s=15)
        async with served.lending(timeout_s=15):
            assert await served.sync_stale(result, timeout_s=15)
            assert fake.released == MEMORY
        assert await served.sync_stale(result, timeout_s=15)
        assert (fake.released, states(router)) == (set(), ["healthy"])


async def test_server_keeps_its_memory_if_weights_cannot_be_loaded() -> None:
    fake, second = FakeSGLang(ANSWER), FakeSGLang(ANSWER)
    async with routed(fake, second) as router:
        served = Served(router)
        await served.sync(ONE, timeout_s=15)
        async with served.lending(timeout_s=15):
            pass
        fake.weights = None
        result = await served.sync(TWO, timeout_s=15)
        assert (list(result.failed), fake.released, fake.paused) == ([fake.url], set(), False)
        fake.weights = "sum"
        assert await served.sync_stale(result, timeout_s=15)
        assert states(router) == ["healthy", "healthy"]


async def test_dead_server_ends_lending_and_restarts_with_all_memory() -> None:
    fake = FakeSGLang(ANSWER, keeps_memory=True)
    async with routed(fake, probe_interval_s=0.01) as router:
        served = Served(router)
        await served.sync(ONE, timeout_s=15)
        async with anyio.create_task_group() as tasks:

            async def end() -> None:
                await eventually(lambda: "abort" in fake.pauses)
                router.replicas.mark_exited(fake.url, "killed")

            tasks.start_soon(end)
            async with served.lending(timeout_s=15):
                pass
        fake.keeps_memory = False
        async with router.replicas.starting():
            router.replicas.mark_restarting(fake.url)
        await eventually(lambda: states(router) == ["stale"])
        assert (await served.sync(TWO, timeout_s=15)).loaded == [fake.url]


async def test_server_that_keeps_its_memory_ends_the_run() -> None:
    fake = FakeSGLang(ANSWER, keeps_memory=True)
    async with routed(fake) as router:
        served = Served(router)
        with pytest.raises(ServerError, match=r"did not give its memory back within 0.1 s .*: no$"):
            async with served.lending(timeout_s=0.1):
                raise AssertionError
        async with router.replicas.starting():  # others may start again
            pass


async def test_server_starts_and_learner_memory_exclude_each_other() -> None:
    fake = FakeSGLang(ANSWER)
    order: list[str] = []
    async with routed(fake) as router, anyio.create_task_group() as tasks:
        may_go_on = anyio.Event()

        async def start(name: str) -> None:
            async with router.replicas.starting():
                order.append(name)
                await may_go_on.wait()

        async def lend() -> None:
            async with Served(router).lending(timeout_s=15):
                order.append("learner")
                tasks.start_soon(start, "second server")
                await anyio.wait_all_tasks_blocked()
                order.append("learner ends")

        tasks.start_soon(start, "first server")
        await eventually(lambda: bool(order))
        tasks.start_soon(lend)
        await anyio.wait_all_tasks_blocked()
        assert order == ["first server"]
        may_go_on.set()
    assert order == ["first server", "learner", "learner ends", "second server"]
