"""Benchmark of tool dispatch: the latency from a call's last token to its start, and the time
saved.

    python -m bench.dispatch latency     256 rollouts against paced loopback servers
    python -m bench.dispatch saving      real SGLang, real turns with three calls and with one

`latency`: a load generator (bench.streaming's) plays turns that each call the real sandbox once.
Reported is the time from the moment it *sent* the frame that closes a call to the moment the call's
code began in the worker, on one clock. It includes loopback, event loop, parsing, dispatch, the
pool's queue and the worker's fork, and also the time for which the generator itself delays the
frame until its own loop writes it. The floor is the same path with nothing beside it: then one
rollout at a time, in the same processes.

`saving`: the same greedy turns, alternately dispatched as each call closes and at the end of the
turn. The call sleeps `--tool-ms` on its way to the sandbox, as a slower tool would. The saving per
turn is bounded by min(tool time, generation left after the call closes): with one call and nothing
after it there is none, which the null case shows.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio
import httpx

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import HERMES
from agentloop.agent.formats.values import Schemas
from agentloop.agent.rollout import Budget, Rollout
from agentloop.agent.sandbox_tools import PythonCode
from agentloop.agent.text_stream import TokenCodec
from agentloop.agent.tools import Arguments, RunTool, ToolOutput
from agentloop.aio import collect_garbage_rarely, exempt_from_collection
from agentloop.inference.processes.supervise import ServerSettings, sglang_servers
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.sampling import Sampling
from agentloop.models import SMALL
from agentloop.sandbox import Pool, PoolSettings
from agentloop.trajectory import ToolCall, ToolCallStatus, Trajectory
from bench.command import helper_process, quantile, say

THREE = "Compute 12*7, 8+5 and 90-3."
ONE = "What is 37 times 48?"


# --- latency ------------------------------------------------------------------------------------


CALL = """<tool_call>
{"name": "python_code_with_standard_io", "arguments": {"code": "print(37*48)"}}
</tool_call>"""

_NUM_ALONE = 3

_rids: ContextVar[list[str]] = ContextVar("rids")


class _Logged(SGLangServer):
    """Records the requests made by the rollout of the current task, in order."""

    async def generate(
        self, ids: Sequence[int], params: dict[str, object], *, rid: str, **options: Any
    ) -> None:
        _rids.get().append(rid)
        await super().generate(ids, params, rid=rid, **options)


async def _latency(options: argparse.Namespace) -> dict[str, object]:
    chat = ChatFormat.load(SMALL)
    ending = [*chat.tokenizer.encode(CALL, add_special_tokens=False).ids, chat.end_id]
    load = ["bench.streaming", "--load", "--servers", "16"]
    load += ["--step-ms", str(options.step_ms), "--ending", json.dumps(ending)]
    began_s: dict[str, float] = {}
    dispatched_s: dict[str, float] = {}
    with helper_process(*load) as line:
        urls = json.loads(line)
        async with (
            Pool(PoolSettings(backend=options.sandbox), on_progress=say) as pool,
            http_session() as session,
            Router.open([_Logged(url, session) for url in urls], RouterSettings()) as router,
        ):
            await pool.run("pass")
            collect_garbage_rarely()  # as the commands do
            exempt_from_collection()
            budget = Budget(max_turns=options.turns)
            tool = PythonCode(pool)

            async def play_rollout(spread_s: float = 2.0) -> None:
                await anyio.sleep(random.random() * spread_s)  # their starts
                _rids.set([])
                messages = [{"role": "user", "content": "x"}]
                run = Rollout(router, chat, messages, [tool], budget=budget, with_text=False)
                trajectory = await run.run()
                for rid, result in zip(_rids.get(), trajectory.results, strict=True):
                    assert result.status is ToolCallStatus.OK, result
                    began_s[rid] = run.started_s + result.started_s
                    dispatched_s[rid] = run.started_s + result.dispatched_s

            async with anyio.create_task_group() as tasks:
                for _ in range(options.rollouts):
                    tasks.start_soon(play_rollout)
            crowd = began_s.copy()
            for _ in range(_NUM_ALONE):
                await play_rollout(0)
        sent_s = httpx.get(urls[0] + "/sent", trust_env=False).json()
    alone = {rid: moment for rid, moment in began_s.items() if rid not in crowd}
    return {
        "calls": len(crowd),
        "sent_to_start": _spread(sent_s, crowd),
        "of_it_sent_to_dispatch": _spread(sent_s, {rid: dispatched_s[rid] for rid in crowd}),
        "of_it_dispatch_to_start": _spread(dispatched_s, crowd),
        "floor": _spread(sent_s, alone),
    }


def _spread(earlier: dict[str, float], later: dict[str, float]) -> dict[str, float]:
    latencies_ms = [(moment - earlier[rid]) * 1000 for rid, moment in later.items()]
    shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    return {name: round(quantile(latencies_ms, share), 3) for name, share in shares.items()}


# --- saving -------------------------------------------------------------------------------------


class _AtTurnEnd:
    """Delays every call until the turn has ended, as other loops do."""

    def __init__(self, chat: TokenCodec, schemas: Schemas, id_prefix: str) -> None:
        self._stream = HERMES.make_calls(chat, schemas, id_prefix)
        self._held: list[ToolCall] = []

    def feed(self, ids: Sequence[int]) -> list[ToolCall]:
        self._held += self._stream.feed(ids)
        return []

    def finish(self) -> list[ToolCall]:
        return [*self._held, *self._stream.finish()]


class _Slow(PythonCode):
    """The built-in tool with additional latency."""

    delay_s = 0.1

    @asynccontextmanager
    async def open(self) -> AsyncIterator[RunTool]:
        async with super().open() as run:

            async def later(arguments: Arguments, /) -> ToolOutput:
                await anyio.sleep(self.delay_s)
                return await run(arguments)

            yield later


async def _saving(options: argparse.Namespace) -> dict[str, object]:
    walls: dict[tuple[str, str], list[float]] = {}
    ids: dict[str, set[tuple[int, ...]]] = {}
    chat = ChatFormat.load(SMALL)
    with tempfile.TemporaryDirectory() as log_dir:
        servers = sglang_servers(SMALL, ServerSettings(), log_dir=Path(log_dir), on_progress=say)
        async with (
            Pool(PoolSettings(backend=options.sandbox), on_progress=say) as pool,
            servers as processes,
            http_session() as session,
            Router.open([SGLangServer(processes[0].url, session)], RouterSettings()) as router,
        ):
            tool = _Slow(pool)
            tool.delay_s = options.tool_ms / 1000

            async def turn(question: str) -> Trajectory:
                messages = [{"role": "user", "content": question}]
                sampling = Sampling(temperature=0)
                return await Rollout(router, chat, messages, [tool], sampling).run()

            await turn(THREE)
            await turn(ONE)
            for _ in range(options.rounds):
                for question in (THREE, ONE):
                    for mode, family in (
                        ("as it closes", HERMES),
                        ("at the end", replace(HERMES, make_calls=_AtTurnEnd)),
                    ):
                        chat.family = family
                        trajectory = await turn(question)
                        first = trajectory.turns[0]
                        walls.setdefault((question, mode), []).append(
                            first.ended_s - first.started_s
                        )
                        ids.setdefault(question, set()).add(tuple(trajectory.ids))
    assert all(len(distinct) == 1 for distinct in ids.values()), "the trajectories differ"
    medians = {key: statistics.median(values) * 1000 for key, values in walls.items()}
    return {
        name: {
            "as_it_closes_ms": medians[question, "as it closes"],
            "at_the_end_ms": medians[question, "at the end"],
            "saved_ms": medians[question, "at the end"] - medians[question, "as it closes"],
        }
        for name, question in (("three calls and text", THREE), ("one call, nothing after", ONE))
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("what", choices=("latency", "saving"))
    parser.add_argument("--rollouts", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=30.0)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tool-ms", type=float, default=100.0)
    parser.add_argument("--sandbox", default="docker", choices=("docker", "process"))
    options = parser.parse_args()
    run = _latency if options.what == "latency" else _saving
    figures = anyio.run(run, options, backend_options={"use_uvloop": True})
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
