"""A session of an OpenEnv server, over its WebSocket. Nothing of OpenEnv is needed here."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypedDict, cast

import aiohttp
import anyio
import anyio.lowlevel

from agentloop.errors import ServerUnavailable

__all__ = ["Answer", "InvalidAction", "OpenEnvSession"]

_MAX_MESSAGE = 64 << 20
_limits = anyio.lowlevel.RunVar[dict[str, anyio.CapacityLimiter]]("_openenv_sessions")


class Answer(TypedDict, total=False):
    """A server's answer to an action, a reset, or a question for its state."""

    observation: dict[str, Any]
    reward: float | None
    done: bool
    verify_results: object


class InvalidAction(Exception):
    """The action does not fit the server's schema, for reasons of the model."""


class OpenEnvSession:
    """A session of an OpenEnv server.

    Attributes:
        schema: the JSON schema of its actions.
    """

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, schema: dict[str, Any], timeout_s: float
    ) -> None:
        self.schema = schema
        self._socket = socket
        self._timeout_s = timeout_s

    @classmethod
    @asynccontextmanager
    async def open(
        cls, url: str, max_sessions: int, timeout_s: float
    ) -> AsyncIterator[OpenEnvSession]:
        """Open a session once the server has room for it.

        Args:
            max_sessions: how many may be open at a time; the first to open one decides.

        Raises:
            ServerUnavailable: the server cannot be reached.
        """
        try:
            limits = _limits.get()
        except LookupError:
            _limits.set(limits := {})
        async with (
            # no deadline: the rollout has one
            limits.setdefault(url, anyio.CapacityLimiter(max_sessions)),
            aiohttp.ClientSession(raise_for_status=True) as http,
        ):
            try:
                with anyio.fail_after(timeout_s):
                    async with http.get(f"{url}/schema") as answer:
                        schema = (await answer.json())["action"]
                    socket = await http.ws_connect(f"{url}/ws", max_msg_size=_MAX_MESSAGE)
            except (aiohttp.ClientConnectionError, OSError) as error:
                reason = str(error) or f"no answer within {timeout_s:g} s"
                raise ServerUnavailable(f"openenv: {url}: {reason}") from error
            async with socket:
                yield cls(socket, schema, timeout_s)

    async def request(self, kind: str, data: object = None) -> Answer:
        """Send a message, and return the observation, reward and end in the answer.

        Raises:
            InvalidAction: the server refuses an action.
            ServerUnavailable: the connection broke.
            RuntimeError: the environment raised.
            TimeoutError: there was no answer in time.
        """
        try:
            with anyio.fail_after(self._timeout_s):
                message = {"type": kind} | ({} if data is None else {"data": data})
                await self._socket.send_json(message)
                answer = await self._socket.receive()
        except ConnectionError as error:
            raise ServerUnavailable(f"openenv: {kind}: {error}") from error
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise ServerUnavailable(f"openenv: the server closed the connection at {kind}")
        response = json.loads(answer.data)
        payload = response.get("data") or {}
        if response.get("type") != "error":
            return cast(Answer, payload)
        problem = f"{payload.get('message')} {payload.get('errors') or ''}".strip()
        if kind == "step" and payload.get("code") == "VALIDATION_ERROR":
            raise InvalidAction(problem)
        raise RuntimeError(f"openenv: {kind}: {problem} ({payload.get('code')})")

    async def share_of_checks(self) -> float | None:
        """Return the share of the server's checks that have passed; None if it does not tell."""
        try:
            checks = (await self.request("state")).get("verify_results")
        except RuntimeError:  # it has no state, or none that is JSON
            return None
        if not isinstance(checks, list) or not checks:
            return None
        passed = [isinstance(check, dict) and check.get("success") is True for check in checks]
        return sum(passed) / len(passed)
