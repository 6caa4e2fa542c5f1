"""Starts and stops our own SGLang servers.

    sglang_servers ──> one guardian per server ──> SGLang and its children
         │  polls /ready, watches the guardian      (guardian.py says who kills what)
         └─ at the end: closes each guardian's stdin, waits, kills

A server that dies during its first start fails the start, with the tail of its log. One that dies
later is restarted by keep_alive.py, a limited number of times.
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
from anyio.abc import Process
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, field_validator

from agentloop.child_environment import for_our_python, wait_policy
from agentloop.errors import ModelError, ServerStartError, SettingsError
from agentloop.inference.cpu import NO_ACCELERATOR, OVERLAY, PRIVATE, has_accelerator
from agentloop.inference.processes.keyed import KEY_VARIABLE
from agentloop.inference.processes.server_log import NOT_INSTALLED, ServerLog
from agentloop.models import not_a_model
from agentloop.models.folder import read_json

_SGLANG, _KEYED = "sglang.launch_server", "agentloop.inference.processes.keyed"
_GUARDIAN = Path(__file__).with_name("guardian.py")
_POLL_S = 0.1
_GUARDIAN_GRACE_S = 15.0
_GPU_STOP_S = 15.0  # to release the GPU's memory before it is killed; a CPU has nothing to release
# Outside the range that kernels use for outgoing connections, so that a free port is still free
# when the server binds it, many seconds later.
_PORTS = range(20_000, 30_000)
_CPU_KV_TOKENS = 65_536
_CPU_KV_BYTES = 2 * 1024**3
_RESERVED = (
    *("--device", "--model-path", "--host", "--port", "--nccl-port"),
    *("--tp-size", "--dp-size", "--base-gpu-id"),
)


class ServerSettings(BaseModel, extra="forbid", frozen=True):
    """Settings of our own servers, which listen on loopback."""

    count: PositiveInt = Field(
        1, description="Number of SGLang servers to start, each with its own copy of the model."
    )
    port: int = Field(
        0,
        ge=0,
        le=65_535,
        description="Port of the first server; the others use the ports after it. 0: any free "
        "ports.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto",
        description="Device of the servers. auto: cuda if this machine has a GPU, otherwise cpu.",
    )
    dtype: str | None = Field(
        None,
        description="Data type of weights and KV cache. By default, float32 on a CPU and the "
        "model's own on a GPU.",
    )
    max_total_tokens: PositiveInt | None = Field(
        None, description="Size of each KV cache in tokens. By default, as many as fit into memory."
    )
    tp_size: PositiveInt = Field(
        1, description="Tensor parallelism: number of GPUs that share one copy of the model."
    )
    dp_size: PositiveInt = Field(
        1,
        description="Data parallelism: copies of the model per server, each with its own KV cache. "
        "A server takes tp_size * dp_size GPUs.",
    )
    threads: PositiveInt = Field(
        1,
        description="OpenMP threads per server on a CPU. More than 1 makes small models slower.",
    )
    extra_args: tuple[str, ...] = Field(
        (),
        description="Further command-line options for SGLang, appended to those that agentloop "
        "sets.",
    )
    start_timeout_s: PositiveFloat = Field(
        300.0,
        description="Time for a server to become ready, including loading the model; then starting "
        "it fails.",
    )
    max_restarts: int = Field(
        3,
        ge=0,
        description="Number of restarts of a server within ten minutes; if it dies again, it is "
        "given up.",
    )
    unresponsive_s: PositiveFloat = Field(
        60.0,
        description="Time after which a server that is dead for the router, "
        "although its process runs, is killed and restarted.",
    )

    @field_validator("extra_args")
    @classmethod
    def _no_reserved_options(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for argument in value:
            if argument.split("=")[0] in _RESERVED:
                raise ValueError(f"{argument} is set by the runtime, remove it")
        return value


@dataclass(frozen=True)
class Launch:
    """Everything needed to start or restart one server.

    Attributes:
        model_path: the model; empty if it is not an SGLang server.
        ready_path: the path that answers 200 once the server is ready.
    """

    name: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(repr=False)
    url: str
    model_path: str
    log_path: Path
    start_timeout_s: float
    stop_timeout_s: float
    ready_path: str = "/ready"


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
        """Process id of SGLang's main process, which leads its session; None until it runs."""
        return self._pid

    @property
    def alive(self) -> bool:
        return self._guardian.returncode is None

    @property
    def returncode(self) -> int | None:
        """Exit status as a shell reports it (128 + signal); None while the server runs."""
        code = self._guardian.returncode
        return 128 - code if code is not None and code < 0 else code  # the guardian was killed

    async def wait_dead(self) -> str:
        """Wait until nothing of the server is left; return how it ended, with the tail of its
        log."""
        await self._guardian.wait()  # no deadline: as long as the server lives
        return self._describe_end()

    async def ready(self, on_progress: Callable[[str], None]) -> None:
        """Wait until the server accepts requests.

        Raises:
            ServerStartError: It died, or `start_timeout_s` has passed.
        """
        started = anyio.current_time()
        try:
            with anyio.fail_after(self.launch.start_timeout_s):
                await self._read_pid()
                await self._poll(on_progress)
        except TimeoutError as error:
            raise ServerStartError(
                f"{self.launch.name} was not ready within {self.launch.start_timeout_s:g} s "
                f"(server.start_timeout_s; a busy machine needs more).\n{self._log.tail()}",
                log_path=self.log_path,
            ) from error
        took_s = anyio.current_time() - started
        on_progress(f"{self.launch.name}: ready at {self.launch.url} after {took_s:.1f} s")

    async def restart(self, on_progress: Callable[[str], None]) -> None:
        """Restart a dead server and wait until it is ready.

        The previous log is kept next to the new one, as `.previous`.

        Raises:
            ServerStartError: See `ready`.
        """
        # no deadline: the old one is dead, and a fork takes milliseconds
        with anyio.CancelScope(shield=True):  # a cancellation would lose the new process
            await self._guardian.aclose()
            self._set_log_aside()
            self._pid = None
            self._guardian = await _spawn(self.launch)
        await self.ready(on_progress)

    async def stop(self) -> None:
        """End the server and all its processes, shielded from cancellation."""
        guardian = self._guardian  # a restart may replace it meanwhile
        with anyio.move_on_after(self.launch.stop_timeout_s + _GUARDIAN_GRACE_S, shield=True):
            if guardian.stdin is not None:
                await guardian.stdin.aclose()
            await guardian.wait()
        if guardian.returncode is None:
            guardian.kill()  # the kernel then kills the server
        with anyio.move_on_after(_GUARDIAN_GRACE_S, shield=True):
            await guardian.aclose()

    def _set_log_aside(self) -> None:
        path = self.launch.log_path
        with suppress(OSError):  # missing or not to be renamed: it must not prevent a start
            path.replace(path.with_name(path.name + ".previous"))

    async def _read_pid(self) -> None:
        assert self._guardian.stdout is not None
        try:
            self._pid = int(await self._guardian.stdout.receive())  # no deadline: ready() has one
        except anyio.EndOfStream:
            await self._guardian.wait()  # no deadline: ready() has one
            raise ServerStartError(self._describe_end(), log_path=self.log_path) from None

    async def _poll(self, on_progress: Callable[[str], None]) -> None:
        stage = ""
        url = self.launch.url
        async with httpx.AsyncClient(base_url=url, timeout=5.0, trust_env=False) as client:
            while not await _is_ready(client, self.launch.ready_path):
                if not self.alive:
                    raise ServerStartError(self._describe_end(), log_path=self.log_path)
                if self.model_path and (new_stage := self._log.stage()) != stage:
                    stage = new_stage
                    on_progress(f"{self.launch.name}: {stage}")
                await anyio.sleep(_POLL_S)
            # SGLang does this itself after a warm-up, which is skipped on a CPU. Without it, full
            # garbage collections stall every stream.
            with anyio.move_on_after(5), suppress(httpx.HTTPError):
                key = self.launch.environment.get(KEY_VARIABLE)
                headers = {"Authorization": f"Bearer {key}"} if key else None
                await client.post("/freeze_gc", headers=headers)

    def _describe_end(self) -> str:
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
    """Start servers concurrently; yield them when all are ready; stop them at the end.

    Args:
        model_path: A model folder, or a name that SGLang may download.
        log_dir: Folder for one log per server; created if missing.
        on_progress: Called with a sentence at every change.

    Raises:
        ModelError: `model_path` is a folder without a model.
        ServerStartError: SGLang is not installed, a port is in use, or a server died or took too
            long.
    """
    if importlib.util.find_spec("sglang") is None:
        raise ServerStartError(NOT_INSTALLED)
    launches = plan(model_path, settings, log_dir=log_dir)
    where = "CPU" if "cpu" in launches[0].command else "GPU"
    description = f"{len(launches)} SGLang server{'s' * (len(launches) > 1)} on the {where}"
    on_progress(f"Starting {description}; logs in {log_dir}")
    async with running(launches, on_progress=on_progress) as servers:
        yield servers


@asynccontextmanager
async def running(
    launches: Iterable[Launch], *, on_progress: Callable[[str], None]
) -> AsyncIterator[list[ServerProcess]]:
    """Run any commands that answer `GET /ready`, like `sglang_servers`."""
    servers: list[ServerProcess] = []
    try:
        for launch in launches:
            # A cancellation between the fork and the append would lose the process.
            with anyio.CancelScope(shield=True):  # no deadline: a fork takes milliseconds
                servers.append(ServerProcess(launch, await _spawn(launch)))
        await all_ready(servers, on_progress)
        yield servers
    finally:
        await stop_all(servers)


async def _spawn(launch: Launch) -> Process:
    """Start the guardian of a server.

    Raises:
        ServerStartError: The log cannot be written, or no process can be created.
    """
    try:
        return await start_guarded(
            launch.command,
            launch.environment,
            launch.log_path,
            stop_timeout_s=launch.stop_timeout_s,
        )
    except OSError as error:
        raise ServerStartError(f"{launch.name} cannot be started: {error}") from error


async def start_guarded(
    command: Sequence[str],
    environment: Mapping[str, str],
    log_path: Path,
    *,
    stop_timeout_s: float,
    folder: Path | None = None,
) -> Process:
    """Run `command` under a guardian (guardian.py), which ends it with us, its children included.

    Args:
        folder: a folder to remove when it has ended.

    Raises:
        OSError: The log cannot be written, or no process can be created.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    guardian = [sys.executable, "-I", str(_GUARDIAN), "--stop-timeout-s", str(stop_timeout_s)]
    if folder is not None:
        guardian += ["--folder", str(folder)]
    with log_path.open("wb") as log:
        return await anyio.open_process(
            [*guardian, "--", *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**environment, **wait_policy(environment)},
            start_new_session=True,  # Ctrl-C in a terminal is handled by the runtime
        )


def stdio_guarded(command: Sequence[str]) -> tuple[str, ...]:
    """Return the command that runs `command` on its own stdin and stdout under a guardian.

    Closing its stdin asks the server to end; SIGTERM kills the server with its children, and so
    does our own end, however it comes about.
    """
    options = ("--stop-timeout-s", "0", "--stdio-peer", str(os.getpid()))
    return (sys.executable, "-I", str(_GUARDIAN), *options, "--", *command)


async def all_ready(servers: Sequence[ServerProcess], on_progress: Callable[[str], None]) -> None:
    """Wait until all servers accept requests. Raises the first one's ServerStartError."""
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


async def stop_all(servers: Sequence[ServerProcess]) -> None:
    """End all servers, shielded from cancellation."""
    with anyio.CancelScope(shield=True):  # no deadline: each has one
        async with anyio.create_task_group() as tasks:
            for server in servers:
                tasks.start_soon(server.stop)


async def _is_ready(client: httpx.AsyncClient, path: str) -> bool:
    try:
        return (await client.get(path)).status_code == httpx.codes.OK
    except httpx.HTTPError:  # includes invalid HTTP: another program may have the port
        return False


def require_device(settings: ServerSettings) -> None:
    """Check that this machine has the device that the settings ask for.

    Raises:
        SettingsError: it has no GPU, or the settings split a model over CPUs.
    """
    if settings.tp_size > 1 and (settings.device == "cpu" or not has_accelerator()):
        raise SettingsError(
            f"server.tp_size: {settings.tp_size} needs as many GPUs: a server on a CPU is not "
            "split; leave it at 1"
        )
    if settings.device == "cuda" and not has_accelerator():
        raise SettingsError(f"server.device: cuda, but {NO_ACCELERATOR}; or set it to auto or cpu")


def plan(
    model_path: Path | str,
    settings: ServerSettings,
    *,
    log_dir: Path,
    host: str = "127.0.0.1",
    key: str | None = None,
) -> list[Launch]:
    """Return the commands for these settings on this machine.

    Args:
        host: Address of this machine to listen on.
        key: API key that the servers require (keyed.py).

    Raises:
        ModelError, ServerStartError: See `sglang_servers`.
    """
    folder = _model_folder(model_path)
    on_cpu = settings.device == "cpu" or (settings.device == "auto" and not has_accelerator())
    stop_timeout_s = 0.0 if on_cpu else _GPU_STOP_S
    launches = []
    for index, (port, side_port) in enumerate(_ports(settings, host)):
        arguments = [
            *("--model-path", str(folder or model_path)),
            *("--host", host, "--port", str(port)),
            *_rank_arguments(settings, side_port),
            *("--enable-metrics", "--incremental-streaming-output"),
            *("--log-level-http", "warning"),
            *(_cpu_arguments(folder, settings) if on_cpu else _gpu_arguments(index, settings)),
            *settings.extra_args,
        ]
        launches.append(
            Launch(
                name=f"SGLang server {index + 1}",
                command=(sys.executable, "-m", _KEYED if key else _SGLANG, *arguments),
                environment=_environment(settings, on_cpu=on_cpu, offline=folder is not None)
                | ({KEY_VARIABLE: key} if key else {}),
                url=f"http://{host}:{port}",
                model_path=str(folder or model_path),
                log_path=log_dir / f"sglang-{index + 1}.log",
                start_timeout_s=settings.start_timeout_s,
                stop_timeout_s=stop_timeout_s,
            )
        )
    return launches


def _model_folder(model_path: Path | str) -> Path | None:
    """Return the absolute path of the folder; None for the name of a model to download."""
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
    # Each rank needs a port of its own, but SGLang would use this one for all of them.
    return ["--dp-size", str(settings.dp_size)]


def _cpu_arguments(folder: Path | None, settings: ServerSettings) -> list[str]:
    tokens = settings.max_total_tokens or _cpu_kv_tokens(folder)
    return [
        *("--device", "cpu", "--dtype", settings.dtype or "float32"),
        *("--max-total-tokens", str(tokens)),
        *("--tp-size", str(settings.tp_size)),
        "--skip-server-warmup",
        "--sleep-on-idle",  # otherwise an idle server keeps a core busy
        # A prefill takes as long as a decode of all requests: let prompts gather in between.
        *("--prefill-decode-interval", "6", "--prefill-decode-interval-min-bs", "16"),
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
    """Return the tokens that fit into a fixed amount of memory, in float32.

    By default SGLang would take nearly all memory.
    """
    if folder is None:
        return _CPU_KV_TOKENS
    config = read_json(folder / "config.json")
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
    # It may write bytecode: if pip has not compiled the packages, the first start takes long.
    environment = for_our_python()
    environment["PYTHONUNBUFFERED"] = "1"
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
    if on_cpu:
        path = [str(OVERLAY), str(PRIVATE), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
        environment["OMP_NUM_THREADS"] = str(settings.threads)
        environment["SGLANG_USE_CPU_ENGINE"] = "1"
        if settings.dp_size > 1:  # SGLang needs one entry per rank; its default is per NUMA node
            cores = sorted(os.sched_getaffinity(0))
            bind = [str(cores[rank % len(cores)]) for rank in range(settings.dp_size)]
            environment.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(bind))
    return environment


def _ports(settings: ServerSettings, host: str = "127.0.0.1") -> list[tuple[int, int]]:
    """Return, for each server, its port and one for SGLang's internal communication."""
    candidates = iter(random.sample(_PORTS, len(_PORTS)))
    free = (port for port in candidates if _is_free(port, host))
    if settings.port == 0:
        return [(next(free), next(free)) for _ in range(settings.count)]
    ports = [settings.port + index for index in range(settings.count)]
    for port in ports:
        if not _is_free(port, host):
            raise ServerStartError(f"port {port} is in use (`port` 0 finds free ones)")
    return [(port, next(free)) for port in ports]


def _is_free(port: int, host: str) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
