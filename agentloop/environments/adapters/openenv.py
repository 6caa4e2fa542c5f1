"""Episodes of an OpenEnv server: each message of the model, or each call of a tool, is an action.

    env=agentloop.environments.adapters.openenv:episode env.args.url=http://localhost:8000

If the server's actions are calls of MCP tools, the model gets those tools; otherwise it writes each
action as text or JSON. The reward is the sum of the rewards of the steps. An episode that the
server ends without any is an error; of one that the model leaves before its end, it is 0.

Several servers with a shell take the reward from a file that the model can write
(https://github.com/huggingface/OpenEnv/issues/1199). Of a server whose state has the results of its
checks (`verify_results`), the reward is the share that has passed, whatever it says itself. Others
are believed.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from agentloop.agent.tools import RunTool, ToolOutput
from agentloop.environments.adapters.openenv_server import Answer, InvalidAction, OpenEnvSession
from agentloop.environments.agent import Agent
from agentloop.environments.environment import environment
from agentloop.environments.tasks.sources import Task
from agentloop.trajectory import ToolCallStatus

__all__ = ["episode"]


def make_task(rng: Random) -> Mapping[str, object]:
    """Choose the seed of an episode."""
    return {"seed": rng.randrange(1 << 31), "source": "openenv"}


@environment(tasks=make_task, weights={"steps": 0.0})
async def episode(
    task: Task,
    agent: Agent,
    *,
    url: str,
    reset: dict[str, object] | None = None,
    system: str = "",
    max_steps: int = 50,
    max_sessions: int = 1,
    timeout_s: float = 60.0,
) -> dict[str, float]:
    """Let the model act until the episode is done, or until it no longer calls a tool.

    Args:
        url: address of the server.
        reset: arguments of its reset, besides the task's seed.
        system: system message; the form of the actions is appended to it.
        max_steps: the episode ends after this many actions.
        max_sessions: how many episodes the server runs at a time; others wait.
        timeout_s: time limit of a request to the server.
    """
    async with OpenEnvSession.open(url.rstrip("/"), max_sessions, timeout_s) as session:
        game = _Game(session, max_steps)
        fields = session.schema.get("properties") or {}
        has_tools = fields.get("type", {}).get("const") == "call_tool"
        listed = await session.request("step", {"type": "list_tools"}) if has_tools else {}
        opening = _text_of(await session.request("reset", {"seed": task.seed, **(reset or {})}))
        if has_tools:
            tools = [_Tool(game, tool) for tool in listed["observation"]["tools"]]
            await agent.run(opening, tools=tools, system=system or None)
        else:
            field = _text_field(session.schema)

            async def act(answer: str) -> str | None:
                result = await game.step(lambda: {field: answer} if field else _action_in(answer))
                return None if game.is_over else _text_of(result)

            form = f"Write each message as a JSON object: {json.dumps(session.schema)}"
            instructions = "\n\n".join(part for part in (system, "" if field else form) if part)
            await agent.run(opening, system=instructions or None, reply=act)
        share = await session.share_of_checks() if game.is_done else None
    if game.is_done and not game.rewards:
        raise RuntimeError("openenv: the episode is done, and no step of it had a reward")
    reward = sum(game.rewards) if share is None else share
    return {"reward": reward, "steps": game.num_steps}


class _Game:
    """The steps of an episode, and their rewards."""

    def __init__(self, session: OpenEnvSession, max_steps: int) -> None:
        self.num_steps = 0
        self.is_over = False
        self._session = session
        self._max_steps = max_steps
        self.rewards: list[float] = []
        self.is_done = False

    async def step(self, action: Callable[[], object]) -> Answer:
        """Act, and return what the model sees: an observation, or why the action is invalid."""
        self.num_steps += 1
        try:
            result = await self._session.request("step", action())
        except InvalidAction as error:
            result = {"observation": {"error": f"[invalid action] {error}"}}
        if (reward := result.get("reward")) is not None:
            self.rewards.append(reward)
        self.is_done = bool(result.get("done"))
        self.is_over = self.is_done or self.num_steps == self._max_steps
        return result


class _Tool:
    """A tool of the server. Its calls are steps, one at a time for all tools (`state`)."""

    def __init__(self, game: _Game, listed: Mapping[str, Any]) -> None:
        self.name: str = listed["name"]
        parameters = listed.get("input_schema") or {"type": "object", "properties": {}}
        description = {"name": self.name, "description": listed.get("description") or ""}
        self.schema = {"type": "function", "function": {**description, "parameters": parameters}}
        self.state = game

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        yield self._run

    async def _run(self, arguments: Mapping[str, object], /) -> ToolOutput:
        if self.state.is_over:
            return ToolOutput(ToolCallStatus.ERROR, "[error] the episode is over")
        call = {"type": "call_tool", "tool_name": self.name, "arguments": arguments}
        observation = (await self.state.step(lambda: call)).get("observation") or {}
        if error := observation.get("error"):
            text = error.get("message") if isinstance(error, Mapping) else error
            return ToolOutput(ToolCallStatus.ERROR, f"[error] {text}")
        return ToolOutput(ToolCallStatus.OK, _result_text(observation.get("result")))


def _result_text(result: object) -> str:
    """Return the text of an MCP result, or the result as JSON."""
    if isinstance(result, Mapping) and isinstance(content := result.get("content"), list):
        return "\n".join(item.get("text") or json.dumps(item) for item in content)
    return result if isinstance(result, str) else json.dumps(result)


def _text_field(schema: Mapping[str, Any]) -> str | None:
    """Return the only field that an action must have if it is any text: the answer goes there."""
    needed = schema.get("required") or []
    field = (schema.get("properties") or {}).get(needed[0], {}) if len(needed) == 1 else {}
    return needed[0] if field.get("type") == "string" and "enum" not in field else None


def _action_in(answer: str) -> object:
    """Return the JSON object in an answer."""
    try:
        return json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
    except ValueError as error:
        raise InvalidAction(f"it is not a JSON object: {error}") from None


def _text_of(result: Answer) -> str:
    """Return an observation as text: its only text, or all of it as JSON."""
    observation = result.get("observation") or {}
    fields = {name: value for name, value in observation.items() if value not in (None, "", [], {})}
    texts = [value for value in fields.values() if isinstance(value, str)]
    return texts[0] if len(fields) == len(texts) == 1 else json.dumps(fields)
