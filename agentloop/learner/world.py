"""The group of ranks: this process's rank, and the ranks' communication outside of training.

Requests, errors and metrics go over a separate gloo group on the host, so that a rank that waits
for work needs no accelerator for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib.metadata import version
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from agentloop.learner.errors import RankError

T = TypeVar("T")

_BEATS_PER_TIMEOUT = 4
_MAX_BEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of an accelerator, in bytes.

    Attributes:
        lasting: What tensors take now.
        peak: What they took at most.
        limit: What they could take; other processes have the rest.
    """

    lasting: int
    peak: int
    limit: int


class World:
    """The process group of the learner, as seen by one rank.

    Attributes:
        rank, size: RANK and WORLD_SIZE from the environment.
        device: The rank's accelerator, or the CPU.
        beat_s: Seconds between heartbeats.
    """

    def __init__(self, timeout_s: float) -> None:
        """Join the other ranks at MASTER_ADDR:MASTER_PORT.

        `timeout_s` is how long a collective waits for a missing peer.

        Raises:
            RankError: A variable is missing from the environment.
        """
        # Ranks exchange heartbeats well within the timeout, so that no idle rank is taken for lost.
        self.beat_s = min(_MAX_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)
        self.rank, self.size = _int_from_environment("RANK"), _int_from_environment("WORLD_SIZE")
        local_rank = _int_from_environment("LOCAL_RANK")
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.set_device(local_rank)
        self.device = torch.device("cuda", local_rank) if self._cuda else torch.device("cpu")
        _init_process_group("nccl" if self._cuda else "gloo", timedelta(seconds=timeout_s))
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def broadcast_object(self, item: T) -> T:
        """Return rank 0's `item` on every rank (collective)."""
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def gather(self, item: T) -> list[T]:
        """Return every rank's `item` on every rank (collective)."""
        items = [item] * self.size
        dist.all_gather_object(items, item, group=self._control)
        return items

    def raise_if_any(self, error: RankError | None) -> None:
        """Raise the same error on every rank if any rank passes one (collective).

        Raises:
            RankError: The error of the lowest rank that passed one.
        """
        for rank_error in self.gather(error):
            if rank_error is not None:
                raise rank_error

    def run_beside(self, work: Callable[[], None] | None) -> None:
        """Run host work on the ranks that have some, and wait until all are done (collective).

        There is no time limit: heartbeats keep the collectives alive meanwhile. `work` runs in a
        thread; it must not use collectives or hold the GIL for long.

        Raises:
            RankError: The error of the lowest rank whose work failed, on every rank.
        """
        task = BackgroundTask(work)
        while not self.all_done(task, self.beat_s):
            pass
        self.raise_if_any(task.error)

    def all_done(self, task: BackgroundTask, within_s: float) -> bool:
        """Return whether the tasks of all ranks are done (collective).

        Each rank waits for its own task for at most `within_s`, which must be below the timeout of
        a collective.
        """
        return all(self.gather(task.wait(within_s)))

    def wait(self) -> None:
        """Wait for all ranks (collective)."""
        dist.barrier(group=self._control)

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum of a float tensor over the ranks, on the host (collective)."""
        total = values.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self._control)
        return total

    def all_reduce_named(self, values: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """Return the sum of each scalar over the ranks, which all pass the same names
        (collective)."""
        total = self.all_reduce(torch.stack([*values.values()]))
        return dict(zip(values, total.tolist(), strict=True))

    @property
    def device_name(self) -> str:
        """Name of the device as its vendor gives it; "cpu" for a CPU."""
        return torch.cuda.get_device_name(self.device) if self._cuda else "cpu"

    def free_unused_memory(self) -> None:
        """Return memory that PyTorch keeps for later to the GPU, which servers may share."""
        if self._cuda:
            torch.cuda.empty_cache()

    def memory(self) -> DeviceMemory | None:
        """Return what tensors took of the accelerator's memory since the last call.

        Without an accelerator it is None.
        """
        if not self._cuda:
            return None
        free = torch.cuda.mem_get_info(self.device)[0]
        memory = DeviceMemory(
            lasting=torch.cuda.memory_allocated(self.device),
            peak=torch.cuda.max_memory_allocated(self.device),
            limit=torch.cuda.memory_reserved(self.device) + free,
        )
        torch.cuda.reset_peak_memory_stats(self.device)
        return memory

    def finish(self) -> None:
        """Wait until the accelerator has finished its queued work."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def mark(self) -> Any:
        """Return this moment: the accelerator's when it has finished the work queued so far, or
        else the host's."""
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def leave(self) -> None:
        dist.destroy_process_group()


class BackgroundTask:
    """Work that runs in a daemon thread, so that it never delays the end of the process.

    It must not use collectives: those of several threads would be matched in a different order on
    different ranks.
    """

    def __init__(self, work: Callable[[], None] | None) -> None:
        self._work = work or (lambda: None)
        self._failed: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except Exception as error:
            self._failed = error

    def wait(self, timeout_s: float) -> bool:
        """Wait up to `timeout_s` and return whether the work is done.

        An error that is not a `RankError` is raised here: it is not shared with the other ranks.
        """
        self._thread.join(timeout_s)
        if self._failed is not None and not isinstance(self._failed, RankError):
            raise self._failed
        return not self._thread.is_alive()

    @property
    def error(self) -> RankError | None:
        """The `RankError` that finished work has raised, if any."""
        return self._failed if isinstance(self._failed, RankError) else None


class Clock:
    """Time by phase. The host does not wait for the accelerator before `stop`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun = time.perf_counter()
        self._marks = [("", world.mark())]

    def lap(self, name: str) -> None:
        """Add the time since the last lap to `name`."""
        self._marks.append((name, self._world.mark()))

    def stop(self) -> tuple[float, dict[str, float]]:
        """Wait for the accelerator; return the seconds since the start, and those by name."""
        self._world.finish()
        laps: dict[str, float] = defaultdict(float)
        for (_, start), (name, end) in pairwise(self._marks):
            on_host = isinstance(start, float)
            laps[name] += end - start if on_host else start.elapsed_time(end) / 1e3
        return time.perf_counter() - self._begun, dict(laps)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the host, which does not wait for a GPU's earlier work."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _int_from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise RankError(f"environment variable {name}: expected a number, not {value!r}")
    return int(value)


def _init_process_group(backend: str, timeout: timedelta) -> None:
    # ZeRO clones the process group without its timeout, but the clone takes this default.
    dist.distributed_c10d.default_pg_timeout = timeout
    if backend == "gloo":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    import deepspeed

    if backend == "gloo":
        # DeepSpeed would compile a transport through shared memory, which training never uses.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)


def made_with(world: World) -> dict[str, str]:
    """Return what the exact result of a step depends on besides the settings."""
    return {
        **{name: version(name) for name in ("torch", "transformers", "deepspeed")},
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "device": world.device_name,
        "threads": str(torch.get_num_threads()),
    }
