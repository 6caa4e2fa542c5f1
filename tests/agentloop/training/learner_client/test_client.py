"""The learner's processes as the runtime sees them, with small scripts as ranks."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pydantic
import pytest

from agentloop.training.learner_client import client as learner_module
from agentloop.training.learner_client.client import (
    KeptLearner,
    Learner,
    LearnerEnded,
    LearnerError,
    LearnerLost,
    LearnerProcesses,
    LearnerRefused,
    start_learner,
)
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import Reply, Request, SavedRequest
from agentloop.training.learner_client.settings import LearnerSettings
from tests.patience import patient

pytestmark = [
    pytest.mark.timeout(60),  # each rank and its guardian are interpreters that start
    pytest.mark.skipif(sys.platform != "linux", reason="guardians look at /proc"),
]

RANK = """
import json, os, socket, sys, time
settings = json.load(open(sys.argv[1]))
if settings.get("dies") and os.environ["RANK"] == str(settings.get("rank", 0)):
    print("out of luck", file=sys.stderr)
    sys.exit(3)
if settings.get("dies_with") and os.path.exists(settings["dies_with"]):
    sys.exit(4)
if settings.get("pids"):
    with open(settings["pids"] + os.environ["RANK"], "w") as file:
        file.write(str(os.getpid()))
if os.environ["RANK"] != "0":
    if settings.get("follows"):
        while not os.path.exists(settings["follows"]):
            time.sleep(0.01)
        print("the real reason", file=sys.stderr, flush=True)
        open(settings["follows"] + ".told", "w").close()
        time.sleep(0.3)
        sys.exit(7)
    time.sleep(600)
if settings.get("late") or os.path.exists(settings.get("late_after", "")):
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["AGENTLOOP_LEARNER_SOCKET"])
    time.sleep(600)
link = socket.socket(socket.AF_UNIX)
link.connect(os.environ["AGENTLOOP_LEARNER_SOCKET"])
file = link.makefile("rwb")
def tell(answer):
    file.write(json.dumps(answer).encode() + b"\\n")
    file.flush()
tell({"ok": True, "ready": True, "num_ranks": int(os.environ["WORLD_SIZE"]), "device": "cpu",
      "num_parameters": 0, "num_trained": 0})
for line in file:
    request = json.loads(line)
    if request["op"] == "die":
        os._exit(9)
    if request["op"] == "lose":
        open(settings["follows"], "w").close()
        while not os.path.exists(settings["follows"] + ".told"):
            time.sleep(0.01)
        time.sleep(0.05)
        print("a peer is gone", file=sys.stderr, flush=True)
        tell({"ok": False, "error": "Connection closed by peer", "fatal": True})
        if request.get("ends"):
            sys.exit(1)
    if request["op"] == "end":
        tell({"ok": False, "error": "no finite gradient", "fatal": True, "on_purpose": True})
        sys.exit(1)
    if request["op"] == "fatal":
        tell({"ok": False, "error": "broken", "fatal": True})
        continue
    if request["op"] == "hang_up":
        print("last words", file=sys.stderr, flush=True)
        file.close()
        link.close()
        time.sleep(600)
    if request["op"] == "hang":
        time.sleep(600)
    if request["op"] == "slow":
        while not os.path.exists(settings["may_end"]):
            time.sleep(0.01)
    if request["op"] == "refuse":
        tell({"ok": False, "error": "no such thing", "fatal": False})
    else:
        tell({"ok": True, "echo": request, "pid": os.getpid()})
"""


REAL_COMMAND = learner_module._COMMAND


class Echo(Reply):
    echo: dict[str, Any]
    pid: int


class Played(Request[Echo]):
    model_config = pydantic.ConfigDict(extra="allow")

    reply_type = Echo


def played(op: str, **fields: Any) -> Played:
    """Return a request to the script above, which has operations of its own."""
    return Played.model_validate({"op": op, **fields})


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks run the script above."""
    file = tmp_path / "rank.py"
    file.write_text(RANK)
    monkeypatch.setattr(learner_module, "_COMMAND", (sys.executable, str(file)))
    monkeypatch.setattr(learner_module, "_OTHERS_S", 1.0)


class PlayedSettings(LearnerSettings):
    """The settings of a fake learner, which are not those of the real one."""

    model_config = pydantic.ConfigDict(extra="allow")


@asynccontextmanager
async def ranks(
    folder: Path, *, count: int = 2, **settings: object
) -> AsyncIterator[tuple[Learner, LearnerProcesses]]:
    async with start_learner(
        PlayedSettings.model_validate(settings),
        RanksSettings(nproc_per_node=count, start_timeout_s=50),
        log_dir=folder / "logs",
        on_progress=lambda line: None,
    ) as pair:
        yield pair


async def test_requests_are_answered_and_no_process_is_left(tmp_path: Path) -> None:
    async with ranks(tmp_path) as (learner, _):
        answer = await learner.ask(played("step", batch="x"), timeout_s=30)
        assert answer.echo == {"op": "step", "batch": "x"}
        pid = answer.pid
        with pytest.raises(LearnerRefused, match="refuse: no such thing"):
            await learner.ask(played("refuse"), timeout_s=30)
        await learner.ask(played("step"), timeout_s=30)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_request_after_a_cancelled_one_gets_its_own_response(tmp_path: Path) -> None:
    may_end = tmp_path / "may_end"
    async with ranks(tmp_path, may_end=str(may_end)) as (learner, _):
        for _ in range(2):
            with anyio.move_on_after(0.05):
                await learner.ask(played("slow"), timeout_s=30)
                pytest.fail("it was not slow")
        may_end.touch()
        answer = await learner.ask(played("step", batch="x"), timeout_s=30)
        assert answer.echo == {"op": "step", "batch": "x"}


async def test_reply_that_is_not_of_the_protocol_is_an_error(tmp_path: Path) -> None:
    async with ranks(tmp_path) as (learner, _):
        with pytest.raises(LearnerError, match="saved: the learner's reply is invalid: echo: unkn"):
            await learner.ask(SavedRequest(), timeout_s=30)


async def test_late_response_is_an_error(tmp_path: Path) -> None:
    async with ranks(tmp_path) as (learner, _):
        with pytest.raises(LearnerLost, match=r"hang: no response within 0\.1 s; logs in"):
            await learner.ask(played("hang"), timeout_s=0.1)


async def test_rank_that_dies_says_which_and_how(tmp_path: Path) -> None:
    async with ranks(tmp_path) as (learner, processes):
        with pytest.raises(LearnerError, match="die: rank 0 ended with exit status 9"):
            await learner.ask(played("die"), timeout_s=30)
        with anyio.fail_after(patient(30)):
            assert "rank 0" in await processes.wait_dead()


async def test_start_that_fails_ends_with_the_log(tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match=r"exit status 3[\s\S]*out of luck"):
        async with ranks(tmp_path, dies=True):
            pass


@pytest.mark.full
async def test_start_fails_when_any_rank_dies(tmp_path: Path) -> None:
    with (
        anyio.fail_after(patient(40)),
        pytest.raises(LearnerError, match="rank 1 ended with exit status 3"),
    ):
        async with ranks(tmp_path, dies=True, rank=1, late=True):
            pass


@pytest.mark.full
async def test_death_of_a_rank_is_a_single_error(tmp_path: Path) -> None:
    async with ranks(tmp_path) as (learner, processes):
        with pytest.raises(LearnerError, match="rank 0 ended with exit status 9"):
            await processes.while_alive(partial(learner.ask, played("die"), timeout_s=30))
        with pytest.raises(LearnerError, match="rank 0 ended with exit status 9"):
            await processes.while_alive(anyio.sleep_forever)


@pytest.mark.parametrize(("ends", "watched"), [(False, False), (True, True)])
@pytest.mark.full
async def test_first_of_several_dead_ranks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool, watched: bool
) -> None:
    """Rank 0 reports the loss of a rank, and may end before that rank's end is noticed."""
    monkeypatch.setattr(learner_module, "_OTHERS_S", 8.0)
    follows = str(tmp_path / "go")
    async with ranks(tmp_path, follows=follows) as (learner, processes):
        ask = partial(learner.ask, played("lose", ends=ends), timeout_s=30)
        with pytest.raises(LearnerError, match=r"rank 1 ended[\s\S]*the real reason") as caught:
            await (processes.while_alive(ask) if watched else ask())
    assert str(tmp_path / "logs") in str(caught.value)
    assert "a peer is gone" not in str(caught.value)


async def test_log_is_shown_if_no_rank_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ranks(tmp_path) as (learner, processes):
        with pytest.raises(
            LearnerError, match=f"fatal: broken\nrank 0 is still running.*{tmp_path}/logs"
        ):
            await learner.ask(played("fatal"), timeout_s=30)
        monkeypatch.setattr(processes, "how_it_ended", partial(processes.how_it_ended, 0.5))
        with pytest.raises(LearnerError, match=r"is still running[\s\S]*last words"):
            await learner.ask(played("hang_up"), timeout_s=30)


async def test_work_is_undisturbed_while_all_ranks_live(tmp_path: Path) -> None:
    async def refuse() -> None:
        raise ValueError("its own")

    async with ranks(tmp_path, count=1) as (learner, processes):
        answer = await processes.while_alive(partial(learner.ask, played("step"), timeout_s=30))
        assert answer.echo["op"] == "step"
        with pytest.raises(ValueError, match="its own"):
            await processes.while_alive(refuse)


async def test_killed_rank_is_described(tmp_path: Path) -> None:
    async with ranks(tmp_path, count=1) as (learner, processes):
        pid = (await learner.ask(played("step"), timeout_s=30)).pid
        os.kill(pid, signal.SIGKILL)
        with anyio.fail_after(patient(30)):
            assert "exit status 137" in await processes.wait_dead()


async def test_users_file_with_the_packages_name_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The settings are invalid, which the real learner reports first."""
    (tmp_path / "agentloop.py").write_text("raise SystemExit('not ours')")
    monkeypatch.setattr(learner_module, "_COMMAND", REAL_COMMAND)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(learner_module.__file__).parents[3]))
    with pytest.raises(LearnerError, match=r"learner\.json: [\s\S]*no_such") as caught:
        async with start_learner(
            PlayedSettings.model_validate({"no_such": 1}),
            RanksSettings(),
            log_dir=tmp_path / "logs",
            on_progress=lambda line: None,
        ):
            pass
    assert "not ours" not in str(caught.value)


async def test_long_folder_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("long" * 25)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    async with ranks(tmp_path, count=1) as (learner, _):
        await learner.ask(played("step"), timeout_s=30)


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def kept(folder: Path, **settings: object) -> KeptLearner:
    return KeptLearner(
        PlayedSettings.model_validate({"pids": f"{folder}/pid-", **settings}),
        RanksSettings(nproc_per_node=2, start_timeout_s=50),
        log_dir=folder / "logs",
        on_progress=lambda line: None,
    )


def forget(folder: Path) -> None:
    for file in folder.glob("pid-*"):
        file.unlink()


async def both_run(folder: Path) -> list[int]:
    """Return the pids of ranks 0 and 1. Fake ranks do not wait for each other."""
    with anyio.fail_after(patient(30)):
        while not all(stated := _stated(folder)):  # noqa: ASYNC110  # other processes
            await anyio.sleep(0.01)
    return [int(pid) for pid in stated]


def _stated(folder: Path) -> list[str]:
    files = [folder / f"pid-{rank}" for rank in (0, 1)]
    return [file.read_text() if file.exists() else "" for file in files]


@pytest.mark.full
async def test_lost_learner_can_be_restarted(tmp_path: Path) -> None:
    async with kept(tmp_path) as learner:
        old = await both_run(tmp_path)
        with pytest.raises(LearnerLost, match="rank 0 ended with exit status 9"):
            await learner.ask(played("die"), timeout_s=30)
        await learner.restart()
        assert all(map(is_gone, old)), "rank 1 is ended, too"
        assert (tmp_path / "logs" / "learner-0.log.previous").exists()
        assert (await learner.ask(played("step"), timeout_s=30)).pid not in old
        assert learner.num_starts == 2
        forget(tmp_path)
        await learner.restart()
        new = await both_run(tmp_path)
    assert all(map(is_gone, new))


async def test_requests_wait_for_a_learner_that_is_starting(tmp_path: Path) -> None:
    async with kept(tmp_path).starting() as learner:
        assert learner.num_starts == 0, "the block runs first"
        answer = await learner.ask(played("step"), timeout_s=50)
        pids = await both_run(tmp_path)
        assert answer.pid == pids[0]
    assert all(map(is_gone, pids))


async def test_start_that_fails_ends_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learner = kept(tmp_path)
    monkeypatch.setattr(learner_module, "_COMMAND", (sys.executable, "-c", "raise SystemExit(7)"))
    with anyio.fail_after(patient(50)), pytest.raises(LearnerLost, match="exit status 7"):
        async with learner.starting():
            await anyio.sleep_forever()


async def test_unneeded_learner_stops_starting(tmp_path: Path) -> None:
    learner = kept(tmp_path)
    with anyio.fail_after(patient(50)):
        async with learner.starting():
            pids = await both_run(tmp_path)
    assert all(map(is_gone, pids))


async def test_requests_wait_while_a_hanging_learner_is_restarted(tmp_path: Path) -> None:
    async with kept(tmp_path) as learner:
        old = await both_run(tmp_path)
        with pytest.raises(LearnerLost, match="hang: no response within"):
            await learner.ask(played("hang"), timeout_s=0.1)
        answers: list[int] = []

        async def ask() -> None:
            answers.append((await learner.ask(played("step"), timeout_s=50)).pid)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(learner.restart)
            await anyio.wait_all_tasks_blocked()
            tasks.start_soon(ask)
        assert answers[0] not in old


@pytest.mark.full
async def test_lost_returns_when_a_rank_dies_between_requests(tmp_path: Path) -> None:
    """This includes ranks that take no requests, but not deaths caused by a restart."""
    reported: list[str] = []
    async with kept(tmp_path) as learner:

        async def listen() -> None:
            reported.append(await learner.wait_lost())

        with anyio.fail_after(patient(50)):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(listen)
                for _ in range(2):
                    await both_run(tmp_path)
                    forget(tmp_path)
                    await learner.restart()
                assert reported == []
                os.kill((await both_run(tmp_path))[1], signal.SIGKILL)
        assert "rank 1 ended with exit status 137" in reported[0]
        with pytest.raises(LearnerLost, match="rank 1 ended"):
            await learner.ask(played("hang"), timeout_s=60)


async def test_learner_that_ended_itself_is_not_lost(tmp_path: Path) -> None:
    async with kept(tmp_path) as learner:
        with pytest.raises(LearnerEnded, match="end: no finite gradient\nThe logs in"):
            await learner.ask(played("end"), timeout_s=30)
    async with ranks(tmp_path) as (second, processes):
        with pytest.raises(LearnerEnded):
            await processes.while_alive(partial(second.ask, played("end"), timeout_s=30))


@pytest.mark.full
async def test_restart_that_fails_can_be_tried_again(tmp_path: Path) -> None:
    bad = tmp_path / "bad"
    async with kept(tmp_path, dies_with=str(bad)) as learner:
        bad.touch()
        with pytest.raises(LearnerLost, match="exit status 4"):
            await learner.restart()
        with pytest.raises(LearnerLost):
            await learner.ask(played("step"), timeout_s=30)
        bad.unlink()
        await learner.restart()
        assert await learner.ask(played("step"), timeout_s=30)


async def test_restart_that_is_cancelled_leaves_nothing(tmp_path: Path) -> None:
    async with kept(tmp_path, late_after=str(tmp_path / "late")) as learner:
        (tmp_path / "late").touch()
        forget(tmp_path)
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(learner.restart)
                new = await both_run(tmp_path)
                scope.cancel()
        assert all(map(is_gone, new))
        with pytest.raises(LearnerLost):
            await learner.ask(played("step"), timeout_s=30)
