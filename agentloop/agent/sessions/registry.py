"""The open sessions of a runtime: found by their keys, bounded, closed when idle."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Annotated

import anyio
import pydantic

from agentloop.agent.sessions.session import ModelSession
from agentloop.errors import ServerError, UnknownSession
from agentloop.trajectory import StopReason, Trajectory

OpenSession = Callable[..., ModelSession]
"""Returns a new session for its name and further options of `ModelSession`."""

OnClosed = Callable[[ModelSession, list[Trajectory]], None]

_SWEEP_S = 5.0


class SessionSettings(pydantic.BaseModel):
    """Sessions of the HTTP service: what it records of each client."""

    model_config = pydantic.ConfigDict(extra="forbid")

    max_open: int = pydantic.Field(
        1024, ge=1, description="Maximum number of open sessions; further ones are refused."
    )
    idle_timeout_s: float = pydantic.Field(
        3600.0, gt=0, description="Close a session after this time without a request."
    )
    record: str = pydantic.Field(
        "", description="Folder where conversations are recorded, as a run's. Empty: nowhere."
    )
    record_max_mib: int = pydantic.Field(
        4096, ge=1, description="Maximum size of the records; then the oldest are deleted."
    )


ServedSessions = Annotated[
    SessionSettings,
    pydantic.Field(
        json_schema_extra={"is_one_setting": True},
        description="Sessions of `agentloop serve`: a table with max_open, idle_timeout_s "
        "(docs/sessions.md), record and record_max_mib (docs/recorded-sessions.md).",
    ),
]
"""The setting `sessions`."""


class ModelSessions:
    """The open sessions."""

    def __init__(
        self,
        settings: SessionSettings,
        open_session: OpenSession,
        *,
        on_closed: OnClosed = lambda session, trajectories: None,
    ) -> None:
        """
        Args:
            on_closed: called with each session that is closed, and its trajectories.
        """
        self._settings = settings
        self._open_session = open_session
        self._on_closed = on_closed
        self._by_key: dict[str, ModelSession] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def open(
        self, name: str | None = None, *, is_listed: bool = True, **options: object
    ) -> ModelSession:
        """Open a session.

        Args:
            name: public name; None: a new one.
            is_listed: whether clients can find it by its key, and it counts as one of the open.
            options: arguments of `ModelSession`.

        Raises:
            ServerError: too many are open.
        """
        if is_listed and len(self._by_key) >= self._settings.max_open:
            raise ServerError(
                f"{len(self._by_key)} sessions are open, and no more are allowed "
                "(sessions.max_open): close some"
            )
        session = self._open_session(name or uuid.uuid4().hex, **options)
        if is_listed:
            self._by_key[session.key] = session
        return session

    def __getitem__(self, key: str) -> ModelSession:
        """Return an open session.

        Raises:
            UnknownSession: there is none with this key.
        """
        session = self._by_key.get(key)
        if session is None:
            raise UnknownSession("session: no session is open under this address")
        return session

    def close(
        self, session: ModelSession, stop_reason: StopReason | None = None
    ) -> list[Trajectory]:
        """Close a session and return its trajectories; see `ModelSession.close`."""
        self._by_key.pop(session.key, None)
        trajectories = session.close(stop_reason)
        self._on_closed(session, trajectories)
        return trajectories

    async def close_idle(self) -> None:
        """Close sessions that have been idle for too long, until cancelled."""
        while True:
            await anyio.sleep(min(_SWEEP_S, self._settings.idle_timeout_s))
            before_s = time.monotonic() - self._settings.idle_timeout_s
            for session in list(self._by_key.values()):
                if session.is_idle and session.used_s < before_s:
                    self.close(session)

    def close_all(self) -> None:
        """Close all sessions."""
        for session in list(self._by_key.values()):
            self.close(session)
