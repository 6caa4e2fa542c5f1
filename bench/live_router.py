"""Benchmark of the router with real SGLang servers on this machine's CPU, and of other gateways.

    python -m bench.live_router                        2 servers, every arm, 3 rounds
    python -m bench.live_router --servers 4 --pace     4 servers at the speed of a modelled GPU
    python -m bench.live_router check                  compares bench/server_model.py with a server
    --gateways-python PATH                             Python with sglang-router and smg installed

Needs SGLang (`python -m agentloop.inference.install`) and, for the other gateways, the dependency
group `bench`. Without them: `--arms kv,static`.

The servers are SGLang's own, with a model that counts down (bench/countdown_model.py): the length
of a reply is encoded in its prompt, so that the trace knows it and no scheduler does, and each
token of each stream is checked. Every arm plays the same rollouts, those of bench/router.py with
all lengths divided by `--scale`; the KV cache is scaled alike, so that it is as scarce as there. So
are SGLang's own constants in tokens, through its settings: the growth that it reserves
(SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION), the number of steps in which its estimate falls
(SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS), its allowance after a retraction (SGLANG_RETRACT_DECODE_STEPS)
and its chunks of prefill. Tools take proportionally less time.

All rollouts start at once in every arm, as gateways are used, except in `kv+groups`, where the
router admits groups by capacity, as the runtime does. Arms alternate in shuffled rounds on the same
servers, whose caches are flushed in between; each gateway is restarted.

A request that fails, or a stream with a wrong token, ends its rollout, which is then refused: its
tokens do not count as goodput. TTFT counts from when a turn was requested, and for the first turn
of a rollout from the run's start, which includes our queue and our admission.

With `--pace` a forward step lasts at least as long as on the modelled GPU (bench/pace.py). Without
it, servers that share cores give each other time, and an idle server costs little.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np

from agentloop.errors import AgentLoopError
from agentloop.inference.processes import guardian as guardian_module
from agentloop.inference.processes.supervise import ServerSettings, sglang_servers
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.scheduling.admission import AdmissionLimits
from agentloop.inference.scheduling.kv_policy import Costs
from agentloop.inference.scheduling.wait_queue import STARVATION_THRESHOLD_S
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.frames import Chunk, OnChunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from bench.command import parser_for, quantile, say, words
from bench.countdown_model import EOS, FILLER, LONGEST, VOCAB_SIZE, countdown, save
from bench.gateway_policies import POLICIES, make_policy
from bench.pace import Pace, environment
from bench.router import Options, Result, RolloutSpec, Simulation, TurnSpec, make_trace
from bench.server_model import ServerParams

GATEWAYS = {
    f"{gateway}:{policy}": (module, policy)
    for gateway, module in (("sglang-router", "sglang_router.launch_router"), ("smg", "smg"))
    for policy in ("cache_aware", "power_of_two")
}
OURS = (*POLICIES, "kv+groups")
_BUDGET = 12_288  # tokens of a rollout before scaling, as in bench/router.py
_RESERVE_TOKENS = 256  # before scaling, as in agentloop/inference/router.py
_OWN = 2  # ids that distinguish siblings
_GREEDY = Sampling(temperature=0.0)


# --- played rollouts ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Turn:
    """A reply of `length` tokens, then a tool that takes `tool_s` and answers with `answer`
    (ids)."""

    length: int
    answer: tuple[int, ...]
    tool_s: float


@dataclass(frozen=True, slots=True)
class Script:
    """A predetermined rollout; siblings share the first `num_shared` ids of the prompt."""

    key: str
    group: str
    prompt: tuple[int, ...]
    num_shared: int
    turns: tuple[Turn, ...]

    @property
    def num_output(self) -> int:
        return sum(turn.length for turn in self.turns)


def scale_trace(trace: Sequence[RolloutSpec], scale: float) -> list[RolloutSpec]:
    """Divide all lengths and times by `scale`, keeping space for distinguishing ids."""

    def turn_of(turn: TurnSpec) -> TurnSpec:
        return TurnSpec(
            min(LONGEST, max(1, round(turn.num_output / scale))),
            max(2, round(turn.num_tool / scale)),
            turn.tool_s / scale,
        )

    return [
        RolloutSpec(
            spec.group,
            max(_OWN + 2, round(spec.num_prompt / scale)),
            tuple(turn_of(turn) for turn in spec.turns),
        )
        for spec in trace
    ]


def scripts_of(trace: Sequence[RolloutSpec], seed: int) -> list[Script]:
    """Create ids for these lengths. Prompts are shared within a group except for their last ids."""
    rng = random.Random(f"ids {seed}")
    shared: dict[str, tuple[int, ...]] = {}
    members: dict[str, int] = {}
    scripts = []
    for spec in trace:
        num_shared = spec.num_prompt - _OWN - 1
        if spec.group not in shared:
            shared[spec.group] = tuple(rng.choices(FILLER, k=num_shared))
            members[spec.group] = 0
        lengths = [turn.num_output for turn in spec.turns]
        turns = []
        for turn, then in zip(spec.turns, [*lengths[1:], None], strict=True):
            answer = [*rng.choices(FILLER, k=turn.num_tool - 1), then] if then else []
            turns.append(Turn(turn.num_output, tuple(answer), turn.tool_s if then else 0.0))
        own_ids = (*rng.choices(FILLER, k=_OWN), lengths[0])
        key = f"{spec.group}.{members[spec.group]}"
        members[spec.group] += 1
        scripts.append(
            Script(key, spec.group, shared[spec.group] + own_ids, num_shared, tuple(turns))
        )
    return scripts


@dataclass(slots=True)
class Figures:
    """The results of one arm in one round."""

    arm: str
    round: int
    makespan_s: float = 0.0
    goodput: float = 0.0  # sampled tokens of whole rollouts per second
    makespan_90_s: float = 0.0  # until 90% of the rollouts had ended
    num_refused: int = 0
    num_retractions: int = 0
    prefix_hits: float = 0.0  # fraction of the prompts' tokens that was cached
    ttft_p50_s: float = 0.0  # all turns; the first of a rollout counts from the run's start
    ttft_p99_s: float = 0.0
    turn_ttft_p99_s: float = 0.0  # turns after the first: from the tool's answer
    num_moves: int | None = None  # turns that left their trajectory's server; None: unknown
    late: float = 0.0  # with --pace: fraction of steps that took longer than modelled
    errors: dict[str, int] = field(default_factory=dict)


Send = Callable[[Generation, OnChunk], Awaitable[None]]
"""Sends one turn through a router; returns after the chunk with `end`."""

Gate = Callable[[str, Sequence[Script]], AbstractAsyncContextManager[object]]
"""A context that is entered before a group's rollouts start and left when they have ended."""


@asynccontextmanager
async def open_gate(group: str, scripts: Sequence[Script]) -> AsyncIterator[None]:
    """Admit all groups at once."""
    yield


class Play:
    """Plays all rollouts through one router."""

    def __init__(self, scripts: Sequence[Script], send: Send, *, budget: int) -> None:
        """`budget` is the maximum number of tokens of a rollout, which is all that servers know."""
        self._scripts = scripts
        self._send = send
        self._budget = budget
        self._errors: dict[str, int] = {}
        self._started_s = 0.0
        self._ttft: list[float] = []
        self._turn_ttft: list[float] = []
        self._ended_s: list[float] = []
        self._num_whole_tokens = self._num_refused = self._num_retractions = 0
        self._num_prompt = self._num_cached = 0

    async def run(
        self,
        *,
        deadline_s: float,
        gate: Gate = open_gate,
        on_end: Callable[[str, bool], None] = lambda key, is_whole: None,
    ) -> Figures:
        """Play the rollouts and return the figures; rollouts that miss the deadline are refused.

        `on_end` is called with each rollout's key and whether it is complete.
        """
        groups: dict[str, list[Script]] = {}
        for script in self._scripts:
            groups.setdefault(script.group, []).append(script)
        started = self._started_s = time.perf_counter()

        async def play_group(group: str, scripts: Sequence[Script]) -> None:
            async with gate(group, scripts), anyio.create_task_group() as tasks:
                for script in scripts:
                    tasks.start_soon(play_one, script)

        async def play_one(script: Script) -> None:
            is_whole = await self._rollout(script)
            if is_whole:
                self._num_whole_tokens += script.num_output
            else:
                self._num_refused += 1
            self._ended_s.append(time.perf_counter() - started)
            on_end(script.key, is_whole)

        with anyio.move_on_after(deadline_s):
            async with anyio.create_task_group() as tasks:
                for group, scripts in groups.items():
                    tasks.start_soon(play_group, group, scripts)
        makespan_s = time.perf_counter() - started
        if unfinished := len(self._scripts) - len(self._ended_s):
            self._num_refused += unfinished
            self._errors[f"not done after {deadline_s:g} s"] = unfinished
        return Figures(
            arm="",
            round=0,
            makespan_s=makespan_s,
            goodput=self._num_whole_tokens / makespan_s,
            makespan_90_s=quantile(self._ended_s, 0.9),
            num_refused=self._num_refused,
            num_retractions=self._num_retractions,
            prefix_hits=self._num_cached / max(1, self._num_prompt),
            ttft_p50_s=quantile(self._ttft, 0.5),
            ttft_p99_s=quantile(self._ttft, 0.99),
            turn_ttft_p99_s=quantile(self._turn_ttft, 0.99),
            errors=self._errors,
        )

    async def _rollout(self, script: Script) -> bool:
        """Return whether the rollout is complete."""
        ids = list(script.prompt)
        for number, turn in enumerate(script.turns):
            reply: list[int] = []
            asked_s = time.perf_counter() if number else self._started_s
            first_s = math.nan

            def take(chunk: Chunk, reply: list[int] = reply) -> None:
                nonlocal first_s
                if not reply and chunk.ids:
                    first_s = time.perf_counter()
                reply += chunk.ids
                self._num_retractions += chunk.num_retractions
                self._num_cached += chunk.cached_tokens

            used = len(ids) - len(script.prompt)
            generation = Generation(
                rid=uuid.uuid4().hex,
                key=script.key,
                ids=list(ids),
                sampling=_GREEDY,
                max_new_tokens=max(turn.length, self._budget - used),
                stop_ids=(EOS,),
                group=script.group,
                num_shared=script.num_shared,
            )
            self._num_prompt += len(ids)
            try:
                await self._send(generation, take)
            except AgentLoopError as error:
                return self._record_error(f"{type(error).__name__}: {error}")
            if reply != countdown(turn.length):
                return self._record_error(f"wrong tokens in turn {number}")
            self._ttft.append(first_s - asked_s)
            if number:
                self._turn_ttft.append(first_s - asked_s)
            ids += reply
            ids += turn.answer
            if turn.tool_s:
                await anyio.sleep(turn.tool_s)
        return True

    def _record_error(self, reason: str) -> bool:
        reason = reason[:160]
        self._errors[reason] = self._errors.get(reason, 0) + 1
        return False


# --- arms -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bench:
    """The configuration shared by all arms."""

    urls: tuple[str, ...]
    http: aiohttp.ClientSession
    scripts: Sequence[Script]
    scale: float
    router: RouterSettings
    limits: AdmissionLimits
    costs: Costs
    gateways_python: str
    deadline_s: float
    log_dir: Path

    @property
    def budget(self) -> int:
        return round(_BUDGET / self.scale)

    async def run(self, arm: str) -> Figures:
        """Run an arm once, with empty caches."""
        for url in self.urls:
            await flush(self.http, url)
        return await (self._gateway(arm) if arm in GATEWAYS else self._ours(arm))

    async def _ours(self, arm: str) -> Figures:
        policy = partial(
            make_policy,
            arm.removesuffix("+groups"),
            costs=self.costs,
            starvation_threshold_s=STARVATION_THRESHOLD_S / self.scale,
        )
        servers = [SGLangServer(url, self.http) for url in self.urls]
        homes: dict[str, str] = {}
        num_moves = 0
        async with Router.open(
            servers,
            self.router,
            longest=self.budget,
            limits=self.limits,
            make_policy=policy,
            reserve_tokens=max(1, round(_RESERVE_TOKENS / self.scale)),
            starvation_threshold_s=STARVATION_THRESHOLD_S / self.scale,
        ) as router:

            async def send(generation: Generation, on_chunk: OnChunk) -> None:
                def on_placed(url: str, decision: object) -> None:
                    nonlocal num_moves
                    num_moves += homes.setdefault(generation.key, url) != url
                    homes[generation.key] = url

                await router.generate(
                    generation,
                    vocab_size=VOCAB_SIZE,
                    on_chunk=on_chunk,
                    on_placed=on_placed,
                    on_moved=lambda url, reason: None,
                )

            def admit(group: str, scripts: Sequence[Script]) -> AbstractAsyncContextManager[Any]:
                return router.group(group, len(scripts), scripts[0].num_shared)

            def forget(key: str, is_whole: bool) -> None:
                router.forget(key, is_complete=is_whole)

            play = Play(self.scripts, send, budget=self.budget)
            figures = await play.run(
                deadline_s=self.deadline_s,
                gate=admit if arm.endswith("+groups") else open_gate,
                on_end=forget,
            )
        figures.num_moves = num_moves
        return figures

    async def _gateway(self, arm: str) -> Figures:
        module, policy = GATEWAYS[arm]
        log_path = self.log_dir / f"{arm.replace(':', '-')}.log"
        async with gateway(
            self.gateways_python, module, policy, self.urls, self.http, log_path
        ) as url:
            client = SGLangServer(url, self.http)

            async def send(generation: Generation, on_chunk: OnChunk) -> None:
                params = generation.sampling.to_sglang(
                    max_new_tokens=generation.max_new_tokens, stop_ids=generation.stop_ids
                )
                await client.generate(generation.ids, params, rid=generation.rid, on_chunk=on_chunk)

            play = Play(self.scripts, send, budget=self.budget)
            return await play.run(deadline_s=self.deadline_s)


async def flush(http: aiohttp.ClientSession, url: str) -> None:
    """Flush an idle server's cache; raise TimeoutError after 30 s."""
    with anyio.fail_after(30):
        while True:
            async with http.post(f"{url}/flush_cache") as response:
                if response.status == 200:
                    return
            await anyio.sleep(0.1)


@asynccontextmanager
async def gateway(
    python: str,
    module: str,
    policy: str,
    urls: Sequence[str],
    http: aiohttp.ClientSession,
    log_path: Path,
) -> AsyncIterator[str]:
    """Start another gateway in front of the same servers, with its defaults; yield its URL when
    ready.

    Raises:
        RuntimeError: It did not become ready in a minute; with the tail of its log.
    """
    port = random.randrange(30_100, 32_000)
    guardian = (sys.executable, "-I", guardian_module.__file__, "--stop-timeout-s", "2", "--")
    subcommand = ["launch"] if module == "smg" else []
    with log_path.open("wb") as log:
        process = await anyio.open_process(
            [
                *(*guardian, python, "-m", module, *subcommand),
                *("--worker-urls", *urls, "--policy", policy),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--prometheus-port", str(port + 2000)),
                *("--worker-startup-check-interval", "1"),
            ],
            stdin=subprocess.PIPE,  # closes when we end, which ends the gateway
            stdout=subprocess.DEVNULL,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with anyio.move_on_after(60):
            while process.returncode is None and not await _is_ready(http, url):
                await anyio.sleep(0.1)
        if process.returncode is not None or not await _is_ready(http, url):
            tail = log_path.read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{module} did not become ready:\n{tail}")
        yield url
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(20):
            assert process.stdin is not None
            await process.stdin.aclose()
            await process.wait()


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    """Return whether the gateway answers and forwards a request to a server."""
    body = {
        "input_ids": [FILLER[0], 1],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
    }
    with contextlib.suppress(aiohttp.ClientError, TimeoutError):
        async with http.post(f"{url}/generate", json=body) as response:
            return response.status == 200
    return False


# --- one invocation -------------------------------------------------------------------------------


def modelled_gpu(scale: float, thinning: float) -> Pace:
    """Return the pace of the 14B model of `ServerParams`, scaled.

    Lengths are divided by `scale` and the number of sequences by `thinning`: each stands for that
    many, so that a step with a full pool takes as long as unscaled.
    """
    params = ServerParams()
    return Pace(
        prefill_s=params.prefill_s / scale,
        prefill_s_per_token=params.prefill_s_per_token * thinning,
        step_s=params.step_s,
        step_s_per_sequence=params.step_s_per_sequence * thinning,
        step_s_per_token=params.step_s_per_token * scale * thinning,
    )


@asynccontextmanager
async def servers(
    args: argparse.Namespace, pace: Pace | None
) -> AsyncIterator[tuple[list[str], Path]]:
    """Start SGLang with the countdown model; yield the URLs and the folder of logs and late
    steps."""
    params = scaled_params(args)
    knobs = {
        "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": str(params.clip),
        "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": str(params.decay_steps),
        "SGLANG_RETRACT_DECODE_STEPS": str(params.retract_steps),
    }
    with tempfile.TemporaryDirectory(prefix="live-router-") as name:
        folder = Path(name)
        if pace is not None:
            knobs |= environment(pace, folder)
        os.environ.update(knobs)  # supervise.py passes it on
        settings = ServerSettings(
            count=args.servers,
            device="cpu",
            max_total_tokens=args.capacity,
            extra_args=(
                "--skip-tokenizer-init",
                *("--chunked-prefill-size", str(params.chunk)),
                *("--schedule-conservativeness", str(params.conservativeness)),
                *("--load-snapshot-publish-interval", "1"),  # in steps, of which there are fewer
            ),
        )
        model = save(folder / "model")
        async with sglang_servers(model, settings, log_dir=folder, on_progress=say) as started:
            yield [server.url for server in started], folder


def scaled_params(args: argparse.Namespace) -> ServerParams:
    """Scale SGLang's constants in tokens by `--scale`, but not its speed."""
    params = ServerParams()

    def scaled_down(tokens: int) -> int:
        return max(1, round(tokens / float(args.scale)))

    return replace(
        params,
        capacity=args.capacity,
        chunk=max(64, scaled_down(params.chunk)),
        conservativeness=args.conservativeness,
        retract_half=False,
        clip=scaled_down(params.clip),
        decay_steps=scaled_down(params.decay_steps),
        retract_steps=scaled_down(params.retract_steps),
    )


def late_steps(folder: Path) -> tuple[int, int]:
    """Return the numbers of late steps and of all steps of all paced servers so far."""
    counts = [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]
    return sum(count["late"] for count in counts), sum(count["steps"] for count in counts)


def trace_of(args: argparse.Namespace) -> list[RolloutSpec]:
    trace = make_trace(args.seed, num_groups=args.groups * args.servers, group_size=args.group_size)
    return scale_trace(trace, args.scale)


def shuffled_rounds(arms: Sequence[str], num_rounds: int, seed: int) -> Iterator[tuple[int, str]]:
    """Yield each arm once per round, in a new order each time."""
    rng = random.Random(f"rounds {seed}")
    for number in range(num_rounds):
        for arm in rng.sample(arms, len(arms)):
            yield number, arm


async def compare(args: argparse.Namespace) -> list[Figures]:
    """Run all arms on the same servers."""
    pace = modelled_gpu(args.scale, 32 / args.group_size) if args.pace else None
    results: list[Figures] = []
    scripts = scripts_of(trace_of(args), args.seed)
    async with servers(args, pace) as (urls, folder), http_session() as http:
        bench = bench_of(args, urls, http, scripts, costs_of(pace), folder)
        for number, arm in shuffled_rounds(args.arms, args.rounds, args.seed):
            late_before, steps_before = late_steps(folder)
            figures = replace(await bench.run(arm), arm=arm, round=number)
            late, steps = late_steps(folder)
            figures.late = (late - late_before) / max(1, steps - steps_before)
            say(
                f"round {number} {arm}: {figures.makespan_s:.1f} s, {figures.goodput:,.0f} tok/s, "
                f"{figures.num_retractions} retractions, {figures.num_refused} refused"
                f"{', late %.0f%%' % (100 * figures.late) if pace else ''} {figures.errors or ''}"
            )
            results.append(figures)
            if args.json:
                args.json.write_text(
                    json.dumps([asdict(result) for result in results], indent=1) + "\n"
                )
    return results


def bench_of(
    args: argparse.Namespace,
    urls: Sequence[str],
    http: aiohttp.ClientSession,
    scripts: Sequence[Script],
    costs: Costs,
    folder: Path,
) -> Bench:
    return Bench(
        urls=tuple(urls),
        http=http,
        scripts=scripts,
        scale=args.scale,
        router=RouterSettings(probe_interval_s=args.probe_s),
        limits=admission_limits(args),
        costs=costs,
        gateways_python=args.gateways_python,
        deadline_s=args.deadline_s,
        log_dir=folder,
    )


def admission_limits(args: argparse.Namespace) -> AdmissionLimits:
    """Return our limits, with times scaled like the rollouts."""
    usual = AdmissionLimits()
    return AdmissionLimits(
        period_s=usual.period_s / args.scale, report_ttl_s=usual.report_ttl_s / args.scale
    )


def costs_of(pace: Pace | None) -> Costs:
    """Return the costs used by kv: those of the modelled device, or roughly those of this CPU."""
    if pace is not None:
        return _costs_like(pace)
    return Costs(
        prefill_s_per_token=2.5e-5,
        step_s=1e-3,
        step_s_per_sequence=2.3e-4,
        step_s_per_token=1e-7,
    )


def _costs_like(costs: Pace | ServerParams) -> Costs:
    return Costs(**{cost.name: getattr(costs, cost.name) for cost in fields(Costs)})


# --- comparison of the model with a server --------------------------------------------------------


async def check(args: argparse.Namespace) -> str:
    """Calibrate the model on one server, let both play the same rollouts, and return a table."""
    pace = modelled_gpu(args.scale, 32 / args.group_size) if args.pace else None
    trace = trace_of(args)
    rows = [
        "| arm | | makespan s | 90% done s | goodput tok/s | retractions | prefix hits | "
        "TTFT p99 s | moves |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    async with servers(args, pace) as (urls, folder), http_session() as http:
        params = await calibrate(urls[0], http, args)
        costs = _costs_like(params)
        bench = bench_of(args, urls, http, scripts_of(trace, args.seed), costs, folder)
        options = Options(
            num_servers=args.servers,
            params=params,
            costs=costs,
            admission=bench.limits,
            starvation_threshold_s=STARVATION_THRESHOLD_S / args.scale,
            tick_s=args.probe_s,
            report_lag_s=0.0,
            budget=bench.budget,
        )
        for arm in args.arms:
            model = _Modelled(trace, arm, args.seed, options).run()
            rows.append(_check_row(arm, "model", model))
            for _ in range(args.rounds):
                figures = await bench.run(arm)
                rows.append(_check_row(arm, "real", figures))
                say(rows[-1])
    fitted_params = ", ".join(f"{name} {value:.3g}" for name, value in asdict(params).items())
    return f"Calibrated: {fitted_params}.\n\n" + "\n".join(rows)


def _check_row(arm: str, kind: str, result: Figures | Result) -> str:
    return (
        f"| {arm} | {kind} | {result.makespan_s:.1f} | {result.makespan_90_s:.1f} | "
        f"{result.goodput:,.0f} | {result.num_retractions} | {100 * result.prefix_hits:.1f}% | "
        f"{result.ttft_p99_s:.2f} | {result.num_moves} |"
    )


class _Modelled(Simulation):
    """A simulation in virtual time in which all rollouts start at once, except for `kv+groups`."""

    def __init__(self, trace: Sequence[RolloutSpec], arm: str, seed: int, options: Options) -> None:
        self._admits = arm.endswith("+groups")
        super().__init__(trace, arm.removesuffix("+groups"), seed, options)

    def _may_start(self) -> bool:
        return super()._may_start() if self._admits else True


async def calibrate(
    url: str, http: aiohttp.ClientSession, args: argparse.Namespace
) -> ServerParams:
    """Fit the model's parameters by least squares to small runs on one server while others are
    idle.

    The fixed part of a prefill includes the HTTP round trip.
    """
    params = scaled_params(args)
    chunk = params.chunk
    client = SGLangServer(url, http)
    rng = random.Random("calibration")

    async def stream(num_prompt: int, length: int, seen: list[float]) -> None:
        """Append the arrival time of each token to `seen`."""

        def take(chunk: Chunk) -> None:
            token_times.extend([time.perf_counter()] * len(chunk.ids))

        prompt = [*rng.choices(FILLER, k=num_prompt - 1), length]
        sampling = _GREEDY.to_sglang(max_new_tokens=length, stop_ids=(EOS,))
        await client.generate(prompt, sampling, rid=uuid.uuid4().hex, on_chunk=take)

    prefills: list[tuple[float, int]] = []
    for num_prompt in [16, chunk // 4, chunk // 2, chunk - 1] * 4:
        token_times: list[float] = []
        started = time.perf_counter()
        await stream(num_prompt, 1, token_times)
        prefills.append((token_times[0] - started, num_prompt))
    steps: list[tuple[float, int, float]] = []  # seconds per step, sequences, context tokens
    length = 120
    batches = [(1, 8), (4, 8), (8, 8), (16, 8), (24, 8), (4, 400), (12, 150)]
    for num_sequences, num_prompt in batches * 2:
        await flush(http, url)
        streams: list[list[float]] = [[] for _ in range(num_sequences)]
        async with anyio.create_task_group() as tasks:
            for token_times in streams:
                tasks.start_soon(stream, num_prompt, length, token_times)
        # All streams run between the latest first token and the earliest last token.
        begin, end = max(times[0] for times in streams), min(times[-1] for times in streams)
        num_steps = sum(begin < when <= end for times in streams for when in times) / num_sequences
        if num_steps > length / 4:
            context = num_sequences * (num_prompt + length - num_steps / 2)
            steps.append(((end - begin) / num_steps, num_sequences, context))
    await flush(http, url)
    fixed, per_token = fit_factors([(1.0, n) for _, n in prefills], [s for s, _ in prefills])
    step_s, per_sequence, per_context = fit_factors(
        [(1.0, n, context) for _, n, context in steps], [s for s, _, _ in steps]
    )
    return replace(
        params,
        prefill_s=fixed,
        prefill_s_per_token=per_token,
        step_s=step_s,
        step_s_per_sequence=per_sequence,
        step_s_per_token=per_context,
    )


def fit_factors(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return a least-squares fit of relative errors, without negative factors."""
    weights = 1 / np.array(values)
    matrix, target = np.array(rows) * weights[:, None], np.array(values) * weights
    free = list(range(matrix.shape[1]))
    factors = np.zeros(matrix.shape[1])
    while free:
        solution = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
        if (solution >= 0).all():
            factors[free] = solution
            break
        free.pop(int(solution.argmin()))
    return [float(factor) for factor in factors]


# --- output ---------------------------------------------------------------------------------------


def table(results: Sequence[Figures]) -> str:
    """Return medians over the rounds as markdown; ratios are to kv in the same round."""
    rows = [
        "| arm | makespan s | to kv | 90% done s | goodput tok/s | to kv | refused | retractions | "
        "prefix hits | TTFT p50 s | p99 s | later turns p99 s | moves |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    kv = {result.round: result for result in results if result.arm == "kv"}
    for arm in dict.fromkeys(result.arm for result in results):
        mine = [result for result in results if result.arm == arm]

        def median(name: str, mine: list[Figures] = mine) -> float:
            return float(statistics.median(getattr(result, name) for result in mine))

        def ratio(name: str, mine: list[Figures] = mine) -> str:
            pairs = [(result, kv[result.round]) for result in mine if result.round in kv]
            if not pairs:
                return "-"
            values = [
                getattr(result, name) / getattr(reference, name) for result, reference in pairs
            ]
            return f"{statistics.median(values):.2f}"

        moves = "-" if mine[0].num_moves is None else f"{median('num_moves'):,.0f}"
        rows.append(
            f"| {arm} | {median('makespan_s'):.1f} | {ratio('makespan_s')} | "
            f"{median('makespan_90_s'):.1f} | {median('goodput'):,.0f} | {ratio('goodput')} | "
            f"{median('num_refused'):,.0f} | {median('num_retractions'):,.0f} | "
            f"{100 * median('prefix_hits'):.1f}% | {median('ttft_p50_s'):.2f} | "
            f"{median('ttft_p99_s'):.2f} | {median('turn_ttft_p99_s'):.2f} | {moves} |"
        )
    return "\n".join(rows)


def caption(args: argparse.Namespace, scripts: Sequence[Script]) -> str:
    """Describe the conditions of the table."""
    pace = (
        "each step at least as long as on a modelled GPU"
        if args.pace
        else "at the speed of the CPU, which the servers share"
    )
    return (
        f"{args.servers} real SGLang servers ({args.capacity:,} tokens of KV each, {pace}); "
        f"{len(scripts)} rollouts in groups of {args.group_size}, "
        f"{sum(script.num_output for script in scripts):,} sampled tokens, lengths divided by "
        f"{args.scale:g}; medians of {args.rounds} rounds on {os.cpu_count()} cores."
    )


def plot(results: Sequence[Figures], path: Path) -> None:
    """Plot goodput per arm: a dot per round, a bar for the median. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    arms = sorted(
        dict.fromkeys(result.arm for result in results),
        key=lambda arm: statistics.median(
            result.goodput for result in results if result.arm == arm
        ),
    )
    figure, axes = pyplot.subplots(figsize=(7, 0.4 * len(arms) + 1.2), layout="constrained")
    for row, arm in enumerate(arms):
        values = [result.goodput for result in results if result.arm == arm]
        axes.barh(row, statistics.median(values), color="C0" if arm in OURS else "C7")
        axes.plot(values, [row] * len(values), "k.", markersize=4)
    axes.set_yticks(range(len(arms)), arms)
    axes.set_xlabel("sampled tokens of whole rollouts per second")
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = parser_for("live_router", __doc__)
    parser.add_argument("what", nargs="?", choices=("compare", "check"), default="compare")
    parser.add_argument("--servers", type=int, default=2, metavar="N")
    parser.add_argument("--groups", type=int, default=8, help="per server")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--scale", type=float, default=16.0, help="divisor of all lengths")
    parser.add_argument("--capacity", type=int, default=4096, help="KV tokens per server")
    parser.add_argument("--conservativeness", type=float, default=1.0, help="SGLang's option")
    parser.add_argument("--arms", type=words, default=[*OURS, *GATEWAYS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1, help="seed of rollouts, ids and order")
    parser.add_argument("--pace", action="store_true", help="servers as slow as a modelled GPU")
    parser.add_argument(
        "--probe-s", type=float, default=0.125, help="time between a server's reports"
    )
    parser.add_argument("--deadline-s", type=float, default=180.0, help="deadline of an arm's run")
    parser.add_argument("--gateways-python", default=sys.executable, metavar="PATH")
    parser.add_argument("--json", type=Path, help="file for the figures of every run")
    parser.add_argument("--plot", type=Path, help="file for a plot of the goodput")
    args = parser.parse_args()
    if unknown := set(args.arms) - {*OURS, *GATEWAYS}:
        parser.error(f"no arm {sorted(unknown)}")
    options: dict[str, Any] = {"use_uvloop": True}
    if args.what == "check":
        print(anyio.run(check, args, backend_options=options))
        return
    results = anyio.run(compare, args, backend_options=options)
    print(caption(args, scripts_of(trace_of(args), args.seed)) + "\n")
    print(table(results))
    if args.plot:
        plot(results, args.plot)


if __name__ == "__main__":
    main()
