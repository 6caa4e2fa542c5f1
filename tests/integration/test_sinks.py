"""The real TensorBoard, trackio and wandb: what was told is what they have."""

from __future__ import annotations

import importlib.util
import json
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

from agentloop.events import Measured
from agentloop.observe.exporters.sinks import Sinks, SinksSettings
from tests.integration.conftest import need

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]

ROWS = [
    {"step": 1, "reward": 0.5, "learner/loss": -0.25},
    {"step": 1, "held_out/reward": 0.75},
    {"step": 2, "reward": 1.0, "learner/loss": 0.125},
]
CONFIG = {"loop": {"steps": 2}, "serve": {"token": "hunter2"}}


class PatientSinks(Sinks):
    CLOSE_S = 120


def have(*packages: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            need(f"{package}: pip install {package}")


@pytest.fixture
def wandb_anew() -> Iterator[None]:
    """It reads the environment once in a process."""
    have("wandb")
    import wandb

    wandb.teardown()
    yield
    wandb.teardown()


async def write_rows(sink: str, folder: Path, rows: Sequence[dict[str, Any]] = ROWS) -> None:
    settings = SinksSettings.model_validate({"report_to": [sink], "project": "agentloop-test"})
    async with PatientSinks.open(settings, folder=folder, run_name="a run", config=CONFIG) as sinks:
        for row in rows:
            sinks.on_event(Measured(row))
    assert sinks.num_dropped == 0


# Not ours: TensorBoard's protobuf code, and its use of numpy.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_tensorboard_reads_it(tmp_path: Path) -> None:
    have("tensorboard")
    await write_rows("tensorboard", tmp_path, ROWS[:2])
    await write_rows("tensorboard", tmp_path, ROWS[2:])  # the run goes on, in another process

    def read() -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
        tags = events.Tags()["scalars"]
        return {tag: [(first.step, first.value) for first in events.Scalars(tag)] for tag in tags}

    assert await anyio.to_thread.run_sync(read) == {
        "reward": [(1, 0.5), (2, 1.0)],
        "learner/loss": [(1, -0.25), (2, 0.125)],
        "held_out/reward": [(1, 0.75)],
    }


async def test_trackio_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    await write_rows("trackio", tmp_path)

    def read() -> tuple[list[tuple[int, dict[str, float]]], str]:
        with sqlite3.connect(tmp_path / "agentloop-test.db") as db:
            result = db.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
            config = " ".join(map(str, db.execute("SELECT config FROM configs").fetchall()))
        db.close()
        return [(step, json.loads(metrics)) for step, metrics in result], config

    metrics, config = await anyio.to_thread.run_sync(read)
    assert metrics == [
        (row["step"], {name: value for name, value in row.items() if name != "step"})
        for row in ROWS
    ]
    assert "steps" in config
    assert "hunter2" not in config


async def test_wandb_has_it_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wandb_anew: None
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr("sys.argv", ["agentloop", "train", "serve.token=hunter2"])
    await write_rows("wandb", tmp_path)

    def read() -> bytes:
        (file,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
        return file.read_bytes()

    data = await anyio.to_thread.run_sync(read)
    for text in (b"agentloop-test", b"a-run", b"held_out/reward", b"0.75", b"steps"):
        assert text in data
    for path in tmp_path.rglob("*"):  # noqa: ASYNC240
        if path.is_file():
            assert b"hunter2" not in path.read_bytes()


async def test_wandb_without_a_key_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    wandb_anew: None,
) -> None:
    """And does not ask for one."""
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    settings = SinksSettings(report_to=("wandb",))
    async with PatientSinks.open(settings, folder=tmp_path, run_name="a run", config={}):
        pass
    assert "wandb gets no metrics" in caplog.text
    assert "WANDB_API_KEY" in caplog.text
