"""Benchmark of SGLang's stream interval: what frames of several tokens save, and what they delay.

    python -m bench.stream_interval --intervals 1,2,4,8,16 --streams 32 --rounds 5

A real SGLang server on the CPU, with the small model, samples `--tokens` tokens for each of
`--streams` concurrent requests. The intervals take turns. CPU is that of the server's processes
(the model's included) and of this process, per token. A call that closes in mid-turn waits for its
frame: on average for half an interval of tokens, `delay`, at the rate that one stream has in the
same run. The end of a turn waits for nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import uuid
from pathlib import Path

import anyio

from agentloop.inference.processes.supervise import ServerSettings, sglang_servers
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.models import SMALL
from bench.command import numbers, parser_for, say
from bench.sandbox import cpu_of_tree, own_cpu_s

_Row = dict[str, float]


async def _round(
    server: SGLangServer, pid: int, interval: int, options: argparse.Namespace
) -> _Row:
    sampling = Sampling().to_sglang(max_new_tokens=options.tokens, stop_ids=())
    num_frames = num_tokens = 0

    def take(chunk: Chunk) -> None:
        nonlocal num_frames, num_tokens
        num_frames += 1
        num_tokens += len(chunk.ids)

    async def stream() -> None:
        params = {**sampling, "stream_interval": interval}
        await server.generate([1, 2, 3], params, rid=uuid.uuid4().hex, on_chunk=take)

    server_s, own_s, wall_s = cpu_of_tree(pid), own_cpu_s(), time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for _ in range(options.streams):
            tasks.start_soon(stream)
    wall_s = time.perf_counter() - wall_s
    assert num_tokens == options.streams * options.tokens
    return {
        "tokens_per_s": num_tokens / wall_s,
        "frames": num_frames / options.streams,
        "server_ms": 1000 * (cpu_of_tree(pid) - server_s) / num_tokens,
        "own_ms": 1000 * (own_cpu_s() - own_s) / num_tokens,
        "delay_ms": 1000 * (interval - 1) / 2 * wall_s / options.tokens,
    }


async def measure(options: argparse.Namespace) -> dict[int, _Row]:
    """Return the medians of all rounds by interval."""
    rows: dict[int, list[_Row]] = {interval: [] for interval in options.intervals}
    with tempfile.TemporaryDirectory() as folder:
        servers = sglang_servers(SMALL, ServerSettings(), log_dir=Path(folder), on_progress=say)
        async with servers as processes, http_session() as session:
            pid = processes[0].pid
            assert pid is not None
            server = SGLangServer(processes[0].url, session)
            await _round(server, pid, 1, options)
            for number in range(options.rounds):
                for interval, figures in rows.items():
                    figures.append(await _round(server, pid, interval, options))
                    say(f"round {number + 1}, interval {interval}: {figures[-1]}")
    return {
        interval: {name: statistics.median(row[name] for row in figures) for name in figures[0]}
        for interval, figures in rows.items()
    }


def main() -> None:
    parser = parser_for("stream_interval", __doc__)
    parser.add_argument("--intervals", type=numbers, default=[1, 2, 4, 8, 16])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    rows = anyio.run(measure, options, backend_options={"use_uvloop": True})
    print("| interval | frames per turn | CPU ms per token: server | ours | tokens/s | delay |")
    print("|---|---|---|---|---|---|")
    for interval, row in rows.items():
        print(
            f"| {interval} | {row['frames']:.0f} | {row['server_ms']:.3f} | {row['own_ms']:.3f} "
            f"| {row['tokens_per_s']:,.0f} | {row['delay_ms']:.0f} ms |"
        )


if __name__ == "__main__":
    main()
