"""The parts of `python -m bench.gpu` that change weights: a learner, servers, and streams that run.

It uses a model of random weights with the small model's tokenizer (`num_layers` 0: the small model
itself), real SGLang servers and a real learner.
"""

from __future__ import annotations

import itertools
import json
import random
import shutil
import statistics
import time
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

__all__ = ["Options", "make_model", "parts", "stream_once"]

TIMEOUT_S = 300.0
AFTER = 5  # tokens of each stream after a weight sync that are still measured


@dataclass(frozen=True)
class Options:
    """A model, a learner, servers, and the streams that they serve.

    Attributes:
        num_prompt: Tokens of each stream's prompt; `num_output` of its reply.
        num_rounds: Weight syncs while the streams run.
        server_args: Further options of SGLang.
        has_spans: Whether the server tells which tokens are of which version.
    """

    num_layers: int
    dtype: str
    num_streams: int
    num_output: int
    num_prompt: int = 200
    num_rounds: int = 2
    hidden: int = 1024
    server_args: tuple[str, ...] = ()
    has_spans: bool = True


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

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        super().__init__(url, session)
        self.pauses: list[tuple[float, float]] = []
        self._paused_s = 0.0

    async def post(self, path: str, body: object, *, timeout_s: float = TIMEOUT_S) -> Any:
        if path == "/pause_generation":
            self._paused_s = time.monotonic()
        answer = await super().post(path, body, timeout_s=timeout_s)
        if path == "/continue_generation":
            self.pauses.append((self._paused_s, time.monotonic()))
        return answer


class TimedServer(SGLangServer):
    """Records its pauses; its requests ignore the end token."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        super().__init__(url, session)
        self._control = self.timed = TimedControl(self.url, session)

    @property
    def pauses(self) -> list[tuple[float, float]]:
        return self.timed.pauses

    async def generate(self, ids: Sequence[int], params: dict[str, object], **more: Any) -> None:
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
async def parts(options: Options, folder: Path, tokens: int) -> AsyncIterator[Parts]:
    """Start a learner, servers with `tokens` of KV cache, and a router."""
    make_model(folder / "model", options.num_layers, options.hidden)
    learner_settings = LearnerSettings(
        model=folder / "model",
        init="random" if options.num_layers else "pretrained",
        zero_stage=1,
        publish_dtype=options.dtype,
    )
    async with AsyncExitStack() as stack:
        learner, _ = await stack.enter_async_context(
            start_learner(
                learner_settings,
                RanksSettings(nproc_per_node=1),
                log_dir=folder / "logs",
                on_progress=print,
            )
        )
        first = folder / "first"
        request = PublishRequest(folder=first, version="0")
        published = await learner.ask(request, timeout_s=TIMEOUT_S)
        print(f"{published.num_bytes / 1e6:.0f} MB of weights")
        settings = ServerSettings(
            count=1,
            max_total_tokens=tokens,
            dtype=options.dtype,
            extra_args=options.server_args,
        )
        processes = await stack.enter_async_context(
            sglang_servers(first, settings, log_dir=folder / "logs", on_progress=print)
        )
        session = await stack.enter_async_context(http_session())
        servers = [TimedServer(process.url, session) for process in processes]
        router = await stack.enter_async_context(Router.open(servers, RouterSettings()))
        yield Parts(learner, router, servers, folder)


@dataclass
class Stream:
    """A request: the times of its tokens, and the versions that sampled them."""

    server: str = ""
    came_s: list[float] = field(default_factory=list)
    last: Chunk | None = None

    async def run(self, router: Router, number: int, options: Options) -> None:
        def take(chunk: Chunk) -> None:
            self.came_s += [time.monotonic()] * len(chunk.ids)
            if chunk.end is not None:
                self.last = chunk

        def on_placed(server: str, _: object) -> None:
            self.server = server

        name = f"{number}-{random.random()}"
        prompt = random.choices(range(3, 500), k=options.num_prompt)
        generation = Generation(name, name, prompt, Sampling(), options.num_output, ())
        await router.generate(
            generation,
            vocab_size=512,
            on_chunk=take,
            on_placed=on_placed,
            on_moved=lambda _, reason: print("moved:", reason),
        )

    def is_whole(self, num_tokens: int, num_versions: int) -> bool:
        """Return whether all tokens arrived and the version spans cover them, one per weight
        sync; with 0 versions, whether all tokens arrived."""
        assert self.last is not None
        spans = self.last.versions
        edges = [0, *(edge for span in spans for edge in (span.start, span.end)), num_tokens]
        covered = all(end == start for end, start in zip(edges[::2], edges[1::2], strict=True))
        covered = covered or not num_versions
        return covered and (len(self.came_s), len(spans)) == (num_tokens, num_versions)


def longest(came_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """Return the longest time between two tokens that overlaps this interval."""
    pairs = itertools.pairwise(came_s)
    return max(b - a for a, b in pairs if b > begin_s and a < end_s)


async def stream_once(
    running: Parts, way: WeightsSettings, options: Options
) -> tuple[list[tuple[float, float, float, float]], int]:
    """Stream while weights are synced; return the measurements and the number of lost streams.

    A measurement is, per weight sync and server in seconds: its pause, its silence, the longest
    silence of its streams, and the usual time between tokens.
    """
    source = running.publisher(way)
    streams = [Stream() for _ in range(options.num_streams)]
    for server in running.servers:
        server.pauses.clear()
    async with anyio.create_task_group() as tasks:
        for number, stream in enumerate(streams):
            tasks.start_soon(stream.run, running.router, number, options)
        for number in range(options.num_rounds):
            published = await source.publish(str(time.monotonic()), timeout_s=TIMEOUT_S)
            wanted = (number + 1) * options.num_output // (options.num_rounds + 1)
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
    num_versions = options.num_rounds + 1 if options.has_spans else 0
    lost = sum(not s.is_whole(options.num_output, num_versions) for s in streams)
    return measurements, lost
