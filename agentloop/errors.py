"""The runtime's errors, each named after the boundary that it crossed.

    AgentLoopError
     ├─ SettingsError          a setting, in a file or on the command line
     ├─ RunFolderError         a run's files: missing, damaged, on a full disk, or in use
     ├─ ModelError             a model folder, its tokenizer or its chat template
     ├─ RequestError           a caller's request: a message, a field, a tool
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

from collections.abc import Iterator
from pathlib import Path

__all__ = [
    "AgentLoopError",
    "DataError",
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
    "sole",
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
    found = list(leaves(error))
    return next((one for one in found if not isinstance(one, spared)), found[0])


def sole(error: BaseException) -> BaseException:
    """Return the only error inside nested groups, or the group itself if it holds several."""
    found = list(leaves(error))
    return found[0] if len(found) == 1 else error


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
