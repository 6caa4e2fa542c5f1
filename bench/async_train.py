"""Benchmark of asynchronous training: rollouts and learner run at once, by maximum staleness.

    python -m bench.async_train model                        models of servers, in virtual time
    python -m bench.async_train model --regimes balanced --seeds 1 --staleness 0,1
    python -m bench.async_train real --model runs/latest/sft/model      real ones, on this machine

`model`: the real training loop (slots, queue, run folder, rewards, Resample-on-Correct, admission
of groups) with simulated parts around it, in virtual time: a learner that sleeps in proportion to
the tokens of its batch, and models of servers (bench/virtual_servers.py). Rollouts are those of
bench/router.py: turns of log-normal lengths with tools between them. New weights stop a server for
ten seconds; running requests are then recomputed, as with SGLang's pause by retraction. A token's
id is the version that sampled it, so a batch shows its own staleness.

A regime is the ratio of the learner's time per step (learning and publishing) to the servers' time
at full load: 0.5, 1 and 2. The bound by the busier side is the larger of

    learner   the time that it was busy per step of this run
    servers   tokens sampled per step of this run, divided by the tokens per second of the same
              servers when groups follow each other without a learner, as fast as they are admitted;
              plus the pause for new weights. Recomputation is not included.

so it is the time of a loop that loses nothing beyond the work itself. Steps count from the end of
step `--warm-up` to the end of the last one, where the run is stopped, so that neither filling nor
draining the pipeline is measured.

With staleness 0 half of the devices always wait. Setups that alternate both tasks on one set of
devices do not have that loss; the table does not cover them.

`real`: runs `agentloop train` once for each staleness, one after the other.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TypedDict, TypeVar, cast

import anyio

from agentloop.agent.rollout import Budget
from agentloop.environments.rewards.reward import Grader, Reward
from agentloop.environments.tasks.sources import Task, TaskSource, TasksSettings
from agentloop.inference.router import Router
from agentloop.rollouts.request import GroupRequest
from agentloop.rollouts.runner import GroupRunner, play_siblings
from agentloop.training.credit.roc import RocSettings
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
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.loop.settings import LoopSettings
from agentloop.training.loop.steps import Steps
from agentloop.training.loop.training_loop import TrainingLoop
from agentloop.training.rollouts import Rollouts
from agentloop.training.run.context import RunContext
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.status import RunStatus
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served
from agentloop.trajectory import Trajectory
from bench import virtual_time
from bench.command import numbers, parser_for, words
from bench.router import RolloutSpec, make_trace
from bench.server_model import ServerParams
from bench.virtual_servers import TOKENS_PER_ID, Server, Servers

R = TypeVar("R", bound=Reply)

REGIMES = {"rollout-bound": 0.5, "balanced": 1.0, "learner-bound": 2.0}
_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Shape:
    """The configuration shared by all runs.

    The defaults are near a 14B model on GPUs of 141 GB, with half as many rollouts per step and GPU
    as in the paper; they are two of eight such servers.
    """

    num_servers: int = 2
    params: ServerParams = field(default_factory=lambda: ServerParams(capacity=600_000))
    prompts_per_step: int = 16
    group_size: int = 16
    max_turns: int = 10
    budget: int = 12_288
    load_s: float = 10.0
    publish_s: float = 10.0
    warm_up: int = 5
    steps: int = 13  # including the warm-up

    def group(self, seed: int, number: int) -> list[RolloutSpec]:
        """Return the rollouts of the group admitted as the `number`-th, the same for any
        staleness."""
        return make_trace(
            1_000_000 * seed + number,
            num_groups=1,
            group_size=self.group_size,
            max_turns=self.max_turns,
            budget=self.budget,
        )

    def servers(self, seed: int) -> Servers:
        """Return all servers, still without weights."""
        each = [
            Server(f"server{index}", self.params, self.load_s) for index in range(self.num_servers)
        ]
        return Servers(each, partial(self.group, seed), longest=self.budget)


@dataclass(frozen=True, slots=True)
class Full:
    """The servers at full load without a learner.

    Attributes:
        tokens_per_s: Sampled by all servers together.
        step_s: Time for the rollouts of a step at that rate.
        num_learned: Tokens of a step's batch, prompts and observations included.
    """

    tokens_per_s: float
    step_s: float
    num_learned: float


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a run, per counted step: seconds of virtual time, and fractions of it.

    Attributes:
        bound_s: Bound by the busier side; see the module's docstring.
        length: Mean number of tokens per sample.
        staleness: Number of samples by the versions that their oldest token is behind.
    """

    regime: str
    max_staleness: int
    seed: int
    step_s: float
    learner_s: float
    servers_s: float
    servers_idle: float
    learner_idle: float
    length: float
    staleness: dict[int, int]

    @property
    def bound_s(self) -> float:
        return max(self.learner_s, self.servers_s)


# --- the learner ----------------------------------------------------------------------------------


class _Finished(Exception):
    """All counted steps are done."""


@dataclass(frozen=True, slots=True)
class _Mark:
    """A snapshot of all counters."""

    now_s: float
    learner_s: float
    servers_s: float
    num_sampled: int


class _SleepingLearner:
    """A learner that sleeps `learn_s_per_token` for each token of a batch."""

    def __init__(self, shape: Shape, servers: Sequence[Server], learn_s_per_token: float) -> None:
        self.staleness: Counter[int] = Counter()  # of samples, by their oldest token
        self.lengths: list[int] = []  # of samples, in ids
        self.marks: list[_Mark] = []  # after each step
        self._shape = shape
        self._servers = servers
        self._learn_s_per_token = learn_s_per_token
        self._version = 0
        self._busy_s = 0.0

    async def ask(self, request: Request[R], *, timeout_s: float) -> R:
        return cast(R, await self._handle(request))

    async def wait_lost(self) -> str:
        await anyio.sleep_forever()
        raise AssertionError

    async def restart(self) -> None:
        raise AssertionError("the learner is never lost")

    async def _handle(self, request: Request[R]) -> Reply:
        match request:
            case StepRequest():
                await self._step(request.batch)
                return StepReply(loss=0.0)
            case PublishRequest():
                request.folder.mkdir(parents=True)  # in /dev/shm
                await self._work(self._shape.publish_s)
                return PublishReply(version=request.version, sha256={}, num_bytes=0, seconds=0)
            case SavedRequest():
                return SavedReply()
        return Reply()

    async def _step(self, batch: Path) -> None:
        from safetensors.numpy import load_file

        arrays = load_file(batch)
        begin, num_steps = 0, len(self.marks)
        for length in arrays["lengths"].tolist():
            sample = slice(begin, begin := begin + length)
            oldest = int(arrays["ids"][sample][arrays["mask"][sample] == 1].min())
            if num_steps >= self._shape.warm_up:
                self.staleness[self._version - oldest] += 1
                self.lengths.append(length)
        num_tokens = TOKENS_PER_ID * len(arrays["ids"])
        await self._work(num_tokens * self._learn_s_per_token)
        self._version += 1
        self.marks.append(
            _Mark(
                anyio.current_time(),
                self._busy_s,
                statistics.fmean(server.busy_s for server in self._servers),
                sum(server.num_sampled for server in self._servers),
            )
        )
        if len(self.marks) == self._shape.steps:
            raise _Finished

    async def _work(self, seconds: float) -> None:
        await anyio.sleep(seconds)
        self._busy_s += seconds


class _HalfCorrect:
    """A scorer for which every other rollout is correct."""

    async def score(self, trajectory: Trajectory, task: Task) -> Reward:
        return Reward(float(int(trajectory.id.rpartition(".")[2]) % 2), None, "")


class _Silent:
    """A progress that discards all lines."""

    def __call__(self, line: str) -> None:
        pass

    def say(self, line: str) -> None:
        pass

    def show(self, standing: RunStatus) -> None:
        pass


# --- runs -----------------------------------------------------------------------------------------


def full(shape: Shape, seed: int) -> Full:
    """Measure the servers' throughput and compute the cost of a step."""
    specs = [
        [
            spec
            for number in range(shape.prompts_per_step)
            for spec in shape.group(seed, first + number)
        ]
        for first in range(1, 1 + shape.steps * shape.prompts_per_step, shape.prompts_per_step)
    ]
    num_sampled = statistics.fmean(sum(spec.num_output for spec in step) for step in specs)
    num_all = statistics.fmean(sum(map(_num_tokens, step)) for step in specs)
    tokens_per_s = virtual_time.run(_tokens_per_s, shape, seed)
    return Full(
        tokens_per_s,
        num_sampled / tokens_per_s,
        num_all / 2,  # Resample-on-Correct keeps half
    )


def _num_tokens(spec: RolloutSpec) -> int:
    """Return the tokens of a rollout, including its prompt and observations."""
    return spec.num_prompt + spec.num_output + sum(turn.num_tool for turn in spec.turns[:-1])


async def _tokens_per_s(shape: Shape, seed: int) -> float:
    """Measure the rate from the second step's rollouts on, for the length of three steps."""
    servers = shape.servers(seed)
    for server in servers.servers:
        server.version = "0"
        servers.weights_loaded(server.url, "0")
    num_step = shape.prompts_per_step * shape.group_size
    marks: list[tuple[float, int]] = []

    async def watch() -> None:
        for num_steps in (2, 5):
            while servers.num_ended < num_steps * num_step:
                await anyio.sleep(1.0)
            marks.append(
                (anyio.current_time(), sum(server.num_sampled for server in servers.servers))
            )
        tasks.cancel_scope.cancel()

    async def run_group(request: GroupRequest) -> None:
        async with servers.group(request) as siblings:
            await play_siblings(siblings)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        tasks.start_soon(servers.keep_told)
        for number in range(1, 100 * shape.prompts_per_step):
            await servers.gate.wait_for_capacity(shape.group_size)
            name = f"{number}-x"
            request = GroupRequest(Task(name, "", ""), name, shape.group_size, Budget())
            tasks.start_soon(run_group, request)
            await request.queued.wait()
    (begin_s, num_before), (end_s, num_after) = marks
    return (num_after - num_before) / (end_s - begin_s)


def train(shape: Shape, regime: str, max_staleness: int, seed: int, at_best: Full) -> Result:
    """Run the loop until its last counted step."""
    learner_s = REGIMES[regime] * (at_best.step_s + shape.load_s)
    learn_s_per_token = max(0.0, learner_s - shape.publish_s) / at_best.num_learned
    learner = virtual_time.run(_train, shape, max_staleness, seed, learn_s_per_token)
    first, last = learner.marks[shape.warm_up - 1], learner.marks[-1]
    num_steps = shape.steps - shape.warm_up
    took_s = last.now_s - first.now_s
    learner_s = (last.learner_s - first.learner_s) / num_steps
    num_sampled = (last.num_sampled - first.num_sampled) / num_steps
    return Result(
        regime,
        max_staleness,
        seed,
        step_s=took_s / num_steps,
        learner_s=learner_s,
        servers_s=num_sampled / at_best.tokens_per_s + shape.load_s,
        servers_idle=1 - (last.servers_s - first.servers_s) / took_s,
        learner_idle=1 - (last.learner_s - first.learner_s) / took_s,
        length=TOKENS_PER_ID * statistics.fmean(learner.lengths),
        staleness=dict(sorted(learner.staleness.items())),
    )


async def _train(
    shape: Shape, max_staleness: int, seed: int, learn_s_per_token: float
) -> _SleepingLearner:
    servers = shape.servers(seed)
    learner = _SleepingLearner(shape, servers.servers, learn_s_per_token)
    settings = LoopSettings(
        steps=shape.steps + max_staleness + 2,  # admission must go on until the end
        prompts_per_step=shape.prompts_per_step,
        group_size=shape.group_size,
        max_staleness=max_staleness,
        evaluate_every=0,
        checkpoint_every=0,
        seed=seed,
    )
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        run = RunFolder(Path(folder) / "run", "")
        async with (
            GroupQueue.open(run.path / "queue.sqlite") as queue,
            anyio.create_task_group() as tasks,
        ):
            tasks.start_soon(servers.keep_told)
            with suppress(_Finished):
                report = _Silent()
                context = RunContext(
                    settings,
                    TaskSource.open(TasksSettings(kind="arithmetic", held_out=64)),
                    Rollouts(
                        GroupRunner(servers, cast(Grader, _HalfCorrect())),
                        RocSettings(down_sample_to_n=shape.group_size // 2),
                        seed=settings.seed,
                    ),
                    servers.gate.wait_for_capacity,
                    queue,
                    run,
                    report,
                )
                await TrainingLoop(
                    context,
                    Steps(
                        learner,
                        queue,
                        run,
                        restored=None,
                        timeout_s=settings.step_timeout_s,
                        say=report.say,
                    ),
                    Served(cast(Router, servers)),
                    weights=WeightsSettings(verify=False),  # there are no real weights
                ).run()
            tasks.cancel_scope.cancel()
    return learner


# --- output ---------------------------------------------------------------------------------------

_HEAD = """\
| regime | staleness | steps/h | to synchronous | s a step | bound s | to the bound | \
servers idle | learner idle | tokens of a sample | staleness of samples |
|---|---|---|---|---|---|---|---|---|---|---|"""


def table(results: Sequence[Result]) -> str:
    """Return medians over the seeds as markdown; ratios are computed per seed."""
    alone = {
        (result.regime, result.seed): result.step_s
        for result in results
        if not result.max_staleness
    }
    rows = [_HEAD]
    for regime, max_staleness in dict.fromkeys(
        (result.regime, result.max_staleness) for result in results
    ):
        mine = [
            result
            for result in results
            if (result.regime, result.max_staleness) == (regime, max_staleness)
        ]

        def median(name: str, mine: Sequence[Result] = mine) -> float:
            return float(statistics.median(getattr(result, name) for result in mine))

        gains = [
            alone[key] / result.step_s for result in mine if (key := (regime, result.seed)) in alone
        ]
        gain = f"{statistics.median(gains):.2f}" if gains else ""
        to_bound = statistics.median(result.step_s / result.bound_s for result in mine)
        rows.append(
            f"| {regime} | {max_staleness} | {3600 / median('step_s'):.2f} | {gain} | "
            f"{median('step_s'):.0f} | {median('bound_s'):.0f} | {to_bound:.2f} | "
            f"{100 * median('servers_idle'):.0f}% | {100 * abs(median('learner_idle')):.0f}% | "
            f"{median('length'):,.0f} | "
            f"{_shares(mine)} |"
        )
    return "\n".join(rows)


def _shares(results: Sequence[Result]) -> str:
    """Return the distribution of all samples, such as "1: 20%, 2: 80%"."""
    counts = sum((Counter(result.staleness) for result in results), Counter[int]())
    total = max(1, counts.total())
    return ", ".join(f"{age}: {100 * count / total:.0f}%" for age, count in sorted(counts.items()))


# --- the real thing -------------------------------------------------------------------------------


class RealStep(TypedDict):
    """What is read of a step's metrics."""

    step_s: float
    num_sampled_tokens: int
    staleness_mean: float | None
    staleness_max: int
    reward: float | None


def run_real(
    recipe: Path, model: str, max_staleness: int, steps: int, folder: Path, overrides: Sequence[str]
) -> list[RealStep]:
    """Run `agentloop train` and return the metrics of its steps.

    Raises:
        CalledProcessError: It failed.
    """
    name = f"staleness-{max_staleness}"
    settings = {
        "model": model,
        "loop.steps": steps,
        "loop.max_staleness": max_staleness,
        "loop.evaluate_every": 0,
        "run.folder": folder,
        "run.name": name,
    }
    arguments = [*(f"{key}={value}" for key, value in settings.items()), *overrides]
    command = [sys.executable, "-m", "agentloop", "train", str(recipe), *arguments]
    print(" ".join(command), file=sys.stderr)
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if "step_s" in row]


_REAL_HEAD = """\
| staleness | steps/h | to synchronous | s a step | tokens/s | staleness mean | max | \
reward, last quarter |
|---|---|---|---|---|---|---|---|"""


def real_table(runs: dict[int, list[RealStep]], warm_up: int) -> str:
    """Return means over the counted steps as markdown.

    Steps of the warm-up do not count, nor the last ones, beside which no rollouts start any more.
    """
    rows, alone = [_REAL_HEAD], None
    for max_staleness, metrics in sorted(runs.items()):
        counted = metrics[warm_up : len(metrics) - max_staleness]

        step_s = statistics.fmean(row["step_s"] for row in counted)
        alone = step_s if max_staleness == 0 else alone
        gain = f"{alone / step_s:.2f}" if alone else ""
        tokens_per_s = statistics.fmean(row["num_sampled_tokens"] for row in counted) / step_s
        last = metrics[-max(1, len(metrics) // 4) :]
        reward = statistics.fmean(row["reward"] or 0.0 for row in last)
        staleness = statistics.fmean(row["staleness_mean"] or 0.0 for row in counted)
        rows.append(
            f"| {max_staleness} | {3600 / step_s:.0f} | {gain} | {step_s:.1f} | "
            f"{tokens_per_s:,.0f} | {staleness:.2f} | "
            f"{max(row['staleness_max'] for row in counted)} | {reward:.3f} |"
        )
    return "\n".join(rows)


# --- the command ----------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    parser = parser_for("async_train", __doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    model = commands.add_parser("model", help="models of servers, in virtual time")
    usual = Shape()
    add = model.add_argument
    add("--regimes", type=words, default=list(REGIMES), help=f"a list of {', '.join(REGIMES)}")
    add(
        "--seeds", type=numbers, default=[1, 2, 3], help="seeds of the lengths, separated by commas"
    )
    add("--tasks", type=int, default=usual.prompts_per_step, help="groups per step")
    add("--group-size", type=int, default=usual.group_size)
    add("--budget", type=int, default=usual.budget, help="maximum number of tokens of a rollout")
    add("--steps", type=int, default=usual.steps, help="steps including the warm-up")
    real = commands.add_parser("real", help="agentloop train, on this machine")
    real.add_argument("--model", required=True, help="a folder, such as runs/latest/sft/model")
    real.add_argument("--recipe", type=Path, default=Path("agentloop/cli/recipes/laptop-rl.toml"))
    real.add_argument(
        "--steps", type=int, default=16, help="steps including those that do not count"
    )
    real.add_argument("--folder", type=Path, default=Path("runs/async"), help="folder of the runs")
    real.add_argument("overrides", nargs="*", metavar="name=value", help="other settings")
    for command in (model, real):
        command.add_argument(
            "--staleness", type=numbers, default=[0, 1, 2, 4], help="separated by commas"
        )
        command.add_argument(
            "--warm-up", type=int, default=usual.warm_up, help="steps that do not count"
        )
        command.add_argument("--out", type=Path, help="a JSON file with all figures")
    args = parser.parse_args(argv)
    if args.steps <= args.warm_up + (args.command == "real") * max(args.staleness):
        parser.error("--steps: no steps are left after the warm-up and the last ones")
    figures: object
    if args.command == "model":
        if unknown := set(args.regimes) - set(REGIMES):
            parser.error(f"no regime {sorted(unknown)}")
        shape = Shape(
            prompts_per_step=args.tasks,
            group_size=args.group_size,
            budget=args.budget,
            warm_up=args.warm_up,
            steps=args.steps,
        )
        results = run_all(shape, args.regimes, args.staleness, args.seeds)
        print(table(results))
        figures = [asdict(result) | {"bound_s": result.bound_s} for result in results]
    else:
        steps = {
            age: run_real(args.recipe, args.model, age, args.steps, args.folder, args.overrides)
            for age in args.staleness
        }
        print(real_table(steps, args.warm_up))
        figures = steps
    if args.out:
        args.out.write_text(json.dumps(figures, indent=1) + "\n")


def run_all(
    shape: Shape, regimes: Sequence[str], staleness: Sequence[int], seeds: Sequence[int]
) -> list[Result]:
    """Run all combinations, over the same rollouts for each seed."""
    best = {seed: full(shape, seed) for seed in seeds}
    results = []
    for regime in regimes:
        for age in staleness:
            for seed in seeds:
                result = train(shape, regime, age, seed, best[seed])
                results.append(result)
                print(f"{regime}, {age}, seed {seed}: {result.step_s:.0f} s", file=sys.stderr)
    return results


if __name__ == "__main__":
    main()
