"""Run one trajectory: generate, dispatch, observe, repeat.

    prompt ids ──> generate ──tokens──> tool stream ──call──> tool (a task of the turn) ──┐
         ▲                                                                               │
         └── ids + sampled + observation <── results, in the order of the calls <────────┘

A call starts as soon as its last token arrives, while the turn is still being generated. The
turn's task group waits for its calls; if the turn fails, it cancels them. The trajectory is the
same as if the calls had run one by one after the turn.

With `reply`, the conversation goes on after an answer: what it returns is the user's next message.

With a `journal`, turns that were kept before a kill stand for those that would be sampled.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import anyio
import pydantic

from agentloop.agent.channels import Speech, Splitter, answer_in
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.constraints import Constraints
from agentloop.agent.formats import Family
from agentloop.agent.tool_formats import ToolFormat
from agentloop.agent.tools import Schema, Tool, ToolFunction, Tools
from agentloop.agent.truncation import truncate, without_middle
from agentloop.agent.turn_journal import TurnJournal
from agentloop.agent.turn_reader import TurnOptions, TurnReader
from agentloop.errors import PromptTooLong, RequestError, ServerError, culprit
from agentloop.events import (
    CallFinished,
    CallStarted,
    Emit,
    Explained,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
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
from agentloop.token_records import KeptIds
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

__all__ = ["Budget", "Engine", "Reply", "Rollout", "TurnOptions", "prompt_of", "too_long"]

# Tokens per frame where nobody reads along. A call in mid-turn waits for one and a half tokens on
# average; a server spends a fifth less CPU time, and the reader half (docs/benchmarks.md).
_UNREAD_INTERVAL = 4

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
    max_thought_tokens: int | None = pydantic.Field(
        None,
        ge=1,
        description="Maximum length of a thought in tokens. A longer one is closed, and the model "
        "goes on with its answer or its calls. By default, a thought has no limit of its own.",
    )
    max_tool_response_tokens: int = pydantic.Field(
        512,
        ge=8,
        description="Maximum length of a tool response in tokens; the middle of a longer one is "
        "cut out.",
    )
    max_tool_response_chars: int | None = pydantic.Field(
        None,
        ge=2,
        description="Maximum length of a tool response in characters; the middle of a longer one "
        "is replaced by ...(truncated)... before its tokens are counted. By default, only "
        "max_tool_response_tokens limits it.",
    )
    max_calls_per_turn: int | None = pydantic.Field(
        None,
        ge=1,
        description="Maximum number of tool calls in a turn that run and get a response; further "
        "ones stay in the text and are ignored. By default, all run.",
    )
    timeout_s: float = pydantic.Field(
        600.0,
        gt=0,
        description="Maximum wall time, including waits. A rollout that runs out of it is scored "
        "if its own tool calls took at least half of the time; otherwise it has no reward.",
    )

    def check(self, family: Family) -> None:
        """Check that models of a family can be held to these limits.

        Raises:
            RequestError: They cannot.
        """
        if self.max_thought_tokens is not None and not family.markup.thoughts:
            raise RequestError(
                "budget.max_thought_tokens: the runtime cannot close a thought in the chat format "
                f"{family.name!r}; limit it by the template's arguments, such as reasoning_effort"
            )


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

    def forget(self, key: str, *, is_complete: bool) -> None: ...


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
        raise too_long(f"at least {at_least}", context_length)
    prompt_ids = await chat.prompt_async(messages, schemas)
    if len(prompt_ids) >= context_length:
        raise too_long(str(len(prompt_ids)), context_length)
    return prompt_ids


def too_long(num_tokens: str, context_length: int) -> PromptTooLong:
    """Return the error for messages after which no token of an answer fits."""
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
    options: TurnOptions = field(default_factory=lambda: TurnOptions())
    tool_format: ToolFormat = "plain"
    reply: Reply | None = None
    emit: Emit = ignore
    with_text: bool = True  # decode tokens as they arrive; training does not need it
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    group: str = ""  # shared by the rollouts of one prompt
    prompt_ids: list[int] | None = None  # the rendered prompt, if the caller already has it
    num_turns_before: int = 0  # of its conversation, if a session keeps it
    num_routed_before: int = 0  # of the prompt: tokens of which the experts are recorded already
    elapsed_before_s: float = 0.0  # since that conversation began
    keeps_cache: bool = False  # since a session goes on from it
    journal: TurnJournal | None = None  # not used if a tool has a state
    started_s: float = 0.0  # time.monotonic() when it began; times are relative to it
    _tools: Tools = field(init=False)
    _split: Callable[[bool], Splitter] = field(init=False)
    _constraints: Constraints = field(init=False)
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
        self._tools = Tools(
            self.tools, tool_format=self.tool_format, for_caller=self.options.single_message
        )
        if self.journal is not None and not self._tools.are_stateless:
            self.journal = None
        if self.journal is not None:
            self.elapsed_before_s = self.journal.elapsed_s
        self.started_s = time.monotonic() - self.elapsed_before_s
        schemas, single_call = self._tools.schemas, self.options.single_call
        self.budget.check(self.chat.family)
        self._constraints = Constraints(self.options.rules, self.chat, schemas, single_call)
        self._split = partial(self.chat.family.channels, has_tools=bool(schemas))
        self._speech = Speech(reasoning=False, stop=self.options.stop, split=self._split)
        prompt_ids = self.prompt_ids
        if prompt_ids is None:
            longest = self.engine.context_length
            prompt_ids = await prompt_of(self.chat, self.messages, schemas, longest)
        created_unix_s = time.time() - self.elapsed_before_s
        self._trajectory = Trajectory(self.id, list(prompt_ids), created_unix_s=created_unix_s)
        self.emit(RolloutStarted(self._trajectory, self.group, self.messages))
        is_complete = False
        try:
            if self._is_cancelled:  # before it started
                self._trajectory.stop_reason = StopReason.CANCELLED
            else:
                await self._run_within_timeout(self._trajectory)
            is_complete = self._trajectory.stop_reason in _COMPLETE
        except BaseException:
            self.emit(RolloutAbandoned(self.id))
            raise
        finally:
            if not self.keeps_cache:
                self.engine.forget(self.id, is_complete=is_complete)
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
            except Exception as raised:  # of a task: in a group
                error = culprit(raised, ServerError, _InfrastructureFailure)
                if not isinstance(error, ServerError | _InfrastructureFailure):
                    raise error from error.__cause__
                trajectory.stop_reason = StopReason.INFRASTRUCTURE
                trajectory.error = str(error)
        if self._is_cancelled and trajectory.stop_reason is StopReason.TIME_BUDGET:
            trajectory.stop_reason = StopReason.CANCELLED

    async def _run_turns(self) -> StopReason:
        ids = self._trajectory.prompt_ids
        budget_left = self.budget.max_response_tokens
        sampled_left = self.budget.max_sampled_tokens or budget_left
        while True:
            tokens_left = min(budget_left, self.engine.context_length - len(ids))
            max_tokens = min(tokens_left, sampled_left, self.budget.max_turn_tokens or tokens_left)
            if max_tokens <= 0:
                return StopReason.TOKEN_BUDGET
            turn = await self._next_turn(ids, max_tokens)
            following = await self._following(turn)
            if isinstance(following, StopReason):
                return following
            # The next turn needs at least one token.
            if len(following) >= tokens_left - len(turn.output_ids):
                return StopReason.TOKEN_BUDGET
            turn.observation_ids = following
            budget_left -= len(turn.output_ids) + len(following)
            sampled_left -= len(turn.output_ids)
            ids = [*ids, *turn.output_ids, *following]

    async def _next_turn(self, ids: list[int], max_new_tokens: int) -> Turn:
        """Return the next turn: the one that was kept before a kill, or a new one."""
        if (journal := self.journal) is None:
            return await self._run_turn(ids, max_new_tokens)
        index, budget = len(self._trajectory.turns), self.budget.model_dump(exclude={"timeout_s"})
        journal.begin_turn(ids, f"{self.sampling} {budget} {self.tool_format}")
        if (kept := journal.take(index)) is not None:
            self._trajectory.turns.append(kept)
            return kept
        turn = await self._run_turn(ids, max_new_tokens)
        if turn.end is not TurnEnd.ABORT:
            await journal.add(index, turn)
        return turn

    async def _following(self, turn: Turn) -> list[int] | StopReason:
        """Return the ids between the newest turn and the next one, or why there is no next one."""
        num_turns = len(self._trajectory.turns)
        match turn.end:
            case TurnEnd.ABORT:
                raise _InfrastructureFailure("the token stream ended before the turn was complete")
            case TurnEnd.LENGTH:
                return StopReason.TOKEN_BUDGET
            case TurnEnd.THOUGHT:
                return self.chat.end_of_thought(self._trajectory, num_turns - 1)
        if any(result.status is ToolCallStatus.CALLER for result in turn.results):
            return StopReason.CALLER_TOOLS
        if self._speech.stopped:
            return StopReason.STOP_SEQUENCE
        if self.options.single_message:
            return StopReason.ANSWERED
        text: str | None = None
        if not turn.calls and (text := await self._get_reply()) is None:
            return StopReason.ANSWERED
        if self._trajectory.message_of(num_turns) >= self.budget.max_turns:
            return StopReason.TURN_BUDGET
        return self._observation_of(turn, text)

    @property
    def _answer(self) -> str:
        """The answer in the newest turn."""
        last = len(self._trajectory.turns) - 1
        return answer_in(
            self._trajectory.text,
            reasoning=self.chat.begins_in_thought(self._trajectory, last),
            stop=self.options.stop,
            split=self._split,
        )

    async def _get_reply(self) -> str | None:
        """Return the user's reply to the newest answer, if there is to be one."""
        if self.reply is None:
            return None
        text = await self.reply(self._answer)
        return None if text is None else valid_text(text)

    async def _run_turn(self, ids: list[int], max_new_tokens: int) -> Turn:
        index = len(self._trajectory.turns)
        kept = KeptIds() if self.sampling.records_kept_ids else None
        turn = Turn(started_s=self._elapsed_s(), kept=kept)
        self._trajectory.turns.append(turn)
        thinks = self.chat.begins_in_thought(self._trajectory, index)
        self._speech.begin_turn(reasoning=thinks)
        self.emit(TurnStarted(self.id, index))
        results: dict[str, ToolResult] = {}
        try:
            async with anyio.create_task_group() as calls:

                def dispatch(call: ToolCall) -> None:
                    if len(turn.calls) == self.budget.max_calls_per_turn:
                        return
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
        options, message = self.options, self._trajectory.message_of(index)
        reader = TurnReader(
            self._trajectory,
            index,
            self.chat,
            calls=self.chat.family.calls(
                self._constraints.codec(message),
                self._tools.schemas,
                id_prefix=f"call_{self.id[-12:]}_{self.num_turns_before + index}",
            ),
            speech=self._speech,
            options=options,
            max_thought_tokens=self.budget.max_thought_tokens,
            with_text=self.with_text,
            emit=self.emit,
            dispatch=dispatch,
            elapsed_s=self._elapsed_s,
        )
        generation = Generation(
            rid=uuid.uuid4().hex,
            key=self.id,
            ids=ids,
            sampling=self.sampling,
            max_new_tokens=max_new_tokens,
            stop_ids=() if options.ignore_end else (*self.chat.stop_ids, *options.stop_ids),
            group=self.group,
            num_shared=len(self._trajectory.prompt_ids) if self.group else 0,
            num_top_logprobs=options.num_top_logprobs,
            stream_interval=1 if self.with_text else _UNREAD_INTERVAL,
            experts_from=max(self.num_routed_before, self._trajectory.num_routed),
            parameters={
                **options.parameters,
                **self._constraints.of(message, self.chat.opening_tag(self._trajectory, index)),
            },
        )

        def on_placed(server: str, decision: Explained) -> None:
            turn.servers.append(server)
            if turn.first_token_s is None:
                turn.placed_s = self._elapsed_s()
            self.emit(TurnPlaced(self.id, index, server, decision))

        def on_moved(server: str, reason: str) -> None:
            self.emit(TurnMoved(self.id, server, reason))

        try:
            with reader.cut:
                await self.engine.generate(
                    generation,
                    vocab_size=self.chat.vocab_size,
                    on_chunk=reader.take,
                    on_placed=on_placed,
                    on_moved=on_moved,
                )
        except RequestError as error:
            raise self._constraints.explain(error, message) from error
        finally:
            turn.generated_s = self._elapsed_s()
            reader.flush()
        reader.finish()

    async def _run_call(
        self, index: int, call: ToolCall, dispatched_s: float, results: dict[str, ToolResult]
    ) -> None:
        if self.journal is not None and not self._tools.may_repeat(call.name):
            await self.journal.begin_call(index, call.name)
        result = await self._tools.run_call(call, dispatched_s=dispatched_s, begun_s=self.started_s)
        results[call.id] = result
        self.emit(CallFinished(self.id, index, result))
        if result.status is ToolCallStatus.INFRASTRUCTURE:
            raise _InfrastructureFailure(f"{call.name}: {result.content}")

    def _observation_of(self, turn: Turn, reply: str | None) -> list[int]:
        """Return the ids between this turn and the next one."""
        last_id = turn.output_ids[-1]
        if reply is not None:
            return self.chat.user_message(reply, last_id=last_id)
        budget = self.budget
        contents = [
            truncate(
                self.chat,
                without_middle(result.content, budget.max_tool_response_chars),
                budget.max_tool_response_tokens,
            )
            for result in turn.results
        ]
        return self.chat.observation(contents, turn.calls, last_id=last_id)

    def _elapsed_s(self) -> float:
        return time.monotonic() - self.started_s
