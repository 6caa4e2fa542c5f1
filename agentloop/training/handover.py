"""New weights into every server, before any of them serves on.

published ──> require_weights ──> each server loads, side by side ──> it serves again
              (all are STALE)        └─ fails, is late, or has others than the rest:
                                        it stays STALE, until `keep_up` succeeds with it

Two ways: by disk, a folder that the learner writes and the servers read; by group, from the learner
straight into the servers (group.py). What a server says about its version is not enough: it serves
once its checksum was compared.

What runs meanwhile goes on under the new weights (`weights.pause`), with its tokens' versions told
apart. It does so before checksums are compared, for a slow server must not hold up the others:
where one differs, its streams are broken, and `Handover.distrusts` what it had sampled by then.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

import anyio
import pydantic

from agentloop.errors import ServerError
from agentloop.inference.health import ServerState
from agentloop.inference.router import Router
from agentloop.inference.sglang import Pause, SGLangServer
from agentloop.training.group import GroupPublisher
from agentloop.training.learner import Learner
from agentloop.trajectory import Trajectory

__all__ = [
    "Handover",
    "InFolder",
    "Published",
    "Publisher",
    "Served",
    "Serving",
    "WeightsSettings",
    "hand_over",
    "keep_up",
    "publisher",
]

log = logging.getLogger(__name__)

_MAX_WRONG = 16  # hand-overs that are remembered: rollouts do not last for longer

_A_VERSION = re.compile(r"\d+|\.\d+\.(partial|old)")


class WeightsSettings(pydantic.BaseModel):
    """How new weights come to the servers."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    by: Literal["disk", "group"] = pydantic.Field(
        "disk",
        description="disk: a folder that the learner writes and every server reads; group: a "
        "process group of the learner and the servers (gloo or NCCL), with no file in between.",
    )
    pause: Pause = pydantic.Field(
        "retract",
        description="What becomes of turns that are being generated. retract: their KV is computed "
        "anew, so that each token is what its weights say of its context. in_place: they go on "
        "with the KV of the old weights, at once: the engine's log-probabilities are still those "
        "that tokens were drawn with, but no version of the weights gives them. New turns never "
        "see old KV. It needs server.extra_args = ['--disable-overlap-schedule'].",
    )
    folder: Path | None = pydantic.Field(
        None,
        description="By disk: where the newest weights lie while a run goes on, in a folder for "
        "each run; none: in the run's own. /dev/shm is memory, for servers on this machine.",
    )
    timeout_s: float = pydantic.Field(
        300.0, gt=0, description="For a server to have new weights; after it, it is stale."
    )
    address: str | None = pydantic.Field(
        None,
        description="By group: the learner's address, which all servers reach; none: 127.0.0.1, "
        "where all of them are on loopback.",
    )
    port: int = pydantic.Field(
        0, ge=0, le=65_535, description="By group: where its members meet; 0: any that is free."
    )
    backend: Literal["auto", "gloo", "nccl"] = pydantic.Field(
        "auto",
        description="By group: auto is nccl for a learner on GPUs, else gloo. Where a server and "
        "the learner share a GPU, NCCL cannot be used.",
    )
    group_timeout_s: float = pydantic.Field(
        60.0,
        gt=0,
        description="By group: a member that keeps the others waiting for so long breaks it; "
        "below learner.collective_timeout_s.",
    )


class Published(Protocol):
    """The weights of one version, and how servers come by them."""

    @property
    def version(self) -> str: ...

    async def give(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """Checksums of those that have loaded, and why the others have not, by url."""
        ...


class Serving(Protocol):
    """Whoever serves what was published: the servers of this process, or those of others."""

    async def hand_over(self, published: Published, *, timeout_s: float) -> Handover:
        """Give these weights to all servers. Raises ServerError: none has the right ones."""
        ...

    async def keep_up(self, handover: Handover, *, timeout_s: float) -> bool:
        """Give the weights of the last hand-over to those that lack them; whether none is left."""
        ...


class Publisher(Protocol):
    """Where the learner's weights become those of a version."""

    async def publish(self, version: str, *, timeout_s: float) -> Published:
        """The learner's weights as they are. Raises LearnerError."""
        ...

    async def tidy(self) -> None:
        """Remove all versions but the last one, which all servers have by now, or soon will."""
        ...

    async def close(self) -> None:
        """The run is over: remove what is left outside of its folder."""
        ...


def publisher(settings: WeightsSettings, learner: Learner, run: Path) -> Publisher:
    """As the settings say, for the run in the folder `run`, whose path tells runs apart in a
    folder that they share."""
    if settings.by == "group":
        return GroupPublisher(learner, run / "weights", settings)
    if settings.folder is None:
        return _FolderPublisher(learner, run / "weights", settings.pause)
    run = run.expanduser().absolute()
    name = f"{run.name}-{hashlib.sha256(bytes(run)).hexdigest()[:8]}"
    folder = settings.folder.expanduser().absolute() / name
    return _FolderPublisher(learner, folder, settings.pause, is_lent=True)


@dataclass(frozen=True, slots=True)
class InFolder:
    """Weights in a folder that every server can read."""

    version: str
    folder: Path
    pause: Pause = "retract"

    async def give(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, str], dict[str, str]]:
        """See `Published`."""
        checksums: dict[str, str] = {}
        failed: dict[str, str] = {}

        async def give(server: SGLangServer) -> None:
            try:
                with anyio.fail_after(timeout_s):
                    checksums[server.url] = await server.update_weights(
                        str(self.folder), self.version, timeout_s=timeout_s, pause=self.pause
                    )
            except (ServerError, TimeoutError) as error:
                failed[server.url] = str(error) or f"not within {timeout_s:g} s"

        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(give, server)
        return checksums, failed


class _FolderPublisher:
    def __init__(
        self, learner: Learner, folder: Path, pause: Pause, *, is_lent: bool = False
    ) -> None:
        self._learner = learner
        self._folder = folder
        self._pause = pause
        self._is_lent = is_lent  # outside of the run's folder
        self._last: Path | None = None
        self._old: list[Path] = []

    async def publish(self, version: str, *, timeout_s: float) -> InFolder:
        folder = self._folder / version
        await self._learner.ask("publish", timeout_s=timeout_s, folder=str(folder), version=version)
        if self._last is None:  # a run that was killed may have left some
            self._old = await anyio.to_thread.run_sync(_others, folder)
        elif self._last != folder:
            self._old.append(self._last)
        self._last = folder
        return InFolder(version, folder, self._pause)

    async def tidy(self) -> None:
        while self._old:  # by name: with `weights.folder` there may be more in it than ours
            old = self._old.pop()
            await anyio.to_thread.run_sync(partial(shutil.rmtree, old, ignore_errors=True))

    async def close(self) -> None:
        if self._is_lent:
            remove = partial(shutil.rmtree, self._folder, ignore_errors=True)
            await anyio.to_thread.run_sync(remove, abandon_on_cancel=True)


def _others(folder: Path) -> list[Path]:
    """Versions that lie beside the one in `folder`, and halves of them."""
    there = [one for one in folder.parent.glob("*") if _A_VERSION.fullmatch(one.name)]
    return [one for one in there if one != folder]


@dataclass(frozen=True, slots=True)
class Handover:
    """What came of it: urls of servers that have the new weights, and of those that do not, with
    `wrong` of them, which have others by that name."""

    published: Published
    loaded: list[str]
    failed: dict[str, str]
    seconds: float
    checksum: str
    wrong: frozenset[str] = frozenset()

    @property
    def version(self) -> str:
        return self.published.version

    def distrusts(self, trajectory: Trajectory) -> bool:
        """Whether tokens of it may be of weights that only had this version's name: then there is
        nothing to be learned from it."""
        return any(
            not self.wrong.isdisjoint(turn.servers)
            and any(span.version == self.version for span in turn.versions)
            for turn in trajectory
        )


async def hand_over(router: Router, published: Published, *, timeout_s: float) -> Handover:
    """Give these weights to all servers. Where all are being started again, it waits.

    Raises:
        ServerError: none of them could load them, or nobody can say which of them has the right
            ones; what they have sampled under this version is not to be learned from.
    """
    begun = time.monotonic()
    version = published.version
    router.require_weights(version, verified=True)
    with anyio.move_on_after(timeout_s):
        while not router.servers:  # noqa: ASYNC110  # no event says so
            await anyio.sleep(0.1)
    checksums, failed = await published.give(router.servers, timeout_s=timeout_s)
    (checksum, num_equal), *others = Counter(checksums.values()).most_common(2) or [("", 0)]
    if others and others[0][1] == num_equal:
        _break_off(router, checksums)
        raise ServerError(f"the servers do not have the same weights {version}: {checksums}")
    loaded = _take(router, checksums, failed, checksum, version)
    if not loaded:
        raise ServerError(f"no server could load version {version}: {failed}")
    wrong = frozenset(url for url, found in checksums.items() if found != checksum)
    seconds = time.monotonic() - begun
    return Handover(published, loaded, failed, seconds, checksum, wrong)


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
    checksums, failed = await handover.published.give(servers, timeout_s=timeout_s)
    loaded = _take(router, checksums, failed, handover.checksum, version)
    for url in loaded:
        log.warning("%s has version %s, and serves again", url, version)
    return not failed


def _take(
    router: Router,
    checksums: Mapping[str, str],
    failed: dict[str, str],
    expected: str,
    version: str,
) -> list[str]:
    """Let those with the expected checksum serve; returns them. The others are added to `failed`
    and logged, and nothing goes on there."""
    wrong = {url: found for url, found in checksums.items() if found != expected}
    _break_off(router, wrong)
    for url in checksums.keys() - wrong.keys():
        router.weights_loaded(url, version)
    for url, found in wrong.items():
        failed[url] = f"its weights differ from the others': {found}"
    for url, why in failed.items():
        log.error("%s does not have version %s: %s", url, version, why)
    return sorted(set(checksums) - set(failed))


def _break_off(router: Router, urls: Collection[str]) -> None:
    for server in router.servers:
        if server.url in urls:
            server.break_streams("its new weights differ from the others'")


class Served:
    """The servers of a router (`Serving`)."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._wrong: deque[Handover] = deque(maxlen=_MAX_WRONG)

    async def hand_over(self, published: Published, *, timeout_s: float) -> Handover:
        """See `hand_over`."""
        handover = await hand_over(self._router, published, timeout_s=timeout_s)
        if handover.wrong:
            self._wrong.append(handover)
        return handover

    async def keep_up(self, handover: Handover, *, timeout_s: float) -> bool:
        """See `keep_up`."""
        return await keep_up(self._router, handover, timeout_s=timeout_s)

    def distrusts(self, trajectory: Trajectory) -> bool:
        """Whether it may be of weights that only had their version's name."""
        return any(handover.distrusts(trajectory) for handover in self._wrong)
