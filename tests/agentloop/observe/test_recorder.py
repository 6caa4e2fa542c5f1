"""The recorder: whole files of groups, bounded on disk and in memory; failures never spread."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.agent.sessions.tree import Branch
from agentloop.errors import RunFolderError
from agentloop.observe import recorder as recorder_module
from agentloop.observe.archive import Archive
from agentloop.observe.recorder import GroupFolder, Recorder
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import StopReason, Trajectory, Turn, TurnEnd, VersionSpan
from tests.patience import patient
from tests.support import END, chat_format, eventually, written

CHAT = chat_format()


def trajectory(id: str, question: str = "why?", answer: str = "so") -> Trajectory:
    ids = written(CHAT, answer + END)
    turn = Turn(
        ids, [-0.5] * len(ids), [VersionSpan("v1", 0, len(ids))], TurnEnd.STOP,
        text=answer + END, servers=["http://a"], first_token_s=0.1, generated_s=0.5, ended_s=0.5,
    )  # fmt: skip
    prompt = CHAT.prompt([{"role": "user", "content": question}])
    return Trajectory(id, prompt, [turn], StopReason.ANSWERED, None, 100.0, 0.5, answer)


def recorder(folder: GroupFolder | None, max_bytes: int = 2**30) -> Recorder:
    return Recorder(folder, CHAT.last_user_text, agent="m-agent", model="m", max_bytes=max_bytes)


def files(folder: RunFolder) -> list[str]:
    return sorted(path.name for path in (folder.path / "trajectories").iterdir())


async def test_session_becomes_a_group_with_a_rollout_for_each_branch(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    first, second = trajectory("s"), trajectory("s+2", answer="no")
    branches = [
        Branch(first),
        Branch(Trajectory("s+1", [1])),  # its only turn was taken back
        Branch(second, "the same history was asked again", "s"),
    ]
    async with recorder(folder).running() as recording:
        recording.add_session("s", branches)
        recording.add(trajectory("r", "when?\n\nNow?"))
        recording.add()
        recording.add_session("empty", branches[1:2])
    assert files(folder) == ["group-0000001.jsonl", "group-0000002.jsonl"]
    rows = folder.read_group("trajectories/group-0000001.jsonl")
    assert [row["trajectory"]["id"] for row in rows] == ["1-s.0", "1-s.1"]
    assert [row["served_id"] for row in rows] == ["s", "s+2"]
    assert [row["branch"] for row in rows] == ["", "the same history was asked again"]
    assert [row["parent"] for row in rows] == [None, "1-s.0"]
    assert [row["answer"] for row in rows] == ["so", "no"]
    assert {row["model"] for row in rows} == {"m"}
    recorded = rows[1]["trajectory"]
    assert Trajectory.from_dict({**recorded, "id": "s+2"}) == second
    (row,) = folder.read_group("trajectories/group-0000002.jsonl")
    assert (row["model"], row["session"], row["question"]) == ("m-agent", None, "when?\n\nNow?")
    assert (row["task"], row["title"]) == ("", "when? Now?")


async def test_page_shows_it(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    two = trajectory("s")
    two.turns.append(Turn([5], [-1.0], started_s=9.0, first_token_s=9.5, ended_s=10.0))
    two.elapsed_s = 10.0
    async with recorder(folder).running() as recording:
        recording.add_session("s", [Branch(two), Branch(trajectory("s+1"), "it differs", "s")])
    archive = Archive(tmp_path, {}, CHAT)
    group = await archive.group("1-s")
    assert (group["prompt"], group["size"], group["answer"]) == ("why?", 2, None)
    assert group["task"] == "why?"
    assert [row["branch"] for row in group["rollouts"]] == ["", "it differs"]
    shown = await archive.rollout("1-s.1")
    assert (shown["answer"], shown["branch"], shown["parent"]) == ("so", "it differs", "1-s.0")
    frame = await archive.frame()
    lanes = [lane for lane, _ in frame["rollouts"][0]["lanes"]]
    assert lanes == ["wait", "prefill", "decode", "client", "wait", "decode"]


async def test_oldest_records_are_deleted(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, "")
    async with recorder(folder).running() as recording:
        for name in "abc":
            recording.add(trajectory(name))
    size = (tmp_path / "trajectories" / "group-0000001.jsonl").stat().st_size
    async with recorder(folder, max_bytes=3 * size + size // 2).running() as recording:
        for name in "de":
            recording.add(trajectory(name))
    assert files(folder) == [f"group-000000{n}.jsonl" for n in (3, 4, 5)]
    async with recorder(folder, max_bytes=1).running() as recording:
        recording.add(trajectory("f"))
    assert files(folder) == ["group-0000006.jsonl"]  # the newest is always kept


class SlowFolder:
    """A disk that waits until a test lets it go on."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.may_write = threading.Event()
        self.written: list[str] = []

    def add_group(self, number: int, rows: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
        assert self.may_write.wait(patient(30))
        (row,) = rows
        self.written.append(row["served_id"])
        return f"{number}", 1


async def test_slow_disk_drops_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    max_tokens = 3 * len(trajectory("a").ids)
    monkeypatch.setattr(recorder_module, "_MAX_WAITING_TOKENS", max_tokens)
    folder = SlowFolder(tmp_path)
    async with recorder(folder).running() as recording:
        for name in "abcde":
            recording.add(trajectory(name))
        assert recording.num_dropped == 2
        folder.may_write.set()
        await eventually(lambda: folder.written == ["a", "b", "c"])
        recording.add(trajectory("f"))  # there is room again
    assert folder.written == ["a", "b", "c", "f"]


async def test_rest_is_written_when_the_service_is_cancelled(tmp_path: Path) -> None:
    folder = SlowFolder(tmp_path)
    with anyio.CancelScope() as scope:
        async with recorder(folder).running() as recording:
            recording.add(trajectory("a"))
            recording.add(trajectory("b"))
            scope.cancel()
            folder.may_write.set()
            await anyio.sleep_forever()
    assert folder.written == ["a", "b"]


async def test_hanging_disk_holds_no_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder_module, "_CLOSE_S", 0.05)
    folder = SlowFolder(tmp_path)
    with anyio.fail_after(patient(20)):
        async with recorder(folder).running() as recording:
            recording.add(trajectory("a"))
    assert recording.num_dropped == 1
    folder.may_write.set()


class FullFolder:
    path = Path("full")

    def add_group(self, number: int, rows: Iterable[Mapping[str, Any]]) -> tuple[str, int]:
        raise RunFolderError("run.folder: full: No space left on device")


async def test_full_disk_ends_no_service(caplog: pytest.LogCaptureFixture) -> None:
    async with recorder(FullFolder()).running() as recording:
        recording.add(trajectory("a"))
        await eventually(lambda: recording.num_dropped == 1)
        recording.add(trajectory("b"))
    assert recording.num_dropped == 2
    assert "No space left on device" in caplog.text


async def test_without_a_folder_no_group_is_recorded() -> None:
    async with recorder(None).running() as recording:
        recording.add(trajectory("a"))
    assert recording.num_dropped == 0
