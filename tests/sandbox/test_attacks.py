"""The table of attacks against local workers, as far as they protect against them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest

from sandbox import Pool
from tests.sandbox.attacks import (
    AFTER,
    ATTACKS,
    Attack,
    check_after,
    check_neighbours,
    check_that_disks_are_apart,
    check_that_the_next_finds_nothing,
    num_seen,
)
from tests.sandbox.conftest import BARE

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
async def num_processes(pool: Pool) -> AsyncIterator[int | None]:
    """Return the number of processes that a call sees in an idle worker; None if it sees the
    machine's."""
    if pool.stats()["layers"]["processes apart"].startswith("no"):
        yield None
    else:
        yield num_seen(await pool.run(AFTER))


def lacks(pool: Pool, wall: str) -> bool:
    """Return the protections that local workers lack on this machine."""
    layers = pool.stats()["layers"]
    missing = {
        "": False,
        "uid": os.getuid() != 0,
        "spaces": layers["processes apart"].startswith("no") or layers["root"].startswith("no"),
        "filter": layers["system calls"].startswith("no"),
    }
    return bool(missing[wall])


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_attack(pool: Pool, attack: Attack, num_processes: int | None) -> None:
    if lacks(pool, attack.wall):
        pytest.skip(f"local workers of this user have no {attack.wall}")
    if attack.name == "write to the root" and lacks(pool, "spaces"):
        pytest.skip("this machine refuses a root of its own")
    replaced = pool.stats()["replaced"]
    result = await pool.run(attack.code, timeout_s=attack.timeout_s)
    assert result.status in attack.statuses, result
    assert attack.check(result), result
    await check_after(pool, num_processes)
    assert result.attempt == 1
    assert pool.stats()["replaced"] == replaced


async def test_calls_beside_each_other_see_nothing(pool: Pool) -> None:
    if lacks(pool, "uid") and lacks(pool, "spaces"):
        pytest.skip("local workers of this user share their uid and processes")
    await check_neighbours(pool, files_apart=not lacks(pool, "uid"))


async def test_the_next_call_finds_nothing() -> None:
    settings = BARE.model_copy(update={"slots_per_worker": 1, "sessions_per_worker": 0})
    async with Pool(settings) as pool:
        await check_that_the_next_finds_nothing(pool)
        assert pool.stats()["replaced"] == 0


async def test_a_full_disk_is_full_for_one_call_alone(pool: Pool) -> None:
    if lacks(pool, "spaces"):
        pytest.skip("this machine refuses file systems of their own")
    await check_that_disks_are_apart(pool)
