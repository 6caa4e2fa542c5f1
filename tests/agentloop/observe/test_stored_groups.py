"""A run's folder and the events of the run itself make the same page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentloop.agent.rollout import Budget, Rollout
from agentloop.environments.rewards.reward import Grader, RewardSettings
from agentloop.environments.tasks.sources import Task
from agentloop.errors import ServerUnavailable
from agentloop.observe.archive import Archive
from agentloop.observe.board import Board
from agentloop.rollouts.request import GroupRequest, Purpose
from agentloop.rollouts.runner import GroupRunner
from agentloop.training.credit.roc import RocSettings
from agentloop.training.rollouts import Rollouts
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import Trajectory
from tests.rollouts import GroupPlayer
from tests.support import END, ScriptedEngine, Step, call_text, chat_format, chunks, written

CHAT = chat_format()
TASK = Task("sum", "What is 3552 divided by 2?", "1776")
UNRECORDED = {"siblings", "reward"}  # lanes: when a rollout was scored is in no file


def divide(a: int, b: int) -> float:
    """Divide two integers."""
    return a / b


def says(text: str) -> list[Step]:
    return list(chunks(written(CHAT, text + END), [2], version="3"))


RIGHT = [says(call_text("divide", {"a": 3552, "b": 2})), says("\\boxed{1776}")]
WRONG = [says(call_text("divide", {"a": 1, "b": 0})), says("\\boxed{5}")]
BROKEN = [[*says("Hm"), ServerUnavailable("it has gone")]]


def without_times(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    compared = [{**row, "start": None, "end": None} for row in rows]
    for row in compared:
        row["lanes"] = [lane for lane, _ in row.get("lanes", ()) if lane not in UNRECORDED]
    return compared


@pytest.mark.parametrize("played", [[RIGHT, WRONG], [RIGHT, RIGHT], [RIGHT, WRONG, BROKEN]])
async def test_folder_shows_the_group_that_was_live(
    tmp_path: Path, played: Sequence[Sequence[Sequence[Step]]]
) -> None:
    board, folder = Board(), RunFolder(tmp_path, "")

    async def run_group(prompt: object, *, name: str, **options: Any) -> list[Trajectory]:
        return [
            await Rollout(
                engine=ScriptedEngine(*turns),
                chat=CHAT,
                messages=[{"role": "user", "content": TASK.prompt}],
                tools=[divide],
                emit=board.on_event,
                id=f"{name}.{index}",
                group=name,
            ).run()
            for index, turns in enumerate(played)
        ]

    async with Grader(RewardSettings(function="exact")) as grader:
        runner = GroupRunner(GroupPlayer(run_group), grader, emit=board.on_event)
        rollouts = Rollouts(runner, RocSettings(down_sample_to_n=0), seed=0)
        request = GroupRequest(TASK, "7", len(played), Budget(), 3, Purpose.TRAIN)
        rolled = await rollouts.run(request)
    folder.add_group(7, [{"group": 7, **row.to_dict()} for row in rolled.rows])
    archive, (groups, live) = Archive(tmp_path, {}, CHAT), board.all(500)
    frame = await archive.frame()
    assert without_times(frame["rollouts"]) == without_times(live["rollouts"])
    assert without_times(frame["groups"]) == without_times(groups["groups"])
    stored, details = await archive.group("7-sum"), board.group_details("7-sum")
    assert details is not None
    for member in stored["rollouts"]:
        del member["no_reward"], member["branch"]  # are only in the folder
    assert (stored["prompt"], stored["rollouts"]) == (details["prompt"], details["rollouts"])
