"""The page of a training run: before its parts exist, while they do, and afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import aiohttp
import anyio
import anyio.abc
import pytest

from agentloop.events import Emit, Event, Measured, RolloutAbandoned, RolloutStarted
from agentloop.inference.replicas import ServerView
from agentloop.launch.progress import ProgressLine
from agentloop.runtime import Runtime, Settings
from agentloop.serving.access import ServeSettings
from agentloop.serving.listen import bind
from agentloop.training.loop.training_loop import TrainingLoop
from agentloop.training.run.dashboard import RunDashboard
from agentloop.training.run.folder import RunFolder
from agentloop.trajectory import Trajectory
from tests.agentloop.observe.test_archive import rollout
from tests.fakes import RecordedProgress
from tests.patience import patient
from tests.support import chat_format, eventually, written

TOKEN = {"X-Control-Token": "sesame"}


def without_time(row: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in row.items() if name != "unix_s"}


class PlayedRuntime:
    """A runtime whose rollouts run until they are cancelled."""

    def __init__(self) -> None:
        self.settings = Settings()
        self.chat = chat_format()
        self.router = self
        self.pool = self
        self.num_waiting = 3
        self.num_open = 0
        self.cancelled: list[str] = []
        self.begins = True

    def view(self) -> list[ServerView]:
        return []

    def stats(self) -> dict[str, Any]:
        return {"backend": "process", "slots": 2}

    def cancel(self, rollout: str) -> bool:
        self.cancelled.append(rollout)
        return rollout == "r"

    async def rollout(self, question: str, *, on_event: Emit) -> None:
        self.num_open += 1
        try:
            if self.begins:
                on_event(RolloutStarted(Trajectory("r", written(self.chat, question))))
            await anyio.sleep_forever()
        except BaseException:
            on_event(RolloutAbandoned("r"))
            raise
        finally:
            self.num_open -= 1


class PlayedLoop:
    """Records the calls that it gets."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.is_busy = self.is_draining = False
        self.control = self

    def pause(self, paused: bool = True) -> None:
        self.asked.append("pause" if paused else "resume")

    def drain(self) -> None:
        self.asked.append("drain")

    async def save(self) -> int:
        self.asked.append("save")
        if self.is_busy:
            await anyio.sleep_forever()
        return 7

    def view(self) -> dict[str, Any]:
        return {"step": 5, "paused": False}


@dataclass
class At:
    dashboard: RunDashboard
    progress: RecordedProgress
    http: aiohttp.ClientSession
    url: str
    runtime: PlayedRuntime = field(default_factory=PlayedRuntime)
    loop: PlayedLoop = field(default_factory=PlayedLoop)

    def begin(self) -> None:
        self.dashboard.runtime = cast(Runtime, self.runtime)
        self.dashboard.loop = cast(TrainingLoop, self.loop)

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with self.http.post(self.url + path, json=body, headers=TOKEN) as response:
            return response.status, await response.json()


@asynccontextmanager
async def dashboard(
    folder: Path, *, readers: Sequence[Emit] = (), before: Callable[[RunFolder], None] | None = None
) -> AsyncIterator[At]:
    run, progress = RunFolder(folder / "run", ""), RecordedProgress("Starting 1 server")
    if before is not None:
        before(run)
    run_dashboard = RunDashboard(run, cast(ProgressLine, progress), readers=readers)
    settings = ServeSettings.model_validate({"port": 0, "control_token": "sesame"})
    async with run_dashboard.serve_page(settings), aiohttp.ClientSession() as http:
        match = re.search(r"(http://\S+)/ ", progress.lines[0])
        assert match is not None
        yield At(run_dashboard, progress, http, match[1])


async def test_page_is_there_before_the_runtime(tmp_path: Path) -> None:
    def before(run: RunFolder) -> None:  # the run goes on
        run.add_metrics({"step": 1, "reward": 0.5, "groups_with_signal": 0.75, "num_groups": 8})

    async with dashboard(tmp_path, before=before) as at:
        status, frame = await at.get("/api/frame")
        assert status == 200
        assert frame["about"]["kind"] == "train"
        assert frame["now"]["waits"] == "Starting 1 server"
        assert frame["now"]["learning"]["text"] == "6 of 8 groups have a signal"
        assert (frame["servers"], frame["sandbox"]["calls"]) == ([], {})
        assert [row["step"] for row in frame["steps"]] == [1]
        assert "control token: sesame" in at.progress.lines[0]


async def test_supervised_start_has_curves_of_its_own(tmp_path: Path) -> None:
    """Those of before a restart, too. No other reader takes its steps for those of the run."""
    heard: list[Event] = []

    def before(run: RunFolder) -> None:
        RunFolder(run.path / "sft").add_metrics({"step": 1, "learner/loss": 2.0})

    async with dashboard(tmp_path, before=before, readers=[heard.append]) as at:
        at.dashboard.on_start_event(Measured({"step": 2, "learner/loss": 1.0}))
        at.dashboard.emit(Measured({"step": 1, "reward": 0.5}))
        _, frame = await at.get("/api/frame")
        assert [without_time(row) for row in frame["steps"]] == [
            {"start/step": 1, "start/learner/loss": 2.0},
            {"start/step": 2, "start/learner/loss": 1.0},
            {"step": 1, "reward": 0.5},
        ]
    assert heard == [Measured({"step": 1, "reward": 0.5})]


async def test_run_of_sft_is_shown_and_cannot_be_controlled(tmp_path: Path) -> None:
    progress = RecordedProgress("Starting 1 server")
    folder = RunFolder(tmp_path / "run", "")
    run_dashboard = RunDashboard(
        folder, cast(ProgressLine, progress), kind="sft", has_runtime=False
    )
    settings = ServeSettings.model_validate({"port": 0, "control_token": "sesame"})
    async with run_dashboard.serve_page(settings), aiohttp.ClientSession() as http:
        run_dashboard.emit(Measured({"step": 1, "learner/loss": 1.5}))
        url = progress.lines[0].removeprefix("Watch it: ")
        async with http.get(f"{url}api/frame") as response:
            frame = await response.json()
        assert (frame["about"]["kind"], frame["about"]["controls"]) == ("sft", [])
        assert [without_time(row) for row in frame["steps"]] == [{"step": 1, "learner/loss": 1.5}]


async def test_group_of_before_a_restart_is_read_from_the_folder(tmp_path: Path) -> None:
    def before(run: RunFolder) -> None:
        run.add_group(1, [{"group": 1, "version": 0, **rollout("1-a.0")}])

    async with dashboard(tmp_path, before=before) as at:
        status, group = await at.get("/api/groups/1-a")
        assert (status, [row["id"] for row in group["rollouts"]]) == (200, ["1-a.0"])
        assert (await at.get("/api/groups/2-a"))[0] == 404


async def test_before_servers_are_up_nobody_answers(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as at:
        status, body = await at.post("/api/ask", {"question": "why?"})
        assert (status, body["error"]) == (503, "no server is ready yet; ask again later")
        at.begin()
        assert await at.post("/api/ask", {"question": "why?"}) == (200, {"rollout": "r"})


async def test_before_the_loop_is_there_it_cannot_be_controlled(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as at:
        for command in ("pause", "resume", "drain", "checkpoint"):
            status, body = await at.post("/api/control", {"do": command})
            assert status == 400
            assert "has not started" in body["error"]
        for request in ({"do": "cancel"}, {"do": "cancel", "rollout": "r"}):
            status, body = await at.post("/api/control", request)
            assert status == 400
            assert body["error"].startswith("rollout: ")


async def test_control_requests_are_carried_out(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as at:
        at.begin()
        for command in ("pause", "resume", "drain", "checkpoint"):
            status, body = await at.post("/api/control", {"do": command})
            assert status == 200
            assert body["done"]
        assert "step 7" in body["done"]
        assert at.loop.asked == ["pause", "resume", "drain", "save"]
        assert (await at.post("/api/control", {"do": "cancel", "rollout": "r"}))[0] == 200
        assert (await at.post("/api/control", {"do": "cancel", "rollout": "x"}))[0] == 400
        assert at.runtime.cancelled == ["r", "x"]
        _, frame = await at.get("/api/frame")
        assert (frame["now"]["step"], frame["now"]["num_waiting"]) == (5, 3)
        assert frame["sandbox"]["backend"] == "process"


async def test_draining_run_cannot_be_resumed_by_control(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as at:
        at.begin()
        _, body = await at.post("/api/control", {"do": "resume"})
        assert body["done"] == "resumed: groups are started again"
        at.loop.is_draining = True
        _, body = await at.post("/api/control", {"do": "resume"})
        assert "no groups are started" in body["done"]


async def test_learner_that_is_busy_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentloop.training.run.dashboard._SAVE_S", 0.02)
    async with dashboard(tmp_path) as at:
        at.begin()
        at.loop.is_busy = True
        status, body = await at.post("/api/control", {"do": "checkpoint"})
        assert (status, body["error"]) == (
            400,
            "do: the learner was busy for 0.02 s; try again later",
        )


async def test_rollouts_stay_visible_after_the_runtime_is_gone(tmp_path: Path) -> None:
    events: list[Any] = []
    async with dashboard(tmp_path, readers=[events.append]) as at:
        at.begin()
        await at.post("/api/ask", {"question": "why?"})
        _, before = await at.get("/api/rollouts/r")
        assert (before["prompt"].count("why?"), before["state"]) == (1, "live")
        at.dashboard.detach()
        await eventually(lambda: at.runtime.num_open == 0)  # nobody may ask a server any more
        at.dashboard.detach()  # by whoever ends first, and the other
        _, after = await at.get("/api/rollouts/r")
        assert (after["prompt"], after["state"]) == (before["prompt"], "abandoned")
        assert (await at.get("/api/frame"))[1]["servers"] == []
        assert (await at.post("/api/ask", {"question": "why?"}))[0] == 503
        assert (await at.post("/api/control", {"do": "pause"}))[0] == 400
    assert [type(event) for event in events] == [RolloutStarted, RolloutAbandoned]


async def test_question_at_the_end_of_a_run_gets_an_error(tmp_path: Path) -> None:
    async with dashboard(tmp_path) as at:
        at.begin()
        at.runtime.begins = False
        answers: list[tuple[int, Any]] = []

        async def ask() -> None:
            answers.append(await at.post("/api/ask", {"question": "why?"}))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await eventually(lambda: at.runtime.num_open == 1)
            at.dashboard.detach()
        assert answers == [(503, {"error": "the run has ended"})]


async def test_reader_on_the_page_does_not_delay_a_runs_end(tmp_path: Path) -> None:
    with anyio.fail_after(patient(15)):
        async with dashboard(tmp_path) as at:
            at.begin()
            response = await at.http.get(f"{at.url}/api/stream")
            data = (await response.content.readuntil(b"\n\n")).split(b"data: ")[1]
            assert json.loads(data)["full"] is True
            response.close()


@pytest.mark.parametrize(
    ("ending", "state", "text"),
    [
        ("returns", "finished", "The run has finished."),
        ("raises", "failed", "The run has failed: no disk left."),
        ("is cancelled", "stopped", "The run was stopped; to continue: agentloop train --resume"),
        ("is drained", "drained", "The run was drained; to continue: agentloop train --resume"),
    ],
)
async def test_page_shows_how_run_ended(tmp_path: Path, ending: str, state: str, text: str) -> None:
    last: list[dict[str, Any]] = []

    async def read(url: str, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/api/stream") as response:
            async for line in response.content:
                if line.startswith(b"data: "):
                    if not last:
                        task_status.started()
                    last[:] = [json.loads(line.removeprefix(b"data: "))]

    with anyio.fail_after(patient(15)):
        async with anyio.create_task_group() as tasks:
            with suppress(ValueError), anyio.CancelScope() as scope:
                async with dashboard(tmp_path) as at:
                    at.begin()
                    await tasks.start(read, at.url)
                    if ending == "raises":
                        raise ExceptionGroup("tasks", [ValueError("no disk left.\nand more")])
                    if ending == "is cancelled":
                        scope.cancel()
                        await anyio.sleep_forever()
                    if ending == "is drained":
                        at.loop.is_draining = True
                        at.dashboard.detach()
    assert last[0]["now"]["ended"]["state"] == state
    assert last[0]["now"]["ended"]["text"].startswith(text)


async def test_another_port_is_taken_where_its_own_is_in_use(tmp_path: Path) -> None:
    with bind(ServeSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        progress = RecordedProgress("Starting 1 server")
        run_dashboard = RunDashboard(RunFolder(tmp_path / "run", ""), cast(ProgressLine, progress))
        async with run_dashboard.serve_page(ServeSettings(port=port)):
            assert f":{port}/" not in progress.lines[0]


async def test_error_of_the_run_comes_out_as_itself(tmp_path: Path) -> None:
    async def run() -> None:
        async with dashboard(tmp_path) as at:
            at.begin()
            await at.post("/api/ask", {"question": "why?"})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await run()
