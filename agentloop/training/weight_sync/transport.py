"""A transport of weights publishes versions, which it can load into servers.

    Publisher.publish ──> PublishedWeights.sync_to(servers) ──> a Proof of each server, or its error

There are two: a folder (disk.py) and a process group of learner and servers (process_group.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from agentloop.inference.sglang.client import SGLangServer
from agentloop.training.weight_sync.verify import Proof


class PublishedWeights(Protocol):
    """The published weights of one version, which servers can load."""

    @property
    def version(self) -> str: ...

    @property
    def folder(self) -> Path | None:
        """The folder that servers can load them from; None: only the learner has them."""
        ...

    @property
    def sha256(self) -> Mapping[str, str]:
        """The checksum of each file in the folder; empty if it is not known."""
        ...

    async def sync_to(
        self, servers: Sequence[SGLangServer], *, timeout_s: float
    ) -> tuple[dict[str, Proof], dict[str, str]]:
        """Load the weights into servers.

        Returns:
            The proofs of the servers that have loaded them, and the errors of the others, by url.
        """
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
