"""Errors of the sandbox itself. A failing program is never an exception.

SandboxError
  SandboxUnavailable   no worker could be started
    NoEngine           no Docker Engine listens at the address
  Overloaded           too many callers wait for a session (calls get the status `overloaded`)
  ProgramUnsupported   a program cannot run in a container of its own here
  SessionLost          the process behind a session is gone, with its variables; LostBy tells
                       the cause
  ComputerLost         a computer is gone, with its files, and not by its programs
  ProtocolError        the peer of a connection violated the framing
"""

from __future__ import annotations

import enum


class SandboxError(Exception):
    """Base class of all errors that the sandbox raises."""


class SandboxUnavailable(SandboxError):
    """The pool could not start any worker; the message explains why."""


class NoEngine(SandboxUnavailable):
    """A Docker Engine's address on which nothing listens.

    This is distinct from an engine that fails, which is never replaced by a weaker backend.
    """


class Overloaded(SandboxError):
    """Too many callers are waiting."""


class ProgramUnsupported(SandboxError):
    """A program cannot run in a container of its own; the message says what to change."""


class LostBy(enum.StrEnum):
    """The cause of a session's loss."""

    PROGRAM = "program"  # its own code ended the process, or reached a limit
    CALLER = "caller"  # the caller closed it, or cancelled a cell while it ran
    INFRASTRUCTURE = "infrastructure"  # its worker or other calls; says nothing about its code


class SessionLost(SandboxError):
    """A session's process has ended, and its variables are gone.

    Attributes:
        by: the cause. Only PROGRAM may count against the code that ran in the session.
    """

    def __init__(self, message: str, by: LostBy = LostBy.INFRASTRUCTURE) -> None:
        super().__init__(message)
        self.by = by


class ComputerLost(SandboxError):
    """A computer is gone, with its files, for reasons that say nothing about what ran in it.

    One that its own programs have ended, at the limit of its disk, is not lost: its commands end as
    `killed`, and its files raise OSError.
    """


class ProtocolError(SandboxError):
    """A frame is invalid: too long, or not JSON as the protocol defines it."""
