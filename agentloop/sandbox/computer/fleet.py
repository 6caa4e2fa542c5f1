"""The computers of a pool: those that wait ready, those in use, and their number.

    take() ──> a machine that waits ready, or the next that is started
                  ▲                                  │
                  └── another one is started ────────┴── release ──> removed, in its own task

For each of the last images, `warm` machines are kept ready for a while after they were last wanted.
"""

from __future__ import annotations

import itertools
import logging
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import anyio
from anyio.abc import TaskGroup

from agentloop.sandbox.computer.machine import ComputerSpec, Machine, start_machine
from agentloop.sandbox.computer.toolbox import make_toolbox
from agentloop.sandbox.container import ContainerEngine
from agentloop.sandbox.engine import what_it_said
from agentloop.sandbox.errors import Overloaded, SandboxUnavailable
from agentloop.sandbox.owner import make_dir, remove_tree
from agentloop.sandbox.program import inspect_image
from agentloop.sandbox.settings import PoolSettings

log = logging.getLogger("sandbox")

MAX_WARM_SPECS = 8
UNUSED_S = 120.0
WATCH_EVERY_S = 2.0
DISK_STEP_BYTES = 64 << 20
MEASURE_TIMEOUT_S = 30.0

_token = secrets.token_hex(3)
_numbers = itertools.count()


class _Stock:
    """The machines of one spec that nobody has taken.

    Attributes:
        num_wanted: how many to keep ready.
        num_starting: how many are on their way.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config
        self.ready: list[Machine] = []
        self.num_wanted = 0
        self.num_starting = 0
        self.num_waiting = 0
        self.failure: Exception | None = None
        self.used_at = anyio.current_time()
        self.changed = anyio.Event()

    def notify(self) -> None:
        self.changed.set()
        self.changed = anyio.Event()


class Fleet:
    """Starts, keeps and removes the machines of an engine."""

    def __init__(self, engine: ContainerEngine, settings: PoolSettings, folder: Path) -> None:
        self.engine = engine
        self.folder = folder
        """A directory of ours, removed at the end."""
        self.machines: set[Machine] = set()
        self._settings = settings
        self._stocks: dict[ComputerSpec, _Stock] = {}
        self._group: TaskGroup
        self._room = anyio.Semaphore(settings.max_computers)

    async def keep_warm(self, spec: ComputerSpec, num: int) -> None:
        """Keep `num` machines ready from now on, and wait until they are.

        Raises:
            ProgramUnsupported: the engine lacks the image.
            SandboxUnavailable: one did not start.
        """
        stock = await self._stock(spec)
        stock.num_wanted = num
        self._fill(spec, stock)
        while len(stock.ready) < stock.num_wanted:
            self._check(stock)
            await stock.changed.wait()  # no deadline: each start has one

    async def take(self, spec: ComputerSpec) -> Machine:
        """Return a machine that is ready; `give_back` must follow.

        Raises:
            Overloaded: as many are in use as may be, for too long.
            ProgramUnsupported, SandboxUnavailable: as `keep_warm`.
        """
        with anyio.move_on_after(self._settings.max_wait_s) as wait:
            await self._room.acquire()
        if wait.cancelled_caught:
            raise Overloaded(
                f"{self._settings.max_computers} computers are in use, and none was closed within "
                f"{self._settings.max_wait_s:g} s: allow more (max_computers)"
            )
        try:
            return await self._take(spec)
        except BaseException:
            self._room.release()
            raise

    def give_back(self, machine: Machine) -> None:
        """End a machine; its container is removed meanwhile."""
        machine.release()
        self._room.release()

    async def _take(self, spec: ComputerSpec) -> Machine:
        stock = await self._stock(spec)
        stock.num_wanted = max(stock.num_wanted, self._settings.warm_computers)
        stock.num_waiting += 1
        try:
            self._fill(spec, stock)
            while True:
                while stock.ready:
                    machine = stock.ready.pop(0)
                    if not machine.channel.lost.is_set():
                        return machine
                    machine.release()
                self._fill(spec, stock)
                await stock.changed.wait()  # no deadline: each start has one
                if not stock.ready:
                    self._check(stock)
        finally:
            stock.num_waiting -= 1
            self._fill(spec, stock)

    def _check(self, stock: _Stock) -> None:
        if stock.failure is not None:
            raise SandboxUnavailable(str(stock.failure)) from stock.failure

    async def _stock(self, spec: ComputerSpec) -> _Stock:
        stock = self._stocks.get(spec)
        if stock is None:
            config = await inspect_image(self.engine.docker, spec.image)
            stock = self._stocks.setdefault(spec, _Stock(config))
            self._forget_unused()
        stock.used_at = anyio.current_time()
        return stock

    def _forget_unused(self) -> None:
        """Keep nothing ready of what has not been used for long, or is one of too many."""
        stocks = sorted(self._stocks.items(), key=lambda item: -item[1].used_at)
        for number, (spec, stock) in enumerate(stocks):
            is_unused = anyio.current_time() - stock.used_at > UNUSED_S
            if (is_unused or number >= MAX_WARM_SPECS) and not stock.num_waiting:
                stock.num_wanted = 0
                for machine in stock.ready:
                    machine.release()
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
        id = f"{os.getpid()}-{_token}-{next(_numbers)}"
        is_starting = True
        try:
            async with start_machine(
                self.engine, self._settings, spec, stock.config, self.folder / "toolbox", id
            ) as machine:
                is_starting = False
                stock.num_starting -= 1
                stock.failure = None
                self.machines.add(machine)
                try:
                    if stock.num_wanted + stock.num_waiting > len(stock.ready):
                        stock.ready.append(machine)
                        stock.notify()
                        await machine.released.wait()  # no deadline: as long as it is used
                finally:
                    self.machines.discard(machine)
                    if machine in stock.ready:
                        stock.ready.remove(machine)
        except (SandboxUnavailable, aiodocker.DockerError, aiohttp.ClientError, OSError) as error:
            stock.failure = SandboxUnavailable(
                f"the engine refused a computer of {spec.image}: {what_it_said(error) or error!r}"
            )
            if not is_starting:
                log.warning("computer %s: %s", id, what_it_said(error) or repr(error))
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

    async def _measure(self, machine: Machine) -> None:
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
    folder = make_dir()
    try:
        try:
            await anyio.to_thread.run_sync(make_toolbox, folder / "toolbox")
        except OSError as error:
            raise SandboxUnavailable(f"computers cannot start here: {error}") from error
        fleet = Fleet(engine, settings, folder)
        async with anyio.create_task_group() as group:
            fleet._group = group
            group.start_soon(fleet.watch)
            try:
                yield fleet
            finally:
                group.cancel_scope.cancel()
    finally:
        remove_tree(folder)
