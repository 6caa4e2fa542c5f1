"""Load of the trainer's process for rollouts that arrive from runtimes of a cluster.

    python -m bench.scale                                 512 rollouts of 8,192 tokens in each step
    python -m bench.scale --groups 512 --every-s 0        16,384 of them, as fast as they are taken

The trainer's own loop, journal, run folder and batch files, and its end of 64 runtimes. A runtime's
results are made once, by its own code, and arrive again and again as pickled bytes, one group every
`--every-s` seconds; a learner does nothing with its batches. Resample-on-Correct keeps half of a
group. CPU seconds and the peak of resident memory are those of this process, after the first step.
Not measured: Ray's own part of a message, the page, real weights.
"""

from __future__ import annotations

import json
import pickle
import random
import re
import resource
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import anyio

from agentloop.agent.rollout import Budget
from agentloop.aio import task_group
from agentloop.environments.rewards.reward import Reward
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings
from agentloop.rollouts.record import RolloutGroup, RolloutRecord, TokenCredit
from agentloop.training.cluster.rollout_host import GroupRequest, RolloutWorker, RuntimeSync
from agentloop.training.cluster.runtimes import RemoteRuntimes
from agentloop.training.credit.roc import Selection
from agentloop.training.learner_client.protocol import (
    PublishReply,
    PublishRequest,
    Reply,
    Request,
    SavedReply,
    SavedRequest,
    StepReply,
    StepRequest,
)
from agentloop.training.loop import TrainingLoop
from agentloop.training.loop_settings import LoopSettings
from agentloop.training.queue import GroupQueue
from agentloop.training.rollouts import RolledOut, RollsOut, TrainingGroup
from agentloop.training.run_context import RunContext
from agentloop.training.run_folder import RunFolder
from agentloop.training.run_status import RunStatus
from agentloop.training.steps import Steps
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Serving
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)
from bench.command import parser_for

R = TypeVar("R", bound=Reply)

_GROUP = 32
_TURNS = 4
_PROMPT = 200
_OBSERVATION = 150
_VOCABULARY = 151_936
_STEP_S = 1186.0  # of the paper: 510 steps in a week


@dataclass(frozen=True, slots=True)
class Load:
    """The load of a step, for one rollout.

    Attributes:
        cpu_ms: CPU time of all threads, and what of it the kernel took.
        file_bytes: size of the group's file.
    """

    num_rollouts: int
    cpu_ms: float
    kernel_ms: float
    file_bytes: float
    wire_bytes: float
    rest_mib: float
    peak_mib: float


def rollout(draw: random.Random, key: str, num_tokens: int) -> Trajectory:
    """Return a rollout of `_TURNS` turns, `num_tokens` long, with log-probabilities of float32."""
    import numpy as np

    num_sampled = (num_tokens - _PROMPT - (_TURNS - 1) * _OBSERVATION) // _TURNS
    turns = []
    for number in range(_TURNS):
        is_last = number == _TURNS - 1
        ids = [int(_VOCABULARY * draw.random() ** 3) for _ in range(num_sampled)]
        logprobs = np.array([-draw.expovariate(2.0) for _ in ids], "float32").tolist()
        call = ToolCall(f"{key}-{number}", "python", {"code": "print(1)\n" * 40}, "", 0, 90)
        result = ToolResult(call.id, "python", ToolCallStatus.OK, "1\n" * 60, 1.0, 1.0, 2.0)
        turns.append(
            Turn(
                ids,
                logprobs,
                [VersionSpan("0", 0, num_sampled)],
                TurnEnd.STOP,
                [] if is_last else [call],
                [] if is_last else [result],
                [] if is_last else list(range(_OBSERVATION)),
                "word " * (num_sampled * 4 // 5),
                ["http://server"],
            )
        )
    return Trajectory(key, list(range(_PROMPT)), turns, StopReason.ANSWERED)


def group_of(num_tokens: int) -> RolledOut:
    """Return a group of which half is right, and half is trained on."""
    draw = random.Random(0)
    rollouts = [rollout(draw, f"1-task.{index}", num_tokens) for index in range(_GROUP)]
    records = [
        RolloutRecord(each.id, [each], Reward(float(index % 2), "3", "exact"))
        for index, each in enumerate(rollouts)
    ]
    kept = range(_GROUP // 2)
    credit = {records[index].id: TokenCredit(index % 2 - 0.5, 1.0) for index in kept}
    group = RolloutGroup(Task("task", "What is 1 plus 2?", "3"), records)
    return TrainingGroup(group, Selection(list(kept), {}, None, []), credit).rolled_out()


class _Runtime:
    """A runtime's end: what it rolls out is the same each time."""

    def __init__(self, rolled: RolledOut) -> None:
        self._rolled = rolled

    async def group(self, *args: Any, on_queued: Callable[[], None], **kwargs: Any) -> RolledOut:
        on_queued()
        return self._rolled


class _Arrivals:
    """Lets a group arrive every so many seconds."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next_s = 0.0

    async def wait(self) -> None:
        self._next_s = max(self._next_s, anyio.current_time()) + self._every_s
        await anyio.sleep_until(self._next_s)


class _Actor:
    """An actor of which a group's result is known in advance."""

    def __init__(self, result: bytes, arrivals: _Arrivals) -> None:
        self._result = result
        self._arrivals = arrivals

    async def call(self, method: str, *arguments: Any) -> Any:
        match method, *arguments:
            case ("run", *_):
                await anyio.sleep_forever()
            case ("do", "group", _):
                await self._arrivals.wait()
                return pickle.loads(self._result)
            case ("do", "sync", *_):
                return RuntimeSync(["http://server"], {}, "sum", 1)
            case ("do", "sync_stale", *_):
                return True
        await anyio.sleep(0)
        return None

    def kill(self) -> None:
        pass


class _Silent:
    """A progress that discards all lines."""

    def __call__(self, line: str) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def show(self, status: RunStatus) -> None:
        pass


class _Learner:
    """A learner that notes this process's load after each of its steps."""

    def __init__(self) -> None:
        self.cpu_s: list[tuple[float, float]] = []

    async def ask(self, request: Request[R], *, timeout_s: float) -> R:
        return cast(R, await self._handle(request))

    async def wait_lost(self) -> str:
        await anyio.sleep_forever()
        raise AssertionError

    async def restart(self) -> None:
        raise AssertionError("the learner is never lost")

    async def _handle(self, request: Request[Any]) -> Reply:
        match request:
            case StepRequest():
                usage = resource.getrusage(resource.RUSAGE_SELF)
                self.cpu_s.append((usage.ru_utime + usage.ru_stime, usage.ru_stime))
                return StepReply(loss=0.0)
            case PublishRequest():
                request.folder.mkdir(parents=True)
                return PublishReply(version=request.version, sha256={}, num_bytes=0, seconds=0)
            case SavedRequest():
                return SavedReply()
        return Reply()


@asynccontextmanager
async def _unused() -> AsyncIterator[tuple[RollsOut, Serving]]:
    yield cast(RollsOut, None), cast(Serving, None)


async def measure(num_groups: int, num_tokens: int, steps: int, every_s: float) -> Load:
    """Run training steps after a first one, and return their load."""
    rolled = group_of(num_tokens)
    worker = RolloutWorker(cast(RollsOut, _Runtime(rolled)), cast(Serving, None))
    request = GroupRequest(Task("task", "", ""), "1", _GROUP, Budget(), 0)
    result = pickle.dumps(await worker.group(request), protocol=5)
    del rolled, worker
    learner = _Learner()
    arrivals = _Arrivals(every_s)
    runtimes = RemoteRuntimes(group_size=_GROUP, max_restarts=0, say=lambda line: None)
    names = [f"runtime {number}" for number in range(1, 65)]

    async def start() -> _Actor:
        return _Actor(result, arrivals)

    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(Path(folder) / "run", "")
        async with (
            GroupQueue.open(run.path / "queue.sqlite") as queue,
            task_group(only_first=True) as watching,
            runtimes.running(dict.fromkeys(names, start), dict.fromkeys(names, _unused)),
        ):
            report = _Silent()
            context = RunContext(
                LoopSettings(
                    steps=steps + 1,
                    prompts_per_step=num_groups,
                    group_size=_GROUP,
                    checkpoint_every=0,
                    evaluate_every=0,
                ),
                TaskSource.open(TasksSettings(kind="arithmetic", held_out=64)),
                runtimes,
                queue,
                run,
                report,
            )
            trainer = Steps(learner, queue, run, restored=None, timeout_s=600, say=report.say)
            loop = TrainingLoop(context, trainer, runtimes, weights=WeightsSettings(verify=False))

            async def from_the_first_step() -> None:
                while not learner.cpu_s:
                    await anyio.sleep(0.05)
                Path("/proc/self/clear_refs").write_text("5")  # forgets the peak

            rest_mib = _memory_mib("VmRSS")
            watching.start_soon(from_the_first_step)
            await loop.run()
            watching.cancel_scope.cancel()
        sizes = [path.stat().st_size for path in run.path.glob("trajectories/*")]
    num_rollouts = num_groups * _GROUP
    (first_s, first_kernel_s), (last_s, last_kernel_s) = learner.cpu_s[0], learner.cpu_s[-1]
    return Load(
        num_rollouts,
        1e3 * (last_s - first_s) / steps / num_rollouts,
        1e3 * (last_kernel_s - first_kernel_s) / steps / num_rollouts,
        sum(sizes) / len(sizes) / _GROUP,
        len(result) / _GROUP,
        rest_mib,
        _memory_mib("VmHWM"),
    )


def _memory_mib(name: str) -> float:
    status = Path("/proc/self/status").read_text()
    (kib,) = re.findall(rf"{name}:\s*(\d+) kB", status)
    return int(kib) / 1024


def main() -> None:
    parser = parser_for("scale", __doc__)
    parser.add_argument("--groups", type=int, default=16, help="groups of 32 in a step")
    parser.add_argument("--tokens", type=int, default=8192, help="length of a rollout")
    parser.add_argument("--steps", type=int, default=2, help="steps after the first")
    parser.add_argument("--every-s", type=float, default=0.5, help="time between two groups")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started_s = time.monotonic()
    args = options.groups, options.tokens, options.steps, options.every_s
    load = anyio.run(measure, *args, backend_options={"use_uvloop": True})
    if options.json:
        print(json.dumps({name: getattr(load, name) for name in load.__slots__}))
        return
    whole_s = load.cpu_ms * 16.384
    print(
        f"{load.num_rollouts} rollouts of {options.tokens} tokens a step, "
        f"{time.monotonic() - started_s:.0f} s in all\n"
        f"  a rollout: {load.cpu_ms:.1f} ms of CPU (kernel {load.kernel_ms:.1f}), "
        f"{load.file_bytes / 1e3:,.0f} KB on disk, {load.wire_bytes / 1e3:,.0f} KB on the way\n"
        f"  memory: at most {load.peak_mib:,.0f} MiB, {load.rest_mib:,.0f} MiB before the steps\n"
        f"  16,384 of them: {whole_s:,.0f} s of CPU, {whole_s / _STEP_S:.2f} cores "
        f"if a step takes {_STEP_S:,.0f} s"
    )


if __name__ == "__main__":
    main()
