"""New weights into the servers by a process group, of which the learner's rank 0 is the sender.

    layout ──> open ──> join ──────> send, bucket by bucket ──────> leave
    (learner)           ‖ servers:   ‖ servers: receive, load       checksum, serve again
                        pause, join

What the learner sends and what the servers receive are asked for side by side; where either fails,
the other is cancelled, and all leave: a collective that lacks a member would wait for ever. Then it
is tried again without the member that was to blame. A group lives for one hand-over, so nobody
remembers who was in the last one: a server that comes back is given a group of its own, with the
weights that the learner still has, or waits for the next ones where it no longer has them.
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import anyio
import orjson

from agentloop.errors import ServerError, SettingsError
from agentloop.inference.sglang import Bucket, SGLangServer, WeightsGroup, WeightsInfo
from agentloop.training.checksums import Layout, config_dtype
from agentloop.training.learner import Learner, LearnerRefused
from agentloop.training.verify import UNASKED, Proof, layout_of, prove

if TYPE_CHECKING:
    from agentloop.training.handover import WeightsSettings

__all__ = ["GroupPublisher", "InLearner"]

log = logging.getLogger(__name__)

_SLACK_S = 30.0  # for what a request does beside waiting for the group
_LOOPBACK = ("127.0.0.1", "localhost", "::1")

_Part = Callable[[], Awaitable[object]]
_Sums = dict[str, list[str]]  # of a tensor, on each rank


class GroupPublisher:
    """Publishing costs nothing: the weights stay where they are until they are sent."""

    def __init__(self, learner: Learner, folder: Path, settings: WeightsSettings) -> None:
        self._learner = learner
        self._layout = folder / "layout.json"
        self._settings = settings

    async def publish(self, version: str, *, timeout_s: float) -> InLearner:
        """Raises LearnerError."""
        await anyio.Path(self._layout.parent).mkdir(parents=True, exist_ok=True)
        said = await self._learner.ask("layout", timeout_s=timeout_s, out=str(self._layout))
        layout = orjson.loads(await anyio.Path(self._layout).read_bytes())
        buckets = [Bucket(**bucket) for bucket in layout]
        backend = self._settings.backend
        if backend == "auto":
            backend = said["backend"]
        return InLearner(
            version, self._learner, buckets, int(said["num_updates"]), backend, self._settings,
            said.get("model") or {},
        )  # fmt: skip

    async def tidy(self) -> None:
        """There is nothing to remove."""

    async def close(self) -> None:
        """There is nothing to remove."""


@dataclass(frozen=True, slots=True)
class _Member:
    """A server, and what it takes to send to it."""

    server: SGLangServer
    info: WeightsInfo
    rank: int  # of its first rank, in the group


class _Failed(Exception):
    """An attempt failed; by whom first. No url: the learner."""

    def __init__(self, url: str | None, why: str) -> None:
        super().__init__(why)
        self.url, self.why = url, why


@dataclass(frozen=True, slots=True)
class InLearner:
    """The weights of one version, which the learner has; it is asked for those after so many
    updates, and refuses once it has others."""

    version: str
    learner: Learner
    buckets: Sequence[Bucket]
    num_updates: int
    backend: str
    settings: WeightsSettings
    model: Mapping[str, Any]  # of its configuration, what `layout_of` asks for

    async def give(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, Proof], dict[str, str]]:
        """What those that have loaded have, and why the others have not, by url.

        Raises:
            SettingsError: the servers cannot know where to meet.
            LearnerError: it died, or hangs.
        """
        failed: dict[str, str] = {}
        proofs: dict[str, Proof] = {}
        asked = list(servers)
        with anyio.move_on_after(timeout_s):
            while asked and not proofs:
                members = await self._members(asked, failed)
                asked = [member.server for member in members]
                if not members:
                    break
                lost = await self._attempt(members, proofs, failed)
                if not proofs and not lost:
                    break
                asked = [server for server in asked if server.url not in lost]
        missed = [server.url for server in servers if server.url not in proofs]
        late = f"not within {timeout_s:g} s"
        return proofs, {url: failed.get(url, late) for url in missed}

    async def _members(
        self, servers: Sequence[SGLangServer], failed: dict[str, str]
    ) -> list[_Member]:
        """Those that say that they can take part."""
        infos: dict[str, WeightsInfo] = {}

        async def ask(server: SGLangServer) -> None:
            try:
                infos[server.url] = await server.group_member(self.settings.pause)
            except ServerError as error:
                failed[server.url] = str(error)

        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(ask, server)
        here = [server for server in servers if server.url in infos]
        ranks = itertools.accumulate((infos[s.url].num_ranks for s in here), initial=1)
        return [
            _Member(server, infos[server.url], rank)
            for server, rank in zip(here, ranks, strict=False)
        ]

    async def _attempt(
        self, members: Sequence[_Member], proofs: dict[str, Proof], failed: dict[str, str]
    ) -> set[str]:
        """One group, from its beginning to its end. Fills in the proofs if it succeeds;
        else returns who is to blame: all that do not come out of it, or who failed first."""
        address = self._address([member.server.url for member in members])
        name = f"agentloop-{self.version}-{uuid.uuid4().hex[:8]}"
        first: _Failed | None = None
        try:
            opened = await self._ask(
                "open", address=address, port=self.settings.port, num_updates=self.num_updates
            )
        except LearnerRefused as error:
            failed.update((member.server.url, str(error)) for member in members)
            return set()
        group = WeightsGroup(
            name, address, int(opened["port"]), self.backend,
            1 + sum(member.info.num_ranks for member in members), self.settings.pause,
        )  # fmt: skip
        lost: dict[str, str] = {}
        try:
            sums = await self._send(group, members)
            await self._finish(group, members, sums, proofs, failed)
        except _Failed as error:
            first = error
        finally:
            left = [m.server for m in members if m.server.url not in proofs]
            lost = await self._leave(group, left)
        if first is not None:
            log.warning("a group of %d servers failed: %s", len(members), first.why)
            for member in members:
                failed[member.server.url] = first.why
            failed.update(lost)
            if not lost and first.url is not None:
                return {first.url}
        return set(lost)

    async def _send(self, group: WeightsGroup, members: Sequence[_Member]) -> _Sums | str:
        """All join, and all buckets are sent; returns what each rank of these servers must say of
        each of its tensors, or why nobody knows."""
        layout = self._layout(members)
        asked = None if isinstance(layout, str) else asdict(layout)
        sums: _Sums = {}

        async def join() -> None:
            await self._ask(
                "join", name=group.name, world_size=group.world_size, backend=group.backend,
                within_s=self.settings.group_timeout_s,
            )  # fmt: skip

        async def send(index: int) -> None:
            said = await self._ask("send", bucket=index, num_updates=self.num_updates, layout=asked)
            sums.update(said.get("sums") or {})

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
        """How these servers hold the weights; or why nobody knows."""
        if not self.settings.verify:
            return UNASKED
        found = list(dict.fromkeys(layout_of(one.info, self.model) for one in members))
        if len(found) > 1:
            return f"the servers of a group are not alike: {found}"
        (layout,) = found
        if isinstance(layout, Layout) and layout.dtype == "auto":
            return replace(layout, dtype=config_dtype(self.model.get("dtype")))
        return layout

    async def _finish(
        self,
        group: WeightsGroup,
        members: Sequence[_Member],
        sums: _Sums | str,
        proofs: dict[str, Proof],
        failed: dict[str, str],
    ) -> None:
        """Fills in what each server has."""

        def expected(name: str, rank: int) -> str | None:
            known = None if isinstance(sums, str) else sums.get(name)
            return known[rank] if known else None

        async def finish(server: SGLangServer) -> None:
            try:
                found = await server.finish_group(group, timeout_s=self._answer_s)
                unproven = sums if isinstance(sums, str) else ""
                proofs[server.url] = prove(found, expected, unproven=unproven)
            except ServerError as error:
                failed[server.url] = str(error)

        async with anyio.create_task_group() as tasks:
            for member in members:
                tasks.start_soon(finish, member.server)

    async def _leave(self, group: WeightsGroup, servers: Sequence[SGLangServer]) -> dict[str, str]:
        """First the learner leaves, which frees servers that wait for it, then these do. Nothing
        interrupts it. Returns the servers that do not answer any more, and why."""
        lost: dict[str, str] = {}

        async def leave(server: SGLangServer) -> None:
            try:
                await server.leave_group(group)
            except ServerError as error:
                lost[server.url] = str(error)

        with anyio.move_on_after(self._answer_s + _SLACK_S, shield=True):
            try:
                with suppress(LearnerRefused):
                    # Where it is still busy with what was cancelled, this waits for it.
                    await self._ask("leave")
            finally:  # of one that is dead they are rid, too
                async with anyio.create_task_group() as tasks:
                    for server in servers:
                        tasks.start_soon(leave, server)
        return lost

    @property
    def _answer_s(self) -> float:
        """The learner gives a group up after `group_timeout_s`, and may have to do so twice:
        what was cancelled is answered before what comes next."""
        return 2 * self.settings.group_timeout_s + _SLACK_S

    async def _ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        return await self.learner.ask(op, timeout_s=self._answer_s, **arguments)

    def _address(self, urls: Sequence[str]) -> str:
        if self.settings.address is not None:
            return self.settings.address
        far = [url for url in urls if urlsplit(url).hostname not in _LOOPBACK]
        if far:
            raise SettingsError(
                f"weights.address: {far[0]} is no server on loopback: set the address at which the "
                "servers reach the learner"
            )
        return "127.0.0.1"


async def _together(learner: _Part, servers: Mapping[str, _Part]) -> None:
    """The learner's part and each server's, side by side: the first that fails cancels the others.

    Raises:
        _Failed: which it was.
        LearnerError: the learner died, or hangs.
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
