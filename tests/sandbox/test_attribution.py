"""The attribution of failures of random programs in local workers."""

from __future__ import annotations

import pytest

from agentloop.sandbox import Pool
from agentloop.sandbox.required_layers import missing_layers
from tests.sandbox.attribution import attribute, programs
from tests.sandbox.conftest import BARE
from tests.sandbox.hostile import HOSTILE

MANY = [pytest.mark.full, pytest.mark.timeout(1800)]  # programs that never end have two seconds


def test_programs_are_the_same_for_a_seed() -> None:
    assert programs(3, 50) == programs(3, 50) != programs(4, 50)
    assert {program.in_session for program in programs(3, 50)} == {True, False}


def test_every_hostile_piece_is_python() -> None:
    for name, code in HOSTILE.items():
        compile(code, name, "exec")


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=MANY)])
async def test_no_program_is_blamed_for_another_or_blames_us(form: str, number: int) -> None:
    async with Pool(BARE) as pool:
        if missing_layers(pool.stats()["layers"]):
            pytest.skip("local workers of this user do not isolate calls from each other")
        result = await attribute(pool, seed=number, number=number)
    assert result.violations == []
    assert result.num_right > 0
