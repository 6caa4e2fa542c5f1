"""Agents for tests of sessions: an inference server that says anything, and unreliable clients.

SimulatedAgent ──FaultyLink──HTTP──> the service ──> RandomSGLang, which logs what it samples
"""

from __future__ import annotations

import copy
import json
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Literal

import aiohttp
import anyio
import anyio.abc
from aiohttp import web

from tests.support import END, FakeSGLang, Fault, call_text, chat_format, written

CHAT = chat_format()
MARK = re.compile(r"#(\d+)\.")
Message = dict[str, Any]
Protocol = Literal["chat/completions", "responses", "messages"]
PROTOCOLS: Sequence[Protocol] = ("chat/completions", "responses", "messages")
WORDS = ("hello", "37 times 48", "é\n ", "<tool_call>", "  x ", '{"a": 1}', "the result was", END)


# --- the inference server ------------------------------------------------------------------------


@dataclass
class Sampled:
    """A generation as the server knows it.

    Attributes:
        is_whole: whether all of it has been sent.
    """

    prompt: list[int]
    ids: list[int]
    logprobs: list[float]
    is_whole: bool = False


@dataclass
class RandomSGLang(FakeSGLang):
    """Says something else each time, with its number, and logs prompts, ids and log-probabilities.

    No two tokens have the same log-probability.
    """

    random: Random = field(default_factory=Random)
    log: list[Sampled] = field(default_factory=list)
    context_length: int = 100_000
    max_total_num_tokens: int = 100_000_000
    _num_tokens: int = 0

    def number_of(self, logprob: float) -> int:
        """Return the number of the generation that a token belongs to."""
        return self._numbers[logprob]

    def __post_init__(self) -> None:
        self._numbers: dict[float, int] = {}

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        fault: Fault | None,
    ) -> None:
        number = len(self.log)
        ids = self._message(number)[: body["sampling_params"]["max_new_tokens"]]
        logprobs = [-(self._num_tokens + at + 1) / 1024 for at in range(len(ids))]
        self._num_tokens += len(ids)
        self._numbers.update(dict.fromkeys(logprobs, number))
        self.log.append(sampled := Sampled(body["input_ids"], ids, logprobs))
        cuts = sorted({0, self.random.randrange(len(ids)), self.random.randrange(len(ids))})
        for start, stop in zip(cuts, [*cuts[1:], len(ids)], strict=True):
            end = ids[-1] == CHAT.token_id(END)
            finish = {"type": "stop" if end else "length"} if stop == len(ids) else None
            meta: dict[str, Any] = {
                "finish_reason": finish,
                "weight_version": self.version,
                "completion_tokens": stop,
                "output_token_logprobs": [[logprobs[i], ids[i], None] for i in range(start, stop)],
                "cached_tokens": 2,
            }
            if finish is not None:
                meta["weight_versions"] = [{"version": self.version, "start": 0, "end": stop}]
            frame = {"text": "", "output_ids": ids[start:stop], "meta_info": meta}
            await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")
            if self.random.random() < 0.25:  # a slow step, in which the client may leave
                await anyio.sleep(self.random.random() / 20)
        sampled.is_whole = True
        await response.write(b"data: [DONE]\n\n")

    def _message(self, number: int) -> list[int]:
        random, ids = self.random, list[int]()
        if random.random() < 0.3:
            ids += written(CHAT, "<think>") + CHAT.encode(" I think.\n") + written(CHAT, "</think>")
        says = random.random() < 0.8
        if says:
            ids += CHAT.encode(f"#{number}. {random.choice(WORDS)}{random.choice(WORDS)}")
        calls = ""
        for at in range(random.choice((0, 0, 1, 2)) if says else 1):
            call = call_text("note", {"b": at, "a": f"#{number}. {random.choice(WORDS[:3])}"})
            calls += call.replace(": ", random.choice((":", ": ", ":  ")))
        return ids + written(CHAT, calls + END)


# --- messages in each protocol, from and to chat completions --------------------------------------


def _tools(protocol: Protocol, names: Sequence[str]) -> list[dict[str, Any]]:
    schema: dict[str, Any] = {"type": "object", "properties": {}}
    match protocol:
        case "chat/completions":
            functions: list[Any] = [{"name": name, "parameters": schema} for name in names]
            return [{"type": "function", "function": function} for function in functions]
        case "responses":
            return [{"type": "function", "name": name, "parameters": schema} for name in names]
        case "messages":
            return [{"name": name, "input_schema": schema} for name in names]


def body_of(
    protocol: Protocol, messages: Sequence[Message], tools: Sequence[str], *, stream: bool
) -> dict[str, Any]:
    """Return a request's body."""
    body: dict[str, Any] = {"model": "any", "stream": stream, "tools": _tools(protocol, tools)}
    match protocol:
        case "chat/completions":
            return {**body, "messages": messages}
        case "responses":
            return {**body, "input": [item for message in messages for item in _items(message)]}
        case "messages":
            turns = [{"role": _side(message), "content": _blocks(message)} for message in messages]
            return {**body, "max_tokens": 4000, "messages": turns}


def _items(message: Message) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [
            {
                "type": "function_call_output",
                "call_id": message["tool_call_id"],
                "output": message["content"],
            }
        ]
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        items.append(
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": thought}],
            }
        )
    if message["content"] is not None:
        items.append({"role": message["role"], "content": message["content"]})
    for call in message.get("tool_calls", ()):
        items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    return items


def _side(message: Message) -> str:
    return "assistant" if message["role"] == "assistant" else "user"


def _blocks(message: Message) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        id = message["tool_call_id"]
        return [{"type": "tool_result", "tool_use_id": id, "content": message["content"]}]
    blocks: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        blocks.append({"type": "thinking", "thinking": thought, "signature": "x"})
    if message["content"] is not None:
        blocks.append({"type": "text", "text": message["content"]})
    for call in message.get("tool_calls", ()):
        inputs = json.loads(call["function"]["arguments"])
        name = call["function"]["name"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": inputs})
    return blocks


def message_of(protocol: Protocol, data: bytes, *, stream: bool) -> Message:
    """Return the message in an answer."""
    events = [
        json.loads(line[6:])
        for line in data.split(b"\n")
        if stream and line.startswith(b"data: ") and line != b"data: [DONE]"
    ]
    answer = {} if stream else json.loads(data)
    match protocol:
        case "chat/completions":
            return (
                _chat_message(events)
                if stream
                else _without_extras(answer["choices"][0]["message"])
            )
        case "responses":
            return _of_items((events[-1]["response"] if stream else answer)["output"])
        case "messages":
            return _of_blocks(_join_blocks(events) if stream else answer["content"])


def _without_extras(message: Message) -> Message:
    names = ("role", "content", "reasoning_content", "tool_calls")
    return {name: message[name] for name in names if name in message}


def _chat_message(events: Sequence[Any]) -> Message:
    assert events[-1]["choices"][0]["finish_reason"]
    deltas = [event["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    texts = {
        name: "".join(delta.get(name, "") for delta in deltas)
        for name in ("content", "reasoning_content")
    }
    message: Message = {"role": "assistant", "content": texts["content"] or None}
    if texts["reasoning_content"]:
        message["reasoning_content"] = texts["reasoning_content"]
    if calls:
        message["tool_calls"] = [
            {name: call[name] for name in call if name != "index"} for call in calls
        ]
    return message


def _assistant_message(text: str, thought: str, calls: Sequence[tuple[str, str, str]]) -> Message:
    message: Message = {"role": "assistant", "content": text or None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for id, name, arguments in calls
        ]
    return message


def _of_items(items: Sequence[Any]) -> Message:
    def text_of(kind: str) -> str:
        parts = [part for item in items if item["type"] == kind for part in item["content"]]
        return "".join(part["text"] for part in parts)

    calls = [item for item in items if item["type"] == "function_call"]
    return _assistant_message(
        text_of("message"),
        text_of("reasoning"),
        [(call["call_id"], call["name"], call["arguments"]) for call in calls],
    )


def _join_blocks(events: Sequence[Any]) -> list[dict[str, Any]]:
    assert events[-1]["type"] == "message_stop"
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                blocks.append(block)
            case {"type": "content_block_delta", "delta": {"partial_json": str(text)}}:
                blocks[-1]["input"] = json.loads(text)
            case {"type": "content_block_delta", "delta": delta}:
                name = delta["type"].removesuffix("_delta")
                blocks[-1][name] = blocks[-1].get(name, "") + delta[name]
    return blocks


def _of_blocks(blocks: Sequence[Any]) -> Message:
    calls = [block for block in blocks if block["type"] == "tool_use"]
    return _assistant_message(
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["id"], block["name"], json.dumps(block["input"])) for block in calls],
    )


# --- the link and the agent -----------------------------------------------------------------------


@dataclass
class FaultyLink:
    """Sends requests, and loses, cuts, doubles and repeats them."""

    http: aiohttp.ClientSession
    random: Random
    tasks: anyio.abc.TaskGroup
    fault_rate: float
    num_faults: int = 0

    async def send(self, url: str, body: dict[str, Any], headers: dict[str, str]) -> bytes | None:
        """Return the answer, or None if it was lost."""
        if self.random.random() >= self.fault_rate:
            return await self._post(url, body, headers)
        self.num_faults += 1
        match self.random.choice(("lost", "cut", "left", "doubled", "replayed")):
            case "lost":
                await self._post(url, body, headers)
                return None
            case "cut":
                return await self._post(url, body, headers, max_bytes=self.random.randrange(2000))
            case "left":
                with anyio.move_on_after(self.random.random() / 50):
                    await self._post(url, body, headers)
                return None
            case "doubled":
                self.tasks.start_soon(self._post, url, body, headers)
                return await self._post(url, body, headers)
            case _:
                answer = await self._post(url, body, headers)
                self.tasks.start_soon(self._post, url, body, headers)
                return answer

    async def _post(
        self, url: str, body: Any, headers: dict[str, str], max_bytes: int | None = None
    ) -> bytes | None:
        async with self.http.post(url, json=body, headers=headers) as response:
            if max_bytes is None:
                data = await response.read()
                assert response.status == 200, data
                return data
            num_bytes = 0
            async for piece in response.content.iter_any():
                num_bytes += len(piece)
                if num_bytes > max_bytes:
                    response.close()
                    break
        return None


@dataclass
class SimulatedAgent:
    """Converses in a session.

    Attributes:
        is_plain: whether the agent only ever appends to one history.
        has_keys: whether the agent sends idempotency keys.
        reached: numbers of the generations whose answers it has received.
        num_asked: number of messages that it has asked for.
    """

    url: str
    link: FaultyLink
    random: Random
    is_plain: bool
    has_keys: bool
    reached: set[int] = field(default_factory=set)
    num_asked: int = 0

    async def run(self, num_steps: int) -> None:
        histories = [[_user("Begin.")]]
        for _ in range(num_steps):
            history = histories[-1]
            if not self.is_plain:
                history = self._change_history(self.random.choice(histories))
                if self.random.random() < 0.2:  # two at once, from the same history
                    async with anyio.create_task_group() as tasks:
                        tasks.start_soon(self._step, copy.deepcopy(history), histories)
                        tasks.start_soon(self._step, history, histories)
                    continue
            await self._step(history, histories)

    async def _step(self, history: list[Message], histories: list[list[Message]]) -> None:
        answer = await self._ask(history)
        answers = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.random.choice(WORDS)}
            for call in answer.get("tool_calls", ())
        ]
        histories.append([*history, self._rewritten(answer), *(answers or [_user("Go on.")])])

    async def _ask(self, history: Sequence[Message]) -> Message:
        protocol = self.random.choice(PROTOCOLS)
        stream = self.random.random() < 0.6
        tools = ["note"] if self.is_plain or self.random.random() < 0.95 else ["note", "other"]
        body = body_of(protocol, history, tools, stream=stream)
        headers = {"Idempotency-Key": uuid.uuid4().hex} if self.has_keys else {}
        self.num_asked += 1
        while (data := await self.link.send(f"{self.url}/v1/{protocol}", body, headers)) is None:
            pass
        answer = message_of(protocol, data, stream=stream)
        (number,) = set(MARK.findall(json.dumps(answer)))
        self.reached.add(int(number))
        return answer

    def _rewritten(self, answer: Message) -> Message:
        """Return a message as a client might send it back; for the model it is the same."""
        for call in answer.get("tool_calls", ()):
            inputs = json.loads(call["function"]["arguments"])
            indent = self.random.choice((None, 1, 3))
            call["function"]["arguments"] = json.dumps(inputs, indent=indent)
        if self.random.random() < 0.6:
            answer.pop("reasoning_content", None)
        return answer

    def _change_history(self, history: Sequence[Message]) -> list[Message]:
        changed = copy.deepcopy(list(history))
        match self.random.randrange(8):
            case 0:
                return [_user(f"Summary: {self.random.choice(WORDS)}")]
            case 1:
                at = self.random.randrange(len(changed))
                while changed[at]["role"] != "user":
                    at -= 1
                return changed[: at + 1]
            case 2:
                answers = [message for message in changed if message["role"] == "assistant"]
                for message in answers[-1:]:
                    message["content"] = f"edited {self.random.choice(WORDS)}"
            case 3:
                for message in changed:
                    if "reasoning_content" in message:
                        message["reasoning_content"] = "something else"
            case 4:
                changed[-1]["content"] += " Now!"
        return changed


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
