"""One rank: receives requests, answers them, and ends when the supervisor hangs up.

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

import json
import os
import select
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from agentloop.learner.batch import Batch, plan
from agentloop.learner.broadcast import Broadcaster
from agentloop.learner.checkpoint import Saver, load_checkpoint, read_state
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
from agentloop.training.weight_sync.checksums import Layout

__all__ = ["FD_VARIABLE", "SOCKET_VARIABLE", "ControlChannel", "serve"]

FD_VARIABLE = "AGENTLOOP_LEARNER_FD"
SOCKET_VARIABLE = "AGENTLOOP_LEARNER_SOCKET"
_MAX_LINE = 1 << 20
_POLL_S = 0.5  # between checks of a checkpoint that is being written

Request = dict[str, Any]
Answer = dict[str, Any]


class ControlChannel:
    """Rank 0's connection to the supervisor: JSON lines over a socket."""

    def __init__(self, stream: socket.socket) -> None:
        self._socket = stream
        self._buffer = bytearray()
        self._ended = False

    @classmethod
    def open(cls) -> ControlChannel:
        """Open the socket given by AGENTLOOP_LEARNER_FD or AGENTLOOP_LEARNER_SOCKET.

        The first is a descriptor; the second a path, because torchrun passes no descriptors on.

        Raises:
            RankError: Neither is set, or nothing listens there.
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
            raise RankError(
                f"cannot connect to the supervisor at {number or path}: {error}"
            ) from error
        raise RankError(f"set {FD_VARIABLE} or {SOCKET_VARIABLE}, the source of requests")

    def next(self, timeout_s: float) -> Request | None:
        """Return the next request, or None if none arrives in time.

        The end of the stream counts as a request to close.
        """
        while b"\n" not in self._buffer:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            data = self._socket.recv(1 << 16)
            if not data:
                self._ended = True
                return {"op": "close"}
            self._buffer += data
            if len(self._buffer) > _MAX_LINE:
                raise RankError(f"a request is longer than {_MAX_LINE} bytes")
        line, _, rest = bytes(self._buffer).partition(b"\n")
        self._buffer[:] = rest
        try:
            request = json.loads(line)
        except ValueError:
            request = None
        return request if isinstance(request, dict) else {"op": f"{line[:80]!r}, not a JSON object"}

    def send(self, answer: Answer) -> None:
        """Send an answer, unless the supervisor has hung up."""
        if self._ended:
            return
        self._socket.sendall(json.dumps(answer, allow_nan=False).encode() + b"\n")


def serve(policy: Policy, link: ControlChannel | None) -> None:
    """Serve requests until asked to close. Only rank 0 has a `link`.

    Raises:
        GradientError: Training cannot go on. Other errors also end the learner.
    """
    world = policy.world
    broadcaster, saver = Broadcaster(policy), Saver(policy)
    while True:
        beat_s = world.beat_s if saver.writing is None else min(world.beat_s, _POLL_S)
        request: Request | None = world.broadcast_object(link.next(beat_s) if link else None)
        saver.go_on()
        if request is None:
            continue
        closing = request.get("op") == "close"
        try:
            done = {} if closing else _handle(policy, broadcaster, saver, request)
            answer = {"ok": True, **done}
        except _Refused as error:
            answer = {"ok": False, "error": str(error), "fatal": False}
        except GradientError:  # on all ranks; a checkpoint still being written is valid
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
    """The request cannot be carried out; all ranks are idle again."""


def _handle(policy: Policy, broadcaster: Broadcaster, saver: Saver, request: Request) -> Answer:
    problem, work = None, None
    if request.get("op") in ("save", "load"):  # it may concern the same folder
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
        # ProcessGroupError concerns rank 0 alone: the other ranks are done. All ranks raise the others.
        raise _Refused(str(error)) from error


def _prepare(
    policy: Policy, broadcaster: Broadcaster, saver: Saver, request: Request
) -> Callable[[], Answer]:
    """Check the request on this rank alone; return the work that all ranks then do together."""
    match request:
        case {"op": "step", "batch": str(path), **rest}:
            batch, lr, rescue = _batch(policy, path), _lr(rest), rest.get("rescue")
            if rescue is None:
                return lambda: policy.step(batch, lr)
            if not isinstance(rescue, str):
                raise RankError(f"rescue: expected the path of a folder, not {rescue!r}")
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
                raise RankError(f"out: there is no folder {Path(out).parent}")
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
            raise RankError(f"unknown request: {json.dumps(request)[:200]}")


def _target(policy: Policy, path: str) -> Path:
    """Return the folder to be written; rank 0 creates its temporary folder."""
    folder = Path(path)
    if policy.world.first:
        try:
            fresh_partial(folder)
        except OSError as error:
            raise RankError(f"{folder}: {error.strerror or error}") from error
    return folder


def _state(request: Request) -> dict[str, Any]:
    state = request.get("state", {})
    if not isinstance(state, dict):
        raise RankError("state: expected an object")
    return state


def _flag(request: Request, name: str) -> bool:
    value = request.get(name, False)
    if not isinstance(value, bool):
        raise RankError(f"{name}: expected true or false, not {value!r}")
    return value


def _layout(value: Any) -> Layout | None:
    try:
        return None if value is None else Layout(**value)
    except TypeError as error:
        raise RankError(f"layout: {error}") from error


def _batch(policy: Policy, path: str) -> Batch:
    batch = Batch.load(Path(path))
    policy.check(batch)
    return batch


def _lr(request: Request) -> float | None:
    lr = request.get("lr")
    if lr is None:
        return None
    if isinstance(lr, bool) or not isinstance(lr, int | float) or not 0 <= lr < 1:
        raise RankError(f"lr: expected a number from 0 to below 1, not {lr!r}")
    return float(lr)


def _logprobs(policy: Policy, batch: Batch, out: Path) -> Answer:
    logprobs_T, entropies_T = policy.scores(batch)

    def write() -> None:
        partial = out.with_name(f".{out.name}.partial")
        with writing(out):
            partial.write_bytes(save({"logprobs": logprobs_T, "entropies": entropies_T}))
            os.replace(partial, out)

    policy.world.run_beside(write if policy.world.first else None)
    return {"num_tokens": int(batch.mask.sum())}


def _step_or_save(
    policy: Policy,
    saver: Saver,
    batch: Batch,
    lr: float | None,
    folder: Path,
    state: dict[str, Any],
) -> Answer:
    """Train on the batch; if training breaks, save a checkpoint first.

    Nothing is saved if some of the batch's updates were applied: a resumed run repeats the whole
    step and would apply them twice. It has to go on from an earlier checkpoint.
    """
    before = policy.num_updates
    try:
        return policy.step(batch, lr)
    except GradientError as error:
        if num_applied := policy.num_updates - before:
            raise GradientError(
                f"{error}; nothing is saved, because {num_applied} of the batch's updates were "
                "applied: resume from the previous checkpoint"
            ) from error
        try:
            saver.save(folder, state)
        except Exception as failed:
            raise GradientError(f"{error}; {folder} could not be saved: {failed}") from failed
        raise GradientError(f"{error}; they are saved in {folder}") from error


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
