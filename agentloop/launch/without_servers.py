"""Open a sandbox, tools and an endpoint for rollouts that need no inference servers.

settings ──open_tools──> sandbox, tools ──open_endpoint──> a host of rollouts
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

from agentloop.agent.mcp import mcp_servers
from agentloop.agent.named_tools import imported_tools, resolved_tools
from agentloop.environments.endpoint import Endpoint
from agentloop.environments.player import PlayerHost, ResolveTools
from agentloop.inference.openai_client import EndpointSettings, sampling_fields
from agentloop.runtime import Settings
from agentloop.sandbox import Pool


@asynccontextmanager
async def open_tools(
    settings: Settings, *, log_dir: Path | None, progress: Callable[[str], None]
) -> AsyncIterator[tuple[Pool, ResolveTools]]:
    """Start the sandbox and the MCP servers; yield the sandbox, and what finds tools by name.

    Raises:
        SettingsError: one cannot be started, or a function that `tools` names be imported.
    """
    functions = imported_tools(settings.tools)
    async with (
        Pool(settings.sandbox, on_progress=progress) as pool,
        mcp_servers(settings.mcp, log_dir=log_dir) as servers,
    ):
        yield (
            pool,
            partial(
                resolved_tools,
                pool=pool,
                servers=servers,
                functions=functions,
                timeout_s=settings.tool_timeout_s,
                tool_format=settings.tool_format,
            ),
        )


@asynccontextmanager
async def open_endpoint(
    settings: Settings,
    endpoint: EndpointSettings,
    *,
    log_dir: Path | None = None,
    progress: Callable[[str], None],
) -> AsyncIterator[tuple[PlayerHost, EndpointSettings]]:
    """Start all that environments need, with an endpoint in place of the model.

    Each of its messages may be as long as `budget.max_response_tokens`.

    Yields:
        The host of rollouts, and the settings with the model's name.

    Raises:
        SettingsError: the endpoint refuses access, the model must be named, or a tool is missing.
        ServerUnavailable: the endpoint cannot be reached.
    """
    longest = settings.budget.max_response_tokens
    player = Endpoint.of(endpoint, sampling_fields(settings.sampling, endpoint, longest))
    named = endpoint.model_copy(update={"model": await player.model_name()})
    async with open_tools(settings, log_dir=log_dir, progress=progress) as (pool, resolve):
        yield PlayerHost(player, pool, resolve), named
