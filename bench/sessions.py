"""Benchmark of sessions: what the endpoint adds to a request for a message of the model.

    python -m bench.sessions                     256 sessions, 128 requests per second
    python -m bench.sessions --rate 300
    python -m bench.sessions history             what a history of 4 to 800 messages costs

Three parts are kept apart. The endpoint is this process, with sessions as environments have them.
The load generator is a process of its own. Each of its sessions converses: a question, an answer
with a call, its result, and so on, with the whole history in each request, at random times of a
given rate. The engine is a clock: it answers after `--engine-ms` and takes no processor time.

Added latency is the time that a client waits for an answer, less the engine's. It includes HTTP,
the decoding of what the engine sends, waiting for other requests on the loop and for a core, and
the client's own part. CPU is that of the endpoint's process, all of it, for each request.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

import anyio
from aiohttp import ClientSession, TCPConnector, web

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.rollout import Budget
from agentloop.agent.sessions import ModelSession, ModelSessions, SessionSettings
from agentloop.aio import collect_garbage_rarely
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.models import SMALL
from agentloop.sandbox.openapi import add_routes
from agentloop.serving.answering import Answering
from agentloop.serving.bare_model import SESSION_ROUTES, BareModel
from agentloop.serving.error_responses import ErrorResponses
from agentloop.serving.schemas import ChatCompletion
from agentloop.trajectory import TurnEnd

_LENGTHS = (4, 50, 200, 800)
_NEAR = 6  # requests that are measured from each length on
_TEXT = "The result of the last step was as expected, and the next one follows from it. " * 2
_CALL = '<tool_call>\n{"name": "run", "arguments": {"code": "print(37 * 48)"}}\n</tool_call>'
_TOOL = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Run a program.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}},
    },
}
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _PlayedEngine:
    """Answers each generation after a time, with a text and a call.

    Attributes:
        took_s: how long each generation of a session took, by the session's name.
    """

    context_length = 1 << 20

    def __init__(self, ids: list[int], delay_s: float) -> None:
        self._chunk = Chunk(ids, [-0.5] * len(ids), "v0", end=TurnEnd.STOP)
        self._delay_s = delay_s
        self.took_s: dict[str, list[float]] = {}

    async def generate(
        self, generation: Generation, *, on_chunk: Callable[[Chunk], None], **_: object
    ) -> None:
        asked_s = time.perf_counter()
        if self._delay_s:
            await anyio.sleep(self._delay_s)
        name = generation.key.partition("+")[0]
        self.took_s.setdefault(name, []).append(time.perf_counter() - asked_s)
        on_chunk(self._chunk)

    def forget(self, key: str, *, is_complete: bool) -> None:
        """Do nothing: there is no cache."""


class Endpoint:
    """Sessions, served on loopback.

    Attributes:
        begun: CPU time of the process when each request began.
        num_chars: characters encoded so far.
    """

    def __init__(self, delay_s: float) -> None:
        self.chat = ChatFormat.load(SMALL)
        self.num_chars = 0
        encoder = self.chat._encoder
        encode = encoder._encode

        def encode_and_count(text: str) -> list[int]:
            self.num_chars += len(text)
            return encode(text)

        encoder._encode = encode_and_count  # type: ignore[method-assign]
        end = self.chat.decode([self.chat.end_id])
        reply = self.chat.tokenizer.encode(f"{_TEXT}{_CALL}{end}", add_special_tokens=False).ids
        self.engine = _PlayedEngine(reply, delay_s)
        self.url = ""
        self.begun: list[float] = []

    def _open(self, name: str, *, sampling: Sampling | None = None) -> ModelSession:
        return ModelSession(
            name,
            self.engine,
            self.chat,
            sampling=sampling or Sampling(),
            budget=Budget(),
            with_text=False,
        )

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        sessions = ModelSessions(SessionSettings(max_open=1 << 16), self._open)
        bare = BareModel(
            sessions,
            self.chat,
            name="small",
            sampling=Sampling(),
            context_length=lambda: self.engine.context_length,
            answering=Answering(self.chat, io_timeout_s=60.0),
            slots=anyio.CapacityLimiter(1 << 16),
        )

        @web.middleware
        async def record_time(request: web.Request, handler: _Handler) -> web.StreamResponse:
            if request.method == "POST" and request.match_info.get("key"):
                self.begun.append(time.process_time())
            return await handler(request)

        errors = ErrorResponses(SESSION_ROUTES)
        app = web.Application(
            middlewares=[record_time, errors.middleware], client_max_size=64 << 20
        )
        add_routes(app.router, SESSION_ROUTES, bare)
        runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0, backlog=1024).start()
            self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield
        finally:
            await runner.cleanup()


# --- the load -------------------------------------------------------------------------------------


class Talk:
    """A conversation with a session."""

    def __init__(self, http: ClientSession, url: str) -> None:
        self._http, self._url = http, url
        self.history: list[object] = []
        self.session = self.name = ""

    async def open(self) -> None:
        """Open a session, and close the one before."""
        if self.session:
            await self._http.delete(self.session)
        async with self._http.post(f"{self._url}/v1/sessions") as response:
            opened = await response.json()
        self.session, self.name = opened["url"], opened["name"]
        self.history = [{"role": "user", "content": _TEXT}]

    async def ask(self) -> None:
        """Ask for the next message, and add it to the history with the result of its call."""
        body = {"model": "small", "messages": self.history, "tools": [_TOOL]}
        async with self._http.post(f"{self.session}/v1/chat/completions", json=body) as response:
            data = await response.read()
            assert response.status == 200, data
        completion: ChatCompletion = json.loads(data)
        message = completion["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        self.history += [message, {"role": "tool", "content": _TEXT, "tool_call_id": call_id}]


async def _generate_load(url: str, options: argparse.Namespace) -> None:
    """Ask for messages in all sessions, at random times, `rate` a second altogether."""
    took_s: dict[str, list[float]] = {}
    async with ClientSession(connector=TCPConnector(limit=0)) as http:
        pause_s = options.sessions / options.rate

        async def converse() -> None:
            talk = Talk(http, url)
            due_s = time.perf_counter() + random.expovariate(1 / pause_s)
            for number in range(options.requests):
                if number % options.turns == 0:
                    await talk.open()
                await anyio.sleep(max(0.0, due_s - time.perf_counter()))
                due_s = time.perf_counter() + random.expovariate(1 / pause_s)
                begun_s = time.perf_counter()
                await talk.ask()
                took_s.setdefault(talk.name, []).append(time.perf_counter() - begun_s)

        async with anyio.create_task_group() as tasks:
            for _ in range(options.sessions):
                tasks.start_soon(converse)
    print(json.dumps(took_s))


async def _measure(options: argparse.Namespace) -> None:
    endpoint = Endpoint(options.engine_ms / 1000)
    async with endpoint.serving():
        load = os.getloadavg()[0]
        cpu_s, begun_s = time.process_time(), time.perf_counter()
        durations = await _run_load(endpoint, options)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - begun_s
    took_s = [(name, seconds) for name, times in durations.items() for seconds in times]
    engine_s = [seconds for name in durations for seconds in endpoint.engine.took_s[name]]
    assert len(took_s) == len(engine_s) == options.sessions * options.requests
    added = sorted(seconds - engine for (_, seconds), engine in zip(took_s, engine_s, strict=True))
    print(
        f"{options.sessions} sessions, {len(added) / wall_s:.0f} requests/s of "
        f"{options.rate:g} wanted; load average before {load:.1f}; {cpu_s / wall_s:.0%} of a core, "
        f"{cpu_s / len(added) * 1000:.2f} ms of CPU per request\n"
    )
    print("| | p50 | p90 | p99 |\n|---|---|---|---|")
    marks = (added[int(len(added) * part)] * 1000 for part in (0.5, 0.9, 0.99))
    print("| added latency | " + " | ".join(f"{mark:.2f} ms" for mark in marks) + " |")


async def _run_load(endpoint: Endpoint, options: argparse.Namespace) -> dict[str, list[float]]:
    """Run the load generator; return how long its requests took, by the names of sessions."""
    names = ("sessions", "requests", "rate", "turns")
    more = [part for name in names for part in (f"--{name}", str(getattr(options, name)))]
    command = [sys.executable, "-m", "bench.sessions", "--load", endpoint.url, *more]
    durations: dict[str, list[float]] = json.loads(
        (await anyio.run_process(command, stderr=None)).stdout
    )
    return durations


# --- the length of a history ----------------------------------------------------------------------


async def _histories(options: argparse.Namespace) -> None:
    """Measure one session that grows, without pauses: nothing else is on the loop."""
    endpoint = Endpoint(0.0)
    lengths = [length for length in _LENGTHS if length <= options.longest]
    options.sessions, options.rate = 1, 1e9
    options.requests = options.turns = max(lengths) // 2 + _NEAR
    durations: dict[int, list[float]] = {length: [] for length in lengths}
    async with endpoint.serving():
        for _ in range(options.rounds):
            endpoint.begun.clear()
            await _run_load(endpoint, options)
            starts = endpoint.begun
            for length in lengths:
                for index in range(length // 2, length // 2 + _NEAR - 1):
                    durations[length].append(starts[index + 1] - starts[index])
    print("| messages | CPU of a request: median | smallest |")
    print("|---|---|---|")
    for length, values in durations.items():
        median_ms, least_ms = statistics.median(values) * 1000, min(values) * 1000
        print(f"| {length} | {median_ms:.2f} ms | {least_ms:.2f} ms |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", nargs="?", choices=("latency", "history"), default="latency")
    parser.add_argument("--sessions", type=int, default=256)
    parser.add_argument("--requests", type=int, default=20, help="of each session")
    parser.add_argument("--turns", type=int, default=10, help="after which a session is closed")
    parser.add_argument("--rate", type=float, default=128.0, help="requests per second, of all")
    parser.add_argument("--rounds", type=int, default=5, help="of `history`")
    parser.add_argument("--longest", type=int, default=800, help="history, of `history`")
    parser.add_argument("--engine-ms", type=float, default=20.0, help="what the engine takes")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    run = _measure if options.what == "latency" else _histories
    collect_garbage_rarely()  # as the command does
    work = partial(_generate_load, options.load) if options.load else run
    anyio.run(work, options, backend_options={"use_uvloop": True})


if __name__ == "__main__":
    main()
