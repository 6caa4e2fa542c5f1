"""`agentloop train` with all parts real, killed and resumed: for bench/kill.py.

Victims are the runtime, a rank of the learner, a server, a container of the sandbox, or the sandbox
host (`python -m agentloop.sandbox.serve`; if it is a victim, it runs all calls). The kill happens
when the journal has reached a given point, and up to a second later. Sampling is not
deterministic, so there is no undisturbed run for comparison; but a step that is repeated from its
journal must have the same loss.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from agentloop.environments.tasks.sources import Task
from agentloop.training.learner_client.launch import free_port
from agentloop.trajectory import StopReason, ToolCallStatus, Trajectory
from bench.kill_checks import Journal, last_checkpoint, problems, processes_left, recorded, tail

__all__ = ["VICTIMS", "RealRun", "coin", "play_real"]

VICTIMS = ("runtime", "rank", "server", "container", "host")
_OUTLIVED = ("container", "host")  # killing these does not end the runtime
RECIPE = Path(__file__).resolve().parents[1] / "agentloop" / "cli" / "recipes" / "small.toml"
TASKS_PER_STEP = 3
_STILL_S = 300.0  # without output: then it hangs
_LEFT_S = 30.0
_START_S = 120.0  # timeout of the host's start
_BUSY_S = 5.0  # time to wait until the host has calls to run before it is killed
_POLL_S = 0.1
_SAME_LOSS = 1e-5  # relative
_AGAIN = re.compile(r"Repeating steps (\d+) to (\d+),")
_OWNER = "agentloop.sandbox.owner"
AGENTS = (  # rotate with the seed
    'tools=["python_code_with_standard_io"]',
    'tools=["jupyter_code"]',
    "env=bench.kill_environment:solve_and_check",
)
_RUN = (ToolCallStatus.OK, ToolCallStatus.ERROR, ToolCallStatus.TIMEOUT)

OVERRIDES = [
    f"loop.prompts_per_step={TASKS_PER_STEP}",
    "loop.group_size=6",
    "loop.evaluate_every=2",
    "loop.evaluate_tasks=4",
    "loop.checkpoint_every=2",
    "tasks.held_out=4",
    "roc.down_sample_to_n=4",
    "roc.reject_equal_reward=false",
    "sampling.temperature=1.5",  # most calls can still be run
    "budget.max_response_tokens=128",
    f"reward.function={__name__}:coin",
]


def coin(trajectory: Trajectory, task: Task) -> float:
    """Return a random reward: the small model is nearly always correct, which has no signal."""
    return int(-sum(trajectory.logprobs) * 1e6) % 2


@dataclass(slots=True)
class RealRun:
    """The state and the result of a run."""

    run: Path
    num_lives: int = 0
    num_again: int = 0  # repeated steps
    num_calls: int = 0  # calls that the sandbox has run, in completed groups
    num_broken: int = 0  # rollouts of completed groups that infrastructure broke
    seconds: float = 0.0
    fell: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def play_real(
    run: Path,
    seed: int,
    *,
    num_steps: int,
    max_staleness: int,
    victims: Sequence[str],
    max_kills: int = 2,
) -> RealRun:
    """Run to completion; kill up to `max_kills` of `victims`, which rotate with the seed."""
    draw, started = Random(seed), time.monotonic()
    played = RealRun(run)
    max_progress = num_steps * (TASKS_PER_STEP + 2)  # the final value of `progress_of`
    blows = [
        (
            victims[(seed + life) % len(victims)],
            1 + int(max_progress * (life + draw.random()) / max_kills),
            draw.random(),
        )
        for life in range(draw.randint(1, max_kills))
    ]
    overrides = [*OVERRIDES, f"loop.steps={num_steps}", f"loop.max_staleness={max_staleness}"]
    overrides.append(AGENTS[seed % len(AGENTS)])
    first_arguments = [str(RECIPE), *overrides, f"run.folder={run.parent}", f"run.name={run.name}"]
    losses: dict[int, float] = {}
    host = _Host(played) if any(victim == "host" for victim, *_ in blows) else None
    if host is not None:
        first_arguments.append(f'sandbox.hosts=["{host.url}"]')
    while not played.problems:
        resumes = (run / "config.toml").is_file()
        arguments = ["--resume", str(run)] if resumes else first_arguments
        status = _live_once(played, arguments, blows, draw, host)
        new_losses = losses_of(run)
        played.problems += _changed_losses(losses, new_losses)
        losses |= new_losses
        if status == 0:
            break
        # If it is the only one, a dying server may end the runtime during a weight sync.
        if not played.fell or played.fell[-1].startswith(_OUTLIVED):
            log = run.with_name(f"{run.name}.{played.num_lives}.log")
            ending = f"exit status {status}: {tail(log)}"
            played.problems.append(f"life {played.num_lives} ended with {ending}")
        if not blows and played.num_lives > len(played.fell) + 1:
            played.problems.append(f"the run does not end: {played.num_lives} lives")
    if host is not None:
        host.stop()
    if not played.problems:
        played.problems += [*problems(run), *of_the_learner(run, losses)]
        played.problems += of_infrastructure(played)
    if not played.problems and not played.num_calls:
        played.problems.append("the sandbox has run no calls")
    played.seconds = time.monotonic() - started
    return played


class _Host:
    """A sandbox host that is restarted at once, at the same address, as if on another machine."""

    def __init__(self, played: RealRun) -> None:
        self._played = played
        self._port = free_port()
        self._lives: list[subprocess.Popen[bytes]] = []
        self._start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._lives[-1].pid

    def keep(self) -> None:
        if status := self._lives[-1].poll():
            if status != -signal.SIGKILL:
                self._played.problems.append(f"the sandbox host ended with exit status {status}")
            self._start()

    def wait_ready(self) -> None:
        """Wait until the host listens, which is when its workers are ready."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline and not self._played.problems:
            self.keep()
            with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
                return
            time.sleep(_POLL_S)
        self._played.problems.append("the sandbox host does not start")

    def is_busy(self) -> bool:
        """Return whether calls are running or sessions are open."""
        try:
            with urllib.request.urlopen(f"{self.url}/v1/stats", timeout=_BUSY_S) as answer:
                stats = json.load(answer)
        except OSError:
            return False
        return bool(stats["busy"] or stats["sessions"])

    def stop(self) -> None:
        self._lives[-1].terminate()
        self._lives[-1].wait(_LEFT_S)
        for life in self._lives:
            self._played.problems += _containers_left(life.pid)

    def _start(self) -> None:
        run = self._played.run
        with run.with_name(f"{run.name}.host.log").open("ab") as out:
            command = [sys.executable, "-m", "agentloop.sandbox.serve", "--port", str(self._port)]
            self._lives.append(subprocess.Popen(command, stdout=out, stderr=out))


def _live_once(
    played: RealRun,
    arguments: list[str],
    blows: list[tuple[str, int, float]],
    draw: Random,
    host: _Host | None,
) -> int | None:
    """Run one life; return its exit status, negative for a signal, or None if it hung."""
    run = played.run
    if host is not None:
        host.wait_ready()
    played.num_lives += 1
    log = run.with_name(f"{run.name}.{played.num_lives}.log")
    with log.open("wb") as out:
        command = [sys.executable, "-m", "agentloop", "train", "--restarts", "0", *arguments]
        runtime = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    signs = (log, run / "queue.sqlite-wal")
    heard, heard_s = list[int](), time.monotonic()
    while runtime.poll() is None and time.monotonic() - heard_s < _STILL_S:
        with suppress(FileNotFoundError):
            if heard != (heard := [sign.stat().st_mtime_ns for sign in signs if sign.exists()]):
                heard_s = time.monotonic()
        # Only as long as needed: reading while the journal is closed leaves files next to it.
        if blows and progress_of(run) >= blows[0][1]:
            victim, at, later_s = blows.pop(0)
            time.sleep(later_s)
            if _kill(victim, runtime.pid, draw, host):
                played.fell.append(f"{victim} at effect {at}")
                print(f"     {played.fell[-1]}", flush=True)
            else:
                print(f"     no {victim} to kill at effect {at}", flush=True)
        if host is not None:
            host.keep()
        time.sleep(_POLL_S)
    if runtime.poll() is None:
        played.problems.append(f"life {played.num_lives} hung: {tail(log)}")
        runtime.kill()
    status = runtime.wait()
    for first, last in _AGAIN.findall(log.read_text("utf-8", "replace")):
        played.num_again += int(last) - int(first) + 1
    ours = () if host is None else (host.pid,)
    played.problems += processes_left(ours, within_s=_LEFT_S)
    played.problems += _containers_left(runtime.pid)
    return status


def progress_of(run: Path) -> int:
    """Return the progress that the journal has recorded."""
    done = (
        "SELECT (SELECT count(*) FROM groups WHERE state != 'open')"
        " + (SELECT count(*) + count(result) FROM steps)"
    )
    try:
        with closing(sqlite3.connect(f"file:{run / 'queue.sqlite'}?mode=ro", uri=True)) as db:
            return int(db.execute(done).fetchone()[0])
    except sqlite3.Error:  # it does not exist yet
        return -1


def _kill(victim: str, runtime: int, draw: Random, host: _Host | None) -> bool:
    """Kill the victim; return whether there was one."""
    if victim == "host" and host is not None:
        deadline = time.monotonic() + _BUSY_S
        while not host.is_busy() and time.monotonic() < deadline:
            time.sleep(_POLL_S / 10)
        os.kill(host.pid, signal.SIGKILL)
        return True
    if victim == "container":
        if containers := _containers(runtime if host is None else host.pid):
            container = draw.choice(containers)
            subprocess.run(["docker", "kill", container], capture_output=True, check=False)
        return bool(containers)
    module = {"rank": "agentloop.learner", "server": "sglang.launch_server", "runtime": ""}[victim]
    if victim == "runtime":
        os.kill(runtime, signal.SIGKILL)
        return True
    pids = [pid for pid in descendants(runtime) if module in modules_of(pid)]
    if pids:
        os.kill(draw.choice(pids), signal.SIGKILL)
    return bool(pids)


def modules_of(pid: int) -> list[str]:
    """Return the modules after -m on the command line; none for a guardian."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []
    is_guardian = any(word.endswith("guardian.py") for word in words)
    return [] if is_guardian else [b for a, b in itertools.pairwise(words) if a == "-m"]


def descendants(pid: int) -> Iterator[int]:
    try:
        threads = [*Path(f"/proc/{pid}/task").iterdir()]
        children = [
            int(child) for thread in threads for child in (thread / "children").read_text().split()
        ]
    except OSError:
        return
    for child in map(int, children):
        yield child
        yield from descendants(child)


def _containers(owner: int) -> list[str]:
    """Return the containers of the sandbox of that runtime or host, by the prefix of the owner's
    name."""
    options = ["--filter", f"label={_OWNER}", "--format", f'{{{{.ID}}}} {{{{.Label "{_OWNER}"}}}}']
    done = subprocess.run(["docker", "ps", *options], capture_output=True, text=True, check=False)
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    return [row[0] for row in rows if row[-1].startswith(f"{owner}-")]


def _containers_left(owner: int) -> list[str]:
    deadline = time.monotonic() + _LEFT_S
    while remaining := _containers(owner):
        if time.monotonic() > deadline:
            return [f"containers were left: {remaining}"]
        time.sleep(_POLL_S)
    return []


def losses_of(run: Path) -> dict[int, float]:
    """Return the loss of each step in the journal."""
    try:
        journal = Journal.of(run)
    except sqlite3.Error:
        return {}
    return {
        step: result["learner/loss"]
        for step, result in journal.results.items()
        if "learner/loss" in result
    }


def _changed_losses(before: dict[int, float], repeated: dict[int, float]) -> Iterator[str]:
    for step, loss in before.items():
        if not math.isclose(loss, repeated[step], rel_tol=_SAME_LOSS):
            yield f"step {step} had the loss {loss}, but {repeated[step]} when repeated"


def of_the_learner(run: Path, losses: dict[int, float]) -> Iterator[str]:
    kept = last_checkpoint(run)
    if kept["num_updates"] != len(losses):
        yield f"{kept['num_updates']} updates, {len(losses)} steps"


def of_infrastructure(played: RealRun) -> Iterator[str]:
    """Check that broken rollouts have no reward and are not trained on."""
    for group in Journal.of(played.run).groups:
        for row in recorded(played.run, group):
            trajectory = row["trajectory"]
            statuses = [
                result["status"] for turn in trajectory["turns"] for result in turn["results"]
            ]
            played.num_calls += sum(status in _RUN for status in statuses)
            is_broken = trajectory["stop_reason"] == StopReason.INFRASTRUCTURE
            played.num_broken += is_broken
            if ToolCallStatus.INFRASTRUCTURE in statuses and not is_broken:
                yield f"{trajectory['id']}: a call broke, but the rollout went on"
            if is_broken and (row["reward"], row["advantage"]) != (None, None):
                yield f"{trajectory['id']}: it is broken, but has the reward {row['reward']}"
