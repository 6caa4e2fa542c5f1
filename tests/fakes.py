"""Stand-ins that several tests share: progress, a sandbox, a host, servers' clients, a clock."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import anyio.lowlevel

from agentloop.sandbox import CallResult, CallStatus, LostBy, SandboxError
from agentloop.training.run.status import RunStatus


class RecordedProgress:
    """Records the progress of a run (`ProgressLine`, `Report`)."""

    def __init__(self, line: str = "") -> None:
        self.line = line  # the newest that passes by
        self.passing: list[str] = []
        self.lines: list[str] = []
        self.statuses: list[RunStatus] = []

    def __call__(self, line: str) -> None:
        self.line = line
        self.passing.append(line)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def show(self, status: RunStatus) -> None:
        self.statuses.append(status)

    @property
    def status(self) -> RunStatus | None:
        return self.statuses[-1] if self.statuses else None


class FakePool:
    """A sandbox, and a session of it, whose calls have these results in order.

    An exception is raised, and a function makes the results of all further calls from the program,
    its input and its time limit. A program `hang` never ends, and one that exits loses its session.
    """

    def __init__(
        self,
        *results: CallResult | Exception | Callable[[str, str, float | None], CallResult],
        no_session: Exception | None = None,
    ) -> None:
        self.results = list(results)
        self.no_session = no_session
        self.asked: list[tuple[str, str, float | None]] = []
        self.lost_by: LostBy | None = None
        self.num_sessions = self.num_open = 0
        self.num_running = self.max_running = 0

    async def run(
        self, code: str, stdin: str = "", timeout_s: float | None = None, language: str = "python"
    ) -> CallResult:
        self.asked.append((code, stdin, timeout_s))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            if code == "hang":
                await anyio.sleep_forever()
            await anyio.lowlevel.checkpoint()
        finally:
            self.num_running -= 1
        if callable(result := self.results[0]):
            return result(code, stdin, timeout_s)
        del self.results[0]
        if isinstance(result, Exception):
            raise result
        if "_exit" in code:
            self.lost_by = LostBy.PROGRAM
        return result

    @asynccontextmanager
    async def session(self) -> AsyncIterator[FakePool]:
        if self.no_session is not None:
            raise self.no_session
        self.num_sessions += 1
        self.num_open += 1
        self.lost_by = None
        try:
            yield self
        finally:
            self.num_open -= 1


Said = dict[str, Any] | CallStatus | SandboxError
"""What a program says of a puzzle; how it ended while it scored; what the sandbox raised."""


def scoring_pool(*outcomes: Said, gets_far: bool = True) -> FakePool:
    """Return a sandbox in which answers to puzzles are scored; `gets_far`: scoring begins."""
    remaining = list(outcomes)

    def score(code: str, stdin: str, timeout_s: float | None) -> CallResult:
        mark, stated = json.loads(stdin)["mark"], remaining.pop(0)
        if isinstance(stated, SandboxError):
            raise stated
        started = f"\n{mark} scores\n" if gets_far else ""
        if isinstance(stated, CallStatus):
            return CallResult(0, stated, stdout=started, stderr="no luck")
        output = f"{started}\n{mark if stated else 'not the mark'} {json.dumps(stated)}\n"
        return CallResult(0, CallStatus.OK, stdout=output)

    return FakePool(score)


class NoModel:
    """A host of environments that has only what it is given (`Host`)."""

    resolve_tools: Any = None
    rollout: Any = None

    def __init__(self, pool: Any = None, session_listener: Any = None) -> None:
        self.pool: Any = pool
        self.session_listener: Any = session_listener

    async def listen_for_sessions(self) -> None:
        """Do nothing: it listens, or nobody asks."""


class RecordedClients:
    """Records what the clients of servers are told (`keep_alive`)."""

    def __init__(self, *urls: str) -> None:
        self.calls: list[str] = []
        self.dead: set[str] = set()
        self.disabled: set[str] = set()
        self.known = set(urls)
        self.may_start = anyio.Event()
        self.may_start.set()

    @asynccontextmanager
    async def starting(self) -> AsyncIterator[None]:
        await self.may_start.wait()
        yield

    def mark_exited(self, url: str, reason: str) -> None:
        self.calls.append(f"{url} exited: {reason}")

    def mark_restarting(self, url: str) -> None:
        self.calls.append(f"{url} restarting")

    def is_dead(self, url: str) -> bool:
        return url in self.dead

    def is_enabled(self, url: str) -> bool:
        return url not in self.disabled

    def give_up(self, url: str) -> bool:
        self.calls.append(f"{url} given up")
        self.disabled.add(url)
        return bool(self.known - self.disabled)


class Clock:
    """A clock that only a test moves."""

    def __init__(self, now_s: float = 100.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class Unprintable(Exception):
    """An error whose text cannot be had."""

    def __str__(self) -> str:
        raise KeyError("message")
