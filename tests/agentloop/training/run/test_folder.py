"""The files in a run's folder."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import pytest
from hypothesis import example, given, settings

from agentloop.distribution import version
from agentloop.errors import RunFolderError, SettingsError
from agentloop.training.run.folder import RunFolder, RunSettings, is_active
from agentloop.trajectory import ToolCall, Trajectory, Turn
from tests import emitted


def test_anything_that_a_model_emits_can_be_stored(tmp_path: Path) -> None:
    """A rollout with integers of any size must not end the run."""
    call = ToolCall("c", "python", {"n": 10**40}, "", 0, 1)
    single = Trajectory("t", [1], [Turn(calls=[call])])
    folder = RunFolder(tmp_path / "a run", "")
    rows: list[dict[str, Any]] = [{"task": "a", "trajectory": single.to_dict()}, {"task": "b"}]
    path, num_bytes = folder.add_group(1, rows)
    assert path == "trajectories/group-0000001.jsonl"
    assert num_bytes == (folder.path / path).stat().st_size
    first, second = map(json.loads, (folder.path / path).read_text().splitlines())
    assert folder.read_group(path)[1] == second
    assert first["trajectory"]["turns"][0]["calls"][0]["arguments"] == {"n": 10**40}
    assert second["task"] == "b"


@settings(deadline=None)
@given(raw=emitted.calls, more=emitted.plain_data)
@example('{"name": "f", "arguments": {"n": ' + "9" * 4300 + "}}", None)
@example('{"name": "f", "arguments": {"n": [1e999, 99999999999999999999]}}', None)
def test_stored_rollouts_are_read_back_unchanged(raw: str, more: Any) -> None:
    rows = [{"trajectory": emitted.rollout(raw), "answer": more}, {"task": "b"}]
    with TemporaryDirectory() as path:
        folder = RunFolder(Path(path) / "run", "")
        result = folder.read_group(folder.add_group(1, rows)[0])
        folder.append("rows.jsonl", rows[0])
        assert repr(folder.rows("rows.jsonl")) == repr(result[:1])
    assert repr(result) == repr(emitted.as_json(rows))
    (call,) = rows[0]["trajectory"]["turns"][0]["calls"]
    (read,) = result[0]["trajectory"]["turns"][0]["calls"]
    assert call["error"] or repr(read["arguments"]) == repr(call["arguments"])


def test_power_cut_does_not_take_a_groups_file_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file's name is stored in its folder, which has to be flushed, too."""
    folder = RunFolder(tmp_path / "run", "")
    groups = folder.path / "trajectories"
    synced: list[tuple[int, list[str]]] = []

    def fsync(file: int) -> None:
        synced.append((os.fstat(file).st_ino, os.listdir(groups)))

    monkeypatch.setattr(os, "fsync", fsync)
    path, _ = folder.add_group(1, [{"task": "a"}])
    file, name = folder.path / path, Path(path).name
    assert synced == [
        (file.stat().st_ino, [f".{name}.partial"]),  # all of it, before it appears
        (groups.stat().st_ino, [name]),
    ]


async def test_line_cut_short_by_a_kill_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    for step in (1, 2):
        folder.add_metrics({"step": step})
    path = tmp_path / "run" / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-3])
    async with RunFolder.open(tmp_path / "run") as again:
        again.add_metrics({"step": 3})
        assert [row["step"] for row in again.metrics()] == [1, 3]


async def test_run_says_how_it_was_started_without_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = "/venv/lib/agentloop/__main__.py"
    arguments = ["train", "my run.toml", "budget.max_response_tokens=9", "serve.token=sesame"]
    arguments += ["fleet.redis=redis://:sesame@db", "mcp.a={env={KEY='sesame'}}"]
    monkeypatch.setattr(sys, "argv", [program, *arguments])
    with pytest.raises(KeyError):
        async with RunFolder.open(tmp_path / "run", ""):
            raise KeyError
    rows = (tmp_path / "run" / "commands.jsonl").read_text().splitlines()
    started, ended = map(json.loads, rows)
    assert shlex.split(started["command"]) == [
        "agentloop", "train", "my run.toml", "budget.max_response_tokens=9", "serve.token=...",
        "fleet.redis=redis://...@db", "mcp.a=...",
    ]  # fmt: skip
    assert started["version"] == version()
    assert ended["ended_unix_s"] >= started["unix_s"]


def test_line_that_is_damaged_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    (folder.path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match=r"metrics\.jsonl: line 2 is damaged"):
        folder.metrics()
    (folder.path / "trajectories" / "group-0000001.jsonl").write_text("{\n")
    with pytest.raises(RunFolderError, match=r"group-0000001\.jsonl: line 1 is damaged"):
        folder.read_group("trajectories/group-0000001.jsonl")


def test_kill_leaves_the_settings_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder(tmp_path / "run", "seed = 1\n")

    def killed(self: Path, data: str, *_: object) -> int:
        self.write_bytes(data.encode()[:3])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        RunFolder(tmp_path / "run").tell("seed = 2\n")
    assert (tmp_path / "run" / "config.toml").read_text() == "seed = 1\n"


def test_run_resumes_from_the_newest_complete_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    assert folder.checkpoint is None
    result = {"9": '{"state": {"step": 9}}', "10": '{"state": {"step": 10}}', "11": "{", "12": "{}"}
    for number, state in result.items():
        name = f"step-{number}"
        (folder.path / "checkpoints" / name).mkdir()
        (folder.path / "checkpoints" / name / "state.json").write_text(state)
    (folder.path / "checkpoints" / "step-13").mkdir()
    assert folder.checkpoint == folder.path / "checkpoints" / "step-10"


def test_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run", "")
    (folder.path / "metrics.jsonl").mkdir()
    with pytest.raises(RunFolderError, match=r"run\.folder: .*metrics\.jsonl: Is a directory"):
        folder.add_metrics({"step": 1})


async def test_run_is_never_written_over(tmp_path: Path) -> None:
    async with RunFolder.open(tmp_path / "run", ""):
        pass  # it ended before anything came of it
    async with RunFolder.open(tmp_path / "run", "") as folder:
        folder.add_metrics({"step": 0})
    with pytest.raises(SettingsError, match=r"run\.name: a run already exists"):
        async with RunFolder.open(tmp_path / "run", ""):
            pass


async def test_latest_run_and_its_newest_model_are_found(tmp_path: Path) -> None:
    def model(path: Path) -> Path:
        path.mkdir(parents=True)
        (path / "config.json").write_text("{}")
        return path

    with pytest.raises(RunFolderError, match="is not a run with a model"):
        RunFolder.model_in(tmp_path)
    for name in ("a", "b"):
        async with RunFolder.new(RunSettings(folder=tmp_path, name=name), ""):
            pass
    latest = tmp_path / "latest"
    assert latest.resolve() == tmp_path / "b"
    first = model(tmp_path / "b" / "sft" / "model")
    assert RunFolder.model_in(latest).resolve() == first
    model(tmp_path / "b" / "weights" / "9")
    newest = model(tmp_path / "b" / "weights" / "10")
    assert RunFolder.model_in(latest).resolve() == newest


async def test_active_run_cannot_be_opened_again(tmp_path: Path) -> None:
    async with RunFolder.open(tmp_path / "run", "mine") as active:
        for config in ("yours", None):
            with pytest.raises(RunFolderError, match=r"run\.name: .* is active"):
                async with RunFolder.open(tmp_path / "run", config):
                    pass
        assert (active.path / "config.toml").read_text() == "mine"


async def test_asking_whether_a_run_is_active_does_not_lock_it(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert not is_active(path)
    async with RunFolder.open(path, ""):
        assert is_active(path)
    assert not is_active(path)


async def test_opening_waits_for_a_process_that_only_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_active` has the lock for a moment, in which a run may be resumed."""
    path = RunFolder(tmp_path / "run", "").path

    async def let_go(_: float) -> None:
        fcntl.flock(asking, fcntl.LOCK_UN)

    monkeypatch.setattr(anyio, "sleep", let_go)
    with (path / ".lock").open("w") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        async with RunFolder.open(path):
            assert is_active(path)


async def test_wait_for_the_lock_is_limited_and_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = RunFolder(tmp_path / "run", "").path
    with (path / ".lock").open("w") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        with anyio.move_on_after(0) as scope:
            async with RunFolder.open(path):
                pytest.fail("another process has the lock")
        assert scope.cancelled_caught
        monkeypatch.setattr("agentloop.training.run.folder._LOCK_WAIT_S", 0)
        with pytest.raises(RunFolderError, match="is active"):
            async with RunFolder.open(path):
                pass
    assert not is_active(path)


async def test_run_with_steps_of_fine_tuning_exists(tmp_path: Path) -> None:
    async with RunFolder(tmp_path / "run", "seed = 1\n").within("sft") as start:
        start.add_metrics({"step": 1})
        assert (start.path / "config.toml").read_text() == "seed = 1\n"
        assert is_active(start.path)
    with pytest.raises(SettingsError, match=r"run\.name: a run already exists"):
        async with RunFolder.open(tmp_path / "run", ""):
            pass


@pytest.mark.parametrize("name", ["..", ".", "a/b", " ", "-x"])
def test_name_of_a_run_is_one_folder_in_its_own(name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        RunSettings(name=name)
