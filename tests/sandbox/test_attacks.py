"""The table of attacks against local workers, with what each form promises."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from agentloop.sandbox import Pool
from agentloop.sandbox.required_layers import missing_layers
from tests.sandbox.attacks import (
    AFTER,
    ATTACKS,
    CHANNELS,
    Attack,
    Channel,
    check_after,
    check_channel,
    check_neighbours,
    check_that_disks_are_apart,
    check_that_the_next_finds_nothing,
    num_seen,
)
from tests.sandbox.conftest import BARE

pytestmark = pytest.mark.timeout(90)


@pytest.fixture(scope="module")
async def pool(form: str, anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(BARE) as pool:
        yield pool


@pytest.fixture(scope="module")
async def num_processes(pool: Pool) -> AsyncIterator[int | None]:
    """Return the number of processes that a call sees in an idle worker; None if it sees the
    machine's."""
    if pool.stats()["layers"]["process isolation"].startswith("no"):
        yield None
    else:
        yield num_seen(await pool.run(AFTER))


def lacks(pool: Pool, wall: str) -> bool:
    """Return the protections that local workers lack on this machine."""
    layers = pool.stats()["layers"]
    missing = {
        "": False,
        "uid": layers["uid"].startswith("no"),
        "spaces": layers["process isolation"].startswith("no")
        or layers["file system"].startswith("no"),
        "filter": layers["system calls"].startswith("no"),
        "hidden": layers["other calls' processes"].startswith("no"),
        "counted": not layers["memory"].startswith("limited and counted"),
    }
    return bool(missing[wall])


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
@pytest.mark.full
async def test_attack(pool: Pool, attack: Attack, num_processes: int | None) -> None:
    if lacks(pool, attack.wall):
        pytest.skip(f"local workers of this user have no {attack.wall}")
    if attack.name == "write to the root" and lacks(pool, "spaces"):
        pytest.skip("this machine refuses a root of its own")
    num_lost = pool.stats()["lost"]
    result = await pool.run(attack.code, timeout_s=attack.timeout_s)
    assert result.status in attack.statuses, result
    assert attack.check(result), result
    await check_after(pool, num_processes)
    assert result.attempt == 1
    assert pool.stats()["lost"] == num_lost


@pytest.mark.parametrize("channel", CHANNELS, ids=lambda channel: channel.name)
async def test_calls_beside_each_other_can_not_talk(pool: Pool, channel: Channel) -> None:
    if lacks(pool, channel.wall):
        pytest.skip(f"local workers of this user have no {channel.wall}")
    await check_channel(pool, channel)


async def test_calls_beside_each_other_see_nothing(pool: Pool) -> None:
    if lacks(pool, "uid") and lacks(pool, "spaces"):
        pytest.skip("local workers of this user share their uid and processes")
    await check_neighbours(pool, files_apart=not lacks(pool, "uid"))


async def test_next_call_finds_nothing(form: str) -> None:
    settings = BARE.model_copy(update={"workers": 1, "max_sessions": 0})
    async with Pool(settings) as pool:
        await check_that_the_next_finds_nothing(pool)
        assert pool.stats()["lost"] == 0


async def test_full_disk_is_full_for_one_call_alone(pool: Pool) -> None:
    if lacks(pool, "spaces"):
        pytest.skip("this machine refuses file systems of their own")
    await check_that_disks_are_apart(pool)


async def test_every_form_of_this_machine_keeps_calls_apart(pool: Pool) -> None:
    """Here, where the tests may make namespaces. A layer that begins with "no" is no wall."""
    layers = pool.stats()["layers"]
    if layers["process isolation"].startswith("no"):
        pytest.skip("this machine refuses namespaces")
    assert missing_layers(layers) == []
    assert layers["other calls' processes"] == "hidden"
