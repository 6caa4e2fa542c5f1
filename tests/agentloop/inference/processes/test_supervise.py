"""Servers are started, watched and stopped; a small script replaces SGLang."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.abc import Process, SocketStream

from agentloop.errors import ModelError, ServerError, ServerStartError, SettingsError
from agentloop.inference.cpu import OVERLAY
from agentloop.inference.processes import supervise
from agentloop.inference.processes.keep_alive import keep_alive
from agentloop.inference.processes.supervise import (
    Launch,
    ServerProcess,
    ServerSettings,
    plan,
    require_device,
    running,
)
from tests.fakes import RecordedClients
from tests.patience import patient

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc"),
]

# It starts a child and one in another session that ignores SIGTERM, makes a temporary file, serves.
STUB = """
import json, os, signal, subprocess, sys, tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import shared_memory

port, record = int(sys.argv[1]), sys.argv[2]
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
children = [
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]),
    subprocess.Popen([sys.executable, "-c", stubborn], start_new_session=True),
]
memory = shared_memory.SharedMemory(f"sglang_loads_{os.getpid()}", create=True, size=4096)
file = tempfile.NamedTemporaryFile(delete=False)
signal.signal(signal.SIGTERM, lambda *_: (open(record + ".terminated", "w"), os._exit(0)))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *args):
        pass


server = HTTPServer(("127.0.0.1", port), Handler)
with open(record + ".new", "w") as out:
    pids = [os.getpid(), *(child.pid for child in children)]
    json.dump({"pids": pids, "files": [file.name, "/dev/shm/" + memory.name]}, out)
os.rename(record + ".new", record)
server.serve_forever()
"""


class Stub:
    """A replacement for SGLang, and the processes and files that it leaves."""

    def __init__(self, folder: Path, script: str = STUB, *, stop_timeout_s: float = 0.0) -> None:
        ((port, _),) = supervise._ports(ServerSettings())
        folder.mkdir(exist_ok=True)
        self.record = folder / "record.json"
        self.launch = Launch(
            name="stub",
            command=(sys.executable, "-c", script, str(port), str(self.record)),
            environment={**os.environ, "TMPDIR": str(folder)},
            url=f"http://127.0.0.1:{port}",
            model_path="none",
            log_path=folder / "stub.log",
            start_timeout_s=60.0,
            stop_timeout_s=stop_timeout_s,
        )

    @property
    def pids(self) -> list[int]:
        return list(json.loads(self.record.read_text())["pids"])

    @property
    def files(self) -> list[Path]:
        return [Path(path) for path in json.loads(self.record.read_text())["files"]]

    @property
    def left(self) -> list[int | Path]:
        """Return processes and files of the stub that still exist."""
        processes = [pid for pid in self.pids if _runs(pid)]
        return [*processes, *(path for path in self.files if path.exists())]


async def test_home_that_cannot_be_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = "import os; print(os.environ['HOME'], os.environ['TMPDIR'], os.environ.get('HF_HOME'))"
    for home, is_replaced in (("/proc", True), (str(tmp_path), False)):
        environment = {**os.environ, "HOME": home, "HF_HOME": str(tmp_path)}
        async with await supervise.start_guarded(
            [sys.executable, "-c", script], environment, log, stop_timeout_s=0
        ) as process:
            with anyio.fail_after(patient(30)):
                await process.wait()
        child_home, temporary, models = log.read_text().split()
        assert child_home == (temporary if is_replaced else home)
        assert models == str(tmp_path)


def _stat(pid: int) -> tuple[str, int]:
    """Return state and parent of a process."""
    state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    return state, int(parent)


def _runs(pid: int) -> bool:
    try:
        return _stat(pid)[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Poll until the condition holds: the end of another process sends no event."""
    with anyio.fail_after(patient(timeout_s)):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def quiet(_: str) -> None: ...


def run(*stubs: Stub) -> AbstractAsyncContextManager[list[ServerProcess]]:
    return running([stub.launch for stub in stubs], on_progress=quiet)


@pytest.fixture
def stub(tmp_path: Path) -> Stub:
    return Stub(tmp_path / "stub")


async def test_is_ready_then_leaves_nothing(stub: Stub) -> None:
    progress: list[str] = []
    async with running([stub.launch], on_progress=progress.append) as [server]:
        assert (server.alive, server.returncode) == (True, None)
        assert stub.pids[0] == server.pid
        assert len(stub.left) == 5
    assert stub.left == []
    assert (server.alive, server.returncode) == (False, 128 + signal.SIGKILL)
    assert "ready at http://127.0.0.1:" in progress[-1]


async def test_leaves_nothing_when_the_body_raises(stub: Stub) -> None:
    with pytest.raises(KeyError, match="ours"):
        async with run(stub):
            raise KeyError("ours")
    assert stub.left == []


async def test_leaves_nothing_when_cancelled_while_it_starts(tmp_path: Path) -> None:
    never_ready = STUB.replace("send_response(200)", "send_response(503)")
    stub = Stub(tmp_path / "stub", never_ready)
    async with anyio.create_task_group() as tasks:

        async def start() -> None:
            async with run(stub):
                raise AssertionError("it was never ready")

        tasks.start_soon(start)
        await until(stub.record.exists)
        tasks.cancel_scope.cancel()
    assert stub.left == []


async def test_cancelled_while_the_guardian_is_forked(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: list[Process] = []
    spawn = supervise._spawn

    async def slow_spawn(launch: Launch) -> Process:
        spawned.append(await spawn(launch))
        scope.cancel()
        await anyio.lowlevel.checkpoint()
        return spawned[-1]

    monkeypatch.setattr(supervise, "_spawn", slow_spawn)
    with anyio.CancelScope() as scope:
        async with run(stub):
            raise AssertionError("it was cancelled")
    assert spawned[0].returncode is not None


async def test_server_gets_sigterm_if_there_is_a_stop_timeout(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub", stop_timeout_s=10.0)
    async with run(stub):
        pass
    assert stub.record.with_suffix(".json.terminated").exists()
    assert stub.left == []


async def test_death_while_starting_shows_the_end_of_the_log(tmp_path: Path) -> None:
    script = """
import sys
print("server_args={" + "x" * 20000)
print("[2026-01-01 00:00:00] post-warmup freeze_gc failed")
print("Traceback (most recent call last):")
print("  harmless")
for i in range(100):
    print(f"[2026-01-01 00:00:00] line {i}")
print("OSError: [Errno 98] address already in use")
sys.exit(3)
"""
    stub = Stub(tmp_path / "stub", script)
    with pytest.raises(ServerStartError) as caught:
        async with run(stub):
            raise AssertionError("it died")
    message, _, tail = str(caught.value).partition("The end of its log")
    assert "stub ended with exit status 3" in message
    assert sys.executable in message
    assert "OSError: [Errno 98] address already in use" in message
    assert "Another program has taken the port" in message
    assert "line 99" in tail
    assert "line 71" in tail
    assert "line 70" not in tail
    assert "server_args" not in tail
    assert "harmless" not in tail


async def test_death_by_a_signal_is_named(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ServerStartError, match="was killed by SIGKILL") as caught:
        async with run(stub):
            raise AssertionError("it died")
    assert "ran out of memory" in str(caught.value)
    assert "(it is empty)" in str(caught.value)


async def test_command_that_cannot_run(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub")
    launch = Launch(**{**vars(stub.launch), "command": (str(tmp_path / "nothing"),)})
    with pytest.raises(ServerStartError, match="cannot run"):
        async with running([launch], on_progress=quiet):
            raise AssertionError("it cannot run")


async def test_server_that_dies_while_starting_stops_the_others(tmp_path: Path) -> None:
    good = Stub(tmp_path / "good")
    waits = f"import os, time\nwhile not os.path.exists({str(good.record)!r}): time.sleep(0.01)\n"
    bad = Stub(tmp_path / "bad", waits + "raise SystemExit('no luck')")
    with pytest.raises(ServerStartError, match="no luck"):
        async with run(good, bad):
            raise AssertionError("one died")
    assert good.left == []


async def test_start_that_takes_too_long(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub", "print('busy', flush=True); import time; time.sleep(600)")
    launch = Launch(**{**vars(stub.launch), "start_timeout_s": 0.5})
    with pytest.raises(ServerStartError, match=r"not ready within 0\.5 s .server\.start_timeout_s"):
        async with running([launch], on_progress=quiet):
            raise AssertionError("it was never ready")


async def test_later_death_is_reported(stub: Stub) -> None:
    async with run(stub) as [server]:
        os.kill(stub.pids[0], signal.SIGKILL)
        with anyio.fail_after(patient(30)):
            reason = await server.wait_dead()
        assert "was killed by SIGKILL" in reason
        assert server.returncode == 128 + signal.SIGKILL
        assert not server.alive
        assert stub.left == []


async def test_server_does_not_outlive_its_guardian(stub: Stub) -> None:
    async with run(stub) as [server]:
        os.kill(_stat(stub.pids[0])[1], signal.SIGKILL)
        await until(lambda: not _runs(stub.pids[0]))
        await until(lambda: not server.alive)
        assert server.returncode == 128 + signal.SIGKILL
    for pid in stub.pids[1:]:  # unlike SGLang's children, the stub's do not end with it
        os.kill(pid, signal.SIGKILL)
    for path in stub.files:
        path.unlink(missing_ok=True)


RUNTIME = """
import signal, sys
from pathlib import Path
import anyio
sys.path.insert(0, {here!r})
from test_supervise import Launch, Stub, running

async def main():
    stub = Stub(Path({folder!r}), stop_timeout_s={stop_timeout_s})
    async with running([stub.launch], on_progress=lambda said: print(said, flush=True)):
        print("running", flush=True)
        await anyio.sleep_forever()

anyio.run(main, backend_options={{"use_uvloop": {uvloop}}})
"""


@pytest.mark.parametrize("uvloop", [False, True])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.full
async def test_ending_the_runtime_ends_all_processes_of_its_servers(
    tmp_path: Path, number: signal.Signals, uvloop: bool
) -> None:
    stub = Stub(tmp_path)
    script = RUNTIME.format(
        here=str(Path(__file__).parent), folder=str(tmp_path), stop_timeout_s=0.0, uvloop=uvloop
    )
    async with await anyio.open_process(
        [sys.executable, "-c", script], stderr=subprocess.DEVNULL, start_new_session=True
    ) as runtime:
        assert runtime.stdout is not None
        output = b""
        with anyio.fail_after(patient(60)):
            while b"running" not in output:
                output += await runtime.stdout.receive()
        assert len(stub.left) == 5
        # To the whole process group, as a terminal does with Ctrl-C.
        os.killpg(runtime.pid, number)
        with anyio.fail_after(patient(30)):
            await runtime.wait()
    await until(lambda: not stub.left)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"num_attention_heads": 4, "hidden_size": 128, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _option(launch: Launch, name: str) -> str:
    return launch.command[launch.command.index(name) + 1]


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ({}, "PASSIVE None None"),
        ({"OMP_WAIT_POLICY": "active"}, "active None None"),
        ({"GOMP_SPINCOUNT": "7"}, "None 7 None"),
        ({"KMP_BLOCKTIME": "0"}, "None None 0"),
    ],
)
async def test_threads_of_servers_sleep_while_waiting_unless_configured_otherwise(
    tmp_path: Path, chosen: dict[str, str], expected: str
) -> None:
    names = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    script = f"import os; print(*map(os.environ.get, {names}))"
    environment = {k: v for k, v in os.environ.items() if k not in names} | chosen
    log = tmp_path / "log"
    process = await supervise.start_guarded(
        [sys.executable, "-c", script], environment, log, stop_timeout_s=0
    )
    async with process:
        await process.wait()
    assert log.read_text().splitlines()[-1] == expected


@pytest.mark.parametrize("is_killed", [False, True])
async def test_folder_of_a_process_is_removed_when_it_has_ended(
    tmp_path: Path, is_killed: bool
) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    (folder / "socket").touch()
    code = "import time; time.sleep(600)" if is_killed else "pass"
    async with await supervise.start_guarded(
        [sys.executable, "-c", code], os.environ, tmp_path / "log", stop_timeout_s=0, folder=folder
    ) as process:
        assert process.stdin is not None
        if is_killed:
            await process.stdin.aclose()  # as when we are killed
        await process.wait()
    assert not folder.exists()


def test_plan_on_a_cpu(model: Path, tmp_path: Path) -> None:
    settings = ServerSettings(count=2, device="cpu", threads=3, extra_args=("--log-level", "debug"))
    launches = plan(model, settings, log_dir=tmp_path)
    assert len({launch.url for launch in launches}) == 2
    assert len({launch.log_path for launch in launches}) == 2
    launch = launches[0]
    assert _option(launch, "--device") == "cpu"
    assert _option(launch, "--dtype") == "float32"
    assert _option(launch, "--max-total-tokens") == "65536"
    assert launch.command[-2:] == ("--log-level", "debug")
    assert launch.environment["OMP_NUM_THREADS"] == "3"
    assert launch.environment["HF_HUB_OFFLINE"] == "1"
    assert launch.environment["PYTHONPATH"].split(os.pathsep)[0] == str(OVERLAY)
    assert launch.stop_timeout_s == 0


def test_plan_on_a_gpu(model: Path, tmp_path: Path) -> None:
    settings = ServerSettings(count=2, device="cuda", tp_size=2, dtype="bfloat16")
    first, second = plan(model, settings, log_dir=tmp_path)
    assert (_option(first, "--base-gpu-id"), _option(second, "--base-gpu-id")) == ("0", "2")
    assert _option(first, "--dtype") == "bfloat16"
    assert "--device" not in first.command
    assert str(OVERLAY) not in first.environment.get("PYTHONPATH", "")
    assert first.stop_timeout_s == 15


def test_kv_cache_of_a_large_model_is_bounded(model: Path, tmp_path: Path) -> None:
    config = {
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
    }
    (model / "config.json").write_text(json.dumps(config))
    [launch] = plan(model, ServerSettings(device="cpu"), log_dir=tmp_path)
    bytes_a_token = 2 * 28 * 8 * 128 * 4
    assert int(_option(launch, "--max-total-tokens")) == 2 * 1024**3 // bytes_a_token
    settings = ServerSettings(device="cpu", max_total_tokens=99)
    [launch] = plan(model, settings, log_dir=tmp_path)
    assert _option(launch, "--max-total-tokens") == "99"


def test_name_may_be_downloaded(tmp_path: Path) -> None:
    [launch] = plan("some/model", ServerSettings(device="cpu"), log_dir=tmp_path)
    assert launch.model_path == "some/model"
    assert launch.environment.get("HF_HUB_OFFLINE") == os.environ.get("HF_HUB_OFFLINE")


@pytest.mark.parametrize("as_text", [False, True])
def test_folder_that_holds_no_model(tmp_path: Path, as_text: bool) -> None:
    for folder, error in ((tmp_path, r"no config\.json"), (tmp_path / "x", "does not exist")):
        with pytest.raises(ModelError, match=error):
            plan(str(folder) if as_text else folder, ServerSettings(), log_dir=tmp_path)


def test_config_that_cannot_be_used(model: Path, tmp_path: Path) -> None:
    reasons = {"{}": "num_attention_heads", "{": "config.json: ", "[]": "expected a JSON object"}
    for text, error in reasons.items():
        (model / "config.json").write_text(text)
        with pytest.raises(ModelError, match=error):
            plan(model, ServerSettings(device="cpu"), log_dir=tmp_path)


def test_port_in_use(model: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServerStartError, match=f"port {port} is in use"):
            plan(model, ServerSettings(port=port, device="cpu"), log_dir=tmp_path)


def test_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServerSettings(device="cuda")
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "0")
    with pytest.raises(SettingsError, match=r"^server.tp_size: 2 needs as many GPUs"):
        require_device(ServerSettings(tp_size=2))
    with pytest.raises(SettingsError, match=r"^server\.device: cuda, but no GPU is visible here"):
        require_device(settings)
    for device in ("auto", "cpu"):
        require_device(ServerSettings(device=device))
    monkeypatch.setenv("AGENTLOOP_ACCELERATOR", "1")
    require_device(settings)


@pytest.mark.parametrize("argument", ["--port", "--host=0.0.0.0", "--device=cuda"])
def test_options_set_by_the_runtime_are_refused(argument: str) -> None:
    with pytest.raises(ValueError, match="is set by the runtime"):
        ServerSettings(extra_args=(argument, "1"))


async def test_sglang_is_missing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ServerStartError, match=r"agentloop\.inference\.install"):
        async with supervise.sglang_servers(
            model, ServerSettings(), log_dir=tmp_path, on_progress=quiet
        ):
            raise AssertionError("SGLang is missing")


def test_process_describes_itself(stub: Stub) -> None:
    server = ServerProcess(stub.launch, guardian=None)  # type: ignore[arg-type]
    assert (server.url, server.model_path) == (stub.launch.url, "none")
    assert (server.log_path, server.pid) == (stub.launch.log_path, None)


class Clients(RecordedClients):
    async def keep(self, servers: list[ServerProcess], **options: Any) -> None:
        self.known |= {server.url for server in servers}
        await keep_alive(servers, ServerSettings(**options), self)


async def test_server_that_dies_is_started_again(stub: Stub) -> None:
    clients = Clients()
    async with run(stub) as [server], anyio.create_task_group() as t:
        t.start_soon(clients.keep, [server])
        first = stub.pids
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: server.alive and stub.pids != first and server.pid == stub.pids[0])
        assert clients.calls == [
            f"{server.url} exited: stub was killed by SIGKILL.",
            f"{server.url} restarting",
        ]
        assert not any(map(_runs, first))
        assert server.log_path.with_name(server.log_path.name + ".previous").exists()
        await until(lambda: _listens(server.url))
        t.cancel_scope.cancel()
    assert stub.left == []


async def test_unresponsive_server_is_killed_and_restarted(stub: Stub) -> None:
    clients = Clients()
    async with run(stub) as [server], anyio.create_task_group() as t:
        first = stub.pids
        os.kill(first[0], signal.SIGSTOP)
        clients.dead.add(server.url)
        t.start_soon(partial(clients.keep, [server], unresponsive_s=0.1))
        await until(lambda: len(clients.calls) >= 2)
        clients.dead.clear()
        await until(lambda: _listens(server.url))
        assert not any(map(_runs, first))
        t.cancel_scope.cancel()
    assert stub.left == []


@pytest.mark.parametrize("obstacle", ["removed", "in the way"])
@pytest.mark.full
async def test_log_that_cannot_be_renamed_does_not_prevent_a_restart(
    stub: Stub, obstacle: str
) -> None:
    clients = Clients()
    async with run(stub) as [server], anyio.create_task_group() as t:
        if obstacle == "removed":
            server.log_path.unlink()
        else:
            (server.log_path.with_name(server.log_path.name + ".previous") / "x").mkdir(
                parents=True
            )
        t.start_soon(clients.keep, [server])
        first = stub.pids
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: stub.pids != first and server.pid == stub.pids[0])
        t.cancel_scope.cancel()
    assert stub.left == []


async def test_log_that_cannot_be_written_fails_the_start(tmp_path: Path) -> None:
    stub = Stub(tmp_path / "stub")
    clients = Clients()
    with pytest.RaisesGroup(pytest.RaisesExc(ServerError, match="cannot be started")):
        async with run(stub) as [server]:
            server.log_path.unlink()
            server.log_path.mkdir()
            server.log_path.with_name(server.log_path.name + ".previous").touch()
            assert server.pid is not None
            os.kill(server.pid, signal.SIGKILL)
            await clients.keep([server], max_restarts=1)
    assert sum(" exited: " in call for call in clients.calls) == 2
    assert stub.left == []
    with pytest.raises(ServerStartError, match="cannot be started"):
        async with run(stub):
            raise AssertionError("it has no log")


@pytest.mark.full
async def test_slow_restart_is_not_killed(tmp_path: Path) -> None:
    """The server need not answer during the restart, but afterwards."""
    slow = "import os, sys, time\nif os.path.exists(sys.argv[2]): time.sleep(1)\n" + STUB
    stub = Stub(tmp_path / "stub", slow)
    clients = Clients()
    async with run(stub) as [server], anyio.create_task_group() as t:
        first = stub.pids
        os.kill(first[0], signal.SIGKILL)
        await until(lambda: not server.alive)
        clients.dead.add(server.url)
        t.start_soon(partial(clients.keep, [server], unresponsive_s=0.2))
        await until(lambda: len(clients.calls) == 3)
        assert stub.pids != first, "it was killed before it was ready"
        t.cancel_scope.cancel()
    assert stub.left == []


async def test_another_program_has_its_port(tmp_path: Path) -> None:
    """The other program's answers are not even valid HTTP; only the start fails."""
    script = "import os, sys, time\nif os.path.exists(sys.argv[2]): time.sleep(.5); sys.exit(3)\n"
    stub = Stub(tmp_path / "stub", script + STUB)
    clients = Clients()
    nonsense = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\nnope"
    num_asked = 0

    async def answer(client: SocketStream) -> None:
        nonlocal num_asked
        num_asked += 1
        async with client:
            await client.receive()
            await client.send(nonsense)

    async with run(stub) as [server]:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)
        await until(lambda: not server.alive)
        port = int(server.url.rpartition(":")[2])
        listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=port)
        async with listener, anyio.create_task_group() as serving:
            serving.start_soon(listener.serve, answer, serving)
            with pytest.RaisesGroup(pytest.RaisesExc(ServerError, match="exit status 3")):
                await clients.keep([server], max_restarts=1)
            assert num_asked
            serving.cancel_scope.cancel()


def _listens(url: str) -> bool:
    port = int(url.rpartition(":")[2])
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
