"""The SGLang servers that we start ourselves, and must stop.

    sglang_servers ──> one guardian a server ──> SGLang and its children
         │  polls /ready, watches the guardian         (guardian.py says who kills what)
         └─ on the way out: closes each guardian's stdin, waits, kills

A server that dies while it starts for the first time fails the start, with its log's tail. One that
dies later is started again by keep_alive.py, a few times.
"""

from __future__ import annotations

import importlib.util
import os
import random
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import anyio
import httpx
import orjson
from anyio.abc import Process
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, field_validator

from agentloop.errors import ModelError, ServerStartError, SettingsError
from agentloop.inference.cpu import NO_ACCELERATOR, OVERLAY, PRIVATE, has_accelerator
from agentloop.inference.server_log import NOT_INSTALLED, ServerLog
from agentloop.models import not_a_model
from agentloop.openmp import wait_policy

__all__ = [
    "Launch",
    "ServerProcess",
    "ServerSettings",
    "plan",
    "require_device",
    "running",
    "sglang_servers",
]

_GUARDIAN = Path(__file__).with_name("guardian.py")
_POLL_S = 0.1
_GUARDIAN_GRACE_S = 15.0
# Outside the range that kernels hand out for outgoing connections, so that a port found free
# is still free when the server binds it, many seconds later.
_PORTS = range(20_000, 30_000)
_CPU_KV_TOKENS = 65_536
_CPU_KV_BYTES = 2 * 1024**3
_OURS = (
    *("--device", "--model-path", "--host", "--port", "--nccl-port"),
    *("--tp-size", "--dp-size", "--base-gpu-id"),
)


class ServerSettings(BaseModel, extra="forbid", frozen=True):
    """How one's own servers are started. They listen on loopback."""

    count: PositiveInt = Field(1, description="Servers, each with its own copy of the model.")
    port: int = Field(
        0, ge=0, le=65_535, description="Of the first one, the others follow; 0 finds free ones."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: cuda where there is an accelerator, else cpu."
    )
    dtype: str | None = Field(
        None,
        description="Of weights and KV cache; none: float32 on a CPU, the model's own on a GPU.",
    )
    max_total_tokens: PositiveInt | None = Field(
        None, description="Size of the KV cache; none: what fits."
    )
    tp_size: PositiveInt = Field(1, description="GPUs a rank of a server.")
    dp_size: PositiveInt = Field(
        1,
        description="Data-parallel ranks of a server, each with the model and a KV cache of its "
        "own.",
    )
    threads: PositiveInt = Field(
        1, description="OpenMP threads a server, on a CPU. More pays only on idle cores."
    )
    extra_args: tuple[str, ...] = Field(
        (), description="More of SGLang's own options, last on its command line."
    )
    start_timeout_s: PositiveFloat = Field(
        300.0, description="From the start until a server is ready."
    )
    stop_timeout_s: float | None = Field(
        None,
        ge=0,
        description="Between asking a server to end and killing it; none: 0 on a CPU, where there "
        "is nothing to release, and 15 on a GPU.",
    )

    max_restarts: int = Field(
        3,
        ge=0,
        description="How often a server that dies is started again in ten minutes, before it is "
        "given up.",
    )
    unresponsive_s: PositiveFloat = Field(
        60.0,
        description="A server that counts as dead for so long while its process lives is killed, "
        "to be started again.",
    )

    @field_validator("extra_args")
    @classmethod
    def _not_what_we_set(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for argument in value:
            if argument.split("=")[0] in _OURS:
                raise ValueError(f"{argument} is set by the runtime")
        return value


@dataclass(frozen=True)
class Launch:
    """All that it takes to start one server, again if need be."""

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    url: str
    model_path: str
    log_path: Path
    start_timeout_s: float
    stop_timeout_s: float


class ServerProcess:
    """A server that runs under its guardian."""

    def __init__(self, launch: Launch, guardian: Process) -> None:
        self.launch = launch
        self._guardian = guardian
        self._log = ServerLog(launch.log_path)
        self._pid: int | None = None

    @property
    def url(self) -> str:
        return self.launch.url

    @property
    def log_path(self) -> Path:
        return self.launch.log_path

    @property
    def model_path(self) -> str:
        return self.launch.model_path

    @property
    def pid(self) -> int | None:
        """Of SGLang's first process, which leads its session; None until it runs."""
        return self._pid

    @property
    def alive(self) -> bool:
        return self._guardian.returncode is None

    @property
    def returncode(self) -> int | None:
        """The exit status as a shell gives it (128 + signal); None while it runs."""
        code = self._guardian.returncode
        return 128 - code if code is not None and code < 0 else code  # the guardian was killed

    async def wait_dead(self) -> str:
        """Wait until nothing of the server is left; returns how it ended, and its log's tail."""
        await self._guardian.wait()  # no deadline: as long as the server lives
        return self._epitaph()

    async def ready(self, on_progress: Callable[[str], None]) -> None:
        """Wait until the server takes requests.

        Raises:
            ServerStartError: it died, or `start_timeout_s` is over.
        """
        started = anyio.current_time()
        try:
            with anyio.fail_after(self.launch.start_timeout_s):
                await self._read_pid()
                await self._poll(on_progress)
        except TimeoutError as error:
            raise ServerStartError(
                f"{self.launch.name} was not ready after {self.launch.start_timeout_s:g} s "
                f"(`start_timeout_s`).\n{self._log.tail()}"
            ) from error
        took_s = anyio.current_time() - started
        on_progress(f"{self.launch.name}: ready at {self.url} after {took_s:.1f} s")

    async def restart(self, on_progress: Callable[[str], None]) -> None:
        """Start it again after it died; it is ready when this returns. The log of its last life
        is kept beside the new one, as `.previous`.

        Raises:
            ServerStartError: as `ready`.
        """
        # no deadline: the old one is dead, and a fork takes milliseconds
        with anyio.CancelScope(shield=True):  # or the new process would be lost
            await self._guardian.aclose()
            path = self.launch.log_path
            with suppress(OSError):  # somebody tidied up, or it is in the way: start all the same
                path.replace(path.with_name(path.name + ".previous"))
            self._pid = None
            self._guardian = await _spawn(self.launch)
        await self.ready(on_progress)

    async def stop(self) -> None:
        """End the server and all its processes. Cancellation does not interrupt it."""
        guardian = self._guardian  # not the one of its next life, which may begin meanwhile
        with anyio.move_on_after(self.launch.stop_timeout_s + _GUARDIAN_GRACE_S, shield=True):
            if guardian.stdin is not None:
                await guardian.stdin.aclose()
            await guardian.wait()
        if guardian.returncode is None:
            guardian.kill()  # the kernel kills the server for it
        with anyio.move_on_after(_GUARDIAN_GRACE_S, shield=True):
            await guardian.aclose()

    async def _read_pid(self) -> None:
        assert self._guardian.stdout is not None
        try:
            self._pid = int(await self._guardian.stdout.receive())  # no deadline: ready() has one
        except anyio.EndOfStream:
            await self._guardian.wait()  # no deadline: ready() has one
            raise ServerStartError(self._epitaph()) from None

    async def _poll(self, on_progress: Callable[[str], None]) -> None:
        stage = ""
        async with httpx.AsyncClient(base_url=self.url, timeout=5.0, trust_env=False) as client:
            while not await _answers(client):
                if not self.alive:
                    raise ServerStartError(self._epitaph())
                if (now := self._log.stage()) != stage:
                    stage = now
                    on_progress(f"{self.launch.name}: {stage}")
                await anyio.sleep(_POLL_S)
            # SGLang does this itself after a warm-up, which we skip on a CPU: without it a full
            # collection stalls every stream.
            with anyio.move_on_after(5), suppress(httpx.HTTPError):
                await client.post("/freeze_gc")

    def _epitaph(self) -> str:
        return (
            f"{self.launch.name} {self._log.ending(self.returncode)}\n"
            f"Its command: {' '.join(self.launch.command)}\n{self._log.tail()}"
        )


@asynccontextmanager
async def sglang_servers(
    model_path: Path | str,
    settings: ServerSettings,
    *,
    log_dir: Path,
    on_progress: Callable[[str], None],
) -> AsyncIterator[list[ServerProcess]]:
    """Start servers side by side; yields them once all are ready; ends them on the way out.

    Args:
        model_path: a model folder, or a name that SGLang may download.
        log_dir: gets one log a server; made if missing.
        on_progress: called with a sentence whenever something changes.

    Raises:
        ModelError: `model_path` is a folder that holds no model.
        ServerStartError: SGLang is not installed, a port is taken, a server died or took too
            long.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ServerStartError(NOT_INSTALLED)
    launches = plan(model_path, settings, log_dir=log_dir)
    where = "CPU" if "cpu" in launches[0].command else "GPU"
    on_progress(f"Starting {len(launches)} SGLang server(s) on the {where}; logs in {log_dir}")
    async with running(launches, on_progress=on_progress) as servers:
        yield servers


@asynccontextmanager
async def running(
    launches: Iterable[Launch], *, on_progress: Callable[[str], None]
) -> AsyncIterator[list[ServerProcess]]:
    """`sglang_servers` for commands of any kind that answer `GET /ready`."""
    servers: list[ServerProcess] = []
    try:
        for launch in launches:
            # A cancellation between the fork and the append would lose the process.
            with anyio.CancelScope(shield=True):  # no deadline: a fork takes milliseconds
                servers.append(ServerProcess(launch, await _spawn(launch)))
        await _all_ready(servers, on_progress)
        yield servers
    finally:
        await _stop_all(servers)


async def _spawn(launch: Launch) -> Process:
    """Raises ServerStartError: its log cannot be written, or no process can be made."""
    try:
        return await guarded(
            launch.command,
            launch.environment,
            launch.log_path,
            stop_timeout_s=launch.stop_timeout_s,
        )
    except OSError as error:
        raise ServerStartError(f"{launch.name} cannot be started: {error}") from error


async def guarded(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    *,
    stop_timeout_s: float,
) -> Process:
    """Run `command` under a guardian (guardian.py): it ends with us, and all its children too.

    Raises:
        OSError: its log cannot be written, or no process can be made.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    guardian = (sys.executable, "-I", str(_GUARDIAN))
    with log_path.open("wb") as log:
        return await anyio.open_process(
            [*guardian, "--stop-timeout-s", str(stop_timeout_s), "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environment, **wait_policy(environment)},
            start_new_session=True,  # Ctrl-C in a terminal is ours to handle
        )


async def _all_ready(servers: list[ServerProcess], on_progress: Callable[[str], None]) -> None:
    failed: list[ServerStartError] = []
    async with anyio.create_task_group() as tasks:

        async def wait(server: ServerProcess) -> None:
            try:
                await server.ready(on_progress)
            except ServerStartError as error:
                failed.append(error)
                tasks.cancel_scope.cancel()

        for server in servers:
            tasks.start_soon(wait, server)
    if failed:
        raise failed[0]


async def _stop_all(servers: list[ServerProcess]) -> None:
    with anyio.CancelScope(shield=True):  # no deadline: each has one
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(server.stop)


async def _answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/ready")).status_code == httpx.codes.OK
    except httpx.HTTPError:  # also what is no answer at all: another program may have the port
        return False


def require_device(settings: ServerSettings) -> None:
    """Check that this machine has the device that the settings ask for.

    Raises:
        SettingsError: it has no GPU.
    """
    if settings.device == "cuda" and not has_accelerator():
        raise SettingsError(f"server.device: cuda, but {NO_ACCELERATOR}; or set it to auto or cpu")


def plan(model_path: Path | str, settings: ServerSettings, *, log_dir: Path) -> list[Launch]:
    """What to run for these settings, on this machine.

    Raises:
        ModelError, ServerStartError: as `sglang_servers`.
    """
    folder = _model_folder(model_path)
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not has_accelerator())
    stop_timeout_s = 0.0 if on_cpu else 15.0
    if settings.stop_timeout_s is not None:
        stop_timeout_s = settings.stop_timeout_s
    launches = []
    for index, (port, side_port) in enumerate(_ports(settings)):
        arguments = [
            *("--model-path", str(folder or model_path)),
            *("--host", "127.0.0.1", "--port", str(port)),
            *_rank_arguments(settings, side_port),
            *("--enable-metrics", "--incremental-streaming-output"),
            *("--log-level-http", "warning"),
            *(_cpu_arguments(folder, settings) if on_cpu else _gpu_arguments(index, settings)),
            *settings.extra_args,
        ]
        launches.append(
            Launch(
                name=f"SGLang server {index + 1}",
                command=(sys.executable, "-m", "sglang.launch_server", *arguments),
                environment=_environment(settings, on_cpu=on_cpu, offline=folder is not None),
                url=f"http://127.0.0.1:{port}",
                model_path=str(folder or model_path),
                log_path=log_dir / f"sglang-{index + 1}.log",
                start_timeout_s=settings.start_timeout_s,
                stop_timeout_s=stop_timeout_s,
            )
        )
    return launches


def _model_folder(model_path: Path | str) -> Path | None:
    """The folder, made absolute; None for the name of a model to download."""
    folder = Path(model_path).expanduser()
    if not folder.exists():
        if isinstance(model_path, Path) or str(model_path).startswith(("/", ".", "~")):
            raise ModelError(f"the model folder {folder} does not exist")
        return None
    if not (folder / "config.json").is_file():
        raise ModelError(not_a_model(folder))
    return folder.resolve()


def _rank_arguments(settings: ServerSettings, side_port: int) -> list[str]:
    if settings.dp_size == 1:
        return ["--nccl-port", str(side_port)]
    # Each rank needs a port of its own, and SGLang would give them all this one.
    return ["--dp-size", str(settings.dp_size)]


def _cpu_arguments(folder: Path | None, settings: ServerSettings) -> list[str]:
    tokens = settings.max_total_tokens or _cpu_kv_tokens(folder)
    return [
        *("--device", "cpu", "--dtype", settings.dtype or "float32"),
        *("--max-total-tokens", str(tokens)),
        *("--tp-size", str(settings.tp_size)),
        "--skip-server-warmup",
        "--sleep-on-idle",  # otherwise an idle server keeps a core busy
    ]


def _gpu_arguments(index: int, settings: ServerSettings) -> list[str]:
    arguments = ["--tp-size", str(settings.tp_size)]
    arguments += ["--base-gpu-id", str(index * settings.tp_size * settings.dp_size)]
    if settings.dtype is not None:
        arguments += ["--dtype", settings.dtype]
    if settings.max_total_tokens is not None:
        arguments += ["--max-total-tokens", str(settings.max_total_tokens)]
    return arguments


def _cpu_kv_tokens(folder: Path | None) -> int:
    """As many tokens as a fixed share of memory holds, in float32; SGLang would take it all."""
    if folder is None:
        return _CPU_KV_TOKENS
    config = orjson.loads((folder / "config.json").read_bytes())
    config = config.get("text_config", config)
    try:
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        kv_heads = config.get("num_key_value_heads") or heads
        bytes_a_token = 2 * config["num_hidden_layers"] * kv_heads * head_dim * 4
    except KeyError as error:
        raise ModelError(f"{folder / 'config.json'} has no {error}") from error
    return int(min(_CPU_KV_TOKENS, _CPU_KV_BYTES // bytes_a_token))


def _environment(settings: ServerSettings, *, on_cpu: bool, offline: bool) -> dict[str, str]:
    environment = dict(os.environ)
    # Where pip left no bytecode, the first start has to keep what it compiles.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["PYTHONUNBUFFERED"] = "1"
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        path = [str(OVERLAY), str(PRIVATE), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        environment["OMP_NUM_THREADS"] = str(settings.threads)
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if settings.dp_size > 1:  # SGLang takes one entry for each rank, else for NUMA nodes
            cores = sorted(os.sched_getaffinity(0))
            bind = [str(cores[rank % len(cores)]) for rank in range(settings.dp_size)]
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bind))
    return environment


def _ports(settings: ServerSettings) -> list[tuple[int, int]]:
    """A port to listen on and one for SGLang's own processes, for each server."""
    candidates = iter(random.sample(_PORTS, len(_PORTS)))
    free = (port for port in candidates if _is_free(port))
    if settings.port == 0:
        return [(next(free), next(free)) for _ in range(settings.count)]
    asked = [settings.port + index for index in range(settings.count)]
    for port in asked:
        if not _is_free(port):
            raise ServerStartError(f"port {port} is in use (`port` 0 finds free ones)")
    return [(port, next(free)) for port in asked]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
