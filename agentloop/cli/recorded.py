"""Score the conversations of a run's folder, and export the best for supervised fine-tuning.

trajectories/group-*.jsonl ──Grader──> the same files, with rewards
                           └──reward high enough──> lines of exact ids, for `agentloop sft`
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from agentloop.aio import task_group
from agentloop.environments.rewards.reward import Grader, Reward, RewardSettings
from agentloop.environments.tasks.sources import Task, read_jsonl, task_digest
from agentloop.errors import DataError, summary_of
from agentloop.plain_json import JsonObject, dumps
from agentloop.trajectory import Trajectory


@dataclass
class Scores:
    """The outcome of scoring.

    Attributes:
        num_rollouts: number of recorded rollouts and branches.
        num_without: rollouts without a reward, such as for want of a known task.
        total: sum of the rewards.
    """

    num_rollouts: int = 0
    num_without: int = 0
    total: float = 0.0

    @property
    def num_scored(self) -> int:
        return self.num_rollouts - self.num_without

    @property
    def mean(self) -> float | None:
        return self.total / self.num_scored if self.num_scored else None


async def score(files: Iterable[Path], settings: RewardSettings, tasks: Iterable[Task]) -> Scores:
    """Score recorded conversations; the rewards are written into their files.

    Args:
        files: the files of groups that `agentloop serve` has recorded.
        tasks: problems with answers, found by the question of a conversation. Unless the settings
            name a function of the user's, others get no reward.

    Raises:
        DataError: a file cannot be read or written, or is not a record of `agentloop serve`.
        RewardError: the user's function failed.
        SettingsError: the user's function cannot be loaded.
    """
    tasks_by_key = {key: task for task in tasks for key in (task.id, task_digest(_question(task)))}
    scores = Scores()
    remaining = iter(files)

    async with Grader(settings) as grader:
        await grader.ready()

        async def work() -> None:
            for path in remaining:  # shared: each worker takes the next
                rows = await anyio.to_thread.run_sync(_rows_of, path)
                rewards = [await _reward(grader, settings, tasks_by_key, *row) for row in rows]
                for reward in rewards:
                    scores.num_rollouts += 1
                    if reward is None or reward.value is None:
                        scores.num_without += 1
                    else:
                        scores.total += reward.value
                if any(reward is not None for reward in rewards):
                    write = partial(write_rows, path, [row for row, _ in rows], must_exist=True)
                    await anyio.to_thread.run_sync(write)

        async with task_group(only_first=True) as workers:
            for _ in range(2 * settings.num_workers):
                workers.start_soon(work)
    return scores


async def _reward(
    grader: Grader,
    settings: RewardSettings,
    tasks_by_key: Mapping[str, Task],
    row: JsonObject,
    record: Trajectory,
) -> Reward | None:
    """Score a row and put the reward into it; return None if its task is unknown."""
    question = row["question"]
    task = tasks_by_key.get(task_digest(question))
    if task is None and ":" not in settings.function:
        return None
    reward = await grader.score(record, task or Task("", question, ""))
    row |= {"reward": reward.value, "reason": reward.reason, "parts": dict(reward.parts)}
    if reward.answer is not None:
        row["answer"] = reward.answer
    if task is not None:
        row |= {"task": task.id, "truth": task.answer}
    return reward


def dialogues(files: Iterable[Path], *, least: float) -> Iterator[dict[str, object]]:
    """Yield the conversations with a reward of at least `least` as lines for `agentloop sft`.

    A line has the ids as they were sampled. Each sampled token is trained on in one line at most.

    Raises:
        DataError: a file cannot be read, or is not a run's.
    """
    for path in files:
        for number, row in read_jsonl(path):
            where = f"{path}: line {number}"
            reward = row.get("reward") if isinstance(row, Mapping) else None
            if reward is None or reward < least or row.get("agent"):
                continue
            record = _trajectory(row, where)
            if record.num_sampled_tokens:
                yield {
                    "id": record.id,
                    "reward": reward,
                    "prompt_ids": record.prompt_ids,
                    "turns": [
                        {
                            "output_ids": turn.output_ids,
                            "observation_ids": turn.observation_ids,
                            "text": turn.text,
                        }
                        for turn in record.turns
                    ],
                }


def _rows_of(path: Path) -> list[tuple[dict[str, object], Trajectory]]:
    rows: list[tuple[JsonObject, Trajectory]] = []
    for number, row in read_jsonl(path):
        where = f"{path}: line {number}"
        if not isinstance(row, dict) or not isinstance(row.get("question"), str):
            raise DataError(f"{where}: not a record of `agentloop serve`: it has no 'question'")
        rows.append((row, _trajectory(row, where)))
    return rows


def _trajectory(row: JsonObject, where: str) -> Trajectory:
    try:
        return Trajectory.from_dict(row["trajectory"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where}: field 'trajectory': {summary_of(error)}") from error


def write_rows(
    out: Path, rows: Iterable[Mapping[str, object]], *, must_exist: bool = False
) -> None:
    """Write rows as JSONL, atomically. Follow symbolic links; refuse devices.

    Args:
        must_exist: replace a file only; one that is deleted meanwhile stays away.

    Raises:
        DataError: the file cannot be written.
    """
    out = out.resolve()
    if out.exists() and not out.is_file():
        raise DataError(f"{out}: cannot be replaced, since it is not a regular file")
    unfinished = out.with_name(f".{out.name}.{os.getpid()}")
    try:
        if not must_exist:
            out.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            for row in rows:
                file.write(dumps(row) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        if out.exists() or not must_exist:
            unfinished.replace(out)
    except OSError as error:
        raise DataError(f"{out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink()


def _question(task: Task) -> str:
    """Return the question as the user's message has it, with the template of the tasks."""
    if isinstance(task.prompt, str):
        return task.prompt
    contents = [message.get("content") for message in task.prompt if message.get("role") == "user"]
    return contents[-1] if contents and isinstance(contents[-1], str) else ""
