"""A run that returns to a checkpoint has its former state, even after a kill at any point."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agentloop.cli.runs.export import find
from agentloop.environments.tasks.sources import Task, TaskSource
from agentloop.errors import ModelError, RunFolderError
from agentloop.rollouts.metrics import GroupFigures
from agentloop.training.loop.queue import GroupQueue, StepNotes
from agentloop.training.loop.settings import StageSettings
from agentloop.training.recovery.undo import finish_undo, undo
from agentloop.training.run.folder import RunFolder
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.trajectory import Trajectory
from tests.agentloop.training.loop_support import (
    ARITHMETIC,
    FakeRollouts,
    LostLearner,
    MarkedLearner,
    published_versions,
    query_journal,
    run_loop,
    undo_to,
)

pytestmark = pytest.mark.timeout(60)  # much is synced to the disk

ASKED = ("replace", "mkdir", "unlink")


class KilledError(Exception):
    pass


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[tuple[RunFolder, GroupQueue]]:
    async with GroupQueue.open(path / "queue.sqlite") as queue:
        yield RunFolder(path), queue


async def let_go() -> None:
    """Release a run, as when its process ends."""
    await anyio.to_thread.run_sync(lambda: None)  # a thread keeps what it was asked last
    gc.collect()


async def run_of_three_steps(path: Path) -> None:
    folder = RunFolder(path, "")
    names = ["step-00001", "step-00002", "step-00003", "step-00004-rescue"]
    for step, name in zip([1, 2, 3, 3], names, strict=True):  # the last one is of a step that broke
        (path / "checkpoints" / name).mkdir()
        state = json.dumps({"state": {"step": step}})
        (path / "checkpoints" / name / "state.json").write_text(state)
    for version in ("2", "3", ".3.old"):
        (path / "weights" / version).mkdir()
        (path / "weights" / version / "config.json").write_text(version)
    async with GroupQueue.open(path / "queue.sqlite") as queue:
        for step in (1, 2, 3):
            task = Task(f"t{step}", "?", "1")
            group = await queue.admit(task, version=step - 1, cursor={"num_drawn": step})
            file, size = folder.add_group(group.number, [{"step": step}])
            await queue.finish(group.number, path=file, num_bytes=size, figures=GroupFigures())
            await queue.lease(step, [group.number], StepNotes(0))
            await queue.acknowledge(step)
            folder.add_metrics({"step": step, "reward": 10**30})
        await queue.admit(Task("t4", "?", "1"), version=3, cursor={"num_drawn": 4})
    folder.end()
    del folder
    gc.collect()


def observed(path: Path) -> dict[str, Any]:
    """Return everything in the folder except times."""
    state: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        parts = list(file.relative_to(path).parts)
        if parts[0] == "undone" and len(parts) > 1:
            parts[1] = "then"
        if not file.name.startswith(("queue.sqlite", ".lock")):
            state["/".join(parts)] = file.read_text() if file.is_file() else None
    with closing(sqlite3.connect(path / "queue.sqlite")) as db:
        for table in ("groups", "steps", "notes"):
            state[f"table {table}"] = db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
    return state


async def test_files_of_later_steps_are_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run_of_three_steps(path)
    async with opened(path) as (folder, queue):
        await undo(folder, queue, 1)
        assert [*folder.checkpoints] == [1]
        assert folder.metrics() == [{"step": 1, "reward": 10**30}]
        assert [group.task.id for group in await queue.open_groups()] == ["t2", "t3", "t4"]
    assert not (path / "ended").exists()
    assert [entry.name for entry in (path / "trajectories").iterdir()] == ["group-0000001.jsonl"]
    assert not [*(path / "weights").iterdir()]
    (aside,) = (path / "undone").iterdir()
    assert {str(entry.relative_to(aside)) for entry in aside.rglob("*") if entry.is_file()} == {
        *(f"trajectories/group-000000{n}.jsonl" for n in (2, 3)),
        *(f"weights/{version}/config.json" for version in ("2", "3", ".3.old")),
        *(f"{name}/state.json" for name in ("step-00002", "step-00003", "step-00004-rescue")),
        "metrics.jsonl",
    }
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_kill_at_any_moment_leaves_all_of_it_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_of_three_steps(tmp_path / "before")
    before = observed(tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    async with opened(tmp_path / "whole") as (folder, queue):
        await undo(folder, queue, 1)
    complete = observed(tmp_path / "whole")
    remaining = 0

    def dying(work: Callable[..., Any]) -> Callable[..., Any]:
        def requests(*arguments: Any, **named: Any) -> Any:
            nonlocal remaining
            remaining -= 1
            if remaining < 0:
                raise KilledError
            return work(*arguments, **named)

        return requests

    for number in range(100):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", path)
        async with opened(path) as (folder, queue):
            remaining = number
            with monkeypatch.context() as patched:
                for name in ASKED:
                    patched.setattr(os, name, dying(getattr(os, name)))
                patched.setattr(queue, "undo", dying(queue.undo))
                patched.setattr(queue, "note", dying(queue.note))
                try:
                    await undo(folder, queue, 1)
                except KilledError:
                    was_killed = True
                else:
                    was_killed = False
            del folder
        await let_go()
        if not number:
            assert observed(path) == before
        else:
            async with opened(path) as (folder, queue):
                await finish_undo(folder, queue)
            del folder
            await let_go()
            assert observed(path) == complete
        if not was_killed:
            break
    assert number > 10


async def test_step_without_a_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    await run_of_three_steps(tmp_path / "run")
    before = observed(tmp_path / "run")
    async with opened(tmp_path / "run") as (folder, queue):
        with pytest.raises(RunFolderError, match=r"no checkpoint of step 7; available: 1, "):
            await undo(folder, queue, 7)
        await finish_undo(folder, queue)  # there is nothing to be finished
    assert observed(tmp_path / "run") == before


# --- a run that is resumed -----------------------------------------------------------------------


@pytest.mark.parametrize("case", ["disk", "broadcast", "elsewhere"])
@pytest.mark.parametrize("num_steps", [2, 3, 4])  # to below where it was, to there, and beyond
async def test_undone_weights_are_no_longer_the_model_of_the_run(
    tmp_path: Path, case: str, num_steps: int
) -> None:
    folder = tmp_path / "elsewhere" if case == "elsewhere" else None
    weights = WeightsSettings(
        transport="broadcast" if case == "broadcast" else "disk", folder=folder
    )
    settings: dict[str, Any] = {"weights": weights, "checkpoint_every": 1}
    _, _, run = await run_loop(tmp_path, learner=MarkedLearner("first"), steps=3, **settings)
    path = run.path
    assert RunFolder.model_in(path).name == "3"
    del run
    tasks = await undo_to(tmp_path, 1)
    with pytest.raises(RunFolderError, match="is not a run with a model"):
        RunFolder.model_in(path)
    with pytest.raises(ModelError, match="no published weights"):
        find(path)
    await run_loop(
        tmp_path,
        learner=MarkedLearner("second"),
        tasks=tasks,
        restored={"step": 1, "version": 1},
        steps=num_steps,
        **settings,
    )
    model = json.loads((RunFolder.model_in(path) / "config.json").read_text())
    assert model == {"life": "second", "version": str(num_steps)}
    assert find(path).folder == RunFolder.model_in(path)
    assert published_versions(path) == [str(num_steps)]
    (moved,) = (path / "undone").glob("*/weights/3/config.json")
    assert json.loads(moved.read_text())["life"] == "first"


async def test_groups_replaced_before_an_undo_are_rolled_out_again(tmp_path: Path) -> None:
    class Easy(FakeRollouts):
        """Solves every other task each time."""

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = 1.0 if int(options["name"].split("-")[0]) % 2 else 0.5
            return await super().__call__(prompt, **options)

    settings: dict[str, Any] = {"dynamic_sampling": True, "checkpoint_every": 1}
    settings |= {"max_staleness": 0}
    tasks = TaskSource.open(ARITHMETIC)
    first = Easy(tasks)
    await run_loop(
        tmp_path,
        tasks=tasks,
        run_group=first,
        learner=LostLearner("nothing", 1),
        steps=3,
        **settings,
    )
    assert len(first.prompts) == 18
    tasks = await undo_to(tmp_path, 1)
    _, second, run = await run_loop(
        tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, steps=5, **settings
    )
    # None is left out, and none comes twice.
    expected = list(itertools.islice(TaskSource.open(ARITHMETIC), 18))
    assert [*first.prompts[:6], *second.prompts] == [task.prompt for task in expected]
    assert query_journal(run, "SELECT DISTINCT state FROM groups WHERE number > 6") == [
        ("trained",)
    ]


async def test_undone_stage_starts_over_without_leftover_groups(tmp_path: Path) -> None:
    class Half(FakeRollouts):
        """Gives equal rewards to every other group of the second process, up to a number."""

        until = 0

        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            number = int(options["name"].split("-")[0])
            self._right = 1.0 if number % 2 and number < self.until else 0.5
            return await super().__call__(prompt, **options)

    stages = {
        "plain": StageSettings(steps=2),
        "hard": StageSettings(steps=2, filter_tasks=4),
        "rest": StageSettings(steps=1),
    }
    settings: dict[str, Any] = {"stages": stages, "dynamic_sampling": True}
    settings |= {"checkpoint_every": 1}
    tasks = TaskSource.open(ARITHMETIC)
    first = FakeRollouts(tasks)
    await run_loop(
        tmp_path, tasks=tasks, run_group=first, learner=LostLearner("nothing", 1), **settings
    )
    expected = [task.prompt for task in itertools.islice(TaskSource.open(ARITHMETIC), 30)]
    assert first.prompts[:10] == expected[:10]  # two steps, and what is filtered
    tasks = await undo_to(tmp_path, 1)
    run_group = Half(tasks)
    run_group.until = 8
    _, second, run = await run_loop(
        tmp_path, tasks=tasks, run_group=run_group, restored={"step": 1, "version": 1}, **settings
    )
    # Groups 4 to 6 were there; 5 and 7 teach nothing.
    assert second.prompts[:5] == expected[3:8]
    assert second.prompts[5:9] == expected[8:12]  # filtered
    assert set(second.prompts[9:15]) <= set(expected[8:12])
    assert second.prompts[15:] == expected[12:15]
    metrics = [row for row in run.metrics() if "reward" in row]
    assert [(row["step"], row["stage"]) for row in metrics] == [
        (1, 1), (2, 1), (3, 2), (4, 2), (5, 3),
    ]  # fmt: skip
    files = sorted(path.name for path in (run.path / "trajectories").iterdir())
    numbers = [
        number for (number,) in query_journal(run, "SELECT number FROM groups ORDER BY number")
    ]
    assert files == [f"group-{number:07}.jsonl" for number in numbers]


async def test_filtered_stage_ignores_groups_of_another_stage(tmp_path: Path) -> None:
    """A stage of hard tasks restores only groups of hard tasks."""

    class Easy(FakeRollouts):
        async def __call__(self, prompt: object, **options: Any) -> Sequence[Trajectory]:
            self._right = 1.0 if int(options["name"].split("-")[0]) % 2 else 0.5
            return await super().__call__(prompt, **options)

    stages = {
        "plain": StageSettings(steps=2),
        "hard": StageSettings(steps=1, filter_tasks=4),
        "rest": StageSettings(steps=1),
    }
    settings: dict[str, Any] = {"stages": stages, "dynamic_sampling": True}
    settings |= {"checkpoint_every": 1}
    tasks = TaskSource.open(ARITHMETIC)
    first = Easy(tasks)
    await run_loop(
        tmp_path, tasks=tasks, run_group=first, learner=LostLearner("nothing", 1), **settings
    )
    tasks = await undo_to(tmp_path, 1)
    _, second, _ = await run_loop(
        tmp_path, tasks=tasks, restored={"step": 1, "version": 1}, **settings
    )
    # Of the first step's six groups, the second step's six: three are enough now.
    expected = [task.prompt for task in itertools.islice(TaskSource.open(ARITHMETIC), 30)]
    assert second.prompts[:3] == expected[6:9]
    assert second.prompts[3:7] == expected[12:16]  # filtered
    assert set(second.prompts[7:10]) <= set(expected[12:16])
    assert second.prompts[10:] == expected[9:12]
