"""The choice of the backend: engines that are missing, slow, silent or broken."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiodocker
import aiohttp
import anyio
import pytest
from aiohttp import web
from aiohttp.client_reqrep import ConnectionKey

from agentloop.sandbox import Pool, PoolSettings, SandboxUnavailable
from agentloop.sandbox.container import ContainerEngine, EngineInfo, create_container, host_config
from agentloop.sandbox.engine import _unavailable, connect, local_engine
from agentloop.sandbox.errors import NoEngine

pytestmark = pytest.mark.timeout(60)  # real workers are started


class FakeEngine:
    """A fake engine that answers /version once it is told to, and everything else with 500."""

    def __init__(self, folder: str) -> None:
        self.path = str(Path(folder, "docker.sock"))
        self.answers = anyio.Event()
        self.num_asked = 0

    async def handle(self, request: web.BaseRequest) -> web.Response:
        if not request.path.endswith("/version"):
            stated, kind = b'{"message": "the disk is full"}', {"Content-Type": "application/json"}
            return web.Response(body=stated, status=500, headers=kind)
        self.num_asked += 1
        await self.answers.wait()
        return web.json_response({"ApiVersion": "1.41"})


@pytest.fixture
async def engine(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeEngine]:
    """Run a fake local engine, silent at first, with short timeouts."""
    monkeypatch.setattr("agentloop.sandbox.engine.ANSWER_TIMEOUT_S", 0.05)
    with tempfile.TemporaryDirectory() as folder:  # not pytest's: a socket's path must be short
        async with serving(FakeEngine(folder)) as fake:
            be_local(monkeypatch, fake.path)
            yield fake


@asynccontextmanager
async def serving(fake: FakeEngine) -> AsyncIterator[FakeEngine]:
    runner = web.ServerRunner(web.Server(fake.handle), shutdown_timeout=0.1)
    await runner.setup()
    await web.UnixSite(runner, fake.path).start()
    try:
        yield fake
    finally:
        fake.answers.set()
        await runner.cleanup()


def be_local(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    for module in ("engine", "container"):
        monkeypatch.setattr(f"agentloop.sandbox.{module}.local_engine", lambda: f"unix://{path}")


async def test_slow_engine_is_waited_for(engine: FakeEngine) -> None:
    reported: list[str] = []

    def tell(line: str) -> None:
        reported.append(line)
        if len(reported) == 2:
            engine.answers.set()

    async with connect(timeout_s=20, on_progress=tell) as docker:
        assert (await docker.version())["ApiVersion"] == "1.41"
    assert engine.num_asked >= 3  # also a request that is lost is made again
    assert "has not answered" in reported[0]
    assert "at most 20 s" in reported[0]


async def test_silent_engine_is_given_up_by_a_setting(engine: FakeEngine) -> None:
    with pytest.raises(SandboxUnavailable, match=r"not answered for 0\.2 s.*engine_timeout_s"):
        async with connect(timeout_s=0.2):
            pass


@pytest.mark.parametrize("case", ["answers", "is silent"])
async def test_engine_that_listens_is_never_replaced(engine: FakeEngine, case: str) -> None:
    if case == "answers":
        engine.answers.set()  # and then fails
    with pytest.raises(SandboxUnavailable) as caught:
        async with Pool(PoolSettings(workers=1, preload=[], engine_timeout_s=0.2)):
            pass
    assert not isinstance(caught.value, NoEngine)
    assert ("failed: the disk is full" in str(caught.value)) == (case == "answers")


@contextmanager
def as_ordinary_user() -> Iterator[None]:
    """Act as a user to whom permissions apply."""
    local = os.geteuid()
    if local == 0:
        os.seteuid(23_456)  # nobody has it
    try:
        yield
    finally:
        os.seteuid(local)


async def test_engine_that_this_user_may_not_use_is_never_replaced(engine: FakeEngine) -> None:
    engine.answers.set()
    with pytest.raises(SandboxUnavailable, match="failed"):  # import whatever a pool needs
        async with Pool(PoolSettings(workers=1, preload=[])):
            pass
    os.chmod(Path(engine.path).parent, 0o755)
    os.chmod(engine.path, 0)
    reported: list[str] = []
    with as_ordinary_user(), pytest.raises(SandboxUnavailable) as caught:
        async with Pool(PoolSettings(workers=1, preload=[]), on_progress=reported.append):
            pass
    assert not isinstance(caught.value, NoEngine)
    assert f"this user may not use the Docker Engine at unix://{engine.path}" in str(caught.value)
    assert "set backend=process" in str(caught.value)
    assert not reported


def test_runtime_directory_of_another_user_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with tempfile.TemporaryDirectory() as folder:
        closed = Path(folder, "closed")
        closed.mkdir(0)
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(closed))
        with as_ordinary_user():
            assert local_engine() == "unix:///var/run/docker.sock"


@pytest.mark.parametrize("remaining", ["nothing", "a socket of a dead engine"])
async def test_local_processes_where_no_engine_listens(
    monkeypatch: pytest.MonkeyPatch, remaining: str, capfd: pytest.CaptureFixture[str]
) -> None:
    reported: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/docker.sock"
        if remaining != "nothing":
            async with await anyio.create_unix_listener(path):
                pass
        be_local(monkeypatch, path)
        async with Pool(PoolSettings(workers=1, preload=[]), on_progress=reported.append) as pool:
            assert pool.stats()["backend"] == "process"
        assert len(reported) == 1
        assert reported[0].startswith("Calls run in local processes: no Docker Engine responds at")
        assert not set(reported[0]) & set("[]{}")
        for named in ({"backend": "docker"}, {"image": "mine"}):
            with pytest.raises(NoEngine):
                async with Pool(PoolSettings.model_validate(named)):
                    pass
        monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
        with pytest.raises(NoEngine, match=r"docker.sock \(DOCKER_HOST\): .* backend=process"):
            async with Pool():
                pass
    assert capfd.readouterr().err == ""


def wrapped(error: aiohttp.ClientConnectionError) -> aiodocker.DockerError:
    """Wrap an error as aiodocker does."""
    try:
        try:
            raise error
        except aiohttp.ClientConnectionError as inner:
            raise aiodocker.DockerError(900, f"Cannot connect to Docker Engine via x [{inner}]")  # noqa: B904
    except aiodocker.DockerError as outer:
        return outer


KEY = ConnectionKey("box", 2376, True, True, None, None, None)


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (errno.ENOENT, NoEngine, "there is no such socket"),
        (errno.ECONNREFUSED, NoEngine, "nothing listens there"),
        (errno.EACCES, SandboxUnavailable, "group docker (and log in again), or choose"),
        (errno.EHOSTUNREACH, SandboxUnavailable, "No route to host; is it installed"),
    ],
)
def test_connection_errors_are_explained_in_words(
    code: int, kind: type[Exception], says: str
) -> None:
    inner = aiohttp.ClientConnectorError(KEY, OSError(code, os.strerror(code)))
    error = _unavailable("tcp://box:2376", wrapped(inner))
    assert type(error) is kind
    assert says in str(error)
    assert not {"[900]", "ssl:default", "box ssl"} & set(str(error).split())


async def test_name_of_an_engine_is_checked() -> None:
    with pytest.raises(SandboxUnavailable, match=r"an engine must be unix:///path or tcp"):
        async with connect("ftp://box"):
            pass


class RecordingDocker:
    """An engine that keeps the configuration of the container it is asked for."""

    def __init__(self) -> None:
        self.containers = self
        self.host_config: dict[str, Any] = {}

    async def create(self, config: dict[str, Any], name: str) -> RecordingDocker:
        self.host_config = config["HostConfig"]
        return self

    def container(self, name: str) -> RecordingDocker:
        return self

    async def delete(self, **options: Any) -> None: ...


@pytest.mark.parametrize(("has_quota", "missing"), [(True, []), (False, ["processor time"])])
async def test_engine_without_a_limit_is_not_asked_for_it(
    has_quota: bool, missing: list[str]
) -> None:
    docker: Any = RecordingDocker()
    info: EngineInfo = {"SecurityOptions": None, "MemoryLimit": True, "CpuCfsQuota": has_quota}
    engine = ContainerEngine(docker, local=True, image="image", info=info)
    assert engine.missing_limits == missing
    config = {"HostConfig": host_config(PoolSettings(), None, uid=1)}
    async with create_container(engine, config, "1", "test"):
        assert ("NanoCpus" in docker.host_config) is has_quota
    assert docker.host_config["PidsLimit"] > 0
