"""Benchmark of streaming: the CPU cost of a token from a server's frame into a trajectory.

    python -m bench.streaming                    agentloop and the OpenAI client in turn
    python -m bench.streaming --streams 1000 --servers 64 --tokens 200 --rounds 3

A load generator in a process of its own sends SGLang's frames (and OpenAI's, for its client) from
64 loopback ports: each "server" sends one token to each of its streams every `--step-ms`, as
continuous batching does. A reader, also in a process of its own, holds all streams at once.
Reported are tokens per second of *its* CPU time, and the lag of its event loop (p99 of a 5 ms
timer).

Readers: `agentloop` is the whole loop (HTTP, frames, router and ledger, tool-call scan, trajectory
with ids, log-probabilities and versions); `openai` iterates over the equivalent chat completion
chunks, with log-probabilities, and keeps nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar, TypedDict, cast

import anyio
import orjson

from bench.command import Lag, helper_process, quantile, say, words

READERS = ("agentloop", "openai")
_PROMPT_TOKENS = 64
_PLAIN = range(50, 300)  # tokens of the small model that do not open a tool call


class ReaderFigures(TypedDict):
    """What a reader reached."""

    tokens_per_cpu_s: float
    tokens_per_s: float
    lag_p99_ms: float


# --- the load generator -------------------------------------------------------------------------


class _Stream(asyncio.Protocol):
    """A connection that reads requests; its server's clock does the sending."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self._received = b""
        self.transport: asyncio.Transport | None = None
        self.paused = False
        self.sent = 0  # tokens, of which `told` are in frames
        self.told = 0
        self.interval = 1
        self.total = 0
        self.chat = False
        self.rid = "r"
        self.script: list[int] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.active.discard(self)

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, body = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
        if len(body) < length:
            return
        self._received = body[length:]
        self._answer(head.split(b" ", 2)[1].decode(), body[:length])

    def _answer(self, path: str, body: bytes) -> None:
        assert self.transport is not None
        if path not in ("/generate", "/v1/chat/completions"):
            content = orjson.dumps(self._server.information(path))
            head = (
                b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
            )
            self.transport.write(head % len(content) + content)
            return
        request = orjson.loads(body)
        self.chat = path != "/generate"
        self.sent = self.told = 0
        if self.chat:
            self.total = request["max_completion_tokens"]
        else:
            params = request["sampling_params"]
            self.total = params["max_new_tokens"]
            self.interval = params.get("stream_interval", 1) if self._server.merges else 1
            self.rid = request["rid"]
            if self._server.ending:
                thought = [_PLAIN[0]] * random.randrange(20, 120)
                self.script = [*thought, *self._server.ending]
                self.total = len(self.script)
        self.transport.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        self._server.active.add(self)

    def step(self) -> None:
        """Send the next token."""
        assert self.transport is not None
        if self.paused:  # the client lags: like a real server, skip the step
            return
        self.sent += 1
        last = self.sent == self.total
        if self.chat:
            frame = _chat_frame(last)
        else:
            # As SGLang does: the first token at once, then frames of several.
            if self.told and not last and self.sent - self.told < self.interval:
                return
            new = range(self.told, self.sent)
            if self.script:
                ids, kind = [self.script[at] for at in new], b"stop"
            else:
                ids, kind = [_PLAIN[at % len(_PLAIN)] for at in new], b"length"
            frame = _frame(self.rid, ids, self.sent, last, kind)
            if self.script and self.told < self.total - 1 <= self.sent:
                self._server.sent_s[self.rid] = time.monotonic()
            self.told = self.sent
        if last:
            frame += b"data: [DONE]\n\n"
            self._server.active.discard(self)
        self.transport.write(b"%x\r\n%b\r\n" % (len(frame), frame) + b"0\r\n\r\n" * last)


def _frame(rid: str, ids: list[int], index: int, last: bool, kind: bytes) -> bytes:
    logprobs = b",".join(b"[-2.1123368740081787,%d,null]" % token for token in ids)
    finish = b'{"type":"%b"}' % kind if last else b"null"
    extra = b',"weight_versions":[{"version":"v1","start":0,"end":%d}]' % index if last else b""
    return (
        b'data: {"text":" token","output_ids":[%b],"meta_info":{"id":"%b","finish_reason":%b,'
        b'"prompt_tokens":64,"weight_version":"v1","num_retractions":0,"storage_prefetch_wait":0.0,'
        b'"storage_staging_wait":0.0,"forward_entry_time":1795236410.6655934,'
        b'"prefill_finished_time":1795236410.704352,"queue_time":0.0007612040003550646,'
        b'"input_token_logprobs":[],"output_token_logprobs":[%b],'
        b'"output_token_logprobs_length":%d,"reasoning_tokens":0,"completion_tokens":%d,'
        b'"cached_tokens":0,"cached_tokens_details":null,"dp_rank":null%b}}\n\n'
    ) % (
        b",".join(b"%d" % token for token in ids),
        rid.encode(),
        finish,
        logprobs,
        index,
        index,
        extra,
    )


def _chat_frame(last: bool) -> bytes:
    finish = b'"length"' if last else b"null"
    return (
        b'data: {"id":"83dd87a1b9b74cd39f698ee1c652e224","object":"chat.completion.chunk",'
        b'"created":1795236410,"model":"small","choices":[{"index":0,"delta":{"role":null,'
        b'"content":" token","reasoning_content":null,"tool_calls":null},"logprobs":{"content":['
        b'{"token":" token","bytes":[32,116,111,107,101,110],"logprob":-2.1123368740081787,'
        b'"top_logprobs":[]}]},"finish_reason":%b,"matched_stop":null}],"usage":null}\n\n'
    ) % finish


class _Server:
    """A port with a clock.

    With an `ending`, each response is a thought of random length followed by these tokens; `sent_s`
    has the time.monotonic() at which the last but one of them was sent, by request. Frames have as
    many tokens as the request asks for if it `merges` them, or one.
    """

    sent_s: ClassVar[dict[str, float]] = {}

    def __init__(self, step_s: float, ending: list[int], *, merges: bool) -> None:
        self.ending, self.merges = ending, merges
        self.active: set[_Stream] = set()
        self.port = 0
        self._step_s = step_s

    def information(self, path: str) -> object:
        if path == "/sent":
            return self.sent_s
        if path == "/v1/models":
            return {"data": [{"id": "small", "max_model_len": 32_768}]}
        return {"model_path": "small", "max_total_num_tokens": 1 << 20, "version": "0.5.23"}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: _Stream(self), "127.0.0.1", 0, backlog=4096)
        self.port = server.sockets[0].getsockname()[1]
        first = loop.time() + random.random() * self._step_s  # servers are not in step
        loop.call_at(first, self._tick, first)

    def _tick(self, due: float) -> None:
        loop = asyncio.get_running_loop()
        for stream in list(self.active):
            stream.step()
        due = max(due + self._step_s, loop.time())
        loop.call_at(due, self._tick, due)


async def _generate_load(options: argparse.Namespace) -> None:
    servers = [
        _Server(options.step_ms / 1000, options.ending, merges=not options.single)
        for _ in range(options.servers)
    ]
    for server in servers:
        await server.run()
    print(json.dumps([f"http://127.0.0.1:{server.port}" for server in servers]), flush=True)
    # Ends with its parent, when the pipe closes.
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


# --- the readers --------------------------------------------------------------------------------


async def _read_agentloop(urls: list[str], num_streams: int, num_tokens: int) -> int:
    # Imported here, so that the other reader does without them.
    from agentloop.agent.chat_format import ChatFormat
    from agentloop.agent.rollout import Budget, Rollout
    from agentloop.inference.router import Router, RouterSettings
    from agentloop.inference.sglang.client import SGLangServer
    from agentloop.inference.sglang.control import http_session
    from agentloop.models import SMALL

    budget = Budget(max_response_tokens=num_tokens, max_turns=1)
    chat = ChatFormat.load(SMALL)
    num_read = 0

    async def read_stream(group: int) -> None:
        nonlocal num_read
        messages = [{"role": "user", "content": f"{group} " + "x" * (_PROMPT_TOKENS // 2)}]
        rollout = Rollout(router, chat, messages, budget=budget, with_text=False)
        trajectory = await rollout.run()
        num_read += trajectory.num_sampled_tokens

    async with http_session() as session:
        servers = [SGLangServer(url, session) for url in urls]
        async with (
            Router.open(servers, RouterSettings()) as router,
            anyio.create_task_group() as tasks,
        ):
            for index in range(num_streams):
                tasks.start_soon(read_stream, index // 32)  # groups of 32, as in training
    return num_read


async def _read_openai(urls: list[str], num_streams: int, num_tokens: int) -> int:
    import httpx
    from openai import AsyncOpenAI

    num_read = 0

    async def read_stream(client: AsyncOpenAI) -> None:
        nonlocal num_read
        stream = await client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "x"}],
            stream=True,
            logprobs=True,
            max_completion_tokens=num_tokens,
        )
        async for chunk in stream:
            num_read += len(chunk.choices)

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=600, trust_env=False) as http:
        clients = [AsyncOpenAI(base_url=url + "/v1", api_key="-", http_client=http) for url in urls]
        async with anyio.create_task_group() as tasks:
            for index in range(num_streams):
                tasks.start_soon(read_stream, clients[index % len(clients)])
    return num_read


async def _measure(
    reader: str, urls: list[str], num_streams: int, num_tokens: int
) -> ReaderFigures:
    read = {"agentloop": _read_agentloop, "openai": _read_openai}[reader]
    lag = Lag()
    async with anyio.create_task_group() as tasks:
        # One uncounted stream first, to exclude imports and the tokenizer.
        await read(urls[:1], 1, 2)
        tasks.start_soon(lag.measure)
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        num_read = await read(urls, num_streams, num_tokens)
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        tasks.cancel_scope.cancel()
    assert num_read == num_streams * num_tokens, f"{reader}: {num_read} tokens arrived"
    return {
        "tokens_per_cpu_s": num_read / cpu_s,
        "tokens_per_s": num_read / wall_s,
        "lag_p99_ms": quantile(lag.samples, 0.99) * 1000,
    }


# --- the benchmark ------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--servers", type=int, default=64)
    parser.add_argument(
        "--tokens", type=int, default=300, help="tokens per stream (openai: a tenth)"
    )
    parser.add_argument("--step-ms", type=float, default=30.0, help="time between two tokens")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--readers", type=words, default=list(READERS))
    parser.add_argument(
        "--single", action="store_true", help="a frame for each token, whatever a reader asks for"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--load", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--ending", type=json.loads, default=[], help=argparse.SUPPRESS)
    parser.add_argument("--read", choices=READERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        import uvloop

        uvloop.run(_generate_load(options))
    elif options.read:
        urls = json.loads(sys.stdin.readline())
        arguments = (options.read, urls, options.streams, options.tokens)
        figures = anyio.run(_measure, *arguments, backend_options={"use_uvloop": True})
        print(json.dumps(figures), flush=True)
    else:
        _run(options)


def _run(options: argparse.Namespace) -> None:
    me = [sys.executable, "-m", "bench.streaming"]
    shape = ["--streams", str(options.streams), "--servers", str(options.servers)]
    load = [*shape, *["--single"] * options.single, "--step-ms", str(options.step_ms)]
    results: dict[str, list[ReaderFigures]] = {}
    with helper_process("bench.streaming", "--load", *load) as urls:
        for number in range(options.rounds):
            for reader in options.readers:
                tokens = options.tokens
                if reader == "openai":
                    tokens = max(4, tokens // 10)
                figures = subprocess.run(
                    [*me, "--read", reader, *shape, "--tokens", str(tokens)],
                    input=urls,
                    stdout=subprocess.PIPE,
                    check=True,
                    text=True,
                    timeout=600,
                ).stdout
                results.setdefault(reader, []).append(json.loads(figures))
                say(f"round {number + 1}, {reader}: {figures.strip()}")
    medians: dict[str, ReaderFigures] = {
        reader: {
            "tokens_per_cpu_s": statistics.median(row["tokens_per_cpu_s"] for row in rounds),
            "tokens_per_s": statistics.median(row["tokens_per_s"] for row in rounds),
            "lag_p99_ms": statistics.median(row["lag_p99_ms"] for row in rounds),
        }
        for reader, rounds in results.items()
    }
    _print(options, medians)
    if options.json:
        options.json.write_text(json.dumps({"medians": medians, "rounds": results}, indent=2))


def _print(options: argparse.Namespace, medians: dict[str, ReaderFigures]) -> None:
    print(
        f"{options.streams} streams over {options.servers} servers, a token every "
        f"{options.step_ms:g} ms each; medians of {options.rounds} rounds; {os.cpu_count()} cores\n"
    )
    print("| reader | tokens per CPU second | x openai | tokens/s | loop lag p99 |")
    print("|---|---|---|---|---|")
    base = medians["openai"]["tokens_per_cpu_s"] if "openai" in medians else None
    for reader, row in medians.items():
        ratio = f"{row['tokens_per_cpu_s'] / base:.1f}" if base else ""
        print(
            f"| {reader} | {row['tokens_per_cpu_s']:,.0f} | {ratio} | {row['tokens_per_s']:,.0f} "
            f"| {row['lag_p99_ms']:.1f} ms |"
        )


if __name__ == "__main__":
    main()
