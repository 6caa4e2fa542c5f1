"""A discrete-event model of one SGLang server, for the benchmark of the router.

Modelled after SGLang 0.5: continuous batching with prefill before decode, in batches of `chunk`
tokens; first come, first served; admission by the pool's free tokens less the expected growth of
running requests, times a ratio that falls with each step and rises after a retraction; a prefix
cache that evicts the least recently used leaves first; retraction when a step does not fit (fewest
outputs first, then longest prompts), of as many as the next step needs, as in 0.5.23.

With `host_capacity`, what runs is also written to the host's memory, and what the device has
evicted is loaded from there instead of computed, as by SGLang's hierarchical cache; simplified:
writing costs nothing, loading is not overlapped with computing, and the host forgets whole entries.

Not modelled: overlap of the scheduler with the device, pages of more than one token, speculative
decoding, interleaving chunks of one prompt with decode steps, any noise.

Nothing is simulated between two events: the duration of n decode steps has a closed form, since
each adds one token of context to each running sequence.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field

from agentloop.inference.ranks import LoadReport

__all__ = ["Job", "ServerModel", "ServerParams"]


@dataclass(frozen=True, slots=True)
class ServerParams:
    """Parameters of a server.

    The defaults are near a 14B model in bfloat16 on an 80 GB GPU: weights 28 GB, 160 KB of KV per
    token, 3.35 TB/s and about 400 TFLOP/s.

    The last three are settings of SGLang (SGLANG_*, with its defaults): it reserves at most `clip`
    tokens for a request's growth, the ratio falls within `decay_steps`, and after a retraction it
    is set so that the remaining requests could take `retract_steps`.

    `host_capacity` is in tokens; `load_s_per_token` is that of 160 KB over 50 GB/s.
    """

    capacity: int = 262_144
    max_running: int = 512
    chunk: int = 8192
    prefill_s: float = 0.005
    prefill_s_per_token: float = 7e-5
    step_s: float = 0.012
    step_s_per_sequence: float = 5e-5
    step_s_per_token: float = 5e-8
    conservativeness: float = 1.0
    clip: int = 4096
    decay_steps: int = 600
    retract_steps: int = 20
    host_capacity: int = 0
    load_s_per_token: float = 3.2e-6


@dataclass(slots=True)
class Job:
    """A turn: a prompt whose first `num_shared` tokens are its group's, and an output.

    `max_new` is the limit that the server knows, `num_output` the actual length.
    """

    name: str
    key: str
    group: str
    num_prompt: int
    num_shared: int
    num_output: int
    max_new: int
    num_cached: int = 0
    num_retractions: int = 0
    num_emitted: int = 0  # as of `first_step`
    first_step: int = 0
    first_token_s: float = math.inf
    finished_s: float = math.inf
    num_recomputed: int = 0  # tokens computed again after a retraction
    _own: int = 0  # tokens held besides the group's prompt, as of `first_step`


@dataclass(slots=True)
class _Prompt:
    num_tokens: int
    num_running: int = 0


@dataclass(slots=True)
class ServerModel:
    """A simulated server: submit jobs; `advance` to `next_s` returns those that ended.

    Time never goes back.
    """

    params: ServerParams = field(default_factory=ServerParams)
    waiting: deque[Job] = field(default_factory=deque)
    running: dict[str, Job] = field(default_factory=dict)
    num_locked: int = 0  # KV tokens that running jobs hold
    num_cached: int = 0  # KV tokens that only the prefix cache holds
    num_retracted: int = 0
    num_prefilled: int = 0
    num_decoded: int = 0
    next_s: float = math.inf
    report: LoadReport = field(default_factory=lambda: LoadReport(0, 0, 0))
    _step: int = 0
    _num_context: int = 0  # tokens that a step attends to
    _ratio: float = 0.0
    _start_s: float = 0.0
    _planned: int = 0  # decode steps of this segment; 0 if idle or in a prefill
    _prefill: list[Job] = field(default_factory=list)
    _ends: list[tuple[int, str]] = field(default_factory=list)
    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    _lru: OrderedDict[tuple[str, bool], int] = field(default_factory=OrderedDict)
    _host: OrderedDict[tuple[str, bool], int] = field(default_factory=OrderedDict)
    _num_host: int = 0

    def __post_init__(self) -> None:
        self._ratio = self._init_ratio

    def submit(self, job: Job, now_s: float) -> None:
        """Queue a job.

        Raises:
            ValueError: It could never fit.
        """
        if job.num_prompt + job.num_output >= self.params.capacity:
            raise ValueError(f"{job.name} is larger than the pool")
        was_empty = not self.waiting
        self.waiting.append(job)
        if self.next_s == math.inf:
            self._plan(now_s)
        elif was_empty and self._planned:  # the next step boundary may admit it
            num_done = min(self._planned, math.floor(self._steps_until(now_s)) + 1)
            self._planned = num_done
            self.next_s = max(now_s, self._start_s + self._duration(num_done))

    def cancel(self, job: Job, now_s: float) -> None:
        """Cancel a job; it ends with the current step."""
        if job in self.waiting:
            self.waiting.remove(job)
        elif job.name in self.running:
            num_steps = 0
            if self._planned:
                num_steps = min(self._planned, math.floor(self._steps_until(now_s)) + 1)
                self._planned = num_steps
                self.next_s = max(now_s, self._start_s + self._duration(num_steps))
            job.num_output = job.num_emitted + self._step + num_steps - job.first_step
            heapq.heappush(self._ends, (_last_step(job), job.name))

    def advance(self) -> list[Job]:
        """Advance to `next_s`; return the jobs that ended there."""
        now_s = self.next_s
        if self._planned:
            self._take_steps(self._planned)
        for job in self._prefill:
            job.first_token_s = min(job.first_token_s, now_s)
        self._prefill = []
        ended: list[Job] = []
        while self._ends and self._ends[0][0] <= self._step:
            step, name = heapq.heappop(self._ends)
            if (candidate := self.running.get(name)) and _last_step(candidate) == step:
                self._end(candidate, now_s)
                ended.append(candidate)
        self._plan(now_s)
        return ended

    def num_emitted(self, job: Job, now_s: float) -> int:
        """Return the tokens of a running job that have been streamed by `now_s`."""
        if job.first_token_s > now_s:
            return 0
        steps = min(self._planned, math.floor(self._steps_until(now_s))) if self._planned else 0
        return min(job.num_output, job.num_emitted + self._step + steps - job.first_step)

    # --- simulation -----------------------------------------------------------------------------

    @property
    def _init_ratio(self) -> float:
        return min(1.0, 0.7 * self.params.conservativeness)

    def _plan(self, now_s: float) -> None:
        """Plan the next segment from `now_s` on."""
        self._start_s, self._planned = now_s, 0
        if self.waiting and (prefill_s := self._admit()) is not None:
            self.next_s = now_s + prefill_s
        elif self.running:
            if self.params.capacity - self.num_locked < len(self.running):
                self._retract()
            fitting = (self.params.capacity - self.num_locked) // len(self.running)
            self._drop_ended()
            self._planned = max(1, min(fitting, self._ends[0][0] - self._step))
            self.next_s = now_s + self._duration(self._planned)
        else:
            self.next_s = math.inf
            self._ratio = self._init_ratio
        self.report = LoadReport(
            self.num_locked, len(self.running), len(self.waiting), self.num_retracted
        )

    def _duration(self, num_steps: int) -> float:
        params, batch = self.params, len(self.running)
        first = (
            params.step_s
            + params.step_s_per_sequence * batch
            + params.step_s_per_token * self._num_context
        )
        more = params.step_s_per_token * batch
        return num_steps * first + more * num_steps * (num_steps - 1) / 2

    def _steps_until(self, now_s: float) -> float:
        """Return the steps, possibly fractional, since the segment's start; the inverse of
        `_duration`."""
        params, batch = self.params, len(self.running)
        more = params.step_s_per_token * batch
        first = (
            params.step_s
            + params.step_s_per_sequence * batch
            + params.step_s_per_token * self._num_context
        )
        linear = first - more / 2
        elapsed = max(0.0, now_s - self._start_s) + 1e-9
        if more == 0.0:
            return elapsed / linear
        return (math.sqrt(linear * linear + 2 * more * elapsed) - linear) / more

    def _take_steps(self, num_steps: int) -> None:
        num_tokens = num_steps * len(self.running)
        self._step += num_steps
        self.num_locked += num_tokens
        self._num_context += num_tokens
        self.num_decoded += num_tokens
        lowest = min(1.0, 0.14 * self._init_ratio)
        fall = (self._init_ratio - lowest) / self.params.decay_steps
        self._ratio = max(lowest, self._ratio - fall * num_steps)
        self._evict()

    def _admit(self) -> float | None:
        """Take queued jobs that fit into one prefill batch; return its seconds, None if none
        fits."""
        params = self.params
        spoken_for = self._ratio * sum(
            min(params.clip, job.max_new - job.num_emitted - self._step + job.first_step)
            for job in self.running.values()
        )
        uncached, loaded, fresh = 0, 0, set[str]()
        while self.waiting and uncached < params.chunk and len(self.running) < params.max_running:
            job = self.waiting[0]
            prompt = self._prompts.get(job.group)
            length = job.num_prompt + job.num_emitted
            own = self._lru.get((job.key, False), 0)
            matched = own
            on_host = max(0, self._host.get((job.key, False), 0) - own)
            if prompt is not None and job.group not in fresh:
                matched += prompt.num_tokens
            elif prompt is None and (job.group, True) in self._host:
                on_host += job.num_shared
            elif prompt is None and job.group:
                fresh.add(job.group)
            matched = min(matched, length - 1)
            on_host = min(on_host, length - 1 - matched)
            new = length - (job.num_shared if prompt is not None and prompt.num_running else 0)
            growth = min(params.clip, job.max_new - job.num_emitted)
            num_free = params.capacity - self.num_locked - spoken_for
            if self.running and new + growth >= num_free:
                break
            self.waiting.popleft()
            self._begin(job, length)
            spoken_for += growth
            matched += on_host
            loaded += on_host
            uncached += length - matched
            if job.num_retractions:
                job.num_recomputed += length - matched
            else:
                job.num_cached = matched
        self.num_prefilled += uncached
        self._evict()
        if not uncached:
            return None
        compute_s = params.prefill_s + uncached * params.prefill_s_per_token
        return compute_s + loaded * params.load_s_per_token

    def _begin(self, job: Job, length: int) -> None:
        prompt = self._prompts.get(job.group)
        if job.group and job.num_shared:
            if prompt is None:
                prompt = self._prompts[job.group] = _Prompt(job.num_shared)
            if not prompt.num_running:
                self.num_locked += prompt.num_tokens
                self.num_cached -= self._lru.pop((job.group, True), 0)
            prompt.num_running += 1
        self.num_cached -= self._lru.pop((job.key, False), 0)
        job._own = length - job.num_shared
        job.num_emitted += 1  # the prefill gives the first token
        job._own += 1
        job.first_step = self._step
        self.num_decoded += 1
        self.num_locked += job._own
        self._num_context += length + 1
        self.running[job.name] = job
        self._prefill.append(job)
        heapq.heappush(self._ends, (_last_step(job), job.name))

    def _stop(self, job: Job, kept: int) -> None:
        """Remove a job from the batch; the prefix cache keeps the first `kept` of its own
        tokens."""
        del self.running[job.name]
        steps = self._step - job.first_step
        job.num_emitted += steps
        job.first_step = self._step
        self.num_locked -= job._own + steps
        self._num_context -= job.num_shared + job._own + steps
        if kept:
            self.num_cached += kept - self._lru.pop((job.key, False), 0)
            self._lru[job.key, False] = kept
            self._write_to_host((job.key, False), kept)
        if job.group and job.num_shared:
            prompt = self._prompts[job.group]
            self._write_to_host((job.group, True), prompt.num_tokens)
            prompt.num_running -= 1
            if not prompt.num_running:
                self.num_locked -= prompt.num_tokens
                self.num_cached += prompt.num_tokens
                self._lru[job.group, True] = prompt.num_tokens
            elif (job.group, True) in self._lru:
                self._lru.move_to_end((job.group, True))

    def _end(self, job: Job, now_s: float) -> None:
        job.finished_s = now_s
        self._stop(job, job.num_prompt + job.num_output - job.num_shared)

    def _retract(self) -> None:
        """Retract jobs, fewest outputs first, then longest prompts, to the end of the queue."""
        victims = sorted(
            self.running.values(),
            key=lambda job: (job.num_emitted + self._step - job.first_step, -job.num_prompt),
        )
        for num_gone, job in enumerate(victims[:-1]):
            num_free = self.params.capacity - self.num_locked
            if num_gone and num_free >= len(self.running):
                break
            self._stop(job, job.num_prompt - job.num_shared)
            job.num_retractions += 1
            self.num_retracted += 1
            self.waiting.append(job)
        self._evict()
        remaining = list(self.running.values())
        num_done = sum(job.num_emitted + self._step - job.first_step for job in remaining)
        num_most = sum(job.max_new for job in remaining)
        self._ratio = min(
            1.0, (num_done + self.params.retract_steps * len(remaining)) / (num_most + 1)
        )

    def _drop_ended(self) -> None:
        """Drop outdated entries, so that the heap's head is a running job."""
        while True:
            step, name = self._ends[0]
            job = self.running.get(name)
            if job is not None and _last_step(job) == step:
                return
            heapq.heappop(self._ends)

    def _write_to_host(self, name: tuple[str, bool], num_tokens: int) -> None:
        if num_tokens > self.params.host_capacity:
            return
        self._num_host += num_tokens - self._host.pop(name, 0)
        self._host[name] = num_tokens
        while self._num_host > self.params.host_capacity:
            self._num_host -= self._host.popitem(last=False)[1]

    def _evict(self) -> None:
        """Evict the least recently used tokens, from their ends, as far as needed."""
        excess = self.num_locked + self.num_cached - self.params.capacity
        while excess > 0 and self._lru:
            name = next(iter(self._lru))
            num_tokens = self._lru[name]
            if num_tokens > excess and not name[1]:
                self._lru[name] = num_tokens - excess
                self.num_cached -= excess
                return
            del self._lru[name]
            if name[1]:
                del self._prompts[name[0]]
            self.num_cached -= num_tokens
            excess -= num_tokens


def _last_step(job: Job) -> int:
    """Return the server's step at which the job is complete, unless it is retracted before."""
    return job.first_step + job.num_output - job.num_emitted
