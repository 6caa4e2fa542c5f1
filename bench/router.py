"""Simulation of placement policies on a batch of rollouts, in virtual time.

    python -m bench.router                                     4 servers, every policy, 3 seeds
    python -m bench.router --servers 64 --groups 512
    python -m bench.router --sessions runs/latest --capacity 65536 --policies kv,cache_aware

Ledger, placement, queue and admission are those of the runtime; the servers are models
(bench/server_model.py) and the clock is virtual. Every policy gets the same rollouts.

`kv` queues requests until they fit and admits groups by capacity. `cache_aware` sends everything at
once, which is all rollouts at the start, as gateways do.

`cache_aware` is an emulation of the published behaviour of sglang-router 0.3.2 and smg 1.13, not
those programs: it chooses the worker whose record of past prompts matches best (more than 0.3 of
the prompt; else the one with the fewest requests), unless the numbers of requests in flight differ
by more than 64 and by a factor of more than 1.5: then the one with the fewest. It knows what it
sent, but nothing of the cache and its evictions.
`thunder_agent` is bench/thunder_agent.py; `--host-cache` gives servers SGLang's hierarchical cache.

`--sessions` replays recorded rollouts instead, token for token: a run's folder, or a JSONL file
with lines of its trajectories/, of `Trajectory.to_dict`, or, for traffic of others,

    {"group": "g1", "prompt_tokens": 812, "turns": [[output, tool, wait], ...]}

with the tokens that a turn samples, those that follow it, and the seconds until the next turn.
Recorded rollouts share a prompt if their group and all its ids are the same.

No scheduler can beat the bound, even if it knows all lengths: see `lower_bound_s`.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import json
import math
import random
import statistics
import sys
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentloop.inference.ranks import DataParallelRank, LoadReport
from agentloop.inference.scheduling.admission import Admission, AdmissionLimits, Forecast
from agentloop.inference.scheduling.kv_ledger import KVLedger
from agentloop.inference.scheduling.kv_policy import KVPolicy
from agentloop.inference.scheduling.placement import PlacementRequest
from agentloop.inference.scheduling.wait_queue import Stage, Waiting, WaitQueue
from bench.command import numbers, parser_for, quantile, words
from bench.server_model import Job, ServerModel, ServerParams
from bench.thunder_agent import ThunderAgent

POLICIES = (KVPolicy.name, ThunderAgent.name, "cache_aware")
_TICK_S = 1.0  # between two reports, and two updates of the ledger
_REPORT_LAG_S = 1.0
_BINS = (2048, 4096, 8192)  # bounds of prompts' lengths
_LABELS = ("first turn", *(f"later, under {bound}" for bound in _BINS), "later, longer")
_MEDIAN_TURN = 900  # tokens; this gives about 5,000 per rollout in `make_trace`


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """A turn of `num_output` sampled tokens, then a tool of `tool_s` that answers `num_tool`
    tokens."""

    num_output: int
    num_tool: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    group: str
    num_prompt: int
    turns: tuple[TurnSpec, ...]

    @property
    def num_output(self) -> int:
        return sum(turn.num_output for turn in self.turns)

    @property
    def num_own(self) -> int:
        return sum(turn.num_output + turn.num_tool for turn in self.turns)


def make_trace(
    seed: int, *, num_groups: int, group_size: int = 32, max_turns: int = 10, budget: int = 12_288
) -> list[RolloutSpec]:
    """Generate rollouts like those of an agent trained on mathematics; lengths are log-normal.

    The siblings of a group share a difficulty, which affects the number of turns and their length.
    The defaults are near the end of rStar2-Agent's training: at most 12K tokens and 10 turns, about
    5K per rollout, tools of 0.3 s (one in twenty is slow).
    """
    rng = random.Random(f"trace {seed}")
    trace = []
    for group in range(num_groups):
        difficulty = rng.lognormvariate(0.0, 0.4)
        num_prompt = min(4000, int(rng.lognormvariate(math.log(700), 0.5)) + 200)
        for _ in range(group_size):
            pace = difficulty * rng.lognormvariate(0.0, 0.3)
            num_turns = min(max_turns, 1 + int(rng.expovariate(1 / (3.5 * difficulty))))
            remaining, turns = budget, []
            for _ in range(num_turns):
                num_output = min(
                    remaining, max(16, int(rng.lognormvariate(math.log(_MEDIAN_TURN * pace), 0.7)))
                )
                num_tool = min(remaining - num_output, max(8, int(rng.lognormvariate(4.4, 0.8))))
                slow = rng.random() < 0.05
                tool_s = rng.lognormvariate(math.log(8.0 if slow else 0.3), 0.8)
                turns.append(TurnSpec(num_output, num_tool, min(tool_s, 30.0)))
                remaining -= num_output + num_tool
                if remaining < 16:
                    break
            trace.append(RolloutSpec(f"g{group}", num_prompt, tuple(turns)))
    return trace


def read_sessions(path: Path) -> list[RolloutSpec]:
    """Read recorded rollouts, without those that sampled no token; see the module's docstring.

    Raises:
        ValueError: A line is invalid, the message names it, or there is no rollout.
    """
    specs = []
    for file in sorted(path.glob("trajectories/group-*.jsonl")) if path.is_dir() else [path]:
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                spec = _session(json.loads(line))
            except (AttributeError, KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file}, line {number}: {error!r}") from error
            if spec.turns:
                specs.append(spec)
    if not specs:
        raise ValueError(f"{path}: there is no recorded rollout")
    return specs


def _session(row: Any) -> RolloutSpec:
    if "prompt_tokens" in row:
        turns = [TurnSpec(int(n), int(k), float(s)) for n, k, s in row["turns"]]
        if not turns or min(turn.num_output for turn in turns) < 1:
            raise ValueError("each rollout needs a turn, and each turn a sampled token")
        return RolloutSpec(str(row["group"]), int(row["prompt_tokens"]), tuple(turns))
    record = row.get("trajectory", row)
    prompt, played = record["prompt_ids"], [turn for turn in record["turns"] if turn["output_ids"]]
    turns = []
    for turn, later in zip(played, [*played[1:], None], strict=False):
        # It waits until the request of the next turn, for tools and for whatever else.
        wait_s = max(0.0, later["started_s"] - turn["generated_s"]) if later else 0.0
        turns.append(TurnSpec(len(turn["output_ids"]), len(turn["observation_ids"]), wait_s))
    shared = hashlib.sha256(json.dumps(prompt).encode()).hexdigest()[:16]
    return RolloutSpec(f"{row.get('group', '')} {shared}", len(prompt), tuple(turns))


@dataclass(frozen=True, slots=True)
class Options:
    """The configuration of a run, besides policy and trace."""

    num_servers: int = 4
    params: ServerParams = field(default_factory=ServerParams)
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    budget: int = 12_288
    wait_timeout_s: float = 600.0


@dataclass(slots=True)
class Result:
    """The result of one policy on one trace."""

    policy: str
    seed: int
    makespan_s: float = 0.0
    goodput: float = 0.0  # sampled tokens of whole rollouts per second
    num_retractions: int = 0
    prefix_hits: float = 0.0  # fraction of the prompts' tokens that was cached
    ttft_p99_s: float = 0.0  # all turns; the first of a rollout counts from the run's start
    # Median and p90 of the first token's time: first turns, then later ones by prompt length.
    ttft_by_prompt_s: dict[str, tuple[float, float]] = field(default_factory=dict)
    num_refused: int = 0
    bound_s: float = 0.0
    wall_s: float = 0.0


class _CacheAware:
    """The emulation; see the module's docstring. Its tree never forgets, as its limit is large."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._seen: list[dict[str, int]] = [{} for _ in range(num_servers)]

    def choose(self, request: PlacementRequest, loads: Sequence[int]) -> int:
        least = min(range(self._num_servers), key=loads.__getitem__)
        heaviest = max(loads)
        chosen = least
        if not (heaviest - loads[least] > 64 and heaviest > 1.5 * loads[least]):
            matches = [
                lengths.get(request.key, 0) or lengths.get("group " + request.group, 0)
                for lengths in self._seen
            ]
            best = max(range(self._num_servers), key=matches.__getitem__)
            if matches[best] > 0.3 * request.num_tokens:
                chosen = best
        self._seen[chosen][request.key] = request.num_tokens
        self._seen[chosen]["group " + request.group] = request.num_shared
        return chosen


@dataclass(slots=True)
class _Rollout:
    key: str
    spec: RolloutSpec
    order: int
    turn: int = 0
    num_context: int = 0
    asked_s: float = 0.0


class Simulation:
    """A simulation of one policy on one trace, from the first request to the last token."""

    def __init__(
        self, trace: Sequence[RolloutSpec], policy: str, seed: int, options: Options
    ) -> None:
        self.options = options
        self.result = Result(policy, seed)
        self.ranks = [DataParallelRank(f"server{index}") for index in range(options.num_servers)]
        self.servers = [ServerModel(options.params) for _ in self.ranks]
        self.ledger = KVLedger()
        for rank in self.ranks:
            params = options.params
            self.ledger.add(rank, params.capacity, params.max_running, params.host_capacity)
        self.thunder = ThunderAgent(self.ledger) if policy == ThunderAgent.name else None
        self.kv = KVPolicy(self.ledger, seed=seed)
        self.cache_aware = _CacheAware(options.num_servers) if policy == "cache_aware" else None
        self.holds_back = policy == KVPolicy.name
        self.queue: WaitQueue[_Rollout] = WaitQueue()
        if self.thunder:
            self.queue = WaitQueue(starvation_threshold_s=math.inf, max_overtaken=len(trace))
        self.admission = Admission(options.admission, Forecast(longest=options.budget))
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()
        self._server_s = [math.inf] * options.num_servers  # times of the scheduled events
        self._jobs: dict[str, tuple[_Rollout, int]] = {}  # with the tokens known to the ledger
        self._index = {rank: index for index, rank in enumerate(self.ranks)}
        groups: dict[str, list[RolloutSpec]] = {}
        for spec in trace:
            groups.setdefault(spec.group, []).append(spec)
        self._source = deque(
            [
                _Rollout(f"{group}.{member}", spec, order, num_context=spec.num_prompt)
                for member, spec in enumerate(specs)
            ]
            for order, (group, specs) in enumerate(groups.items())
        )
        self._left = {group: len(specs) for group, specs in groups.items()}
        self._num_open = len(trace)
        self._ttft: list[float] = []
        self._ttft_by_prompt: dict[str, list[float]] = {label: [] for label in _LABELS}
        self._num_prompt = self._num_hit = 0
        self._next_place_s = 0.0
        self._dirty = False
        self._over: list[tuple[str, bool]] = []

    def run(self) -> Result:
        """Run to the end and check that no rollout or token was lost."""
        started = time.perf_counter()
        self._start_groups()
        self._at(_TICK_S, self._tick)
        if self.thunder:
            self._at(self.thunder.period_s, self._pause_and_resume)
        while self._num_open:
            if self._dirty and (not self._events or self._events[0][0] > self.now):
                self._place_waiting()
                continue
            self.now, _, event = heapq.heappop(self._events)
            event()
        self._forecast_ends()
        result = self.result
        assert not self._jobs
        assert not len(self.queue)
        assert all(pool.num_live == pool.num_reserved == 0 for pool in self.ledger.pools.values())
        result.makespan_s = self.now
        result.goodput /= max(self.now, 1e-9)  # a rollout may take no time at all
        result.num_retractions = sum(server.num_retracted for server in self.servers)
        result.prefix_hits = self._num_hit / max(1, self._num_prompt)
        result.ttft_p99_s = quantile(self._ttft, 0.99)
        result.ttft_by_prompt_s = {
            label: (quantile(times, 0.5), quantile(times, 0.9))
            for label, times in self._ttft_by_prompt.items()
            if times
        }
        result.wall_s = time.perf_counter() - started
        return result

    # --- the loop of a runtime, as events -------------------------------------------------------

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._counter), event))

    def _start_groups(self) -> None:
        while self._source and self._may_start():
            group = self._source.popleft()
            self.admission.start()
            for rollout in group:
                self.admission.forecast.start(rollout.key)
                self._ask(rollout, ready_s=0.0)

    def _may_start(self) -> bool:
        if self.holds_back:
            pools = self.ledger.pools.values()
            capacity = sum(pool.capacity + pool.host_capacity for pool in pools)
            group = self._source[0]
            return self.admission.may_start(capacity, len(group), group[0].spec.num_prompt)
        return True

    def _ask(self, rollout: _Rollout, *, ready_s: float) -> None:
        rollout.asked_s = ready_s
        if self.thunder:
            index = -1
            if self.thunder.is_active(rollout.key) or not len(self.queue):
                index = self._choose(rollout, 0.0)
            if index >= 0:
                self._send(rollout, index)
            else:
                name, num_tokens = f"{rollout.key}.{rollout.turn}", rollout.num_context
                is_new = not rollout.turn
                size, stage = (-num_tokens, Stage.NEW) if is_new else (num_tokens, Stage.PAUSED)
                # Its order is that of sizes alone, however long a turn waits.
                self.queue.enter(Waiting(name, 0, size, 0.0, rollout, stage))
        elif self.holds_back:
            expected = rollout.num_context + self.ledger.predictor.remaining(rollout.spec.group)
            name = f"{rollout.key}.{rollout.turn}"
            stage = Stage.NEW
            if rollout.turn:
                stage = Stage.CACHED if self.ledger.keeps(rollout.key) else Stage.PAUSED
            self.queue.enter(Waiting(name, rollout.order, expected, self.now, rollout, stage))
            self._dirty = True
        else:
            self._send(rollout, self._choose(rollout, 0.0))

    def _pause_and_resume(self) -> None:
        assert self.thunder
        self._at(self.now + self.thunder.period_s, self._pause_and_resume)
        self.thunder.pause_excess()
        self._place_in_order()

    def _place_waiting(self) -> None:
        self._dirty = False
        if self.thunder or not len(self.queue):
            return
        if self.now < self._next_place_s:  # capacity has hardly changed since
            self._at(self._next_place_s, self._set_dirty)
            return
        self._next_place_s = self.now + 0.02
        self._refuse_late()
        self._place_in_order()

    def _place_in_order(self) -> None:
        def try_to_place(waiting: Waiting[_Rollout]) -> bool:
            index = self._choose(waiting.request, self.now - waiting.since_s)
            if index >= 0:
                self._send(waiting.request, index)
            return index >= 0

        self.queue.place(self.now, try_to_place)

    def _set_dirty(self) -> None:
        self._dirty = True

    def _refuse_late(self) -> None:
        timeout_s = self.options.wait_timeout_s
        late = [waiting for waiting in self.queue if self.now - waiting.since_s >= timeout_s]
        for waiting in late:
            self.queue.leave(waiting.name)
            self.result.num_refused += 1
            self._finish(waiting.request, is_whole=False)

    def _choose(self, rollout: _Rollout, waited_s: float) -> int:
        """Return the server's index, or -1 to wait."""
        spec = rollout.spec
        request = PlacementRequest(
            rollout.key,
            rollout.num_context,
            self._budget(rollout),
            spec.group,
            spec.num_prompt,
        )
        if self.cache_aware is not None:
            pools = self.ledger.pools.values()
            return self.cache_aware.choose(request, [pool.num_sequences for pool in pools])
        if self.thunder is not None:
            rank = self.thunder.choose(request)
        else:
            rank = self.kv.choose(request, self.ranks, now_s=self.now, waited_s=waited_s).rank
        return -1 if rank is None else self._index[rank]

    def _budget(self, rollout: _Rollout) -> int:
        used = rollout.num_context - rollout.spec.num_prompt
        return max(rollout.spec.turns[rollout.turn].num_output, self.options.budget - used)

    def _send(self, rollout: _Rollout, index: int) -> None:
        spec, name = rollout.spec, f"{rollout.key}.{rollout.turn}"
        self.ledger.reserve(
            name,
            self.ranks[index],
            rollout.num_context,
            self._budget(rollout),
            key=rollout.key,
            group=spec.group,
            num_shared=spec.num_prompt,
        )
        self._jobs[name] = (rollout, 0)
        job = Job(
            name,
            rollout.key,
            spec.group,
            rollout.num_context,
            spec.num_prompt,
            spec.turns[rollout.turn].num_output,
            self._budget(rollout),
        )
        self.servers[index].submit(job, self.now)
        self._schedule(index)

    def _schedule(self, index: int) -> None:
        when = self.servers[index].next_s
        if when != self._server_s[index] and when < math.inf:
            self._at(when, lambda: self._advance(index, when))
        self._server_s[index] = when

    def _advance(self, index: int, when: float) -> None:
        if self._server_s[index] != when:  # rescheduled since
            return
        self._server_s[index] = math.inf
        for job in self.servers[index].advance():
            self._end_job(job)
        self._schedule(index)

    def _end_job(self, job: Job) -> None:
        rollout, num_known = self._jobs.pop(job.name)
        turn = rollout.spec.turns[rollout.turn]
        assert job.num_emitted == turn.num_output
        self.ledger.grow(job.name, turn.num_output - num_known)
        self.ledger.park(job.name, self.now)
        self._dirty = True
        ttft = job.first_token_s - rollout.asked_s
        self._ttft.append(ttft)
        bin_of_prompt = 1 + bisect_right(_BINS, job.num_prompt) if rollout.turn else 0
        self._ttft_by_prompt[_LABELS[bin_of_prompt]].append(ttft)
        self._num_prompt += job.num_prompt
        self._num_hit += job.num_cached
        rollout.num_context += turn.num_output + turn.num_tool
        if self.thunder:
            self.thunder.grow(rollout.key, turn.num_output - num_known)
            self.thunder.end_turn(rollout.key)
        self.admission.forecast.grow(rollout.key, turn.num_output - num_known + turn.num_tool)
        rollout.turn += 1
        if rollout.turn == len(rollout.spec.turns):
            self._finish(rollout, is_whole=True)
        else:
            back_s = self.now + turn.tool_s
            self._at(back_s, lambda: self._ask(rollout, ready_s=back_s))

    def _finish(self, rollout: _Rollout, *, is_whole: bool) -> None:
        self.ledger.forget(rollout.key)
        if self.thunder:
            self.thunder.forget(rollout.key)
        self._over.append((rollout.key, is_whole))
        self._num_open -= 1
        if is_whole:
            self.result.goodput += rollout.spec.num_output
        self._left[rollout.spec.group] -= 1
        if not self._left[rollout.spec.group]:
            self.admission.end()
        self._start_groups()

    def _tick(self) -> None:
        """Update the ledger with tokens and, later, with reports; let admission observe both."""
        for server in self.servers:
            for name, job in server.running.items():
                rollout, num_known = self._jobs[name]
                num_emitted = server.num_emitted(job, self.now)
                if num_emitted > num_known:
                    self.ledger.grow(name, num_emitted - num_known)
                    if self.thunder:
                        self.thunder.grow(rollout.key, num_emitted - num_known)
                    self.admission.forecast.grow(rollout.key, num_emitted - num_known)
                    self._jobs[name] = (rollout, num_emitted)
        self._forecast_ends()
        reports = [server.report for server in self.servers]
        self._at(self.now + _REPORT_LAG_S, lambda: self._receive_reports(reports))
        self._at(self.now + _TICK_S, self._tick)
        self._dirty = True

    def _forecast_ends(self) -> None:
        """Report ends with the delay of tokens, or short rollouts would seem frequent."""
        for key, is_whole in self._over:
            self.admission.forecast.end(key, is_complete=is_whole)
        self._over.clear()

    def _receive_reports(self, reports: Sequence[LoadReport]) -> None:
        num_retracted = 0
        for rank, report in zip(self.ranks, reports, strict=True):
            num_retracted += self.ledger.report(rank, report, self.now)
        self.ledger.age(self.now)
        self.queue.pause(lambda rollout: self.ledger.keeps(rollout.key))
        if self.holds_back:
            reported_s = max(self.ledger.pools[rank].reported_s for rank in self.ranks)
            self.admission.observe(self.now, num_retracted, reported_s)
            self._start_groups()


def lower_bound_s(trace: Iterable[RolloutSpec], num_servers: int, params: ServerParams) -> float:
    """Return a bound that no scheduler can beat, whatever it knows.

    Work: each sampled token costs its part of a step (per sequence, and per token of its own
    context); each token of a prompt is computed at least once, a group's once for all; and the
    fixed part of a step is shared by no more sequences than the pool holds at once: the contexts of
    a step's sequences, counted without what siblings share, do not exceed the pool. So there are at
    least (sum of contexts over sampled tokens) / capacity steps, and at least tokens divided by the
    largest batch. At best the servers share all this evenly.

    Path: the longest rollout by itself, alone on a server, tools included.

    The bound is loose towards the end of a run, where batches cannot be full. A scheduler that
    knows all lengths and can preempt and move at no cost is only limited by paths if the longest
    one is near the time of the work, and here it is a third of that. It also leaves out two small
    costs: the first seconds, in which no context is long yet, and the fixed cost of each prefill.
    """
    seconds = contexts = outputs = longest = 0.0
    prompts: dict[str, int] = {}
    for spec in trace:
        prompts[spec.group] = spec.num_prompt
        num_own, alone = 0, params.prefill_s_per_token * spec.num_prompt
        for turn in spec.turns:
            # The prefill produces the first token of a turn, without a step.
            num_steps = turn.num_output - 1
            own_sum = num_steps * num_own + num_steps * (num_steps + 1) / 2
            attended = own_sum + num_steps * spec.num_prompt
            contexts += own_sum
            outputs += num_steps
            step_s = params.step_s_per_sequence * num_steps + params.step_s_per_token * attended
            seconds += step_s
            alone += step_s + params.step_s * num_steps
            num_own += turn.num_output
            if turn is not spec.turns[-1]:
                num_own += turn.num_tool
                seconds += params.prefill_s_per_token * turn.num_tool
                alone += turn.tool_s + params.prefill_s_per_token * turn.num_tool
        longest = max(longest, alone)
    seconds += params.prefill_s_per_token * sum(prompts.values())
    seconds += params.step_s * max(contexts / params.capacity, outputs / params.max_running)
    return max(longest, seconds / num_servers)


def run_all(
    policies: Sequence[str],
    seeds: Sequence[int],
    options: Options,
    trace_of: Callable[[int], list[RolloutSpec]],
) -> list[Result]:
    """Run every policy on the same trace of each seed."""
    results = []
    for seed in seeds:
        trace = trace_of(seed)
        bound_s = lower_bound_s(trace, options.num_servers, options.params)
        for policy in policies:
            result = Simulation(trace, policy, seed, options).run()
            result.bound_s = bound_s
            results.append(result)
            print(
                f"seed {seed} {policy}: {result.makespan_s:.0f} s of virtual time in "
                f"{result.wall_s:.1f} s",
                file=sys.stderr,
            )
    return results


def table(results: Sequence[Result]) -> str:
    """Return medians over the seeds as markdown."""
    rows = [
        "| policy | makespan s | of bound | goodput tok/s | retractions | prefix hits | "
        "TTFT p99 s | refused |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for policy in dict.fromkeys(result.policy for result in results):
        mine = [result for result in results if result.policy == policy]

        def median(name: str, mine: list[Result] = mine) -> float:
            return float(statistics.median(getattr(result, name) for result in mine))

        of_bound = statistics.median(result.makespan_s / result.bound_s for result in mine)
        rows.append(
            f"| {policy} | {median('makespan_s'):.1f} | {of_bound:.2f} | "
            f"{median('goodput'):,.0f} | {median('num_retractions'):,.0f} | "
            f"{100 * median('prefix_hits'):.1f}% | {median('ttft_p99_s'):.1f} | "
            f"{median('num_refused'):.0f} |"
        )
    return "\n".join(rows)


def table_by_prompt(results: Sequence[Result]) -> str:
    """Return the first tokens' times, p50 and p90, as markdown: medians over the seeds."""
    labels = [label for label in _LABELS if any(label in r.ttft_by_prompt_s for r in results)]
    rows = ["| first token s, p50 and p90 | " + " | ".join(labels) + " |"]
    rows.append("|---" * (len(labels) + 1) + "|")
    for policy in dict.fromkeys(result.policy for result in results):
        cells = []
        for label in labels:
            pairs = [
                r.ttft_by_prompt_s[label]
                for r in results
                if r.policy == policy and label in r.ttft_by_prompt_s
            ]
            cells.append(", ".join(f"{statistics.median(q):.2f}" for q in zip(*pairs, strict=True)))
        rows.append(f"| {policy} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def main() -> None:
    defaults = Options()
    parser = parser_for("router", __doc__)
    parser.add_argument("--servers", type=int, default=4, metavar="N")
    parser.add_argument("--groups", type=int, default=0, help="groups of rollouts (8 per server)")
    parser.add_argument("--group-size", type=int, default=32)
    parser.add_argument("--policies", type=words, default=[*POLICIES])
    parser.add_argument("--seeds", type=numbers, default=[1, 2, 3], help="of traces and ties")
    parser.add_argument("--sessions", type=Path, help="recorded rollouts instead of generated ones")
    parser.add_argument(
        "--capacity", type=int, default=defaults.params.capacity, help="KV tokens per server"
    )
    parser.add_argument(
        "--target",
        type=float,
        default=defaults.admission.target,
        help="multiple of the KV cache that kv's rollouts may use at their peak; at 4 some pause",
    )
    parser.add_argument(
        "--host-cache",
        type=float,
        default=0.0,
        metavar="RATIO",
        help="KV capacity of each server's host memory, relative to the device's (SGLang: 2)",
    )
    parser.add_argument("--json", type=Path, help="file for the figures of every run")
    args = parser.parse_args()
    if unknown := set(args.policies) - {*POLICIES}:
        parser.error(f"no policy {sorted(unknown)}")
    sessions: list[RolloutSpec] = []
    if args.sessions:
        try:
            sessions = read_sessions(args.sessions)
        except (OSError, ValueError) as error:
            parser.error(str(error))
    options = Options(
        num_servers=args.servers,
        params=ServerParams(
            capacity=args.capacity,
            host_capacity=int(args.host_cache * args.capacity),
        ),
        admission=AdmissionLimits(target=args.target),
        budget=max((spec.num_own for spec in sessions), default=defaults.budget),
    )
    num_groups = args.groups or 8 * args.servers

    def trace_of(seed: int) -> list[RolloutSpec]:
        return sessions or make_trace(seed, num_groups=num_groups, group_size=args.group_size)

    results = run_all(args.policies, args.seeds, options, trace_of)
    print(table(results))
    print("\n" + table_by_prompt(results))
    if args.json:
        args.json.write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


if __name__ == "__main__":
    main()
