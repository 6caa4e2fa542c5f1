"""A fleet around a Redis server of its own: fake rollouts, real deaths."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import hypothesis
import pydantic
import pytest

from agentloop.agent.rollout import Budget
from agentloop.config import to_toml
from agentloop.environments.episodes import PromptGroups
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import Task, TaskSource
from agentloop.errors import PromptTooLong, RequestError, ServerError, SettingsError, sole
from agentloop.training.credit.roc import RocSettings
from agentloop.training.fleet.coordinator import Fleet
from agentloop.training.fleet.messages import (
    FleetError,
    Result,
    Ticket,
    VersionError,
    WorkerStatus,
    packed,
    unpacked,
)
from agentloop.training.fleet.redis_link import READERS, Redis, RedisLink
from agentloop.training.fleet.settings import FleetSettings
from agentloop.training.learner_client.client import Learner, LearnerError
from agentloop.training.loop import TrainingLoop
from agentloop.training.loop_settings import LoopSettings
from agentloop.training.queue import GroupQueue
from agentloop.training.rollouts import RolledOut, Rollouts
from agentloop.training.run_folder import RunFolder
from agentloop.training.weight_sync.disk import PublishedFolder
from tests import emitted
from tests.agentloop.training.fleet_player import LEASE_S, RECIPE, Player, playing
from tests.agentloop.training.test_loop import ARITHMETIC, Played, PlayedLearner, Told, played
from tests.redis_server import RedisServer, redis_server
from tests.support import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(120)]  # a real Redis, and real deaths

BUDGET = Budget(max_turns=7)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with redis_server(tmp_path / "redis") as server:
        yield server


def settings_for(server: RedisServer, **changes: Any) -> FleetSettings:
    told = {"redis": server.url, "run": "test", "lease_s": LEASE_S, "give_up_s": 60}
    return FleetSettings(**told | changes)


class Trainer:
    """A fleet, the lines that it prints, and a model folder to publish."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self.fleet = fleet
        self._folder = folder

    async def sync(self, version: int = 0, *, timeout_s: float = 30) -> Any:
        folder = self._folder / str(version)
        folder.mkdir(exist_ok=True)
        return await self.fleet.sync(PublishedFolder(str(version), folder), timeout_s=timeout_s)

    async def groups(self, *names: str, oldest: int = 0) -> dict[str, RolledOut]:
        """Request groups like the loop, each when the one before is queued."""
        found: dict[str, RolledOut] = {}

        async def ask(name: str) -> None:
            found[name] = await self.fleet.group(
                Task(f"task-{name}", "What is 1 plus 2?", "3"),
                name,
                size=2,
                budget=BUDGET,
                oldest=oldest,
            )

        try:
            async with anyio.create_task_group() as tasks:
                for name in names:
                    tasks.start_soon(ask, name)
        except BaseExceptionGroup as group:
            raise sole(group) from None
        return found


@asynccontextmanager
async def training(
    settings: FleetSettings, tmp_path: Path, said: list[str] | None = None
) -> AsyncIterator[Trainer]:
    said = [] if said is None else said
    async with Fleet.open(
        settings, run="test", recipe=RECIPE, folder=tmp_path / "results", say=said.append
    ) as fleet:
        yield Trainer(fleet, tmp_path)


def told(found: dict[str, RolledOut]) -> dict[str, list[tuple[str, int]]]:
    return {
        name: [(row["task"], row["index"]) for row in group.rows()] for name, group in found.items()
    }


def whole(*names: str) -> dict[str, list[tuple[str, int]]]:
    return {name: [(f"task-{name}", 0), (f"task-{name}", 1)] for name in names}


async def until(found: Callable[[], Awaitable[Any]], expected: Any) -> None:
    with anyio.fail_after(30):
        while await found() != expected:  # noqa: ASYNC110  # no event says so
            await anyio.sleep(0.02)


async def left(settings: FleetSettings) -> list[int]:
    """Return the numbers of entries left in the streams."""
    async with RedisLink.open(settings, "test") as link:
        return [
            await link.do(lambda redis, name=name: redis.xlen(name))  # type: ignore[misc]
            for name in (link.tickets, link.groups)
        ]


async def test_groups_are_rolled_out_elsewhere_and_come_back_whole(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, said = settings_for(redis), list[str]()
    one, two = Player("one"), Player("two")
    names = [str(number) for number in range(12)]
    async with training(settings, tmp_path, said) as trainer, playing(settings, one, two):
        came = await trainer.sync()
        assert came.checksum == "sum"
        await trainer.fleet.wait_for_capacity(2)
        found = await trainer.groups(*names)
        assert told(found) == whole(*names)
        assert found["0"].has_signal
        assert found["0"].figures == {"rejected": None, "rollouts": []}
        assert found["0"].rows()[0]["max_turns"] == 7
        assert sorted(one.asked + two.asked) == sorted(names)
        await until(partial(left, settings), [0, 0])
        results = tmp_path / "results"
        # Of the last one the file goes after its entry.
        await eventually(lambda: not [path for path in results.iterdir() if "-" in path.name])
    assert not results.exists()
    assert {line.split()[1] for line in said} >= {"one"}


async def test_rollouts_go_through_redis_where_no_folder_is_shared(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.fleet.redis_link._PIECE_BYTES", 1000)
    settings, player = settings_for(redis), Player("one")
    player.filling = os.urandom(20_000).hex()  # which does not compress to nothing
    async with training(settings, tmp_path) as trainer, playing(settings, player):
        await trainer.sync()
        (mark,) = (tmp_path / "results").iterdir()
        mark.unlink()  # by which a runtime knows that it sees the same folder
        found = await trainer.groups("1")
        assert [row["filling"] for row in found["1"].rows()] == [player.filling] * 2
        async with RedisLink.open(settings, "test") as link:
            await until(lambda: link.do(lambda redis: redis.keys("*:rows:*")), [])


async def test_rollouts_go_through_redis_where_the_folder_cannot_be_written(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This happens when a trainer is killed and restarted while a runtime writes."""

    def write(path: Path, data: bytes) -> None:
        raise FileNotFoundError(2, "No such file or directory", str(path))

    monkeypatch.setattr("agentloop.training.fleet.worker._write", write)
    settings, player = settings_for(redis), Player("one")
    async with training(settings, tmp_path) as trainer, playing(settings, player):
        await trainer.sync()
        assert told(await trainer.groups("1")) == whole("1")
        assert player.asked == ["1"]


async def test_a_result_beyond_the_bound_is_an_error_that_names_it(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, player = settings_for(redis, max_result_mib=1), Player("one")
    player.filling = os.urandom(1_000_000).hex()
    async with training(settings, tmp_path) as trainer, playing(settings, player):
        await trainer.sync()
        with pytest.raises(SettingsError, match=r"fleet\.max_result_mib \(1\)"):
            await trainer.groups("1")


@pytest.mark.parametrize("error", [RequestError("no such tool"), PromptTooLong("too long")])
async def test_a_tasks_error_keeps_its_type_over_the_fleet(
    redis: RedisServer, tmp_path: Path, error: RequestError
) -> None:
    settings, player = settings_for(redis), Player("one")
    player.error = error
    async with training(settings, tmp_path) as trainer, playing(settings, player):
        await trainer.sync()
        with pytest.raises(type(error), match=str(error)):
            await trainer.groups("1")
        assert player.asked == ["1"]


@pytest.mark.parametrize("how", ["raises", "broken"])
async def test_an_infrastructure_failure_gives_the_ticket_to_another_runtime(
    redis: RedisServer, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.fleet.worker._RETRY_S", 0.05)
    settings = settings_for(redis, lease_s=3600)  # it is let go of, at once
    bad, good = Player("bad"), Player("good")
    if how == "raises":
        bad.error = ServerError("no server is left")
    else:
        bad.stop_reason = "infrastructure"
    async with training(settings, tmp_path) as trainer, playing(settings, bad):
        await trainer.sync()
        async with anyio.create_task_group() as tasks:
            good.room = anyio.Event()
            tasks.start_soon(good.run, settings)
            tasks.start_soon(trainer.groups, "1")
            await eventually(lambda: bool(bad.asked))
            bad.room = anyio.Event()  # it takes nothing more
            good.room.set()
            await eventually(lambda: bool(good.asked), within_s=30)
            tasks.cancel_scope.cancel()


async def test_a_group_that_nobody_can_do_is_given_up(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.fleet.worker._RETRY_S", 0.01)
    settings, player = settings_for(redis, max_tries=2), Player("one")
    player.error = ServerError("no server is left")
    async with training(settings, tmp_path) as trainer, playing(settings, player):
        await trainer.sync()
        with pytest.raises(ServerError, match=r"2 attempts failed \(fleet\.max_tries\)"):
            await trainer.groups("1")
        assert player.asked == ["1", "1"]


async def test_a_runtime_that_is_killed_leaves_its_groups_to_others(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, player = settings_for(redis, lease_s=3.0), Player("one")
    marks = tmp_path / "marks"
    marks.mkdir()
    names = ["1", "2", "3"]
    command = [sys.executable, "-m", "tests.agentloop.training.fleet_player"]
    found: dict[str, RolledOut] = {}
    async with training(settings, tmp_path) as trainer:
        async with await anyio.open_process(
            [*command, redis.url, "test", str(marks)], stdout=None, stderr=None
        ) as process:
            with anyio.fail_after(60):  # an interpreter starts
                await trainer.sync()

            async def ask() -> None:
                found.update(await trainer.groups(*names))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await eventually(lambda: len([*marks.iterdir()]) == 3, within_s=30)
                process.kill()
                await process.wait()
                async with playing(settings, player):
                    await eventually(lambda: len(found) == 3, within_s=30)
    assert told(found) == whole(*names)
    assert sorted(player.asked) == names  # each once


async def test_a_lease_is_renewed_for_as_long_as_it_takes(
    redis: RedisServer, tmp_path: Path
) -> None:
    lease_s = 4.0
    settings = settings_for(redis, lease_s=lease_s)
    one, two = Player("one"), Player("two")
    one.gate, two.room = anyio.Event(), anyio.Event()
    async with training(settings, tmp_path) as trainer, playing(settings, one, two):
        await trainer.sync()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trainer.groups, "1")
            await eventually(lambda: bool(one.asked))
            two.room.set()
            await anyio.sleep(1.6 * lease_s)  # whose lease would have run out
            one.gate.set()
    assert (one.asked, two.asked) == (["1"], [])


@pytest.mark.parametrize("keeps", [False, True])
async def test_redis_is_killed_and_nothing_is_lost_or_double(tmp_path: Path, keeps: bool) -> None:
    options = ["--appendonly", "yes", "--appendfsync", "always"] if keeps else []
    with redis_server(tmp_path / "redis", options) as redis:
        settings, one, two = settings_for(redis), Player("one"), Player("two")
        one.gate = two.gate = anyio.Event()
        names = [str(number) for number in range(6)]
        found: dict[str, RolledOut] = {}
        async with training(settings, tmp_path) as trainer, playing(settings, one, two):
            await trainer.sync()

            async def ask() -> None:
                found.update(await trainer.groups(*names))

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(ask)
                await eventually(lambda: len(one.asked + two.asked) == 6)
                redis.kill()
                one.gate.set()  # they finish while it is gone
                await anyio.sleep(0.3)
                redis.start()
            assert told(found) == whole(*names)
            again = await trainer.groups("later")
            assert told(again) == whole("later")
            await until(partial(left, settings), [0, 0])  # what was rolled out twice goes, too


async def test_a_ticket_that_redis_lost_is_added_again(redis: RedisServer, tmp_path: Path) -> None:
    settings, player = settings_for(redis), Player("one")
    found: dict[str, RolledOut] = {}
    async with training(settings, tmp_path) as trainer:

        async def ask() -> None:
            found.update(await trainer.groups("1", "2"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            async with RedisLink.open(settings, "test") as link:
                await until(lambda: link.do(lambda redis: redis.xlen(link.tickets)), 2)
            redis.kill()
            redis.start()
            async with playing(settings, player):
                await trainer.sync()
                await eventually(lambda: len(found) == 2, within_s=30)
    assert told(found) == whole("1", "2")
    assert sorted(player.asked) == ["1", "2"]


async def test_a_trainer_that_is_restarted_gets_its_own_answers_alone(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, player = settings_for(redis), Player("one")
    player.gate = anyio.Event()
    async with playing(settings, player):
        with anyio.CancelScope() as killed:
            async with training(settings, tmp_path / "") as trainer:
                await trainer.sync(3)
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(trainer.groups, "1", "2")
                    await eventually(lambda: len(player.asked) == 2)
                    killed.cancel()
        player.gate = None
        async with training(settings, tmp_path) as trainer:
            await trainer.sync(1)  # of an older checkpoint
            found = await trainer.groups("1", oldest=1)
            assert [row["version"] for row in found["1"].rows()] == ["1", "1"]
            assert player.asked == ["1", "2", "1"]
            await until(partial(left, settings), [0, 0])


@asynccontextmanager
async def rolling_out(settings: FleetSettings, *names: str) -> AsyncIterator[None]:
    """Run runtimes that score and filter while the context is open."""
    async with (
        Grader(RewardSettings(function="exact")) as grader,
        anyio.create_task_group() as runtimes,
    ):
        for name in names:
            player, right = Player(name), Played(TaskSource.open(ARITHMETIC))
            rollouts = Rollouts(
                PromptGroups(right),
                player.wait_for_capacity,
                grader,
                RocSettings(down_sample_to_n=4),
                seed=0,
            )
            runtimes.start_soon(player.run, settings, rollouts)
        yield
        runtimes.cancel_scope.cancel()


async def run_by_fleet(
    settings: FleetSettings, folder: Path, learner: PlayedLearner, *, evaluate_every: int = 2
) -> dict[str, int]:
    """Run two steps, or the remaining ones; return the number of groups by state."""
    run = RunFolder(folder / "run")
    async with (
        GroupQueue.open(run.path / "queue.sqlite") as queue,
        training(settings, folder) as trainer,
    ):
        cursor = (await queue.noted("cursor") or {}).get("tasks")
        loop = TrainingLoop(
            LoopSettings(
                steps=2,
                prompts_per_step=3,
                group_size=8,
                evaluate_tasks=4,
                evaluate_every=evaluate_every,
            ),
            rollouts=trainer.fleet,
            serving=trainer.fleet,
            learner=cast(Learner, learner),
            tasks=TaskSource.open(ARITHMETIC, cursor),
            queue=queue,
            folder=run,
            report=Told(),
            budget=Budget(max_turns=10, max_response_tokens=100),
        )
        await loop.run()
        return await queue.counts()


async def test_a_run_by_a_fleet_learns_what_a_run_by_itself_does(
    redis: RedisServer, tmp_path: Path
) -> None:
    """This holds even if Redis loses all data between the steps."""
    pytest.importorskip(
        "safetensors", reason="needs safetensors: pip install 'agentloop-rl[train]'"
    )

    class Killing(PlayedLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step":
                redis.kill()
                redis.start()
            return await super().handle(op, **arguments)

    alone, _, _ = await played(tmp_path / "alone", steps=2, evaluate_every=2)
    settings, learner = settings_for(redis), Killing()
    async with rolling_out(settings, "one", "two"):
        assert await run_by_fleet(settings, tmp_path, learner) == {"trained": 6}
    assert [op for op, _ in learner.asked] == [op for op, _ in alone.asked]
    for ours, theirs in zip(learner.batches, alone.batches, strict=True):
        assert {name: values.tolist() for name, values in ours.items()} == {
            name: values.tolist() for name, values in theirs.items()
        }


async def test_a_run_that_is_killed_goes_on_with_the_runtimes_that_are_there(
    redis: RedisServer, tmp_path: Path
) -> None:
    pytest.importorskip(
        "safetensors", reason="needs safetensors: pip install 'agentloop-rl[train]'"
    )

    class Dying(PlayedLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            if op == "step" and self.batches:
                raise LearnerError("it was killed")
            return await super().handle(op, **arguments)

    alone, _, _ = await played(tmp_path / "alone", steps=2, evaluate_every=0)
    settings, learner = settings_for(redis), PlayedLearner()
    async with rolling_out(settings, "one", "two"):
        with pytest.raises(LearnerError, match="it was killed"):
            await run_by_fleet(settings, tmp_path, Dying(), evaluate_every=0)
        gc.collect()  # its frames hold the run's folder
        counts = await run_by_fleet(settings, tmp_path, learner, evaluate_every=0)
    assert counts == {"trained": 6}
    for ours, theirs in zip(learner.batches, alone.batches, strict=True):
        assert ours["advantages"].tolist() == theirs["advantages"].tolist()


async def test_a_runtime_of_another_version_is_refused_by_both_sides(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, said = settings_for(redis), list[str]()
    old = WorkerStatus(agentloop="0.0.7", num_servers=1)
    async with training(settings, tmp_path, said) as trainer:
        async with RedisLink.open(settings, "test") as link, playing(settings, Player("one")):
            await link.do(lambda redis: redis.set(link.name("runtime", "old"), old.to_json()))
            await link.do(lambda redis: redis.sadd(link.runtimes, "old"))
            came = await trainer.sync()  # nobody waits for the old one
            await eventually(lambda: len(said) == 2)
        assert came.loaded == ["one"]
        refused = [
            line for line in said if "Runtime old is refused: it has agentloop 0.0.7" in line
        ]
        assert len(refused) == 1
        state = trainer.fleet._state
        trainer.fleet._state = state.model_copy(update={"agentloop": "0.0.7"})
        await trainer.fleet._publish_state()
        with pytest.raises(VersionError, match=r"the trainer has agentloop 0\.0\.7 and this"):
            await Player("two").run(settings)


async def test_a_trainer_takes_over_from_one_of_another_version(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings = settings_for(redis)
    async with RedisLink.open(settings, "test") as link:
        await link.do(lambda redis: redis.set(link.trainer, b'{"life": "older", "word": 1}'))
        async with training(settings, tmp_path) as trainer, playing(settings, Player("one")):
            assert (await trainer.sync()).loaded == ["one"]


async def test_a_second_trainer_takes_the_run_and_the_first_says_so(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings = settings_for(redis)
    with pytest.raises(  # noqa: PT012
        FleetError, match="another trainer has taken over agentloop:test:trainer"
    ):
        async with training(settings, tmp_path):
            async with training(settings, tmp_path / "other"):
                await anyio.sleep(60)


async def test_a_runtime_that_comes_late_has_the_weights_before_it_takes_a_ticket(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, one, two = settings_for(redis), Player("one"), Player("two")
    async with training(settings, tmp_path) as trainer, playing(settings, one):
        await trainer.sync(0)
        await trainer.sync(1)
        one.room = anyio.Event()
        async with playing(settings, two):
            found = await trainer.groups("1", "2", oldest=1)  # one may have been about to take one
    assert one.versions == ["0", "1"]
    assert two.versions == ["1"]
    by = {row["by"]: row["version"] for group in found.values() for row in group.rows()}
    assert by["two"] == "1"


async def test_a_runtime_that_cannot_load_rolls_out_nothing_until_it_can(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.fleet.worker._RETRY_S", 0.05)
    settings, good, bad = settings_for(redis), Player("good"), Player("bad")
    said: list[str] = []
    async with training(settings, tmp_path, said) as trainer, playing(settings, good, bad):
        await trainer.sync(0)
        await eventually(lambda: bool(good.versions and bad.versions))
        await eventually(lambda: sum("has joined" in line for line in said) == 2)
        bad.fails = ServerError("the disk is gone")
        came = await trainer.sync(1, timeout_s=5.0)  # all of it: bad is never done
        assert came.loaded == ["good"]
        assert came.failed == {"bad": "the disk is gone"}
        await trainer.groups("1", "2", "3", oldest=1)
        assert bad.asked == []
        bad.fails, good.room = None, anyio.Event()
        await trainer.groups("4", "5", oldest=1)  # good may have been about to take one
        assert len(bad.asked) >= 1
        assert bad.versions == ["0", "1"]


async def test_a_runtime_that_cannot_load_brings_what_it_has_rolled_out(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, one, two = settings_for(redis), Player("one"), Player("two")
    one.gate, two.room = anyio.Event(), anyio.Event()
    found: dict[str, RolledOut] = {}
    async with training(settings, tmp_path) as trainer, playing(settings, one, two):
        await trainer.sync(0)
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.update(await trainer.groups("1"))

            tasks.start_soon(ask)
            await eventually(lambda: bool(one.asked))
            one.fails = ServerError("the disk is full")
            two.room.set()
            came = await trainer.sync(1, timeout_s=3)
            assert came.failed == {"one": "the disk is full"}
            one.gate.set()
            await eventually(lambda: bool(found), within_s=30)
    assert [row["version"] for row in found["1"].rows()] == ["0", "0"]
    assert (one.asked, two.asked) == (["1"], [])


async def test_what_was_sampled_with_weights_that_nobody_knows_goes_to_others_in_time(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, one, two = settings_for(redis, lease_s=2.0), Player("one"), Player("two")
    one.gate, two.room = anyio.Event(), anyio.Event()
    found: dict[str, RolledOut] = {}
    async with training(settings, tmp_path) as trainer, playing(settings, one, two):
        await trainer.sync(0)
        async with anyio.create_task_group() as tasks:

            async def ask() -> None:
                found.update(await trainer.groups("1"))

            tasks.start_soon(ask)
            await eventually(lambda: bool(one.asked))
            one.fails, one.sampled = ServerError("half of the servers have them"), "1"
            two.room.set()
            await trainer.sync(1, timeout_s=1)
            one.gate.set()
            await eventually(lambda: bool(found), within_s=60)
    assert [(row["by"], row["version"]) for row in found["1"].rows()] == [("two", "1")] * 2


async def test_of_two_runtimes_that_did_one_ticket_each_has_its_own_rollouts(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, put, num_put = RedisLink.get_pieces, RedisLink.put_pieces, 0

    async def counted(self: RedisLink, *arguments: Any) -> int:
        nonlocal num_put
        num = await put(self, *arguments)
        num_put += 1
        return num

    async def late(self: RedisLink, *arguments: Any) -> bytes:
        await eventually(lambda: num_put == 2)
        return await get(self, *arguments)

    monkeypatch.setattr(RedisLink, "put_pieces", counted)
    monkeypatch.setattr(RedisLink, "get_pieces", late)
    settings = settings_for(redis, lease_s=3600)
    one, two = Player("one"), Player("two")
    one.gate, two.room = anyio.Event(), anyio.Event()
    one.figures, two.figures = {"by": "one"}, {"by": "two"}
    found: dict[str, RolledOut] = {}
    async with training(settings, tmp_path) as trainer, playing(settings, one, two):
        await trainer.sync()
        (mark,) = (tmp_path / "results").iterdir()
        mark.unlink()  # they go through Redis
        async with anyio.create_task_group() as tasks, RedisLink.open(settings, "test") as link:

            async def ask() -> None:
                found.update(await trainer.groups("1"))

            async def is_dead(redis: Redis) -> None:
                """Return whether the runtime's lease has expired."""
                (entry,) = await redis.xpending_range(link.tickets, READERS, "-", "+", 1)
                await redis.xclaim(
                    link.tickets, READERS, "one", 0, [entry["message_id"]], idle=3_600_001
                )

            tasks.start_soon(ask)
            await eventually(lambda: bool(one.asked))
            await link.do(is_dead)
            two.room.set()
            await eventually(lambda: num_put == 1, within_s=30)
            one.gate.set()
            await eventually(lambda: bool(found), within_s=30)
            await until(lambda: link.do(lambda redis: redis.keys("*:rows:*")), [])
    assert found["1"].figures["by"] == found["1"].rows()[0]["by"] == "two"


async def test_weights_are_loaded_as_the_trainer_is_told(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, player = settings_for(redis), Player("one")
    async with training(settings, tmp_path) as trainer, playing(settings, player):
        await trainer.fleet.sync(PublishedFolder("0", tmp_path, "in_place"), timeout_s=30)
        await trainer.sync(1)
    assert player.pauses == ["in_place", "retract"]


@pytest.mark.parametrize("shares", [True, False])
async def test_a_result_that_cannot_be_read_is_asked_for_again_but_not_for_ever(
    redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shares: bool
) -> None:
    damaged = 2

    def read(data: bytes) -> list[dict[str, Any]]:
        nonlocal damaged
        damaged -= 1
        if damaged >= 0:
            raise ValueError("half of it is missing")
        return unpacked(data)

    monkeypatch.setattr("agentloop.training.fleet.coordinator.unpacked", read)
    # No audit: it is asked for again at once.
    settings, player = settings_for(redis, max_tries=3, lease_s=3600), Player("one")
    async with training(settings, tmp_path) as trainer, playing(settings, player):
        await trainer.sync()
        if not shares:
            (mark,) = (tmp_path / "results").iterdir()
            mark.unlink()
        assert told(await trainer.groups("1")) == whole("1")
        assert player.asked == ["1"] * 3
        damaged = 100
        why = r"group 2: .* could not be read 3 times \(fleet\.max_tries\).*half of it is missing"
        with pytest.raises(ServerError, match=why):
            await trainer.groups("2")
        assert player.asked == ["1"] * 3 + ["2"] * 3


async def test_without_a_runtime_that_can_load_there_is_an_error(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, bad = settings_for(redis), Player("bad")
    bad.fails = ServerError("the disk is gone")
    async with training(settings, tmp_path) as trainer, playing(settings, bad):
        with pytest.raises(ServerError, match=r"no runtime could load version 0.*the disk is gone"):
            await trainer.sync(0, timeout_s=1.0)


async def test_a_runtime_with_other_weights_than_the_others_ends(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings = settings_for(redis)
    one, two, odd = Player("one"), Player("two"), Player("odd")
    odd.checksum = "another"
    async with training(settings, tmp_path) as trainer, playing(settings, one, two):
        await trainer.sync(0)
        with pytest.raises(ServerError, match="the others: checksum another, not sum"):
            await odd.run(settings)
        await trainer.groups("1", "2")
    assert odd.asked == []


async def test_runtimes_that_disagree_without_a_majority_end_the_run(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, one, odd = settings_for(redis), Player("one"), Player("odd")
    odd.checksum = "another"
    said: list[str] = []
    async with training(settings, tmp_path, said) as trainer, playing(settings, one, odd):
        await eventually(lambda: len(said) == 2)
        with pytest.raises(ServerError, match="disagree about the weights 0"):
            await trainer.sync(0)


async def test_without_a_runtime_it_says_who_is_waited_for_and_ends_in_time(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, said = settings_for(redis, give_up_s=1.0), list[str]()
    with pytest.raises(ServerError, match=r"there was no runtime for 1 s.*--run test"):
        async with training(settings, tmp_path, said) as trainer:
            await trainer.sync()
    start = f"agentloop rollouts --redis {redis.url} --run test"
    assert said == [f"Waiting for a runtime. Start one with: {start}"]


async def test_a_redis_that_stays_away_ends_both(tmp_path: Path) -> None:
    settings = FleetSettings(redis=f"unix://{tmp_path}/none", run="test", give_up_s=0.3)
    with pytest.raises(ServerError, match=r"was unavailable for 0\.3 s"):
        async with training(settings, tmp_path):
            pass
    with pytest.raises(ServerError, match=r"was unavailable for 0\.3 s"):
        await Player("one").run(settings)


async def test_a_runtime_waits_for_a_trainer_but_not_for_ever(
    redis: RedisServer, tmp_path: Path
) -> None:
    settings, player = settings_for(redis, give_up_s=1.5), Player("one")
    with pytest.raises(ServerError, match=r"within 1\.5 s"):
        await player.run(settings)


async def test_runtimes_go_home_when_the_run_is_over(redis: RedisServer, tmp_path: Path) -> None:
    settings, player = settings_for(redis), Player("one")
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            async with training(settings, tmp_path) as trainer:
                tasks.start_soon(player.run, settings)
                await trainer.sync()


async def test_a_password_is_needed_and_stays_secret(tmp_path: Path) -> None:
    with redis_server(tmp_path / "redis", ["--requirepass", "open sesame"]) as redis:
        for url in (redis.url, redis.url.replace("unix://", "unix://:wrong@")):
            settings = settings_for(redis, redis=url)
            with pytest.raises(SettingsError, match=r"rejected the login.*fleet\.password") as no:
                async with training(settings, tmp_path):
                    pass
            assert "wrong" not in str(no.value).replace("WRONGPASS", "")
        right = settings_for(redis, redis=redis.url.replace("unix://", "unix://:open%20sesame@"))
        player = Player("one")
        async with training(right, tmp_path) as trainer, playing(right, player):
            await trainer.sync()
        assert "sesame" not in repr(right) + to_toml(right)
        assert right.redis == redis.url


def test_a_url_is_checked() -> None:
    with pytest.raises(pydantic.ValidationError, match="is not of the form redis://HOST:PORT/0"):
        FleetSettings(redis="127.0.0.1:6379")
    for password in ("sec/ret", "sec?ret", "sec#ret"):
        with pytest.raises(pydantic.ValidationError, match="%2F"):
            FleetSettings(redis=f"redis://:{password}@10.0.0.1:6380/2")
    told = FleetSettings(redis="rediss://10.0.0.1:6380/2?ssl_ca_certs=/etc/me@here/ca.pem")
    assert told.password is None
    told = FleetSettings(redis="rediss://me:secret@10.0.0.1:6380/2")
    assert told.redis == "rediss://me@10.0.0.1:6380/2"
    assert told.password is not None
    assert told.password.get_secret_value() == "secret"


@hypothesis.settings(deadline=None)
@hypothesis.given(emitted.calls, emitted.plain_data)
def test_rollouts_survive_the_fleet_unchanged(raw: str, more: Any) -> None:
    rows = [{"trajectory": emitted.rollout(raw), "truth": more}]
    assert repr(unpacked(packed(rows))) == repr(emitted.as_json(rows))


@hypothesis.settings(deadline=None)
@hypothesis.given(emitted.any_text, emitted.plain_data)
def test_tickets_survive_the_fleet_unchanged(text: str, more: Any) -> None:
    task = Task("a", [{"role": "user", "content": "?"}], "1", extra={"more": more})
    ticket = Ticket(incarnation="l", name="1", task=task, size=2, budget=BUDGET, oldest=0)
    found = Ticket.from_json(ticket.to_json())
    assert repr(found.task.extra) == repr({"more": emitted.as_json(more)})
    assert (found.task.prompt, found.budget, found.key) == (
        task.prompt,
        BUDGET,
        ticket.key,
    )
    result = Result(key="k", runtime="one", error="RewardError", message=text)
    assert Result.from_json(result.to_json()) == result
    assert result.message == text.encode("utf-8", "replace").decode()


def test_rows_are_packed_and_damage_is_seen() -> None:
    rows = [{"a": [1, 2.5, None], "b": "ü"}]
    assert unpacked(packed(rows)) == rows
    for damaged in (b"", packed(rows)[:-3], packed(rows)[3:]):
        with pytest.raises(ValueError, match=r".+"):
            unpacked(damaged)
