"""`agentloop train` that is struck in each of its phases, and continued by the command it printed.

    python -m tests.agentloop.cli.struck WAY FOLDER played|real PHASE,PHASE,... ARGUMENT ...

    strikes.json in FOLDER    the way, and the phases in which the run is still to be struck
    bin/agentloop             the command, which strikes itself: once in each phase

Of its parts only the servers and the learner are played (struck_parts.py), or none.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio

from agentloop.environments.tasks.task import Task
from agentloop.trajectory import Trajectory
from tests.patience import patient

__all__ = ["DISK", "PHASES", "WAYS", "by_place", "drive"]

PHASES = (
    "games",  # of the teacher
    "fine-tuning",
    "publishing",  # the model that was fine-tuned
    "between",  # the fine-tuning and the rollouts
    "evaluation",
    "stage 1",
    "filter",
    "stage 2",
    "stage 3",
)
WAYS = ("interrupt", "kill", "kill the child", "full disk")
_PLAN = "AGENTLOOP_TEST_STRIKES"
_PLAYED = "AGENTLOOP_TEST_PLAYED"
_LIFE_S = 240.0
ROOT = Path(__file__).parents[3]
DISK = "the disk"
RUN = Path("my runs/one")


def by_place(trajectory: Trajectory, task: Task) -> float:
    """Return a reward that differs within each group, and is the same in each run."""
    return int(trajectory.id.rpartition(".")[2].partition("+")[0]) % 2


# --- a run's life, in a process of its own --------------------------------------------------------


async def reach(phase: str) -> None:
    """Strike if the run is to be struck in this phase."""
    plan = _take(phase)
    match plan["way"]:
        case "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
            await anyio.sleep_forever()
        case "kill":
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        case "kill the child":
            os.kill(os.getpid(), signal.SIGKILL)
        case "full disk":
            _fill(Path(plan["ballast"]))


def _take(phase: str) -> dict[str, Any]:
    """Take a phase from the plan and return it; without this phase, a plan that does nothing."""
    file = Path(os.environ[_PLAN])
    plan: dict[str, Any] = json.loads(file.read_text())
    if phase not in plan["phases"]:
        return {"way": ""}
    plan["phases"].remove(phase)
    plan["struck"].append(phase)
    file.write_text(json.dumps(plan))
    return plan


def _fill(ballast: Path) -> None:
    """Fill the file system to its last byte."""
    with ballast.open("ab", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue


def live(arguments: list[str]) -> int:
    """Run `agentloop train` as a parent or as its child, which strikes itself."""
    from agentloop.cli import train as train_module
    from agentloop.cli import train_program
    from agentloop.inference.processes import supervise
    from agentloop.training import wiring
    from agentloop.training.learner_client import client
    from agentloop.training.loop import batch_trainer, held_out, stages
    from agentloop.training.sft import stage as sft_stage

    parts: Any = train_module
    run_with_restarts = parts.run_with_restarts

    def with_this_command(command: Sequence[str], *arguments: Any, **named: Any) -> int:
        ours = [command[0], "-m", "tests.agentloop.cli.struck", "live", *command[4:]]
        status: int = run_with_restarts(ours, *arguments, **named)
        return status

    parts.run_with_restarts = with_this_command
    if os.environ.get(_PLAYED):
        composer: Any = wiring
        program: Any = train_program
        program.require_machine = composer.plot_runs = lambda *_: None
        played: Any = supervise
        played._SGLANG = played._KEYED = "tests.agentloop.cli.struck_parts"
        played.importlib = SimpleNamespace(util=SimpleNamespace(find_spec=lambda _: True))
        learner: Any = client
        learner._COMMAND = (sys.executable, "-m", "tests.agentloop.cli.struck_parts")

    def of_request(_: object, request: Any, **__: object) -> str:
        of_sft = "/sft/" in str(getattr(request, "batch", getattr(request, "folder", "")))
        is_third = request.op == "step" and request.batch.name == "step-00003.safetensors"
        if of_sft and (is_third or request.op == "publish"):
            return "fine-tuning" if is_third else "publishing"
        return ""

    def of_tasks(_: object, __: object, name: str, **___: object) -> str:
        return "filter" if name.endswith("-filter") else "evaluation"

    at: list[tuple[Any, str, Callable[..., str]]] = [
        (sft_stage, "play_teacher", lambda *_, **__: "games"),
        (client.KeptLearner, "ask", of_request),
        (wiring, "_roll_out_and_learn", lambda *_, **__: "between"),
        (held_out, "roll_out_all", of_tasks),
        (stages, "roll_out_all", of_tasks),
        (batch_trainer.BatchTrainer, "_record", lambda _, metrics: f"stage {metrics.stage}"),
    ]
    for owner, name, phase_of in at:
        setattr(owner, name, _reaching(getattr(owner, name), phase_of))
    return train_module.main(arguments)


def _reaching(work: Any, phase_of: Callable[..., str]) -> Any:
    @functools.wraps(work)
    async def do(*arguments: Any, **named: Any) -> Any:
        await reach(phase_of(*arguments, **named))
        return await work(*arguments, **named)

    return do


# --- all of its lives -----------------------------------------------------------------------------


def drive(
    way: str, folder: Path, phases: Sequence[str], arguments: Sequence[str], *, played: bool
) -> list[str]:
    """Run until the run is complete; return the phases in which it was struck.

    After a strike, the ballast of a full disk is removed, and the command that the run has printed
    is run by a shell; after a kill of the whole, which lets it print nothing, the documented one.
    """
    plan, ballast = folder / "strikes.json", folder / DISK / "ballast"
    ballast.parent.mkdir(exist_ok=True)
    run = folder / DISK / RUN
    content = {"way": way, "phases": [*phases], "struck": [], "ballast": str(ballast)}
    plan.write_text(json.dumps(content))
    program = folder / "bin" / "agentloop"
    program.parent.mkdir(exist_ok=True)
    program.write_text(
        f'#!/bin/sh\nshift\nexec {sys.executable} -m tests.agentloop.cli.struck live "$@"\n'
    )
    program.chmod(0o755)
    # What a killed process leaves in the folder of temporary files ends with the test.
    temporary = tempfile.mkdtemp(prefix="s-")
    environment = os.environ | {
        "TMPDIR": temporary,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        _PLAN: str(plan),
        _PLAYED: "1" if played else "",
        "PATH": os.pathsep.join([str(program.parent), os.environ["PATH"]]),
    }
    at = [f"run.folder={run.parent}", f"run.name={run.name}"]
    command = shlex.join(["agentloop", "train", *arguments, *at])
    while True:
        struck_before = json.loads(plan.read_text())["struck"]
        life = subprocess.run(
            command,
            shell=True,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=patient(_LIFE_S),
            check=False,
        )
        ballast.unlink(missing_ok=True)
        output, struck = life.stdout + life.stderr, json.loads(plan.read_text())["struck"]
        print(f"{command}: status {life.returncode}, struck {struck}\n{output}", flush=True)
        if life.returncode == 0:
            shutil.rmtree(temporary)
            return list(struck)
        assert struck != struck_before, "it ended, though nothing had struck it"
        assert "Traceback" not in output
        printed = re.findall(r"ontinue with: (agentloop train --resume .*)$", output, re.M)
        if way == "kill":
            assert life.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)  # or the shell's
            printed = [f"agentloop train --resume '{DISK}/{RUN}'"]
        assert len(printed) == 1, "it says once how to continue"
        (command,) = printed


def outcome(run: Path) -> dict[str, Any]:
    """Return what a run must have, however it was struck: the steps with their losses, and the
    weights that it ended with."""
    files = {phase: run / phase / "metrics.jsonl" for phase in ("sft", "")}
    rows = {
        phase: [json.loads(line) for line in file.read_text().splitlines()]
        for phase, file in files.items()
        if file.is_file()
    }
    assert (run / "ended").is_file()
    (model,) = (run / "weights").iterdir()
    names = ("step", "stage", "learner/loss", "reward", "held_out/reward", "filter/num_left")
    return {
        "rows": {
            phase: [[row[name] for name in names if name in row] for row in of_phase]
            for phase, of_phase in rows.items()
        },
        "weights": [model.name, *(file.read_text() for file in model.glob("digest.json"))],
    }


def _mount(disk: Path) -> None:
    """Mount a small file system, which takes the privilege in a mount namespace of this process."""
    disk.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"none", os.fsencode(disk), b"tmpfs", 0, b"size=8m"):
        raise OSError(ctypes.get_errno(), "mount")


def main() -> None:
    if sys.argv[1] == "live":
        sys.exit(live(sys.argv[2:]))
    way, folder, parts, phases, *arguments = sys.argv[1:]
    if way == "full disk":
        _mount(Path(folder) / DISK)
    planned = [phase for phase in phases.split(",") if phase]
    struck = drive(way, Path(folder), planned, arguments, played=parts == "played")
    print(json.dumps({"struck": struck, **outcome(Path(folder) / DISK / RUN)}))


if __name__ == "__main__":
    main()
