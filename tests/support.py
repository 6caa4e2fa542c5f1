"""Fakes that several tests share: a small tokenizer and template, an engine, an SGLang server."""

from __future__ import annotations

import functools
import itertools
import json
from base64 import b64encode
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from struct import pack
from typing import Any, Literal

import anyio
import anyio.lowlevel
import jinja2
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.continuation import Render
from agentloop.events import Explained
from agentloop.inference.scheduling.placement import Decision
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.turns import Generation
from agentloop.trajectory import TurnEnd, VersionSpan
from tests.patience import patient

START, END = "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

TEMPLATE = """\
{%- if tools -%}
{{ '<|im_start|>system\n# Tools' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{%- if loop.previtem is undefined or loop.previtem.role != 'tool' -%}
{{ '<|im_start|>user' }}
{%- endif -%}
{{ '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.nextitem is undefined or loop.nextitem.role != 'tool' -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- else -%}
{{ '<|im_start|>' + message.role + '\n' + message.content }}
{%- for call in message.tool_calls or [] -%}
{{ '\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor -%}
{{ '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|im_start|>assistant\n' }}
{%- endif -%}
"""

# What the merges are learned from; with them one token may hold the end of one thing and the
# beginning of another.
CORPUS = (
    'hello world, what is 37 times 48? <tool_call>\n{"name": "multiply", "arguments": {"a": 37}}\n'
    "</tool_call><tool_call>{}</tool_call>\nthe answer is 1776; the result was computed.\n"
)


def template(source: str = TEMPLATE) -> Render:
    """A chat template, rendered as transformers would."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    compiled = environment.from_string(source)

    def render(
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **arguments: Any,
    ) -> str:
        return compiled.render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **arguments
        )

    return render


def tokenizer(tags: Sequence[str] = TAGS, *, normalizer: Any = None, corpus: str = "") -> Tokenizer:
    """Byte-level, so that it can spell anything; `tags` and ChatML's two are single tokens."""
    made = Tokenizer(models.BPE())
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    make: Any = trainers.BpeTrainer
    trainer = make(
        vocab_size=340,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator([CORPUS, CORPUS, CORPUS, corpus], trainer)
    made.add_special_tokens([AddedToken(text, normalized=False) for text in (START, END)])
    made.add_tokens([AddedToken(text, normalized=False) for text in tags])
    return made


@functools.cache
def chat_format(*, tags: bool = True) -> ChatFormat:
    """ChatML with hermes tool calls; without `tags` the markers are text of several tokens."""
    return ChatFormat(tokenizer(TAGS if tags else ()), template(), end_token=END)


def written(chat: ChatFormat, text: str) -> list[int]:
    """What a model samples to write `text`, control tokens included."""
    ids: list[int] = chat.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def call_text(name: str, arguments: Mapping[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def logprob(position: int) -> float:
    """What every fake gives as the log-probability of a turn's token at `position`."""
    return -(position + 1) / 8


def chunks(
    ids: Sequence[int],
    cuts: Sequence[int] = (),
    *,
    end: TurnEnd | None = TurnEnd.STOP,
    version: str = "v0",
    offset: int = 0,
) -> list[Chunk]:
    """`ids` in frames, cut before each of `cuts`; `offset` is the first one's place in its turn."""
    edges = [0, *sorted(cuts), len(ids)]
    made = [
        Chunk(list(ids[start:stop]), [logprob(offset + i) for i in range(start, stop)], version)
        for start, stop in itertools.pairwise(edges)
    ]
    if end is not None:
        last = made[-1]
        made[-1] = Chunk(last.ids, last.logprobs, last.version, end=end)
    return made


Hook = Callable[[], Awaitable[object]]
Step = Chunk | Hook | Exception


class ScriptedEngine:
    """Plays one script a turn: chunks are given, hooks awaited, errors raised."""

    def __init__(self, *turns: Sequence[Step], context_length: int = 100_000) -> None:
        self.context_length = context_length
        self.asked: list[Generation] = []
        self.forgotten: list[str] = []
        self.num_open = 0
        self._turns = deque(turns)

    async def generate(
        self,
        generation: Generation,
        *,
        vocab_size: int,
        on_chunk: Callable[[Chunk], None],
        on_placed: Callable[[str, Explained], None],
        on_moved: Callable[[str, str], None],
    ) -> None:
        self.asked.append(replace(generation, ids=list(generation.ids)))
        on_placed("http://fake", Decision(None, "fake", "the only one", ()))
        self.num_open += 1
        try:
            for step in self._turns.popleft():
                if isinstance(step, Chunk):
                    on_chunk(step)
                    await anyio.lowlevel.checkpoint()
                elif isinstance(step, Exception):
                    raise step
                else:
                    await step()
        finally:
            self.num_open -= 1

    def forget(self, key: str, *, is_complete: bool) -> None:
        self.forgotten.append(key)


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request of a `FakeSGLang`, once `after` tokens were streamed."""

    how: Literal["cut", "silence", "abort", "frame", "refuse", "done"]
    after: int = 0
    status: int = 500
    body: bytes = b'{"error": {"message": "broken on purpose"}}'
    status_code: int | None = None  # of an abort


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """Serve an application on a free port; yield its URL."""
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        with anyio.move_on_after(5, shield=True):
            await runner.cleanup()


@dataclass
class FakeSGLang:
    """Speaks SGLang 0.5.23's /generate, and continues every prompt along `answer`.

    `num_prompt` ids of a request are the prompt, the rest must be the beginning of the answer;
    without it, all are the prompt.
    """

    answer: Sequence[int]
    num_prompt: int | None = 3
    incremental: bool = True
    tokens_a_frame: int = 1
    end: Literal["stop", "length"] = "stop"
    version: str = "v0"
    context_length: int = 1000
    max_total_num_tokens: int = 2000
    faults: deque[Fault] = field(default_factory=deque)
    ready: bool = True
    model_path: str = "fake"
    gate: anyio.Event | None = None  # streams wait for it before their first frame
    requests: list[dict[str, Any]] = field(default_factory=list)
    num_streaming: int = 0
    url: str = ""
    load: dict[str, int] | None = None  # what each rank says of itself; none: it can't
    dp_size: int = 1
    weights: str | None = "sum"  # their checksum; none: they cannot be loaded, "": not in time
    paused: bool = False
    pauses: list[str] = field(default_factory=list)  # their modes
    flushes: list[bool] = field(default_factory=list)  # whether new weights emptied the cache
    sums: dict[str, str] = field(default_factory=dict)  # of its tensors
    group: str = ""  # that it is a member of
    updating: bool = False
    at_bucket: Callable[[list[str]], Awaitable[object]] | None = None  # raises: it refuses
    info: dict[str, Any] = field(default_factory=dict)  # what else it says of itself
    keys: list[str] = field(default_factory=list)  # the Authorization of each request
    released: set[str] = field(default_factory=set)  # tags of memory that it has given back
    keeps_memory: bool = False  # whatever it is asked

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeSGLang]:
        app = web.Application(middlewares=[self._note_key])
        app.router.add_post("/generate", self._generate)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/abort_request", self._abort)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update_weights)
        app.router.add_post("/weights_checker", self._check_weights)
        app.router.add_post("/release_memory_occupation", self._release_memory)
        app.router.add_post("/resume_memory_occupation", self._resume_memory)
        app.router.add_post("/init_weights_update_group", self._join_group)
        app.router.add_post("/destroy_weights_update_group", self._leave_group)
        app.router.add_post("/begin_weight_update", self._begin_update)
        app.router.add_post("/end_weight_update", self._end_update)
        app.router.add_post("/update_weights_from_distributed", self._receive)
        async with serving(app) as url:
            self.url = url
            yield self

    @web.middleware
    async def _note_key(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.keys.append(request.headers.get("Authorization", ""))
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        fault = self.faults.popleft() if self.faults else None
        if fault is not None and fault.how == "refuse":
            return web.Response(status=fault.status, body=fault.body)
        num_tokens = len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"]
        if num_tokens > self.context_length:
            message = f"Requested token count exceeds the model's context length: {num_tokens}"
            return web.json_response({"error": {"message": message}}, status=400)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.num_streaming += 1
        try:
            if self.gate is not None:
                await self.gate.wait()
            await self._stream(request, response, body, fault)
        finally:
            self.num_streaming -= 1
        return response

    async def _stream(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        fault: Fault | None,
    ) -> None:
        num_had = 0 if self.num_prompt is None else len(body["input_ids"]) - self.num_prompt
        ids = list(self.answer[num_had:][: body["sampling_params"]["max_new_tokens"]])
        stop = len(ids) if fault is None else min(fault.after, len(ids))
        sent = 0
        while sent < stop:
            upto = min(sent + self.tokens_a_frame, stop)
            last = fault is None and upto == len(ids)
            finish = {"type": self.end} if last else None
            await _send(response, self._frame(body, ids, sent, upto, num_had, finish))
            sent = upto
        if fault is not None:
            await self._break(request, response, body, ids, sent, num_had, fault)
        await response.write(b"data: [DONE]\n\n")

    async def _break(
        self,
        request: web.Request,
        response: web.StreamResponse,
        body: dict[str, Any],
        ids: list[int],
        sent: int,
        had: int,
        fault: Fault,
    ) -> None:
        match fault.how:
            case "cut":
                assert request.transport is not None
                request.transport.close()
            case "silence":
                await anyio.sleep_forever()
            case "abort":
                finish = {
                    "type": "abort", "message": "Aborted", "status_code": fault.status_code
                }  # fmt: skip
                upto = min(sent + 1, len(ids))  # an abort's last frame may carry tokens
                await _send(response, self._frame(body, ids, sent, upto, had, finish))
            case "frame":
                await response.write(b"data: " + fault.body + b"\n\n")

    def _frame(
        self,
        body: dict[str, Any],
        ids: list[int],
        start: int,
        stop: int,
        had: int,
        finish: dict[str, Any] | None,
    ) -> dict[str, Any]:
        first = start if self.incremental else 0
        meta: dict[str, Any] = {
            "finish_reason": finish,
            "weight_version": self.version,
            "completion_tokens": stop,
            "output_token_logprobs": [[logprob(had + i), ids[i], None] for i in range(first, stop)],
            "cached_tokens": 2,
        }
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = [
                logprob(had + i) / 2 for i in range(first, stop)
            ]
            meta["output_token_sampling_mask"] = [[ids[i], ids[i] + 1] for i in range(first, stop)]
        if finish and body.get("return_routed_experts"):
            meta["prompt_tokens"] = len(body["input_ids"])
            rows = range(body["routed_experts_start_len"], len(body["input_ids"]) + stop - 1)
            meta["routed_experts"] = b64encode(pack(f"<{len(rows)}i", *rows)).decode()
        if not body.get("return_logprob"):
            del meta["output_token_logprobs"]
        if num_top := body.get("top_logprobs_num"):
            meta["output_top_logprobs"] = [
                [[logprob(had + i) - rank, ids[i] + rank, None] for rank in range(num_top)]
                for i in range(first, stop)
            ]
        if body.get("logprob_start_len") == 0:  # in every frame, as the real one has it
            prompt = body["input_ids"]
            meta["input_token_logprobs"] = [
                [logprob(at - 1) if at else None, id, None] for at, id in enumerate(prompt)
            ]
            if num_top:
                meta["input_top_logprobs"] = [
                    [[logprob(at - 1), id, None]] * num_top if at else None
                    for at, id in enumerate(prompt)
                ]
        if finish is not None:
            meta["weight_versions"] = [{"version": self.version, "start": 0, "end": stop}]
        return {"text": "", "output_ids": ids[first:stop], "meta_info": meta}

    async def _server_info(self, request: web.Request) -> web.StreamResponse:
        """In pieces, as the real one's 37 KB may come."""
        info = {
            "model_path": self.model_path,
            "version": "0.5.23",
            "weight_version": "default",  # it does not follow updates
            "dp_size": self.dp_size,
            "max_total_num_tokens": self.max_total_num_tokens,
            "tp_size": 1,
            "device": "cpu",
            "dtype": "float32",
            **self.info,
        }
        body = json.dumps(info).encode()
        response = web.StreamResponse()
        await response.prepare(request)
        for start in range(0, len(body), 40):
            await response.write(body[start : start + 40])
            await anyio.lowlevel.checkpoint()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": self.context_length}]})

    async def _model_info(self, request: web.Request) -> web.Response:
        status = 200 if self.ready else 503
        return web.json_response({"weight_version": self.version}, status=status)

    async def _loads(self, request: web.Request) -> web.Response:
        if self.load is None:
            return web.Response(status=404)
        names = ("num_used_tokens", "num_running_reqs", "num_waiting_reqs")
        loads = [
            {"dp_rank": rank} | dict.fromkeys(names, 0) | self.load for rank in range(self.dp_size)
        ]
        return web.json_response({"loads": loads})

    async def _pause(self, request: web.Request) -> web.Response:
        self.paused = True
        self.pauses.append((await request.json())["mode"])
        while self.pauses[-1] == "abort" and self.num_streaming:  # noqa: ASYNC110
            await anyio.sleep(0.01)
        return web.json_response({})

    async def _release_memory(self, request: web.Request) -> web.Response:
        if self.keeps_memory:
            return web.json_response({"error": {"message": "no"}}, status=400)
        assert self.paused
        assert not self.num_streaming, "SGLang's scheduler would end"
        self.released |= set((await request.json())["tags"])
        return web.Response()

    async def _resume_memory(self, request: web.Request) -> web.Response:
        tags = set((await request.json())["tags"])
        assert tags <= self.released, "SGLang's scheduler would end"
        self.released -= tags
        return web.Response()

    async def _continue(self, request: web.Request) -> web.Response:
        assert not self.released
        self.paused = False
        return web.json_response({})

    async def _update_weights(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert self.paused
        assert "weights" not in self.released
        if self.weights is None:
            return web.json_response({"success": False, "message": "no such folder"}, status=400)
        if self.weights == "":
            await anyio.sleep_forever()
        self.version = body["weight_version"]
        self.flushes.append(body["flush_cache"])
        return web.json_response({"success": True, "message": ""})

    async def _check_weights(self, request: web.Request) -> web.Response:
        ranks = [{"per_gpu_checksum": self.weights, "checksums": self.sums}]
        return web.json_response({"success": True, "ranks": ranks})

    async def _join_group(self, request: web.Request) -> web.Response:
        assert self.paused
        self.group = (await request.json())["group_name"]
        return web.json_response({"success": True, "message": ""})

    async def _leave_group(self, request: web.Request) -> web.Response:
        name = (await request.json())["group_name"]
        was, self.group = self.group, ""
        return web.json_response({"success": was == name}, status=200 if was == name else 400)

    async def _begin_update(self, request: web.Request) -> web.Response:
        status, self.updating = 400 if self.updating else 200, True
        return web.json_response({"message": "open already"}, status=status)

    async def _end_update(self, request: web.Request) -> web.Response:
        status, self.updating = 200 if self.updating else 400, False
        return web.json_response({"message": "none is open"}, status=status)

    async def _receive(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert (self.paused, self.updating, self.group) == (True, True, body["group_name"])
        if self.at_bucket is not None:
            try:
                await self.at_bucket(body["names"])
            except ValueError as error:
                return web.json_response({"message": str(error)}, status=400)
        if body["weight_version"] is not None:
            self.flushes.append(body["flush_cache"])
            self.version = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def _abort(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        return web.Response()


async def _send(response: web.StreamResponse, frame: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")


def spans_cover(spans: Sequence[VersionSpan], length: int) -> bool:
    """Whether `spans` lie end to end from 0 to `length`."""
    edges = [edge for span in spans for edge in (span.start, span.end)]
    return edges[:1] + edges[-1:] == ([0, length] if length else []) and all(
        earlier.end == later.start for earlier, later in itertools.pairwise(spans)
    )


async def eventually(condition: Callable[[], bool], *, within_s: float = 15.0) -> None:
    """Wait until `condition` holds, letting everything else run meanwhile."""
    with anyio.fail_after(patient(within_s)):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.001)
