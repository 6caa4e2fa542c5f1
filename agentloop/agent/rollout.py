"""One trajectory: generate, dispatch, observe, repeat.

    prompt ids ──> generate ──tokens──> tool stream ──call──> tool (a task of the turn) ──┐
         ▲                                                                               │
         └── ids + sampled + observation <── results, in the order of the calls <────────┘

A call starts as soon as its last token arrives, while the turn is still being generated. The
turn's task group waits for its calls; if the turn fails, it cancels them. The trajectory is the
same as if the calls had run one by one after the turn.

With `reply`, the conversation goes on after an answer: what it returns is the user's next message.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import anyio
import pydantic

from agentloop.agent.channels import Speech, answer_in
from agentloop.agent.chat_format import ChatFormat, TextStream
from agentloop.agent.tool_stream import ToolCallStream
from agentloop.agent.tools import Schema, Tool, ToolFunction, ToolOutput, Tools
from agentloop.errors import PromptTooLong, ServerError
from agentloop.events import (
    CallFinished,
    CallStarted,
    Emit,
    Explained,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnMoved,
    TurnPlaced,
    TurnSampled,
    TurnStarted,
    ignore,
)
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.plain_json import valid_text
from agentloop.trajectory import (
    Message,
    StopReason,
    ToolCall,
    ToolCallStatus,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
    VersionSpan,
)

__all__ = ["Budget", "Engine", "Reply", "Rollout", "TurnOptions", "prompt_of", "truncated"]

Reply = Callable[[str], Awaitable[str | None]]
"""A function of the model's answer that returns the user's next message, or None to end."""


class Budget(pydantic.BaseModel):
    """Limits of one rollout. Reaching one ends the rollout with the corresponding `StopReason`."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    max_turns: int = pydantic.Field(10, ge=1, description="Maximum number of turns.")
    max_response_tokens: int = pydantic.Field(
        8192,
        ge=1,
        description="Maximum number of tokens after the prompt: sampled tokens, tool responses and "
        "replies of the user.",
    )
    max_sampled_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        description="Maximum number of sampled tokens over all turns. By default, "
        "max_response_tokens.",
    )
    max_turn_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        description="Maximum number of sampled tokens in one turn. By default, "
        "max_response_tokens.",
    )
    max_tool_response_tokens: int = pydantic.Field(
        512,
        ge=8,
        description="Maximum length of a tool response in tokens; the middle of a longer one is "
        "cut out.",
    )
    timeout_s: float = pydantic.Field(
        600.0,
        gt=0,
        description="Maximum wall time, including waits. A rollout that runs out of it is scored "
        "if its own tool calls took at least half of the time; otherwise it has no reward.",
    )


@dataclass(frozen=True, slots=True)
class TurnOptions:
    """Options for ending a turn early and for the data that it records.

    Attributes:
        stop: Stop sequences. The answer, and with it the rollout, ends before the first match; see
            `agentloop.agent.channels.Speech`.
        single_call: End each turn after its first tool call.
        ignore_end: Ignore the end-of-turn token and do not run calls, so that each turn uses its
            whole budget. For load tests.
        num_top_logprobs: Number of most likely tokens to record for each sampled token.
    """

    stop: tuple[str, ...] = ()
    single_call: bool = False
    ignore_end: bool = False
    num_top_logprobs: int = 0


class Engine(Protocol):
    """A source of tokens; implemented by `agentloop.inference.router.Router`."""

    @property
    def context_length(self) -> int: ...

    async def generate(
        self,
        generation: Generation,
        *,
        vocab_size: int,
        on_chunk: Callable[[Chunk], None],
        on_placed: Callable[[str, Explained], None],
        on_moved: Callable[[str, str], None],
    ) -> None: ...

    def forget(self, key: str, *, whole: bool) -> None: ...


# Ends from which the length of rollouts can be estimated. The others were imposed from outside.
_COMPLETE = (
    StopReason.ANSWERED,
    StopReason.STOP_SEQUENCE,
    StopReason.CALLER_TOOLS,
    StopReason.TURN_BUDGET,
    StopReason.TOKEN_BUDGET,
)


class _InfrastructureFailure(Exception):
    """A call or a turn was lost to a failure of the infrastructure, so the rollout ends."""


async def prompt_of(
    chat: ChatFormat, messages: Sequence[Message], schemas: Sequence[Schema], context_length: int
) -> list[int]:
    """Return the token ids of a conversation with tools.

    Raises:
        RequestError: The messages are invalid, or the prompt does not fit in `context_length`.
    """
    if (at_least := chat.min_prompt_tokens(messages)) >= context_length:
        raise _too_long(f"at least {at_least}", context_length)
    prompt_ids = await chat.prompt_async(messages, schemas)
    if len(prompt_ids) >= context_length:
        raise _too_long(str(len(prompt_ids)), context_length)
    return prompt_ids


def _too_long(num_tokens: str, context_length: int) -> PromptTooLong:
    # Clients detect this error by "this model's maximum context length is" or by the code.
    return PromptTooLong(
        f"messages: this model's maximum context length is {context_length} tokens, but the "
        f"messages make {num_tokens}: shorten them ({PromptTooLong.code})"
    )


@dataclass(slots=True)
class Rollout:
    """Inputs and execution of one rollout; `run()` may be called once."""

    engine: Engine
    chat: ChatFormat
    messages: Sequence[Message]
    tools: Sequence[Tool | ToolFunction] = ()
    sampling: Sampling = field(default_factory=lambda: Sampling())
    budget: Budget = field(default_factory=lambda: Budget())
    options: TurnOptions = TurnOptions()
    reply: Reply | None = None
    emit: Emit = ignore
    with_text: bool = True  # decode tokens as they arrive; training does not need it
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    group: str = ""  # shared by the rollouts of one prompt
    prompt_ids: list[int] | None = None  # the rendered prompt, if the caller already has it
    started_s: float = 0.0  # time.monotonic() when run() was called; times are relative to it
    _tools: Tools = field(init=False)
    _trajectory: Trajectory = field(init=False)
    _speech: Speech = field(init=False)  # finds stop sequences
    _scope: anyio.CancelScope | None = field(init=False, default=None)  # set while it runs
    _is_cancelled: bool = field(init=False, default=False)

    def cancel(self) -> None:
        """End the rollout now, with `StopReason.CANCELLED`."""
        self._is_cancelled = True
        if self._scope is not None:
            self._scope.cancel()

    async def run(self) -> Trajectory:
        """Run the rollout and return its trajectory, however it ended.

        Raises:
            RequestError: The request is invalid; nothing has run.
            Exception: Whatever `reply` raises.
        """
        self.started_s = time.monotonic()
        self._tools = Tools(self.tools)
        thinks = bool(self.chat.opened_thought)
        self._speech = Speech(reasoning=thinks, stop=self.options.stop)
        prompt_ids = self.prompt_ids
        if prompt_ids is None:
            longest = self.engine.context_length
            prompt_ids = await prompt_of(self.chat, self.messages, self._tools.schemas, longest)
        self._trajectory = Trajectory(self.id, list(prompt_ids), created_unix_s=time.time())
        self.emit(RolloutStarted(self._trajectory, self.group))
        whole = False
        try:
            if self._is_cancelled:  # before it started
                self._trajectory.stop_reason = StopReason.CANCELLED
            else:
                await self._run_within_timeout(self._trajectory)
            whole = self._trajectory.stop_reason in _COMPLETE
        except BaseException:
            self.emit(RolloutAbandoned(self.id))
            raise
        finally:
            self.engine.forget(self.id, whole=whole)
            self._trajectory.elapsed_s = self._elapsed_s()
            self._trajectory.answer = self._answer
        self.emit(RolloutFinished(self.id, self._trajectory))
        return self._trajectory

    async def _run_within_timeout(self, trajectory: Trajectory) -> None:
        trajectory.stop_reason = StopReason.TIME_BUDGET  # overwritten if the turns end in time
        with anyio.move_on_after(self.budget.timeout_s) as self._scope:
            try:
                async with self._tools:
                    trajectory.stop_reason = await self._run_turns()
            except ExceptionGroup as group:
                error = _cause(group)
                if not isinstance(error, ServerError | _InfrastructureFailure):
                    raise error from group
                trajectory.stop_reason = StopReason.INFRASTRUCTURE
                trajectory.error = str(error)
        if self._is_cancelled and trajectory.stop_reason is StopReason.TIME_BUDGET:
            trajectory.stop_reason = StopReason.CANCELLED

    async def _run_turns(self) -> StopReason:
        ids = list(self._trajectory.prompt_ids)
        budget_left = self.budget.max_response_tokens
        sampled_left = self.budget.max_sampled_tokens or budget_left
        while True:
            room = min(budget_left, self.engine.context_length - len(ids))
            most = min(room, sampled_left, self.budget.max_turn_tokens or room)
            if most <= 0:
                return StopReason.TOKEN_BUDGET
            turn = await self._run_turn(ids, most)
            if turn.end is TurnEnd.ABORT:
                raise _InfrastructureFailure("the token stream ended before the turn was complete")
            if turn.end is TurnEnd.LENGTH:
                return StopReason.TOKEN_BUDGET
            if any(result.status is ToolCallStatus.CALLER for result in turn.results):
                return StopReason.CALLER_TOOLS
            if self._speech.stopped:
                return StopReason.STOP_SEQUENCE
            text: str | None = None
            if not turn.calls and (text := await self._replied()) is None:
                return StopReason.ANSWERED
            if len(self._trajectory.turns) >= self.budget.max_turns:
                return StopReason.TURN_BUDGET
            observation = self._observation_of(turn, text)
            room -= len(turn.output_ids)
            if len(observation) >= room:  # no room for another token
                return StopReason.TOKEN_BUDGET
            turn.observation_ids = observation
            budget_left -= len(turn.output_ids) + len(observation)
            sampled_left -= len(turn.output_ids)
            ids += turn.output_ids
            ids += observation

    @property
    def _answer(self) -> str:
        """The answer in the newest turn."""
        thinks = bool(self.chat.opened_thought)
        return answer_in(self._trajectory.text, reasoning=thinks, stop=self.options.stop)

    async def _replied(self) -> str | None:
        """Return the user's reply to the newest answer, if there is to be one."""
        if self.reply is None:
            return None
        text = await self.reply(self._answer)
        return None if text is None else valid_text(text)

    async def _run_turn(self, ids: list[int], max_new_tokens: int) -> Turn:
        index = len(self._trajectory.turns)
        turn = Turn(started_s=self._elapsed_s())
        self._trajectory.turns.append(turn)
        self.emit(TurnStarted(self.id, index))
        results: dict[str, ToolResult] = {}
        try:
            async with anyio.create_task_group() as calls:

                def dispatch(call: ToolCall) -> None:
                    turn.calls.append(call)
                    self.emit(CallStarted(self.id, index, call))
                    calls.start_soon(self._run_call, index, call, self._elapsed_s(), results)

                await self._generate(index, turn, ids, max_new_tokens, dispatch)
                self.emit(TurnSampled(self.id, index))
                if turn.end is TurnEnd.LENGTH:
                    # The results are never read, so the record must not depend on whether a call
                    # finished in time.
                    calls.cancel_scope.cancel()
                    results.clear()
        finally:
            turn.ended_s = self._elapsed_s()
            turn.results = [results[call.id] for call in turn.calls if call.id in results]
            self.emit(TurnFinished(self.id, index, turn))
        return turn

    async def _generate(
        self,
        index: int,
        turn: Turn,
        ids: list[int],
        max_new_tokens: int,
        dispatch: Callable[[ToolCall], None],
    ) -> None:
        reader = _TurnReader(self, index, turn, dispatch)
        generation = Generation(
            rid=uuid.uuid4().hex,
            key=self.id,
            ids=ids,
            sampling=self.sampling,
            max_new_tokens=max_new_tokens,
            stop_ids=() if self.options.ignore_end else self.chat.stop_ids,
            group=self.group,
            num_shared=len(self._trajectory.prompt_ids) if self.group else 0,
            num_top_logprobs=self.options.num_top_logprobs,
        )

        def placed(server: str, decision: Explained) -> None:
            turn.servers.append(server)
            self.emit(TurnPlaced(self.id, index, server, decision))

        def moved(server: str, reason: str) -> None:
            self.emit(TurnMoved(self.id, server, reason))

        try:
            with reader.cut:
                await self.engine.generate(
                    generation,
                    vocab_size=self.chat.vocab_size,
                    on_chunk=reader.take,
                    on_placed=placed,
                    on_moved=moved,
                )
        finally:
            turn.generated_s = self._elapsed_s()
            reader.flush()
        reader.finish()

    async def _run_call(
        self, index: int, call: ToolCall, dispatched_s: float, results: dict[str, ToolResult]
    ) -> None:
        if call.error is not None:
            output = ToolOutput(ToolCallStatus.MALFORMED, f"[malformed tool call] {call.error}")
        else:
            output = await self._tools.run(call.name, call.arguments)
        started_s = dispatched_s
        if output.started_s is not None:
            started_s = output.started_s - self.started_s
        # A lone surrogate, for example from a file name, cannot be encoded as UTF-8.
        content = valid_text(output.content)
        result = ToolResult(
            call.id, call.name, output.status, content, dispatched_s, started_s, self._elapsed_s()
        )
        results[call.id] = result
        self.emit(CallFinished(self.id, index, result))
        if output.status is ToolCallStatus.INFRASTRUCTURE:
            raise _InfrastructureFailure(f"{call.name}: {output.content}")

    def _observation_of(self, turn: Turn, reply: str | None) -> list[int]:
        """Return the ids between this turn and the next one."""
        if reply is not None:
            return self.chat.user_message(reply)
        limit = self.budget.max_tool_response_tokens
        contents = [truncated(self.chat, result.content, limit) for result in turn.results]
        observation = self.chat.observation(contents)
        if self.options.single_call and turn.output_ids[-1] != self.chat.end_id:
            observation.insert(0, self.chat.end_id)  # the turn was cut before its end token
        return observation

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_s


class _TurnReader:
    """Records the chunks of one turn, emits events, dispatches calls and ends the turn early.

    Attributes:
        cut: Cancel scope to enter around the generation; cancelled to end the turn early.
    """

    def __init__(
        self, rollout: Rollout, index: int, turn: Turn, dispatch: Callable[[ToolCall], None]
    ) -> None:
        self.cut = anyio.CancelScope()
        self._rollout = rollout
        self._index = index
        self._turn = turn
        self._dispatch = dispatch
        self._options = rollout.options
        self._speech = rollout._speech
        chat = rollout.chat
        self._calls = ToolCallStream(chat, id_prefix=f"call_{rollout.id[-12:]}_{index}")
        has_text = rollout.with_text or self._options.stop
        self._text = TextStream(chat) if has_text else None
        self._versions = _Versions()

    def take(self, chunk: Chunk) -> None:
        # Go token by token, so that the cut does not depend on how many tokens a chunk has.
        by_token = self._options.single_call or self._options.stop
        for part in _tokens(chunk) if by_token else [chunk]:
            if self.cut.cancel_called:
                return
            piece = self._record(part)
            calls = [] if self._options.ignore_end else self._calls.feed(part.ids)
            for call in calls:
                self._dispatch(call)
            if self._options.stop:
                list(self._speech.feed(piece))
            if self._speech.stopped or (self._options.single_call and calls):
                self._turn.end = TurnEnd.STOP
                if part.end is None:
                    self.cut.cancel()

    def flush(self) -> None:
        """Record the text that was held back; call it after the last chunk, even after an error."""
        turn = self._turn
        if turn.end is TurnEnd.ABORT or self.cut.cancel_called:
            turn.versions = self._versions.spans(len(turn.output_ids), ())
        if self._text is None:
            turn.text = self._rollout.chat.decode(turn.output_ids)
        elif held := self._text.flush():
            turn.text += held
            self._rollout.emit(TokensSampled(self._rollout.id, self._index, [], held))

    def finish(self) -> None:
        """Apply stop sequences to the text that was held back, and dispatch its calls."""
        if self._options.stop and self._turn.end is not TurnEnd.ABORT:
            list(self._speech.end_turn())
            if self._speech.stopped:  # takes precedence over TurnEnd.LENGTH
                self._turn.end = TurnEnd.STOP
        if self._turn.end is TurnEnd.STOP and not self.cut.cancel_called:
            for call in self._calls.finish():
                self._dispatch(call)

    def _record(self, chunk: Chunk) -> str:
        """Add a chunk to the turn and return its text."""
        rollout, turn = self._rollout, self._turn
        if turn.first_token_s is None and chunk.ids:
            turn.first_token_s = rollout._elapsed_s()
        start = len(turn.output_ids)
        turn.output_ids += chunk.ids
        turn.logprobs += chunk.logprobs
        turn.top_logprobs += chunk.top_logprobs
        turn.cached_tokens = chunk.cached_tokens or turn.cached_tokens
        if chunk.ids and chunk.version != self._versions.current:
            self._versions.change(chunk.version, start)
        if chunk.end is not None:
            turn.end = chunk.end
            server_spans = chunk.versions
            num_seen = server_spans[0].start if server_spans else len(turn.output_ids)
            turn.versions = self._versions.spans(num_seen, server_spans)
        piece = ""
        if self._text is not None:
            piece = self._text.feed(chunk.ids)
            turn.text += piece
        if chunk.ids and rollout.emit is not ignore:
            rollout.emit(TokensSampled(rollout.id, self._index, chunk.ids, piece))
        return piece


def truncated(chat: ChatFormat, content: str, limit: int) -> list[int]:
    """Return the ids of `content`; if there are more than `limit`, its head, a note and its tail.

    The ids of the note are not counted against `limit`.
    """
    num_head = (limit + 1) // 2
    num_tail = limit - num_head
    longest = 32 * limit
    if len(content) > longest:
        # Encoding megabytes would block the event loop; no text averages 32 characters a token.
        head = chat.encode(content[: longest // 2])[:num_head]
        tail = chat.encode(content[-longest // 2 :])[-num_tail:]
        left_out = f"the middle of {len(content)} characters left out"
    else:
        ids = chat.encode(content)
        if len(ids) <= limit:
            return ids
        head, tail = ids[:num_head], ids[-num_tail:]
        left_out = f"{len(ids) - limit} tokens left out"
    return head + chat.encode(f"\n[... {left_out} ...]\n") + tail


def _tokens(chunk: Chunk) -> Iterator[Chunk]:
    """Split a chunk into one chunk per token; the last one carries the chunk's end and versions."""
    last = len(chunk.ids) - 1
    for i in range(last):
        yield Chunk(
            chunk.ids[i : i + 1],
            chunk.logprobs[i : i + 1],
            chunk.version,
            cached_tokens=chunk.cached_tokens,
            top_logprobs=chunk.top_logprobs[i : i + 1],
        )
    if last >= 1:
        chunk = replace(
            chunk,
            ids=chunk.ids[last:],
            logprobs=chunk.logprobs[last:],
            top_logprobs=chunk.top_logprobs[last:],
        )
    yield chunk


class _Versions:
    """Records the policy version of each token of a turn as the turn streams."""

    __slots__ = ("_starts", "current")

    def __init__(self) -> None:
        self.current: str | None = None
        self._starts: list[tuple[str, int]] = []

    def change(self, version: str, start: int) -> None:
        """Record that tokens from `start` on were sampled by `version`."""
        self.current = version
        self._starts.append((version, start))

    def spans(self, end: int, server_spans: Sequence[VersionSpan]) -> list[VersionSpan]:
        """Return the spans seen before `end`, followed by the server's own record of the rest."""
        ends = [start for _, start in self._starts[1:]] + [end]
        seen = [
            VersionSpan(version, start, min(stop, end))
            for (version, start), stop in zip(self._starts, ends, strict=False)
            if start < end
        ]
        return [*seen, *server_spans]


def _cause(group: ExceptionGroup[Exception]) -> Exception:
    """Return the first error that is not an infrastructure failure, or else the first error."""
    leaves: list[Exception] = []
    pending: list[Exception] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, ExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    programming_errors = (
        error for error in leaves if not isinstance(error, ServerError | _InfrastructureFailure)
    )
    return next(programming_errors, leaves[0])
