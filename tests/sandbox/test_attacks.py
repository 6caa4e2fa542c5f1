"""The table of attacks against local workers, with what this form promises."""

from __future__ import annotations

import os

import pytest

from sandbox import Pool
from tests.sandbox.attacks import ATTACKS, Attack

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
async def test_attack(pool: Pool, attack: Attack) -> None:
    if attack.wall == "cgroup" or (attack.wall == "uid" and os.getuid() != 0):
        pytest.skip(f"local workers of this user have no {attack.wall}")
    if pool.stats()["layers"]["root"].startswith("no") and "root" in attack.name:
        pytest.skip("this machine refuses a root of its own")
    result = await pool.run(attack.code, timeout_s=attack.timeout_s)
    assert result.status in attack.statuses, result
    assert attack.check(result), result
    assert result.run_s < attack.within_s + attack.timeout_s
    assert (await pool.run("print(6 * 7)")).stdout == "42\n"
    assert result.attempt == 1
    assert pool.stats()["replaced"] == 0
