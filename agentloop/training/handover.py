"""New weights into every server, before any of them serves on.

published folder ──> require_weights ──> each server loads, side by side ──> it serves again
                     (all are STALE)        └─ fails, is late, or has others than the rest:
                                               it stays STALE and serves nothing
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import anyio

from agentloop.errors import ServerError
from agentloop.inference.router import Router
from agentloop.inference.sglang import SGLangServer

__all__ = ["Handover", "hand_over"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Handover:
    """What came of it: urls of servers that have the new weights, and of those that do not."""

    version: str
    loaded: list[str]
    failed: dict[str, str]
    seconds: float
    checksum: str


async def hand_over(router: Router, folder: Path, version: str, *, timeout_s: float) -> Handover:
    """Give the weights in `folder` to all servers.

    Raises:
        ServerError: none of them could load them.
    """
    begun = time.monotonic()
    router.require_weights(version)
    checksums: dict[str, str] = {}
    failed: dict[str, str] = {}

    async def give(server: SGLangServer) -> None:
        try:
            with anyio.fail_after(timeout_s):
                checksums[server.url] = await server.update_weights(
                    str(folder), version, timeout_s=timeout_s
                )
        except (ServerError, TimeoutError) as error:
            failed[server.url] = str(error) or f"not within {timeout_s:g} s"

    async with anyio.create_task_group() as tasks:
        for server in router.servers:
            tasks.start_soon(give, server)
    common = Counter(checksums.values()).most_common(1)
    checksum = common[0][0] if common else ""
    for url, found in checksums.items():
        if found == checksum:
            router.weights_loaded(url, version)
        else:
            failed[url] = f"its weights differ from the others': {found}"
    for url, why in failed.items():
        log.error("%s does not have version %s: %s", url, version, why)
    loaded = sorted(set(checksums) - set(failed))
    if not loaded:
        raise ServerError(f"no server could load version {version}: {failed}")
    return Handover(version, loaded, failed, time.monotonic() - begun, checksum)
