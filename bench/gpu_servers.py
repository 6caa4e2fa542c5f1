"""The parts of `python -m bench.gpu` that need SGLang."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from agentloop.environments.tasks.sources import Task
from agentloop.inference.processes.keep_alive import keep_alive
from agentloop.inference.processes.supervise import (
    ServerProcess,
    ServerSettings,
    sglang_servers,
)
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import ControlClient, http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.training.learner_client.protocol import StepRequest
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served
from agentloop.trajectory import Trajectory
from bench import countdown_model, gpu_carry, handover
from bench.command import say
from bench.gpu_model import PartFailed, Row, Setup
from bench.learner import agentic_batch

TIMEOUT_S = 300.0
_RECIPE = Path(__file__).parents[1] / "agentloop" / "cli" / "recipes" / "one-gpu.toml"
_SHARE = ("--mem-fraction-static", "0.35")  # of the GPU's memory; the learner gets the rest
_GREEDY = Sampling(temperature=0.0)
_PROMPT = 20  # tokens
_NUM_SYNCS = 4


def _gpu_arguments() -> tuple[str, ...]:
    return (*_SHARE, *(gpu_carry.SERVER_ARGS if gpu_carry.in_use() else ()))


def server_settings(setup: Setup, *extra_args: str) -> ServerSettings:
    """Return the settings of the parts' servers."""
    options: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_total_tokens": 16_384}
    if setup.on_gpu:
        options, extra_args = (
            {"device": "cuda", "dtype": "bfloat16"},
            (*_gpu_arguments(), *extra_args),
        )
    # A first start on a GPU compiles kernels; the part's own limit is not much longer.
    return ServerSettings(start_timeout_s=400, extra_args=extra_args, **options)


# --- a model whose replies are known ------------------------------------------------------------


@dataclass
class _Reply:
    """A reply of `length` tokens, which are known beforehand."""

    length: int
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    begun_s: float = 0.0
    first_s: float = 0.0

    @classmethod
    def of(cls, length: int) -> _Reply:
        return cls(length, [*random.choices(countdown_model.FILLER, k=_PROMPT), length])

    async def sample(self, router: Router, name: str) -> None:
        """Let a server generate the reply.

        Raises:
            PartFailed: Its ids are not the right ones.
        """

        def take(chunk: Chunk) -> None:
            if chunk.ids and not self.ids:
                self.first_s = time.perf_counter() - self.begun_s
            self.ids += chunk.ids

        self.begun_s = time.perf_counter()
        generation = Generation(
            name, name, self.prompt, _GREEDY, self.length + 1, (countdown_model.EOS,)
        )
        await router.generate(
            generation,
            vocab_size=countdown_model.VOCAB_SIZE,
            on_chunk=take,
            on_placed=lambda *_: None,
            on_moved=lambda *_: None,
        )
        if self.ids != countdown_model.countdown(self.length):
            raise PartFailed(f"a reply of {self.length} tokens has {len(self.ids)}, or other ones")


@dataclass
class _Server:
    process: ServerProcess
    router: Router
    settings: ServerSettings


@asynccontextmanager
async def _countdown_server(setup: Setup, *extra_args: str) -> AsyncIterator[_Server]:
    model = countdown_model.save(setup.folder / "countdown")
    settings = server_settings(setup, "--skip-tokenizer-init", *extra_args)
    async with (
        sglang_servers(model, settings, log_dir=setup.folder, on_progress=say) as (process,),
        http_session() as session,
        Router.open([SGLangServer(process.url, session)], RouterSettings()) as router,
    ):
        yield _Server(process, router, settings)


async def _sample_all(router: Router, replies: Sequence[_Reply]) -> float:
    """Return the seconds that all of these take together."""
    started = time.perf_counter()
    async with anyio.create_task_group() as tasks:
        for number, reply in enumerate(replies):
            tasks.start_soon(reply.sample, router, f"{number}-{random.random()}")
    return time.perf_counter() - started


def _replies(setup: Setup) -> list[_Reply]:
    longest = min(setup.size.num_tokens, countdown_model.LONGEST)
    return [
        _Reply.of(random.randint(longest // 2, longest)) for _ in range(setup.size.num_requests)
    ]


async def serve(setup: Setup) -> list[Row]:
    """Replies of known ids, many at the same time: all of them are right."""
    async with _countdown_server(setup) as server:
        await _sample_all(server.router, _replies(setup)[:2])  # to warm up
        replies = _replies(setup)
        seconds = await _sample_all(server.router, replies)
    first_ms = [reply.first_s * 1e3 for reply in replies]
    figures = {
        "tokens/s": sum(reply.length for reply in replies) / seconds,
        "first token p50, ms": statistics.median(first_ms),
        "first token at most, ms": max(first_ms),
    }
    return [{"case": f"{len(replies)} requests of a tiny model", **figures}]


async def kill_server(setup: Setup) -> list[Row]:
    """The only server is killed while it generates: each reply is whole once it is back."""
    async with _countdown_server(setup) as server, anyio.create_task_group() as keeper:
        keeper.start_soon(keep_alive, [server.process], server.settings, server.router.replicas)
        replies = _replies(setup)

        async def kill() -> float:
            with anyio.fail_after(TIMEOUT_S):
                while sum(len(reply.ids) for reply in replies) < 4 * len(replies):
                    await anyio.sleep(0.01)
            if server.process.pid is None:
                raise PartFailed("the server has no process id")
            os.killpg(os.getpgid(server.process.pid), signal.SIGKILL)
            return time.perf_counter()

        async with anyio.create_task_group() as tasks:
            for number, reply in enumerate(replies):
                tasks.start_soon(reply.sample, server.router, f"killed-{number}")
            killed_s = await kill()
        seconds = time.perf_counter() - killed_s
        keeper.cancel_scope.cancel()
    return [{"case": f"{len(replies)} replies in flight", "seconds until all are whole": seconds}]


async def release(setup: Setup) -> list[Row]:
    """A server gives its memory back, and generates the same after it has resumed."""
    model = str(setup.folder / "countdown")
    async with (
        _countdown_server(setup, "--enable-memory-saver") as server,
        http_session() as session,
    ):
        control = ControlClient(server.process.url, session)
        replies = _replies(setup)
        await _sample_all(server.router, replies)
        used = [_gpu_mib()]
        await control.post("/release_memory_occupation", {}, timeout_s=TIMEOUT_S)
        used.append(_gpu_mib())
        await control.post("/resume_memory_occupation", {}, timeout_s=TIMEOUT_S)
        # What the weights were is lost.
        client = SGLangServer(server.process.url, session)
        await client.update_weights(model, "default", timeout_s=TIMEOUT_S)
        used.append(_gpu_mib())
        await _sample_all(server.router, _replies(setup))
    if used[1] > 0.5 * used[0]:
        raise PartFailed(f"after the release {used[1]} of {used[0]} MiB are still in use")
    names = ("MiB before", "MiB released", "MiB resumed")
    return [{"case": "a server of a tiny model", **dict(zip(names, used, strict=True))}]


def _gpu_mib() -> int:
    query = ("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits")
    result = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    return int(result.stdout.split()[0])


# --- a learner's weights ------------------------------------------------------------------------


def handover_options(setup: Setup, *server_args: str) -> handover.Options:
    """Return the options for a learner and a server that share the device."""
    tiny = setup.size.layers < 4
    return handover.Options(
        num_layers=0 if tiny else 8,
        dtype="bfloat16" if setup.on_gpu else "float32",
        num_streams=min(16, setup.size.num_requests),
        num_output=400 if tiny else 2000,  # several syncs must fit into a stream
        server_args=(*_gpu_arguments(), *server_args) if setup.on_gpu else server_args,
        has_spans=not gpu_carry.in_use(),
    )


async def _sync_weights(setup: Setup, way: WeightsSettings) -> list[Row]:
    """Sync weights after each of some steps; every tensor must be the learner's."""
    times, batch = [], setup.folder / "batch"
    agentic_batch(0, 2048, 512).save(batch)
    async with handover.parts(handover_options(setup), setup.folder, 16_384) as parts:
        source, checksums = parts.publisher(way), set()
        for number in range(_NUM_SYNCS):
            await parts.learner.ask(StepRequest(batch=batch, lr=1e-3), timeout_s=TIMEOUT_S)
            started = time.perf_counter()
            published = await source.publish(str(number), timeout_s=TIMEOUT_S)
            came = await Served(parts.router).sync(published, timeout_s=TIMEOUT_S)
            times.append(time.perf_counter() - started)
            if came.failed or came.num_verified != 1:
                raise PartFailed(f"not verified, tensor by tensor: {came}")
            checksums.add(came.checksum)
            await source.tidy()
    if len(checksums) != _NUM_SYNCS:
        raise PartFailed("weights of different steps have the same checksum")
    case = f"{_NUM_SYNCS} syncs, each verified"
    return [{"case": case, "seconds": statistics.median(times), "at most": max(times)}]


async def disk(setup: Setup) -> list[Row]:
    """Weights by a folder in memory, verified."""
    return await _sync_weights(setup, WeightsSettings(folder=setup.folder / "shared"))


async def broadcast(setup: Setup) -> list[Row]:
    """Weights by a broadcast, verified: NCCL on GPUs, Gloo on a CPU."""
    return await _sync_weights(setup, WeightsSettings(transport="broadcast"))


async def pause(setup: Setup) -> list[Row]:
    """Weights change while streams run; no token is lost, and each has its version."""
    options = handover_options(setup)
    num_kv_tokens = 2 * options.num_streams * (options.num_prompt + options.num_output) + 4096
    async with handover.parts(options, setup.folder, num_kv_tokens) as parts:
        measurements, num_lost = await handover.stream_once(parts, WeightsSettings(), options)
    if num_lost:
        raise PartFailed(f"{num_lost} streams lost tokens or versions")
    paused, silent, stream_silent, _ = map(statistics.median, zip(*measurements, strict=True))
    case = f"{options.num_streams} streams" + ", versions not told" * (not options.has_spans)
    figures = {
        "paused, ms": paused * 1e3,
        "server silent, ms": silent * 1e3,
        "a stream silent, ms": stream_silent * 1e3,
    }
    return [{"case": case, **figures}]


# --- a whole run --------------------------------------------------------------------------------


def train_arguments(setup: Setup, model: Path, num_steps: int) -> list[str]:
    """Return the arguments of `agentloop` for steps of the recipe for one GPU.

    A model of random weights never solves a task, so its rewards are drawn, and groups of equal
    rewards are kept.
    """
    prompts, rollouts, tokens = (8, 8, 1024) if setup.on_gpu else (2, 4, 60)
    if setup.on_gpu:
        arguments = json.dumps(_gpu_arguments())
        server = ["server.dtype=bfloat16", f"server.extra_args={arguments}"]
    else:
        server = ["server.device=cpu", "server.max_total_tokens=16384", "server.extra_args=[]"]
    return [
        *("train", str(_RECIPE), f"model={model}", f"run.folder={setup.folder / 'runs'}"),
        *("tasks.kind=arithmetic", "tasks.paths=[]", "tasks.held_out=8", "loop.evaluate_tasks=8"),
        *("sandbox.backend=process", f"reward.function={__name__}:random_reward"),
        *("roc.reject_equal_reward=false", f"roc.down_sample_to_n={rollouts // 2}"),
        *(f"loop.steps={num_steps}", f"loop.prompts_per_step={prompts}"),
        *(f"loop.group_size={rollouts}", "loop.checkpoint_every=0", "loop.evaluate_every=0"),
        *(f"budget.max_response_tokens={tokens}", "learner.optimizer.warmup_steps=1"),
        *server,
    ]


def random_reward(trajectory: Trajectory, task: Task) -> float:
    """Return a reward at random."""
    return float(random.random() < 0.5)


async def train(setup: Setup) -> list[Row]:
    """Steps of agentloop/cli/recipes/one-gpu.toml with a small model of random weights."""
    num_steps = 10 if setup.on_gpu else 2
    model = await anyio.to_thread.run_sync(random_model, setup)
    command = [sys.executable, "-m", "agentloop", *train_arguments(setup, model, num_steps)]
    started = time.perf_counter()
    with (setup.folder / "train.log").open("wb") as log:
        done = await anyio.run_process(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    seconds = time.perf_counter() - started
    if done.returncode:
        output = (setup.folder / "train.log").read_text(errors="replace").strip()
        say(output)
        raise PartFailed(f"the run ended with {done.returncode}: {output.splitlines()[-1:]}")
    metrics = setup.folder / "runs" / _RECIPE.stem / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [row for row in rows if "learner/num_updates" in row]
    if len(steps) != num_steps or any(row["weights/num_failed"] for row in steps):
        raise PartFailed(f"{len(steps)} of {num_steps} steps, or weights that failed: {steps}")
    return [
        {
            "case": f"{num_steps} steps",
            "seconds": seconds,
            "mismatch of engine and learner, KL": max(
                abs(row["learner/mismatch_kl"]) for row in steps
            ),
        }
    ]


def random_model(setup: Setup) -> Path:
    """Write a model of random weights with the small model's tokenizer."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = setup.folder / "random-model"
    handover.make_model(folder, 8 if setup.on_gpu else 2, 1024 if setup.on_gpu else 128)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder
