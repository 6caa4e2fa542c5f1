"""The sandbox as an environment sees it: its failures are never those of a program."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from agentloop.errors import InfrastructureFailed
from agentloop.sandbox import (
    CallError,
    CallResult,
    CallStatus,
    Computer,
    ComputerLimits,
    ComputerLost,
    LostBy,
    Overloaded,
    Pool,
    Program,
    ProgramEnd,
    SandboxError,
    SandboxUnavailable,
    Session,
    SessionLost,
    Snapshot,
)
from agentloop.sandbox.languages import Language

__all__ = ["EnvironmentSandbox", "EnvironmentSession"]

RecordFailure = Callable[[str], InfrastructureFailed]
"""Records a failure of the infrastructure, and returns it as an error."""


class EnvironmentSandbox:
    """Runs untrusted Python for an environment."""

    def __init__(self, pool: Pool, record_failure: RecordFailure) -> None:
        self._pool = pool
        self._record_failure = record_failure

    async def run(
        self,
        code: str,
        stdin: str = "",
        *,
        timeout_s: float | None = None,
        language: Language = "python",
    ) -> CallResult:
        """Run a program and return how it ended; a program that fails is a result.

        Args:
            timeout_s: time limit of the program. By default, the setting `sandbox.timeout_s`.
            language: of the program; the sandbox may lack what others than Python need.

        Raises:
            InfrastructureFailed: the sandbox failed.
            ProgramUnsupported: the sandbox lacks what runs the language.
        """
        result = await self._pool.run(code, stdin, timeout_s, language=language)
        return _check_scorable(result, self._record_failure)

    @asynccontextmanager
    async def session(self) -> AsyncIterator[EnvironmentSession]:
        """Open a process that keeps its variables between runs.

        Raises:
            InfrastructureFailed: the sandbox failed.
        """
        async with AsyncExitStack() as stack:
            try:
                session = await stack.enter_async_context(self._pool.session())
            except SandboxError as error:
                raise self._record_failure(f"sandbox: {error}") from error
            yield EnvironmentSession(session, self._record_failure)

    @asynccontextmanager
    async def computer(
        self,
        image: str = "",
        *,
        files: Mapping[str, bytes | Path] | None = None,
        network: str = "none",
        limits: ComputerLimits | None = None,
        user: str | None = None,
        workdir: str | None = None,
        env: Mapping[str, str] | None = None,
        snapshot: Snapshot | None = None,
    ) -> AsyncIterator[Computer]:
        """Open a computer: a root file system of its own, shells that keep their state, files.

        Arguments are those of `sandbox.Pool.computer`.

        Raises:
            InfrastructureFailed: the sandbox failed, or the computer was lost meanwhile.
            ProgramUnsupported: there is no engine, here or on a host, or it lacks the image.
        """
        try:
            async with self._pool.computer(
                image,
                files=files,
                network=network,
                limits=limits,
                user=user,
                workdir=workdir,
                env=env,
                snapshot=snapshot,
            ) as box:
                yield box
        except (SandboxUnavailable, ComputerLost, Overloaded) as error:
            raise self._record_failure(f"sandbox: {error}") from error

    async def build_image(self, folder: Path) -> str:
        """Build an image from a folder with a Dockerfile, if it has not been built yet.

        Raises:
            InfrastructureFailed: a step of it failed, or the engine did.
        """
        try:
            return await self._pool.build_image(folder)
        except SandboxUnavailable as error:
            raise self._record_failure(f"sandbox: {error}") from error

    @property
    def has_containers(self) -> bool:
        """True if its programs run in containers."""
        return self._pool.has_containers

    @property
    def allows_weak_isolation(self) -> bool:
        """True if the user trusts what runs here: the setting `sandbox.allow_weak_isolation`."""
        return self._pool.settings.allow_weak_isolation

    async def run_program(self, program: Program, *, timeout_s: float) -> ProgramEnd:
        """Run a program of any language in a container of its own; one that fails is a result.

        Raises:
            InfrastructureFailed: the sandbox failed.
            ProgramUnsupported: the program cannot run here; the message says what to change.
        """
        try:
            return await self._pool.run_program(program, timeout_s)
        except SandboxUnavailable as error:
            raise self._record_failure(f"sandbox: {error}") from error


class EnvironmentSession:
    """A process of the sandbox that keeps its variables between runs."""

    def __init__(self, session: Session, record_failure: RecordFailure) -> None:
        self._session = session
        self._record_failure = record_failure

    async def run(self, code: str, *, timeout_s: float | None = None) -> CallResult:
        """Run code in the process; `result` is the value of its last expression.

        If earlier code has ended the process, that is the result, with the status `killed`: a
        model that ends it must not thereby fail the environment.

        Raises:
            InfrastructureFailed: the sandbox failed.
        """
        try:
            return _check_scorable(
                await self._session.run(code, timeout_s=timeout_s), self._record_failure
            )
        except SessionLost as error:
            if error.by is LostBy.PROGRAM:
                reason = CallError("SessionLost", str(error))
                return CallResult(0, CallStatus.KILLED, error=reason)
            raise self._record_failure(f"sandbox: {error}") from error


def _check_scorable(result: CallResult, record_failure: RecordFailure) -> CallResult:
    if result.status.is_unscorable:
        reason = result.error.message if result.error else str(result.status)
        raise record_failure(f"sandbox: {reason}")
    return result
