"""Benchmark of weight sync by disk and by process group: its duration, and its effect on streams.

    python -m bench.handover load [--layers 8] [--hidden 1024] [--servers 1] [--ranks 2] [--zero 3]
    python -m bench.handover stream [--streams 8] [--prompt 200] [--tokens 400] [--rounds 5]

It uses a model of random weights with the small model's tokenizer (`--layers 0`: the small model
itself), in float32 unless `--dtype` says otherwise, real SGLang servers and a real learner.

load: each round syncs once by disk (in the temporary folder), once by disk in /dev/shm, and once by
broadcast, in turn, while the servers are idle. Reported is the time from asking the learner until
the last server serves again, and the servers' part of it.

stream: requests are streamed from each server while weights are synced, once per round, in every
way in turn. Reported is the pause of a server (from requesting it to the answer to resuming); and,
as ratios to that pause, the longest time without any token of the server and the longest silence of
any of its streams. Both are measured from the pause until each stream has received five more
tokens. A stream counts as lost if tokens are missing or its version spans have gaps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import anyio

from agentloop.inference.processes.supervise import ServerSettings, sglang_servers
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import ControlClient, http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.models import SMALL
from agentloop.training.learner_client.client import Learner, start_learner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import PublishRequest
from agentloop.training.learner_client.settings import LearnerSettings
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served, publisher
from agentloop.training.weight_sync.transport import Publisher
from bench.command import parser_for

TIMEOUT_S = 300.0
AFTER = 5  # tokens of each stream after a weight sync that are still measured


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Write configuration and tokenizer; the learner creates the weights."""
    if not layers:
        shutil.copytree(SMALL, folder)
        return
    shutil.copytree(SMALL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))


class TimedControl(ControlClient):
    """Records the times between a pause and its end."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.pauses: list[tuple[float, float]] = []
        self._paused_s = 0.0

    async def post(self, path: str, *arguments: Any, **more: Any) -> Any:
        if path == "/pause_generation":
            self._paused_s = time.monotonic()
        answer = await super().post(path, *arguments, **more)
        if path == "/continue_generation":
            self.pauses.append((self._paused_s, time.monotonic()))
        return answer


class TimedServer(SGLangServer):
    """Records its pauses; its requests ignore the end token."""

    def __init__(self, url: str, session: aiohttp.ClientSession, **more: Any) -> None:
        super().__init__(url, session, **more)
        self._control = self.timed = TimedControl(self.url, session)

    @property
    def pauses(self) -> list[tuple[float, float]]:
        return self.timed.pauses

    async def generate(self, ids: Sequence[int], params: dict[str, Any], **more: Any) -> None:
        await super().generate(ids, params | {"ignore_eos": True}, **more)


@dataclass
class Parts:
    learner: Learner
    router: Router
    servers: list[TimedServer]
    folder: Path

    def publisher(self, settings: WeightsSettings) -> Publisher:
        return publisher(settings, self.learner, self.folder / "run")


@asynccontextmanager
async def parts(options: argparse.Namespace, folder: Path, tokens: int) -> AsyncIterator[Parts]:
    """Start a learner, servers with `tokens` of KV cache, and a router."""
    make_model(folder / "model", options.layers, options.hidden)
    learner_settings = LearnerSettings(
        model=folder / "model",
        init="random" if options.layers else "pretrained",
        zero_stage=options.zero,
        publish_dtype=options.dtype,
        bucket_mib=options.bucket_mib,
    )
    async with AsyncExitStack() as stack:
        learner, _ = await stack.enter_async_context(
            start_learner(
                learner_settings,
                RanksSettings(nproc_per_node=options.ranks),
                log_dir=folder / "logs",
                on_progress=print,
            )
        )
        first = folder / "first"
        request = PublishRequest(folder=first, version="0")
        published = await learner.ask(request, timeout_s=TIMEOUT_S)
        print(f"{published.num_bytes / 1e6:.0f} MB of weights")
        settings = ServerSettings(
            count=options.servers,
            max_total_tokens=tokens,
            dtype=options.dtype,
            extra_args=("--disable-overlap-schedule", *options.server_args),  # for in_place
        )
        processes = await stack.enter_async_context(
            sglang_servers(first, settings, log_dir=folder / "logs", on_progress=print)
        )
        session = await stack.enter_async_context(http_session())
        servers = [TimedServer(process.url, session) for process in processes]
        router = await stack.enter_async_context(Router.open(servers, RouterSettings()))
        yield Parts(learner, router, servers, folder)


async def load(options: argparse.Namespace, folder: Path, shm: Path) -> None:
    ways = {
        "disk": WeightsSettings(),
        "disk, /dev/shm": WeightsSettings(folder=shm),
        "broadcast": WeightsSettings(transport="broadcast"),
    }
    async with parts(options, folder, 4096) as running:
        publishers = {name: running.publisher(way) for name, way in ways.items()}
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        checksums = set()
        for number in range(options.rounds):
            for name, way in publishers.items():
                started = time.monotonic()
                published = await way.publish(f"{number} {name[-1]}", timeout_s=TIMEOUT_S)
                came = await Served(running.router).sync(published, timeout_s=TIMEOUT_S)
                times[name].append((time.monotonic() - started, came.seconds))
                checksums.add(came.checksum)
                await way.tidy()
        print(f"{len(checksums)} checksum(s)")
        for name, pairs in times.items():
            totals, load = zip(*pairs, strict=True)
            print(
                f"{name}: median {statistics.median(totals):.2f} s ({min(totals):.2f} to "
                f"{max(totals):.2f}), of them {statistics.median(load):.2f} s "
                "while servers are stale"
            )


@dataclass
class Stream:
    """A request: the times of its tokens, and the versions that sampled them."""

    server: str = ""
    came_s: list[float] = field(default_factory=list)
    last: Chunk | None = None

    async def run(self, router: Router, number: int, options: argparse.Namespace) -> None:
        def take(chunk: Chunk) -> None:
            self.came_s += [time.monotonic()] * len(chunk.ids)
            if chunk.end is not None:
                self.last = chunk

        def on_placed(server: str, _: Any) -> None:
            self.server = server

        name = f"{number}-{random.random()}"
        prompt = random.choices(range(3, 500), k=options.prompt)
        generation = Generation(name, name, prompt, Sampling(), options.tokens, ())
        await router.generate(
            generation,
            vocab_size=512,
            on_chunk=take,
            on_placed=on_placed,
            on_moved=lambda _, reason: print("moved:", reason),
        )

    def is_whole(self, num_tokens: int, num_versions: int) -> bool:
        """Return whether all tokens arrived and the version spans cover them, one per weight
        sync."""
        assert self.last is not None
        spans = self.last.versions
        edges = [0, *(edge for span in spans for edge in (span.start, span.end)), num_tokens]
        covered = all(end == start for end, start in zip(edges[::2], edges[1::2], strict=True))
        return covered and (len(self.came_s), len(spans)) == (num_tokens, num_versions)


def longest(came_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return the longest time between two tokens that overlaps this interval."""
    pairs = itertools.pairwise(came_s)
    return max(b - a for a, b in pairs if b > begin_s and a < end_s)


async def stream_once(
    running: Parts, way: WeightsSettings, options: argparse.Namespace
) -> tuple[list[tuple[float, float, float, float]], int]:
    """Stream while weights are synced; return the measurements and the number of lost streams.

    A measurement is, per weight sync and server in seconds: its pause, its silence, the longest
    silence of its streams, and the usual time between tokens.
    """
    source = running.publisher(way)
    streams = [Stream() for _ in range(options.streams * options.servers)]
    for server in running.servers:
        server.pauses.clear()
    async with anyio.create_task_group() as tasks:
        for number, stream in enumerate(streams):
            tasks.start_soon(stream.run, running.router, number, options)
        for number in range(options.rounds):
            published = await source.publish(str(time.monotonic()), timeout_s=TIMEOUT_S)
            wanted = (number + 1) * options.tokens // (options.rounds + 1)
            while min(len(stream.came_s) for stream in streams) < wanted:
                await anyio.sleep(0.01)
            await Served(running.router).sync(published, timeout_s=TIMEOUT_S)
            await source.tidy()
    measurements = []
    for server in running.servers:
        own_streams = [stream for stream in streams if stream.server == server.url]
        token_times = sorted(itertools.chain(*(stream.came_s for stream in own_streams)))
        for begin_s, end_s in server.pauses:
            after = [[came for came in stream.came_s if came > end_s] for stream in own_streams]
            paused_s = end_s - begin_s
            end_s = max(came[min(AFTER, len(came)) - 1] for came in after if came)
            measurements.append(
                (
                    paused_s,
                    longest(token_times, begin_s, end_s),
                    max(longest(stream.came_s, begin_s, end_s) for stream in own_streams),
                    statistics.median(b - a for a, b in itertools.pairwise(own_streams[0].came_s)),
                )
            )
    lost = sum(not s.is_whole(options.tokens, options.rounds + 1) for s in streams)
    return measurements, lost


async def stream(options: argparse.Namespace, folder: Path, shm: Path) -> None:
    num_kv_tokens = 2 * options.streams * (options.prompt + options.tokens) + 4096
    ways = {
        (by, pause): WeightsSettings(
            transport=by, pause=pause, folder=shm if by == "disk" else None
        )
        for by in ("disk", "broadcast")
        for pause in ("retract", "in_place")
    }
    async with parts(options, folder, num_kv_tokens) as running:
        measurements: dict[Any, list[tuple[float, float, float, float]]] = defaultdict(list)
        lost: dict[Any, int] = defaultdict(int)
        for _ in range(options.repeats):
            for name, way in ways.items():
                rows, num_lost = await stream_once(running, way, options)
                measurements[name] += rows
                lost[name] += num_lost
    print("| by | pause | paused, ms | usual token, ms | server silent | a stream silent | lost |")
    print("|---|---|---|---|---|---|---|")
    for (by, pause), rows in measurements.items():
        paused, _, _, token = (statistics.median(column) for column in zip(*rows, strict=True))
        silent, stream_silent = ([row[index] / row[0] for row in rows] for index in (1, 2))
        print(
            f"| {by} | {pause} | {paused * 1e3:.0f} | {token * 1e3:.0f} | "
            f"{_ratio(silent)} | {_ratio(stream_silent)} | {lost[by, pause]} |"
        )


def _ratio(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def parser() -> argparse.ArgumentParser:
    parser = parser_for("handover", __doc__)
    parser.add_argument("what", choices=("load", "stream"))
    for name, value in (
        ("layers", 8), ("hidden", 1024), ("servers", 1), ("ranks", 2), ("zero", 3), ("rounds", 5),
        ("bucket-mib", 512), ("streams", 8), ("prompt", 200), ("tokens", 400), ("repeats", 1),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--server-args", nargs="*", default=(), help="further options of SGLang")
    return parser


def main() -> None:
    options = parser().parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        run = load if options.what == "load" else stream
        anyio.run(run, options, Path(folder), Path(shm))


if __name__ == "__main__":
    main()
