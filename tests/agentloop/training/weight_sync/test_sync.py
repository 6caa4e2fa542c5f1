"""Weight sync: a server that cannot load new weights serves no requests."""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from aiohttp import web
from safetensors.numpy import save

from agentloop.errors import ServerError
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served, publisher
from agentloop.trajectory import Trajectory, Turn, VersionSpan
from tests.agentloop.training.fake_learner import FakeLearner
from tests.patience import patient
from tests.support import FakeSGLang, Fault, eventually

ANSWER = [5, 6, 99]
LATE_S = 4.0  # for a server that never answers; the others have to, within it
ONE, TWO = (PublishedFolder(version, Path("weights") / version) for version in ("1", "2"))


@asynccontextmanager
async def routed(*fakes: FakeSGLang, probe_interval_s: float = 1000.0) -> AsyncIterator[Router]:
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake.serving())
        session = await stack.enter_async_context(http_session())
        servers = [SGLangServer(fake.url, session) for fake in fakes]
        # As a rule no probe comes in between: what is seen is the hand-over's own doing.
        settings = RouterSettings(probe_interval_s=probe_interval_s)
        yield await stack.enter_async_context(Router.open(servers, settings))


def states(router: Router) -> list[str]:
    return [view.state.value for view in router.view()]


async def test_all_servers_serve_the_new_weights_at_once() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes) as router:
        came = await Served(router).sync(ONE, timeout_s=15)
        assert came.loaded == sorted(fake.url for fake in fakes)
        assert (came.failed, came.checksum, came.version) == ({}, "sum", "1")
        assert states(router) == ["healthy", "healthy"]
    assert [(fake.version, fake.paused) for fake in fakes] == [("1", False)] * 2


@pytest.mark.parametrize("weights", [None, "", "others"])
@pytest.mark.full
async def test_server_that_cannot_load_the_weights_is_stale(weights: str | None) -> None:
    """The weights cannot be read, take too long, or differ from the other servers'."""
    fakes = [FakeSGLang(ANSWER, weights=weights), FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes) as router:
        came = await Served(router).sync(ONE, timeout_s=LATE_S)
        assert list(came.failed) == [fakes[0].url]
        assert states(router) == ["stale", "healthy", "healthy"]
        assert not any(fake.paused for fake in fakes)
        for fake in fakes:
            fake.weights = "sum"
        assert not (await Served(router).sync(TWO, timeout_s=15)).failed
        assert states(router) == ["healthy"] * 3


async def turn(router: Router, moved: list[str], received: list[int], key: str = "key") -> None:
    await router.generate(
        Generation(key, key, [1, 2, 3], Sampling(), len(ANSWER), (99,)),
        vocab_size=100,
        on_chunk=lambda chunk: received.extend(chunk.ids),
        on_placed=lambda *_: None,
        on_moved=lambda url, _: moved.append(url),
    )


@pytest.mark.parametrize("weights", [None, "", "others"])
@pytest.mark.full
async def test_turns_on_a_server_with_unknown_weights_move_elsewhere(weights: str | None) -> None:
    """Turns resume after their last token of known weights, before the server continues.
    Breaking them all does not affect the server's health."""
    moved: list[str] = []
    received: list[list[int]] = [[] for _ in range(4)]
    still_open: list[int] = []  # how many had, when the server went on

    class Watched(FakeSGLang):
        async def _continue(self, request: web.Request) -> web.Response:
            still_open.append(len(moved))
            return await super()._continue(request)

    first = Watched(ANSWER, weights=weights, faults=deque([Fault("silence", after=2)] * 4))
    remaining = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(first) as router, AsyncExitStack() as stack:
        session = await stack.enter_async_context(http_session())
        with anyio.fail_after(patient(15)):
            async with anyio.create_task_group() as tasks:
                for number, ids in enumerate(received):
                    tasks.start_soon(turn, router, moved, ids, str(number))
                await eventually(lambda: all(len(ids) == 2 for ids in received))
                for fake in remaining:
                    await stack.enter_async_context(fake.serving())
                    await router.replicas.add(SGLangServer(fake.url, session))
                came = await Served(router).sync(ONE, timeout_s=LATE_S)
                assert list(came.failed) == [first.url]
        assert states(router) == ["stale", "healthy", "healthy"]
    assert received == [ANSWER] * 4
    assert moved == [first.url] * 4
    # That its weights are not the others' is known only once all have loaded.
    assert still_open == [0 if weights == "others" else 4]


async def test_sync_without_servers_is_an_error() -> None:
    async with routed(FakeSGLang(ANSWER, weights=None)) as router:
        with pytest.raises(ServerError, match="no server has version 1"):
            await Served(router).sync(ONE, timeout_s=15)
        assert states(router) == ["stale"]


async def test_version_that_a_server_reports_is_not_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server reports version 1 but has other weights; probes do not change that."""
    probes: list[str] = []
    ask = SGLangServer.weight_version

    async def weight_version(self: SGLangServer) -> str:
        probes.append(self.url)
        return await ask(self)

    monkeypatch.setattr(SGLangServer, "weight_version", weight_version)
    fakes = [FakeSGLang(ANSWER, weights="others"), FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes, probe_interval_s=0.01) as router:
        came = await Served(router).sync(ONE, timeout_s=15)
        assert fakes[0].version == "1"
        probes.clear()
        await eventually(lambda: probes.count(fakes[0].url) > 3)
        assert states(router) == ["stale", "healthy", "healthy"]
        fakes[0].weights = "sum"
        await Served(router).sync_stale(came, timeout_s=15)
        assert states(router) == ["healthy"] * 3
        probes.clear()
        await eventually(lambda: probes.count(fakes[0].url) > 3)
        assert states(router) == ["healthy"] * 3


async def test_two_servers_that_differ_are_no_majority() -> None:
    async with routed(FakeSGLang(ANSWER), FakeSGLang(ANSWER, weights="others")) as router:
        with pytest.raises(ServerError, match=r"no server has version 1: .*unknown which"):
            await Served(router).sync(ONE, timeout_s=15)
        assert states(router) == ["stale", "stale"]


async def test_restarted_server_gets_the_weights() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with routed(*fakes, probe_interval_s=0.01) as router:
        came = await Served(router).sync(ONE, timeout_s=15)
        fakes[0].version = "default"
        await eventually(lambda: states(router) == ["stale", "healthy"])
        fakes[0].weights = None
        assert not await Served(router).sync_stale(came, timeout_s=15)
        assert states(router) == ["stale", "healthy"]
        fakes[0].weights = "sum"
        assert await Served(router).sync_stale(came, timeout_s=15)
        assert states(router) == ["healthy", "healthy"]
        assert fakes[0].version == "1"


async def test_sync_waits_for_a_server_that_is_restarting() -> None:
    fake = FakeSGLang(ANSWER)
    async with routed(fake, probe_interval_s=0.01) as router:
        fake.ready = False
        router.replicas.mark_exited(fake.url, "killed")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: Served(router).sync(ONE, timeout_s=15))
            await eventually(lambda: not router.replicas.servers)
            fake.ready = True
        assert states(router) == ["healthy"]


async def test_server_that_did_not_confirm_its_pause_goes_on() -> None:
    class Silent(FakeSGLang):
        async def _pause(self, request: web.Request) -> web.Response:
            self.paused = True
            return web.Response(status=500)

    fake = Silent(ANSWER)
    async with routed(fake) as router:
        with pytest.raises(ServerError, match="no server has version 1"):
            await Served(router).sync(ONE, timeout_s=15)
    assert not fake.paused


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_only_the_last_version_is_kept_on_disk(tmp_path: Path, elsewhere: bool) -> None:
    """This holds in the run's own folder and in one that several runs share."""

    class Played(FakeLearner):
        async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
            assert op == "publish"
            await anyio.Path(arguments["folder"]).mkdir(parents=True)
            return {}

    run, shared = tmp_path / "run", tmp_path / "shared"
    await anyio.Path(shared / "run-2" / "1").mkdir(parents=True)
    second = tmp_path / "elsewhere" / "run"  # another run of the same name
    settings = WeightsSettings(folder=shared if elsewhere else None)
    remaining = publisher(settings, Played(), second)
    kept = await remaining.publish("1", timeout_s=15)
    assert isinstance(kept, PublishedFolder)
    way = publisher(settings, Played(), run)
    fake = FakeSGLang(ANSWER)
    async with routed(fake) as router:
        for version in ("0", "1", "2"):
            published = await way.publish(version, timeout_s=15)
            await Served(router).sync(published, timeout_s=15)
            await way.tidy()
    assert isinstance(published, PublishedFolder)
    mine = published.folder.parent
    assert mine.is_relative_to(shared) if elsewhere else mine == run / "weights"
    assert [path.name for path in mine.iterdir()] == ["2"]
    await way.close()
    assert mine.exists() != elsewhere
    assert kept.folder.exists()
    assert (shared / "run-2" / "1").exists()


# --- held against what the learner has published --------------------------------------------------

TENSORS = {
    "model.embed_tokens.weight": np.arange(12, dtype=np.float32).reshape(6, 2),
    "model.norm.weight": np.full(2, 0.5, np.float32),
}


def publish(folder: Path, tensors: Mapping[str, Any] = TENSORS) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    data = save(dict(tensors))
    (folder / "model.safetensors").write_bytes(data)
    (folder / "config.json").write_text('{"model_type": "qwen3", "num_attention_heads": 1}')
    sha256 = {"model.safetensors": hashlib.sha256(data).hexdigest()}
    (folder / "published.json").write_text(json.dumps({"version": "1", "sha256": sha256}))


def sums(tensors: Mapping[str, Any] = TENSORS) -> dict[str, str]:
    """Return the checksums of a server with these weights; its vocabulary is padded with rows
    of zeros."""
    rows = np.zeros((64, 2), np.float32)
    rows[:6] = tensors["model.embed_tokens.weight"]
    reported = {
        "model.embed_tokens.weight": rows,
        "model.norm.weight": tensors["model.norm.weight"],
    }
    return {
        name: hashlib.sha256(single.tobytes()).hexdigest()[:16] for name, single in reported.items()
    }


WRONG = {**sums(), "model.norm.weight": "0" * 16}


async def test_single_server_has_what_the_learner_has(tmp_path: Path) -> None:
    """Only a comparison with the learner's tensors can prove that."""
    publish(tmp_path)
    fake = FakeSGLang(ANSWER, sums=sums())
    async with routed(fake) as router:
        served, published = Served(router), PublishedFolder("1", tmp_path)
        assert (await served.sync(published, timeout_s=15)).num_verified == 1
        fake.sums = WRONG
        with pytest.raises(ServerError, match=r"model\.norm\.weight differs from the learner's"):
            await served.sync(published, timeout_s=15)
        assert states(router) == ["stale"]
        blind = replace(published, verify=False)
        assert (await served.sync(blind, timeout_s=15)).num_verified == 0


async def test_most_servers_may_be_wrong(tmp_path: Path) -> None:
    """Servers that agree with each other may all be wrong."""
    publish(tmp_path)
    fakes = [FakeSGLang(ANSWER, weights="others", sums=WRONG) for _ in range(2)]
    fakes.append(FakeSGLang(ANSWER, sums=sums()))
    async with routed(*fakes) as router:
        came = await Served(router).sync(PublishedFolder("1", tmp_path), timeout_s=15)
        assert (came.loaded, came.num_verified) == ([fakes[2].url], 1)
        assert states(router) == ["stale", "stale", "healthy"]


async def test_tensors_without_expected_checksums_are_compared_among_servers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """This is logged once per server, since it proves nothing for a single one."""
    publish(tmp_path)
    fakes = [FakeSGLang(ANSWER, sums=WRONG, info={"quantization": "fp8"}) for _ in range(2)]
    async with routed(*fakes) as router:
        served = Served(router)
        for _ in range(2):
            came = await served.sync(PublishedFolder("1", tmp_path), timeout_s=15)
            assert (len(came.loaded), came.num_verified) == (2, 0)
        fakes[0].weights = "others"
        with pytest.raises(ServerError, match="unknown which"):
            await served.sync(PublishedFolder("1", tmp_path), timeout_s=15)
    stated = [
        single.message
        for single in caplog.records
        if "only compared with other servers'" in single.message
    ]
    assert len(stated) == 2
    assert all("quantization = fp8" in single for single in stated)


async def test_files_changed_after_publication_are_not_served(tmp_path: Path) -> None:
    """This holds although all servers have read the same files."""
    publish(tmp_path)
    remaining = {name: single + 1 for name, single in TENSORS.items()}
    (tmp_path / "model.safetensors").write_bytes(save(remaining))
    fakes = [FakeSGLang(ANSWER, sums=sums(remaining)) for _ in range(2)]
    async with routed(*fakes) as router:
        with pytest.raises(ServerError, match=r"model\.safetensors differs from what the learner"):
            await Served(router).sync(PublishedFolder("1", tmp_path), timeout_s=15)
        assert states(router) == ["stale", "stale"]


def sampled(begun_s: float, servers: list[str], *versions: str) -> Trajectory:
    """Return a trajectory whose turn started at that time."""
    spans = [VersionSpan(single, index, index + 1) for index, single in enumerate(versions)]
    turns = [Turn(started_s=1.0), Turn(versions=spans, servers=servers, started_s=2.0)]
    return Trajectory("t", [1], turns, created_unix_s=begun_s - 2)


@pytest.mark.parametrize("case", ["tie", "single", "outvoted"])
async def test_tokens_sampled_by_mislabelled_weights_are_distrusted(
    tmp_path: Path, case: str
) -> None:
    """This includes a sync that failed and was retried; turns that start afterwards are trusted."""
    publish(tmp_path)
    single = FakeSGLang(ANSWER, weights="others", sums=WRONG if case == "single" else {})
    more = {"tie": 1, "single": 0, "outvoted": 2}[case]
    remaining = [FakeSGLang(ANSWER) for _ in range(more)]
    published = PublishedFolder("1", tmp_path)
    async with routed(single, *remaining) as router:
        served = Served(router)
        before = time.time()
        if case == "outvoted":
            came = await served.sync(published, timeout_s=15)
            single.weights = "sum"
            assert await served.sync_stale(came, timeout_s=15)
        else:
            with pytest.raises(ServerError):
                await served.sync(published, timeout_s=15)
            single.weights, single.sums = "sum", sums() if case == "single" else {}
            await served.sync(published, timeout_s=15)
        assert states(router) == ["healthy"] * (1 + more)
        after = time.time()
    assert served.is_tainted(sampled(before, [single.url], "0", "1"))
    assert served.is_tainted(sampled(before, ["elsewhere", single.url], "1"))
    assert not served.is_tainted(sampled(before, [single.url], "0"))
    assert not served.is_tainted(sampled(before, ["elsewhere"], "1"))
    assert not served.is_tainted(sampled(after, [single.url], "1"))
    for fake in remaining:
        assert served.is_tainted(sampled(before, [fake.url], "1")) == (case == "tie")


async def test_wrong_weights_of_a_returning_server_are_distrusted(tmp_path: Path) -> None:
    publish(tmp_path)
    fakes = [FakeSGLang(ANSWER, sums=sums()) for _ in range(2)]
    async with routed(*fakes, probe_interval_s=0.01) as router:
        served = Served(router)
        came = await served.sync(PublishedFolder("1", tmp_path), timeout_s=15)
        fakes[0].version, fakes[0].sums = "default", WRONG
        await eventually(lambda: states(router) == ["stale", "healthy"])
        before = time.time()
        assert not await served.sync_stale(came, timeout_s=15)
        assert served.is_tainted(sampled(before, [fakes[0].url], "1"))
        assert not served.is_tainted(sampled(before, [fakes[1].url], "1"))
