"""Read one turn as it streams: record its tokens, dispatch its calls, end it early."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import anyio

from agentloop.agent.channels import Channel, Speech, Splitter
from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.constraints import OutputRules
from agentloop.agent.formats import CallStream
from agentloop.agent.text_stream import TextStream
from agentloop.events import Emit, TokensSampled, ignore
from agentloop.inference.sglang.frames import Chunk
from agentloop.trajectory import ToolCall, Trajectory, TurnEnd, VersionSpan


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
        rules: Constraints on the text of the turns.
        stop_ids: Tokens that end a turn, besides those of the chat format.
        parameters: Further sampling parameters of each turn, as SGLang takes them. A server counts
            only what it samples for one turn, so penalties are for rollouts of a single turn, and a
            turn with penalties does not move to another server (`Generation.is_movable`).
        single_message: End the rollout with its first message; the caller runs its calls.
    """

    stop: tuple[str, ...] = ()
    single_call: bool = False
    ignore_end: bool = False
    num_top_logprobs: int = 0
    rules: OutputRules = field(default_factory=OutputRules)
    stop_ids: tuple[int, ...] = ()
    parameters: Mapping[str, object] = field(default_factory=dict)
    single_message: bool = False


class TurnReader:
    """Records the chunks of one turn, emits events, dispatches calls and ends the turn early.

    Attributes:
        cut: Cancel scope to enter around the generation; cancelled to end the turn early.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        index: int,
        chat: ChatFormat,
        *,
        calls: CallStream,
        speech: Speech,
        options: TurnOptions,
        max_thought_tokens: int | None,
        with_text: bool,
        emit: Emit,
        dispatch: Callable[[ToolCall], None],
        elapsed_s: Callable[[], float],
    ) -> None:
        """
        Args:
            index: The turn's number; it is in the trajectory already.
            calls: Finds the calls of the turn.
            speech: Finds stop sequences.
            max_thought_tokens: Number of tokens of a thought after which the turn ends.
            with_text: Whether to decode tokens as they arrive.
            dispatch: Starts a call.
            elapsed_s: Returns the seconds since the start of the trajectory.
        """
        self.cut = anyio.CancelScope()
        self._id = trajectory.id
        self._index = index
        self._turn = trajectory.turns[index]
        self._chat = chat
        self._calls = calls
        self._speech = speech
        self._options = options
        self._emit = emit
        self._dispatch = dispatch
        self._elapsed_s = elapsed_s
        self._thought: _ThoughtLimit | None = None
        if max_thought_tokens is not None and not options.ignore_end:
            channels = chat.family.channels(chat.begins_in_thought(trajectory, index))
            self._thought = _ThoughtLimit(channels, max_thought_tokens)
        self._may_cut = bool(options.single_call or options.stop or self._thought)
        has_text = with_text or options.stop or self._thought is not None
        self._text = TextStream(chat) if has_text else None
        self._version: str | None = None  # the newest token's

    def take(self, chunk: Chunk) -> None:
        """Take the next chunk. One that arrives after the cut is ignored."""
        if not self._may_cut:
            self._take(chunk)
            return
        # Go token by token, so that the cut does not depend on how many tokens a chunk has.
        for token in _tokens(chunk):
            if self.cut.cancel_called:
                return
            piece, has_call = self._take(token)
            if self._options.stop:
                list(self._speech.feed(piece))
            if self._speech.stopped or (self._options.single_call and has_call):
                self._turn.end = TurnEnd.STOP
                if token.end is None:
                    self.cut.cancel()
            elif self._thinks_too_long(piece, token):
                self._turn.end = TurnEnd.THOUGHT
                self.cut.cancel()

    def _take(self, chunk: Chunk) -> tuple[str, bool]:
        """Record a chunk and dispatch its calls; return its text and whether it closed a call."""
        piece = self._record(chunk)
        calls = [] if self._options.ignore_end else self._calls.feed(chunk.ids)
        for call in calls:
            self._dispatch(call)
        return piece, bool(calls)

    def _thinks_too_long(self, piece: str, token: Chunk) -> bool:
        if self._thought is None or not self._thought.is_reached(piece, token):
            return False
        # A call in a thought runs like any other, and the turn then ends with its response.
        return token.end is None and not self._turn.calls

    def flush(self) -> None:
        """Record the text that was held back; call it after the last chunk, even after an error."""
        turn = self._turn
        if turn.end is TurnEnd.ABORT or self.cut.cancel_called:
            turn.versions = turn.versions_until(len(turn.output_ids))
        if self._text is None:
            turn.text = self._chat.decode(turn.output_ids)
        elif held := self._text.flush():
            turn.text += held
            self._emit(TokensSampled(self._id, self._index, [], held))

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
        turn = self._turn
        if turn.first_token_s is None and chunk.ids:
            turn.first_token_s = self._elapsed_s()
        start = len(turn.output_ids)
        turn.output_ids += chunk.ids
        turn.logprobs += chunk.logprobs
        turn.top_logprobs += chunk.top_logprobs
        if turn.kept is not None:
            turn.kept.extend(chunk.kept)
        turn.experts = chunk.experts  # the last chunk has them
        turn.cached_tokens = chunk.cached_tokens or turn.cached_tokens
        if chunk.version != self._version and chunk.ids:
            self._version = chunk.version
            turn.versions = [*turn.versions_until(start), VersionSpan(chunk.version, start, start)]
        if chunk.end is not None:
            turn.end = chunk.end
            server_spans = chunk.versions  # the server's own record, which replaces what was seen
            num_seen = server_spans[0].start if server_spans else len(turn.output_ids)
            turn.versions = [*turn.versions_until(num_seen), *server_spans]
        piece = ""
        if self._text is not None:
            piece = self._text.feed(chunk.ids)
            turn.text += piece
        if chunk.ids and self._emit is not ignore:
            self._emit(TokensSampled(self._id, self._index, chunk.ids, piece))
        return piece


class _ThoughtLimit:
    """Counts the tokens of a thought."""

    def __init__(self, channels: Splitter, max_tokens: int) -> None:
        self._channels = channels
        self._max_tokens = max_tokens
        self._count = 0

    def is_reached(self, piece: str, token: Chunk) -> bool:
        """Take a token with its text; return whether a thought has reached the limit with it."""
        before = self._channels.channel
        for _ in self._channels.feed(piece):
            pass
        is_thought = before is self._channels.channel is Channel.REASONING  # tags do not count
        self._count = self._count + len(token.ids) if is_thought else 0
        return self._count >= self._max_tokens


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
            kept=chunk.kept[i : i + 1],
        )
    if last >= 1:
        chunk = replace(
            chunk,
            ids=chunk.ids[last:],
            logprobs=chunk.logprobs[last:],
            top_logprobs=chunk.top_logprobs[last:],
            kept=chunk.kept[last:],
        )
    yield chunk
