"""Keep all servers on the learner's newest weights while a run trains.

    publish ──published──> load ──live──> free slots (group_buffer.py), until_live
                            sync_stale: servers that were restarted, or failed to load

`load` takes the newest published weights, waits for their publication, and is unblocked by
`publish`; versions that are replaced before they are loaded are skipped. `sync_stale` looks for
servers without the current weights, and gives way to `load`.
"""

from __future__ import annotations

import logging
import time

import anyio

from agentloop.errors import ServerError
from agentloop.events import WeightsLoaded
from agentloop.training.learner_client.client import LearnerLost
from agentloop.training.loop.steps import Steps
from agentloop.training.run.context import RunContext
from agentloop.training.run.step_metrics import WeightSyncMetrics
from agentloop.training.weight_sync.sync import Serving, SyncResult
from agentloop.training.weight_sync.transport import PublishedWeights, Publisher

log = logging.getLogger(__name__)

_CLOSE_S = 60.0
_POLL_S = 1.0  # time between searches for stale servers, and before another attempt
_RETRY_S = 30.0  # pause after servers could not load the weights
_NUM_TRIES = 3  # attempts at a weight sync, while servers are being restarted


class WeightSyncLoop:
    """Publishes the learner's weights and has all servers load them.

    Attributes:
        metrics: metrics of the last weight sync.
    """

    def __init__(
        self,
        run: RunContext,
        steps: Steps,
        publisher: Publisher,
        serving: Serving,
        *,
        timeout_s: float,
    ) -> None:
        """
        Args:
            timeout_s: time limit for the servers to load weights.
        """
        self._run = run
        self._control = run.control
        self._steps = steps
        self._publisher = publisher
        self._serving = serving
        self._timeout_s = timeout_s
        self.metrics = WeightSyncMetrics()
        self._published: PublishedWeights | None = None  # to be loaded next
        self._last: SyncResult | None = None
        self._lock = anyio.Lock()
        self._syncing_stale = anyio.CancelScope()

    async def publish(self) -> None:
        """Publish the learner's weights and have them loaded. Raises LearnerError."""
        started_s = time.monotonic()
        self._published = await self._steps.publish(self._publisher)
        self.metrics.publish_s = time.monotonic() - started_s
        self._syncing_stale.cancel()  # load the new weights instead
        self._control.notify()

    async def until_live(self) -> None:
        """Wait until servers have the learner's weights."""
        version = str(self._steps.version)
        await self._control.wait_until(
            lambda: self._last is not None and self._last.version == version,
            "everybody",
            lambda: f"servers to load version {version}",
        )

    async def load(self) -> None:
        """Sync the newest published weights to the servers, whenever there are new ones.

        Raises:
            LearnerError: the learner is lost for good.
            ServerError: no server could load the weights.
        """
        while True:
            while self._published is None:
                await self._control.wait_changed()  # no deadline: until the learner has new weights
            published, self._published = self._published, None
            async with self._lock:  # no deadline: loading has one, weights.timeout_s
                try:
                    synced = await self._sync(published)
                except LearnerLost:  # it takes part in a sync by group
                    await self.publish()
                    continue
                self._last = synced
                await self._publisher.tidy()
            self.metrics = WeightSyncMetrics(
                self.metrics.publish_s,
                synced.seconds,
                len(synced.loaded),
                len(synced.failed),
                synced.num_verified,
            )
            self._run.buffer.now_live(int(published.version))
            self._run.emit(
                WeightsLoaded(published.version, synced.seconds, synced.loaded, [*synced.failed])
            )
            self._control.notify()

    async def _sync(self, published: PublishedWeights) -> SyncResult:
        """Sync weights, retrying while servers are restarted. Raises ServerError if all fail."""
        for num_left in reversed(range(_NUM_TRIES)):
            try:
                return await self._serving.sync(published, timeout_s=self._timeout_s)
            except ServerError as error:
                if not num_left:
                    raise
                log.error("%s; trying again", error)
            await anyio.sleep(_POLL_S)
        raise AssertionError

    async def sync_stale(self) -> None:
        """Sync the current weights to servers that were restarted or failed at the last sync.

        Without it they would stay idle until the next sync, for ever if all servers are idle.
        """
        wait_s = _POLL_S
        while True:
            await anyio.sleep(wait_s)
            if self._control.is_paused:  # a paused run does not count as stalled
                self._control.watch.moved()
            async with self._lock:  # no deadline: loading has one, weights.timeout_s
                if self._last is None or self._last.version != self._steps.newest:
                    continue  # newer ones are about to be published
                with anyio.CancelScope() as self._syncing_stale:
                    try:
                        done = await self._serving.sync_stale(self._last, timeout_s=self._timeout_s)
                    except LearnerLost as error:  # it takes part in a sync by group
                        log.warning("servers still wait for their weights: %s", error)
                        done = True  # retry soon: the next request restarts the learner
                    wait_s = _POLL_S if done else _RETRY_S

    async def close(self) -> None:
        """Remove published weights outside of the run's folder. No sync may be running."""
        with anyio.move_on_after(_CLOSE_S, shield=True):
            await self._publisher.close()
