"""Simulated parts for bench/kill.py, around the real `agentloop train`: servers, engine, fuse.

    train ──> TrainingLoop, GroupQueue, RunFolder, Rollouts, Router, weight sync      real
                 ├─> PlayedRuntime.rollout ──> serve(): its tokens are a function of the prompt
                 │                              and of the loaded weights
                 └─> Learner ──> guardian ──> bench.kill_learner

The weights are a digest (kill_learner.py), so a rollout depends on all training before it and on
nothing else: neither on time nor on the server.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, ParamSpec, Self, TypeVar

import anyio
from aiohttp import web

from agentloop.config import load_settings
from agentloop.errors import RequestError, ServerUnavailable
from agentloop.inference.router import Router
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.runtime import Settings
from agentloop.training import wiring
from agentloop.training.learner_client import client as learner_module
from agentloop.training.learner_client.client import KeptLearner
from agentloop.training.loop.queue import GroupQueue
from agentloop.training.plan.settings import TrainSettings
from agentloop.training.run.folder import RunFolder
from agentloop.training.run.status import RunStatus
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
from bench.kill_learner import PID

__all__ = ["STRUCK", "TICKS", "Fuse", "PlayedServer", "learner_of", "live", "serve", "strike"]

P = ParamSpec("P")
T = TypeVar("T")

TICKS = Path("logs/ticks")  # in the run's folder: number of effects so far
STRUCK = Path("logs/struck")  # exists if something was killed in this life
_VOCAB_SIZE = 1 << 24
_NUM_PROMPT = 3  # ids: numbers of the group, the task and the sibling
_NUM_REPLY = 6
_MOST_S = 0.008


# --- a server -------------------------------------------------------------------------------------


class PlayedServer:
    """The part of SGLang that router and weight sync use. Without weights it serves nothing."""

    def __init__(self) -> None:
        self._version, self._digest = "default", ""

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._load)
        app.router.add_post("/weights_checker", self._checksum)
        for path in ("/pause_generation", "/continue_generation", "/abort_request"):
            app.router.add_post(path, _empty_answer)
        return app

    async def _server_info(self, _: web.Request) -> web.Response:
        size = 100_000
        info = {"model_path": "played", "version": "0.5.23", "max_total_num_tokens": size}
        return web.json_response(info)

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"max_model_len": 10_000}]})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._version})

    async def _load(self, request: web.Request) -> web.Response:
        body = await request.json()
        path = Path(body["model_path"]) / "digest.json"
        try:
            self._digest = json.loads(path.read_bytes())
        except OSError as error:
            return web.json_response({"success": False, "message": str(error)}, status=400)
        self._version = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def _checksum(self, _: web.Request) -> web.Response:
        ranks = [{"per_gpu_checksum": self._digest, "checksums": {}}]
        return web.json_response({"success": True, "ranks": ranks})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        """Send two frames, each with the version loaded at that time."""
        if not self._digest:
            return web.json_response({"error": {"message": "loading"}}, status=503)
        ids = (await request.json())["input_ids"]
        had = len(ids) - _NUM_PROMPT  # above 0 if it continues from another server
        response = web.StreamResponse()
        await response.prepare(request)
        for end in {max(had, _NUM_REPLY // 2), _NUM_REPLY}:
            await anyio.sleep(random.uniform(0, _MOST_S))
            output_ids = reply(ids[:_NUM_PROMPT], self._digest)[had:end]
            meta = {
                "finish_reason": {"type": "stop"} if end == _NUM_REPLY else None,
                "weight_version": self._version,
                "completion_tokens": end - had,
                "output_token_logprobs": [[-token / 1000, token, None] for token in output_ids],
            }
            frame = {"output_ids": output_ids, "meta_info": meta}
            await response.write(b"data: " + json.dumps(frame).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


def reply(prompt: list[int], digest: str) -> list[int]:
    drawn = hashlib.sha256(f"{prompt} {digest}".encode()).digest()
    return [int.from_bytes(drawn[2 * i : 2 * i + 2]) % 1000 for i in range(_NUM_REPLY)]


async def _empty_answer(_: web.Request) -> web.Response:
    return web.json_response({})


def serve(port: int) -> None:
    """Serve until killed."""

    async def run() -> None:
        runner = web.AppRunner(PlayedServer().app(), handler_cancellation=True, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
        await anyio.sleep_forever()

    anyio.run(run)


# --- the engine -----------------------------------------------------------------------------------


class PlayedRuntime:
    """The part of `agentloop.runtime.Runtime` that training uses: the real router, no model."""

    pool = None
    own_tools: Sequence[object] = ()
    chat = SimpleNamespace(tokenizer=None)

    def __init__(self, settings: Settings, **_: object) -> None:
        self._settings = settings
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        session = await self._stack.enter_async_context(http_session())
        servers = [SGLangServer(url, session) for url in self._settings.servers]
        opened = Router.open(servers, self._settings.router)
        self.router = await self._stack.enter_async_context(opened)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return await self._stack.__aexit__(kind, error, traceback)

    async def prompt_ids(self, messages: Sequence[Message], tools: Sequence[object]) -> list[int]:
        """Return a prompt of the usual length."""
        return [0] * _NUM_PROMPT

    session_listener = None

    async def listen_for_sessions(self) -> None:
        """Do nothing: the environments have no clients."""

    async def rollout(
        self, messages: Sequence[Message], *, id: str, group: str, **_: object
    ) -> Trajectory:
        """Run one conversation; for its `id`, see `agentloop.Agent`."""
        name, later = id.rsplit(".", 1)
        index, *agent = later.split("+")
        number, task = _numbers(name)
        prompt = [number, task, 2 * int(index) + bool(agent)]
        return await self._rollout(messages[-1]["content"], id, group, prompt)

    async def _rollout(self, question: str, key: str, group: str, prompt: list[int]) -> Trajectory:
        turn = Turn(end=TurnEnd.STOP)

        def take(chunk: Chunk) -> None:
            start = len(turn.output_ids)
            turn.output_ids += chunk.ids
            turn.logprobs += chunk.logprobs
            if chunk.ids:
                turn.versions.append(VersionSpan(chunk.version, start, len(turn.output_ids)))

        try:
            await self.router.generate(
                Generation(f"{key}.t", key, prompt, Sampling(), _NUM_REPLY + 1, (), group=group),
                vocab_size=_VOCAB_SIZE,
                on_chunk=take,
                on_placed=lambda *_: None,
                on_moved=lambda *_: None,
            )
        except ServerUnavailable as error:
            return Trajectory(key, prompt, [turn], StopReason.INFRASTRUCTURE, str(error))
        finally:
            self.router.forget(key, is_complete=True)
        is_easy = prompt[1] % 7 == 3  # all of such a group are correct: it has no signal
        right, broken, failed = turn.output_ids[0] % 2, turn.output_ids[1], turn.output_ids[2]
        answer = _answer(question) if is_easy or right else "wrong"
        turn.text = f"\\boxed{{{answer}}}"
        status = ToolCallStatus.ERROR if failed % 3 == 0 else ToolCallStatus.OK
        turn.calls = [ToolCall("c", "python", {}, "", 0, 1)]
        turn.results = [ToolResult("c", "python", status, "", 0, 0, 1)]
        # Held-out tasks are not retried.
        is_broken = broken % 13 == 0 and "held-out" not in key
        reason = StopReason.INFRASTRUCTURE if is_broken else StopReason.ANSWERED
        return Trajectory(key, prompt, [turn], reason, answer=turn.text)


def _numbers(group: str) -> tuple[int, int]:
    """Return the numbers of a group and of its task.

    Raises:
        RequestError: The task is one of those that are refused.
    """
    number, task = int(group.partition("-")[0]), int(group.rpartition("-")[2])
    if task % 11 == 5 and "held-out" not in group:
        raise RequestError(f"task {task} is one of those that are refused")
    return number, task


def _answer(question: str) -> str:
    first, op, second = question.partition("?")[0].split()[2:5]
    value = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}[op]
    return str(value(int(first), int(second)))


# --- a life of the runtime ------------------------------------------------------------------------


@dataclass
class Fuse:
    """Kills `victim` at the `at`-th check; never if `at` is None.

    It is checked before and after each effect that outlives the runtime.
    """

    at: int | None = None
    victim: Callable[[Path], int] = lambda _: os.getpid()
    num_asked: int = 0

    def ask(self, run: Path) -> None:
        if self.num_asked == self.at:
            strike(run, self.victim(run))
        self.num_asked += 1


def strike(run: Path, pid: int) -> None:
    """Kill a process and record that first; do nothing if `pid` is 0."""
    if pid:
        (run / STRUCK).parent.mkdir(parents=True, exist_ok=True)
        (run / STRUCK).touch()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def learner_of(run: Path) -> int:
    """Return the learner's process id; 0 if there is none yet."""
    try:
        return int((run / PID).read_text())
    except (FileNotFoundError, ValueError):
        return 0


class _StderrProgress:
    """Prints progress to stderr."""

    def __call__(self, line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    say = __call__

    def show(self, standing: RunStatus) -> None:
        pass


def live(run: Path, overrides: list[str], fuse: Fuse) -> None:
    """Run one life of the runtime with simulated parts, in a process of its own.

    Like `agentloop train`, or `agentloop train --resume` if the run has begun.

    Raises:
        AgentLoopError: The run cannot be resumed.
    """
    parts: Any = wiring
    parts.Runtime = PlayedRuntime
    parts.plot_runs = lambda *_: None  # saves a second of matplotlib
    commands: Any = learner_module
    commands._COMMAND = (sys.executable, "-m", "bench.kill_learner")
    interrupted: tuple[tuple[type, str], ...] = ((GroupQueue, "_transaction"), (KeptLearner, "ask"))
    for owner, name in interrupted:
        setattr(owner, name, _asking(getattr(owner, name), fuse, run))
    for name in ("add_metrics", "add_group"):
        setattr(RunFolder, name, _asking_now(getattr(RunFolder, name), fuse, run))
    config = run / "config.toml"
    resume = run if config.is_file() else None
    sources: tuple[list[Path], list[str]] = ([config], []) if resume else ([], overrides)
    settings = load_settings(TrainSettings, *sources)
    anyio.run(functools.partial(parts.train, settings, _StderrProgress(), resume=resume))
    (run / TICKS).write_text(str(fuse.num_asked))


def _asking(work: Callable[P, Awaitable[T]], fuse: Fuse, run: Path) -> Callable[P, Awaitable[T]]:
    @functools.wraps(work)
    async def do(*arguments: P.args, **named: P.kwargs) -> T:
        fuse.ask(run)
        result = await work(*arguments, **named)
        fuse.ask(run)
        return result

    return do


def _asking_now(work: Callable[P, T], fuse: Fuse, run: Path) -> Callable[P, T]:
    @functools.wraps(work)
    def do(*arguments: P.args, **named: P.kwargs) -> T:
        fuse.ask(run)
        result = work(*arguments, **named)
        fuse.ask(run)
        return result

    return do
