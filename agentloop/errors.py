"""The runtime's errors, each named after the boundary that it crossed.

    AgentLoopError
     ├─ SettingsError          a setting, in a file or on the command line
     ├─ RunFolderError         a run's files: missing, damaged, on a full disk, or in use
     ├─ ModelError             a model folder, its tokenizer or its chat template
     ├─ RequestError           a caller's request: a message, a field, a tool
     │   ├─ EnvironmentFailed  an environment failed on each rollout of a task
     │   ├─ PromptTooLong
     │   ├─ UnknownModel
     │   ├─ UnknownSession
     │   └─ Unsupported
     ├─ NotThere               a rollout, group or run that the page asked for does not exist
     ├─ DataError              task data: a file, a line, a field
     ├─ RewardError            the user's reward function: it raised or took too long
     ├─ InfrastructureFailed   what an environment's agent or judge needs has failed: no reward
     ├─ LimitReached           an endpoint may be asked no more: its max_requests or max_cost
     └─ ServerError            a server (infrastructure: retried, never a reward)
         ├─ McpServerError     an MCP server: not reached, not ready, or dead
         ├─ ServerStartError
         ├─ ServerUnavailable  no connection, or a broken one
         └─ ServerRefused      the server answered with an error

A failed rollout is not an error but data: a `Trajectory` with a `StopReason`.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

__all__ = [
    "AgentLoopError",
    "DataError",
    "EnvironmentFailed",
    "InfrastructureFailed",
    "LimitReached",
    "McpServerError",
    "ModelError",
    "NotThere",
    "PromptTooLong",
    "RequestError",
    "RewardError",
    "RunFolderError",
    "ServerError",
    "ServerRefused",
    "ServerStartError",
    "ServerUnavailable",
    "SettingsError",
    "UnknownModel",
    "UnknownSession",
    "Unsupported",
    "culprit",
    "leaves",
    "message_of",
    "place_of",
    "sole",
    "summary_of",
    "user_entries",
]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested groups, or the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def culprit(error: Exception, *spared: type[Exception]) -> BaseException:
    """Return the first error inside nested groups that is none of `spared`, or else the first.

    Of several tasks that fail, one has a bug, and others are often only its victims.
    """
    errors = list(leaves(error))
    return next((leaf for leaf in errors if not isinstance(leaf, spared)), errors[0])


def sole(error: BaseException) -> BaseException:
    """Return the only error inside nested groups, or the group itself if it holds several."""
    errors = list(leaves(error))
    return errors[0] if len(errors) == 1 else error


def message_of(error: BaseException) -> str:
    """Return the message of an error of foreign code; "" if its own `__str__` raises.

    That of a group consists of those of its errors.
    """
    try:
        return "; ".join(dict.fromkeys(map(str, leaves(error))))
    except Exception:
        return ""


def summary_of(error: BaseException) -> str:
    """Return the type and the message of an error in one line, of whatever code it comes."""
    message = " ".join(message_of(error).split())
    return f"{type(error).__name__}{': ' * bool(message)}{message}"


def user_entries(error: BaseException) -> list[TracebackType]:
    """Return the entries of an error's traceback outside agentloop and the standard library.

    Those in other installed packages count only if there are no others.
    """
    entries = []
    entry = sole(error).__traceback__
    while entry is not None:
        entries.append(entry)
        entry = entry.tb_next
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    ours = str(Path(__file__).parent)
    for libraries in ((ours, *installed), (ours, installed[0])):
        outside = [
            entry
            for entry in entries
            if not entry.tb_frame.f_code.co_filename.startswith(libraries)
        ]
        if outside:
            return outside
    return []


def place_of(error: BaseException) -> str:
    """Return the innermost line of the user's code below which an error was raised.

    It is a file's name and a line's number, such as `game.py:13`, or "" if agentloop raised it.
    """
    if not (entries := user_entries(error)):
        return ""
    return f"{Path(entries[-1].tb_frame.f_code.co_filename).name}:{entries[-1].tb_lineno}"


class AgentLoopError(Exception):
    """Base class of all errors that agentloop raises on purpose."""


class InfrastructureFailed(AgentLoopError):
    """The infrastructure failed while an environment ran; the rollout gets no reward.

    An environment need not handle it. If its agent's conversation was lost, the rollout has no
    reward even if it does.
    """


class LimitReached(AgentLoopError):
    """An endpoint has had as many requests, or cost as much, as its user allows."""


class SettingsError(AgentLoopError):
    """A setting is unknown or invalid; the message names it and its source."""


class RunFolderError(AgentLoopError):
    """A run's files are missing, damaged or cannot be written, or another process uses the run."""


class ModelError(AgentLoopError):
    """A model folder cannot be read or written, or its tokenizer or template is unsupported."""


class RequestError(AgentLoopError):
    """A request is invalid or cannot be served; the message names the field.

    Attributes:
        code: OpenAI's code for the error, for clients to match on.
    """

    code: str | None = None


class EnvironmentFailed(RequestError):
    """An environment failed on each rollout of a task; the message names it and its error."""


class PromptTooLong(RequestError):
    """The prompt fills the context: no response token fits."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """The request names a model that is not served."""

    code = "model_not_found"


class UnknownSession(RequestError):
    """The key of the request belongs to no open session."""

    code = "session_not_found"


class Unsupported(RequestError):
    """The request sets a parameter that affects the answer but is not supported."""

    code = "unsupported_parameter"


class NotThere(AgentLoopError):
    """The requested rollout, group or run does not exist or is no longer kept."""


class DataError(AgentLoopError):
    """Tasks cannot be read; the message names the file, the line or row, and the field."""


class RewardError(AgentLoopError):
    """A reward function raised, timed out or returned no number. This is never a reward of 0."""


class ServerError(AgentLoopError):
    """A server failed; a request to an inference server may be retried on another one.

    Attributes:
        log_path: the log that the message quotes, if it is that of a process started here.
    """

    def __init__(self, message: str, *, log_path: Path | None = None) -> None:
        super().__init__(message)
        self.log_path = log_path


class ServerStartError(ServerError):
    """A server process did not become ready; the message ends with the tail of its log."""


class McpServerError(ServerError):
    """An MCP server could not be reached, was not ready in time, or has died too often."""


class ServerUnavailable(ServerError):
    """A server could not be reached, or the connection broke before the response was complete."""


class ServerRefused(ServerError):
    """A server answered a request with an error.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_about_request(self) -> bool:
        """True if the server refuses what the request contains, so that only this one fails."""
        return self.status in (400, 413, 422)
