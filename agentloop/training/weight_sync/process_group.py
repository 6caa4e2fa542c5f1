"""Weight sync by a process group in which the learner's rank 0 broadcasts to the servers.

    layout ──> open ──> join ──────> send, bucket by bucket ──────> leave
    (learner)           ‖ servers:   ‖ servers: receive, load       checksum, serve again
                        pause, join

The requests to the learner and to the servers run concurrently. If one fails, the others are
cancelled and all members leave the group, since a collective without one of its members would wait
for ever. Then the sync is retried without the member that failed. A group lives for one sync, so no
membership has to be remembered: a restarted server gets a group of its own if the learner still has
the weights, and otherwise waits for the next version.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import anyio
import orjson

from agentloop.errors import ServerError, SettingsError
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.weight_updates import Bucket, WeightsGroup, WeightsInfo
from agentloop.training.learner_client.client import Learner, LearnerRefused
from agentloop.training.learner_client.protocol import (
    JoinRequest,
    LayoutRequest,
    LeaveRequest,
    OpenRequest,
    Reply,
    Request,
    SendRequest,
)
from agentloop.training.run.status import count_of
from agentloop.training.weight_sync.checksums import config_dtype
from agentloop.training.weight_sync.layout import Layout
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.verify import UNASKED, Proof, layout_of, prove

log = logging.getLogger(__name__)

GROUP_TIMEOUT_S = 60.0
"""Time for which a member may keep the others waiting; then the group fails and the sync is
repeated without that member. The other ranks of the learner must wait for longer."""

_SLACK_S = 30.0  # for the work of a request besides waiting for the group
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

R = TypeVar("R", bound=Reply)
_Part = Callable[[], Awaitable[object]]
_Sums = dict[str, list[str]]  # checksums of each tensor, by rank


class GroupPublisher:
    """Publishes weights for sync by a process group. The weights stay in the learner until then."""

    def __init__(self, learner: Learner, folder: Path, settings: WeightsSettings) -> None:
        self._learner = learner
        self._layout = folder / "layout.json"
        self._settings = settings

    async def publish(self, version: str, *, timeout_s: float) -> PublishedInLearner:
        """Describe the learner's current weights. Raises LearnerError."""
        await anyio.Path(self._layout.parent).mkdir(parents=True, exist_ok=True)
        reply = await self._learner.ask(LayoutRequest(out=self._layout), timeout_s=timeout_s)
        layout = orjson.loads(await anyio.Path(self._layout).read_bytes())
        buckets = [Bucket(**bucket) for bucket in layout]
        return PublishedInLearner(
            version, self._learner, buckets, reply.num_updates, reply.backend, self._settings,
            reply.model,
        )  # fmt: skip

    async def tidy(self) -> None:
        """Do nothing: no files are left."""

    async def close(self) -> None:
        """Do nothing: no files are left."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A server that takes part in the group."""

    server: SGLangServer
    info: WeightsInfo
    rank: int  # the server's first rank in the group


class _Failed(Exception):
    """An attempt failed. `url` is the server that failed first; None: the learner."""

    def __init__(self, url: str | None, why: str) -> None:
        super().__init__(why)
        self.url, self.why = url, why


@dataclass(frozen=True, slots=True)
class PublishedInLearner:
    """The weights of one version, held by the learner.

    They are identified by the number of updates; the learner refuses to send them after another
    update.
    """

    version: str
    learner: Learner
    buckets: Sequence[Bucket]
    num_updates: int
    backend: str
    settings: WeightsSettings
    model: Mapping[str, object]  # the model's configuration, as far as `layout_of` needs it

    @property
    def folder(self) -> None:
        """Implement `PublishedWeights`."""

    @property
    def sha256(self) -> Mapping[str, str]:
        """Implement `PublishedWeights`."""
        return {}

    async def sync_to(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, Proof], dict[str, str]]:
        """Implement `PublishedWeights`.

        Raises:
            SettingsError: `weights.address` is needed and not set.
            LearnerError: the learner died or does not respond.
        """
        failed: dict[str, str] = {}
        proofs: dict[str, Proof] = {}
        candidates = list(servers)
        with anyio.move_on_after(timeout_s):
            while candidates and not proofs:
                members = await self._members(candidates, failed)
                candidates = [member.server for member in members]
                if not members:
                    break
                lost = await self._attempt(members, proofs, failed)
                if not proofs and not lost:
                    break
                candidates = [server for server in candidates if server.url not in lost]
        missed = [server.url for server in servers if server.url not in proofs]
        late = f"timed out after {timeout_s:g} s"
        return proofs, {url: failed.get(url, late) for url in missed}

    async def _members(
        self, servers: Sequence[SGLangServer], failed: dict[str, str]
    ) -> list[_Member]:
        """Return the servers that can take part, and record the errors of the others."""
        infos: dict[str, WeightsInfo] = {}

        async def ask(server: SGLangServer) -> None:
            try:
                infos[server.url] = await server.group_member()
            except ServerError as error:
                failed[server.url] = str(error)

        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(ask, server)
        reachable = [server for server in servers if server.url in infos]
        ranks = itertools.accumulate((infos[s.url].num_ranks for s in reachable), initial=1)
        return [
            _Member(server, infos[server.url], rank)
            for server, rank in zip(reachable, ranks, strict=False)
        ]

    async def _attempt(
        self, members: Sequence[_Member], proofs: dict[str, Proof], failed: dict[str, str]
    ) -> set[str]:
        """Form a group, send the weights and leave.

        Record the proofs and return no urls on success; otherwise return the servers to exclude
        from the next attempt: those that do not respond any more, or the one that failed first.
        """
        address = self._address([member.server.url for member in members])
        name = f"agentloop-{self.version}-{uuid.uuid4().hex[:8]}"
        first: _Failed | None = None
        try:
            opened = await self._ask(OpenRequest(address=address, num_updates=self.num_updates))
        except LearnerRefused as error:
            failed.update((member.server.url, str(error)) for member in members)
            return set()
        group = WeightsGroup(
            name, address, opened.port, self.backend,
            1 + sum(member.info.num_ranks for member in members),
        )  # fmt: skip
        lost: dict[str, str] = {}
        try:
            sums = await self._send(group, members)
            await self._finish(group, members, sums, proofs, failed)
        except _Failed as error:
            first = error
        finally:
            unproven = [m.server for m in members if m.server.url not in proofs]
            lost = await self._leave(group, unproven)
        if first is not None:
            servers = count_of(len(members), "server")
            log.warning("a process group with %s failed: %s", servers, first.why)
            for member in members:
                failed[member.server.url] = first.why
            failed.update(lost)
            if not lost and first.url is not None:
                return {first.url}
        return set(lost)

    async def _send(self, group: WeightsGroup, members: Sequence[_Member]) -> _Sums | str:
        """Let all members join and send all buckets.

        Return the expected checksum of each tensor on each rank, or the reason why they are
        unknown.
        """
        layout = self._layout(members)
        known_layout = None if isinstance(layout, str) else layout
        sums: _Sums = {}

        async def join() -> None:
            await self._ask(
                JoinRequest(
                    name=group.name,
                    world_size=group.world_size,
                    backend=group.backend,
                    within_s=GROUP_TIMEOUT_S,
                )
            )

        async def send(index: int) -> None:
            request = SendRequest(bucket=index, num_updates=self.num_updates, layout=known_layout)
            sums.update((await self._ask(request)).sums)

        await _together(
            join,
            {
                m.server.url: partial(m.server.join_group, group, m.rank, timeout_s=self._answer_s)
                for m in members
            },
        )
        for index, bucket in enumerate(self.buckets):
            is_last = index + 1 == len(self.buckets)
            version = self.version if is_last else None
            await _together(
                partial(send, index),
                {
                    m.server.url: partial(
                        m.server.receive, group, bucket, version, timeout_s=self._answer_s
                    )
                    for m in members
                },
            )
        return layout if isinstance(layout, str) else sums

    def _layout(self, members: Sequence[_Member]) -> Layout | str:
        """Return the layout of the weights on these servers, or the reason why it is unknown."""
        if not self.settings.verify:
            return UNASKED
        layouts = list(dict.fromkeys(layout_of(member.info, self.model) for member in members))
        if len(layouts) > 1:
            return f"the servers of the group have different layouts: {layouts}"
        (layout,) = layouts
        if isinstance(layout, Layout) and layout.dtype == "auto":
            dtype = self.model.get("dtype")
            return replace(layout, dtype=config_dtype(None if dtype is None else str(dtype)))
        return layout

    async def _finish(
        self,
        group: WeightsGroup,
        members: Sequence[_Member],
        sums: _Sums | str,
        proofs: dict[str, Proof],
        failed: dict[str, str],
    ) -> None:
        """Let the servers use their new weights, and record a proof for each."""

        def expected_sum(name: str, rank: int) -> str | None:
            by_rank = None if isinstance(sums, str) else sums.get(name)
            return by_rank[rank] if by_rank else None

        async def finish(server: SGLangServer) -> None:
            try:
                checksum = await server.finish_group(group, timeout_s=self._answer_s)
                unproven = sums if isinstance(sums, str) else ""
                proofs[server.url] = prove(checksum, expected_sum, unproven=unproven)
            except ServerError as error:
                failed[server.url] = str(error)

        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(finish, member.server)

    async def _leave(self, group: WeightsGroup, servers: Sequence[SGLangServer]) -> dict[str, str]:
        """Make the learner leave the group, which releases waiting servers, and then the servers.

        Shielded from cancellation. Return the servers that do not respond, with the reasons.
        """
        lost: dict[str, str] = {}

        async def leave(server: SGLangServer) -> None:
            try:
                await server.leave_group(group)
            except ServerError as error:
                lost[server.url] = str(error)

        with anyio.move_on_after(self._answer_s + _SLACK_S, shield=True):
            try:
                with suppress(LearnerRefused):
                    # If a cancelled request is still running, this waits for it.
                    await self._ask(LeaveRequest())
            finally:  # also if the learner is dead
                async with anyio.create_task_group() as tasks:
                    for server in servers:
                        tasks.start_soon(leave, server)
        return lost

    @property
    def _answer_s(self) -> float:
        """The deadline of a request to the learner, in seconds.

        The learner abandons a group after `GROUP_TIMEOUT_S`, possibly twice: it completes a
        cancelled request before the next one.
        """
        return 2 * GROUP_TIMEOUT_S + _SLACK_S

    async def _ask(self, request: Request[R]) -> R:
        return await self.learner.ask(request, timeout_s=self._answer_s)

    def _address(self, urls: Sequence[str]) -> str:
        if self.settings.address is not None:
            return self.settings.address
        far = [url for url in urls if urlsplit(url).hostname not in _LOOPBACK]
        if far:
            raise SettingsError(
                f"weights.address: {far[0]} is not on loopback: set the address at which the "
                "servers reach the learner"
            )
        return "127.0.0.1"


async def _together(learner: _Part, servers: Mapping[str, _Part]) -> None:
    """Run the learner's part and each server's concurrently; the first failure cancels the others.

    Raises:
        _Failed: a part failed; names the first one.
        LearnerError: the learner died or does not respond.
    """
    failed: list[_Failed] = []
    broken: list[Exception] = []

    async with anyio.create_task_group() as tasks:

        async def run(url: str | None, part: _Part) -> None:
            try:
                await part()
            except (ServerError, LearnerRefused) as error:
                failed.append(_Failed(url, str(error)))
                tasks.cancel_scope.cancel()
            except Exception as error:
                broken.append(error)
                tasks.cancel_scope.cancel()

        tasks.start_soon(run, None, learner)
        for url, part in servers.items():
            tasks.start_soon(run, url, part)
    if broken:
        raise broken[0]
    if failed:
        raise failed[0]
