"""Run conversations with an endpoint or a script in place of the model.

    messages ──> endpoint or script ──calls──> tools, at the same time ──results──> messages
                         └──text──> the environment's reply, if there is one ──> messages

The record has messages and no token ids, so it is never trained on. Of the budget, the numbers of
turns and the time apply, and `max_turn_tokens` to each message of an endpoint.
Not covered: `max_tool_response_tokens`, since the tokenizer is unknown.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypedDict, Unpack, runtime_checkable

import anyio

from agentloop.agent.channels import answer_in
from agentloop.agent.formats.values import decode_arguments
from agentloop.agent.rollout import Budget, Reply
from agentloop.agent.tools import Schema, Tool, ToolFunction, Tools
from agentloop.agent.turn_journal import TurnJournal
from agentloop.environments.endpoint import Endpoint
from agentloop.errors import InfrastructureFailed, PromptTooLong, ServerError, culprit
from agentloop.events import (
    CallFinished,
    CallStarted,
    Emit,
    OnlyReason,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
)
from agentloop.inference.openai_client import EndpointCompletion, seed_of, turn_end_of
from agentloop.inference.sglang.sampling import Sampling
from agentloop.plain_json import dumps, valid_text
from agentloop.trajectory import (
    Message,
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)

__all__ = [
    "DialogueRow",
    "OtherModel",
    "Player",
    "PlayerHost",
    "ResolveTools",
    "RolloutOptions",
    "Said",
    "Script",
]

_NO_CHOICE = OnlyReason("the agent's own endpoint")

Said = str | Message

Script = Callable[[list[Message]], Said | Awaitable[Said]]
"""A function, async or not, of the messages so far that returns what the model says next: text, or
a message with tool calls, as made by `call`."""


class RolloutOptions(TypedDict):
    """The arguments of a conversation, beside its messages and tools."""

    sampling: Sampling
    budget: Budget
    reply: Reply | None
    group: str
    prompt_ids: list[int] | None
    id: str
    on_event: Emit
    with_text: bool
    journal: TurnJournal | None


@runtime_checkable
class OtherModel(Protocol):
    """Runs conversations of another model, exactly; implemented by `agentloop.Runtime`."""

    async def rollout(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool],
        **options: Unpack[RolloutOptions],
    ) -> Trajectory: ...


Player = Endpoint | OtherModel | Script
"""What takes the place of the model in a conversation."""

ResolveTools = Callable[[Sequence[Tool | ToolFunction | str]], list[Tool]]
"""A function that returns the tools themselves for functions and names."""


class DialogueRow(TypedDict):
    """A conversation as `agentloop sft` reads it."""

    messages: list[Message]
    tools: list[Schema]


@dataclass
class PlayerHost:
    """Runs conversations with a player in place of the model; implements `Host`.

    Attributes:
        pool: the sandbox of `agent.sandbox`.
        dialogues: gets the conversations of an endpoint or a script, as `agentloop sft` reads them;
            None: no conversation is kept.
    """

    player: Player
    pool: Any
    resolve_tools: ResolveTools
    dialogues: list[DialogueRow] | None = None

    @property
    def session_listener(self) -> None:
        """Implement `Host`: a player serves no programs."""

    async def listen_for_sessions(self) -> None:
        """Implement `Host`."""

    async def rollout(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool | ToolFunction | str],
        **options: Unpack[RolloutOptions],
    ) -> Trajectory:
        """Implement `Host`."""
        resolved = self.resolve_tools(tools)
        if isinstance(self.player, OtherModel):
            return await self.player.rollout(messages, tools=resolved, **options)
        opened = Tools(resolved)
        record = Trajectory(options["id"], [], created_unix_s=time.time(), messages=list(messages))
        if self.dialogues is not None:
            self.dialogues.append({"messages": record.messages, "tools": opened.schemas})
        return await _Conversation(
            self.player, record, opened, options["budget"], options["reply"], options["on_event"],
            seed_of(options["sampling"]),
        ).run()  # fmt: skip


@dataclass
class _Conversation:
    """A conversation of a player, run like a rollout of the model (agentloop/agent/rollout.py)."""

    player: Endpoint | Script
    record: Trajectory
    tools: Tools
    budget: Budget
    reply: Reply | None
    emit: Emit
    seed: int | None
    num_tokens: int | None = None  # as counted by an endpoint, if it counts those of each turn
    cut: StopReason | None = None  # what has cut off the last turn
    begun_s: float = field(default_factory=time.monotonic)

    async def run(self) -> Trajectory:
        record = self.record
        self.emit(RolloutStarted(record))
        try:
            await self._run_within_timeout()
        except BaseException:
            self.emit(RolloutAbandoned(record.id))
            raise
        finally:
            record.elapsed_s = self._elapsed_s()
            record.answer = _answer_in(record.text)
        self.emit(RolloutFinished(record.id, record, self.num_tokens))
        return record

    async def _run_within_timeout(self) -> None:
        self.record.stop_reason = StopReason.TIME_BUDGET  # overwritten if the turns end in time
        try:
            with anyio.move_on_after(self.budget.timeout_s):
                async with self.tools:
                    self.record.stop_reason = await self._run_turns()
        except Exception as raised:  # in a group, if a task raised it
            error = culprit(raised, ServerError)
            if not isinstance(error, ServerError):
                raise error from error.__cause__
            self.record.stop_reason = StopReason.INFRASTRUCTURE
            self.record.error = str(error)

    async def _run_turns(self) -> StopReason:
        while True:
            turn = await self._run_turn()
            if self.cut is not None:
                return self.cut
            if any(result.status is ToolCallStatus.CALLER for result in turn.results):
                return StopReason.CALLER_TOOLS
            text: str | None = None
            if not turn.calls and self.reply is not None:
                text = await self.reply(_answer_in(turn.text))
            if not turn.calls and text is None:
                return StopReason.ANSWERED
            if len(self.record.turns) >= self.budget.max_turns:
                return StopReason.TURN_BUDGET
            if text is not None:
                self.record.messages.append({"role": "user", "content": valid_text(text)})

    async def _run_turn(self) -> Turn:
        key, index = self.record.id, len(self.record.turns)
        turn = Turn(started_s=self._elapsed_s())
        self.record.turns.append(turn)
        self.emit(TurnStarted(key, index))
        results: dict[int, ToolResult] = {}
        try:
            message = await self._next_message(index, turn)
            self.record.messages.append(message)
            self.emit(TokensSampled(key, index, [], turn.text))
            if turn.end is TurnEnd.STOP:  # otherwise the last call may be cut off
                turn.calls = [_call_of(call) for call in message.get("tool_calls") or ()]
            async with anyio.create_task_group() as running:
                for number, call in enumerate(turn.calls):
                    self.emit(CallStarted(key, index, call))
                    running.start_soon(self._run_call, index, number, call, results)
                self.emit(TurnSampled(key, index))
        finally:
            turn.ended_s = self._elapsed_s()
            turn.results = [results[number] for number in sorted(results)]
            self.emit(TurnFinished(key, index, turn))
        for result in turn.results:
            response = {"role": "tool", "tool_call_id": result.call_id, "content": result.content}
            self.record.messages.append(response)
        return turn

    async def _next_message(self, index: int, turn: Turn) -> Message:
        """Return what the player says next, and record its text in the turn."""
        try:
            if isinstance(self.player, Endpoint):
                return await self._from_endpoint(self.player, index, turn)
            return await self._from_script(self.player, turn)
        except InfrastructureFailed as error:
            raise ServerError(str(error)) from error
        finally:
            turn.generated_s = self._elapsed_s()

    async def _from_endpoint(self, endpoint: Endpoint, index: int, turn: Turn) -> Message:
        turn.servers.append(endpoint.url)
        self.emit(TurnPlaced(self.record.id, index, endpoint.url, _NO_CHOICE))
        try:
            completion = await endpoint.complete(
                [_as_sent(message) for message in self.record.messages],
                tools=self.tools.schemas,
                max_tokens=self.budget.max_turn_tokens,
                seed=self.seed,
            )
        except PromptTooLong:
            if not index:  # the task's own fault, not of what the player has said
                raise
            turn.end, self.cut = TurnEnd.LENGTH, StopReason.TOKEN_BUDGET
            return {"role": "assistant", "content": ""}
        before, added = self.num_tokens if index else 0, completion.num_tokens
        self.num_tokens = None if before is None or added is None else before + added
        turn.text = completion.text
        turn.end = turn_end_of(completion.stop_reason)
        self.cut = completion.stop_reason if turn.end is not TurnEnd.STOP else None
        return _message_of(completion)

    async def _from_script(self, script: Script, turn: Turn) -> Message:
        reply = script(list(self.record.messages))
        reply = await reply if inspect.isawaitable(reply) else reply
        message: Message = (
            {"role": "assistant", "content": reply} if isinstance(reply, str) else reply
        )
        turn.text, turn.end = str(message.get("content") or ""), TurnEnd.STOP
        return message

    async def _run_call(
        self, index: int, number: int, call: ToolCall, results: dict[int, ToolResult]
    ) -> None:
        result = results[number] = await self.tools.run_call(
            call, dispatched_s=self._elapsed_s(), begun_s=self.begun_s
        )
        self.emit(CallFinished(self.record.id, index, result))
        if result.status is ToolCallStatus.INFRASTRUCTURE:
            raise ServerError(f"{call.name}: {result.content}")

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.begun_s


def _message_of(completion: EndpointCompletion) -> Message:
    """Return an endpoint's answer as a message, without reasoning, which most endpoints refuse."""
    message: dict[str, object] = {"role": "assistant", "content": _answer_in(completion.text)}
    if completion.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in completion.tool_calls
        ]
    return message


def _as_sent(message: Message) -> Message:
    """Return a message with the arguments of its calls as JSON text, as OpenAI's API has them."""
    calls = [
        {
            **call,
            "function": {**call["function"], "arguments": _json(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls") or ()
    ]
    return {**message, "tool_calls": calls} if calls else message


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else dumps(arguments).decode()


def _call_of(call: Message) -> ToolCall:
    function = call["function"]
    arguments, error = decode_arguments(function["arguments"])
    raw = _json(function["arguments"])
    return ToolCall(call["id"], function["name"], arguments, raw, 0, 0, error)


def _answer_in(text: str) -> str:
    return answer_in(text, reasoning=False)
