"""Ranks of the learner as plain subprocesses, and batches for them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from agentloop.learner.batch import Batch
from agentloop.training.learner_client.launch import free_port
from agentloop.training.learner_client.settings import LearnerSettings

ROOT = Path(__file__).parents[2]
SIZES = (40, 25, 33, 52)


def make_batch(seed: int = 0, sizes: tuple[int, ...] = SIZES, **arrays: Any) -> Batch:
    """Return random samples, two per group; the engine's log-probabilities are near a small
    model's."""
    rng = np.random.default_rng(seed)
    num_tokens, num_samples = sum(sizes), len(sizes)
    mask = (rng.random(num_tokens) < 0.7).astype(np.uint8)
    starts = np.cumsum(sizes) - sizes
    mask[starts], mask[starts + 1] = 0, 1
    made: dict[str, Any] = {
        "ids": rng.integers(3, 512, num_tokens, dtype=np.int32),
        "mask": mask,
        "logprobs": (-6 - rng.random(num_tokens)).astype(np.float32) * mask,
        "lengths": np.asarray(sizes, np.int32),
        "advantages": np.resize(np.asarray([1, -1], np.float32), num_samples),
        "groups": np.arange(num_samples, dtype=np.int32) // 2,
    }
    return Batch(**{**made, **arrays})


class Ranks:
    """Running ranks; `ask` sends a request to the first of them."""

    def __init__(self, processes: list[subprocess.Popen[bytes]], end: socket.socket, log: Path):
        self.processes, self.log = processes, log
        self.ready: dict[str, Any] = {}
        self._end = end
        self._lines = end.makefile("rb")

    def answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, f"the learner is gone:\n{self.log.read_text()[-3000:]}"
        found: dict[str, Any] = json.loads(line)
        return found

    def tell(self, op: str, **fields: Any) -> None:
        request = {"op": op, **fields}
        self._end.sendall(json.dumps(request, default=str).encode() + b"\n")

    def ask(self, op: str, **fields: Any) -> dict[str, Any]:
        self.tell(op, **fields)
        return self.answer()

    def hang_up(self) -> None:
        self._lines.close()
        self._end.close()


@contextmanager
def started(
    folder: Path,
    settings: LearnerSettings,
    num_ranks: int,
    program: Sequence[str] = ("-m", "agentloop.learner"),
) -> Iterator[Ranks]:
    """Start ranks and yield them when they are ready; kill those that still run at the end.

    `program` holds arguments for Python.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "settings.json", folder / "ranks.log"
    file.write_text(settings.model_dump_json())
    ours, theirs = socket.socketpair()
    ours.settimeout(250)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes = []
    with ours, log.open("wb") as output:
        with theirs:
            for rank in range(num_ranks):
                mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                if rank == 0:
                    mine["AGENTLOOP_LEARNER_FD"] = str(theirs.fileno())
                processes.append(
                    subprocess.Popen(
                        [sys.executable, *program, str(file)],
                        env={**environment, **mine},
                        pass_fds=[theirs.fileno()] if rank == 0 else [],
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=output,
                        start_new_session=True,
                    )
                )
        try:
            ranks = Ranks(processes, ours, log)
            ranks.ready = ranks.answer()
            assert ranks.ready.get("ready"), ranks.ready
            yield ranks
            ranks.hang_up()
        finally:
            for process in processes:
                process.kill()
                process.wait()
