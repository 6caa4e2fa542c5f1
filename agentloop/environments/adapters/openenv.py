"""Episodes of an OpenEnv server, over its WebSocket: each message of the model is an action.

    env=agentloop.environments.adapters.openenv:episode env.args.url=http://localhost:8000

The server runs elsewhere, such as in a container, and nothing of OpenEnv is needed here. The reward
is the sum of the rewards of the steps.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import aiohttp
import anyio
import anyio.lowlevel

from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.tasks.sources import Task

__all__ = ["episode"]

_MAX_MESSAGE = 64 << 20
_sessions = anyio.lowlevel.RunVar[dict[str, anyio.CapacityLimiter]]("_openenv_sessions")


class InvalidAction(Exception):
    """The action does not fit the server's schema, for reasons of the model."""


def make_task(rng: Random) -> Mapping[str, Any]:
    """Choose the seed of an episode."""
    return {"seed": rng.randrange(1 << 31), "source": "openenv"}


@environment(tasks=make_task, weights={"steps": 0.0})
async def episode(
    task: Task,
    agent: Agent,
    *,
    url: str,
    reset: dict[str, Any] | None = None,
    system: str = "",
    max_steps: int = 50,
    max_sessions: int = 1,
    timeout_s: float = 60.0,
) -> dict[str, float]:
    """Let the model act until the episode is done.

    Args:
        url: address of the server.
        reset: arguments of its reset, besides the task's seed.
        system: what to tell the model first, before the form of its actions.
        max_steps: the episode ends after this many actions.
        max_sessions: how many episodes the server runs at a time; others wait.
        timeout_s: time limit of a request to the server.
    """
    total, steps = 0.0, 0
    async with _session(url.rstrip("/"), max_sessions, timeout_s) as (server, schema):
        field = _text_field(schema)

        async def act(answer: str) -> str | None:
            nonlocal total, steps
            steps += 1
            try:
                seen = await server.request("step", {field: answer} if field else _parsed(answer))
            except InvalidAction as error:
                return f"[invalid action] {error}" if steps < max_steps else None
            total += seen.get("reward") or 0.0
            return None if seen.get("done") or steps == max_steps else _shown(seen)

        begun = await server.request("reset", {"seed": task.seed, **(reset or {})})
        form = "" if field else f"Write each message as a JSON object: {json.dumps(schema)}"
        told = "\n\n".join(part for part in (system, form) if part)
        await agent.run(_shown(begun), system=told or None, reply=act)
    return {"reward": total, "steps": steps}


class _Server:
    """A session of an OpenEnv server."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def request(self, kind: str, data: Any) -> Mapping[str, Any]:
        """Send a message, and return the observation, reward and end in the answer."""
        with anyio.fail_after(self._timeout_s):
            await self._socket.send_json({"type": kind, "data": data})
            answer = await self._socket.receive()
        if answer.type is not aiohttp.WSMsgType.TEXT:
            raise RuntimeError(f"openenv: the server closed the connection at {kind}")
        found = json.loads(answer.data)
        said: Mapping[str, Any] = found.get("data") or {}
        if found.get("type") != "error":
            return said
        message = f"{said.get('message')} {said.get('errors') or ''}".strip()
        if kind == "step" and said.get("code") == "VALIDATION_ERROR":
            raise InvalidAction(message)
        raise RuntimeError(f"openenv: {kind}: {message} ({said.get('code')})")


@asynccontextmanager
async def _session(
    url: str, max_sessions: int, timeout_s: float
) -> AsyncIterator[tuple[_Server, dict[str, Any]]]:
    """Open a session once the server has a free one; return it with the schema of its actions."""
    try:
        limits = _sessions.get()
    except LookupError:
        _sessions.set(limits := {})
    async with (
        # no deadline: the rollout has one
        limits.setdefault(url, anyio.CapacityLimiter(max_sessions)),
        aiohttp.ClientSession(raise_for_status=True) as http,
    ):
        with anyio.fail_after(timeout_s):
            async with http.get(f"{url}/schema") as answer:
                schema = (await answer.json())["action"]
            socket = await http.ws_connect(f"{url}/ws", max_msg_size=_MAX_MESSAGE)
        async with socket:
            yield _Server(socket, timeout_s), schema


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the only field that an action must have if it is text: the answer goes there."""
    needed = schema.get("required") or []
    fields = schema.get("properties") or {}
    is_text = len(needed) == 1 and fields.get(needed[0], {}).get("type") == "string"
    return needed[0] if is_text else None


def _parsed(answer: str) -> Any:
    """Return the JSON object in an answer."""
    try:
        return json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
    except ValueError as error:
        raise InvalidAction(f"it is not a JSON object: {error}") from None


def _shown(seen: Mapping[str, Any]) -> str:
    """Return an observation as text: its only text, or all of it as JSON."""
    said = seen.get("observation") or {}
    fields = {name: value for name, value in said.items() if value not in (None, "", [], {})}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(fields) == len(texts) == 1 else json.dumps(fields)
