"""Convert rollouts to OpenAI's chat completions, streamed or whole.

    events of a rollout ──ChunkWriter──> chunks ──> a stream, or joined: a completion

The answer is `content`; reasoning is `reasoning_content`, as in SGLang and vLLM. Calls that the
agent ran itself are in `executed_tools`, as in Groq's API, so that no client runs them again; since
few clients display these, they are told in the reasoning as well. Calls that the caller must run
are in `tool_calls`, with the finish reason `tool_calls`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentloop.agent.channels import Channel, Speech
from agentloop.agent.chat_format import ChatFormat
from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnSampled,
    events_of,
)
from agentloop.serving.schemas import (
    AnswerMessage,
    AskedCall,
    AskedCallPiece,
    ChatChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChunkChoice,
    Delta,
    ExecutedCall,
    FinishReason,
    Frame,
    LikelyToken,
    TokenLogprob,
    Usage,
    UsageChunk,
    usage_of,
)
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)

_MAX_DESCRIBED_CHARS = 4000

TokenText = Callable[[int], str]
"""Returns the text of one token."""

_FINISH: dict[StopReason, FinishReason] = {
    StopReason.ANSWERED: "stop",
    StopReason.STOP_SEQUENCE: "stop",
    StopReason.CALLER_TOOLS: "tool_calls",
    StopReason.TURN_BUDGET: "length",
    StopReason.TOKEN_BUDGET: "length",
    StopReason.TIME_BUDGET: "length",
}


def chunk_frame(completion_id: str, model: str) -> Frame:
    """Return the fields that all chunks of a completion share."""
    return {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }


class ChunkWriter:
    """Converts the events of one rollout to the chunks of one choice.

    The chunks depend only on the rollout, not on the timing of its events or how its text was
    split: a call that the agent runs is reported once its turn is sampled and all earlier calls
    have ended.
    """

    def __init__(
        self,
        frame: Frame,
        index: int,
        *,
        chat: ChatFormat,
        stop: Sequence[str] = (),
        has_caller_tools: bool = False,
        has_tools: bool = True,
        shows_malformed: bool = False,
        tells_executed: bool = False,
        token_text: TokenText | None = None,
    ) -> None:
        """
        Args:
            chat: The format in which the model writes.
            stop: Stop sequences; the content ends before the first match.
            has_caller_tools: Whether the caller runs the tool calls.
            has_tools: Whether the model was given tools.
            shows_malformed: Whether a call that cannot be decoded is content, since nobody
                explains it to the model.
            tells_executed: Whether the calls that the agent ran are told in the reasoning, too.
            token_text: Given if log-probabilities were requested.
        """
        self.frame = frame
        self._index = index
        self._chat = chat
        self._speech = Speech(
            reasoning=False,
            stop=stop,
            split=lambda reasoning: chat.family.channels(reasoning, has_tools),
        )
        self._has_caller_tools = has_caller_tools
        self._shows_malformed = shows_malformed
        self._tells_executed = tells_executed
        self._num_caller_calls = 0
        self._num_executed = 0
        self._token_text = token_text
        self._logprobs: list[TokenLogprob] = []  # not sent yet
        self._record: Trajectory | None = None
        self._whole: list[ChatCompletionChunk] | None = None
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._calls: list[ToolCall] = []  # run by the agent, not sent yet
        self._results: dict[str, ToolResult] = {}
        self._malformed: list[str] = []
        self._has_text = False
        self._is_sampled = False
        self._num_tokens = 0

    def feed(self, event: Event) -> Iterator[ChatCompletionChunk]:
        match event:
            case RolloutStarted(record=record):
                self._record = record
                yield self._chunk({"role": "assistant", "content": ""})
            case TokensSampled(turn=turn, ids=ids, text=text):
                if not self._has_text and self._record is not None:
                    self._has_text = True
                    thinks = self._chat.begins_in_thought(self._record, turn)
                    self._speech.begin_turn(reasoning=thinks)
                self._record_logprobs(turn, ids)
                yield from map(self._text_chunk, self._speech.feed(text))
            case CallStarted(call=call) if self._has_caller_tools and call.error is None:
                piece: AskedCallPiece = {"index": self._num_caller_calls, **_tool_call(call)}
                self._num_caller_calls += 1
                yield self._chunk({"tool_calls": [piece]})
            case CallStarted(call=call) if self._shows_malformed:
                self._malformed.append(call.raw)
            case CallStarted(call=call):
                self._calls.append(call)
            case TurnSampled(turn=turn):
                # Calls of a turn that was cut off do not count, even if they have run.
                self._is_sampled = self._turn(turn).end is TurnEnd.STOP
                yield from self._executed_calls()
            case CallFinished(result=result):
                self._results[result.call_id] = result
                yield from self._executed_calls()
            case TurnFinished():
                yield from map(self._text_chunk, self._speech.end_turn())
                for raw in self._malformed:
                    yield self._chunk({"content": raw})
                self._begin_turn()

    def whole(self, trajectory: Trajectory) -> Sequence[ChatCompletionChunk]:
        """Return the chunks of a finished rollout, without its usage.

        A writer writes one rollout: asked again, it returns the same chunks.
        """
        if self._whole is None:
            chunks = [chunk for _, event in events_of(trajectory) for chunk in self.feed(event)]
            self._whole = [*chunks, self.last(trajectory)]
        return self._whole

    def last(self, trajectory: Trajectory) -> ChatCompletionChunk:
        chunk = self._chunk({})
        for choice in chunk["choices"]:
            choice["finish_reason"] = _finish_reason(trajectory)
            choice["stop_reason"] = trajectory.stop_reason
            if self._speech.matched is not None:
                choice["matched_stop"] = self._speech.matched
        return chunk

    def usage(self, trajectories: Sequence[Trajectory]) -> UsageChunk:
        return {**self.frame, "choices": [], "usage": _usage(trajectories)}

    def _turn(self, index: int) -> Turn:
        assert self._record is not None
        return self._record.turns[index]

    def _executed_calls(self) -> Iterator[ChatCompletionChunk]:
        while self._is_sampled and self._calls and self._calls[0].id in self._results:
            call = self._calls.pop(0)
            result = self._results[call.id]
            if self._tells_executed:
                pieces = self._speech.interject(Channel.REASONING, _describe_call(call, result))
                yield from map(self._text_chunk, pieces)
            executed = _executed_call(call, result)
            yield self._chunk({"executed_tools": [{"index": self._num_executed, **executed}]})
            self._num_executed += 1

    def _record_logprobs(self, index: int, ids: Sequence[int]) -> None:
        if self._token_text is None:
            return
        turn, start = self._turn(index), self._num_tokens
        self._num_tokens += len(ids)
        for at, token in enumerate(ids, start):
            top = turn.top_logprobs[at] if turn.top_logprobs else ()
            self._logprobs.append(
                {
                    **_token(self._token_text(token), turn.logprobs[at]),
                    "top_logprobs": [
                        _token(self._token_text(alternative), lp) for lp, alternative in top
                    ],
                }
            )

    def _text_chunk(self, piece: tuple[Channel, str]) -> ChatCompletionChunk:
        channel, text = piece
        if channel is Channel.CONTENT:
            return self._chunk({"content": text})
        return self._chunk({"reasoning_content": text})

    def _chunk(self, delta: Delta) -> ChatCompletionChunk:
        choice: ChunkChoice = {"index": self._index, "delta": delta, "finish_reason": None}
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
            self._logprobs = []
        return {**self.frame, "choices": [choice]}


def is_first(chunk: ChatCompletionChunk) -> bool:
    """Return whether this is a choice's first chunk, which comes before anything is sampled."""
    return any("role" in choice["delta"] for choice in chunk["choices"])


def completion(choices: Sequence[tuple[ChunkWriter, Trajectory]]) -> ChatCompletion:
    """Return the response to a request without streaming: the chunks of a stream, joined."""
    frame = choices[0][0].frame
    return {
        "id": frame["id"],
        "object": "chat.completion",
        "created": frame["created"],
        "model": frame["model"],
        "choices": [_choice(*choice) for choice in choices],
        "usage": _usage([trajectory for _, trajectory in choices]),
    }


def _choice(writer: ChunkWriter, trajectory: Trajectory) -> ChatChoice:
    pieces = [piece for chunk in writer.whole(trajectory) for piece in chunk["choices"]]
    deltas = [piece["delta"] for piece in pieces]
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    executed = [
        _without_index(call) for delta in deltas for call in delta.get("executed_tools", ())
    ]
    to_run = [_without_index(call) for delta in deltas for call in delta.get("tool_calls", ())]
    logprob_pieces = [piece["logprobs"] for piece in pieces if "logprobs" in piece]
    message: AnswerMessage = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if executed:
        message["executed_tools"] = executed
    if to_run:
        message["tool_calls"] = to_run
        message["content"] = content or None
    choice: ChatChoice = {
        "index": pieces[-1]["index"],
        "message": message,
        "finish_reason": _finish_reason(trajectory),
        "stop_reason": trajectory.stop_reason,
    }
    if "matched_stop" in pieces[-1]:
        choice["matched_stop"] = pieces[-1]["matched_stop"]
    if logprob_pieces:
        tokens = [token for logprobs in logprob_pieces for token in logprobs["content"]]
        choice["logprobs"] = {"content": tokens, "refusal": None}
    return choice


def _without_index(piece: Any) -> Any:
    """Return a call without its index in the stream."""
    return {name: value for name, value in piece.items() if name != "index"}


def _finish_reason(trajectory: Trajectory) -> FinishReason:
    return _FINISH.get(trajectory.stop_reason, "error")


def _token(text: str, logprob: float) -> LikelyToken:
    has_bytes = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if has_bytes else None}


def _tool_call(call: ToolCall) -> AskedCall:
    # Not orjson, which rejects integers of more than 64 bits.
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _executed_call(call: ToolCall, result: ToolResult) -> ExecutedCall:
    return {
        **_tool_call(call),
        "status": result.status,
        "output": result.content,
        "duration_s": round(result.ended_s - result.dispatched_s, 6),
    }


def _describe_call(call: ToolCall, result: ToolResult) -> str:
    """Describe a call and its result, for people to read."""
    values = [
        value if isinstance(value, str) else json.dumps(value) for value in call.arguments.values()
    ]
    lines = [f"\u25b6 {call.name or 'a call'}", *values, f"\u25c0 {result.status}", result.content]
    text = "\n".join(filter(None, lines))
    return text if len(text) <= _MAX_DESCRIBED_CHARS else f"{text[:_MAX_DESCRIBED_CHARS]}..."


def _usage(trajectories: Sequence[Trajectory]) -> Usage:
    prompt = cached = 0
    if trajectories:
        first = trajectories[0]
        prompt = len(first.prompt_ids)
        # After a turn moved to another server, its sampled tokens were part of the prompt there.
        cached = min(prompt, first.turns[0].cached_tokens if first.turns else 0)
    sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    return usage_of(prompt, cached, sampled)
