"""OpenAI's chat completions, as the agent speaks them: requests in, completions and chunks out.

    body ──ChatRequest──> rollouts ──events──> ChunkWriter ──chunks──> a stream, or one answer

Terms: the answer is `content`, thoughts are `reasoning_content` (as SGLang and vLLM have it). Calls
that the agent ran itself are in `executed_tools` (as Groq has it), so that no client runs them
again; calls that the caller must run are `tool_calls`, with the finish reason of that name.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import pydantic
import pydantic_core
from pydantic_core import ErrorDetails

from agentloop.agent.channels import Channel, Speech
from agentloop.agent.rollout import TurnOptions
from agentloop.api.bodies import (
    AnswerMessage,
    AskedCall,
    AskedCallPiece,
    Choice,
    Chunk,
    ChunkChoice,
    Completion,
    Delta,
    ErrorBody,
    ExecutedCall,
    FinishReason,
    Frame,
    FunctionTool,
    InputMessage,
    LikelyToken,
    Model,
    ModelList,
    TokenLogprob,
    Usage,
    UsageChunk,
)
from agentloop.errors import RequestError, Unsupported
from agentloop.events import (
    CallFinished,
    CallStarted,
    Event,
    RolloutStarted,
    TokensSampled,
    TurnFinished,
    TurnSampled,
)
from agentloop.trajectory import (
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
    Turn,
    TurnEnd,
)

__all__ = [
    "UNSUPPORTED",
    "ChatRequest",
    "ChunkWriter",
    "chunk_frame",
    "completion",
    "error_body",
    "events_of",
    "model_list",
    "parse",
]

M = TypeVar("M", bound=pydantic.BaseModel)

TokenText = Callable[[int], str]
"""The text of one token."""

_FINISH: dict[StopReason, FinishReason] = {
    StopReason.ANSWERED: "stop",
    StopReason.STOP_SEQUENCE: "stop",
    StopReason.CALLER_TOOLS: "tool_calls",
    StopReason.TURN_BUDGET: "length",
    StopReason.TOKEN_BUDGET: "length",
    StopReason.TIME_BUDGET: "length",
}


class _Only(NamedTuple):
    """The values of a parameter that are accepted besides null, and what to do instead."""

    values: tuple[Any, ...] = ()
    instead: str = ""


_PENALTY = "leave it out: the servers would count the tokens of one turn only"
_FORM = "leave it out, and ask for the form in a message: the form cannot be enforced yet"

# What would change the answer, and is refused. A value that changes nothing is accepted.
UNSUPPORTED: dict[str, _Only] = {
    # OpenAI
    "audio": _Only(),
    "frequency_penalty": _Only((0,), _PENALTY),
    "function_call": _Only(("none", "auto"), "use tools and tool_choice"),
    "functions": _Only(([],), "use tools"),
    "logit_bias": _Only(({},)),
    "modalities": _Only((["text"],)),
    "presence_penalty": _Only((0,), _PENALTY),
    "reasoning_effort": _Only(("medium",)),
    "response_format": _Only(({"type": "text"},), _FORM),
    "tool_choice": _Only(("auto", "none"), 'use "auto": a call cannot be forced yet'),
    "verbosity": _Only(("medium",)),
    "web_search_options": _Only(),
    # SGLang, vLLM and others
    "add_generation_prompt": _Only((True,)),
    "allowed_token_ids": _Only(([],)),
    "bad_words": _Only(([],)),
    "best_of": _Only((1,), "use n"),
    "chat_template": _Only(),
    "chat_template_kwargs": _Only(({},)),
    "continue_final_message": _Only((False,)),
    "custom_logit_processor": _Only(),
    "documents": _Only(([],)),
    "ebnf": _Only((), _FORM),
    "echo": _Only((False,)),
    "enable_thinking": _Only(),
    "guided_choice": _Only((), _FORM),
    "guided_grammar": _Only((), _FORM),
    "guided_json": _Only((), _FORM),
    "guided_regex": _Only((), _FORM),
    "include_reasoning": _Only((True,)),
    "include_stop_str_in_output": _Only((False,)),
    "json_schema": _Only((), _FORM),
    "length_penalty": _Only((1,)),
    "logits_processors": _Only(([],)),
    "lora_path": _Only(),
    "min_tokens": _Only((0,)),
    "mm_processor_kwargs": _Only(({},)),
    "no_stop_trim": _Only((False,)),
    "prompt_logprobs": _Only(),
    "reasoning": _Only(),
    "regex": _Only((), _FORM),
    "repetition_penalty": _Only((1,), _PENALTY),
    "return_hidden_states": _Only((False,)),
    "return_tokens_as_token_ids": _Only((False,)),
    "separate_reasoning": _Only((True,)),
    "session_params": _Only(),
    "skip_special_tokens": _Only((True,)),
    "stop_regex": _Only(([],), "use stop"),
    "stop_token_ids": _Only(([],), "use stop"),
    "structural_tag": _Only((), _FORM),
    "structured_outputs": _Only((), _FORM),
    "thinking": _Only(),
    "thinking_token_budget": _Only(),
    "truncate_prompt_tokens": _Only(),
    "use_beam_search": _Only((False,)),
}


def _with_unsupported(schema: dict[str, Any]) -> None:
    for name, only in UNSUPPORTED.items():
        schema["properties"][name] = {"enum": [*only.values, None]}
    wanted = {"top_logprobs": {"type": "integer", "minimum": 1}}
    schema["if"] = {"properties": wanted, "required": ["top_logprobs"]}
    schema["then"] = {"properties": {"logprobs": {"const": True}}, "required": ["logprobs"]}


class StreamOptions(pydantic.BaseModel):
    include_usage: bool | None = None


_StopSequence = Annotated[str, pydantic.Field(min_length=1, max_length=256)]


class ChatRequest(pydantic.BaseModel):
    """What of OpenAI's request is used. What would change the answer and is not, is refused; what
    cannot change it is ignored."""

    model_config = pydantic.ConfigDict(json_schema_extra=_with_unsupported)

    model: str | None = None
    messages: list[InputMessage] = pydantic.Field(min_length=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = pydantic.Field(None, ge=1, le=128)
    temperature: float | None = pydantic.Field(None, ge=0, le=2)
    top_p: float | None = pydantic.Field(None, gt=0, le=1)
    top_k: int | None = pydantic.Field(None, ge=-1, le=1 << 30)
    min_p: float | None = pydantic.Field(None, ge=0, le=1)
    seed: int | None = pydantic.Field(None, ge=-(1 << 63), lt=1 << 63)
    max_tokens: int | None = pydantic.Field(None, ge=1)
    max_completion_tokens: int | None = pydantic.Field(None, ge=1)
    stop: _StopSequence | Annotated[list[_StopSequence], pydantic.Field(max_length=4)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = pydantic.Field(None, ge=0, le=20)
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    parallel_tool_calls: bool | None = None
    ignore_eos: bool | None = None

    @classmethod
    def parse(cls, body: bytes) -> ChatRequest:
        """Raises RequestError, which names the field."""
        value = _loaded(body)
        for name, only in UNSUPPORTED.items():
            _check_supported(name, value.get(name), only)
        asked = _validated(cls, value)
        if asked.top_logprobs and not asked.logprobs:
            raise RequestError("top_logprobs: they need logprobs: true")
        return asked

    def sampling_overrides(self) -> dict[str, Any]:
        names = ("temperature", "top_p", "top_k", "min_p")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        # SGLang's is not negative.
        return given if self.seed is None else {**given, "seed": self.seed % (1 << 63)}

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def stop_sequences(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def has_caller_tools(self) -> bool:
        """Whether the model's calls are the caller's to run, and not the agent's."""
        return bool(self.tools) and self.tool_choice != "none"

    def turn_options(self) -> TurnOptions:
        return TurnOptions(
            stop=self.stop_sequences,
            single_call=self.parallel_tool_calls is False,
            ignore_end=bool(self.ignore_eos),
            num_top_logprobs=self.top_logprobs or 0,
        )


def _check_supported(name: str, value: Any, only: _Only) -> None:
    if value is None or any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in only.values
    ):
        return
    instead = only.instead
    if not instead:
        known = " or ".join(json.dumps(one) for one in only.values)
        instead = f"leave it out{f', or use {known}' if known else ''}"
    raise Unsupported(f"{name}: {json.dumps(value):.60} is not supported by this server; {instead}")


def parse(model: type[M], body: bytes) -> M:
    """Read a request's body: each field is of its own type, a number no text. 3.0 is an integer,
    as it is in JSON Schema.

    Raises:
        RequestError: names the field.
    """
    return _validated(model, _loaded(body))


def _loaded(body: bytes) -> dict[str, Any]:
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)  # integers of any size
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError("the body must be a JSON object")
    return value


def _validated(model: type[M], value: dict[str, Any]) -> M:
    try:
        try:
            return model.model_validate(value, strict=True)
        except pydantic.ValidationError as error:
            _make_whole(value, error)
        return model.model_validate(value, strict=True)
    except pydantic.ValidationError as error:
        raise RequestError(_told(error, value)) from error


def _make_whole(value: Any, error: pydantic.ValidationError) -> None:
    """Turn floats without a fraction to integers, where integers were expected."""
    for problem in error.errors(include_url=False):
        given = problem["input"]
        if problem["type"] == "int_type" and isinstance(given, float) and given.is_integer():
            *above, last = _path(problem, value)
            reduce(getitem, above, value)[last] = int(given)


def _told(error: pydantic.ValidationError, value: Any) -> str:
    """The problem that is told most exactly: of a union's branches, the one that was meant."""
    problems = [(_path(problem, value), problem) for problem in error.errors(include_url=False)]
    path, problem = max(problems, key=lambda one: len(one[0]))
    field = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)[1:]
    return f"{field}: {problem['msg']}"


def _path(problem: ErrorDetails, value: Any) -> list[int | str]:
    """Where in the body it is: without the names that pydantic gives to a union's branches."""
    path: list[int | str] = []
    for part in problem["loc"]:
        is_missing = problem["type"] == "missing" and part == problem["loc"][-1]
        if isinstance(value, dict) and (part in value or is_missing):
            path.append(part)
            value = value.get(part)
        elif isinstance(value, list) and isinstance(part, int):
            path.append(part)
            value = value[part]
    return path


def chunk_frame(completion_id: str, model: str) -> Frame:
    """What all chunks of a completion have in common."""
    return {
        "id": completion_id,
        "object": "chat.completion.chunk",
        "created": int(time.time()),
        "model": model,
    }


class ChunkWriter:
    """The events of one rollout in, the chunks of one choice out.

    What the chunks say depends on the rollout alone, and not on when its events came or how its
    text was cut: of an agent's own calls, each is told once its turn is sampled and those before it
    have ended.
    """

    def __init__(
        self,
        frame: Frame,
        index: int,
        *,
        reasoning_first: bool,
        stop: Sequence[str] = (),
        has_caller_tools: bool = False,
        token_text: TokenText | None = None,
    ) -> None:
        """
        Args:
            reasoning_first: Whether the generation prompt opens a thought.
            stop: The content ends before the first of these.
            has_caller_tools: Whether calls are the caller's to run.
            token_text: Tells log-probabilities, where they were asked for.
        """
        self.frame = frame
        self._index = index
        self._speech = Speech(reasoning=reasoning_first, stop=stop)
        self._has_caller_tools = has_caller_tools
        self._num_caller_calls = 0
        self._num_executed = 0
        self._token_text = token_text
        self._logprobs: list[TokenLogprob] = []  # not yet told
        self._record: Trajectory | None = None
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._calls: list[ToolCall] = []  # the agent's own, not yet told
        self._results: dict[str, ToolResult] = {}
        self._is_sampled = False
        self._num_tokens = 0

    def feed(self, event: Event) -> Iterator[Chunk]:
        match event:
            case RolloutStarted(record=record):
                self._record = record
                yield self._chunk({"role": "assistant", "content": ""})
            case TokensSampled(turn=turn, ids=ids, text=text):
                self._note_logprobs(turn, ids)
                yield from map(self._said, self._speech.feed(text))
            case CallStarted(call=call) if self._has_caller_tools and call.error is None:
                piece: AskedCallPiece = {"index": self._num_caller_calls, **_tool_call(call)}
                self._num_caller_calls += 1
                yield self._chunk({"tool_calls": [piece]})
            case CallStarted(call=call):
                self._calls.append(call)
            case TurnSampled(turn=turn):
                # Calls of a turn that was cut off do not count, whether they have run or not.
                self._is_sampled = self._turn(turn).end is TurnEnd.STOP
                yield from self._executed_calls()
            case CallFinished(result=result):
                self._results[result.call_id] = result
                yield from self._executed_calls()
            case TurnFinished():
                yield from map(self._said, self._speech.end_turn())
                self._begin_turn()

    def last(self, trajectory: Trajectory) -> Chunk:
        chunk = self._chunk({})
        for choice in chunk["choices"]:
            choice["finish_reason"] = _finish_reason(trajectory)
            choice["stop_reason"] = trajectory.stop_reason
        return chunk

    def usage(self, trajectories: Sequence[Trajectory]) -> UsageChunk:
        return {**self.frame, "choices": [], "usage": _usage(trajectories)}

    def _turn(self, index: int) -> Turn:
        assert self._record is not None
        return self._record.turns[index]

    def _executed_calls(self) -> Iterator[Chunk]:
        while self._is_sampled and self._calls and self._calls[0].id in self._results:
            call = self._calls.pop(0)
            executed = _executed(call, self._results[call.id])
            yield self._chunk({"executed_tools": [{"index": self._num_executed, **executed}]})
            self._num_executed += 1

    def _note_logprobs(self, index: int, ids: Sequence[int]) -> None:
        if self._token_text is None:
            return
        turn, start = self._turn(index), self._num_tokens
        self._num_tokens += len(ids)
        for at, token in enumerate(ids, start):
            top = turn.top_logprobs[at] if turn.top_logprobs else ()
            self._logprobs.append(
                {
                    **_token(self._token_text(token), turn.logprobs[at]),
                    "top_logprobs": [_token(self._token_text(one), lp) for lp, one in top],
                }
            )

    def _said(self, piece: tuple[Channel, str]) -> Chunk:
        channel, text = piece
        if channel is Channel.CONTENT:
            return self._chunk({"content": text})
        return self._chunk({"reasoning_content": text})

    def _chunk(self, delta: Delta) -> Chunk:
        choice: ChunkChoice = {"index": self._index, "delta": delta, "finish_reason": None}
        if self._logprobs:
            choice["logprobs"] = {"content": self._logprobs, "refusal": None}
            self._logprobs = []
        return {**self.frame, "choices": [choice]}


def events_of(trajectory: Trajectory) -> Iterator[Event]:
    """The events of a rollout that has ended, as far as a `ChunkWriter` needs them."""
    key = trajectory.id
    yield RolloutStarted(trajectory)
    for index, turn in enumerate(trajectory):
        yield TokensSampled(key, index, turn.output_ids, turn.text)
        for call in turn.calls:
            yield CallStarted(key, index, call)
        yield TurnSampled(key, index)
        for result in turn.results:
            yield CallFinished(key, index, result)
        yield TurnFinished(key, index, turn)


def completion(choices: Sequence[tuple[ChunkWriter, Trajectory]]) -> Completion:
    """The answer to a request that does not stream: the chunks that a stream would have, joined."""
    frame = choices[0][0].frame
    return {
        "id": frame["id"],
        "object": "chat.completion",
        "created": frame["created"],
        "model": frame["model"],
        "choices": [_choice(*one) for one in choices],
        "usage": _usage([trajectory for _, trajectory in choices]),
    }


def _choice(writer: ChunkWriter, trajectory: Trajectory) -> Choice:
    chunks = [chunk for event in events_of(trajectory) for chunk in writer.feed(event)]
    pieces = [piece for chunk in [*chunks, writer.last(trajectory)] for piece in chunk["choices"]]
    deltas = [piece["delta"] for piece in pieces]
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    executed = [_plain(call) for delta in deltas for call in delta.get("executed_tools", ())]
    to_run = [_plain(call) for delta in deltas for call in delta.get("tool_calls", ())]
    told = [piece["logprobs"] for piece in pieces if "logprobs" in piece]
    message: AnswerMessage = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if executed:
        message["executed_tools"] = executed
    if to_run:
        message["tool_calls"] = to_run
        message["content"] = content or None
    choice: Choice = {
        "index": pieces[-1]["index"],
        "message": message,
        "finish_reason": _finish_reason(trajectory),
        "stop_reason": trajectory.stop_reason,
    }
    if told:
        tokens = [token for logprobs in told for token in logprobs["content"]]
        choice["logprobs"] = {"content": tokens, "refusal": None}
    return choice


def _plain(piece: Any) -> Any:
    """A call without its place in a stream."""
    return {name: value for name, value in piece.items() if name != "index"}


def _finish_reason(trajectory: Trajectory) -> FinishReason:
    return _FINISH.get(trajectory.stop_reason, "error")


def _token(text: str, logprob: float) -> LikelyToken:
    has_bytes = "\ufffd" not in text
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if has_bytes else None}


def _tool_call(call: ToolCall) -> AskedCall:
    # Not orjson, which refuses integers of more than 64 bits.
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": arguments},
    }


def _executed(call: ToolCall, result: ToolResult) -> ExecutedCall:
    return {
        **_tool_call(call),
        "status": result.status,
        "output": result.content,
        "duration_s": round(result.ended_s - result.dispatched_s, 6),
    }


def _usage(trajectories: Sequence[Trajectory]) -> Usage:
    prompt = cached = 0
    if trajectories:
        first = trajectories[0]
        prompt = len(first.prompt_ids)
        # Of a turn that went on elsewhere, what it had sampled was a part of the prompt there.
        cached = min(prompt, first.turns[0].cached_tokens if first.turns else 0)
    sampled = sum(trajectory.num_sampled_tokens for trajectory in trajectories)
    return {
        "prompt_tokens": prompt,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def model_list(model: str, created: int) -> ModelList:
    entry: Model = {"id": model, "object": "model", "created": created, "owned_by": "agentloop"}
    return {"object": "list", "data": [entry]}
