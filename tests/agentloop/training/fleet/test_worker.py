"""A runtime's end of a fleet, with fake rollouts and a fake Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.agent.rollout import Budget
from agentloop.aio import task_group
from agentloop.environments.tasks.sources import Task
from agentloop.errors import RequestError, ServerError
from agentloop.training.fleet import worker
from agentloop.training.fleet.messages import (
    FleetError,
    Result,
    Ticket,
    TrainerState,
    VersionError,
    WeightsAnnouncement,
    WorkerStatus,
    unpacked,
)
from agentloop.training.fleet.redis_link import RedisLink
from agentloop.training.fleet.worker import Member, wait_for_trainer
from tests.agentloop.training.fleet.fake_redis import FakeRedis
from tests.agentloop.training.fleet_player import RECIPE, Player
from tests.support import eventually

pytest.importorskip("redis", reason="needs redis: pip install 'agentloop-rl[fleet]'")

pytestmark = pytest.mark.anyio

LEASE_S = 1000.0  # so that nothing happens because time passes


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_POLL_S", 0.001)
    monkeypatch.setattr(worker, "_RETRY_S", 0.0)


class Trainer:
    """What a runtime knows of its trainer: the state in Redis, tickets and a folder."""

    def __init__(self, folder: Path) -> None:
        self.redis = FakeRedis()
        self.link = RedisLink(self.redis, "redis://here", "run", 5.0)
        weights = WeightsAnnouncement(
            number=1, version="0", folder=str(folder), timeout_s=5, checksum="sum"
        )
        self.state = TrainerState(
            incarnation="first",
            recipe=RECIPE,
            lease_s=LEASE_S,
            max_tries=2,
            max_result_mib=1,
            folder=str(folder),
            weights=weights,
        )
        self.show()

    def show(self, **changes: Any) -> None:
        """Publish the state, with these changes."""
        self.state = self.state.model_copy(update=changes)
        self.redis.values[self.link.trainer] = self.state.to_json()

    def show_weights(self, **changes: Any) -> None:
        assert self.state.weights is not None
        self.show(weights=self.state.weights.model_copy(update=changes))

    async def ask(self, name: str = "1", *, oldest: int = 0) -> Ticket:
        """Add a ticket."""
        ticket = Ticket(
            incarnation=self.state.incarnation,
            name=name,
            task=Task(f"task-{name}", "What is 1 plus 2?", "3"),
            size=2,
            budget=Budget(),
            oldest=oldest,
        )
        await self.redis.xadd(self.link.tickets, {"ticket": ticket.to_json()})
        return ticket

    @property
    def tickets(self) -> list[str]:
        """The names of the tickets that are left."""
        entries = self.redis.streams.get(self.link.tickets, {}).values()
        return [Ticket.from_json(fields[b"ticket"]).name for fields in entries]

    @property
    def results(self) -> list[Result]:
        entries = self.redis.streams.get(self.link.groups, {}).values()
        return [Result.from_json(fields[b"result"]) for fields in entries]

    async def result(self) -> Result:
        await eventually(lambda: bool(self.results))
        (found,) = self.results
        return found

    def status(self, player: Player) -> WorkerStatus | None:
        found = self.redis.values.get(self.link.name("runtime", player.name))
        return None if found is None else WorkerStatus.from_json(found)

    async def run(self, player: Player, *, give_up_s: float = 5.0) -> None:
        """Run a runtime until the run is over."""
        member = Member(
            self.link,
            self.state,
            player,
            player,
            name=player.name,
            num_servers=1,
            give_up_s=give_up_s,
            say=lambda line: None,
        )
        with anyio.fail_after(15):
            await member.run()

    @asynccontextmanager
    async def joined(self, player: Player) -> AsyncIterator[None]:
        """Run a runtime while the context is open; then announce that the run is over."""
        async with task_group() as tasks:
            tasks.start_soon(self.run, player)
            yield
            self.show(over=True)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
def player() -> Player:
    return Player("one")


async def test_the_trainer_is_waited_for(trainer: Trainer) -> None:
    said: list[str] = []
    del trainer.redis.values[trainer.link.trainer]

    async def begin() -> None:
        await eventually(lambda: bool(said))
        trainer.show()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(begin)
        state = await wait_for_trainer(trainer.link, within_s=10, say=said.append)
    assert state == trainer.state
    assert said == ["Waiting for the trainer: there is no agentloop:run:trainer in Redis yet"]


async def test_a_trainer_that_does_not_appear_is_an_error(trainer: Trainer) -> None:
    del trainer.redis.values[trainer.link.trainer]
    with pytest.raises(ServerError, match="no trainer appeared at agentloop:run:trainer"):
        await wait_for_trainer(trainer.link, within_s=0.01, say=lambda line: None)


async def test_a_trainer_of_another_version_is_refused(trainer: Trainer) -> None:
    trainer.show(agentloop="0.0.7")
    with pytest.raises(VersionError, match=r"the trainer has agentloop 0\.0\.7"):
        await wait_for_trainer(trainer.link, within_s=10, say=lambda line: None)


async def test_a_ticket_is_done_and_its_result_delivered(
    trainer: Trainer, player: Player, tmp_path: Path
) -> None:
    (tmp_path / "first").touch()  # the folder is shared
    ticket = await trainer.ask()
    async with trainer.joined(player):
        result = await trainer.result()
        status = trainer.status(player)
        assert status is not None
        assert (status.number, status.checksum, status.error) == (1, "sum", "")
    assert (result.key, result.runtime, result.error) == (ticket.key, "one", "")
    rows = unpacked((tmp_path / result.rows).read_bytes())
    assert [row["task"] for row in rows] == ["task-1"] * 2
    assert (trainer.tickets, trainer.redis.pending) == ([], {})
    assert trainer.status(player) is None, "it has left"


async def test_a_result_goes_through_redis_without_a_shared_folder(
    trainer: Trainer, player: Player
) -> None:
    await trainer.ask()
    async with trainer.joined(player):
        result = await trainer.result()
    assert result.num_pieces == 1
    assert len(unpacked(await trainer.link.get_pieces(result.rows, 1))) == 2


async def test_no_ticket_is_taken_before_the_weights_are_confirmed(
    trainer: Trainer, player: Player
) -> None:
    trainer.show_weights(checksum="")
    await trainer.ask()
    async with trainer.joined(player):
        await eventually(lambda: getattr(trainer.status(player), "number", -1) == 1)
        await anyio.wait_all_tasks_blocked()
        assert player.asked == []
        trainer.show_weights(checksum="sum")
        await trainer.result()
    assert player.asked == ["1"]


async def test_a_ticket_for_newer_weights_is_released(
    trainer: Trainer, player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trainer.ask(oldest=7)
    trainer.show(lease_s=0.05)
    async with trainer.joined(player):
        await eventually(lambda: any(one.times == 2 for one in trainer.redis.pending.values()))
    assert player.asked == []
    assert trainer.tickets == ["1"]


async def test_a_status_that_changes_while_it_is_published_is_published_again(
    trainer: Trainer, player: Player
) -> None:
    trainer.redis.may_set = anyio.Event()
    async with trainer.joined(player):
        await eventually(lambda: player.versions == ["0"])  # the weights are loaded
        await anyio.wait_all_tasks_blocked()
        trainer.redis.may_set.set()
        await eventually(lambda: getattr(trainer.status(player), "number", -1) == 1)


async def test_weights_that_cannot_be_loaded_are_reported_and_tried_again(
    trainer: Trainer, player: Player
) -> None:
    await trainer.ask()
    player.fails = ServerError("out of memory")
    async with trainer.joined(player):
        await eventually(lambda: getattr(trainer.status(player), "error", "") == "out of memory")
        assert player.asked == []
        player.fails = None
        await trainer.result()


async def test_a_folder_that_is_not_mounted_is_named(trainer: Trainer, player: Player) -> None:
    trainer.show_weights(folder="/no/such/folder")
    async with trainer.joined(player):
        await eventually(
            lambda: getattr(trainer.status(player), "error", "").startswith(
                "/no/such/folder does not exist here: weights.folder, or run.folder, must be on"
            )
        )


async def test_weights_that_differ_from_those_of_the_others_end_it(
    trainer: Trainer, player: Player
) -> None:
    trainer.show_weights(checksum="another")
    with pytest.raises(ServerError, match="version 0: this runtime's weights differ from those of"):
        await trainer.run(player)


async def test_changed_settings_end_it(trainer: Trainer, player: Player) -> None:
    with pytest.raises(  # noqa: PT012
        FleetError, match="the run's settings have changed: restart this runtime"
    ):
        async with trainer.joined(player):
            await eventually(lambda: trainer.status(player) is not None)
            trainer.show(recipe=RECIPE.model_copy(update={"group_size": 3}))
            await anyio.sleep_forever()


async def test_a_silent_trainer_ends_it(trainer: Trainer, player: Player) -> None:
    del trainer.redis.values[trainer.link.trainer]
    with pytest.raises(ServerError, match=r"the trainer was silent for 0\.01 s \(fleet\.give_up_s"):
        await trainer.run(player, give_up_s=0.01)


async def test_tickets_of_a_trainer_that_is_gone_are_released(
    trainer: Trainer, player: Player
) -> None:
    player.gate = anyio.Event()
    await trainer.ask()
    async with trainer.joined(player):
        await eventually(lambda: player.asked == ["1"])
        trainer.show(incarnation="second")
        await eventually(
            lambda: [one.idle_ms for one in trainer.redis.pending.values()] == [1000 * LEASE_S + 1]
        )
    assert trainer.results == []


async def test_one_that_leaves_releases_its_tickets(trainer: Trainer, player: Player) -> None:
    player.gate = anyio.Event()
    await trainer.ask()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(trainer.run, player)
        await eventually(lambda: player.asked == ["1"])
        tasks.cancel_scope.cancel()
    assert [one.idle_ms for one in trainer.redis.pending.values()] == [1000 * LEASE_S + 1]
    assert trainer.redis.sets[trainer.link.runtimes] == set()
    assert trainer.status(player) is None


async def test_an_invalid_task_is_the_result(trainer: Trainer, player: Player) -> None:
    player.error = RequestError("prompt: expected text")
    await trainer.ask()
    async with trainer.joined(player):
        result = await trainer.result()
    assert (result.error, result.message) == ("RequestError", "prompt: expected text")


@pytest.mark.parametrize("how", ["raised", "rows"])
async def test_a_group_that_infrastructure_broke_is_given_up_after_so_many_attempts(
    trainer: Trainer, player: Player, how: str
) -> None:
    if how == "raised":
        player.error = ServerError("no server is left")
    else:
        player.stop_reason = "infrastructure"
    await trainer.ask()
    async with trainer.joined(player):
        result = await trainer.result()
    assert player.asked == ["1"] * trainer.state.max_tries
    assert result.error == "ServerError"
    assert result.message.startswith("group 1: 2 attempts failed (fleet.max_tries)")


async def test_rollouts_of_weights_that_were_never_confirmed_are_not_delivered(
    trainer: Trainer, player: Player
) -> None:
    player.sampled = "other"
    trainer.show(lease_s=0.05)
    trainer.show_weights(timeout_s=0.05)
    await trainer.ask()
    async with trainer.joined(player):
        result = await trainer.result()
    assert result.error == "ServerError", "it was tried until there were too many attempts"
    assert len(player.asked) == 2
