"""Weights by a process group, with a played learner and fakes for servers: who is asked for what,
and who is left out."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentloop.errors import ServerError, SettingsError
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.weight_updates import WeightsGroup
from agentloop.training.learner_client.client import LearnerError, LearnerRefused
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served, SyncResult, publisher
from tests.agentloop.training.fake_learner import FakeLearner
from tests.support import FakeSGLang

SETTINGS = WeightsSettings(transport="broadcast")
NAMES = ["embed", "norm"]


@pytest.fixture(autouse=True)
def short_group_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.training.weight_sync.process_group.GROUP_TIMEOUT_S", 1.0)


class PlayedLearner(FakeLearner):
    """A fake learner that sends two buckets of one tensor each. `fails` holds errors by
    operation."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.joined: list[int] = []  # members of each group
        self.fails: dict[str, Exception] = {}
        self.hangs = ""
        self.sums = {"embed": ["1"], "norm": ["2"], "fused": ["3"]}
        self.num_updates = 4
        self.layouts: list[dict[str, Any] | None] = []  # that checksums were asked for

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.asked.append(op)
        if op in self.fails:
            raise self.fails[op]
        if op == self.hangs:
            await anyio.sleep_forever()
        if op == "layout":
            layout = [{"names": [n], "dtypes": ["float32"], "shapes": [[2, 3]]} for n in NAMES]
            await anyio.Path(arguments["out"]).write_text(json.dumps(layout))
            model = {"model_type": "qwen3", "num_key_value_heads": 2, "dtype": "bfloat16"}
            return {"num_updates": self.num_updates, "backend": "gloo", "model": model}
        if op == "open":
            if arguments["num_updates"] != self.num_updates:
                raise LearnerRefused("open: these are gone")
            return {"port": 1234}
        if op == "join":
            self.joined.append(arguments["world_size"])
        if op == "send":
            self.layouts.append(arguments["layout"])
            name = NAMES[arguments["bucket"]]
            return {"sums": {name: self.sums[name]} if arguments["layout"] else {}}
        return {}


class Parts:
    def __init__(self, folder: Path, fakes: list[FakeSGLang], router: Router) -> None:
        self.folder, self.fakes, self.router = folder, fakes, router
        self.learner = PlayedLearner()
        self.settings = SETTINGS

    async def sync(self, version: str = "1", timeout_s: float = 15) -> SyncResult:
        way = publisher(self.settings, self.learner, self.folder)
        published = await way.publish(version, timeout_s=15)
        return await Served(self.router).sync(published, timeout_s=timeout_s)

    def states(self) -> list[str]:
        return [view.state.value for view in self.router.view()]

    def nobody_waits(self) -> bool:
        """Return whether no server is paused, in a group, or in the middle of an update."""
        return not any(fake.paused or fake.group or fake.updating for fake in self.fakes)


@asynccontextmanager
async def parts(folder: Path, *fakes: FakeSGLang) -> AsyncIterator[Parts]:
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake.serving())
        session = await stack.enter_async_context(http_session())
        servers = [SGLangServer(fake.url, session) for fake in fakes]
        settings = RouterSettings(probe_interval_s=1000)
        router = await stack.enter_async_context(Router.open(servers, settings))
        yield Parts(folder, list(fakes), router)


def fakes(number: int, **fields: Any) -> list[FakeSGLang]:
    return [FakeSGLang([5], **fields) for _ in range(number)]


async def test_all_servers_receive_all_buckets_at_once(tmp_path: Path) -> None:
    async with parts(tmp_path, *fakes(2)) as near:
        got: list[list[str]] = []

        async def note(names: list[str]) -> None:
            got.append(names)

        near.fakes[0].at_bucket = note
        came = await near.sync()
        assert (came.failed, came.checksum, near.states()) == ({}, "sum", ["healthy"] * 2)
        assert near.learner.asked == ["layout", "open", "join", "send", "send", "leave"]
        assert near.learner.joined == [3]
        assert got == [["embed"], ["norm"]]
        assert [(fake.pauses, fake.flushes) for fake in near.fakes] == [(["retract"], [True])] * 2
        assert [fake.version for fake in near.fakes] == ["1", "1"]
        assert near.nobody_waits()


@pytest.mark.parametrize("refused", NAMES)
async def test_no_request_runs_on_partly_new_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """The group fails and is retried; in between, servers continue without the turns in
    progress."""
    broken: list[str] = []

    def break_streams(self: SGLangServer, why: str) -> None:
        assert all(fake.paused for fake in near.fakes if fake.url == self.url)
        broken.append(self.url)

    async with parts(tmp_path, *fakes(2)) as near:

        async def refuse(names: list[str]) -> None:
            if names == [refused]:
                near.fakes[0].at_bucket = None
                raise ValueError("no room")

        near.fakes[0].at_bucket = refuse
        with monkeypatch.context() as patched:
            patched.setattr(SGLangServer, "break_streams", break_streams)
            assert list((await near.sync()).failed) == [near.fakes[0].url]
        assert sorted(broken) == sorted(fake.url for fake in near.fakes)
        assert near.nobody_waits()


@pytest.mark.parametrize("hangs", ["", "send"])
async def test_server_that_refuses_a_bucket_is_left_out(tmp_path: Path, hangs: str) -> None:
    """This holds even while the learner waits for the server: its request is cancelled, and it
    leaves."""
    async with parts(tmp_path, *fakes(3)) as near:

        async def refuse(names: list[str]) -> None:
            near.learner.hangs = ""
            raise ValueError("no room")

        near.fakes[1].at_bucket = refuse
        near.learner.hangs = hangs
        came = await near.sync()
        assert list(came.failed) == [near.fakes[1].url]
        assert "no room" in came.failed[near.fakes[1].url]
        assert near.learner.joined == [4, 3]
        assert near.states() == ["healthy", "stale", "healthy"]
        assert near.nobody_waits()
        # It is given a group of its own.
        near.fakes[1].at_bucket = None
        assert await Served(near.router).sync_stale(came, timeout_s=15)
        assert near.learner.joined == [4, 3, 2]
        assert near.states() == ["healthy"] * 3


async def test_server_stuck_in_a_broken_group_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The learner notices first, by its own deadline."""
    leave = SGLangServer.leave_group

    async with parts(tmp_path, *fakes(2)) as near:

        async def leave_group(self: SGLangServer, group: WeightsGroup) -> None:
            near.learner.fails.clear()
            if self.url == near.fakes[0].url:
                raise ServerError("it hangs")
            await leave(self, group)

        monkeypatch.setattr(SGLangServer, "leave_group", leave_group)
        near.learner.fails["send"] = LearnerRefused("send: it broke")
        came = await near.sync()
        assert came.failed == {near.fakes[0].url: "it hangs"}
        assert near.learner.joined == [3, 2]
        assert near.states() == ["stale", "healthy"]


async def test_sync_that_fails_without_a_culprit_is_not_repeated(tmp_path: Path) -> None:
    async with parts(tmp_path, *fakes(2)) as near:
        near.learner.fails["join"] = LearnerRefused("join: nobody came")
        with pytest.raises(ServerError, match="nobody came"):
            await near.sync()
        assert near.learner.asked.count("join") == 1
        assert near.learner.asked[-1] == "leave"
        assert near.states() == ["stale", "stale"]
        assert near.nobody_waits()


async def test_dead_learner_is_an_error_without_waiting_servers(tmp_path: Path) -> None:
    async with parts(tmp_path, *fakes(2)) as near:
        near.learner.fails["send"] = LearnerError("send: rank 0 ended")
        near.learner.fails["leave"] = LearnerError("leave: rank 0 ended")
        with pytest.raises(LearnerError, match="rank 0 ended"):
            await near.sync()
        assert near.nobody_waits()


async def test_server_that_takes_too_long_is_stale(tmp_path: Path) -> None:
    async with parts(tmp_path, *fakes(1)) as near:

        async def hang(names: list[str]) -> None:
            await anyio.sleep_forever()

        near.fakes[0].at_bucket = hang
        with pytest.raises(ServerError, match=r"timed out after 0\.2 s"):
            await near.sync(timeout_s=0.2)
        assert near.states() == ["stale"]
        assert near.nobody_waits()


async def test_received_weights_are_compared_with_those_sent(tmp_path: Path) -> None:
    """Tensors without expected checksums are compared between servers."""
    async with parts(tmp_path, *fakes(4, sums={"norm": "2", "other": "9"})) as near:
        near.fakes[0].sums = {"norm": "wrong"}
        near.fakes[1].sums = {"norm": "2", "other": "8"}
        came = await near.sync()
        assert came.failed == {
            near.fakes[0].url: "its norm differs from the learner's",
            near.fakes[1].url: "its weights differ from the others': sum",
        }
        assert near.states() == ["stale", "stale", "healthy", "healthy"]
        assert came.num_verified == 0, "not all of it"
        layout = {"device": "cpu", "dtype": "float32", "num_ranks": 1, "num_kv_heads": 2}
        assert near.learner.layouts == [layout] * 2
        assert near.nobody_waits()


@pytest.mark.parametrize(
    ("info", "layout"),
    [
        ({"device": "cuda", "dtype": "auto", "tp_size": 2}, ("cuda", "bfloat16", 2)),
        ({"device": "cuda", "dtype": "half"}, ("cuda", "float16", 1)),
        ({"dtype": "bfloat16"}, None),  # packed, on some CPUs
        ({"version": "0.6.0"}, None),
    ],
)
async def test_single_server_is_compared_if_its_checksum_is_known(
    tmp_path: Path, info: dict[str, Any], layout: tuple[str, str, int] | None
) -> None:
    reported = {"norm": "2", "embed": "1"}
    async with parts(tmp_path, *fakes(1, sums=reported, info=info)) as near:
        near.learner.sums = {name: [first] * 2 for name, first in reported.items()}
        came = await near.sync()
        assert came.num_verified == (layout is not None)
        requests = near.learner.layouts[0]
        assert layout == (requests and tuple(requests.values())[:3])
        near.settings = SETTINGS.model_copy(update={"verify": False})
        assert (await near.sync("2")).num_verified == 0
        assert near.learner.layouts[-1] is None


async def test_weights_that_the_learner_no_longer_has_are_not_given(tmp_path: Path) -> None:
    async with parts(tmp_path, *fakes(1)) as near:
        came = await near.sync()
        near.router.replicas.require_weights("0")
        near.router.replicas.require_weights("1", verified=True)
        near.learner.num_updates += 1
        checksums, failed = await came.published.sync_to(near.router.replicas.servers, timeout_s=15)
        assert (checksums, list(failed.values())) == ({}, ["open: these are gone"])
        assert near.nobody_waits()


async def test_servers_elsewhere_need_an_address(tmp_path: Path) -> None:
    async with parts(tmp_path, *fakes(1)) as near:
        near.fakes[0].url = near.fakes[0].url.replace("127.0.0.1", "0.0.0.0")
        async with http_session() as session:
            far = SGLangServer(near.fakes[0].url, session)
            way = publisher(SETTINGS, near.learner, tmp_path)
            published = await way.publish("1", timeout_s=15)
            with pytest.raises(SettingsError, match=r"weights\.address"):
                await published.sync_to([far], timeout_s=15)
            assert "open" not in near.learner.asked


async def test_data_parallel_ranks_take_weights_by_disk_alone(tmp_path: Path) -> None:
    async with parts(tmp_path, *fakes(1, dp_size=2)) as near:
        with pytest.raises(ServerError, match=r"weights\.transport"):
            await near.sync()
