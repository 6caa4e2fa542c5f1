"""The model accounts for tokens and time, and ends each job once."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.server_model import Job, ServerModel, ServerParams

PARAMS = ServerParams(capacity=1000, chunk=300, conservativeness=0.1)


def job(name: str, prompt: int, output: int, *, group: str = "", shared: int = 0) -> Job:
    return Job(name, name.partition(".")[0], group, prompt, shared, output, 400)


def run(server: ServerModel, jobs: list[tuple[float, Job]]) -> list[Job]:
    """Submit all jobs at their times and run to the end."""
    ended: list[Job] = []
    todo = sorted(jobs, key=lambda entry: entry[0])
    while todo or server.next_s < math.inf:
        if todo and todo[0][0] <= server.next_s:
            now_s, next_job = todo.pop(0)
            server.submit(next_job, now_s)
        else:
            ended += server.advance()
        check(server)
    return ended


def check(server: ServerModel) -> None:
    """Check that the sums match the jobs and fit into the pool."""
    running = list(server.running.values())
    groups = {running_job.group for running_job in running if running_job.group}
    own_tokens = sum(
        running_job._own + server._step - running_job.first_step for running_job in running
    )
    assert server.num_locked == own_tokens + sum(
        server._prompts[group].num_tokens for group in groups
    )
    assert server.num_cached == sum(server._lru.values())
    assert server.num_cached >= 0
    assert server.num_locked + server.num_cached <= server.params.capacity
    assert server._num_context == sum(
        running_job.num_prompt + running_job.num_emitted + server._step - running_job.first_step
        for running_job in running
    )
    for group, prompt in server._prompts.items():
        assert prompt.num_running == sum(running_job.group == group for running_job in running)


JOBS = st.lists(
    st.tuples(
        st.floats(0, 5),
        st.integers(1, 200),
        st.integers(1, 300),
        st.sampled_from(["", "g", "h"]),
        st.sampled_from(["a", "b", "c", "d"]),
    ),
    max_size=25,
)


@given(JOBS)
@settings(max_examples=150, deadline=None)
def test_every_job_ends_once_with_all_its_tokens(
    drawn: list[tuple[float, int, int, str, str]],
) -> None:
    params = ServerParams(capacity=1000, chunk=300, conservativeness=0.05)
    server = ServerModel(params)
    jobs = []
    for number, (when, prompt, output, group, key) in enumerate(drawn):
        shared = 40 if group else 0
        jobs.append(
            (
                when,
                job(f"{key}{group}.{number}", prompt + shared, output, group=group, shared=shared),
            )
        )
    ended = run(server, jobs)
    assert sorted(finished.name for finished in ended) == sorted(
        finished.name for _, finished in jobs
    )
    for when, submitted in jobs:
        assert submitted.num_emitted == submitted.num_output
        assert when <= submitted.first_token_s <= submitted.finished_s < math.inf
        assert 0 <= submitted.num_cached < submitted.num_prompt
    assert not server.running
    assert not server.waiting
    assert server.num_locked == 0
    assert server.num_decoded == sum(submitted.num_output for _, submitted in jobs)
    computed = sum(
        submitted.num_prompt - submitted.num_cached + submitted.num_recomputed
        for _, submitted in jobs
    )
    assert server.num_prefilled == computed
    assert server.num_retracted == sum(submitted.num_retractions for _, submitted in jobs)


def test_single_job_takes_the_computed_time() -> None:
    server = ServerModel(ServerParams())
    params = server.params
    (finished,) = run(server, [(1.0, job("a", 100, 50))])
    prefill_s = params.prefill_s + 100 * params.prefill_s_per_token
    assert finished.first_token_s == pytest.approx(1.0 + prefill_s)
    steps_s = sum(
        params.step_s + params.step_s_per_sequence + params.step_s_per_token * (101 + step)
        for step in range(49)
    )
    assert finished.finished_s == pytest.approx(1.0 + prefill_s + steps_s)


def test_jumping_is_the_same_as_stepping() -> None:
    """Interrupting segments does not change the simulation."""
    rng = random.Random(4)
    plan = [(rng.uniform(0, 3), rng.randint(1, 200), rng.randint(1, 300)) for _ in range(12)]
    once = ServerModel(PARAMS)
    often = ServerModel(PARAMS)
    first = run(once, [(t, job(f"j{n}", p, o)) for n, (t, p, o) in enumerate(plan)])
    again = [(t, job(f"j{n}", p, o)) for n, (t, p, o) in enumerate(plan)]
    last_emitted: dict[str, int] = {}
    second: list[Job] = []
    todo = sorted(again, key=lambda entry: entry[0])
    while todo or often.next_s < math.inf:
        if todo and todo[0][0] <= often.next_s:
            now_s, next_job = todo.pop(0)
            often.submit(next_job, now_s)
        else:
            now_s = often.next_s
            for running in often.running.values():
                emitted = often.num_emitted(running, now_s)
                assert emitted >= last_emitted.get(running.name, 0)
                last_emitted[running.name] = emitted
            second += often.advance()
    assert [finished.name for finished in first] == [finished.name for finished in second]
    for expected, actual in zip(first, second, strict=True):
        assert expected.finished_s == pytest.approx(actual.finished_s)


def test_returning_trajectory_finds_its_context() -> None:
    server = ServerModel(PARAMS)
    first, second = job("a.0", 100, 50), job("a.1", 160, 10)
    run(server, [(0.0, first), (50.0, second)])
    assert (first.num_cached, second.num_cached) == (0, 150)


def test_only_later_batches_of_siblings_find_the_prompt() -> None:
    server = ServerModel(ServerParams(chunk=100))
    jobs = [job(f"s{n}", 80, 20, group="g", shared=80) for n in range(4)]
    run(server, [(0.0, sibling) for sibling in jobs])
    assert [sibling.num_cached for sibling in jobs] == [0, 0, 79, 79] or [
        sibling.num_cached for sibling in jobs
    ] == [0, 79, 79, 79]


def test_least_recently_used_is_evicted_first() -> None:
    server = ServerModel(PARAMS)
    run(server, [(float(9 * n), job(f"k{n}.0", 290, 10)) for n in range(4)])
    late = [job(f"k{n}.1", 310, 10) for n in (1, 0)]
    run(server, [(100.0, late[0]), (200.0, late[1])])
    assert late[0].num_cached == 300
    assert late[1].num_cached < 300


def test_pool_that_overflows_retracts() -> None:
    server = ServerModel(ServerParams(capacity=1000, conservativeness=0.01))
    jobs = [job(f"j{n}", 60, 120) for n in range(8)]
    ended = run(server, [(0.0, member) for member in jobs])
    assert len(ended) == 8
    assert server.num_retracted == sum(member.num_retractions for member in jobs) > 0
    assert sum(member.num_recomputed for member in jobs) > 0


def test_careful_server_does_not_overflow() -> None:
    server = ServerModel(ServerParams(capacity=1000, conservativeness=2.0))
    run(server, [(0.0, job(f"j{n}", 60, 120)) for n in range(8)])
    assert server.num_retracted == 0


def test_job_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="a is larger than the pool"):
        ServerModel(PARAMS).submit(job("a", 800, 200), 0.0)


def test_what_the_device_evicts_is_loaded_from_the_host() -> None:
    """Three contexts of 400 tokens do not fit into 1,000; the host has room for them."""
    jobs = [(10.0 * number, job(f"{'abca'[number]}.{number}", 300, 100)) for number in range(4)]
    jobs[-1] = (30.0, job("a.3", 401, 10))

    def run_with(host_capacity: int) -> ServerModel:
        server = ServerModel(replace(PARAMS, host_capacity=host_capacity))
        ended = run(server, [(when, replace(next_job)) for when, next_job in jobs])
        assert len(ended) == 4
        returned = next(ended_job for ended_job in ended if ended_job.name == "a.3")
        assert returned.num_cached == (400 if host_capacity >= 1200 else 200)
        return server

    assert run_with(2000).num_prefilled == run_with(0).num_prefilled - 200
