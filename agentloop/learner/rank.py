"""A rank of the learner: receives requests, answers them, and ends when the supervisor hangs up.

    supervisor ──JSON lines──> rank 0 ──broadcast──> every rank: check, agree, work
        ▲                        │
        └───────answer───────────┘

Between requests rank 0 sends a heartbeat every few seconds, so that a rank that died or hangs is
also noticed while nothing is trained. An error that all ranks can detect before the work begins is
answered, and the learner goes on; so is a broken process group with the servers, which no other
rank waits for. Any other error on one rank ends all of them, because the others would wait for it
in vain.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from safetensors.numpy import save

from agentloop.learner.batch import Batch, plan
from agentloop.learner.broadcast import Broadcaster
from agentloop.learner.checkpoint import SavedState, Saver, load_checkpoint, read_state
from agentloop.learner.errors import (
    CheckpointError,
    GradientError,
    ProcessGroupError,
    RankError,
    WriteError,
)
from agentloop.learner.files import fresh_partial, writing
from agentloop.learner.policy import Policy
from agentloop.learner.weights import publish
from agentloop.training.learner_client.protocol import (
    CloseRequest,
    Failure,
    JoinRequest,
    LayoutRequest,
    LeaveRequest,
    LoadReply,
    LoadRequest,
    MessageError,
    OpenRequest,
    PublishRequest,
    Reply,
    Request,
    ResetOptimizerRequest,
    SavedReply,
    SavedRequest,
    SaveReply,
    SaveRequest,
    ScoreReply,
    ScoreRequest,
    SendRequest,
    StepReply,
    StepRequest,
    decode_request,
    encode,
)

SOCKET_VARIABLE = "AGENTLOOP_LEARNER_SOCKET"
_MAX_LINE = 1 << 20
_POLL_S = 0.5  # between checks of a checkpoint that is being written


class ControlChannel:
    """Rank 0's connection to the supervisor: JSON lines over a socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._buffer = bytearray()
        self._ended = False

    @classmethod
    def open(cls) -> ControlChannel:
        """Connect to the supervisor's socket, whose path AGENTLOOP_LEARNER_SOCKET has.

        Raises:
            RankError: Nothing listens there.
        """
        path, stream = os.environ.get(SOCKET_VARIABLE, ""), socket.socket(socket.AF_UNIX)
        try:
            stream.connect(path)
        except OSError as error:
            text = f"{SOCKET_VARIABLE}: no supervisor listens at {path!r}: {error}"
            raise RankError(text) from error
        return cls(stream)

    def next(self, timeout_s: float) -> Request[Reply] | None:
        """Return the next request, or None if no valid one arrives in time.

        An invalid one is refused. The end of the stream counts as a request to close.
        """
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            data = self._socket.recv(1 << 16)
            if not data:
                self._ended = True
                return CloseRequest()
            self._buffer += data
            if len(self._buffer) > _MAX_LINE:
                raise RankError(f"a request is longer than {_MAX_LINE} bytes")
        line, _, remainder = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = remainder
        try:
            return decode_request(line)
        except MessageError as error:
            self.send(Failure(error=str(error)))
            return None

    def send(self, answer: Reply | Failure) -> None:
        """Send an answer, unless the supervisor has hung up."""
        if not self._ended:
            self._socket.sendall(encode(answer))


def serve(policy: Policy, link: ControlChannel | None) -> None:
    """Serve requests until asked to close. Only rank 0 has a `link`.

    Raises:
        GradientError: Training cannot go on. Other errors also end the learner.
    """
    world = policy.world
    broadcaster, saver = Broadcaster(policy), Saver(policy)
    while True:
        beat_s = world.beat_s if saver.writing is None else min(world.beat_s, _POLL_S)
        request = world.broadcast_object(link.next(beat_s) if link else None)
        saver.go_on()
        if request is None:
            continue
        if isinstance(request, CloseRequest):
            saver.wait(policy.settings.close_timeout_s)
            if link:
                link.send(Reply())
            broadcaster.leave()
            return
        answer: Reply | Failure
        try:
            answer = _handle(policy, broadcaster, saver, request)
        except _Refused as error:
            answer = Failure(error=str(error))
        except GradientError:  # on all ranks; a checkpoint still being written is valid
            saver.wait(policy.settings.close_timeout_s)
            raise
        if isinstance(request, StepRequest | PublishRequest):  # before servers take it again
            world.free_unused_memory()
        if link:
            link.send(answer)


class _Refused(Exception):
    """The request cannot be carried out; all ranks are idle again."""


def _handle(
    policy: Policy, broadcaster: Broadcaster, saver: Saver, request: Request[Reply]
) -> Reply:
    problem, work = None, None
    if isinstance(request, SaveRequest | LoadRequest):  # it may concern the same folder
        saver.wait()
    try:
        work = _prepare(policy, broadcaster, saver, request)
    except RankError as error:
        problem = error
    try:
        policy.world.raise_if_any(problem)
    except RankError as error:
        raise _Refused(str(error)) from error
    assert work is not None
    try:
        return work()
    except (ProcessGroupError, CheckpointError, WriteError) as error:
        # The first concerns rank 0 alone: the other ranks are done. All ranks raise the others.
        raise _Refused(str(error)) from error


def _prepare(
    policy: Policy, broadcaster: Broadcaster, saver: Saver, request: Request[Reply]
) -> Callable[[], Reply]:
    """Check the request on this rank alone; return the work that all ranks then do together.

    Only rank 0's reply is sent; the others may return one without content.
    """
    match request:
        case StepRequest():
            trained = _batch(policy, request.batch)
            return lambda: _step(policy, saver, trained, request)
        case ScoreRequest():
            scored = _batch(policy, request.batch)
            plan(scored.lengths.tolist(), policy.settings.max_sample_tokens, policy.world.size)
            return lambda: _score(policy, scored, request.out)
        case PublishRequest():
            _make_partial(policy, request.folder)
            return lambda: publish(policy, request.folder, request.version, request.base)
        case SaveRequest():
            _make_partial(policy, request.folder)
            return lambda: _save(policy, saver, request)
        case SavedRequest():
            return lambda: _report_save(saver, request.wait)
        case ResetOptimizerRequest():
            return lambda: _reset_optimizer(policy)
        case LoadRequest():
            saved = read_state(policy, request.folder)
            return lambda: _load(policy, request.folder, saved)
        case LayoutRequest():
            if policy.world.first and not request.out.parent.is_dir():
                raise RankError(f"out: there is no folder {request.out.parent}")
            return lambda: broadcaster.layout(request.out)
        case OpenRequest():
            broadcaster.check(request.num_updates)
            return lambda: broadcaster.open(request.address)
        case JoinRequest():
            broadcaster.check_timeout(request.within_s)
            return lambda: broadcaster.join(request)
        case SendRequest():
            broadcaster.check(request.num_updates, request.bucket)
            return lambda: broadcaster.send(request.bucket, request.layout)
        case LeaveRequest():
            return broadcaster.leave
        case _:
            raise TypeError(f"no rank can carry out {request!r}")


def _make_partial(policy: Policy, folder: Path) -> None:
    """Create the temporary folder of the folder to be written, on rank 0."""
    if policy.world.first:
        try:
            fresh_partial(folder)
        except OSError as error:
            raise RankError(f"{folder}: {error.strerror or error}") from error


def _batch(policy: Policy, path: Path) -> Batch:
    batch = Batch.load(path)
    policy.check(batch)
    return batch


def _score(policy: Policy, batch: Batch, out: Path) -> ScoreReply:
    logprobs_T, entropies_T = policy.scores(batch)

    def write() -> None:
        partial = out.with_name(f".{out.name}.partial")
        with writing(out):
            partial.write_bytes(save({"logprobs": logprobs_T, "entropies": entropies_T}))
            os.replace(partial, out)

    policy.world.run_beside(write if policy.world.first else None)
    return ScoreReply(num_tokens=int(batch.mask.sum()))


def _step(policy: Policy, saver: Saver, batch: Batch, request: StepRequest) -> StepReply:
    """Train on the batch; if training breaks, save a checkpoint in `rescue` first.

    Nothing is saved if some of the batch's updates were applied: a resumed run repeats the whole
    step and would apply them twice. It has to go on from an earlier checkpoint.
    """
    before, folder = policy.num_updates, request.rescue
    try:
        return policy.step(batch, request.lr)
    except GradientError as error:
        if folder is None:
            raise
        if num_applied := policy.num_updates - before:
            raise GradientError(
                f"{error}; nothing is saved, because {num_applied} of the batch's updates were "
                "applied: resume from the previous checkpoint"
            ) from error
        try:
            saver.save(folder, request.state)
        except Exception as failed:
            raise GradientError(f"{error}; {folder} could not be saved: {failed}") from failed
        raise GradientError(f"{error}; they are saved in {folder}") from error


def _save(policy: Policy, saver: Saver, request: SaveRequest) -> SaveReply:
    saver.save(request.folder, request.state, beside=request.beside)
    return SaveReply(folder=request.folder, **asdict(policy.counters()))


def _report_save(saver: Saver, wait: bool) -> SavedReply:
    if wait:
        saver.wait()
    return SavedReply(folder=saver.folder, writing=saver.writing, failed=saver.failed)


def _reset_optimizer(policy: Policy) -> Reply:
    policy.reset_optimizer()
    return Reply()


def _load(policy: Policy, folder: Path, saved: SavedState) -> LoadReply:
    load_checkpoint(policy, folder, saved)
    return LoadReply(state=saved.state, **asdict(policy.counters()))
