"""Weight sync by disk: the learner writes a folder, and every server reads it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio

from agentloop.aio import in_run_thread
from agentloop.errors import ServerError
from agentloop.inference.sglang.client import SGLangServer
from agentloop.training.learner_client.client import Learner
from agentloop.training.learner_client.protocol import PublishRequest
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.verify import UNASKED, Proof, PublishedFiles, prove

_A_VERSION = re.compile(r"\d+|\.\d+\.(partial|old)")


@dataclass(frozen=True, slots=True)
class PublishedFolder:
    """Weights in a folder that every server can read.

    Attributes:
        local_folder: where each node keeps a copy, which its servers load.
    """

    version: str
    folder: Path
    verify: bool = True
    sha256: Mapping[str, str] = field(default_factory=dict)
    local_folder: Path | None = None

    async def sync_to(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, Proof], dict[str, str]]:
        """Implement `PublishedWeights`."""
        proofs: dict[str, Proof] = {}
        failed: dict[str, str] = {}
        files, reading = PublishedFiles(self.folder), anyio.Lock()

        async def load(server: SGLangServer) -> None:
            try:
                with anyio.fail_after(timeout_s):
                    info = await server.weights_info() if self.verify else None
                    checksum = await server.update_weights(
                        str(self.folder), self.version, timeout_s=timeout_s
                    )
            except (ServerError, TimeoutError) as error:
                failed[server.url] = str(error) or f"timed out after {timeout_s:g} s"
                return
            if info is None:
                proofs[server.url] = prove(checksum, lambda *_: None, unproven=UNASKED)
                return
            async with reading:  # no deadline: bounded by the hashing of the files
                proofs[server.url] = await in_run_thread(
                    files.prove, checksum, info, abandon_on_cancel=True
                )

        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(load, server)
        return proofs, failed


class FolderPublisher:
    """Publishes weights as folders, one for each version (`Publisher`)."""

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

    async def publish(self, version: str, *, timeout_s: float) -> PublishedFolder:
        """Implement `Publisher`."""
        folder = self._folder / version
        local = self._settings.local_folder
        base = None if local is None else self._last
        request = PublishRequest(folder=folder, version=version, base=base)
        reply = await self._learner.ask(request, timeout_s=timeout_s)
        if self._last is None:  # a killed run may have left some
            self._old = await in_run_thread(_others, folder)
        elif self._last != folder:
            self._old.append(self._last)
        self._last = folder
        return PublishedFolder(version, folder, self._settings.verify, reply.sha256, local)

    async def tidy(self) -> None:
        """Implement `Publisher`."""
        while self._old:  # by name: `weights.folder` may also contain other files
            old = self._old.pop()
            await in_run_thread(partial(shutil.rmtree, old, ignore_errors=True))

    async def close(self) -> None:
        """Implement `Publisher`."""
        if self._is_external:
            remove = partial(shutil.rmtree, self._folder, ignore_errors=True)
            await in_run_thread(remove, abandon_on_cancel=True)


def _others(folder: Path) -> list[Path]:
    """Return the other versions, complete or not, in the parent of `folder`."""
    versions = (path for path in folder.parent.glob("*") if _A_VERSION.fullmatch(path.name))
    return [path for path in versions if path != folder]
