"""Computers as a sandbox of Inspect: `Task(..., sandbox="agentloop")`.

    task_init ──> a pool, one for all tasks of the process      task_cleanup ──> its end
    sample_init ──> a computer                                  sample_cleanup ──> its end

The configuration is an image, the path of a Dockerfile, whose folder is built, or a ComputerConfig.
Inspect finds this module by an entry point of the distribution, once it looks for providers.

Compose files are not supported. No computer outlives its process, so there is nothing that
`--no-sandbox-cleanup` could keep.
"""

from __future__ import annotations

import asyncio
import errno
import math
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import anyio
import anyio.lowlevel
import pydantic
from inspect_ai.util import (
    ExecResult,
    OutputLimitExceededError,
    SandboxConnection,
    SandboxEnvironment,
    SandboxEnvironmentLimits,
    SandboxUnavailableError,
    sandboxenv,
)

from agentloop.sandbox.computer import Computer, ComputerLimits
from agentloop.sandbox.computer.channel import ComputerEnded
from agentloop.sandbox.container import reap_containers
from agentloop.sandbox.engine import connect
from agentloop.sandbox.errors import ComputerLost
from agentloop.sandbox.pool import Pool
from agentloop.sandbox.results import CallStatus
from agentloop.sandbox.settings import PoolSettings, default_workers

MAX_COMPUTERS = 10_000  # Inspect bounds them: `--max-sandboxes`
NOT_EXECUTABLE = 126
CLEANUP_S = 60.0


class ComputerConfig(pydantic.BaseModel, extra="forbid", frozen=True):
    """Arguments of `Pool.computer`; `image` may also be the path of a Dockerfile."""

    image: str = ""
    network: str = "none"
    limits: ComputerLimits = ComputerLimits()
    user: str | None = None
    workdir: str | None = None


class _OpenPool:
    """A pool that is open while anybody uses it.

    Inspect calls functions at the beginning and at the end, possibly in different tasks, and has no
    scope that lasts from one to the other. So the pool has a task of its own.
    """

    def __init__(self) -> None:
        self.pool = Pool(PoolSettings(workers=1, preload=[], max_sessions=MAX_COMPUTERS))
        self.num_users = 0
        self._is_open, self._is_over = anyio.Event(), anyio.Event()
        self._task = asyncio.create_task(self._hold())
        self._task.add_done_callback(lambda _: self._is_open.set())

    async def _hold(self) -> None:
        async with self.pool:
            self._is_open.set()
            await self._is_over.wait()  # no deadline: `close` ends it

    async def until_open(self) -> None:
        """Wait until computers can be had. Raises SandboxUnavailable."""
        await self._is_open.wait()  # no deadline: each step of the start has one
        if self._task.done():
            self._task.result()

    async def close(self) -> None:
        """End the pool, also while it starts."""
        if self._is_open.is_set():
            self._is_over.set()
        else:
            self._task.cancel()
        await asyncio.wait([self._task])  # no deadline: its cleanup has one

    async def image(self, config: ComputerConfig) -> str:
        """Return the name of an image, which is built first if it is a Dockerfile's path.

        Raises:
            ValueError: it is another file, such as Compose's.
        """
        path = anyio.Path(config.image)
        if not await path.is_file():
            for folder in path.parents if path.is_absolute() else ():
                if await folder.is_dir():  # of the task: Inspect puts it before the name
                    return str(path.relative_to(folder))
            return config.image
        if path.name != "Dockerfile":
            raise ValueError(f"sandbox: {path} is not named Dockerfile: agentloop builds no other")
        return await self.pool.build_image(Path(path.parent))


_open_pool = anyio.lowlevel.RunVar[_OpenPool | None]("_inspect_pool", None)


def _config_of(config: pydantic.BaseModel | str | None) -> ComputerConfig:
    if isinstance(config, ComputerConfig):
        return config
    if isinstance(config, pydantic.BaseModel):
        raise ValueError("sandbox: agentloop takes an image, a Dockerfile or a ComputerConfig")
    return ComputerConfig(image=config or "")


@contextmanager
def _errors_of_inspect() -> Iterator[None]:
    try:
        yield
    except (ComputerLost, ComputerEnded) as error:
        raise SandboxUnavailableError(str(error)) from error
    except OSError as error:
        if error.errno == errno.EFBIG:
            limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE_STR
            raise OutputLimitExceededError(limit, None) from error
        raise


@sandboxenv(name="agentloop")  # type: ignore[misc, untyped-decorator, unused-ignore]
class ComputerSandbox(SandboxEnvironment):  # type: ignore[misc, unused-ignore]
    """A computer, as Inspect sees it."""

    def __init__(self, box: Computer, stack: AsyncExitStack) -> None:
        super().__init__()
        self._box, self._stack = box, stack

    async def exec(
        self,
        cmd: list[str],
        input: str | bytes | None = None,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        user: str | None = None,
        timeout: int | None = None,
        timeout_retry: bool = True,
        concurrency: bool = True,
    ) -> ExecResult[str]:
        """Run a command. Nothing is started on this machine, so there is nothing to throttle."""
        limit = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE
        with _errors_of_inspect():
            result = await self._box.execute(
                cmd,
                stdin=input.encode() if isinstance(input, str) else input or b"",
                timeout_s=math.inf if timeout is None else timeout,
                max_output_bytes=limit,
                user=user,
                workdir=cwd,
                env=env,
            )
        output = result.stdout + result.stderr
        if result.status is CallStatus.OUTPUT_LIMIT:
            limit_text = SandboxEnvironmentLimits.MAX_EXEC_OUTPUT_SIZE_STR
            raise OutputLimitExceededError(limit_text, output)
        if result.status is CallStatus.TIMEOUT:
            error = TimeoutError(f"the command was killed after {timeout} s")
            error.truncated_output = output  # type: ignore[attr-defined]
            raise error
        assert result.exit_status is not None
        if result.exit_status == NOT_EXECUTABLE and "permission denied" in result.stderr.lower():
            raise PermissionError(errno.EACCES, result.stderr.strip())
        return ExecResult(result.ok, result.exit_status, result.stdout, result.stderr)

    async def write_file(self, file: str, contents: str | bytes) -> None:
        """Write a file. Raises OSError."""
        data = contents.encode() if isinstance(contents, str) else contents
        with _errors_of_inspect():
            await self._box.write(file, data)  # no deadline: each chunk has one

    async def read_file(self, file: str, text: bool = True) -> str | bytes:
        """Return a file's text or bytes. Raises OSError, OutputLimitExceededError."""
        limit = SandboxEnvironmentLimits.MAX_READ_FILE_SIZE
        with _errors_of_inspect():
            data = await self._box.read(file, max_bytes=limit)  # no deadline: each chunk has one
        return data.decode() if text else data

    async def connection(self, *, user: str | None = None) -> SandboxConnection:
        """Return how to look into the computer from this machine."""
        name = self._box.container_name
        command = f"docker exec -it -u {user or self._box.user} -w {self._box.workdir} {name} sh"
        return SandboxConnection(type="agentloop", command=command, container=name)

    @classmethod
    def default_concurrency(cls) -> int | None:
        return default_workers()

    @classmethod
    def config_files(cls) -> list[str]:
        return ["Dockerfile"]

    @classmethod
    def config_deserialize(cls, config: dict[str, object]) -> pydantic.BaseModel:
        return ComputerConfig.model_validate(config)

    @classmethod
    async def task_init(cls, task_name: str, config: pydantic.BaseModel | str | None) -> None:
        """Start the pool, if it is the first task, and build the image."""
        opened = _open_pool.get()
        if opened is None:
            _open_pool.set(opened := _OpenPool())
        opened.num_users += 1
        try:
            await opened.until_open()
            await opened.image(_config_of(config))
        except BaseException:
            with anyio.move_on_after(CLEANUP_S, shield=True):
                await cls.task_cleanup(task_name, config, True)
            raise

    @classmethod
    async def sample_init(
        cls, task_name: str, config: pydantic.BaseModel | str | None, metadata: dict[str, str]
    ) -> dict[str, SandboxEnvironment]:
        opened, wanted = _open_pool.get(), _config_of(config)
        if opened is None:
            raise SandboxUnavailableError("task_init has not been called")
        image, stack = await opened.image(wanted), AsyncExitStack()
        fields = wanted.model_dump(include={"network", "user", "workdir"})
        box = await stack.enter_async_context(
            opened.pool.computer(image, limits=wanted.limits, **fields)
        )
        return {"default": cls(box, stack)}

    @classmethod
    async def sample_cleanup(
        cls,
        task_name: str,
        config: pydantic.BaseModel | str | None,
        environments: dict[str, SandboxEnvironment],
        interrupted: bool,
    ) -> None:
        for environment in environments.values():
            await environment.as_type(cls)._stack.aclose()

    @classmethod
    async def task_cleanup(
        cls, task_name: str, config: pydantic.BaseModel | str | None, cleanup: bool
    ) -> None:
        """End the pool, with all of its computers, if it was the last task."""
        opened = _open_pool.get()
        if opened is not None:
            opened.num_users -= 1
            if not opened.num_users:
                _open_pool.set(None)
                await opened.close()

    @classmethod
    async def cli_cleanup(cls, id: str | None) -> None:
        """Remove what dead processes have left: `inspect sandbox cleanup agentloop`."""
        async with connect() as docker:
            await reap_containers(docker, local=False)
