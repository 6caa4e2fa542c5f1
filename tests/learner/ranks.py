"""Ranks of the learner, and batches for them.

Ranks are forked from a server that has imported torch and DeepSpeed: each start would spend most of
its time on that. tests/learner/test_launch.py starts them by their command.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentloop.child_environment import wait_policy
from agentloop.learner.__main__ import main
from agentloop.learner.batch import Batch
from agentloop.training.learner_client.launch import free_port
from agentloop.training.learner_client.settings import LearnerSettings

ROOT = Path(__file__).parents[2]
SIZES = (40, 25, 33, 52)
# Also what a learner imports only with its first step.
_PRELOAD = [
    "torch", "torch._inductor.compile_fx", "deepspeed",
    "deepspeed.runtime.zero.muon.muon_optimizer", "peft",
    "transformers.models.qwen3.modeling_qwen3", "agentloop.learner.__main__",
    "agentloop.learner.policy", "agentloop.learner.rank", __name__,
]  # fmt: skip


def make_batch(seed: int = 0, sizes: tuple[int, ...] = SIZES, **arrays: Any) -> Batch:
    """Return random samples, two per group; the engine's log-probabilities are near a small
    model's.

    `advantages` may also have one number for each sample.
    """
    rng = np.random.default_rng(seed)
    num_tokens, num_samples = sum(sizes), len(sizes)
    mask = (rng.random(num_tokens) < 0.7).astype(np.uint8)
    starts = np.cumsum(sizes) - sizes
    mask[starts], mask[starts + 1] = 0, 1
    groups = arrays.pop("groups", np.arange(num_samples, dtype=np.int32) // 2)
    advantages = arrays.pop("advantages", np.resize(np.asarray([1, -1], np.float32), num_samples))
    if len(advantages) == num_samples:
        advantages = np.repeat(advantages, sizes) * mask
    made: dict[str, Any] = {
        "ids": rng.integers(3, 512, num_tokens, dtype=np.int32),
        "mask": mask,
        "logprobs": (-6 - rng.random(num_tokens)).astype(np.float32) * mask,
        "advantages": advantages,
        "weights": group_weights(mask, np.repeat(groups, sizes)),
        "lengths": np.asarray(sizes, np.int32),
        "groups": groups,
    }
    return Batch(**{**made, **arrays})


def with_kept_ids(batch: Batch, num_whole: int = 0) -> Batch:
    """Return the batch with a few kept ids for all sampled tokens but the first `num_whole`."""
    rng = np.random.default_rng(0)
    rows = []
    for at in np.flatnonzero(batch.mask)[num_whole:]:
        others = rng.choice(512, int(rng.integers(0, 20)), replace=False).astype(np.int32)
        rows.append(np.unique([batch.ids[at], *others]).astype(np.int32))
    counts = np.zeros(len(batch.ids), np.int32)
    counts[np.flatnonzero(batch.mask)[num_whole:]] = [*map(len, rows)]
    return replace(batch, kept_counts=counts, kept=np.concatenate(rows))


def make_siblings(seed: int = 0) -> Batch:
    """Return random samples that begin alike: two groups with a prompt each, a session that
    branches twice, a sample that another one continues, and one that is like no other."""
    rng = np.random.default_rng(seed)

    def ids(num: int) -> list[int]:
        return [int(number) for number in rng.integers(3, 512, num)]

    prompt, longer, history = ids(20), ids(31), ids(12)
    branch = history + ids(9)
    samples = [
        *(prompt + ids(num) for num in (5, 8, 3)), *(longer + ids(num) for num in (7, 2)),
        branch, branch + ids(6), branch + ids(4), history + ids(10), ids(25),
    ]  # fmt: skip
    return make_batch(
        seed,
        tuple(map(len, samples)),
        ids=np.concatenate(samples).astype(np.int32),
        groups=np.asarray([0, 0, 0, 1, 1, 2, 2, 2, 2, 3], np.int32),
    )


def group_weights(mask_T: Any, groups_T: Any) -> Any:
    """Return the weights by which the loss is the mean over groups of the mean over tokens."""
    counts = np.bincount(groups_T[mask_T == 1], minlength=int(groups_T.max()) + 1)
    return (mask_T / np.maximum(counts, 1)[groups_T]).astype(np.float32)


class Forked:
    """A process forked from the server of this test session, in a session of its own."""

    def __init__(
        self, target: Callable[..., None], *args: Any, environment: Mapping[str, str], log: Path
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(
            target=_run, args=(target, args, dict(environment), log), daemon=True
        )
        _ensure_server(context)
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise TimeoutError(f"process {self.pid} still runs after {timeout} s")
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def send_signal(self, sig: int, /) -> None:
        if self._process.exitcode is None:
            os.kill(self.pid, sig)


def _ensure_server(context: multiprocessing.context.ForkServerContext) -> None:
    """Start the server, unless it runs, with an environment that OpenMP reads as it is loaded."""
    context.set_forkserver_preload(_PRELOAD)
    usual = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | wait_policy(usual)
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ |= usual


def _run(
    target: Callable[..., None], args: Sequence[Any], environment: Mapping[str, str], log: Path
) -> None:
    os.setsid()
    with log.open("ab") as output:
        for number in (1, 2):
            os.dup2(output.fileno(), number)
    os.environ.clear()
    os.environ |= environment
    target(*args)


def _rank(settings: Path, before: Callable[[Path], None] | None) -> None:
    if before is not None:
        before(settings.parent)
    sys.exit(main([str(settings)]))


class Ranks:
    """Running ranks; `ask` sends a request to the first of them."""

    def __init__(self, processes: Sequence[Forked], end: socket.socket, log: Path):
        self.processes, self.log = processes, log
        self.ready: dict[str, Any] = {}
        self._end = end
        self._lines = end.makefile("rb")

    def answer(self) -> dict[str, Any]:
        line = self._lines.readline()
        assert line, f"the learner is gone:\n{self.log.read_text()[-3000:]}"
        result: dict[str, Any] = json.loads(line)
        return result

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
    before: Callable[[Path], None] | None = None,
) -> Iterator[Ranks]:
    """Start ranks and yield them when they are ready; kill those that still run at the end.

    Each rank first calls `before` with its folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, log = folder / "settings.json", folder / "ranks.log"
    file.write_text(settings.model_dump_json())
    log.write_bytes(b"")
    environment = {
        **os.environ,
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    processes: list[Forked] = []
    with (
        tempfile.TemporaryDirectory(prefix="ranks-") as short,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        environment["AGENTLOOP_LEARNER_SOCKET"] = f"{short}/socket"
        listener.bind(f"{short}/socket")
        listener.listen()
        listener.settimeout(250)
        for rank in range(num_ranks):
            mine = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(
                Forked(_rank, file, before, environment={**environment, **mine}, log=log)
            )
        try:
            with listener.accept()[0] as ours:
                ours.settimeout(250)
                ranks = Ranks(processes, ours, log)
                ranks.ready = ranks.answer()
                assert ranks.ready.get("ready"), ranks.ready
                yield ranks
                ranks.hang_up()
        finally:
            for process in processes:
                process.kill()
                process.wait()
