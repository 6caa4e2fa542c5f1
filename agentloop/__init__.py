"""An asyncio-first runtime for tool-using language-model agents.

import anyio
import agentloop

def multiply(a: int, b: int) -> int:
    "Multiply two integers."
    return a * b

async def main() -> None:
    async with agentloop.Runtime() as runtime:
        trajectory = await runtime.rollout("What is 37 times 48?", tools=[multiply])
        print(trajectory.answer)

anyio.run(main)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from agentloop.agent.mcp import mcp_server
    from agentloop.agent.rollout import Budget
    from agentloop.agent.tools import concurrent
    from agentloop.environments.agent import Agent
    from agentloop.environments.conversation import Conversation
    from agentloop.environments.endpoint import Endpoint
    from agentloop.environments.environment import Environment, environment
    from agentloop.environments.judge import Judge
    from agentloop.environments.rewards.reward import Reward
    from agentloop.environments.simulated_user import SimulatedUser
    from agentloop.environments.tasks.sources import Task
    from agentloop.errors import (
        AgentLoopError,
        InfrastructureFailed,
        LimitReached,
        RequestError,
        ServerError,
        SettingsError,
    )
    from agentloop.inference.sglang.sampling import Sampling
    from agentloop.rollouts.scripted import PlayedRollout, call, play
    from agentloop.runtime import Runtime, Settings
    from agentloop.trajectory import (
        Message,
        StopReason,
        ToolCall,
        ToolCallStatus,
        ToolResult,
        Trajectory,
        Turn,
    )

__all__ = [
    "Agent",
    "AgentLoopError",
    "Budget",
    "Conversation",
    "Endpoint",
    "Environment",
    "InfrastructureFailed",
    "Judge",
    "LimitReached",
    "Message",
    "PlayedRollout",
    "RequestError",
    "Reward",
    "Runtime",
    "Sampling",
    "ServerError",
    "Settings",
    "SettingsError",
    "SimulatedUser",
    "StopReason",
    "Task",
    "ToolCall",
    "ToolCallStatus",
    "ToolResult",
    "Trajectory",
    "Turn",
    "call",
    "concurrent",
    "environment",
    "mcp_server",
    "play",
]

_MODULES = {
    "agentloop.agent.mcp": ("mcp_server",),
    "agentloop.agent.rollout": ("Budget",),
    "agentloop.agent.tools": ("concurrent",),
    "agentloop.environments.agent": ("Agent",),
    "agentloop.environments.conversation": ("Conversation",),
    "agentloop.environments.environment": ("Environment", "environment"),
    "agentloop.rollouts.scripted": ("PlayedRollout", "call", "play"),
    "agentloop.errors": (
        "AgentLoopError",
        "InfrastructureFailed",
        "LimitReached",
        "RequestError",
        "ServerError",
        "SettingsError",
    ),
    "agentloop.environments.endpoint": ("Endpoint",),
    "agentloop.environments.judge": ("Judge",),
    "agentloop.environments.simulated_user": ("SimulatedUser",),
    "agentloop.inference.sglang.sampling": ("Sampling",),
    "agentloop.environments.rewards.reward": ("Reward",),
    "agentloop.runtime": ("Runtime", "Settings"),
    "agentloop.environments.tasks.sources": ("Task",),
    "agentloop.trajectory": (
        "Message",
        "ToolCallStatus",
        "StopReason",
        "ToolCall",
        "ToolResult",
        "Trajectory",
        "Turn",
    ),
}


def __getattr__(name: str) -> object:
    # Import on first use: `agentloop --help` and the learner need none of these modules.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'agentloop' has no attribute {name!r}")
