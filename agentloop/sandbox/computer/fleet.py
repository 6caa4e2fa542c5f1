"""The computers of a pool: those that wait ready, those in use, and their number.

    take() ──> a machine that waits ready, or the next that is started
                  ▲                                  │
                  └── another one is started ────────┴── release ──> removed, in its own task

For each of the last images, machines are kept ready for a while after one was last wanted.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryFile

import aiodocker
import aiohttp
import anyio
import orjson
from anyio.abc import TaskGroup

from agentloop.sandbox.computer.images import (
    BUILT_LABEL,
    FillFile,
    bound_images,
    mark_used,
    name_image,
)
from agentloop.sandbox.computer.machine import ComputerMachine, ComputerSpec, start_machine
from agentloop.sandbox.computer.toolbox import make_toolbox
from agentloop.sandbox.container import LABEL, ContainerEngine, ImageConfig, inspect_image
from agentloop.sandbox.engine import what_it_said
from agentloop.sandbox.errors import Overloaded, ProgramUnsupported, SandboxUnavailable
from agentloop.sandbox.image.build import has_image, run_build
from agentloop.sandbox.owner import removed_at_end, unique_id
from agentloop.sandbox.settings import PoolSettings

log = logging.getLogger("sandbox")

NUM_WARM = 1  # of each image that is in use, at least
MAX_WARM_SPECS = 8
UNUSED_S = 120.0
WATCH_EVERY_S = 2.0
DISK_STEP_BYTES = 64 << 20
MEASURE_TIMEOUT_S, PULL_TIMEOUT_S, BUILD_TIMEOUT_S = 30.0, 900.0, 600.0


class _Stock:
    """The machines of one spec that nobody has taken.

    Attributes:
        num_wanted: how many to keep ready.
        num_starting: how many are on their way.
    """

    def __init__(self, config: ImageConfig) -> None:
        self.config = config
        self.ready: list[ComputerMachine] = []
        self.num_wanted = 0
        self.num_starting = 0
        self.num_waiting = 0
        self.failures: list[SandboxUnavailable] = []  # each is one waiter's
        self.used_at = anyio.current_time()
        self.changed = anyio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()

    def raise_failure(self) -> None:
        """Raise what a start has failed of, if one has."""
        if self.failures:
            raise self.failures.pop()


class Fleet:
    """Starts, keeps and removes the machines of an engine."""

    def __init__(self, engine: ContainerEngine, settings: PoolSettings, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        """A directory of ours, removed at the end."""
        self.images = {""}
        """Those that computers were started of; "", the engine's own."""
        self.max_computers, self.num_promised = settings.max_sessions, 0
        self.machines: set[ComputerMachine] = set()
        self._settings = settings
        self._stocks: dict[ComputerSpec, _Stock] = {}
        self._group: TaskGroup
        self._building = anyio.Lock()
        self._room = anyio.Semaphore(settings.max_sessions)

    @property
    def num_computers(self) -> int:
        """Number of machines that are in use, or are waited for."""
        waiting = self._room.statistics().tasks_waiting
        return self.max_computers - self._room.value + waiting

    async def keep_warm(self, spec: ComputerSpec, num: int) -> None:
        """Keep `num` machines ready from now on, and wait until they are.

        Raises:
            ProgramUnsupported: the engine lacks the image.
            SandboxUnavailable: one did not start.
        """
        stock = await self._stock(spec)
        stock.num_wanted = num
        self._fill(spec, stock)
        while len(stock.ready) < num:
            await stock.changed.wait()  # no deadline: each start has one
            stock.raise_failure()

    async def ensure_image(self, name: str, fill: FillFile) -> None:
        """Build an image, unless the engine has it, of a tar that `fill` writes into a file."""
        docker = self.engine.docker
        async with self._building:  # no deadline: each build has one
            try:
                if await has_image(docker, name):
                    await mark_used(docker, name)
                    return
                with TemporaryFile() as context:
                    await fill(context)
                    if name != await anyio.to_thread.run_sync(name_image, context):
                        raise SandboxUnavailable(f"the folder of {name} is not what it was")
                    context.seek(0)
                    await run_build(docker, context, name, {}, BUILD_TIMEOUT_S, label=BUILT_LABEL)
                await bound_images(docker, self._settings.built_images_gib * (1 << 30))
            except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
                raise SandboxUnavailable(f"the engine failed: {what_it_said(error)}") from error

    async def take(self, spec: ComputerSpec) -> ComputerMachine:
        """Return a machine that is ready; `give_back` must follow.

        Raises:
            Overloaded: as many are in use as may be, for too long.
            ProgramUnsupported, SandboxUnavailable: as `keep_warm`.
        """
        with anyio.move_on_after(self._settings.max_wait_s) as wait:
            await self._room.acquire()
        if wait.cancelled_caught:
            raise Overloaded(
                f"{self._settings.max_sessions} computers are in use, and none was closed within "
                f"{self._settings.max_wait_s:g} s: allow more (max_sessions)"
            )
        try:
            return await self._take(replace(spec, image=spec.image or self.engine.image))
        except BaseException:
            self._room.release()
            raise

    @asynccontextmanager
    async def alone(self, spec: ComputerSpec, timeout_s: float) -> AsyncIterator[ComputerMachine]:
        """Start a machine that counts as none, and of which no other waits ready.

        Raises as `take`, and SandboxUnavailable if it has not been started in time.
        """
        with anyio.move_on_after(timeout_s) as start:
            machine = await self._take(spec, num_warm=0)
        if start.cancelled_caught:
            raise SandboxUnavailable("its container was not started in time")
        try:
            yield machine
        finally:
            machine.channel.lose("it was closed")

    def give_back(self, machine: ComputerMachine) -> None:
        """End a machine; its container is removed meanwhile."""
        machine.channel.lose("it was closed")
        self._room.release()

    async def _take(self, spec: ComputerSpec, num_warm: int = NUM_WARM) -> ComputerMachine:
        stock = await self._stock(spec)
        stock.num_wanted = max(stock.num_wanted, num_warm)
        stock.num_waiting += 1
        try:
            self._fill(spec, stock)
            while True:
                while stock.ready:
                    machine = stock.ready.pop(0)
                    if not machine.channel.lost.is_set():
                        return machine
                self._fill(spec, stock)
                await stock.changed.wait()  # no deadline: each start has one
                if not stock.ready:
                    stock.raise_failure()
        finally:
            stock.num_waiting -= 1
            if not stock.num_waiting:
                stock.failures.clear()
            self._fill(spec, stock)

    async def _stock(self, spec: ComputerSpec) -> _Stock:
        stock = self._stocks.get(spec)
        if stock is None:
            config = await self._inspect(spec.image)
            stock = self._stocks.setdefault(spec, _Stock(config))
            self._forget_unused()
        stock.used_at = anyio.current_time()
        return stock

    async def _inspect(self, image: str) -> ImageConfig:
        """Return an image's configuration, after pulling it if the engine lacks it."""
        docker = self.engine.docker
        try:
            with suppress(ProgramUnsupported):
                return await inspect_image(docker, image)
            log.info("pulling the image %s", image)
            try:
                with anyio.fail_after(PULL_TIMEOUT_S):
                    await docker.images.pull(image)
            except (aiodocker.DockerError, TimeoutError) as error:
                reason = what_it_said(error) or "it took too long"
                raise ProgramUnsupported(
                    f"the engine has no image {image!r} and cannot pull it: {reason}"
                ) from error
            return await inspect_image(docker, image)
        except (aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            raise SandboxUnavailable(f"the engine failed: {what_it_said(error)}") from error

    def _forget_unused(self) -> None:
        """Keep nothing ready of what has not been used for long, or is one of too many."""
        stocks = sorted(self._stocks.items(), key=lambda item: -item[1].used_at)
        for number, (spec, stock) in enumerate(stocks):
            is_unused = anyio.current_time() - stock.used_at > UNUSED_S
            if (is_unused or number >= MAX_WARM_SPECS) and not stock.num_waiting:
                stock.num_wanted = 0
                for machine in stock.ready:
                    machine.channel.lose("it was not needed")
                stock.ready.clear()
                if not stock.num_starting:
                    del self._stocks[spec]

    def _fill(self, spec: ComputerSpec, stock: _Stock) -> None:
        missing = stock.num_wanted + stock.num_waiting - len(stock.ready) - stock.num_starting
        for _ in range(missing):
            stock.num_starting += 1
            self._group.start_soon(self._live, spec, stock)

    async def _live(self, spec: ComputerSpec, stock: _Stock) -> None:
        """Run one machine from its start to its removal."""
        id = unique_id()
        is_starting = True
        try:
            async with start_machine(
                self.engine, self._settings, spec, stock.config, self.folder / "toolbox", id
            ) as machine:
                is_starting = False
                stock.num_starting -= 1
                stock.failures.clear()
                self.machines.add(machine)
                try:
                    if stock.num_wanted + stock.num_waiting > len(stock.ready):
                        stock.ready.append(machine)
                        stock.notify()
                        await machine.channel.watch()
                finally:
                    self.machines.discard(machine)
                    if machine in stock.ready:
                        stock.ready.remove(machine)
        except (SandboxUnavailable, aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            reason = what_it_said(error) or repr(error)
            if is_starting:
                failure = f"a computer of {spec.image} could not be started: {reason}"
                stock.failures.append(SandboxUnavailable(failure))
            else:
                log.warning("computer %s: %s", id, reason)
        finally:
            if is_starting:
                stock.num_starting -= 1
                stock.num_wanted = 0  # until somebody asks again
            stock.notify()

    async def watch(self) -> None:
        """End machines that hold too much of the disk, and forget what is not used.

        Measuring one means to walk its files, so it is done where the disk's free space has shrunk.
        """
        measured_free: float | None = None
        while True:
            await anyio.sleep(WATCH_EVERY_S)
            self._forget_unused()
            free = _free_bytes(self.engine.root)
            if measured_free is not None and free > measured_free - DISK_STEP_BYTES:
                measured_free = max(free, measured_free)
                continue
            measured_free = free
            for machine in list(self.machines):
                await self._measure(machine)

    async def watch_memory(self) -> None:
        """Tell machines when the kernel has killed one of their processes for memory."""
        filters = orjson.dumps({"event": ["oom"], "label": [LABEL]}).decode()
        endless = aiohttp.ClientTimeout(total=None)
        while True:
            with suppress(aiodocker.DockerError, aiohttp.ClientError, OSError, ValueError):
                async with self.engine.docker._query(
                    "events", params={"filters": filters}, timeout=endless
                ) as events:
                    with closing(events):
                        # no deadline: events come while the engine runs
                        async for line in events.content:
                            name = orjson.loads(line)["Actor"]["Attributes"]["name"]
                            for machine in self.machines:
                                if machine.name == name:
                                    machine.channel.note_oom()
            await anyio.sleep(WATCH_EVERY_S)  # the engine is away

    async def _measure(self, machine: ComputerMachine) -> None:
        limit = machine.spec.limits.disk_mib << 20
        try:
            with anyio.fail_after(MEASURE_TIMEOUT_S):
                state = await self.engine.docker._query_json(
                    f"containers/{machine.name}/json", params={"size": "1"}
                )
        except (aiodocker.DockerError, aiohttp.ClientError, OSError):
            return  # it may be gone; the next round measures again
        if state.get("SizeRw", 0) > limit:
            machine.channel.lose(
                f"it held {state['SizeRw'] >> 20} MiB on the disk; its limit is "
                f"{machine.spec.limits.disk_mib} (disk_mib)",
                by_program=True,
            )


def _free_bytes(root: str) -> float:
    try:
        state = os.statvfs(root)
    except OSError:
        return 0.0  # not ours to see: always measure
    return state.f_bavail * state.f_frsize


@asynccontextmanager
async def open_fleet(engine: ContainerEngine, settings: PoolSettings) -> AsyncIterator[Fleet]:
    """Run a fleet; at the end, all its containers are removed.

    Raises:
        SandboxUnavailable: this machine's Python can't be mounted into containers.
    """
    with removed_at_end() as folder:
        try:
            await anyio.to_thread.run_sync(make_toolbox, folder / "toolbox")
        except OSError as error:
            raise SandboxUnavailable(f"computers cannot start here: {error}") from error
        fleet = Fleet(engine, settings, folder)
        async with anyio.create_task_group() as group:
            fleet._group = group
            group.start_soon(fleet.watch)
            group.start_soon(fleet.watch_memory)
            try:
                yield fleet
            finally:
                group.cancel_scope.cancel()
