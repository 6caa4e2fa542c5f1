"""Untrusted Python, run in warm containers (or confined local processes), one process per call.

async with Pool() as pool:
    result = await pool.run("print(6 * 7)")
    async with pool.session() as session:
        await session.run("x = 41")
        (await session.run("x + 1")).result  # '42'
"""

from agentloop.sandbox.computer import (
    CommandResult,
    Computer,
    ComputerLimits,
    ComputerShell,
    Snapshot,
)
from agentloop.sandbox.errors import (
    ComputerLost,
    LostBy,
    Overloaded,
    ProgramUnsupported,
    ProtocolError,
    SandboxError,
    SandboxUnavailable,
    SessionLost,
)
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.program import Program, ProgramEnd
from agentloop.sandbox.results import CallError, CallResult, CallStatus
from agentloop.sandbox.session import Session
from agentloop.sandbox.settings import PoolSettings

__all__ = [
    "CallError",
    "CallResult",
    "CallStatus",
    "CommandResult",
    "Computer",
    "ComputerLimits",
    "ComputerLost",
    "ComputerShell",
    "LostBy",
    "Overloaded",
    "Pool",
    "PoolSettings",
    "Program",
    "ProgramEnd",
    "ProgramUnsupported",
    "ProtocolError",
    "SandboxError",
    "SandboxUnavailable",
    "Session",
    "SessionLost",
    "Snapshot",
]
