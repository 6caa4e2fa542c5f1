"""The base of fake learners: they handle operations by name, and are asked by typed requests."""

from __future__ import annotations

import json
from typing import Any, TypeVar

import anyio

from agentloop.training.learner_client.protocol import Failure, Reply, Request, decode_reply

__all__ = ["REPLIES", "FakeLearner"]

R = TypeVar("R", bound=Reply)

_COUNTERS = {"num_updates": 0, "num_skipped": 0, "warm_from": 0}

REPLIES: dict[str, dict[str, Any]] = {
    "logprobs": {"num_tokens": 0},
    "publish": {"version": "0", "sha256": {}, "num_bytes": 0, "seconds": 0.1},
    "save": {"folder": "", **_COUNTERS},
    "load": {"state": {"step": 0}, **_COUNTERS},
    "layout": {"num_buckets": 1, "num_bytes": 0, "num_updates": 0, "backend": "gloo", "model": {}},
    "open": {"port": 1},
    "send": {"num_bytes": 0},
}
"""Contents of replies in which nothing but their fields matters."""


class FakeLearner:
    """A `Learner` whose subclasses define `handle`."""

    async def ask(self, request: Request[R], *, timeout_s: float) -> R:
        """Implement `Learner`; fields that `handle` leaves out are those of `REPLIES`."""
        arguments = request.model_dump(mode="json", exclude_unset=True, exclude={"op"})
        fields = await self.handle(request.op, **arguments)
        line = json.dumps({"ok": True, **REPLIES.get(request.op, {}), **fields})
        reply: R | Failure = decode_reply(line.encode(), request.reply_type)
        assert not isinstance(reply, Failure)
        return reply

    async def wait_lost(self) -> str:
        """Implement `Learner`: by default it is never lost."""
        await anyio.sleep_forever()
        raise AssertionError

    async def restart(self) -> None:
        """Implement `Learner`."""

    async def handle(self, op: str, **arguments: Any) -> dict[str, Any]:
        """Carry out an operation; return the fields of its reply that matter."""
        raise NotImplementedError
