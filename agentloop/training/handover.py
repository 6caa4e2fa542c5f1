"""New weights into every server, before any of them serves on.

published folder ──> require_weights ──> each server loads, side by side ──> it serves again
                     (all are STALE)        └─ fails, is late, or has others than the rest:
                                               it stays STALE, until `keep_up` succeeds with it

What a server says about its version is not enough: it serves once its checksum was compared.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import anyio

from agentloop.errors import ServerError
from agentloop.inference.health import ServerState
from agentloop.inference.router import Router
from agentloop.inference.sglang import SGLangServer

__all__ = ["Handover", "hand_over", "keep_up"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Handover:
    """What came of it: urls of servers that have the new weights, and of those that do not."""

    version: str
    folder: Path
    loaded: list[str]
    failed: dict[str, str]
    seconds: float
    checksum: str


async def hand_over(router: Router, folder: Path, version: str, *, timeout_s: float) -> Handover:
    """Give the weights in `folder` to all servers. Where all are being started again, it waits.

    Raises:
        ServerError: none of them could load them, or nobody can say which of them has the right
            ones.
    """
    begun = time.monotonic()
    router.require_weights(version, verified=True)
    with anyio.move_on_after(timeout_s):
        while not router.servers:  # noqa: ASYNC110  # no event says so
            await anyio.sleep(0.1)
    checksums, failed = await _give(router.servers, folder, version, timeout_s)
    (checksum, num_equal), *others = Counter(checksums.values()).most_common(2) or [("", 0)]
    if others and others[0][1] == num_equal:
        raise ServerError(f"the servers do not have the same weights {version}: {checksums}")
    loaded = _take(router, checksums, failed, checksum, version)
    if not loaded:
        raise ServerError(f"no server could load version {version}: {failed}")
    return Handover(version, folder, loaded, failed, time.monotonic() - begun, checksum)


async def keep_up(router: Router, handover: Handover, *, timeout_s: float) -> bool:
    """Give the weights of the last hand-over to the servers that are STALE: they failed then, or
    were started again, with the weights of their start. Those that fail are logged.

    Returns:
        Whether there are none left that are STALE.
    """
    stale = {view.url for view in router.view() if view.state is ServerState.STALE}
    servers = [server for server in router.servers if server.url in stale]
    if not servers:
        return True
    version = handover.version
    checksums, failed = await _give(servers, handover.folder, version, timeout_s)
    loaded = _take(router, checksums, failed, handover.checksum, version)
    for url in loaded:
        log.warning("%s has version %s, and serves again", url, version)
    return not failed


async def _give(
    servers: Sequence[SGLangServer], folder: Path, version: str, timeout_s: float
) -> tuple[dict[str, str], dict[str, str]]:
    """Checksums of those that have loaded, and why the others have not, by url."""
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
        for server in servers:
            tasks.start_soon(give, server)
    return checksums, failed


def _take(
    router: Router,
    checksums: Mapping[str, str],
    failed: dict[str, str],
    expected: str,
    version: str,
) -> list[str]:
    """Let those with the expected checksum serve; returns them. The others are added to `failed`
    and logged."""
    for url, found in checksums.items():
        if found == expected:
            router.weights_loaded(url, version)
        else:
            failed[url] = f"its weights differ from the others': {found}"
    for url, why in failed.items():
        log.error("%s does not have version %s: %s", url, version, why)
    return sorted(set(checksums) - set(failed))
