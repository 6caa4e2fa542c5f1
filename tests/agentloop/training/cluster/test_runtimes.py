"""Runtimes on a cluster as the trainer sees them: fake rollouts, and actors that are killed.

tests/integration/test_cluster.py has Ray.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import hypothesis
import pytest

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import Task, TaskSource
from agentloop.errors import PromptTooLong, RequestError, ServerError, ServerStartError, sole
from agentloop.plain_json import dumps, loads
from agentloop.rollouts.metrics import GroupFigures
from agentloop.rollouts.record import ConversationRow
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.cluster import runtimes as runtimes_module
from agentloop.training.cluster.rollout_host import RolloutActor
from agentloop.training.cluster.runtimes import RemoteRuntimes
from agentloop.training.credit.roc import RocSettings
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.settings import LoopSettings
from agentloop.training.loop.steps import Steps
from agentloop.training.loop.training_loop import TrainingLoop
from agentloop.training.rollouts import RolledOut, Rollouts
from agentloop.training.run.context import RunContext
from agentloop.training.run.folder import RunFolder
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.sync import SyncResult
from agentloop.trajectory import Trajectory
from tests import emitted
from tests.agentloop.training.cluster.player import Player, playing
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    FakeRollouts,
    RecordingLearner,
    run_loop,
)
from tests.agentloop.training.weight_sync.test_local_copy import publish
from tests.fakes import RecordedProgress
from tests.rollouts import GroupPlayer
from tests.support import eventually

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtimes_module, "_RETRY_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def synced(runtimes: RemoteRuntimes, folder: Path, version: int = 0) -> SyncResult:
    return await runtimes.sync(PublishedFolder(str(version), folder), timeout_s=30)


async def groups(
    runtimes: RemoteRuntimes,
    *names: str,
    oldest: int = 0,
    actual: dict[str, RolledOut] | None = None,
) -> dict[str, RolledOut]:
    """Roll groups out, put them into `actual`, and return it."""
    actual = {} if actual is None else actual

    async def ask(name: str) -> None:
        task = Task(f"task-{name}", "What is 1 plus 2?", "3")
        budget = Budget(max_turns=7)
        request = GroupRequest(task, name, 2, budget, oldest, Purpose.TRAIN)
        actual[name] = await runtimes.run(request)

    try:
        async with anyio.create_task_group() as tasks:
            for name in names:
                tasks.start_soon(ask, name)
    except BaseExceptionGroup as group:
        raise sole(group) from None
    return actual


def reported(actual: dict[str, RolledOut]) -> dict[str, list[tuple[str, int]]]:
    return {name: [(row.task, row.rollout) for row in group.rows] for name, group in actual.items()}


def complete(*names: str) -> dict[str, list[tuple[str, int]]]:
    return {name: [(f"task-{name}", 0), (f"task-{name}", 1)] for name in names}


def by(actual: dict[str, RolledOut]) -> set[tuple[str, str]]:
    return {
        (row.reason, row.trajectory.turns[0].versions[0].version)
        for group in actual.values()
        for row in group.rows
    }


# --- groups -------------------------------------------------------------------------------------


async def test_all_runtimes_roll_out_whole_groups(folder: Path) -> None:
    first, two = Player("one"), Player("two")
    names = [str(number) for number in range(12)]
    async with playing(first, two) as runtimes:
        came = await synced(runtimes, folder)
        assert (came.checksum, came.loaded) == ("sum", ["one http://server", "two http://server"])
        assert came.num_verified == 2
        await runtimes.wait_for_capacity(2)
        actual = await groups(runtimes, *names)
        assert "one: 0 groups running, on the newest weights" in runtimes.describe()
    assert reported(actual) == complete(*names)
    assert actual["0"].figures == GroupFigures(has_signal=True)
    assert actual["0"].rows[0].parts == {"max_turns": 7}
    assert sorted(first.asked + two.asked) == sorted(names)
    assert first.asked
    assert two.asked


async def test_runtime_without_room_gets_no_groups(folder: Path) -> None:
    first, full = Player("one"), Player("full")
    full.capacity = anyio.Event()
    async with playing(first, full) as runtimes:
        await synced(runtimes, folder)
        await groups(runtimes, "1", "2", "3")
        assert full.asked == []
        full.capacity.set()
        first.capacity = anyio.Event()
        await groups(runtimes, "4", "5")  # one may have capacity for one more
    assert full.asked


async def test_groups_of_a_lost_runtime_go_to_another(folder: Path) -> None:
    first, two, stated = Player("one"), Player("two"), list[str]()
    first.gate, two.capacity = anyio.Event(), anyio.Event()
    actual: dict[str, RolledOut] = {}
    async with playing(first, two, log=stated) as runtimes:
        result = await synced(runtimes, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(groups, runtimes, "1", "2", "3", actual=actual))
            await eventually(lambda: len(first.asked) == 3)
            first.actors[0].kill()
            two.capacity.set()
        assert reported(actual) == complete("1", "2", "3")
        assert by(actual) == {("two", "0")}
        assert sorted(two.asked) == ["1", "2", "3"]
        await eventually(lambda: len(first.actors) == 2)
        await eventually(lambda: sum(line.startswith("one: ready") for line in stated) == 2)
        first.gate, two.capacity = None, anyio.Event()
        assert await runtimes.sync_stale(result, timeout_s=30)
        assert first.versions == ["0", "0"]
        assert ("one", "0") in by(await groups(runtimes, "4", "5", "6"))
    assert any("one is lost, and its groups go to others" in line for line in stated)


async def test_runtime_leaves_its_node_when_its_groups_are_complete(folder: Path) -> None:
    first, two, lines = Player("one"), Player("two"), list[str]()
    first.gate, two.capacity = anyio.Event(), anyio.Event()
    actual: dict[str, RolledOut] = {}
    async with playing(first, two, max_restarts=0, log=lines) as runtimes:
        result = await synced(runtimes, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(groups, runtimes, "1", "2", actual=actual))
            await eventually(lambda: len(first.asked) == 2)
            runtimes.leave("one")
            runtimes.leave("no such")
            two.capacity.set()
            assert by(await groups(runtimes, "3")) == {("two", "0")}
            assert len(first.actors) == 1
            first.gate.set()
        assert reported(actual) == complete("1", "2")
        assert by(actual) == {("one", "0")}
        await eventually(lambda: sum(line.startswith("one: ready") for line in lines) == 2)
        assert await runtimes.sync_stale(result, timeout_s=30)
        two.capacity = anyio.Event()
        assert ("one", "0") in by(await groups(runtimes, "4", "5", "6"))
    assert "one has left its node; starting it on another" in lines
    assert not [line for line in lines if "is lost" in line]


async def test_group_that_a_runtime_cannot_do_goes_to_another(folder: Path) -> None:
    bad, good = Player("bad"), Player("good")
    good.capacity = anyio.Event()
    bad.error = ServerError("no server is left")
    async with playing(bad, good) as runtimes:
        await synced(runtimes, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(groups, runtimes, "1")
            await eventually(lambda: bool(bad.asked))
            good.capacity.set()
    assert (bad.asked, good.asked) == (["1"], ["1"])


async def test_group_that_fails_on_every_runtime_is_given_up(folder: Path) -> None:
    player = Player("one")
    player.error = ServerError("no server answers")
    async with playing(player) as runtimes:
        await synced(runtimes, folder)
        with pytest.raises(
            ServerError, match=r"group 1: gave up after 5 .* one: no server answers"
        ):
            await groups(runtimes, "1")
    assert player.asked == ["1"] * 5


@pytest.mark.parametrize("error", [RequestError("no such tool"), PromptTooLong("too long")])
async def test_tasks_error_keeps_its_type(folder: Path, error: RequestError) -> None:
    player = Player("one")
    player.error = error
    async with playing(player) as runtimes:
        await synced(runtimes, folder)
        with pytest.raises(type(error), match=str(error)):
            await groups(runtimes, "1")
    assert player.asked == ["1"]


async def test_group_that_is_no_longer_needed_is_dropped(folder: Path) -> None:
    player = Player("one")
    player.gate = anyio.Event()
    async with playing(player) as runtimes:
        await synced(runtimes, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(groups, runtimes, "1", "2")
            await eventually(lambda: len(player.asked) == 2)
            tasks.cancel_scope.cancel()
        await eventually(lambda: sorted(player.dropped) == ["1", "2"])
        player.gate = None
        assert reported(await groups(runtimes, "1")) == complete("1")


# --- runtimes -----------------------------------------------------------------------------------


async def test_runtime_that_cannot_start_the_first_time_ends_the_run() -> None:
    first, bad = Player("one"), Player("bad")
    bad.opens = ServerError("no GPU")
    with pytest.raises(ServerStartError, match="bad: no GPU"):
        async with playing(first, bad):
            pass
    assert [actor.is_killed for actor in first.actors + bad.actors] == [True, True]


async def test_runtime_whose_servers_are_gone_starts_again(folder: Path) -> None:
    player, stated = Player("one"), list[str]()
    async with playing(player, log=stated) as runtimes:
        result = await synced(runtimes, folder)
        player.gate = anyio.Event()
        actual: dict[str, RolledOut] = {}
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(groups, runtimes, "1", actual=actual))
            await eventually(lambda: bool(player.asked))
            player.died.set()
            await eventually(lambda: sum("ready" in line for line in stated) == 2)
            player.gate = None
            await eventually(lambda: "one" in runtimes.describe())
            assert await runtimes.sync_stale(result, timeout_s=30)
        assert reported(actual) == complete("1")
    assert player.actors[0].is_killed
    assert any("one: no server is left" in line for line in stated)


async def test_runtimes_are_given_up_one_by_one(folder: Path) -> None:
    first, two, stated = Player("one"), Player("two"), list[str]()
    with pytest.raises(ServerError, match="no runtime is left: two: it was"):  # noqa: PT012
        async with playing(first, two, max_restarts=0, log=stated) as runtimes:
            await synced(runtimes, folder)
            first.actors[0].kill()
            await eventually(lambda: "one is given up: it was killed" in stated)
            assert reported(await groups(runtimes, "1")) == complete("1")
            two.actors[0].kill()
            await groups(runtimes, "2")


async def test_runtimes_close_before_their_actors_are_killed(folder: Path) -> None:
    player = Player("one")
    async with playing(player) as runtimes:
        await synced(runtimes, folder)
        (actor,) = player.actors
    assert actor.host._is_over
    assert actor.is_killed


def test_anyio_works_outside_of_tasks_on_the_runtimes_loop() -> None:
    """Ray calls an actor's methods on a loop that anyio did not begin, such as this."""
    done: list[anyio.Event] = []

    class Streaming(Player):
        async def wait_for_capacity(self, size: int) -> None:
            asyncio.get_running_loop().call_soon(lambda: done.append(anyio.Event()))
            await eventually(lambda: bool(done))

    async def main() -> None:
        actor = RolloutActor()
        running = asyncio.ensure_future(actor.run(Streaming("one").open))
        await actor.ready()
        await actor.do("wait_for_capacity", 2)
        await actor.close()
        assert await running == ""

    asyncio.run(main())
    assert done


# --- weights ------------------------------------------------------------------------------------


async def test_runtimes_load_weights(folder: Path) -> None:
    player = Player("one")
    async with playing(player) as runtimes:
        await runtimes.sync(PublishedFolder("0", folder), timeout_s=30)
        result = await synced(runtimes, folder, 1)
        assert await runtimes.sync_stale(result, timeout_s=30)
    assert player.num_stale == 1


async def test_runtime_that_cannot_load_rolls_out_nothing_until_it_can(folder: Path) -> None:
    good, bad = Player("good"), Player("bad")
    async with playing(good, bad) as runtimes:
        await synced(runtimes, folder)
        bad.fails = ServerError("the disk is gone")
        came = await synced(runtimes, folder, 1)
        assert came.failed == {"bad": "the disk is gone"}
        await groups(runtimes, "1", "2", "3", oldest=1)
        assert bad.asked == []
        assert not await runtimes.sync_stale(came, timeout_s=30)
        bad.fails, good.capacity = None, anyio.Event()
        assert await runtimes.sync_stale(came, timeout_s=30)
        await groups(runtimes, "4", "5", oldest=1)  # good may have capacity for one more
        assert bad.asked
        assert bad.versions == ["0", "1"]


async def test_folder_invisible_to_a_node_is_a_clear_error(folder: Path) -> None:
    async with playing(Player("one")) as runtimes:
        with pytest.raises(ServerError, match=r"no runtime could load version 0.*does not exist"):
            await synced(runtimes, folder / "elsewhere")


async def test_runtime_that_cannot_load_brings_what_it_has_rolled_out(folder: Path) -> None:
    first, two = Player("one"), Player("two")
    first.gate, two.capacity = anyio.Event(), anyio.Event()
    actual: dict[str, RolledOut] = {}
    async with playing(first, two) as runtimes:
        await synced(runtimes, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(groups, runtimes, "1", actual=actual))
            await eventually(lambda: bool(first.asked))
            first.fails = ServerError("the disk is full")
            two.capacity.set()
            await synced(runtimes, folder, 1)
            first.gate.set()
    assert by(actual) == {("one", "0")}
    assert two.asked == []


async def test_group_sampled_with_unknown_weights_goes_to_another_runtime(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes_module, "_ANSWER_S", 0.1)
    first, two = Player("one"), Player("two")
    first.gate, two.capacity = anyio.Event(), anyio.Event()
    actual: dict[str, RolledOut] = {}
    async with playing(first, two) as runtimes:
        await synced(runtimes, folder)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(groups, runtimes, "1", actual=actual))
            await eventually(lambda: bool(first.asked))
            first.fails, first.sampled = ServerError("half of the servers have them"), "1"
            two.capacity.set()
            await runtimes.sync(PublishedFolder("1", folder), timeout_s=0.1)
            first.gate.set()
    assert by(actual) == {("two", "1")}


async def test_runtime_with_other_weights_than_the_others_starts_again(folder: Path) -> None:
    first, two, odd, stated = Player("one"), Player("two"), Player("odd"), list[str]()
    odd.checksum = "another"
    async with playing(first, two, odd, log=stated) as runtimes:
        came = await synced(runtimes, folder)
        assert came.failed == {"odd": "its weights differ: another"}
        await groups(runtimes, "1", "2", "3", "4")
        await eventually(lambda: len(odd.actors) == 2)
    assert odd.asked == []
    assert any("the other runtimes: checksum another, not sum" in line for line in stated)


async def test_runtimes_that_disagree_without_a_majority_are_an_error(folder: Path) -> None:
    first, odd = Player("one"), Player("odd")
    odd.checksum = "another"
    async with playing(first, odd) as runtimes:
        with pytest.raises(ServerError, match="disagree about version 0"):
            await synced(runtimes, folder)


async def test_each_runtime_loads_its_own_copy_of_the_weights(folder: Path) -> None:
    players = Player("runtime-0"), Player("runtime-1")
    async with playing(*players) as runtimes:
        for version in ("1", "2"):
            published = publish(folder / "shared" / version, b"weights" + version.encode())
            weights = PublishedFolder(version, published, local_folder=folder / "node")
            assert len((await runtimes.sync(weights, timeout_s=30)).loaded) == 2
            assert len({player.folders[-1] for player in players}) == 2
            for player in players:
                path = player.folders[-1] / "model.safetensors"
                assert path.is_relative_to(folder / "node")
                assert path.read_bytes() == b"weights" + version.encode()
        (published / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(ServerError, match="differs from its SHA-256"):
            await runtimes.sync(weights, timeout_s=30)
    assert not list((folder / "node").iterdir())


# --- a run --------------------------------------------------------------------------------------


@asynccontextmanager
async def rolling_out(*names: str) -> AsyncIterator[tuple[RemoteRuntimes, list[Player]]]:
    """Run runtimes that score and filter while the block is open."""
    async with Grader(RewardSettings(function="exact")) as grader:
        players = []
        for name in names:
            player = GroupPlayer(FakeRollouts(TaskSource.open(ARITHMETIC)))
            rollouts = Rollouts(
                GroupRunner(player, grader), RocSettings(down_sample_to_n=4), seed=0
            )
            players.append(Player(name, rollouts))
        async with playing(*players) as runtimes:
            yield runtimes, players


async def test_runtimes_do_not_change_the_batches_of_a_run(tmp_path: Path) -> None:
    """This holds even if one of them is killed with each step."""
    pytest.importorskip(
        "safetensors", reason="needs safetensors: pip install 'agentloop-rl[train]'"
    )

    class Killing(RecordingLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step":
                players[0].actors[-1].kill()
            return await super().handle(op, **arguments)

    alone, _, _ = await run_loop(tmp_path / "alone", steps=2, evaluate_every=2)
    learner = Killing()
    run = RunFolder(tmp_path / "run")
    async with (
        GroupQueue.open(run.path / "queue.sqlite") as queue,
        rolling_out("one", "two") as (runtimes, players),
    ):
        report = RecordedProgress()
        context = RunContext(
            LoopSettings(
                steps=2, prompts_per_step=3, group_size=8, evaluate_tasks=4, evaluate_every=2
            ),
            TaskSource.open(ARITHMETIC),
            runtimes,
            runtimes.wait_for_capacity,
            queue,
            run,
            report,
            budget=Budget(max_turns=10, max_response_tokens=100),
        )
        steps = Steps(learner, queue, run, restored=None, timeout_s=60, say=report.say)
        await TrainingLoop(context, steps, runtimes).run()
        assert await queue.counts() == {"trained": 6}
    assert len(players[0].actors) > 1
    assert [op for op, _ in learner.requests] == [op for op, _ in alone.requests]
    for ours, theirs in zip(learner.batches, alone.batches, strict=True):
        assert {name: values.tolist() for name, values in ours.items()} == {
            name: values.tolist() for name, values in theirs.items()
        }


@hypothesis.settings(deadline=None)
@hypothesis.given(emitted.calls, emitted.plain_data)
@pytest.mark.full
def test_conversations_are_unchanged_on_the_way(raw: str, more: Any) -> None:
    row = ConversationRow(
        rollout=0, trajectory=Trajectory.from_dict(emitted.rollout(raw)), truth=more
    )
    (read,) = RolledOut.of(GroupFigures(), [row]).rows
    assert row.to_json() == dumps(row.to_dict())
    assert repr(loads(dumps(read.to_dict()))) == repr(loads(dumps(row.to_dict())))
