"""A session: a client's requests to the model, each a turn of a branch.

A request's history is compared with the session's tree. From the last turn in it that was sampled
here, its exact ids are reused and only what is new is encoded; a history without such a turn is
encoded whole. The turn extends the branch whose tip it follows; otherwise a new branch begins,
whose prompt holds all ids before it. So each sampled token is an output of one branch only, and
branches are what is trained on.

A turn that fails, or whose client leaves before its end, is taken back: it is in no branch. What a
client has read in a stream before it left becomes a branch of its own, as if it had stopped there:
otherwise a program could use what the model says, and have none of it recorded.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import anyio

from agentloop.agent.channels import answer_in
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Budget, Engine, Rollout, TurnOptions, prompt_of, too_long
from agentloop.agent.sessions.alike import alike_by
from agentloop.agent.sessions.history import (
    context_key,
    opening_key,
    request_key,
    with_our_ids,
)
from agentloop.agent.sessions.tree import Branch, Match, MessageTree, SampledTurn, copy_turn
from agentloop.agent.tools import Schema, Tool, Tools
from agentloop.errors import RequestError, ServerError
from agentloop.events import (
    CallFinished,
    CallStarted,
    ClientAwaited,
    Emit,
    Event,
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
from agentloop.inference.sglang.sampling import Sampling
from agentloop.trajectory import Message, StopReason, Trajectory, TurnEnd

AsMessage = Callable[[Trajectory], Message]
"""Returns a turn as the message that its client gets."""

_MAX_TOKENS = 1 << 22  # some 200 MB
_MAX_FAILURES = 1024
_LEFT = "its client left before the end of the message"
_MAX_IN_FLIGHT = 128  # the choices of a request count, of which there are as many at most
_TURN_EVENTS = (
    *(TurnStarted, TurnPlaced, TokensSampled, TurnSampled, TurnFinished),
    *(CallStarted, CallFinished),
)


@dataclass(frozen=True)
class TurnRequest:
    """A request for one message of the model.

    Attributes:
        tools: the tools that the client runs.
        sampling: sampling parameters; None: the session's.
        has_seed: whether their seed is the client's own.
        max_tokens: limit of the sampled tokens; None: the session's.
        max_thought_tokens: limit of a thought; None: the session's.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    sampling: Sampling | None = None
    has_seed: bool = False
    max_tokens: int | None = None
    max_thought_tokens: int | None = None
    options: TurnOptions = field(default_factory=TurnOptions)
    template_arguments: Mapping[str, object] = field(default_factory=dict)


class ModelSession:
    """The conversations of one client with the model.

    Attributes:
        name: public name; branches are `NAME`, `NAME+1`, `NAME+2`, ...
        key: secret that a client must know to use it.
        sampling: parameters of requests that bring none of their own.
        used_s: `time.monotonic()` when it was last used.
        num_cut: number of turns that were taken back.
        slots: limit of concurrent requests, so that no client fills the queue of the servers: its
            own requests, and those of others, would fail there as if the servers had.
        is_rollout: whether it is trained on. Requests then cannot change how tokens are sampled,
            and a branch has the budget of a conversation: `max_response_tokens` after its prompt.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        chat: ChatFormat,
        *,
        sampling: Sampling,
        budget: Budget,
        max_tokens: int = _MAX_TOKENS,
        emit: Emit = ignore,
        group: str = "",
        with_text: bool = True,
        is_rollout: bool = False,
    ) -> None:
        """
        Args:
            budget: limits of each request.
            max_tokens: how many ids its branches may hold together.
            emit: called with the events of branches, as of rollouts.
            group: the group of the rollout that the session belongs to.
            with_text: decode tokens as they arrive.
        """
        self.name = name
        self.sampling = sampling
        self.is_rollout = is_rollout
        self.key = secrets.token_urlsafe(24)
        self.used_s = time.monotonic()
        self.num_cut = 0
        self.slots = anyio.CapacityLimiter(_MAX_IN_FLIGHT)
        self._failures: dict[bytes, str] = {}  # by the requests that have no answer
        self.branches: list[Branch] = []
        self._engine, self._chat = engine, chat
        self._budget, self._max_tokens = budget, max_tokens
        self._emit, self._group, self._with_text = emit, group, with_text
        self._tree = MessageTree()
        self._num_open = 0
        self._num_taken_back: Counter[str] = Counter()  # by the name of the branch
        self._queued_s = 0.0
        self._queued_since_s: float | None = None
        self._unread: Branch | None = None
        self._is_closed = False

    @property
    def failure(self) -> str | None:
        """The failure of the infrastructure at a request that has not been answered since."""
        return next(reversed(self._failures.values()), None)

    @property
    def is_idle(self) -> bool:
        """True if no request is in flight."""
        return not self._num_open

    @property
    def queued_s(self) -> float:
        """Seconds during which its only request waited for a place at a server, until now.

        Not those during which it had several: they may have been in each other's way.
        """
        since_s = self._queued_since_s
        return self._queued_s + (0.0 if since_s is None else time.monotonic() - since_s)

    def _set_queued(self, is_queued: bool) -> None:
        self._queued_s = self.queued_s
        self._queued_since_s = time.monotonic() if is_queued else None

    @property
    def num_tokens(self) -> int:
        """Number of ids that its branches hold."""
        return sum(
            len(branch.record.prompt_ids) + branch.record.num_response_tokens
            for branch in self.branches
        )

    @property
    def trajectories(self) -> list[Trajectory]:
        """The branches as trajectories, in the order in which they began.

        Each token that was sampled and delivered is an output of exactly one of them. Requests in
        flight are left out: their turns may be taken back.
        """
        return [record for branch in self.branches if (record := branch.finished).turns]

    @property
    def openings(self) -> dict[str, str]:
        """The purpose of each branch (`opening_key`), by its id."""
        return {branch.record.id: branch.opening for branch in self.branches}

    async def complete(
        self, request: TurnRequest, as_message: AsMessage, on_event: Emit = ignore
    ) -> Trajectory:
        """Sample the next message of a history.

        Args:
            as_message: returns the result as the message that the client gets.
            on_event: called with the events of this message, as of a rollout of one message.

        Returns:
            The message as a trajectory of its own, whose prompt is all that came before.

        Raises:
            RequestError: the request is invalid, or the session is full or closed.
            ServerError: the infrastructure failed; the turn is in no branch.
        """
        self._check_open()
        if self.num_tokens >= self._max_tokens:
            raise RequestError(
                f"session: it holds {self.num_tokens} tokens, and may hold {self._max_tokens}: "
                "open another one"
            )
        self._num_open += 1
        self._set_queued(False)
        try:
            message = await self._complete(request, as_message, on_event)
        except ServerError as error:
            if len(self._failures) < _MAX_FAILURES:
                self._failures[_key_of(request)] = str(error)
            raise
        else:
            if self._failures:  # another request, such as a sub-agent's, may still have failed
                self._failures.pop(_key_of(request), None)
            return message
        finally:
            self._num_open -= 1
            self.used_s = time.monotonic()
            if self.is_idle:
                self._set_queued(False)

    async def _complete(
        self, request: TurnRequest, as_message: AsMessage, on_event: Emit
    ) -> Trajectory:
        chat = self._chat.with_arguments(request.template_arguments)
        schemas = Tools(request.tools).schemas
        context = context_key(schemas, request.template_arguments)
        match = self._tree.match(context, request.messages, alike_by(chat), chat.reads)
        prompt = await self._prompt(chat, request, schemas, match)
        self._check_open()
        opening = opening_key(context, request.messages, is_continued=match.num_sampled > 0)
        branch = self._branch_for(prompt, match, opening)
        limits = self._limits(request, len(prompt.ids), len(branch.record.prompt_ids))
        turns = branch.record.turns
        scope = anyio.CancelScope()
        branch.begin(scope, is_read=on_event is not ignore, question=match.question)
        branch.pending_ids = prompt.ids
        try:
            with scope:
                message = await self._sample(chat, request, prompt, branch, limits, on_event)
            self._check_open()
            if branch.scope is not scope:
                raise RequestError("session: its requests were stopped")
            if message.stop_reason.is_unscorable or message.stop_reason is StopReason.TIME_BUDGET:
                raise ServerError(message.error or f"the turn ended: {message.stop_reason}")
        except ServerError:
            self._leave(branch, scope, "the infrastructure failed before the end of the message")
            raise
        except Exception:
            self._take_back(branch, scope)
            raise
        except BaseException:
            self._leave(branch, scope)
            raise
        branch.commit()
        branch.record.stop_reason = message.stop_reason
        branch.record.answer = message.answer
        branch.record.elapsed_s = time.time() - branch.record.created_unix_s
        self._tree.add(context, match, SampledTurn(branch, len(turns), as_message(message)))
        self._emit(ClientAwaited(branch.record.id))
        return message

    def _check_open(self) -> None:
        if self._is_closed:
            raise RequestError("session: it has been closed")

    async def _prompt(
        self, chat: ChatFormat, request: TurnRequest, schemas: Sequence[Schema], match: Match
    ) -> _Prompt:
        """Return the ids of a request's prompt, and how they were made."""
        longest, reason = self._engine.context_length, ""
        if (turn := match.turn) is not None:
            last = turn.branch.record.turns[turn.num_turns - 1]
            from_client = request.messages[match.num_sampled - 1]
            new = with_our_ids(request.messages[match.num_sampled :], from_client, turn.message)
            try:
                following = await chat.continuation_async(
                    new,
                    last.calls,
                    last_id=last.output_ids[-1],
                    num_calls=match.num_calls,
                )
            except RequestError as error:
                reason = f"the chat template cannot go on from the turn before: {error}"
            else:
                ids = [*turn.ids, *following]
                if len(ids) >= longest:
                    raise too_long(str(len(ids)), longest)
                return _Prompt(ids, turn, following)
        ids = await prompt_of(chat, request.messages, schemas, longest)
        return _Prompt(ids, None, [], reason)

    def _free_name(self) -> str:
        """Return the first name that no branch has; one that was taken back has none."""
        names = {branch.record.id for branch in self.branches}
        numbered = (f"{self.name}+{number}" for number in itertools.count(1))
        return next(name for name in itertools.chain([self.name], numbered) if name not in names)

    def _branch_for(self, prompt: _Prompt, match: Match, opening: str) -> Branch:
        """Return the branch that a prompt extends, or a new one."""
        turn = prompt.turn
        if turn is not None and turn.is_tip:
            return turn.branch
        name = self._free_name()
        record = Trajectory(name, prompt.ids, created_unix_s=time.time())
        record.stop_reason = StopReason.ENVIRONMENT  # until it has a turn
        parent = turn.branch.record.id if turn is not None else None
        branch = Branch(record, self._reason(prompt, match), parent, match.question, opening)
        branch.num_left = self._num_taken_back[name]
        self.branches.append(branch)
        self._emit(RolloutStarted(record, self._group))
        return branch

    def _reason(self, prompt: _Prompt, match: Match) -> str:
        """Explain why a request begins a branch."""
        if not self.branches or prompt.reason:
            return prompt.reason
        is_again = any(
            prompt.ids in (branch.record.prompt_ids, branch.pending_ids) for branch in self.branches
        )
        if is_again or match.num_known == len(match.keys):
            return "the same history was asked again"
        if match.num_known:
            return f"messages[{match.num_known}] differs from what came there before"
        return "the tools, the template's variables or the first message differ"

    async def _sample(
        self,
        chat: ChatFormat,
        request: TurnRequest,
        prompt: _Prompt,
        branch: Branch,
        limits: Budget,
        on_event: Emit,
    ) -> Trajectory:
        """Sample a message, and record it in the branch as it streams."""
        record, base, scope = branch.record, len(branch.record.turns), branch.scope
        sampling = request.sampling or self.sampling
        if not request.has_seed:  # otherwise two branches from one turn would be the same
            again = f" {branch.num_left}" if branch.num_left else ""
            sampling = sampling.of_group(f"{record.id} {base}{again}")
        rollout = Rollout(
            engine=self._engine,
            chat=chat,
            messages=request.messages,
            tools=request.tools,
            sampling=sampling,
            budget=limits,
            options=replace(request.options, single_message=True),
            id=record.id,
            prompt_ids=prompt.ids,
            with_text=self._with_text or on_event is not ignore,
            keeps_cache=True,
            num_turns_before=base,
            num_routed_before=record.num_routed,
            elapsed_before_s=time.time() - record.created_unix_s if base else 0.0,
        )
        message: Trajectory | None = None

        def observe(event: Event) -> None:
            nonlocal message
            on_event(event)
            if branch.scope is not scope:  # taken back meanwhile
                return
            if isinstance(event, RolloutStarted):
                message = event.record
            elif isinstance(event, TurnStarted):
                assert message is not None
                branch.append(message.turns[event.turn], prompt.following)
                self._set_queued(self._num_open == 1)
            elif isinstance(event, TurnPlaced | TokensSampled) and self._queued_since_s:
                self._set_queued(False)
            if self._emit is ignore:
                return
            if isinstance(event, _TURN_EVENTS):
                self._emit(replace(event, turn=base + event.turn))
            elif isinstance(event, TurnMoved):
                self._emit(event)

        rollout.emit = observe
        return await rollout.run()

    def _limits(self, request: TurnRequest, num_before: int, num_prompt: int) -> Budget:
        """Return the budget, lowered to the request's limits and to what is left of it.

        Args:
            num_before: number of ids before the message, of which `num_prompt` began its branch.

        Raises:
            RequestError: nothing is left.
        """
        budget = self._budget
        if self.is_rollout and num_before > num_prompt:
            longest = num_prompt + budget.max_response_tokens
            if num_before >= longest:
                raise too_long(str(num_before), longest)
            budget = budget.model_copy(update={"max_response_tokens": longest - num_before})
        token_limits = request.max_tokens, budget.max_sampled_tokens, budget.max_turn_tokens
        thought_limits = request.max_thought_tokens, budget.max_thought_tokens
        return budget.model_copy(
            update={
                "max_sampled_tokens": min(
                    (limit for limit in token_limits if limit is not None), default=None
                ),
                "max_thought_tokens": min(
                    (limit for limit in thought_limits if limit is not None), default=None
                ),
            }
        )

    def _take_back(self, branch: Branch, scope: anyio.CancelScope | None) -> None:
        """Remove the turns of a request that failed, so that another one can follow.

        Args:
            scope: that of the request; the branch may have another one by now, or none.
        """
        if scope is None or branch.scope is not scope:
            return
        self.num_cut += 1
        branch.take_back()
        record = branch.record
        if record.turns:
            self._emit(ClientAwaited(record.id))
        elif branch in self.branches:
            self.branches.remove(branch)
            self._num_taken_back[record.id] += 1
            self._engine.forget(record.id, is_complete=False)
            self._emit(RolloutAbandoned(record.id))

    def _leave(
        self,
        branch: Branch,
        scope: anyio.CancelScope | None,
        reason: str = _LEFT,
        *,
        keeps: bool = False,
    ) -> None:
        """Take back a request that has no end; keep what its client has read in a branch.

        Args:
            scope: as `_take_back`.
            reason: the event that ended the request.
            keeps: keep also what the client has not read.
        """
        if scope is None or branch.scope is not scope:
            return
        record, kept = branch.record, branch.num_kept
        turns = [copy_turn(turn) for turn in record.turns[kept:] if turn.output_ids]
        question, opening = branch.pending_question, branch.opening
        if not (turns and (branch.is_read or keeps)):
            if turns and not kept and reason == _LEFT:
                unread = replace(record, turns=turns)
                self._unread = Branch(unread, reason, question=question, opening=opening)
            self._take_back(branch, scope)
            return
        if kept:
            ids = SampledTurn(branch, kept, {}).ids + record.turns[kept - 1].observation_ids
            remainder = replace(record, id=self._free_name(), prompt_ids=ids, turns=turns)
            branch.num_left += 1
            self._take_back(branch, scope)
            self._end(remainder)
            self._begin(Branch(remainder, reason, record.id, question, f"{opening} left"))
        else:  # the branch has nothing else
            branch.commit()
            branch.opening = f"{opening} left"
            record.turns[:] = turns
            self._end(record)
            self._emit(ClientAwaited(record.id))

    def _begin(self, branch: Branch) -> None:
        """Add a branch of turns that have ended."""
        self.branches.append(branch)
        record = branch.record
        self._emit(RolloutStarted(record, self._group))
        for index, turn in enumerate(record.turns):
            self._emit(TurnStarted(record.id, index))
            self._emit(TurnFinished(record.id, index, turn))
        self._emit(ClientAwaited(record.id))

    def _end(self, record: Trajectory) -> None:
        """Describe the end of a message that has been cut off."""
        turns = record.turns
        turns[-1].end, turns[-1].observation_ids = TurnEnd.STOP, []
        record.stop_reason = StopReason.STOP_SEQUENCE
        record.elapsed_s = time.time() - record.created_unix_s
        for turn in turns:
            turn.text = turn.text or self._chat.decode(turn.output_ids)
        record.answer = answer_in(
            record.text,
            reasoning=self._chat.begins_in_thought(record, len(turns) - 1),
            stop=(),
            split=self._chat.family.channels,
        )

    def stop_requests(self) -> bool:
        """End the requests in flight, and return whether there were any.

        What the model has sampled for them is kept, also if no client has read it. If there is
        nothing else, so is the newest message that a client did not wait for: no program can have
        its time used up by the model and leave nothing.
        """
        were_any = not self.is_idle
        for branch in [branch for branch in self.branches if branch.is_busy]:
            scope, reason = branch.scope, "its client was stopped before the end of the message"
            self._leave(branch, scope, reason, keeps=True)
            if scope is not None:
                scope.cancel()
        if self._unread is not None and not self.trajectories:
            self._end(self._unread.record)
            self._begin(self._unread)
        self._unread = None
        return were_any

    def discard(self, message: Trajectory) -> None:
        """Take back the newest message of a branch, of which its client was sent nothing."""
        if self._is_closed:  # its trajectories are in use
            return
        for branch in self.branches:
            turns = branch.record.turns
            if turns and message.turns and turns[-1] is message.turns[-1] and not branch.is_busy:
                self._tree.remove(branch, len(turns))
                branch.scope = scope = anyio.CancelScope()
                branch.num_kept = len(turns) - len(message.turns)
                self._take_back(branch, scope)
                return

    def close(self, stop_reason: StopReason | None = None) -> list[Trajectory]:
        """Close the session and return its trajectories; requests in flight are cancelled.

        Args:
            stop_reason: how its branches ended; None: as their last turns did.
        """
        if not self._is_closed:
            self._is_closed = True
            for branch in list(self.branches):
                if (scope := branch.scope) is not None:
                    self._leave(branch, scope)
                    scope.cancel()
            for branch in self.branches:
                record = branch.record
                self._engine.forget(record.id, is_complete=stop_reason is None)
                if stop_reason is not None:
                    record.stop_reason = stop_reason
                self._emit(RolloutFinished(record.id, record))
        return self.trajectories

    def status(self) -> dict[str, object]:
        """Return plain data about the session, without its key."""
        return {
            "name": self.name,
            "num_branches": len(self.branches),
            "num_turns": sum(len(branch.record.turns) for branch in self.branches),
            "num_sampled_tokens": sum(branch.record.num_sampled_tokens for branch in self.branches),
            "num_cut": self.num_cut,
            "branches": [
                {"id": branch.record.id, "parent": branch.parent, "reason": branch.reason}
                for branch in self.branches
            ],
        }


@dataclass(frozen=True, slots=True)
class _Prompt:
    """The prompt of a request.

    Attributes:
        turn: the turn from whose ids it goes on, if there is one.
        following: the ids after that turn.
        reason: the cause why no turn's ids could be reused, although there was one.
    """

    ids: list[int]
    turn: SampledTurn | None
    following: list[int]
    reason: str = ""


def _key_of(request: TurnRequest) -> bytes:
    """Return a key that a request shares with those that ask the same again."""
    context = context_key(Tools(request.tools).schemas, request.template_arguments)
    return request_key(context, request.messages)
