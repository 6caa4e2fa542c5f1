"""The queue of turns, and turns that continue on another server."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.errors import PromptTooLong, RequestError, ServerUnavailable
from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.scheduling.health import ServerState
from agentloop.inference.sglang.client import SGLangServer
from agentloop.inference.sglang.control import http_session
from agentloop.inference.sglang.frames import Chunk
from agentloop.inference.sglang.sampling import Sampling
from agentloop.inference.turns import Generation
from agentloop.plain_json import dumps
from agentloop.trajectory import TurnEnd
from tests.patience import patient
from tests.support import FakeSGLang, Fault, eventually, logprob, spans_cover

pytestmark = pytest.mark.anyio

PROMPT = [1, 2, 3]
STOP = 99
ANSWER = [*range(10, 20), STOP]


def generation(
    key: str = "t", *, ids: list[int] | None = None, rid: str = "", **options: Any
) -> Generation:
    given: dict[str, Any] = {"max_new_tokens": 50, "stop_ids": (STOP,), **options}
    prompt = PROMPT if ids is None else ids
    return Generation(rid or f"{key}-0", key, prompt, Sampling(), **given)


@dataclass
class Read:
    """The chunks and calls that one reader received for its turn."""

    chunks: list[Chunk] = field(default_factory=list)
    placed: list[str] = field(default_factory=list)
    moved: list[tuple[str, str]] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.ids]

    @property
    def logprobs(self) -> list[float]:
        return [value for chunk in self.chunks for value in chunk.logprobs]


async def read(
    router: Router, request: Generation, output: Read | None = None, *, vocab_size: int = 200
) -> Read:
    output = output or Read()
    await router.generate(
        request,
        vocab_size=vocab_size,
        on_chunk=output.chunks.append,
        on_placed=lambda url, _: output.placed.append(url),
        on_moved=lambda url, why: output.moved.append((url, why)),
    )
    return output


@asynccontextmanager
async def router_of(
    *fakes: FakeSGLang, stall_timeout_s: float = 60.0, reserve_tokens: int = 256, **options: Any
) -> AsyncIterator[Router]:
    given = {"probe_interval_s": 0.01, "stall_timeout_s": stall_timeout_s, **options}
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake.serving())
        session = await stack.enter_async_context(http_session())
        servers = [
            SGLangServer(fake.url, session, stall_timeout_s=stall_timeout_s) for fake in fakes
        ]
        yield await stack.enter_async_context(
            Router.open(servers, RouterSettings(**given), reserve_tokens=reserve_tokens)
        )


def idle(router: Router) -> bool:
    """Return whether no capacity is held and no turn waits."""
    views = router.view()
    return router.num_waiting == 0 and all(
        (view.num_running, view.num_held_tokens) == (0, 0) for view in views
    )


def check_unbroken(output: Read) -> None:
    """Check that the reader saw one uninterrupted stream."""
    assert output.ids == ANSWER
    assert output.logprobs == [logprob(i) for i in range(len(ANSWER))]
    assert [chunk.end for chunk in output.chunks if chunk.end] == [TurnEnd.STOP]
    assert output.chunks[-1].end is TurnEnd.STOP


def frame_of(logprob: object) -> bytes:
    """Return a frame whose last token has this log-probability, after all of the answer."""
    ids = [*ANSWER, ANSWER[0]]
    meta = {
        "weight_version": "v0",
        "completion_tokens": len(ids),
        "output_token_logprobs": [*([-0.5, id, None] for id in ANSWER), [logprob, ids[-1], None]],
        "finish_reason": {"type": "stop"},
    }
    return dumps({"output_ids": ids, "meta_info": meta})


FAULTS = {
    "cut": Fault("cut"),
    "end of the stream": Fault("done"),
    "abort": Fault("abort"),
    "garbage": Fault("frame", body=b"{nope"),
    "null": Fault("frame", body=frame_of(None)),
    "NaN": Fault("frame", body=frame_of("NaN")),
    "error frame": Fault("frame", body=b'{"error": {"message": "x"}}'),
    "500": Fault("refuse", status=500),
    "503": Fault("refuse", status=503),
    "429": Fault("refuse", status=429),
}


@pytest.mark.parametrize("after", [0, 1, 7, len(ANSWER)])
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
async def test_turn_goes_on_elsewhere_from_its_exact_ids(fault: Fault, after: int) -> None:
    fault = Fault(fault.how, after, fault.status, fault.body)
    faults = deque([fault])  # for whichever server is asked first
    fakes = [FakeSGLang(ANSWER, faults=faults), FakeSGLang(ANSWER, faults=faults)]
    async with router_of(*fakes) as router:
        output = await read(router, generation())
        assert idle(router)
    check_unbroken(output)
    assert len(output.moved) == 1
    requests = [request for fake in fakes for request in fake.requests]
    assert sorted(len(request["input_ids"]) for request in requests)[0] == len(PROMPT)
    for request in requests:
        ids = request["input_ids"]
        assert ids == (PROMPT + ANSWER)[: len(ids)]
        assert request["sampling_params"]["max_new_tokens"] == 50 - (len(ids) - len(PROMPT))
    if len(requests) == 2:
        assert len(set(output.placed)) == 2
        assert requests[0]["rid"] != requests[1]["rid"]
    else:  # all tokens had been received: nothing was left to request
        assert after == len(ANSWER)


async def test_versions_of_a_moved_turn_count_from_its_first_token() -> None:
    faults = deque([Fault("cut", after=4)])
    old = FakeSGLang(ANSWER, faults=faults, version="v1")
    new = FakeSGLang(ANSWER, faults=faults, version="v1")
    async with router_of(old, new) as router:
        output = await read(router, generation())
    (span,) = output.chunks[-1].versions
    assert (span.start, span.end) == (4, len(ANSWER))
    assert not spans_cover(output.chunks[-1].versions, len(ANSWER))


@pytest.mark.parametrize("after", [0, 1, 7, len(ANSWER)])
async def test_constrained_turn_moves_only_as_a_whole(after: int) -> None:
    """A grammar starts anew with each request, so it cannot go on after ids of another server."""
    constraint = {"structural_tag": "{}"}
    faults = deque([Fault("cut", after=after)])
    fakes = [FakeSGLang(ANSWER, faults=faults), FakeSGLang(ANSWER, faults=faults)]
    output = Read()
    async with router_of(*fakes) as router:
        if after in (0, len(ANSWER)):
            await read(router, generation(parameters=constraint), output)
            check_unbroken(output)
        else:
            with pytest.raises(
                ServerUnavailable, match="with structural_tag cannot go on elsewhere"
            ):
                await read(router, generation(parameters=constraint), output)
        assert idle(router)
    requests = [request for fake in fakes for request in fake.requests]
    assert {request["sampling_params"]["structural_tag"] for request in requests} == {"{}"}
    assert [request["input_ids"] for request in requests] == [PROMPT] * (2 if after == 0 else 1)
    assert len(output.moved) == 1


@pytest.mark.parametrize(
    ("parameters", "moves"),
    [
        ({"logit_bias": {"5": 1.0}}, True),
        ({"logit_bias": {"5": 1.0}, "presence_penalty": 1.0}, False),
        ({"min_new_tokens": 8}, False),
    ],
)
async def test_turn_moves_unless_its_parameters_depend_on_what_was_sampled(
    parameters: dict[str, Any], moves: bool
) -> None:
    faults = deque([Fault("cut", after=4)])
    fakes = [FakeSGLang(ANSWER, faults=faults), FakeSGLang(ANSWER, faults=faults)]
    async with router_of(*fakes) as router:
        if moves:
            check_unbroken(await read(router, generation(parameters=parameters)))
        else:
            with pytest.raises(ServerUnavailable, match=r"a turn with .* cannot go on elsewhere"):
                await read(router, generation(parameters=parameters))
        assert idle(router)
    for fake in fakes:
        for request in fake.requests:
            assert request["sampling_params"].items() >= parameters.items()


@pytest.mark.parametrize("interval", [1, 4])
async def test_server_is_asked_for_frames_of_several_tokens(interval: int) -> None:
    fake = FakeSGLang(ANSWER)
    async with router_of(fake) as router:
        check_unbroken(await read(router, generation(stream_interval=interval)))
    (request,) = fake.requests
    assert request["sampling_params"].get("stream_interval", 1) == interval


@pytest.mark.parametrize("after", [None, 0, 1, 4])
async def test_log_probabilities_of_the_prompt_come_with_the_first_chunk(after: int | None) -> None:
    faults = deque([] if after is None else [Fault("cut", after=after)])
    fakes = [FakeSGLang(ANSWER, faults=faults), FakeSGLang(ANSWER, faults=faults)]
    async with router_of(*fakes) as router:
        output = await read(router, generation(prompt_logprobs=True, num_top_logprobs=1))
    check_unbroken(output)
    first, *later = output.chunks
    assert first.prompt is not None
    assert first.prompt.logprobs == [None, logprob(0), logprob(1)]
    assert first.prompt.top == [[], [(logprob(0), 2)], [(logprob(1), 3)]]
    assert [chunk.prompt for chunk in later] == [None] * len(later)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"stop_ids": (STOP, 200)}, "stop_token_ids: 200 is outside"),
        ({"parameters": {"logit_bias": {"5": 1.0, "200": 1.0}}}, "logit_bias: 200 is outside"),
        ({"ids": [5, 200]}, "ids: 200 is outside"),
        ({"ids": []}, "ids: the prompt is empty"),
    ],
)
async def test_ids_outside_of_the_vocabulary_are_never_sent(
    options: dict[str, Any], error: str
) -> None:
    fake = FakeSGLang(ANSWER)
    async with router_of(fake) as router:
        with pytest.raises(RequestError, match=error):
            await read(router, generation(**options))
    assert fake.requests == []


async def test_silence_moves_a_turn() -> None:
    faults = deque([Fault("silence", after=3)])
    fakes = [FakeSGLang(ANSWER, faults=faults), FakeSGLang(ANSWER, faults=faults)]
    async with router_of(*fakes, stall_timeout_s=0.5) as router:
        output = await read(router, generation())
        assert idle(router)
    check_unbroken(output)
    assert "silent" in output.moved[0][1]


@pytest.mark.parametrize(
    "fault",
    [
        Fault("refuse", status=400),
        Fault("refuse", status=422),
        Fault("abort", after=1, status_code=400),
        Fault("frame", body=b'{"error": {"message": "too long", "code": 400}}'),
    ],
)
async def test_bad_request_is_raised_and_does_not_affect_the_servers(fault: Fault) -> None:
    fake, second = FakeSGLang(ANSWER, faults=deque([fault])), FakeSGLang(ANSWER)
    second.faults = fake.faults
    async with router_of(fake, second) as router:
        with pytest.raises(RequestError):
            await read(router, generation())
        assert idle(router)
        assert all(view.healthy for view in router.view())
    assert len(fake.requests) + len(second.requests) == 1


async def test_turn_fails_after_max_moves() -> None:
    faults = deque(Fault("cut", after=1) for _ in range(10))
    fakes = [FakeSGLang(ANSWER, faults=faults), FakeSGLang(ANSWER, faults=faults)]
    async with router_of(
        *fakes, max_migrations=3
    ) as router:  # probes keep making them healthy again
        with pytest.raises(ServerUnavailable, match="gave up after 4 servers"):
            await read(router, generation())
        assert idle(router)
    assert len(faults) == 6


async def test_with_every_server_dead_a_turn_fails_in_time() -> None:
    fakes = [FakeSGLang(ANSWER, ready=False) for _ in range(2)]
    for fake in fakes:
        fake.faults.append(Fault("refuse", status=500))
    async with router_of(*fakes, wait_timeout_s=0.5) as router:
        with pytest.raises(
            ServerUnavailable, match=r"no server had free KV capacity within 0\.5 s"
        ):
            await read(router, generation())
        assert [view.healthy for view in router.view()] == [False, False]
        assert idle(router)
        for fake in fakes:
            fake.ready = True
        await eventually(lambda: all(view.healthy for view in router.view()))
        check_unbroken(await read(router, generation()))


@pytest.mark.parametrize(
    ("ids", "error"), [([], "empty"), ([1, 200], "200 is outside"), ([-1, 3], "-1 is outside")]
)
async def test_id_out_of_the_vocabulary_never_reaches_a_server(ids: list[int], error: str) -> None:
    fake = FakeSGLang(ANSWER)
    async with router_of(fake) as router:
        with pytest.raises(RequestError, match=error):
            await read(router, generation(ids=ids))
    assert fake.requests == []


async def test_prompt_that_no_server_can_hold_is_refused_at_once() -> None:
    small = FakeSGLang(ANSWER, context_length=1000, max_total_num_tokens=50)
    async with router_of(FakeSGLang(ANSWER), small) as router:
        assert router.context_length == 49
        with pytest.raises(PromptTooLong):
            await read(router, generation(ids=[1] * 49))
    assert small.requests == []


@asynccontextmanager
async def crowd(
    router: Router, keys: list[str], *, reads: dict[str, Read]
) -> AsyncIterator[Callable[[str], anyio.CancelScope]]:
    """Start one reader per key, in that order; yield a function that returns a reader's cancel
    scope."""
    scopes = {key: anyio.CancelScope() for key in keys}

    async def one(key: str) -> None:
        with scopes[key]:
            await read(router, generation(key, max_new_tokens=20), reads[key])

    async with anyio.create_task_group() as tasks:
        for key in keys:
            reads[key] = Read()
            tasks.start_soon(one, key)
            await eventually(
                lambda: router.num_waiting + sum(v.num_running for v in router.view()) == len(reads)
            )
        yield lambda key: scopes[key]


CAPACITY_FOR_ONE = {"max_total_num_tokens": 40, "context_length": 39}


async def test_longest_waiting_turn_goes_first() -> None:
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, gate=gate, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    reads: dict[str, Read] = {}
    async with router_of(fake, reserve_tokens=20) as router:
        async with crowd(router, ["a", "b", "c", "d"], reads=reads):
            assert router.num_waiting == 3
            gate.set()
        assert idle(router)
    for output in reads.values():
        check_unbroken(output)
    assert len(fake.requests) == 4


async def test_cancelled_turn_leaves_the_queue() -> None:
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, gate=gate, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    reads: dict[str, Read] = {}
    async with router_of(fake, reserve_tokens=20) as router:
        async with crowd(router, ["a", "b", "c"], reads=reads) as scope:
            scope("b").cancel()
            await eventually(lambda: router.num_waiting == 1)
            scope("a").cancel()  # which admits the next
            await eventually(lambda: len(reads["c"].placed) == 1)
            assert router.num_waiting == 0
            gate.set()
        assert idle(router)
    assert reads["b"].placed == []
    check_unbroken(reads["c"])


async def test_turn_cancelled_just_before_it_is_placed_holds_nothing() -> None:
    fake = FakeSGLang(ANSWER)
    async with router_of(fake) as router:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await read(router, generation())
        assert idle(router)
        check_unbroken(await read(router, generation()))


async def test_turn_cancelled_just_after_it_is_placed_holds_nothing() -> None:
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, gate=gate, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    reads: dict[str, Read] = {}
    async with router_of(fake, reserve_tokens=20) as router:
        async with crowd(router, ["a", "b", "c"], reads=reads) as scope:
            scope("a").cancel()
            while router.num_waiting == 2:
                await anyio.lowlevel.checkpoint()
            scope("b").cancel()  # it has been placed, but its task has not run yet
            gate.set()
        assert idle(router)
    check_unbroken(reads["c"])


async def test_wait_queue_is_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentloop.inference.router._MAX_WAITING", 1)
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, gate=gate, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    reads: dict[str, Read] = {}
    async with router_of(fake, reserve_tokens=20) as router:
        async with crowd(router, ["a", "b"], reads=reads):
            with pytest.raises(ServerUnavailable, match="1 requests are already waiting"):
                await read(router, generation("c", max_new_tokens=20))
            gate.set()
        assert idle(router)
    for output in reads.values():
        check_unbroken(output)


async def test_wait_queue_is_bounded_in_time() -> None:
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, gate=gate, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    reads: dict[str, Read] = {}
    async with router_of(fake, reserve_tokens=20, wait_timeout_s=0.2) as router:
        async with crowd(router, ["a"], reads=reads):
            with pytest.raises(ServerUnavailable, match="no server had free KV capacity"):
                await read(router, generation("b", max_new_tokens=20))
            gate.set()
        assert idle(router)
    check_unbroken(reads["a"])


async def test_trajectory_stays_where_its_cache_is() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with router_of(*fakes) as router:
        for key in ("a", "b", "a", "b", "a"):
            await read(router, generation(key))
        places = [await read(router, generation("a")) for _ in range(3)]
        assert len({place.placed[0] for place in places}) == 1
        router.forget("a")


async def test_load_is_spread_over_the_servers() -> None:
    gate = anyio.Event()
    fakes = [FakeSGLang(ANSWER, gate=gate), FakeSGLang(ANSWER, gate=gate)]
    reads: dict[str, Read] = {}
    async with router_of(*fakes) as router:
        async with crowd(router, list("abcdef"), reads=reads):
            assert [view.num_running for view in router.view()] == [3, 3]
            gate.set()


async def test_ledger_follows_the_stream() -> None:
    fake = FakeSGLang(ANSWER, faults=deque([Fault("silence", after=4)]))
    async with router_of(fake) as router, anyio.create_task_group() as tasks:
        tasks.start_soon(read, router, generation())
        await eventually(lambda: router.view()[0].num_held_tokens == len(PROMPT) + 4)
        tasks.cancel_scope.cancel()
    assert idle(router)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(FAULTS)), st.integers(0, len(ANSWER))), max_size=4),
    st.booleans(),
    st.integers(1, 4),
)
async def test_reader_sees_one_stream_whatever_breaks(
    plan: list[tuple[str, int]], incremental: bool, tokens_a_frame: int
) -> None:
    faults = deque(
        Fault(FAULTS[name].how, after, FAULTS[name].status, FAULTS[name].body)
        for name, after in plan
    )
    options: Any = {
        "faults": faults, "incremental": incremental, "tokens_a_frame": tokens_a_frame
    }  # fmt: skip
    async with router_of(FakeSGLang(ANSWER, **options), FakeSGLang(ANSWER, **options)) as router:
        check_unbroken(await read(router, generation()))
        assert idle(router)


async def test_requests_are_json_that_sglang_reads() -> None:
    fake = FakeSGLang(ANSWER)
    async with router_of(fake) as router:
        await read(router, generation())
        assert router.replicas.model_path == "fake"
    assert json.loads(json.dumps(fake.requests[0]))["input_ids"] == PROMPT


async def test_trajectory_comes_back_to_its_server() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with router_of(*fakes) as router:
        first = await read(router, generation("t"))
        for n in range(5):
            await read(router, generation(f"other{n}"))
            again = await read(router, generation("t", rid=f"t-{n + 1}"))
            assert again.placed == first.placed


async def test_server_that_stops_answering_loses_its_streams() -> None:
    """Three failed probes show that a server is dead, long before its streams time out."""
    silent = FakeSGLang(ANSWER, faults=deque([Fault("silence", after=4)]))
    well = FakeSGLang(ANSWER, ready=False)  # so that the first server is chosen
    async with router_of(silent, well) as router:
        await eventually(lambda: not router.view()[1].healthy)
        output = Read()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, router, generation(), output)
            await eventually(lambda: len(output.ids) == 4)
            well.ready = True
            silent.ready = False
        assert router.view()[0].state is ServerState.DEAD
    check_unbroken(output)
    assert output.placed == [silent.url, well.url]
    assert [url for url, _ in output.moved] == [silent.url]


async def test_server_can_be_added() -> None:
    dead, late = FakeSGLang(ANSWER), FakeSGLang(ANSWER)
    async with late.serving(), http_session() as session, router_of(dead) as router:
        server = SGLangServer(late.url, session)
        await router.replicas.add(server)
        with pytest.raises(ValueError, match="was already added"):
            await router.replicas.add(server)
        dead.ready = False
        await eventually(lambda: not router.view()[0].healthy)
        assert (await read(router, generation())).placed == [late.url]


async def test_retired_server_finishes_its_turns_and_is_removed() -> None:
    gate = anyio.Event()
    old, new = FakeSGLang(ANSWER, gate=gate), FakeSGLang(ANSWER, ready=False)
    async with router_of(old, new) as router:
        await eventually(lambda: not router.view()[1].healthy)
        output = Read()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, router, generation("a"), output)
            await eventually(lambda: old.num_streaming == 1)
            new.ready = True
            await eventually(lambda: router.view()[1].healthy)
            router.replicas.retire(old.url)
            assert (await read(router, generation("b"))).placed == [new.url]
            gate.set()
        check_unbroken(output)
        assert output.placed == [old.url]
        await eventually(lambda: [view.url for view in router.view()] == [new.url])
        with pytest.raises(KeyError):
            router.replicas.retire(old.url)
        router.replicas.retire(new.url)
        await eventually(lambda: router.view() == [])
        with pytest.raises(ServerUnavailable, match="all have been retired"):
            await read(router, generation("c"))


async def test_waiting_turns_are_listed_with_the_reason() -> None:
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, gate=gate, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    reads: dict[str, Read] = {}
    async with router_of(fake, reserve_tokens=20) as router:
        async with crowd(router, ["a", "b"], reads=reads):
            ((key, waited_s, reason),) = router.waits()
            assert (key, reason) == ("b", "no server has free KV capacity for it")
            assert 0 <= waited_s < 20
            gate.set()
        assert router.waits() == []


async def test_capacity_held_by_others_is_not_used() -> None:
    """The KV cache is full of others' requests: ours wait until the server reports that they are
    gone."""
    fake = FakeSGLang(ANSWER, load={"num_used_tokens": 1990, "num_running_reqs": 5})
    async with router_of(fake) as router, anyio.create_task_group() as tasks:
        await eventually(lambda: router.view()[0].num_others_tokens >= 1900)
        output = Read()
        tasks.start_soon(read, router, generation(), output)
        await eventually(lambda: router.num_waiting == 1)
        assert not fake.requests
        fake.load = {}
        await eventually(lambda: output.ids == ANSWER)


async def test_siblings_share_a_server_and_the_capacity_of_their_prompt() -> None:
    gate = anyio.Event()
    prompt = [5] * 400
    fakes = [FakeSGLang(ANSWER, gate=gate, num_prompt=400, max_total_num_tokens=600) for _ in "ab"]
    async with router_of(*fakes, reserve_tokens=10) as router, anyio.create_task_group() as tasks:
        for n in range(3):
            request = generation(f"t{n}", ids=prompt, group="g", num_shared=400, max_new_tokens=20)
            tasks.start_soon(read, router, request)
        await eventually(lambda: sum(view.num_running for view in router.view()) == 3)
        held = sorted(view.num_held_tokens for view in router.view())
        assert held == [0, 400]
        gate.set()


async def test_each_rank_of_a_server_has_its_own_cache() -> None:
    """A turn goes to a rank by number and returns to it; reports are kept apart."""
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, dp_size=2, gate=gate, load={}, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    reads: dict[str, Read] = {}
    async with router_of(fake, reserve_tokens=20) as router:
        assert router.view()[0].capacity_tokens == 80
        async with crowd(router, ["a", "b", "c"], reads=reads):
            assert router.num_waiting == 1
            await eventually(lambda: len(fake.requests) == 2)
            assert sorted(request["routed_dp_rank"] for request in fake.requests) == [0, 1]
            first = {len(fake.requests): 0}
            gate.set()
        assert len(fake.requests) == first.popitem()[0] + 1
        again = fake.requests[-1]["routed_dp_rank"]
        await read(router, generation("c"))
        assert fake.requests[-1]["routed_dp_rank"] == again
        assert idle(router)


async def test_requests_to_a_server_of_one_rank_name_no_rank() -> None:
    fake = FakeSGLang(ANSWER)
    async with router_of(fake) as router:
        await read(router, generation())
    assert "routed_dp_rank" not in fake.requests[0]


async def test_only_servers_with_the_required_weights_serve() -> None:
    old, new = FakeSGLang(ANSWER, version="7"), FakeSGLang(ANSWER, version="8")
    async with router_of(old, new) as router:
        router.replicas.require_weights("8")
        await eventually(lambda: [v.state for v in router.view()] == ["stale", "healthy"])
        for n in range(4):
            assert (await read(router, generation(f"t{n}"))).placed == [new.url]
        old.version = "8"
        await eventually(lambda: router.view()[0].healthy)
        new.version = "7"  # changed by someone else
        await eventually(lambda: router.view()[1].state is ServerState.STALE)
        assert (await read(router, generation("t9"))).placed == [old.url]
        router.replicas.require_weights(None)
        await eventually(lambda: all(view.healthy for view in router.view()))


async def test_new_weights_flush_the_ledger() -> None:
    fake = FakeSGLang(ANSWER, version="7")
    async with router_of(fake) as router:
        await eventually(lambda: router.replicas[fake.url].weight_version == "7")
        await read(router, generation())
        assert router.view()[0].num_parked_tokens == len(PROMPT) + len(ANSWER)
        fake.version = "8"
        await eventually(lambda: router.view()[0].num_parked_tokens == 0)


async def test_restarted_server_is_treated_as_a_new_one() -> None:
    """Turns move at once when a process ends. The new process may have another size."""
    fake, second = FakeSGLang(ANSWER), FakeSGLang(ANSWER)
    async with router_of(fake, second) as router:
        await read(router, generation("a"))
        fake.ready = second.ready = False
        for view in router.view():
            router.replicas.mark_exited(view.url, "was killed by SIGKILL")
        assert [(v.state, v.reason) for v in router.view()] == [
            ("dead", "was killed by SIGKILL")
        ] * 2
        assert router.replicas.is_dead(fake.url)
        router.replicas.mark_restarting(fake.url)
        assert router.view()[0].state is ServerState.RESTARTING
        fake.max_total_num_tokens, fake.dp_size = 500, 3
        fake.ready = True
        await eventually(lambda: router.view()[0].healthy)
        view = router.view()[0]
        assert (view.capacity_tokens, view.num_parked_tokens) == (1500, 0)
        check_unbroken(await read(router, generation("a")))
        assert not router.replicas.is_dead(fake.url)
        router.replicas.mark_exited("http://nobody", "not a server of this router")


async def test_process_that_ends_sends_its_turns_elsewhere_at_once() -> None:
    """The streams may stay open, as those of a machine that has vanished do."""
    silent = FakeSGLang(ANSWER, faults=deque([Fault("silence", after=4)]))
    second = FakeSGLang(ANSWER, ready=False)
    async with router_of(silent, second) as router:
        await eventually(lambda: not router.view()[1].healthy)
        output = Read()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, router, generation(), output)
            await eventually(lambda: len(output.ids) == 4)
            second.ready = True
            router.replicas.mark_exited(silent.url, "ended with exit status 1")
        assert output.moved == [
            (silent.url, f"{silent.url}: ended with exit status 1, after 4 tokens")
        ]
    check_unbroken(output)


async def test_groups_wait_for_the_capacity_that_they_will_need() -> None:
    fake = FakeSGLang(ANSWER, load={}, max_total_num_tokens=200, context_length=100)
    inside: list[str] = []
    ends = {name: anyio.Event() for name in "ab"}

    async def hold(name: str) -> None:
        async with router.group(name, 4, 10) as group:
            inside.append(group.name)
            await ends[name].wait()
            for key in group.keys:
                router.forget(key, is_complete=True)

    async with router_of(fake) as router, anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(hold, name)
            await anyio.wait_all_tasks_blocked()
        assert inside == ["a"]
        ((name, _, reason),) = router.waits()
        assert (name, reason) == ("b", "the 1 groups in flight will need all KV capacity")
        ends["a"].set()
        await eventually(lambda: inside == ["a", "b"])
        ends["b"].set()


async def test_decision_lists_its_candidates() -> None:
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    explanations: list[str] = []
    async with router_of(*fakes) as router:
        await router.generate(
            generation(),
            vocab_size=200,
            on_chunk=lambda chunk: None,
            on_placed=lambda url, decision: explanations.append(decision.explain()),
            on_moved=lambda url, reason: None,
        )
    (text,) = explanations
    assert all(fake.url in text for fake in fakes)
    assert "-> http://" in text


async def test_explain_logs_each_decision(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "agentloop.explain")
    fakes = [FakeSGLang(ANSWER), FakeSGLang(ANSWER)]
    async with router_of(*fakes) as router:
        (output,) = [await read(router, generation("t7"))]
    (record,) = caplog.records
    text = record.getMessage()
    assert re.match(r"t7 \(3 tokens, waited \d+\.\d\d s\) kv: lowest cost", text)
    assert f"-> {output.placed[0]}#0 " in text
    assert all(fake.url in text for fake in fakes)


async def test_caller_whose_callback_raises_holds_nothing() -> None:
    def refuse(url: str, decision: object) -> None:
        raise KeyError("ours")

    async with router_of(FakeSGLang(ANSWER)) as router:
        with pytest.raises(KeyError, match="ours"):
            await router.generate(
                generation(),
                vocab_size=200,
                on_chunk=lambda chunk: None,
                on_placed=refuse,
                on_moved=lambda url, reason: None,
            )
        assert idle(router)


async def test_missing_reports_do_not_block_turns_or_groups() -> None:
    """A server that is back takes turns and groups even if it does not report its load."""
    fake = FakeSGLang(ANSWER, max_total_num_tokens=200, context_length=100)
    inside: list[str] = []

    async def silent(request: web.Request) -> web.Response:
        await anyio.sleep_forever()
        raise AssertionError

    fake._loads = silent  # type: ignore[method-assign]

    async def hold(name: str) -> None:
        async with router.group(name, 4, 10):
            inside.append(name)
            await anyio.sleep_forever()

    async with router_of(fake) as router, anyio.create_task_group() as tasks:
        fake.ready = False
        router.replicas.mark_exited(fake.url, "was killed by SIGKILL")
        output = Read()
        tasks.start_soon(read, router, generation(), output)
        for name in "ab":
            tasks.start_soon(hold, name)
        await eventually(lambda: router.num_waiting == 1 and bool(inside))
        assert inside == ["a"]
        fake.ready, fake.max_total_num_tokens = True, 20_000
        await eventually(lambda: output.ids == ANSWER and inside == ["a", "b"])
        tasks.cancel_scope.cancel()


async def test_adding_a_server_admits_groups() -> None:
    small = FakeSGLang(ANSWER, ready=False, max_total_num_tokens=200, context_length=100)
    large = FakeSGLang(ANSWER, max_total_num_tokens=20_000, context_length=100)
    inside: list[str] = []

    async def hold(name: str) -> None:
        async with router.group(name, 4, 10):
            inside.append(name)
            await anyio.sleep_forever()

    async with large.serving(), http_session() as session, router_of(small) as router:
        async with anyio.create_task_group() as tasks:
            for name in "ab":
                tasks.start_soon(hold, name)
            await eventually(lambda: len(router.waits()) == 1)
            await router.replicas.add(SGLangServer(large.url, session))
            await eventually(lambda: inside == ["a", "b"])
            tasks.cancel_scope.cancel()


async def test_answer_from_before_a_servers_end_is_ignored() -> None:
    fake = FakeSGLang(ANSWER)
    answer = anyio.Event()
    num_asked = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        await answer.wait()
        return web.json_response({"weight_version": "v0"}, status=200 if num_asked == 1 else 503)

    fake._model_info = slow  # type: ignore[method-assign]
    async with router_of(fake) as router:
        await eventually(lambda: num_asked == 1)
        router.replicas.mark_exited(fake.url, "was killed by SIGKILL")
        answer.set()
        await eventually(lambda: num_asked >= 3)
        assert router.view()[0].state is ServerState.DEAD


async def test_answer_from_before_a_weight_sync_is_ignored() -> None:
    """The server was healthy when it was probed, and is healthy again when the answer arrives."""
    fake = FakeSGLang(ANSWER, version="7")
    is_asked, answer = anyio.Event(), anyio.Event()
    states: list[ServerState] = []
    num_asked = 0

    async def slow(request: web.Request) -> web.Response:
        nonlocal num_asked
        num_asked += 1
        version = fake.version
        if version == "7" and num_asked > 1:
            is_asked.set()
            await answer.wait()
        return web.json_response({"weight_version": version})

    fake._model_info = slow  # type: ignore[method-assign]
    async with router_of(fake) as router:
        router.replicas.require_weights("7")
        await is_asked.wait()
        router.replicas.require_weights("8")
        fake.version = "8"
        router.replicas.weights_loaded(fake.url, "8")
        assert router.view()[0].healthy
        num_before = num_asked
        answer.set()
        while num_asked < num_before + 2:
            states.append(router.view()[0].state)
            await anyio.lowlevel.checkpoint()
        assert set(states) == {ServerState.HEALTHY}
        assert router.view()[0].weight_version == "8"


async def test_restarting_server_is_dead_until_it_answers() -> None:
    fake = FakeSGLang(ANSWER)
    async with router_of(fake) as router:
        fake.ready = False
        router.replicas.mark_exited(fake.url, "was killed by SIGKILL")
        router.replicas.mark_restarting(fake.url)
        assert router.replicas.is_dead(fake.url)
        fake.ready = True
        await eventually(lambda: not router.replicas.is_dead(fake.url))


@pytest.mark.parametrize("in_flight", [True, False])
async def test_group_that_is_refused_leaves_its_namesake_alone(in_flight: bool) -> None:
    """Admitting it later, next to the other, would raise in whichever task frees capacity."""
    fake = FakeSGLang(ANSWER, load={}, max_total_num_tokens=200, context_length=100)
    async with router_of(fake) as router, anyio.create_task_group() as tasks:

        async def hold(name: str) -> None:
            async with router.group(name, 4, 3):
                await anyio.sleep_forever()

        for name in ["g"] if in_flight else ["other", "g"]:
            tasks.start_soon(hold, name)
            await anyio.wait_all_tasks_blocked()
        await read(router, generation("g.0", group="g", num_shared=3))
        order = dict(router._orders)
        with pytest.raises(ValueError, match="'g' is already in flight"):
            async with router.group("g", 4, 3):
                raise AssertionError
        assert dict(router._orders) == order == {"g": 0}
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize("context_length", [len(PROMPT) + len(ANSWER), 10])
async def test_moved_turn_asks_for_what_its_new_server_can_hold(
    context_length: int,
) -> None:
    """A server with a smaller context was added after the turn had begun."""
    large = FakeSGLang(ANSWER, gate=anyio.Event())
    small = FakeSGLang(
        ANSWER, context_length=context_length, end="stop" if context_length > 10 else "length"
    )
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(small.serving())
        session = await stack.enter_async_context(http_session())
        router = await stack.enter_async_context(router_of(large, probe_interval_s=1000))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        output = Read()
        tasks.start_soon(read, router, generation(max_new_tokens=500), output)
        await eventually(lambda: large.num_streaming == 1)
        await router.replicas.add(SGLangServer(small.url, session))
        router.replicas.mark_exited(large.url, "was killed by SIGKILL")
    assert output.placed == [large.url, small.url]
    if context_length > 10:
        check_unbroken(output)
    else:
        assert output.ids == ANSWER[: 10 - len(PROMPT)]
        assert output.chunks[-1].end is TurnEnd.LENGTH


async def test_turn_avoids_servers_with_too_little_context() -> None:
    large = FakeSGLang(ANSWER, faults=deque([Fault("silence", after=5)]))
    small = FakeSGLang(ANSWER, context_length=len(PROMPT) + 5)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(small.serving())
        session = await stack.enter_async_context(http_session())
        router = await stack.enter_async_context(router_of(large))
        tasks = await stack.enter_async_context(anyio.create_task_group())
        output = Read()
        tasks.start_soon(read, router, generation(max_new_tokens=500), output)
        await eventually(lambda: len(output.ids) == 5)
        await router.replicas.add(SGLangServer(small.url, session))
        large.ready = False
        router.replicas.mark_exited(large.url, "was killed by SIGKILL")
        await eventually(lambda: router.num_waiting == 1)
        large.ready = True
    check_unbroken(output)
    assert output.placed == [large.url, large.url]


async def test_turn_too_large_for_every_server_fails_at_once() -> None:
    """The server came back with less capacity; the turns behind it go on."""
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, num_prompt=100, gate=gate)
    async with router_of(fake) as router, anyio.create_task_group() as tasks:

        async def read_in_vain() -> None:
            with pytest.raises(ServerUnavailable, match="can hold 100 tokens"):
                await read(router, generation("a", ids=[5] * 100))

        tasks.start_soon(read_in_vain)
        await eventually(lambda: fake.num_streaming == 1)
        fake.max_total_num_tokens, fake.num_prompt = 60, 3
        router.replicas.mark_exited(fake.url, "was killed by SIGKILL")
        gate.set()
        output = Read()
        tasks.start_soon(read, router, generation("b"), output)
        await eventually(lambda: output.ids == ANSWER)
    assert idle(router)


async def test_waiting_turns_fail_when_the_last_server_is_retired() -> None:
    gate = anyio.Event()
    fake = FakeSGLang(ANSWER, gate=gate, **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    first = Read()
    async with router_of(fake, reserve_tokens=20) as router, anyio.create_task_group() as tasks:

        async def too_late() -> None:
            with pytest.raises(ServerUnavailable, match="no remaining server"):
                await read(router, generation("b"))

        tasks.start_soon(read, router, generation("a", max_new_tokens=20), first)
        await eventually(lambda: fake.num_streaming == 1)
        tasks.start_soon(too_late)
        await eventually(lambda: router.num_waiting == 1)
        router.replicas.retire(f"{fake.url}/")  # the same URL as for `add`
        await eventually(lambda: router.num_waiting == 0)
        gate.set()
    check_unbroken(first)


async def test_retired_server_that_dies_loses_its_turns_at_once() -> None:
    silent = FakeSGLang(ANSWER, faults=deque([Fault("silence", after=4)]))
    second = FakeSGLang(ANSWER, ready=False)
    async with router_of(silent, second, stall_timeout_s=60) as router:
        await eventually(lambda: not router.view()[1].healthy)
        output = Read()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read, router, generation(), output)
            await eventually(lambda: len(output.ids) == 4)
            second.ready = True
            router.replicas.retire(silent.url)
            router.replicas.mark_exited(silent.url, "ended with exit status 1")
        await eventually(lambda: [view.url for view in router.view()] == [second.url])
    check_unbroken(output)


async def test_closing_fails_all_turns_and_blames_no_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fake = FakeSGLang(ANSWER, gate=anyio.Event(), **CAPACITY_FOR_ONE)  # type: ignore[arg-type]
    failed: list[str] = []

    async def ask(key: str) -> None:
        with pytest.raises(ServerUnavailable, match="shutting down"):
            await read(router, generation(key, max_new_tokens=20))
        failed.append(key)

    with anyio.fail_after(patient(15)):
        async with anyio.create_task_group() as tasks:
            async with router_of(fake, reserve_tokens=20) as router:
                tasks.start_soon(ask, "runs")
                await eventually(lambda: fake.num_streaming == 1)
                tasks.start_soon(ask, "waits")
                await eventually(lambda: router.num_waiting == 1)
            await ask("comes later")
    assert sorted(failed) == ["comes later", "runs", "waits"]
    assert not caplog.records
