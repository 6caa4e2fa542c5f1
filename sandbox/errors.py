"""What can go wrong with the sandbox itself. A failing program is never an exception.

SandboxError
  SandboxUnavailable   no worker could be started
    NoEngine           no Docker Engine listens where it should
  Overloaded           no room to wait in (sessions; calls get the status `overloaded`)
  SessionLost          the process behind a session is gone, and its variables with it
  ProtocolError        the other side of a connection broke the framing
"""

from __future__ import annotations


class SandboxError(Exception):
    """Base of everything that the sandbox raises."""


class SandboxUnavailable(SandboxError):
    """No worker could be started; the message says what is missing."""


class NoEngine(SandboxUnavailable):
    """Nothing listens where the Docker Engine should. One that is there but fails is another
    matter: it is never replaced by something weaker."""


class Overloaded(SandboxError):
    """The bound on what may wait is reached."""


class SessionLost(SandboxError):
    """The session's process ended: killed by a limit, by its own doing or with its worker."""


class ProtocolError(SandboxError):
    """A frame that can't be one: too long, or not the JSON that was agreed."""
