"""One rank: takes requests, answers them, and ends when nobody asks any more.

    supervisor ──JSON lines──> rank 0 ──broadcast──> every rank: check, agree, work
        ▲                        │
        └───────answer───────────┘

Between requests rank 0 lets the others know every few seconds that it is there: so a rank that
died or hangs is noticed also while nothing is trained. What all ranks can find wrong before the
work begins is answered, and the learner goes on; so is a broken group of the servers, for which no
other rank waits. Whatever else breaks the work of one rank ends them all, for the others would wait
for it in vain.
"""

from __future__ import annotations

import json
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from agentloop.training.checksums import Layout
from learner.batch import Batch, plan
from learner.broadcast import Broadcaster
from learner.checkpoint import Saver, load_checkpoint, read_state
from learner.errors import GroupBroken, LearnerError, NotConverted, NotWritten, TrainingBroken
from learner.files import fresh_partial, writing
from learner.policy import Policy
from learner.weights import publish

__all__ = ["FD_VARIABLE", "SOCKET_VARIABLE", "Link", "serve"]

FD_VARIABLE = "AGENTLOOP_LEARNER_FD"
SOCKET_VARIABLE = "AGENTLOOP_LEARNER_SOCKET"
_MAX_LINE = 1 << 20
_LOOK_S = 0.5  # between two looks at a checkpoint that is being written

Request = dict[str, Any]
Answer = dict[str, Any]


class Link:
    """Rank 0's end of the line: JSON lines over a socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._buffer = bytearray()
        self._ended = False

    @classmethod
    def open(cls) -> Link:
        """The socket whose number stands in AGENTLOOP_LEARNER_FD, or the one whose path in
        AGENTLOOP_LEARNER_SOCKET: torchrun hands no descriptor on.

        Raises:
            LearnerError: neither is there.
        """
        number, path = os.environ.get(FD_VARIABLE), os.environ.get(SOCKET_VARIABLE)
        try:
            if number:
                return cls(socket.socket(fileno=int(number)))
            if path:
                stream = socket.socket(socket.AF_UNIX)
                stream.connect(path)
                return cls(stream)
        except (OSError, ValueError) as error:
            raise LearnerError(f"nobody to talk to at {number or path}: {error}") from error
        raise LearnerError(f"set {FD_VARIABLE} or {SOCKET_VARIABLE}: where requests come from")

    def next(self, timeout_s: float) -> Request | None:
        """The next request; None if none came in time. The end of the stream asks to close."""
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            data = self._socket.recv(1 << 16)
            if not data:
                self._ended = True
                return {"op": "close"}
            self._buffer += data
            if len(self._buffer) > _MAX_LINE:
                raise LearnerError(f"a request of more than {_MAX_LINE} bytes")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        return request if isinstance(request, dict) else {"op": f"{line[:80]!r}, no JSON object"}

    def send(self, answer: Answer) -> None:
        """Nothing is sent to a supervisor that has hung up."""
        if self._ended:
            return
        self._socket.sendall(json.dumps(answer, allow_nan=False).encode() + b"\n")


def serve(policy: Policy, link: Link | None) -> None:
    """Work until asked to close. `link` is there on rank 0.

    Raises:
        TrainingBroken, and whatever else must end the learner.
    """
    world = policy.world
    broadcaster, saver = Broadcaster(policy), Saver(policy)
    while True:
        beat_s = world.beat_s if saver.writing is None else min(world.beat_s, _LOOK_S)
        request: Request | None = world.share(link.next(beat_s) if link else None)
        saver.go_on()
        if request is None:
            continue
        closing = request.get("op") == "close"
        try:
            done = {} if closing else _handle(policy, broadcaster, saver, request)
            answer = {"ok": True, **done}
        except _Refused as error:
            answer = {"ok": False, "error": str(error), "fatal": False}
        except TrainingBroken:  # on all ranks; what was saved before is as good as it was
            saver.wait(policy.settings.close_timeout_s)
            raise
        if closing:
            saver.wait(policy.settings.close_timeout_s)
        if link:
            link.send(answer)
        if closing:
            broadcaster.leave()
            return


class _Refused(Exception):
    """The request cannot be carried out. No rank is in the middle of anything."""


def _handle(policy: Policy, broadcaster: Broadcaster, saver: Saver, request: Request) -> Answer:
    problem, work = None, None
    if request.get("op") in ("save", "load"):  # it may be about the same folder
        saver.wait()
    try:
        work = _prepare(policy, broadcaster, saver, request)
    except LearnerError as error:
        problem = error
    try:
        policy.world.agree(problem)
    except LearnerError as error:
        raise _Refused(str(error)) from error
    assert work is not None
    try:
        return work()
    except (GroupBroken, NotConverted, NotWritten) as error:
        # GroupBroken is rank 0's: the others have done what is theirs. The rest is everybody's.
        raise _Refused(str(error)) from error


def _prepare(
    policy: Policy, broadcaster: Broadcaster, saver: Saver, request: Request
) -> Callable[[], Answer]:
    """Check the request on this rank alone; what is returned is done by all ranks together."""
    match request:
        case {"op": "step", "batch": str(path), **rest}:
            batch, lr, rescue = _batch(policy, path), _lr(rest), rest.get("rescue")
            if rescue is None:
                return lambda: policy.step(batch, lr)
            if not isinstance(rescue, str):
                raise LearnerError(f"rescue: a folder's path expected, not {rescue!r}")
            state = _state(rest)
            return lambda: _step_or_save(policy, saver, batch, lr, Path(rescue), state)
        case {"op": "logprobs", "batch": str(path), "out": str(out)}:
            scored = _batch(policy, path)
            plan(scored.lengths.tolist(), policy.settings.micro_batch_tokens, policy.world.size)
            return lambda: _logprobs(policy, scored, Path(out))
        case {"op": "publish", "folder": str(folder), "version": str(version)}:
            target = _target(policy, folder)
            return lambda: publish(policy, target, version)
        case {"op": "save", "folder": str(folder), **rest}:
            target, state, beside = _target(policy, folder), _state(rest), _flag(rest, "beside")
            return lambda: _save(policy, saver, target, state, beside)
        case {"op": "saved", **rest}:
            wait = _flag(rest, "wait")
            return lambda: _saved(saver, wait)
        case {"op": "reset_optimizer"}:
            return lambda: _reset_optimizer(policy)
        case {"op": "load", "folder": str(folder)}:
            kept = read_state(policy, Path(folder))
            return lambda: _load(policy, Path(folder), kept)
        case {"op": "layout", "out": str(out)}:
            if policy.world.first and not Path(out).parent.is_dir():
                raise LearnerError(f"out: there is no folder {Path(out).parent}")
            return lambda: broadcaster.layout(Path(out))
        case {"op": "open", "address": str(address), "port": int(port), "num_updates": int(num)}:
            broadcaster.check(num)
            return lambda: broadcaster.open(address, port)
        case {
            "op": "join", "name": str(name), "world_size": int(size), "backend": str(backend),
            "within_s": int() | float() as within_s,
        }:  # fmt: skip
            broadcaster.check_timeout(within_s)
            return lambda: broadcaster.join(name, size, backend, within_s)
        case {"op": "send", "bucket": int(index), "num_updates": int(num), **rest}:
            broadcaster.check(num)
            broadcaster.check_bucket(index)
            layout = _layout(rest.get("layout"))
            return lambda: broadcaster.send(index, layout)
        case {"op": "leave"}:
            return broadcaster.leave
        case _:
            raise LearnerError(f"unknown request: {json.dumps(request)[:200]}")


def _target(policy: Policy, path: str) -> Path:
    """A folder that is to be written: rank 0 begins with it."""
    folder = Path(path)
    if policy.world.first:
        try:
            fresh_partial(folder)
        except OSError as error:
            raise LearnerError(f"{folder}: {error.strerror or error}") from error
    return folder


def _state(request: Request) -> dict[str, Any]:
    state = request.get("state", {})
    if not isinstance(state, dict):
        raise LearnerError("state: an object expected")
    return state


def _flag(request: Request, name: str) -> bool:
    value = request.get(name, False)
    if not isinstance(value, bool):
        raise LearnerError(f"{name}: true or false expected, not {value!r}")
    return value


def _layout(told: Any) -> Layout | None:
    try:
        return None if told is None else Layout(**told)
    except TypeError as error:
        raise LearnerError(f"layout: {error}") from error


def _batch(policy: Policy, path: str) -> Batch:
    batch = Batch.load(Path(path))
    policy.check(batch)
    return batch


def _lr(request: Request) -> float | None:
    lr = request.get("lr")
    if lr is None:
        return None
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < 1:
        raise LearnerError(f"lr: from 0 to 1 expected, not {lr!r}")
    return float(lr)


def _logprobs(policy: Policy, batch: Batch, out: Path) -> Answer:
    logprobs_T, entropies_T = policy.scores(batch)

    def write() -> None:
        partial = out.with_name(f".{out.name}.partial")
        with writing(out):
            partial.write_bytes(save({"logprobs": logprobs_T, "entropies": entropies_T}))
            os.replace(partial, out)

    policy.world.beside(write if policy.world.first else None)
    return {"num_tokens": int(batch.mask.sum())}


def _step_or_save(
    policy: Policy,
    saver: Saver,
    batch: Batch,
    lr: float | None,
    folder: Path,
    state: dict[str, Any],
) -> Answer:
    """Train on the batch. Where training breaks, save what it can go on from first, unless a part
    of the batch's updates was applied: whoever goes on does the whole step again, and would apply
    those twice. An earlier checkpoint is right then."""
    before = policy.num_updates
    try:
        return policy.step(batch, lr)
    except TrainingBroken as error:
        if num_applied := policy.num_updates - before:
            raise TrainingBroken(
                f"{error}; nothing is saved, for {num_applied} of the batch's updates were "
                "applied: go on from the checkpoint before"
            ) from error
        try:
            saver.save(folder, state)
        except Exception as failed:
            raise TrainingBroken(f"{error}; {folder} could not be saved: {failed}") from failed
        raise TrainingBroken(f"{error}; they are saved in {folder}") from error


def _save(
    policy: Policy, saver: Saver, folder: Path, state: dict[str, Any], beside: bool
) -> Answer:
    saver.save(folder, state, beside=beside)
    return {"folder": str(folder), **policy.counters()}


def _saved(saver: Saver, wait: bool) -> Answer:
    if wait:
        saver.wait()
    found = {"folder": saver.folder, "writing": saver.writing}
    return {name: path and str(path) for name, path in found.items()} | {"failed": saver.failed}


def _reset_optimizer(policy: Policy) -> Answer:
    policy.reset_optimizer()
    return {}


def _load(policy: Policy, folder: Path, kept: dict[str, Any]) -> Answer:
    load_checkpoint(policy, folder, kept)
    return {"state": kept["state"], **policy.counters()}
