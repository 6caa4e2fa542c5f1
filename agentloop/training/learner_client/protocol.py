"""The messages between the trainer and rank 0 of the learner: one JSON object a line.

    request  {"op": "publish", "folder": "/run/weights/7", "version": "7"}
    reply    {"ok": true, "version": "7", "sha256": {...}, "num_bytes": 123, "seconds": 0.5}
    failure  {"ok": false, "error": "...", "fatal": false, "on_purpose": false}

Before the first request, rank 0 sends a `ReadyReply`. Each request is answered by its own type of
reply or by a `Failure`. Both ends are of the same version of this package, so an unknown operation
or field is an error.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import pydantic
from pydantic import Field

from agentloop.errors import AgentLoopError
from agentloop.training.weight_sync.layout import Layout


class MessageError(AgentLoopError):
    """A line is not a valid message; the error names the operation or the field."""


class _Message(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, strict=True)


class Reply(_Message):
    """The reply to a request that has been carried out. By itself, one without content."""

    ok: Literal[True] = True


class Failure(_Message):
    """The reply to a request that has failed.

    Attributes:
        fatal: the learner ends; otherwise it continues, as if it had not been asked.
        on_purpose: the learner has ended itself, so a restart would not help.
    """

    ok: Literal[False] = False
    error: str
    fatal: bool = False
    on_purpose: bool = False


R = TypeVar("R", bound=Reply, covariant=True)


class Request(_Message, Generic[R]):
    """A request that is answered by an `R`, which is also its `reply_type`."""

    op: str
    reply_type: ClassVar[type[Any]] = Reply


class ReadyReply(Reply):
    """The first message of rank 0: all ranks are ready.

    Attributes:
        made_with: everything besides the settings that determines the exact result of a step, by
            name: versions of packages, the processor or the GPU, and the number of threads.
    """

    ready: Literal[True] = True
    num_ranks: int
    device: str
    made_with: dict[str, str] = {}
    num_parameters: int
    num_trained: int


class _Counters(Reply):
    """The policy's counters; see `agentloop.learner.policy.Policy.counters`."""

    num_updates: int
    num_skipped: int
    warm_from: int


class TrainingState(_Message):
    """The state that a trainer saves with a checkpoint, to resume from it.

    Attributes:
        step: the last completed step.
        version: training on rollouts: version of the weights.
        lineage: supervised fine-tuning: checksum of the data of all steps so far.
    """

    step: int
    version: int = 0
    lineage: str | None = None


# --- training ---------------------------------------------------------------------------------


class StepReply(Reply):
    """The metrics of a step. Besides the loss, which ones there are depends on the settings."""

    model_config = pydantic.ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int | float | None]

    loss: float | None = None

    def metrics(self) -> dict[str, int | float | None]:
        """Return all metrics by name; None where one is not finite or does not apply."""
        return {"loss": self.loss, **self.__pydantic_extra__}


class StepRequest(Request[StepReply]):
    """Train on a batch.

    Attributes:
        batch: file of the batch; see `agentloop.training.learner_client.batch`.
        lr: learning rate; None: that of the learner's settings.
        rescue: folder of the checkpoint to save if training breaks; None: save none.
        state: the trainer's state for that checkpoint.
    """

    op: Literal["step"] = "step"
    reply_type = StepReply
    batch: Path
    lr: float | None = Field(None, ge=0, lt=1, allow_inf_nan=False)
    rescue: Path | None = None
    state: TrainingState = TrainingState(step=0)


class ResetOptimizerRequest(Request[Reply]):
    """Reset the optimizer to its state before the first step."""

    op: Literal["reset_optimizer"] = "reset_optimizer"


class ScoreReply(Reply):
    """The number of tokens that were scored."""

    num_tokens: int


class ScoreRequest(Request[ScoreReply]):
    """Write log-probabilities and entropies of a batch's sampled tokens to the file `out`."""

    op: Literal["logprobs"] = "logprobs"
    reply_type = ScoreReply
    batch: Path
    out: Path


# --- weights and checkpoints ------------------------------------------------------------------


class PublishReply(Reply):
    """The published folder: the checksum of each file, its size, and the time that it took."""

    version: str
    sha256: dict[str, str]
    num_bytes: int
    seconds: float


class PublishRequest(Request[PublishReply]):
    """Write the weights to `folder` as a model of transformers.

    Attributes:
        base: earlier published weights; the files' differences from them are written, too.
    """

    op: Literal["publish"] = "publish"
    reply_type = PublishReply
    folder: Path
    version: str
    base: Path | None = None


class SaveReply(_Counters):
    """The checkpoint that was saved, or is being written."""

    folder: Path


class SaveRequest(Request[SaveReply]):
    """Save a checkpoint with the trainer's `state`.

    Attributes:
        beside: reply as soon as the state is copied into the host's memory.
    """

    op: Literal["save"] = "save"
    reply_type = SaveReply
    folder: Path
    state: TrainingState = TrainingState(step=0)
    beside: bool = False


class SavedReply(Reply):
    """The progress of writing checkpoints.

    Attributes:
        folder: the newest complete checkpoint saved by this learner.
        writing: the checkpoint being written.
        failed: the reason why the last save failed; None if it did not.
    """

    folder: Path | None = None
    writing: Path | None = None
    failed: str | None = None


class SavedRequest(Request[SavedReply]):
    """Ask for the progress of checkpoints; with `wait`, after what is being written."""

    op: Literal["saved"] = "saved"
    reply_type = SavedReply
    wait: bool = False


class LoadReply(_Counters):
    """The trainer's state in the checkpoint."""

    state: TrainingState


class LoadRequest(Request[LoadReply]):
    """Load a checkpoint."""

    op: Literal["load"] = "load"
    reply_type = LoadReply
    folder: Path


# --- weight sync by a process group -------------------------------------------------------------


class LayoutReply(Reply):
    """The weights that a weight sync sends.

    Attributes:
        num_updates: identifies the weights.
        backend: backend of a group on the learner's device.
        model: the model's configuration, as far as it decides how servers store the weights.
    """

    num_buckets: int
    num_bytes: int
    num_updates: int
    backend: str
    model: dict[str, object]


class LayoutRequest(Request[LayoutReply]):
    """Write the content of each bucket to the file `out`."""

    op: Literal["layout"] = "layout"
    reply_type = LayoutReply
    out: Path


class OpenReply(Reply):
    """The port of the rendezvous."""

    port: int


class OpenRequest(Request[OpenReply]):
    """Open the rendezvous of a group that is to receive the weights after `num_updates`."""

    op: Literal["open"] = "open"
    reply_type = OpenReply
    address: str
    num_updates: int


class JoinRequest(Request[Reply]):
    """Wait up to `within_s` seconds for all members of the group."""

    op: Literal["join"] = "join"
    name: str
    world_size: int
    backend: str
    within_s: float


class SendReply(Reply):
    """The size of the bucket, and the checksums of completed tensors by name, one per rank."""

    num_bytes: int
    sums: dict[str, list[str]] = {}


class SendRequest(Request[SendReply]):
    """Broadcast a bucket; with a `layout`, compute the checksums that servers must report."""

    op: Literal["send"] = "send"
    reply_type = SendReply
    bucket: int
    num_updates: int
    layout: Layout | None = None


class LeaveRequest(Request[Reply]):
    """Leave the group."""

    op: Literal["leave"] = "leave"


class CloseRequest(Request[Reply]):
    """End the learner, after a checkpoint that is being written."""

    op: Literal["close"] = "close"


_REQUESTS: dict[str, type[Request[Reply]]] = {
    kind.model_fields["op"].default: kind
    for kind in (
        StepRequest,
        ResetOptimizerRequest,
        ScoreRequest,
        PublishRequest,
        SaveRequest,
        SavedRequest,
        LoadRequest,
        LayoutRequest,
        OpenRequest,
        JoinRequest,
        SendRequest,
        LeaveRequest,
        CloseRequest,
    )
}


def encode(message: Request[Reply] | Reply | Failure) -> bytes:
    """Return the message as a line."""
    return message.model_dump_json().encode() + b"\n"


def decode_request(line: bytes) -> Request[Reply]:
    """Parse a request. Raises MessageError."""
    try:
        op = json.loads(line)["op"]
    except (ValueError, TypeError, KeyError):
        raise MessageError(f"not a JSON object with an op: {line[:80]!r}") from None
    kind = _REQUESTS.get(op) if isinstance(op, str) else None
    if kind is None:
        raise MessageError(f"unknown op {op!r}: expected one of {', '.join(_REQUESTS)}")
    return _decode(kind, line)


def decode_reply(line: bytes, kind: type[R]) -> R | Failure:
    """Parse the reply to a request whose `reply_type` is `kind`. Raises MessageError."""
    try:
        return _decode(kind, line)
    except MessageError:
        try:
            return Failure.model_validate_json(line)
        except pydantic.ValidationError:
            pass
        raise


M = TypeVar("M", bound=_Message)


def _decode(kind: type[M], line: bytes) -> M:
    try:
        return kind.model_validate_json(line)
    except pydantic.ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, problem['loc'])) or 'message'}: "
            + ("unknown field" if problem["type"] == "extra_forbidden" else problem["msg"])
            for problem in error.errors()
        )
        raise MessageError(problems) from error
