"""The container of a program, and how a local one ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.environments.local_program import ProgramOutput, program_end
from agentloop.sandbox import (
    CallStatus,
    ComputerLimits,
    Pool,
    PoolSettings,
    Program,
    ProgramUnsupported,
)
from agentloop.sandbox.computer.machine import ProgramSpec, machine_config
from agentloop.sandbox.program import KEPT_BYTES
from tests.sandbox.conftest import BARE

pytestmark = pytest.mark.anyio

JOB = Program(("agent", "--fast"), Path("/host/model"), env={"A": "b"})


@pytest.mark.parametrize("is_read_only", [True, False])
def test_files_of_a_program(is_read_only: bool) -> None:
    spec = ProgramSpec("image", "none", ComputerLimits(128), Path("/mine"), is_read_only)
    host: Any = machine_config(spec, PoolSettings(), Path("/a"), Path("/b"))["HostConfig"]
    assert host["NetworkMode"] == "none"
    assert host["ReadonlyRootfs"] is is_read_only
    assert f"size={128 << 20}" in host["Tmpfs"]["/tmp"]
    assert [mount["Target"] for mount in host["Mounts"]][-1] == "/agent"
    assert all(mount["ReadOnly"] for mount in host["Mounts"])


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=KEPT_BYTES))))
def test_end_of_each_stream_is_kept(parts: list[tuple[int, bytes]]) -> None:
    total = sum(len(data) for _, data in parts)
    output, exact = ProgramOutput(total - 1), ProgramOutput(total)
    for number, data in parts:
        output.add(number, data)
        exact.add(number, data)
    for number, kept in enumerate(output.ends, 1):
        assert kept == b"".join(data for of, data in parts if of == number)[-KEPT_BYTES:]
    assert output.is_too_long
    assert not exact.is_too_long


@pytest.mark.parametrize(
    ("status", "limit", "expected"),
    [
        (0, None, (CallStatus.OK, 0)),
        (3, None, (CallStatus.ERROR, 3)),
        (137, None, (CallStatus.KILLED, 137)),
        (None, CallStatus.TIMEOUT, (CallStatus.TIMEOUT, None)),
    ],
)
def test_how_a_program_ended(
    status: int | None, limit: CallStatus | None, expected: tuple[CallStatus, int | None]
) -> None:
    output = ProgramOutput(100)
    output.add(1, "é".encode()[:1])
    end = program_end(status, limit, output, 1.5)
    assert (end.status, end.exit_status) == expected
    assert end.stdout == "\N{REPLACEMENT CHARACTER}"


async def test_local_workers_run_no_program_in_a_container() -> None:
    async with Pool(BARE) as pool:
        assert not pool.has_containers
        with pytest.raises(ProgramUnsupported, match="need a Docker Engine on this machine"):
            await pool.run_program(JOB, 5)
    with pytest.raises(RuntimeError):
        await pool.run_program(JOB, 5)
