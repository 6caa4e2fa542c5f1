"""The ranks: this one's place among them, and what they tell each other beside the training.

Requests, errors and metrics go over a gloo group of their own, on the host, so that a rank that
waits for work needs no accelerator for it.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from learner.errors import LearnerError

__all__ = ["Clock", "Task", "World"]

_BEATS_PER_TIMEOUT = 4
_MAX_BEAT_S = 5.0


class World:
    """This process among its peers.

    Attributes:
        rank, size: as in the environment (RANK, WORLD_SIZE).
        device: this rank's accelerator, or the CPU.
        beat_s: seconds between signs of life.
    """

    def __init__(self, timeout_s: float) -> None:
        """Join the others at MASTER_ADDR:MASTER_PORT.

        `timeout_s` is how long a collective waits for a peer that does not come.

        Raises:
            LearnerError: the environment lacks something.
        """
        # How often ranks hear of each other, so that none is taken for lost.
        self.beat_s = min(_MAX_BEAT_S, timeout_s / _BEATS_PER_TIMEOUT)
        self.rank, self.size = _number("RANK"), _number("WORLD_SIZE")
        local_rank = _number("LOCAL_RANK")
        self._cuda = torch.cuda.is_available()
        if self._cuda:
            torch.cuda.set_device(local_rank)
        self.device = torch.device("cuda", local_rank) if self._cuda else torch.device("cpu")
        _join("nccl" if self._cuda else "gloo", timedelta(seconds=timeout_s))
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))

    @property
    def first(self) -> bool:
        return self.rank == 0

    def share(self, item: Any) -> Any:
        """Rank 0's `item`, on every rank."""
        box = [item]
        dist.broadcast_object_list(box, src=0, group=self._control)
        return box[0]

    def agree(self, error: LearnerError | None) -> None:
        """Every rank comes here, with what went wrong on it, if anything.

        Raises:
            LearnerError: what went wrong on the first rank that has something, on all of them.
        """
        errors: list[LearnerError | None] = [None] * self.size
        dist.all_gather_object(errors, error, group=self._control)
        for found in errors:
            if found is not None:
                raise found

    def beside(self, work: Callable[[], None] | None) -> None:
        """Every rank comes here with what it has to do on the host, if anything, and waits for all
        for as long as they take: meanwhile each beat says that they are there. `work` runs in a
        thread, has no collectives, and does not hold Python's lock for long.

        Raises:
            LearnerError: what went wrong on the first rank where something did, on all of them.
        """
        task = Task(work)
        while not self.all_done(task, self.beat_s):
            pass
        self.agree(task.error)

    def all_done(self, task: Task, within_s: float) -> bool:
        """Every rank comes here with a task of its own, and waits for it for `within_s` at most,
        which is below a collective's timeout: whether those of all ranks are done."""
        done = [False] * self.size
        dist.all_gather_object(done, task.wait(within_s), group=self._control)
        return all(done)

    def wait(self) -> None:
        """For all ranks."""
        dist.barrier(group=self._control)

    def sum(self, values: Any) -> Any:
        """The sum over the ranks of a float tensor, on the host."""
        total = values.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self._control)
        return total

    def sums(self, values: Mapping[str, float]) -> dict[str, float]:
        """The sums over the ranks, which all bring the same names."""
        total = self.sum(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, total.tolist(), strict=True))

    @property
    def device_name(self) -> str:
        """As its maker calls it; "cpu" for a CPU."""
        return torch.cuda.get_device_name(self.device) if self._cuda else "cpu"

    def peak_memory(self) -> int:
        """The most bytes of the accelerator that tensors took since this was last asked; 0 without
        an accelerator."""
        if not self._cuda:
            return 0
        peak: int = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        return peak

    def finish(self) -> None:
        """Wait for what the accelerator was told to do."""
        if self._cuda:
            torch.cuda.synchronize(self.device)

    def leave(self) -> None:
        dist.destroy_process_group()


class Task:
    """`work`, if there is any, in a thread that nobody has to wait for when the process ends. It
    has no collectives: those of several threads would meet others of other ranks."""

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
        """Whether it is done by then. Raises what is not for the other ranks to hear."""
        self._thread.join(timeout_s)
        if self._failed is not None and not isinstance(self._failed, LearnerError):
            raise self._failed
        return not self._thread.is_alive()

    @property
    def error(self) -> LearnerError | None:
        """Of work that is done."""
        return self._failed if isinstance(self._failed, LearnerError) else None


class Clock:
    """Where the time goes, of the host and its accelerator together.

    Attributes:
        laps: seconds by name.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._begun = self._last = time.perf_counter()
        self.laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """What was done since the last lap is `name`'s."""
        self._world.finish()
        now = time.perf_counter()
        self.laps[name] = self.laps.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begun


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise LearnerError(f"{name}: a number expected in the environment, not {value!r}")
    return int(value)


def _join(backend: str, timeout: timedelta) -> None:
    # ZeRO clones the process group and forgets its timeout, but not this default.
    dist.distributed_c10d.default_pg_timeout = timeout
    if backend == "gloo":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", "1"))
    import deepspeed

    if backend == "gloo":
        # DeepSpeed would compile a transport through shared memory, which training never uses.
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False, timeout=timeout)
