"""What can go wrong with the sandbox itself. A failing program is never an exception.

SandboxError
  SandboxUnavailable   no worker could be started
    NoEngine           no Docker Engine listens where it should
  Overloaded           no room to wait in (sessions; calls get the status `overloaded`)
  SessionLost          the process behind a session is gone, and its variables with it; by whose
                       doing, its LostBy says
  ProtocolError        the other side of a connection broke the framing
"""

from __future__ import annotations

import enum


class SandboxError(Exception):
    """Base of everything that the sandbox raises."""


class SandboxUnavailable(SandboxError):
    """No worker could be started; the message says what is missing."""


class NoEngine(SandboxUnavailable):
    """Nothing listens where the Docker Engine should. One that is there but fails is another
    matter: it is never replaced by something weaker."""


class Overloaded(SandboxError):
    """The bound on what may wait is reached."""


class LostBy(enum.StrEnum):
    """By whose doing a session was lost."""

    PROGRAM = "program"  # its own code: it ended its process, or reached a limit
    CALLER = "caller"  # who closed it, or gave up a cell while it ran
    INFRASTRUCTURE = "infrastructure"  # its worker, or calls beside it: says nothing about its code


class SessionLost(SandboxError):
    """The session's process has ended, and its variables are gone.

    Attributes:
        by: whose doing it was. Only PROGRAM may count against the code that ran in it.
    """

    def __init__(self, message: str, by: LostBy = LostBy.INFRASTRUCTURE) -> None:
        super().__init__(message)
        self.by = by


class ProtocolError(SandboxError):
    """A frame that can't be one: too long, or not the JSON that was agreed."""
