"""The messages between a trainer and its runtimes, as JSON, and the encoding of rollouts.

    TrainerState         what runtimes are to do; it holds a Recipe and a WeightsAnnouncement
    WorkerStatus         what a runtime has loaded
    Ticket ──> Result    a group to roll out, and its rollouts

Trainer and runtimes must have the same version of this package. They read each other's state
before anything else, so only `TrainerState` and `WorkerStatus` carry the version.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Self

import pydantic

from agentloop import distribution
from agentloop.agent.chat_format import ChatSettings
from agentloop.agent.mcp import McpServerSettings
from agentloop.agent.rollout import Budget
from agentloop.environments.environment import EnvSettings
from agentloop.environments.mixture import EnvsSettings, RunEnvironment, environments_of
from agentloop.environments.rewards.reward import RewardSettings
from agentloop.environments.tasks.sources import Task, TasksSettings
from agentloop.errors import AgentLoopError
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.sglang.weight_updates import Pause
from agentloop.plain_json import ValidText, dumps, loads
from agentloop.training.credit.roc import RocSettings
from agentloop.training.credit.settings import CreditSettings
from agentloop.training.rollouts import Purpose

__all__ = [
    "FleetError",
    "Recipe",
    "Result",
    "Ticket",
    "TrainerState",
    "VersionError",
    "WeightsAnnouncement",
    "WorkerStatus",
    "incarnation_in",
    "packed",
    "unpacked",
]

_UNKNOWN = "(version unknown)"


@functools.cache
def _version() -> str:
    return distribution.version()


class _Message(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True)

    def to_json(self) -> bytes:
        return dumps(self.model_dump())

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse the output of `to_json`."""
        return cls.model_validate(loads(data))


class FleetError(AgentLoopError):
    """The processes of a fleet do not fit together: their versions, settings or trainers differ."""


class VersionError(FleetError):
    """A process of the fleet has another version of this package.

    Attributes:
        theirs, ours: the versions of the other process and of this one.
    """

    def __init__(self, theirs: str, ours: str) -> None:
        super().__init__(
            f"the trainer has agentloop {theirs} and this runtime {ours}: install the same version "
            "on all machines"
        )
        self.theirs, self.ours = theirs, ours


class _VersionedMessage(_Message):
    """A message by which processes meet: it states the sender's version of this package."""

    agentloop: str = pydantic.Field(default_factory=_version)

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Parse the output of `to_json`.

        Raises:
            VersionError: the sender has another version than this process.
        """
        told = loads(data)
        theirs = told.get("agentloop", _UNKNOWN)
        if theirs != _version():
            raise VersionError(str(theirs), _version())
        return cls.model_validate(told)


def incarnation_in(state: bytes) -> str:
    """Return the incarnation in a `TrainerState` of any version."""
    return str(loads(state).get("incarnation", ""))


class Recipe(_Message):
    """The settings that runtimes take from the trainer.

    Attributes:
        envs: the environments, without the settings of their tasks, which the trainer draws.
        group_size: rollouts per group, for which a runtime waits for capacity.
        seed, early_stop_at: those of `LoopSettings`.
    """

    model: str
    chat: ChatSettings
    env: EnvSettings
    envs: list[EnvsSettings] = []
    mcp: dict[str, McpServerSettings] = pydantic.Field(default_factory=dict)
    tools: list[str]
    tool_timeout_s: float
    sampling: Sampling
    budget: Budget
    reward: RewardSettings
    roc: RocSettings
    credit: CreditSettings
    group_size: int
    seed: int
    early_stop_at: int

    @property
    def environments(self) -> list[RunEnvironment]:
        """The environments of the run."""
        return environments_of(self.env, self.envs, TasksSettings(), self.budget)


class WeightsAnnouncement(_Message):
    """The weights that runtimes are to load.

    Attributes:
        number: number of the weight sync in this trainer process; a version may come twice.
        pause: treatment of turns that are being generated (`weights.pause`).
        checksum: the servers' checksum of the weights; empty until the right one is known.
    """

    number: int
    version: str
    folder: str
    timeout_s: float
    pause: Pause = "retract"
    checksum: str = ""


class TrainerState(_VersionedMessage):
    """The trainer's state, published repeatedly.

    Attributes:
        incarnation: id of this trainer process; tickets of another one are obsolete.
        folder: folder for results; a runtime shares it if it contains a file named like
            `incarnation`.
        over: whether the run has ended.
    """

    incarnation: str
    recipe: Recipe
    lease_s: float
    max_tries: int
    max_result_mib: int
    folder: str
    weights: WeightsAnnouncement | None = None
    over: bool = False


class WorkerStatus(_VersionedMessage):
    """A runtime's status: the last weight sync it completed, or the error of the current one."""

    incarnation: str = ""
    number: int = -1
    checksum: str = ""
    num_servers: int = 0
    error: ValidText = ""


class Ticket(_Message):
    """A group to be rolled out: the arguments of `RollsOut.group`."""

    incarnation: str
    name: str
    task: Task
    size: int
    budget: Budget
    oldest: int
    purpose: Purpose = Purpose.TRAIN

    @property
    def key(self) -> str:
        return f"{self.incarnation}-{self.name}"


class Result(_Message):
    """The result of a ticket: rollouts, or `error` with a `message`.

    Attributes:
        rows: name of the rollouts' file in the trainer's folder, or of their pieces in Redis. It
            is unique to this result, since two runtimes may have done the same ticket.
        num_pieces: number of pieces in Redis; 0: the rollouts are in a file.
    """

    key: str
    runtime: str
    error: str = ""
    message: ValidText = ""
    has_signal: bool = False
    figures: Mapping[str, Any] = {}
    rows: str = ""
    num_pieces: int = 0


def packed(rows: Sequence[Mapping[str, Any]]) -> bytes:
    """Serialize and compress rows. This is slow: call it in a thread."""
    return zlib.compress(dumps(list(rows)), 1)


def unpacked(data: bytes) -> list[dict[str, Any]]:
    """Decode the output of `packed`. Raises ValueError if it is damaged."""
    try:
        rows = loads(zlib.decompress(data))
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not isinstance(rows, list):
        raise ValueError("expected a list of rows")
    return rows
