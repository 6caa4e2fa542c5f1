"""A run that returns to a checkpoint has its former state, even after a kill at any point."""

from __future__ import annotations

import gc
import json
import os
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from agentloop.environments.tasks.sources import Task
from agentloop.errors import RunFolderError
from agentloop.rollouts.metrics import GroupFigures
from agentloop.training.queue import GroupQueue, StepNotes
from agentloop.training.run_folder import RunFolder
from agentloop.training.undo import finish_undo, undo

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]  # much is synced to the disk

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
    (path / "entropy").mkdir()
    async with GroupQueue.open(path / "queue.sqlite") as queue:
        for step in (1, 2, 3):
            task = Task(f"t{step}", "?", "1")
            group = await queue.admit(task, version=step - 1, cursor={"position": step})
            file, size = folder.add_group(group.number, [{"step": step}])
            (path / "entropy" / Path(file).name).write_text(str(step))
            await queue.finish(group.number, path=file, num_bytes=size, figures=GroupFigures())
            await queue.lease(step, [group.number], StepNotes(0))
            await queue.acknowledge(step)
            folder.add_metrics({"step": step, "reward": 10**30})
        await queue.admit(Task("t4", "?", "1"), version=3, cursor={"position": 4})
    folder.end()
    del folder
    gc.collect()


def seen(path: Path) -> dict[str, Any]:
    """Return everything in the folder except times."""
    found: dict[str, Any] = {}
    for file in sorted(path.rglob("*")):
        parts = list(file.relative_to(path).parts)
        if parts[0] == "undone" and len(parts) > 1:
            parts[1] = "then"
        if not file.name.startswith(("queue.sqlite", ".lock")):
            found["/".join(parts)] = file.read_text() if file.is_file() else None
    with closing(sqlite3.connect(path / "queue.sqlite")) as db:
        for table in ("groups", "steps", "notes"):
            found[f"table {table}"] = db.execute(f"SELECT * FROM {table} ORDER BY 1").fetchall()
    return found


async def test_what_came_after_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "run"
    await run_of_three_steps(path)
    async with opened(path) as (folder, queue):
        await undo(folder, queue, 1)
        assert [*folder.checkpoints] == [1]
        assert folder.metrics() == [{"step": 1, "reward": 10**30}]
        assert [group.task.id for group in await queue.open_groups()] == ["t2", "t3", "t4"]
    assert not (path / "ended").exists()
    assert [one.name for one in (path / "trajectories").iterdir()] == ["group-0000001.jsonl"]
    assert [one.name for one in (path / "entropy").iterdir()] == ["group-0000001.jsonl"]
    assert not [*(path / "weights").iterdir()]
    (aside,) = (path / "undone").iterdir()
    assert {str(one.relative_to(aside)) for one in aside.rglob("*") if one.is_file()} == {
        *(f"{kind}/group-000000{n}.jsonl" for kind in ("trajectories", "entropy") for n in (2, 3)),
        *(f"weights/{version}/config.json" for version in ("2", "3", ".3.old")),
        *(f"{name}/state.json" for name in ("step-00002", "step-00003", "step-00004-rescue")),
        "metrics.jsonl",
    }
    assert len((aside / "metrics.jsonl").read_text().splitlines()) == 3


@pytest.mark.full
@pytest.mark.timeout(300)
async def test_a_kill_at_any_moment_leaves_all_of_it_or_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run_of_three_steps(tmp_path / "before")
    before = seen(tmp_path / "before")
    shutil.copytree(tmp_path / "before", tmp_path / "whole")
    async with opened(tmp_path / "whole") as (folder, queue):
        await undo(folder, queue, 1)
    whole = seen(tmp_path / "whole")
    left = 0

    def dying(work: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise KilledError
            return work(*arguments, **named)

        return asked

    for number in range(100):
        path = tmp_path / str(number)
        shutil.copytree(tmp_path / "before", path)
        async with opened(path) as (folder, queue):
            left = number
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
            assert seen(path) == before
        else:
            async with opened(path) as (folder, queue):
                await finish_undo(folder, queue)
            del folder
            await let_go()
            assert seen(path) == whole
        if not was_killed:
            break
    assert number > 10


async def test_a_step_without_a_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    await run_of_three_steps(tmp_path / "run")
    before = seen(tmp_path / "run")
    async with opened(tmp_path / "run") as (folder, queue):
        with pytest.raises(RunFolderError, match=r"no checkpoint of step 7; available: 1, "):
            await undo(folder, queue, 7)
        await finish_undo(folder, queue)  # there is nothing to be finished
    assert seen(tmp_path / "run") == before
