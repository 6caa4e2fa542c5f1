"""Workers on an engine that is reached over TCP with TLS: frames travel over attached streams."""

from __future__ import annotations

import os
import random
import shutil
import socket
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import anyio
import pytest

from agentloop.sandbox import CallStatus, Pool, PoolSettings, SandboxUnavailable
from agentloop.sandbox.engine import connect
from agentloop.sandbox.settings import MAX_KEPT_BYTES, OutputLimits
from tests.integration.private_engine import PrivateEngine, private_engine
from tests.patience import patient
from tests.sandbox.chaos import Tally, kill_an_owner, kill_at_random, run_load
from tests.sandbox.test_pool import endless_before, wait_until

pytestmark = [pytest.mark.anyio, pytest.mark.real, pytest.mark.timeout(300)]

FOREVER = "import time\nwhile True: time.sleep(1)"


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run(["openssl", *arguments], cwd=cwd, check=True, capture_output=True)


def make_certs(folder: Path) -> Path:
    """An authority, the engine's certificate for 127.0.0.1, and the client's."""
    folder.mkdir()
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    ca = ["-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=keyCertSign"]
    openssl(
        "req", "-x509", *key, "-keyout", "ca-key.pem", "-out", "ca.pem", "-days", "2",
        "-subj", "/CN=tests", *ca, cwd=folder,
    )  # fmt: skip
    for name, more in (
        ("server", "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth"),
        ("", "extendedKeyUsage=clientAuth"),
    ):
        prefix = f"{name}-" if name else ""
        (folder / "extra").write_text(more)
        openssl(
            "req", *key, "-keyout", f"{prefix}key.pem", "-out", "request",
            "-subj", f"/CN={name or 'client'}", cwd=folder,
        )  # fmt: skip
        openssl(
            "x509", "-req", "-in", "request", "-CA", "ca.pem", "-CAkey", "ca-key.pem",
            "-CAcreateserial", "-days", "2", "-extfile", "extra", "-out", f"{prefix}cert.pem",
            cwd=folder,
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("openssl") is None:
        pytest.skip("missing: openssl")
    return make_certs(tmp_path_factory.mktemp("tls") / "certs")


@pytest.fixture(scope="module")
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


@pytest.fixture(scope="module")
def url(listener: socket.socket) -> str:
    return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(scope="module")
async def engine(
    certs: Path, listener: socket.socket, anyio_backend: str
) -> AsyncIterator[PrivateEngine]:
    options = [
        "--tlsverify", f"--tlscacert={certs}/ca.pem",
        f"--tlscert={certs}/server-cert.pem", f"--tlskey={certs}/server-key.pem",
    ]  # fmt: skip
    async with private_engine(options, listener) as engine:
        yield engine


@pytest.fixture(scope="module")
def settings(engine: PrivateEngine, certs: Path, url: str) -> PoolSettings:
    return PoolSettings(
        backend="docker", engines=[url], engine_certs=str(certs), workers=2, preload=[],
        timeout_s=20,
    )  # fmt: skip


@pytest.fixture(scope="module")
async def pool(settings: PoolSettings) -> AsyncIterator[Pool]:
    async with Pool(settings) as pool:
        yield pool


async def containers(engine: PrivateEngine) -> set[str]:
    async with connect(engine.url) as docker:
        return {c["Names"][0] for c in await docker.containers.list(all=True)}


async def test_many_calls(pool: Pool) -> None:
    tally = Tally([0] * 300)
    await run_load(pool, 300, tally)
    assert tally.ends == {"right": 300}


async def test_large_jobs_and_outputs(settings: PoolSettings) -> None:
    async with Pool(settings.model_copy(update={"workers": 1})) as pool:
        results = []

        async def one(n: int) -> None:
            code = f"import sys\nx = {'x' * 2_000_000!r}\n"
            code += f"y = sys.stdin.read()\nprint({n}, len(x), len(y))\nprint('z' * 4_000_000)"
            stdin, output = "größe\n" * 400_000, OutputLimits(16 << 20, MAX_KEPT_BYTES)
            result = await pool.run(code, stdin=stdin, timeout_s=60, output=output)
            results.append((n, result))

        async with anyio.create_task_group() as group:
            for n in range(6):
                group.start_soon(one, n)
        assert len(results) == 6
        for n, result in results:
            assert result.ok, (result.status, result.error)
            assert result.stdout == f"{n} 2000000 2400000\n" + "z" * 4_000_000 + "\n"


async def test_flood_and_a_cancelled_call(pool: Pool) -> None:
    before = pool.stats()["lost"]
    flood = await pool.run("import os\nwhile True: os.write(1, b'x' * 10**6)")
    assert flood.status is CallStatus.OUTPUT_LIMIT
    with anyio.move_on_after(0.3):
        await pool.run(FOREVER, timeout_s=600)
    await wait_until(lambda: pool.stats()["busy"] == 0)
    assert pool.stats()["lost"] == before


async def test_session(pool: Pool) -> None:
    async with pool.session() as session:
        await session.run("x = 41")
        assert (await session.run("x + 1")).result == "42"


async def test_worker_outlives_the_time_limit_of_requests(
    settings: PoolSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its stream is one long request, and may rest for as long as nobody calls."""
    monkeypatch.setattr("agentloop.sandbox.engine.REQUEST_TIMEOUT_S", 8.0)  # its start has as long
    async with Pool(settings.model_copy(update={"workers": 1})) as pool, pool.session() as session:
        await session.run("x = 41")
        await anyio.sleep(9)
        assert (await session.run("x + 1")).result == "42"
        assert pool.stats()["lost"] == 0


async def test_standard_streams_of_the_worker_are_closed_to_a_call(pool: Pool) -> None:
    """Where frames travel over them, nobody else may hold them."""
    code = (
        "import os\nfor pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "  for fd in range(10):\n"
        "    for mode in (os.O_RDONLY, os.O_WRONLY):\n"
        "      if int(pid) == os.getpid(): continue\n"
        "      try: os.open(f'/proc/{pid}/fd/{fd}', mode); print(pid, fd)\n"
        "      except OSError: pass\n"
        "print(os.readlink('/proc/self/fd/0'))\n"
        "for fd in range(3, 64):\n"
        "  try: os.fstat(fd); print('open', fd)\n"
        "  except OSError: pass\n"
    )
    assert (await pool.run(code)).stdout == "/dev/null\n"


async def test_lost_container_is_replaced_and_its_call_runs_again(
    settings: PoolSettings, engine: PrivateEngine
) -> None:
    async with Pool(settings.model_copy(update={"workers": 1})) as pool:
        results = []
        code = f"{endless_before(time.time())}\nprint('done')"

        async def call() -> None:
            results.append(await pool.run(code, timeout_s=60))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await wait_until(lambda: pool.stats()["busy"] == 1)
            name = f"agentloop-sandbox-{pool._queue.workers[0].link.worker_id}"
            async with connect(engine.url) as docker:
                await docker.containers.container(name).kill()
        assert (results[0].stdout, results[0].attempt) == ("done\n", 2)
        assert pool.stats()["workers"] == 1


async def test_closed_pool_leaves_no_containers(
    settings: PoolSettings, engine: PrivateEngine, tmp_path: Path
) -> None:
    """Run before the tests that kill workers: the module's pool replaces its own for a while."""
    before = await containers(engine)  # of them, the engine may still be removing some

    async def new() -> set[str]:
        return await containers(engine) - before

    async with Pool(settings) as pool:
        assert (await pool.run("1")).ok
        assert len(await new()) >= 2  # more while one that was slow to start is being replaced
    assert not await new()
    await kill_an_owner(settings, tmp_path)  # kill -9: the streams end, and with them the workers
    with anyio.fail_after(patient(60)):
        while await new():  # noqa: ASYNC110 - the engine sets no event
            await anyio.sleep(0.05)


async def test_calls_while_workers_are_killed(
    settings: PoolSettings, engine: PrivateEngine
) -> None:
    tally, killed = Tally([0] * 1000), Counter[str]()
    async with Pool(settings) as pool:
        async with anyio.create_task_group() as group:
            kinds = ["server", "zygote", "call"]
            dice = random.Random(7)
            group.start_soon(kill_at_random, kinds, engine.servers, tally, 100, dice, killed)
            await run_load(pool, 1000, tally)
            group.cancel_scope.cancel()
        print(dict(killed), dict(tally.ends), tally.second)
        tally.check()
        assert tally.ends["right"] > 900
        await wait_until(lambda: pool.stats()["workers"] == 2, within_s=60)


async def test_engine_that_wants_tls_says_so(engine: PrivateEngine, url: str) -> None:
    with pytest.raises(SandboxUnavailable, match="requires TLS: set engine_certs"):
        async with connect(url):
            pass


async def test_certificates_that_are_missing_or_wrong(
    engine: PrivateEngine, url: str, certs: Path, tmp_path: Path
) -> None:
    with pytest.raises(SandboxUnavailable, match=r"needs ca\.pem, cert\.pem and key\.pem in"):
        async with connect(url, str(tmp_path)):
            pass
    remaining = make_certs(tmp_path / "others")
    with pytest.raises(SandboxUnavailable, match="its certificate is not valid for"):
        async with connect(url, str(remaining)):
            pass
    shutil.copy(certs / "ca.pem", remaining / "ca.pem")  # right authority, a stranger's certificate
    with pytest.raises(SandboxUnavailable, match="no Docker Engine responds"):
        async with connect(url, str(remaining)):
            pass


async def test_docker_s_own_variables(
    engine: PrivateEngine, url: str, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certs))
    monkeypatch.setenv("DOCKER_HOST", url)
    async with connect() as docker:
        assert (await docker.version())["ApiVersion"]
    assert os.environ["DOCKER_HOST"] == url
