"""New weights into every server, before any of them serves on.

published ──> require_weights ──> each server loads, side by side ──> it serves again
              (all are STALE)        └─ fails, is late, or has other weights than the learner:
                                        it stays STALE, until `keep_up` succeeds with it

Two ways: by disk, a folder that the learner writes and the servers read; by group, from the learner
straight into the servers (group.py). What a server says about its version is not enough: it serves
once what it has was held against what the learner had (verify.py), or, where nobody knows what it
must say, against the other servers.

What runs meanwhile goes on under the new weights (`weights.pause`), with its tokens' versions told
apart. It does so before they are compared, for a slow server must not hold up the others: where one
is wrong, its streams are broken, and `Served.distrusts` what it had sampled by then.
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
from agentloop.inference.health import ServerState
from agentloop.inference.router import Router
from agentloop.inference.sglang import Pause, SGLangServer
from agentloop.training.group import GroupPublisher
from agentloop.training.learner import Learner
from agentloop.training.verify import UNASKED, Proof, PublishedFiles, judge, prove
from agentloop.trajectory import Trajectory

__all__ = [
    "Handover",
    "InFolder",
    "Published",
    "Publisher",
    "Served",
    "Serving",
    "WeightsSettings",
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
    verify: bool = pydantic.Field(
        True,
        description="Hold each tensor that a server tells of against the learner's, where it is "
        "known what it must say (docs/learner.md). false: servers are compared with each other "
        "alone, which proves nothing of a single one.",
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
    ) -> tuple[dict[str, Proof], dict[str, str]]:
        """What those that have loaded have, and why the others have not, by url."""
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
        return _FolderPublisher(learner, run / "weights", settings)
    run = run.expanduser().absolute()
    name = f"{run.name}-{hashlib.sha256(bytes(run)).hexdigest()[:8]}"
    folder = settings.folder.expanduser().absolute() / name
    return _FolderPublisher(learner, folder, settings, is_lent=True)


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
        """See `Published`."""
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
                failed[server.url] = str(error) or f"not within {timeout_s:g} s"
                return
            if info is None:
                proofs[server.url] = prove(found, lambda *_: None, unproven=UNASKED)
                return
            async with reading:  # no deadline: it takes as long as it takes to hash the files
                proofs[server.url] = await anyio.to_thread.run_sync(
                    files.prove, found, info, abandon_on_cancel=True
                )

        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(give, server)
        return proofs, failed


class _FolderPublisher:
    def __init__(
        self, learner: Learner, folder: Path, settings: WeightsSettings, *, is_lent: bool = False
    ) -> None:
        self._learner = learner
        self._folder = folder
        self._settings = settings
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
        return InFolder(version, folder, self._settings.pause, self._settings.verify)

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
    """What came of it: urls of servers that have the new weights, and of those that do not.

    Attributes:
        checksum: SGLang's own, of all weights of the first of those that have them.
        rest: what is right of that which was not compared with the learner's; see `judge`.
        num_verified: how many of them have what the learner has, tensor by tensor.
    """

    published: Published
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
    """Servers that had others weights by the name of a version, until then."""

    version: str
    urls: frozenset[str]
    until_unix_s: float

    def has_sampled(self, trajectory: Trajectory) -> bool:
        """Whether tokens of it may be of these weights."""
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
        self._unproven: set[tuple[str, str]] = set()  # what was said of whom

    async def hand_over(self, published: Published, *, timeout_s: float) -> Handover:
        """See `Serving`. Where all servers are being started again, it waits.

        Raises:
            ServerError: none of them could load them, or nobody can say which of them has the
                right ones.
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

    async def keep_up(self, handover: Handover, *, timeout_s: float) -> bool:
        """See `Serving`: those that are STALE failed then, or were started again, with the weights
        of their start. Those that fail are logged."""
        stale = {view.url for view in self._router.view() if view.state is ServerState.STALE}
        servers = [server for server in self._router.servers if server.url in stale]
        if not servers:
            return True
        proofs, failed = await handover.published.give(servers, timeout_s=timeout_s)
        loaded, _ = self._take(handover.version, proofs, failed, handover.rest)
        for url in loaded:
            log.warning("%s has version %s, and serves again", url, handover.version)
        return not failed

    def _take(
        self, version: str, proofs: Mapping[str, Proof], failed: dict[str, str], rest: str | None
    ) -> tuple[list[str], str | None]:
        """Let those with the right weights serve; returns them, and the `rest` that is right. The
        others are added to `failed` and logged, and nothing goes on there."""
        judgement = judge(proofs, rest)
        if judgement.wrong:
            self._break_off(judgement.wrong.keys())
            wrong = frozenset(judgement.wrong)
            self._wrong.append(_Wrong(version, wrong, time.time()))
        for url in judgement.right:
            self._router.weights_loaded(url, version)
            self._tell_unproven(url, proofs[url].unproven)
        failed |= judgement.wrong
        for url, why in failed.items():
            log.error("%s does not have version %s: %s", url, version, why)
        return judgement.right, judgement.rest

    def _tell_unproven(self, url: str, why: str) -> None:
        if why and (url, why) not in self._unproven:
            self._unproven.add((url, why))
            log.warning(
                "%s: its weights are compared with other servers' alone, not with the learner's: "
                "%s",
                url,
                why,
            )

    def _break_off(self, urls: Collection[str]) -> None:
        for server in self._router.servers:
            if server.url in urls:
                server.break_streams("its new weights are not the learner's")

    def distrusts(self, trajectory: Trajectory) -> bool:
        """Whether it may be of weights that only had their version's name: then there is nothing
        to be learned from it."""
        return any(wrong.has_sampled(trajectory) for wrong in self._wrong)
