"""New weights into real SGLang servers, from a real learner, by disk and by broadcast, also while
they generate."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from agentloop.errors import ServerError
from agentloop.inference.processes.supervise import ServerProcess, ServerSettings, plan, running
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.models import SMALL
from agentloop.training.learner_client.batch import Sample, write_batch
from agentloop.training.learner_client.client import Learner, start_learner
from agentloop.training.learner_client.launch import RanksSettings
from agentloop.training.learner_client.protocol import ScoreRequest, StepRequest
from agentloop.training.learner_client.settings import LearnerSettings, OptimizerSettings
from agentloop.training.weight_sync.checksums import Tensor, checksum
from agentloop.training.weight_sync.disk import PublishedFolder
from agentloop.training.weight_sync.layout import Layout
from agentloop.training.weight_sync.settings import WeightsSettings
from agentloop.training.weight_sync.sync import Served, SyncResult, publisher
from tests.commands import run_python
from tests.patience import patient
from tests.support import eventually, spans_cover

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(900),  # servers are started, and one of them twice
    pytest.mark.usefixtures("sglang_installed"),
]

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

SETTINGS = LearnerSettings(
    model=SMALL,
    zero_stage=3,
    publish_dtype="float32",
    micro_batch_tokens=256,
    bucket_mib=1,  # of the small model's 2.5 MiB
    collective_timeout_s=60,
    optimizer=OptimizerSettings(lr=3e-3, warmup_steps=0),
    # The small model's tensors are so small that ZeRO 3 would not share them out.
    deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
)
GROUP = WeightsSettings(transport="broadcast")
TIMEOUT_S = 120.0


class Endless(SGLangServer):
    """What it generates goes on to the last token that was asked for."""

    async def generate(self, ids: Sequence[int], params: dict[str, Any], **more: Any) -> None:
        await super().generate(ids, params | {"ignore_eos": True}, **more)

    async def score(self, ids: Sequence[int]) -> list[float]:
        """The log-probability of each id but the first, by the weights that it has now."""
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        answer = await self._control.post("/generate", body)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


NUM_PROMPT, NUM_TOKENS = 40, 1000  # seconds, in which the weights have to change


@dataclass
class Answer:
    """A turn, as its reader sees it."""

    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    last: Chunk | None = None

    async def stream(self, router: Router, name: str, num_tokens: int = NUM_TOKENS) -> None:
        def take(chunk: Chunk) -> None:
            self.ids += chunk.ids
            self.logprobs += chunk.logprobs
            if chunk.end is not None:
                self.last = chunk

        def moved(server: str, reason: str) -> None:
            raise AssertionError(f"it left {server}: {reason}")

        await router.generate(
            Generation(name, name, self.prompt, Sampling(), num_tokens, ()),
            vocab_size=512,
            on_chunk=take,
            on_placed=lambda *_: None,
            on_moved=moved,
        )

    def until(self, version: str) -> int:
        """Where `version` begins, after another one. All tokens have one."""
        assert self.last is not None
        spans = self.last.versions
        assert len(self.ids) == len(self.logprobs) == NUM_TOKENS
        assert spans_cover(spans, NUM_TOKENS)
        assert len(spans) == 2
        assert spans[1].version == version
        return spans[1].start

    async def mismatch(self, server: Endless) -> NDArray[np.float64]:
        """Between what the engine said of each token as it was sampled, and what a server's weights
        now say of it in one pass."""
        result = (await server.score(self.prompt + self.ids))[NUM_PROMPT - 1 :]
        differ: NDArray[np.float64] = np.abs(np.subtract(result, self.logprobs))
        return differ


async def answers_over(router: Router, sync: Callable[[], Awaitable[SyncResult]]) -> list[Answer]:
    """Four streams, whose weights change when each has had a good part of its tokens."""
    rng = random.Random(0)
    answers = [Answer(rng.choices(range(3, 500), k=NUM_PROMPT)) for _ in range(4)]
    async with anyio.create_task_group() as tasks:
        for number, answer in enumerate(answers):
            tasks.start_soon(answer.stream, router, f"over-{number}")
        await eventually(
            lambda: min(len(single.ids) for single in answers) > 100, within_s=TIMEOUT_S
        )
        assert not (await sync()).failed
    return answers


@dataclass
class Started:
    """Two servers that begin with the same model, and a learner of it."""

    processes: list[ServerProcess]
    learner: Learner
    num: int = 0  # of the newest version


@dataclass
class Parts:
    """Some of the servers, the learner, and what is between them."""

    folder: Path
    started: Started
    servers: list[Endless]
    router: Router

    @property
    def learner(self) -> Learner:
        return self.started.learner

    def states(self) -> list[str]:
        return [view.state.value for view in self.router.view()]

    @property
    def version(self) -> str:
        return str(self.started.num)

    async def sync(self, settings: WeightsSettings) -> SyncResult:
        self.started.num += 1
        way = publisher(settings, self.learner, self.folder)
        start_s = time.monotonic()
        published = await way.publish(self.version, timeout_s=TIMEOUT_S)
        came = await Served(self.router).sync(published, timeout_s=TIMEOUT_S)
        took_s = time.monotonic() - start_s
        print(f"by {settings.transport}: {took_s:.2f} s, of them {came.seconds:.2f}")
        return came

    async def step(self) -> None:
        """Weights that differ from the last ones."""
        path = self.folder / "step"
        rng = random.Random(self.started.num)
        ids = rng.choices(range(3, 500), k=100)
        sample = Sample(ids, [0] * 50 + [1] * 50, [0.0] * 50 + [-6.0] * 50, 1.0, 0)
        await anyio.to_thread.run_sync(write_batch, path, [sample])
        await self.learner.ask(StepRequest(batch=path), timeout_s=TIMEOUT_S)

    async def mismatch(self, server: SGLangServer) -> float:
        """The largest difference between what the engine says of the tokens that it samples, at
        temperature 1, and what the learner says of them."""
        prompt = random.Random(1).choices(range(3, 500), k=40)
        ids: list[int] = []
        logprobs: list[float] = []

        def take(chunk: Chunk) -> None:
            ids.extend(chunk.ids)
            logprobs.extend(chunk.logprobs)

        params = Sampling().to_sglang(max_new_tokens=60, stop_ids=())
        await server.generate(prompt, params, rid=f"check-{random.random()}", on_chunk=take)
        assert len(ids) == 60
        sample = Sample([*prompt, *ids], [0] * 40 + [1] * 60, [0.0] * 40 + logprobs, 1.0, 0)
        batch, out = self.folder / "check", self.folder / "scored"
        await anyio.to_thread.run_sync(write_batch, batch, [sample])
        await self.learner.ask(ScoreRequest(batch=batch, out=out), timeout_s=TIMEOUT_S)
        result = load_file(out)["logprobs"][40:]
        return float(np.abs(result - np.asarray(logprobs, np.float32)).max())


@pytest.fixture(autouse=True)
def short_group_timeout() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("agentloop.training.weight_sync.process_group.GROUP_TIMEOUT_S", 20.0)
        yield


@pytest.fixture(scope="module")
async def all_started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Started]:
    """For all tests here, in their order: only the first one finds them as they began."""
    folder = tmp_path_factory.mktemp("handover")
    settings = ServerSettings(max_total_tokens=8192, dtype="float32")
    launches = [
        *plan(SMALL, settings, log_dir=folder / "first"),
        *plan(SMALL, settings, log_dir=folder / "second"),
    ]
    async with (
        running(launches, on_progress=print) as processes,
        start_learner(
            SETTINGS, RanksSettings(nproc_per_node=2), log_dir=folder, on_progress=print
        ) as (learner, _),
    ):
        yield Started(processes, learner)


@asynccontextmanager
async def parts(started: Started, folder: Path, *, num_servers: int) -> AsyncIterator[Parts]:
    async with http_session() as session:
        servers = [Endless(process.url, session) for process in started.processes[:num_servers]]
        async with Router.open(servers, RouterSettings()) as router:
            yield Parts(folder, started, servers, router)


async def test_engine_has_what_the_learner_has_whichever_way(
    all_started: Started, tmp_path: Path
) -> None:
    async with parts(all_started, tmp_path, num_servers=1) as near:
        (server,) = near.servers
        assert await near.mismatch(server) < 1e-4, "both begin with the same model"
        checksums = []
        for settings, second in ((GROUP, WeightsSettings()), (WeightsSettings(), GROUP)):
            await near.step()
            assert await near.mismatch(server) > 1e-3, "a step changes the learner alone"
            first = await near.sync(settings)
            assert (first.failed, near.states()) == ({}, ["healthy"])
            assert first.num_verified == 1, "every tensor is the learner's"
            assert await near.mismatch(server) < 1e-4
            again = await near.sync(second)
            assert again.checksum == first.checksum
            assert again.num_verified == 1
            assert await near.mismatch(server) < 1e-4
            assert await server.weight_version() == near.version
            checksums.append(first.checksum)
        assert checksums[0] != checksums[1]

        # By disk: below, without a learner.
        await near.step()
        answers = await answers_over(near.router, partial(near.sync, GROUP))
        cuts = [answer.until(near.version) for answer in answers]
        differ = [await answer.mismatch(server) for answer in answers]
        earlier = largest(single[:cut] for single, cut in zip(differ, cuts, strict=True))
        later = largest(single[cut:] for single, cut in zip(differ, cuts, strict=True))
        assert earlier > 1e-2, "these were sampled by the last weights"
        assert later < 1e-3
        assert near.states() == ["healthy"]
        assert await near.mismatch(server) < 1e-4


async def test_single_server_with_other_weights_serves_nothing(
    all_started: Started, tmp_path: Path
) -> None:
    """It reads files in which a number differs from the learner's; then a folder that is whole, but
    whose checksums are of other weights."""
    async with parts(all_started, tmp_path, num_servers=1) as near:
        await near.step()
        served, way = Served(near.router), publisher(WeightsSettings(), near.learner, tmp_path)
        published = await way.publish("31", timeout_s=TIMEOUT_S)
        assert isinstance(published, PublishedFolder)
        assert (await served.sync(published, timeout_s=TIMEOUT_S)).num_verified == 1
        (file,) = published.folder.glob("*.safetensors")
        complete = await anyio.Path(file).read_bytes()
        await anyio.Path(file).write_bytes(complete[:-1] + bytes([complete[-1] ^ 64]))
        with pytest.raises(ServerError, match="differs from what the learner published"):
            await served.sync(published, timeout_s=TIMEOUT_S)
        assert near.states() == ["stale"]
        await anyio.Path(file).write_bytes(complete)
        await served.sync(published, timeout_s=TIMEOUT_S)

        await near.step()
        remaining = await way.publish("32", timeout_s=TIMEOUT_S)
        give = SGLangServer.update_weights

        async def stale(self: SGLangServer, folder: str, *reported: Any, **more: Any) -> Any:
            return await give(self, str(published.folder), *reported, **more)

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(SGLangServer, "update_weights", stale)
            with pytest.raises(ServerError, match="differs from the learner's"):
                await served.sync(remaining, timeout_s=TIMEOUT_S)
        assert near.states() == ["stale"]
        assert (await served.sync(remaining, timeout_s=TIMEOUT_S)).num_verified == 1
        await near.sync(WeightsSettings())


def test_hash_of_a_gpu_is_that_of_sglangs_kernel() -> None:
    """Run by Triton's interpreter, which needs no GPU."""
    result = importlib.util.find_spec("sglang")
    assert result is not None
    assert result.origin is not None
    file = Path(result.origin).parent / "kernels" / "ops" / "memory" / "gpu_tensor_hash.py"
    if not file.exists():
        pytest.fail(f"{file} is gone: checksums.VERSIONS knows another SGLang")
    done = run_python("-c", KERNEL, str(file), env={"TRITON_INTERPRET": "1"}, timeout_s=300)
    for line in done.stdout.splitlines():
        size, expected = map(int, line.split())
        data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        layout = Layout("cuda", "bfloat16", 1, 1)
        assert int(checksum("x", [Tensor("uint8", data)], layout, 0), 16) == expected
    assert len(done.stdout.splitlines()) == 4


# As gpu_tensor_hash calls the kernels: it asserts a GPU before.
KERNEL = """
import importlib.util, sys
import numpy as np, torch
spec = importlib.util.spec_from_file_location("kernel", sys.argv[1])
m = importlib.util.module_from_spec(spec)
spec.loader.exec_module(m)
torch.Tensor.is_cuda = True
launch = m.hash_tiles32_kernel_blocked
class Plain:  # the interpreter has no cache to choose
    def __getitem__(self, grid):
        return lambda *a, **k: launch[grid](*a, **{**k, "USE_CG": False})
m.hash_tiles32_kernel_blocked = Plain()
for size in (5, 1000, 32769, 100003):
    data = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    print(size, m.gpu_tensor_hash(torch.from_numpy(data)))
"""


def largest(differences: Iterable[NDArray[np.float64]]) -> float:
    """The largest in any answer: one that repeats itself is sure of it under all weights."""
    return max(float(single.max()) for single in differences)


def make_others(folder: Path, by: float) -> None:
    """The small model, with weights that differ by so much of their size."""
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    shutil.copytree(SMALL, folder)
    generator = torch.Generator().manual_seed(0)
    for path in folder.glob("*.safetensors"):
        weights = {
            name: tensor
            * (1 + by * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
            for name, tensor in load_file(path).items()
        }
        save_file(weights, path, metadata={"format": "pt"})


@asynccontextmanager
async def small_server(all_started: Started) -> AsyncIterator[Endless]:
    """Yield a server with the small model, which it also has at the end."""
    async with http_session() as session:
        server = Endless(all_started.processes[1].url, session)
        await server.update_weights(str(SMALL), "default", timeout_s=TIMEOUT_S)
        try:
            yield server
        finally:
            with anyio.CancelScope(shield=True):
                await server.update_weights(str(SMALL), "default", timeout_s=TIMEOUT_S)


async def test_running_turns_continue_with_the_new_weights(
    all_started: Started, tmp_path: Path
) -> None:
    """No turn is lost, each token has the version that it was sampled under, and no later turn is
    given what the old weights computed of its prompt."""
    folder = tmp_path / "others"
    await anyio.to_thread.run_sync(make_others, folder, 0.3)
    published = PublishedFolder("1", folder)
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(small_server(all_started))
        router = await stack.enter_async_context(Router.open([server], RouterSettings()))
        before = Answer(random.Random(1).choices(range(3, 500), k=NUM_PROMPT))
        await before.stream(router, "before", 60)
        assert router.view()[0].num_parked_tokens == NUM_PROMPT + 60

        async def changed() -> SyncResult:
            came = await Served(router).sync(published, timeout_s=TIMEOUT_S)
            (view,) = router.view()
            assert (view.state.value, view.num_parked_tokens) == ("healthy", 0)
            return came

        answers = await answers_over(router, changed)
        assert router.view()[0].num_running == 0
        new = [await answer.mismatch(server) for answer in answers]
        again = [Answer(before.prompt + before.ids) for _ in range(2)]
        for answer in again:
            await answer.stream(router, "before", 60)
        assert again[0].last is not None
        assert again[0].last.cached_tokens == 0
        assert again[1].last is not None
        assert again[1].last.cached_tokens > NUM_PROMPT
        await server.update_weights(str(SMALL), "default", timeout_s=TIMEOUT_S)
        old = [await answer.mismatch(server) for answer in answers]
    cuts = [answer.until("1") for answer in answers]
    for cut, by_new, by_old in zip(cuts, new, old, strict=True):
        print(
            f"{cut} tokens; by the old weights, before {by_old[:cut].max():.1e}, after "
            f"{by_old[cut:].mean():.2f}; by the new, before {by_new[:cut].mean():.2f}, after "
            f"{by_new[cut]:.1e}, {by_new[cut:].mean():.1e}, most {by_new[cut:].max():.1e}"
        )
        assert by_old[:cut].max() < 1e-3
        assert by_new[cut:].max() < 1e-3
    assert largest(single[cut : cut + 10] for single, cut in zip(old, cuts, strict=True)) > 1e-3


def send(process: ServerProcess, number: signal.Signals) -> None:
    """To a server's first process and its children."""
    assert process.pid is not None
    os.killpg(os.getpgid(process.pid), number)


async def test_receiving_server_that_dies_or_freezes_is_left_out(
    all_started: Started, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with parts(all_started, tmp_path, num_servers=2) as near:
        assert not (await near.sync(GROUP)).failed
        victim, second = all_started.processes
        receive = SGLangServer.receive

        async def dying(self: SGLangServer, *arguments: Any, **more: Any) -> None:
            if self.url == victim.url and victim.alive:
                send(victim, signal.SIGKILL)
                await victim.wait_dead()
            await receive(self, *arguments, **more)

        monkeypatch.setattr(SGLangServer, "receive", dying)
        await near.step()
        came = await near.sync(GROUP)
        assert came.loaded == [second.url]
        assert list(came.failed) == [victim.url]
        assert near.states()[0] in ("stale", "dead")
        assert near.states()[1] == "healthy"
        assert await near.mismatch(near.servers[1]) < 1e-4

        # It comes back, with the weights of its start.
        monkeypatch.undo()
        near.router.replicas.mark_exited(victim.url, "killed")
        near.router.replicas.mark_restarting(victim.url)
        await victim.restart(print)
        await eventually(lambda: near.states()[0] == "stale", within_s=60)
        assert await Served(near.router).sync_stale(came, timeout_s=TIMEOUT_S)
        assert near.states() == ["healthy", "healthy"]
        assert await near.mismatch(near.servers[0]) < 1e-4

        async def freezing(self: SGLangServer, *arguments: Any, **more: Any) -> None:
            if self.url == victim.url:
                send(victim, signal.SIGSTOP)
            await receive(self, *arguments, **more)

        monkeypatch.setattr(SGLangServer, "receive", freezing)
        await near.step()
        came = await near.sync(GROUP)
        assert came.loaded == [second.url]
        assert await near.mismatch(near.servers[1]) < 1e-4
        monkeypatch.undo()
        send(victim, signal.SIGCONT)
        await eventually(lambda: near.states()[0] == "stale", within_s=60)
        with anyio.fail_after(patient(TIMEOUT_S)):  # it has to come to itself first
            while not await Served(near.router).sync_stale(came, timeout_s=TIMEOUT_S):
                print("once more")
        assert near.states() == ["healthy", "healthy"]
        assert await near.mismatch(near.servers[0]) < 1e-4

        # Once the learner has others, a server that is stale waits for those.
        await near.step()
        checksums, failed = await came.published.sync_to(near.servers, timeout_s=TIMEOUT_S)
        assert not checksums
        assert all("updates are gone" in reason for reason in failed.values())
