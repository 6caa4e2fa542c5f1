"""Training runs that are killed at random moments and resumed, compared with undisturbed ones.

    python -m bench.kill --runs 100     simulated model and learner, real control loop: 20 a minute
    python -m bench.kill --real 10      all parts real: minutes each

A run consists of several runtime processes ("lives"). In each of them something is killed by
SIGKILL: the runtime, its learner, or a server; either at a random time or between two externally
visible effects (kill_parts.Fuse). A dead runtime is resumed as by `agentloop train --resume`, the
others are restarted by their supervisors, until the run is complete. Then all of this must hold:

    journal    each group was trained on in exactly one step or discarded; the tasks are those of
               the source, each once; no sample exceeded the maximum staleness
    lineage    the final weights result from one update per step, on that step's groups, by the
               learner's own record, followed back from the last checkpoint; updates that were
               lost do not count
    metrics    one row per step, one row per evaluation
    leftovers  no process, no partial file, no weights but the last

In synchronous mode, weights, batches and all metrics except times equal those of an undisturbed
run. With more staleness the content of a batch depends on timing, but everything else must hold.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random

from agentloop.errors import AgentLoopError
from agentloop.models import SMALL
from agentloop.training.learner_client.launch import free_port
from bench.kill_checks import (
    adopt_orphans,
    played_problems,
    problems,
    processes_left,
    tail,
)
from bench.kill_cluster import CLUSTER_VICTIMS, nodes_apart, play_on_cluster
from bench.kill_learner import PID
from bench.kill_parts import STRUCK, TICKS, Fuse, learner_of, live, serve, strike
from bench.kill_real import VICTIMS, RealRun, play_real

__all__ = ["main"]

_NUM_SERVERS = 2
_LIFE_S = 120.0
_MAX_LIVES = 12
_POLL_S = 0.003
_PR_SET_PDEATHSIG = 1

_COMMON = [
    f"model={SMALL}",
    "tasks.held_out=4",
    "reward.function=exact",
    "roc.down_sample_to_n=4",
    "loop.prompts_per_step=3",
    "loop.group_size=6",
    "loop.evaluate_tasks=4",
    "loop.evaluate_every=3",
    "loop.checkpoint_every=2",
    "router.probe_interval_s=0.02",
]
_TWO_AGENTS = "env=bench.kill_environment:solve_and_check"
_FAILING = "env=bench.kill_environment:fail_at_random"
_STAGES = [
    "stages.short.steps=3",
    "stages.hard.steps=3",
    "stages.hard.reset_optimizer=true",
    "stages.hard.filter_tasks=8",
    "stages.rest.steps=2",
]
VARIANTS = {
    "in step": ["loop.steps=8"],
    "in step, replaced": ["loop.steps=8", "loop.dynamic_sampling=true"],
    "in step, stages": _STAGES,
    "staleness 1": ["loop.steps=8", "loop.max_staleness=1", "weights.folder={folder}/lent"],
    "staleness 2, replaced": [
        "loop.steps=8", "loop.max_staleness=2", "loop.dynamic_sampling=true"
    ],
    "staleness 2, stages": [*_STAGES, "loop.max_staleness=2", "loop.dynamic_sampling=true"],
    "in step, two agents": ["loop.steps=8", _TWO_AGENTS],
    "staleness 2, two agents": ["loop.steps=8", "loop.max_staleness=2", _TWO_AGENTS],
    "in step, curriculum": ["loop.steps=8", "loop.curriculum=true", "tasks.levels=[1, 2, 3]"],
    "staleness 2, failing": ["loop.steps=8", "loop.max_staleness=2", _FAILING],
}  # fmt: skip

_VICTIMS = {"runtime": 5, "learner": 3, "server": 2}  # relative frequency


# --- runs and kills -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Blow:
    """A kill: the victim, and when: after a number of effects or of seconds."""

    victim: str
    at: int | None = None
    after_s: float | None = None

    def __str__(self) -> str:
        when = f"effect {self.at}" if self.after_s is None else f"{self.after_s:.2f} s"
        return f"{self.victim} at {when}"


@dataclass(frozen=True, slots=True)
class Undisturbed:
    """A run in which nothing was killed."""

    run: Path
    num_ticks: int
    seconds: float


@dataclass(slots=True)
class Played:
    """The state and the result of a disturbed run."""

    run: Path
    variant: str
    blows: list[Blow] = field(default_factory=list)  # kills that took place
    num_lives: int = 0
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)


def blows(seed: int, usual: Undisturbed, victims: Mapping[str, int]) -> list[Blow]:
    draw, planned = Random(seed), []
    for life in range(draw.randint(1, 3)):
        victim = draw.choices([*victims], [*victims.values()])[0]
        share = draw.random() ** (life + 1)  # later lives have less left to do
        if draw.random() < 0.75:
            planned.append(Blow(victim, at=int(share * usual.num_ticks)))
        else:
            planned.append(Blow(victim, after_s=share * usual.seconds))
    return planned


class Around:
    """Processes that are restarted at once, at the same address, when they die."""

    def __init__(self, log: Path) -> None:
        self.problems: list[str] = []
        self._log = log
        self._works: list[tuple[str, Callable[[], object]]] = []
        self._pids: list[int] = []  # 0: ended normally
        self._ports: list[int] = []

    def add(self, kind: str, work: Callable[[], object], port: int | None = None) -> None:
        """Start a process, which is ready when `port`, if given, is open."""
        self._works.append((kind, work))
        self._pids.append(0)
        self._ports += [] if port is None else [port]
        self._start(len(self._pids) - 1)

    @property
    def pids(self) -> list[int]:
        return [pid for pid in self._pids if pid]

    def pick(self, kind: str) -> int:
        mine = zip(self._works, self._pids, strict=True)
        return random.choice([pid for work, pid in mine if work[0] == kind])

    def wait_ready(self) -> None:
        for index, pid in enumerate(self._pids):
            if not pid:
                self._start(index)
        for port in self._ports:
            while True:
                self.keep()
                with suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                    break
                time.sleep(_POLL_S)

    def keep(self) -> None:
        """Restart killed processes; those that ended normally are restarted before the next
        life."""
        for index, pid in enumerate(self._pids):
            ended, status = os.waitpid(pid, os.WNOHANG) if pid else (0, 0)
            if ended:
                self._pids[index] = 0
                if status:
                    self._start(index)
                if status not in (0, signal.SIGKILL):
                    kind = self._works[index][0]
                    self.problems.append(f"a {kind} ended by itself: {tail(self._log)}")

    def stop(self) -> None:
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _start(self, index: int) -> None:
        self._pids[index] = _fork(self._works[index][1], self._log)


def _servers(around: Around) -> list[str]:
    ports = [free_port() for _ in range(_NUM_SERVERS)]
    for port in ports:
        around.add("server", partial(serve, port), port)
    return [f"http://127.0.0.1:{port}" for port in ports]


def play(run: Path, variant: str, planned: Sequence[Blow]) -> Played:
    """Run to completion, with a kill in each of the first lives."""
    played, started, remaining = Played(run, variant), time.monotonic(), list(planned)
    around = Around(run.with_name(f"{run.name}.around.log"))
    try:
        settings = [setting.format(folder=run.parent) for setting in VARIANTS[variant]]
        settings.append(f"servers={json.dumps(_servers(around))}")
        overrides = [*_COMMON, *settings, f"run.folder={run.parent}", f"run.name={run.name}"]
        while played.num_lives < _MAX_LIVES:
            blow = remaining.pop(0) if remaining else None
            status = _live_once(played, overrides, around, blow)
            fell = blow is not None and (run / STRUCK).exists()
            if blow is not None and fell:
                played.blows.append(blow)
            if status and not fell:
                played.problems.append(f"life {played.num_lives} ended with exit status {status}")
            if not status or played.problems:
                break
        played.problems += [*around.problems, *processes_left(around.pids)]
    finally:
        around.stop()
    played.seconds = time.monotonic() - started
    return played


def _live_once(
    played: Played, overrides: list[str], around: Around, blow: Blow | None
) -> int | None:
    """Run one life; return its exit status, negative for a signal, or None if it hung."""
    run = played.run
    played.num_lives += 1
    for name in (PID, STRUCK):  # the process id may have been reused
        (run / name).unlink(missing_ok=True)
    victims: Mapping[str, Callable[[Path], int]] = {
        "runtime": lambda _: os.getpid(),
        "learner": learner_of,
        "server": lambda _: around.pick("server"),
    }
    around.wait_ready()
    fuse = Fuse() if blow is None else Fuse(blow.at, victims[blow.victim])
    log = run.with_name(f"{run.name}.{played.num_lives}.log")
    runtime = _fork(lambda: live(run, overrides, fuse), log)
    started = time.monotonic()
    falls_s = None if blow is None else blow.after_s
    while time.monotonic() - started < _LIFE_S:
        if falls_s is not None and blow and time.monotonic() - started >= falls_s:
            falls_s = None
            strike(run, runtime if blow.victim == "runtime" else victims[blow.victim](run))
        pid, status = os.waitpid(runtime, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        around.keep()
        time.sleep(_POLL_S)
    played.problems.append(f"life {played.num_lives} hung: {tail(log)}")
    os.kill(runtime, signal.SIGKILL)
    os.waitpid(runtime, 0)
    return None


def _fork(work: Callable[[], object], log: Path) -> int:
    """Fork a process for `work` that inherits all imports but none of our state."""
    if pid := os.fork():
        return pid
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        work()
        status = 0
    except AgentLoopError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        status = 2
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


# --- output ---------------------------------------------------------------------------------------


def run_many(folder: Path, seeds: Sequence[int]) -> int:
    """Run all seeds with simulated parts; return the number of failures."""
    usual: dict[str, Undisturbed] = {}
    fell: Counter[str] = Counter()
    num_lives = num_failed = 0
    for seed in seeds:
        variant = [*VARIANTS][seed % len(VARIANTS)]
        if variant not in usual:
            usual[variant] = _play_undisturbed(folder, variant)
        played = play(folder / f"run-{seed}", variant, blows(seed, usual[variant], _VICTIMS))
        if not played.problems:
            played.problems += problems(played.run)
            played.problems += played_problems(played.run, usual[variant].run)
        num_lives += played.num_lives
        num_failed += bool(played.problems)
        fell.update(f"{variant}|{blow.victim}" for blow in played.blows)
        _print_result(seed, played)
        if not played.problems:
            shutil.rmtree(played.run)
    print(f"\n{len(seeds)} runs, {num_lives} lives, {num_failed} failed. Killed:")
    for key, num in sorted(fell.items()):
        print(f"    {key.replace('|', ', '):44} {num}")
    return num_failed


def _play_undisturbed(folder: Path, variant: str) -> Undisturbed:
    played = play(
        folder / f"undisturbed-{variant.replace(', ', '-').replace(' ', '-')}", variant, []
    )
    problems_found = played.problems or [
        *problems(played.run),
        *played_problems(played.run, played.run),
    ]
    if problems_found:
        raise SystemExit(f"{variant}, undisturbed: {'; '.join(problems_found)}; see {played.run}")
    ticks = int((played.run / TICKS).read_text())
    return Undisturbed(played.run, ticks, played.seconds)


def _print_result(seed: int, played: Played) -> None:
    fell = "; ".join(map(str, played.blows)) or "no kill in time"
    verdict = "FAILED" if played.problems else "ok"
    print(
        f"{seed:4} {played.variant:33} {played.num_lives} lives {played.seconds:5.1f} s  {verdict}"
    )
    print(f"     {fell}", flush=True)
    for problem in played.problems:
        print(f"     - {problem}")
    if played.problems:
        print(f"     repeat: python -m bench.kill --runs 1 --seed {seed}; see {played.run}")


def run_real(
    folder: Path,
    seeds: Sequence[int],
    *,
    num_steps: int,
    victims: Sequence[str],
    where: str,
    play: Callable[..., RealRun],
) -> int:
    """Run all seeds with real parts; return the number of failures."""
    num_failed = num_again = num_lives = 0
    fell: Counter[str] = Counter()
    for seed in seeds:
        staleness = seed // len(VICTIMS) % 2
        print(f"{seed:4} all parts real, staleness {staleness}", flush=True)
        run = folder / f"{where}-{seed}"
        played = play(run, seed, num_steps=num_steps, max_staleness=staleness, victims=victims)
        num_failed += bool(played.problems)
        num_again += played.num_again
        num_lives += played.num_lives
        fell.update(blow.split()[0] for blow in played.fell)
        verdict = "FAILED" if played.problems else "ok"
        summary = f"{played.num_lives} lives, {played.num_again} repeated steps"
        summary += f", {played.num_calls} tool calls, {played.num_broken} broken rollouts"
        print(f"     {summary}, {played.seconds:.0f} s  {verdict}", flush=True)
        for problem in played.problems:
            print(f"     - {problem}")
        if played.problems:
            print(f"     repeat: python -m bench.kill --{where} 1 --seed {seed}; see {run}")
        else:
            shutil.rmtree(run)
    killed = ", ".join(f"{victim} {num}" for victim, num in sorted(fell.items()))
    again = f"{num_again} steps repeated with the same loss"
    print(f"\n{len(seeds)} real runs, {num_lives} lives, {again}, {num_failed} failed")
    print(f"Killed: {killed}")
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--runs", type=int, default=0, help="number of runs with simulated parts")
    parser.add_argument("--real", type=int, default=0, help="number of runs with real parts")
    parser.add_argument(
        "--cluster", type=int, default=0, help="number of real runs on a Ray cluster; needs root"
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of each real run")
    parser.add_argument("--kills", type=int, default=2, help="at most, in each of --real")
    parser.add_argument(
        "--victims",
        nargs="+",
        choices={*VICTIMS, *CLUSTER_VICTIMS},
        default=[],
        help="processes to kill in the real runs",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the first run; others count up"
    )
    parser.add_argument("--folder", type=Path, help="folder of the runs; failed ones are kept")
    options = parser.parse_args()
    adopt_orphans()
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    folder = options.folder or Path(tempfile.mkdtemp(prefix="agentloop-kill-"))
    folder.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    if options.runs:
        num_failed += run_many(folder, range(options.seed, options.seed + options.runs))
    if options.real:
        num_failed += run_real(
            folder,
            range(options.seed, options.seed + options.real),
            num_steps=options.steps,
            victims=options.victims or VICTIMS,
            where="real",
            play=partial(play_real, max_kills=options.kills),
        )
    if options.cluster:
        with nodes_apart() as nodes:
            num_failed += run_real(
                folder,
                range(options.seed, options.seed + options.cluster),
                num_steps=options.steps,
                victims=options.victims or CLUSTER_VICTIMS,
                where="cluster",
                play=partial(play_on_cluster, nodes),
            )
    if not num_failed and options.folder is None:
        shutil.rmtree(folder)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
