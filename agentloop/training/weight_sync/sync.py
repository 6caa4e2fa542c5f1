"""Weight sync: load new weights into all servers and verify them.

published ──> require_weights ──> all servers load concurrently ──> each serves again
              (all are STALE)        └─ on failure, timeout or wrong weights:
                                        it stays STALE until `sync_stale` succeeds with it

There are two transports: disk, a folder that the learner writes and the servers read; and group, a
broadcast from the learner to the servers (group.py). The version that a server reports proves
nothing: it gets new requests only after its weights were compared with the learner's (verify.py),
or, if the expected checksums are unknown, with those of the other servers.

Turns in progress continue under the new weights (`weights.pause`), with the version of each token
recorded. They continue before the weights are verified, so that a slow server does not delay the
others. If a server turns out to have wrong weights, its streams are broken off, and
`Served.is_tainted` the rollouts that it sampled in the meantime.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import anyio
import pydantic

from agentloop.errors import ServerError
from agentloop.inference.router import Router
from agentloop.inference.scheduling.health import ServerState
from agentloop.inference.sglang.client import Pause, SGLangServer
from agentloop.training.learner_client.client import Learner
from agentloop.training.learner_client.protocol import PublishRequest
from agentloop.training.weight_sync.process_group import GroupPublisher
from agentloop.training.weight_sync.verify import UNASKED, Proof, PublishedFiles, judge, prove
from agentloop.trajectory import Trajectory

__all__ = [
    "Handover",
    "InFolder",
    "PublishedWeights",
    "Publisher",
    "Served",
    "Serving",
    "WeightsSettings",
    "publisher",
]

log = logging.getLogger(__name__)

_MAX_WRONG = 16  # syncs with wrong weights that are remembered: longer than any rollout lasts

_A_VERSION = re.compile(r"\d+|\.\d+\.(partial|old)")


class WeightsSettings(pydantic.BaseModel):
    """Settings of the weight sync from the learner to the servers."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    by: Literal["disk", "group"] = pydantic.Field(
        "disk",
        description="Transport. disk: a folder that the learner writes and every server reads; "
        "group: a broadcast in a process group of the learner and the servers (gloo or NCCL).",
    )
    pause: Pause = pydantic.Field(
        "retract",
        description="Treatment of turns in progress. retract: recompute their KV cache, so that "
        "each token's log-probability is that of its version. in_place: continue at once with "
        "the KV cache of the old weights; the engine's log-probabilities are still those that "
        "tokens were sampled with, but no version of the weights reproduces them. New turns never "
        "use old KV. in_place needs server.extra_args = ['--disable-overlap-schedule'].",
    )
    folder: Path | None = pydantic.Field(
        None,
        description="With disk: folder for the newest weights while a run is active, in a "
        "subfolder for each run; none: the run's own folder. /dev/shm is in memory, for servers "
        "on this machine.",
    )
    timeout_s: float = pydantic.Field(
        300.0, gt=0, description="Time for a server to load new weights, or else it is stale."
    )
    verify: bool = pydantic.Field(
        True,
        description="Compare the checksum of each of a server's tensors with the learner's, if "
        "the expected one is known (docs/learner.md). false: only compare servers with each "
        "other, which proves nothing for a single server.",
    )
    address: str | None = pydantic.Field(
        None,
        description="With group: the learner's address as seen from all servers; none: 127.0.0.1, "
        "if all of them are on loopback.",
    )
    port: int = pydantic.Field(
        0, ge=0, le=65_535, description="With group: port of the rendezvous; 0: any free port."
    )
    backend: Literal["auto", "gloo", "nccl"] = pydantic.Field(
        "auto",
        description="With group: auto is nccl for a learner on GPUs, otherwise gloo. NCCL cannot "
        "be used if a server and the learner share a GPU.",
    )
    group_timeout_s: float = pydantic.Field(
        60.0,
        gt=0,
        description="With group: the group fails if a member keeps the others waiting for longer; "
        "must be below learner.collective_timeout_s.",
    )


class PublishedWeights(Protocol):
    """The published weights of one version, which servers can load."""

    @property
    def version(self) -> str: ...

    async def give(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, Proof], dict[str, str]]:
        """Load the weights into servers.

        Returns:
            The proofs of the servers that have loaded them, and the errors of the others, by url.
        """
        ...


class Serving(Protocol):
    """A set of servers that published weights are synced to: local ones or a fleet's."""

    async def sync_weights(self, published: PublishedWeights, *, timeout_s: float) -> Handover:
        """Sync these weights to all servers. Raises ServerError if none gets the right ones."""
        ...

    async def sync_stale(self, handover: Handover, *, timeout_s: float) -> bool:
        """Sync the last weights to servers that lack them; return whether all have them now."""
        ...


class Publisher(Protocol):
    """Publishes the learner's weights as numbered versions."""

    async def publish(self, version: str, *, timeout_s: float) -> PublishedWeights:
        """Publish the learner's current weights as `version`. Raises LearnerError."""
        ...

    async def tidy(self) -> None:
        """Remove all versions but the newest, which all servers have or will load soon."""
        ...

    async def close(self) -> None:
        """Remove files outside of the run's folder at the end of the run."""
        ...


def publisher(settings: WeightsSettings, learner: Learner, run: Path) -> Publisher:
    """Create the publisher that the settings ask for.

    `run` is the run's folder; its path distinguishes runs that share `weights.folder`.
    """
    if settings.by == "group":
        return GroupPublisher(learner, run / "weights", settings)
    if settings.folder is None:
        return _FolderPublisher(learner, run / "weights", settings)
    run = run.expanduser().absolute()
    name = f"{run.name}-{hashlib.sha256(bytes(run)).hexdigest()[:8]}"
    folder = settings.folder.expanduser().absolute() / name
    return _FolderPublisher(learner, folder, settings, is_external=True)


@dataclass(frozen=True, slots=True)
class InFolder:
    """Weights in a folder that every server can read."""

    version: str
    folder: Path
    pause: Pause = "retract"
    verify: bool = True

    async def give(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, Proof], dict[str, str]]:
        """Implement `PublishedWeights`."""
        proofs: dict[str, Proof] = {}
        failed: dict[str, str] = {}
        files, reading = PublishedFiles(self.folder), anyio.Lock()

        async def give(server: SGLangServer) -> None:
            try:
                with anyio.fail_after(timeout_s):
                    info = await server.weights_info() if self.verify else None
                    found = await server.update_weights(
                        str(self.folder), self.version, timeout_s=timeout_s, pause=self.pause
                    )
            except (ServerError, TimeoutError) as error:
                failed[server.url] = str(error) or f"timed out after {timeout_s:g} s"
                return
            if info is None:
                proofs[server.url] = prove(found, lambda *_: None, unproven=UNASKED)
                return
            async with reading:  # no deadline: bounded by the hashing of the files
                proofs[server.url] = await anyio.to_thread.run_sync(
                    files.prove, found, info, abandon_on_cancel=True
                )

        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(give, server)
        return proofs, failed


class _FolderPublisher:
    def __init__(
        self,
        learner: Learner,
        folder: Path,
        settings: WeightsSettings,
        *,
        is_external: bool = False,
    ) -> None:
        self._learner = learner
        self._folder = folder
        self._settings = settings
        self._is_external = is_external  # outside of the run's folder
        self._last: Path | None = None
        self._old: list[Path] = []

    async def publish(self, version: str, *, timeout_s: float) -> InFolder:
        folder = self._folder / version
        request = PublishRequest(folder=folder, version=version)
        await self._learner.ask(request, timeout_s=timeout_s)
        if self._last is None:  # a killed run may have left some
            self._old = await anyio.to_thread.run_sync(_others, folder)
        elif self._last != folder:
            self._old.append(self._last)
        self._last = folder
        return InFolder(version, folder, self._settings.pause, self._settings.verify)

    async def tidy(self) -> None:
        while self._old:  # by name: `weights.folder` may also contain other files
            old = self._old.pop()
            await anyio.to_thread.run_sync(partial(shutil.rmtree, old, ignore_errors=True))

    async def close(self) -> None:
        if self._is_external:
            remove = partial(shutil.rmtree, self._folder, ignore_errors=True)
            await anyio.to_thread.run_sync(remove, abandon_on_cancel=True)


def _others(folder: Path) -> list[Path]:
    """Return the other versions, complete or not, in the parent of `folder`."""
    there = [one for one in folder.parent.glob("*") if _A_VERSION.fullmatch(one.name)]
    return [one for one in there if one != folder]


@dataclass(frozen=True, slots=True)
class Handover:
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
        self._wrong: deque[_Wrong] = deque(maxlen=_MAX_WRONG)
        self._unproven: set[tuple[str, str]] = set()  # (url, reason) already logged

    async def sync_weights(self, published: PublishedWeights, *, timeout_s: float) -> Handover:
        """Implement `Serving`. If all servers are being restarted, wait for them.

        Raises:
            ServerError: no server could load the weights, or the servers disagree and it is
                unknown which of them are right.
        """
        begun = time.monotonic()
        version = published.version
        self._router.require_weights(version, verified=True)
        with anyio.move_on_after(timeout_s):
            while not self._router.servers:  # noqa: ASYNC110  # no event says so
                await anyio.sleep(0.1)
        proofs, failed = await published.give(self._router.servers, timeout_s=timeout_s)
        loaded, rest = self._take(version, proofs, failed, None)
        if not loaded:
            raise ServerError(f"no server has version {version}: {failed}")
        return Handover(
            published,
            loaded,
            failed,
            time.monotonic() - begun,
            proofs[loaded[0]].checksum,
            rest,
            sum(not proofs[url].rest for url in loaded),
        )

    async def sync_stale(self, handover: Handover, *, timeout_s: float) -> bool:
        """Implement `Serving`. STALE servers failed to sync or were restarted with old weights.

        Failures are logged.
        """
        stale = {view.url for view in self._router.view() if view.state is ServerState.STALE}
        servers = [server for server in self._router.servers if server.url in stale]
        if not servers:
            return True
        proofs, failed = await handover.published.give(servers, timeout_s=timeout_s)
        loaded, _ = self._take(handover.version, proofs, failed, handover.rest)
        for url in loaded:
            log.warning("%s has version %s and serves again", url, handover.version)
        return not failed

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
            self._break_off(judgement.wrong.keys())
            wrong = frozenset(judgement.wrong)
            self._wrong.append(_Wrong(version, wrong, time.time()))
        for url in judgement.right:
            self._router.weights_loaded(url, version)
            self._log_unproven(url, proofs[url].unproven)
        failed |= judgement.wrong
        for url, why in failed.items():
            log.error("%s does not have version %s: %s", url, version, why)
        return judgement.right, judgement.rest

    def _log_unproven(self, url: str, why: str) -> None:
        if why and (url, why) not in self._unproven:
            self._unproven.add((url, why))
            log.warning(
                "%s: its weights are compared only with other servers', not with the learner's: %s",
                url,
                why,
            )

    def _break_off(self, urls: Collection[str]) -> None:
        for server in self._router.servers:
            if server.url in urls:
                server.break_streams("its new weights are not the learner's")

    def is_tainted(self, trajectory: Trajectory) -> bool:
        """Return whether a trajectory may have been sampled with wrong weights.

        Such a trajectory must not be trained on.
        """
        return any(wrong.has_sampled(trajectory) for wrong in self._wrong)
