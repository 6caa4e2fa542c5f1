"""Weight sync: load new weights into all servers and verify them.

published ──> require_weights ──> all servers load concurrently ──> each serves again
              (all are STALE)        └─ on failure, timeout or wrong weights:
                                        it stays STALE until `sync_stale` succeeds with it

Servers that share their GPUs with the learner give their memory back before a step (`lending`), and
take it again as they load weights, the new ones or, if there are none, the last (loop.py).

There are two transports (transport.py): a folder that the learner writes and the servers read
(disk.py), and a broadcast from the learner to the servers (process_group.py). The version that a
server reports proves nothing: it gets new requests only after its weights were compared with the
learner's (verify.py), or, if the expected checksums are unknown, with those of the other servers.

Turns in progress continue under the new weights, with the version of each token
recorded. They continue before the weights are verified, so that a slow server does not delay the
others. If a server turns out to have wrong weights, its streams are broken off, and
`Served.is_tainted` the rollouts that it sampled in the meantime.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import anyio

from agentloop.aio import task_group
from agentloop.errors import ServerError
from agentloop.inference.replicas import Replica
from agentloop.inference.router import Router
from agentloop.inference.scheduling.health import ServerState
from agentloop.training.learner_client.client import Learner
from agentloop.training.weight_sync.disk import FolderPublisher
from agentloop.training.weight_sync.process_group import GroupPublisher
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.transport import PublishedWeights, Publisher
from agentloop.training.weight_sync.verify import Proof, judge
from agentloop.trajectory import Trajectory

log = logging.getLogger(__name__)

_MAX_WRONG = 16  # syncs with wrong weights that are remembered: longer than any rollout lasts


class Serving(Protocol):
    """A set of servers that published weights are synced to: of a runtime here, or of several."""

    async def sync(self, published: PublishedWeights, *, timeout_s: float) -> SyncResult:
        """Sync these weights to all servers. Raises ServerError if none gets the right ones."""
        ...

    async def sync_stale(self, result: SyncResult, *, timeout_s: float) -> bool:
        """Sync the last weights to servers that lack them; return whether all have them now."""
        ...


def publisher(settings: WeightsSettings, learner: Learner, run: Path) -> Publisher:
    """Create the publisher that the settings ask for.

    `run` is the run's folder; its path distinguishes runs that share `weights.folder`.
    """
    if settings.transport == "broadcast":
        return GroupPublisher(learner, run / "weights", settings)
    if settings.folder is None:
        return FolderPublisher(learner, run / "weights", settings)
    run = run.expanduser().absolute()
    name = f"{run.name}-{hashlib.sha256(bytes(run)).hexdigest()[:8]}"
    folder = settings.folder.expanduser().absolute() / name
    return FolderPublisher(learner, folder, settings, is_external=True)


@dataclass(frozen=True, slots=True)
class SyncResult:
    """The result of a weight sync.

    Attributes:
        loaded: urls of the servers that have the new weights.
        failed: errors of the others, by url.
        checksum: SGLang's checksum of all weights, of the first server that has them.
        rest: the accepted checksum of tensors that were not compared with the learner's; see
            `judge`.
        num_verified: number of servers verified against the learner, tensor by tensor.
    """

    published: PublishedWeights
    loaded: list[str]
    failed: dict[str, str]
    seconds: float
    checksum: str
    rest: str | None = None
    num_verified: int = 0

    @property
    def version(self) -> str:
        return self.published.version


@dataclass(frozen=True, slots=True)
class _Wrong:
    """Servers that had wrong weights under the name of a version, until a point in time."""

    version: str
    urls: frozenset[str]
    until_unix_s: float

    def has_sampled(self, trajectory: Trajectory) -> bool:
        """Return whether tokens of a trajectory may have been sampled with the wrong weights."""
        return any(
            not self.urls.isdisjoint(turn.servers)
            and any(span.version == self.version for span in turn.versions)
            and trajectory.created_unix_s + turn.started_s <= self.until_unix_s
            for turn in trajectory
        )


class Served:
    """The servers of a router (`Serving`)."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._memory = anyio.Lock()  # held while servers load weights, or have lent their memory
        self._is_lent = False  # or about to be
        self._wrong: deque[_Wrong] = deque(maxlen=_MAX_WRONG)
        self._unproven: set[tuple[str, str]] = set()  # (url, reason) already logged

    async def sync(self, published: PublishedWeights, *, timeout_s: float) -> SyncResult:
        """Implement `Serving`. If all servers are being restarted, wait for them.

        Raises:
            ServerError: no server could load the weights, or the servers disagree and it is
                unknown which of them are right.
        """
        started_s = time.monotonic()
        version = published.version
        self._router.replicas.require_weights(version, verified=True)
        with anyio.move_on_after(timeout_s):
            while not self._router.replicas.servers:  # noqa: ASYNC110  # no event says so
                await anyio.sleep(0.1)
        async with self._memory:  # no deadline: a step of the learner has one
            servers = self._router.replicas.servers
            proofs, failed = await published.sync_to(servers, timeout_s=timeout_s)
        loaded, rest = self._take(version, proofs, failed, None)
        if not loaded:
            raise ServerError(f"no server has version {version}: {failed}")
        return SyncResult(
            published,
            loaded,
            failed,
            time.monotonic() - started_s,
            proofs[loaded[0]].checksum,
            rest,
            sum(not proofs[url].rest for url in loaded),
        )

    async def sync_stale(self, result: SyncResult, *, timeout_s: float) -> bool:
        """Implement `Serving`. STALE servers failed to sync or were restarted with old weights.

        Failures are logged.
        """
        if self._is_lent:  # afterwards there may be newer weights
            return True
        async with self._memory:  # no deadline: loading has one
            stale = {view.url for view in self._router.view() if view.state is ServerState.STALE}
            servers = [server for server in self._router.replicas.servers if server.url in stale]
            if not servers:
                return True
            proofs, failed = await result.published.sync_to(servers, timeout_s=timeout_s)
        loaded, _ = self._take(result.version, proofs, failed, result.rest)
        for url in loaded:
            log.warning("%s has version %s and serves again", url, result.version)
        return not failed

    @asynccontextmanager
    async def lending(self, *, timeout_s: float) -> AsyncIterator[None]:
        """Take back the memory of all servers while the block is open; none starts meanwhile.

        A server that dies instead has no memory either: it starts again after the block.

        Args:
            timeout_s: time for a server to do so, or to end.

        Raises:
            ServerError: a server keeps its memory.
        """
        replicas = self._router.replicas
        self._is_lent = True
        try:
            async with self._memory, replicas.no_starts():  # no deadline: syncs and starts have one
                async with task_group(only_first=True) as tasks:
                    for replica in list(replicas):
                        tasks.start_soon(self._release, replica, timeout_s)
                yield
        finally:
            self._is_lent = False

    async def _release(self, replica: Replica, timeout_s: float) -> None:
        reason = "no answer"
        self._router.replicas.memory_released(replica.url)
        replica.server.break_streams("its memory is lent to the learner")
        with anyio.move_on_after(timeout_s):
            try:
                await replica.server.release_memory(timeout_s=timeout_s)
                return
            except ServerError as error:
                reason = str(error)
            while not replica.has_exited:  # noqa: ASYNC110  # no event says so
                await anyio.sleep(0.1)
            replica.server.process_ended()  # again: it may have ended during the request
        if not replica.has_exited:
            raise ServerError(
                f"{replica.url} shares GPUs with the learner, and did not give its memory back "
                f"within {timeout_s:g} s (weights.timeout_s): {reason}"
            )

    def _take(
        self, version: str, proofs: Mapping[str, Proof], failed: dict[str, str], rest: str | None
    ) -> tuple[list[str], str | None]:
        """Return servers with the right weights to service and break off the streams of others.

        The others are added to `failed` and logged.

        Returns:
            The urls of the servers with the right weights, and the accepted `rest`.
        """
        judgement = judge(proofs, rest)
        if judgement.wrong:
            for server in self._router.replicas.servers:
                if server.url in judgement.wrong:
                    server.break_streams("its new weights are not the learner's")
            wrong = frozenset(judgement.wrong)
            self._wrong.append(_Wrong(version, wrong, time.time()))
        for url in judgement.right:
            self._router.replicas.weights_loaded(url, version)
            self._log_unproven(url, proofs[url].unproven)
        failed |= judgement.wrong
        for url, why in failed.items():
            log.error("%s does not have version %s: %s", url, version, why)
        return judgement.right, judgement.rest

    def _log_unproven(self, url: str, why: str) -> None:
        if why and (url, why) not in self._unproven:
            self._unproven.add((url, why))
            log.warning(
                "%s: its weights are only compared with other servers', not with the learner's: %s",
                url,
                why,
            )

    def is_tainted(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory may have been sampled with wrong weights.

        Such a trajectory must not be trained on.
        """
        return any(wrong.has_sampled(trajectory) for wrong in self._wrong)
