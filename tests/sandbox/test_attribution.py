"""The attribution of failures of random programs in local workers."""

from __future__ import annotations

import pytest

from agentloop.sandbox import Pool
from agentloop.sandbox.required_layers import missing_layers
from tests.sandbox.attribution import attribute, programs
from tests.sandbox.conftest import BARE


def test_programs_are_the_same_for_a_seed() -> None:
    assert programs(3, 50) == programs(3, 50) != programs(4, 50)
    assert {program.in_session for program in programs(3, 50)} == {True, False}


@pytest.mark.anyio
@pytest.mark.full
@pytest.mark.timeout(300)  # programs that never end have two seconds each
async def test_no_program_is_blamed_for_another_or_blames_us() -> None:
    async with Pool(BARE) as pool:
        if missing_layers(pool.stats()["layers"]):
            pytest.skip("local workers of this user do not isolate calls from each other")
        found = await attribute(pool, seed=1, number=60)
    assert found.violations == []
    assert found.num_right > 0
