"""Find where a run is, its phase and the step within it, and the command that continues it there.

    RUN/sft/metrics.jsonl  RUN/sft/checkpoints/      the supervised fine-tuning, if it has one
    RUN/sft/model/                                   exists as soon as that is complete
    RUN/metrics.jsonl      RUN/checkpoints/          what the run is for

Each phase counts its steps from 1, so a step says nothing without its phase.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import anyio

from agentloop.errors import SettingsError, sole
from agentloop.plain_json import read_rows
from agentloop.training.run.collapse import RunCollapsed
from agentloop.training.run.folder import checkpoints_in
from agentloop.training.run.status import count_of


class Phase(StrEnum):
    """A phase of a run, with steps, metrics and checkpoints of its own."""

    FINE_TUNING = "sft"  # that a training run may begin with
    MAIN = ""  # what the run is for; most runs have no other


@dataclass(frozen=True, slots=True)
class Stages:
    """The stages of a training run in order.

    Attributes:
        names: none if the run has no stages; then `steps` are those of the whole run.
        steps: the number of steps of each.
    """

    names: tuple[str, ...]
    steps: tuple[int, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Stages:
        """Read the stages from a run's settings.

        Raises:
            KeyError, TypeError, ValueError: the settings are invalid.
        """
        if stages := config.get("stages"):
            return cls(tuple(stages), tuple(int(stage["steps"]) for stage in stages.values()))
        return cls((), (int(config["loop"]["steps"]),))

    @property
    def num_steps(self) -> int:
        return sum(self.steps)


@dataclass(frozen=True, slots=True)
class Position:
    """The place that a run has reached, as its files say.

    Attributes:
        run: the run's folder.
        step: the last step of the phase that has metrics; None: there is none yet.
        stage, stage_step: the number of the last step's stage, from 1, and how many steps of this
            stage were done; 0 before the first step. A phase without stages has one.
    """

    run: Path
    phase: Phase
    step: int | None = None
    stage: int = 0
    stage_step: int = 0

    @classmethod
    def of(cls, run: Path) -> Position:
        """Read the position of the run in a folder. Unreadable files count as empty."""
        rows = _rows(run)
        sft = run / Phase.FINE_TUNING
        if rows or not sft.is_dir() or _is_fine_tuned(run):
            return cls.at(run, Phase.MAIN, rows)
        return cls.at(run, Phase.FINE_TUNING, _rows(sft))

    @classmethod
    def at(cls, run: Path, phase: Phase, rows: Sequence[Mapping[str, object]]) -> Position:
        """Return the position in a phase that has these rows of metrics."""
        steps = [step for row in rows if (step := _int(row.get("step"))) is not None]
        stages = {
            step: stage
            for row in rows
            if (stage := _int(row.get("stage"))) and (step := _int(row.get("step"))) is not None
        }
        if not stages:
            step = steps[-1] if steps else None
            return cls(run, phase, step, stage=1 if step else 0, stage_step=step or 0)
        stage = stages[max(stages)]
        first = min(step for step, number in stages.items() if number == stage)
        return cls(run, phase, steps[-1], stage, max(stages) - first + 1)

    @property
    def checkpoint(self) -> int | None:
        """The step of the phase's newest checkpoint, if there is one."""
        return max(checkpoints_in(self.run / self.phase), default=None)

    def is_last_of(self, stages: Stages) -> bool:
        """Return whether the step is the last one of a training run with these stages.

        Raises:
            SettingsError: more was done than the stages have steps; it names the setting.
        """
        if self.phase is Phase.FINE_TUNING or not self.stage or not stages.num_steps:
            return False
        if self.stage < len(stages.steps):
            return False  # what an earlier stage has too many of, does not matter any more
        run, num_stages = display_path(self.run), len(stages.steps)
        if self.stage > num_stages:
            raise SettingsError(
                f"stages: {run} is in stage {self.stage}, but the settings have "
                f"{count_of(num_stages, 'stage')}: leave the stages as they were, or go back with "
                "--from"
            )
        num_steps = stages.steps[-1]
        if self.stage_step > num_steps:
            name = f"stages.{stages.names[-1]}.steps" if stages.names else "loop.steps"
            of_stage = " of this stage" if stages.names else ""
            raise SettingsError(
                f"{name}: {num_steps}, but {run} has done {self.stage_step}{of_stage}: give a "
                "larger number, or go back with --from"
            )
        return self.stage_step == num_steps

    def __str__(self) -> str:
        """The newest checkpoint, and the phase that it is of, in words."""
        of_phase = " of supervised fine-tuning" if self.phase is Phase.FINE_TUNING else ""
        if (step := self.checkpoint) is not None:
            return f"a checkpoint of step {step}{of_phase}"
        if self.phase is Phase.MAIN and _is_fine_tuned(self.run):
            return "the fine-tuned model"
        return "no checkpoint yet"


@contextmanager
def telling_how_to_continue(command: str, run: Path, say: Callable[[str], None]) -> Iterator[None]:
    """Say how to continue the run when it is stopped in this block, or note it on the error.

    A run that has collapsed says so itself.
    """
    try:
        yield
    except anyio.get_cancelled_exc_class():
        there_is = f"there is {Position.of(run)}"
        say(f"Stopped; {there_is}. Continue with: {resume_command(command, run)}")
        raise
    except Exception as error:
        if not isinstance(sole(error), RunCollapsed):
            there_is = f"There is {Position.of(run)}"
            again = f"continue with: {resume_command(command, run)}"
            error.add_note(f"{there_is}. When the cause is removed, {again}")
        raise


def resume_command(command: str, run: Path, *, from_step: int | None = None) -> str:
    """Return the command line that continues a run, as a shell reads it."""
    words = ["agentloop", command, "--resume", display_path(run)]
    return shlex.join(words if from_step is None else [*words, "--from", str(from_step)])


def display_path(path: Path) -> str:
    """Return a path relative to the working directory if it is inside it."""
    cwd = Path.cwd()
    return str(path.relative_to(cwd) if path.is_relative_to(cwd) else path)


def _is_fine_tuned(run: Path) -> bool:
    """Return whether a run has the model of its fine-tuning, whose folder appears at once."""
    return (run / Phase.FINE_TUNING / "model" / "config.json").is_file()


def _rows(folder: Path) -> list[dict[str, object]]:
    try:
        return read_rows(folder / "metrics.jsonl")[0]
    except OSError:
        return []


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
