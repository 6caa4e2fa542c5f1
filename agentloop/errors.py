"""Every error of the runtime, named after the boundary it crossed.

    AgentLoopError
     ├─ SettingsError          a setting, in a file or on the command line
     ├─ ModelError             a model folder, its tokenizer or its chat template
     ├─ RequestError           what a caller asked for: a message, a field, a tool
     │   ├─ PromptTooLong
     │   ├─ UnknownModel
     │   └─ Unsupported
     ├─ NotThere               what a reader of the page asked for is not kept, or never was
     ├─ DataError              a task's data: a file, a line of it, a field
     ├─ RewardError            a reward function of the user's: it raised, or took too long
     └─ ServerError            an inference server (infrastructure: retried, never a reward)
         ├─ ServerStartError
         ├─ ServerUnavailable  no connection, or it broke
         └─ ServerRefused      the server answered, with an error

A rollout that fails is not an error but data: a `Trajectory` with its `StopReason`.
"""

from __future__ import annotations

__all__ = [
    "AgentLoopError",
    "DataError",
    "ModelError",
    "NotThere",
    "PromptTooLong",
    "RequestError",
    "RewardError",
    "ServerError",
    "ServerRefused",
    "ServerStartError",
    "ServerUnavailable",
    "SettingsError",
    "UnknownModel",
    "Unsupported",
    "sole",
]


def sole(error: BaseException) -> BaseException:
    """The one error that a group stands for, however deep; the group where there are several."""
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        if len(inner.exceptions) > 1:
            return error
        inner = inner.exceptions[0]
    return inner


class AgentLoopError(Exception):
    """Base of every error that agentloop raises on purpose."""


class SettingsError(AgentLoopError):
    """A setting is unknown or has a bad value; the message names it and where it stands."""


class ModelError(AgentLoopError):
    """A model folder cannot be used: no tokenizer, no chat template, a template of another kind."""


class RequestError(AgentLoopError):
    """What a caller asked for is not possible; the message names the field.

    Attributes:
        code: What programs know the error by, in OpenAI's terms.
    """

    code: str | None = None


class PromptTooLong(RequestError):
    """The prompt leaves no room for a single token of response."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """Another model was asked for than the one that is served."""

    code = "model_not_found"


class Unsupported(RequestError):
    """A parameter would change the answer, and is not supported."""

    code = "unsupported_parameter"


class NotThere(AgentLoopError):
    """A rollout, group or run that was asked for does not exist, or is no longer kept."""


class DataError(AgentLoopError):
    """Tasks cannot be read; the message names the file, the line or row, and the field."""


class RewardError(AgentLoopError):
    """A reward function raised, took too long or gave something that is no reward. Never a 0."""


class ServerError(AgentLoopError):
    """An inference server failed. Infrastructure: worth a retry elsewhere."""


class ServerStartError(ServerError):
    """A server that we started did not become ready; the message ends with its log's tail."""


class ServerUnavailable(ServerError):
    """A server could not be reached, or the connection broke before the answer was whole."""


class ServerRefused(ServerError):
    """A server answered a request with an error of its own.

    Attributes:
        status: the HTTP status.
    """

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status
