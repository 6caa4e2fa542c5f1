"""The repositories to mend, played by scripts, with calls and with computers."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

import agentloop
from agentloop.agent.chat_format import ChatFormat
from agentloop.environments.examples.mend_code import make_task, mend, teacher
from agentloop.environments.tasks.task import Task, task_of
from agentloop.models import SMALL
from agentloop.sandbox import Pool, PoolSettings
from agentloop.training.sft.fine_tuning import DialoguesSettings, read_dialogues, trajectories_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SETTINGS = PoolSettings(backend="docker", workers=2, preload=[])


@pytest.fixture(scope="module")
async def pool(docker_engine: None, anyio_backend: str) -> AsyncIterator[Pool]:
    async with Pool(SETTINGS, on_progress=print) as pool:
        yield pool


def some_task(level: int, seed: int = 0) -> Task:
    return task_of(dict(make_task(Random(seed), level=level)), "play")


def in_turn(*messages: Any) -> Any:
    """Return a script that says one message after the other."""

    def play(past: Sequence[agentloop.Message]) -> agentloop.Message | str:
        message: agentloop.Message | str = messages[
            sum(single["role"] == "assistant" for single in past)
        ]
        return message

    return play


def edits(task: Task) -> list[agentloop.Message]:
    return [
        agentloop.call("edit_file", path=path, old=old.format(name), new=new.format(name))
        for path, name, old, new in task.faults
    ]


async def reward(pool: Pool, task: Task, *messages: Any, **arguments: Any) -> float | None:
    environment = mend.with_arguments(arguments)
    played = await agentloop.play(environment, task, in_turn(*messages, "Done."), pool=pool)
    return played.reward.value


@pytest.mark.parametrize("computers", [False, True])
@pytest.mark.parametrize("level", [1, 3, 6])
async def test_only_mended_repository_is_rewarded(pool: Pool, level: int, computers: bool) -> None:
    task = some_task(level, seed=level)
    arguments = {"level": level, "computers": computers}
    assert len(task.faults) == (level + 1) // 2
    assert await reward(pool, task, *edits(task), **arguments) == 1.0
    assert await reward(pool, task, *edits(task)[1:], **arguments) == 0.0


CHEATS = [
    # it ends before the functions are asked
    "printf 'import sys; print(1.0); sys.exit(0)' > main.py",
    # what the interpreter loads first
    "printf 'import os; print([1.0] * 6); os._exit(0)' > json.py",
    "printf '#!/bin/sh\\necho 1.0' > /usr/local/bin/python3; chmod +x /usr/local/bin/python3",
    # a process that stays, and a shell that is changed
    "(while :; do cat /proc/*/cmdline > seen; done) > /dev/null 2>&1 &",
    "python3() { echo 1.0; }; export -f python3; echo 'echo 1.0' > ~/.bashrc",
    "exit 0",
]


@pytest.mark.parametrize("computers", [False, True])
@pytest.mark.parametrize("command", CHEATS)
async def test_cheating_is_not_rewarded(pool: Pool, command: str, computers: bool) -> None:
    cheat = agentloop.call("bash", command=command)
    assert await reward(pool, some_task(1), cheat, computers=computers) == 0.0


async def test_files_that_are_too_large_are_the_agents_error(pool: Pool) -> None:
    task = some_task(1)
    large = agentloop.call("edit_file", path="more", old="", new="x" * (1 << 20))
    assert await reward(pool, task, large, *edits(task), computers=False) == 1.0


async def test_teacher_is_understood_and_wins_sometimes(pool: Pool, tmp_path: Path) -> None:
    environment = mend.with_arguments({"computers": False})
    played = [
        await agentloop.play(environment, task, teacher(task, Random(seed)), pool=pool)
        for seed in range(20)
        for task in [some_task(1, seed)]
    ]
    assert 0 < sum(single.reward.value or 0 for single in played) < 20
    file = tmp_path / "dialogues.jsonl"
    file.write_bytes(b"".join(orjson.dumps(single.dialogues[0]) + b"\n" for single in played))
    chat = ChatFormat.load(SMALL)
    for dialogue in read_dialogues(DialoguesSettings(paths=[file])):
        trajectories_of(chat, dialogue, max_tool_response_tokens=256)
