"""Groups are admitted in order as capacity allows, and leave no state behind."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.inference.scheduling.admission import Admission, AdmissionLimits, Forecast
from agentloop.inference.scheduling.group_gate import GroupGate

pytestmark = pytest.mark.anyio

LONGEST = 320


def gate_of(capacity: list[int], *, target: float = 1.0) -> GroupGate:
    """Return a gate where each rollout is expected to reach about 200 tokens."""
    forecast = Forecast(longest=LONGEST, prior=200)
    return GroupGate(
        Admission(AdmissionLimits(target=target), forecast),
        capacity=lambda: capacity[0],
        clock=lambda: 0.0,
    )


async def hold(gate: GroupGate, name: str, inside: list[str], until: anyio.Event) -> None:
    async with gate.group(name, 4, 50) as group:
        assert group.keys == tuple(f"{name}.{index}" for index in range(4))
        inside.append(name)
        try:
            await until.wait()
        finally:
            inside.remove(name)


async def test_more_groups_than_fit_wait_in_order() -> None:
    gate, inside = gate_of([2000]), list[str]()
    ends = {name: anyio.Event() for name in "abcdefgh"}
    async with anyio.create_task_group() as tasks:
        for name, end in ends.items():
            tasks.start_soon(hold, gate, name, inside, end)
        await anyio.wait_all_tasks_blocked()
        num_inside = len(inside)
        assert 1 < num_inside < 8
        assert inside == sorted(inside)
        assert [name for name, _, _ in gate.waits()] == sorted(set(ends) - set(inside))
        for name, end in ends.items():
            end.set()
            await anyio.wait_all_tasks_blocked()
            assert len(inside) == min(num_inside, 8 - list(ends).index(name) - 1)
    assert gate.waits() == []


async def test_group_may_always_start_if_none_is_in_flight() -> None:
    gate, inside = gate_of([10]), list[str]()
    ends = [anyio.Event(), anyio.Event()]
    async with anyio.create_task_group() as tasks:
        for name, end in zip("ab", ends, strict=True):
            tasks.start_soon(hold, gate, name, inside, end)
        await anyio.wait_all_tasks_blocked()
        assert inside == ["a"]
        ends[0].set()
        await anyio.wait_all_tasks_blocked()
        assert inside == ["b"]
        ends[1].set()


async def test_rollouts_that_end_free_capacity_before_their_group_does() -> None:
    gate, inside = gate_of([600]), list[str]()
    end = anyio.Event()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(hold, gate, "a", inside, end)
        await anyio.wait_all_tasks_blocked()
        tasks.start_soon(hold, gate, "b", inside, end)
        await anyio.wait_all_tasks_blocked()
        assert inside == ["a"]
        gate.end_conversation("somebody else's", is_complete=True)
        for index in range(4):
            gate.end_conversation(f"a.{index}", is_complete=True)
        await anyio.wait_all_tasks_blocked()
        assert inside == ["a", "b"]
        end.set()


async def test_rollout_of_several_conversations_holds_what_they_hold_together() -> None:
    forecast = Forecast(longest=LONGEST, prior=200)
    gate = GroupGate(
        Admission(AdmissionLimits(), forecast), capacity=lambda: 2000, clock=lambda: 0.0
    )
    alone = Forecast(longest=LONGEST, prior=200)
    alone.start("g.0")
    async with gate.group("g", 1, 0, is_single=False) as group:
        gate.record_length("g.0", 100)
        gate.record_length("g.0+black", 50)
        alone.grow("g.0", 150)
        assert forecast.peak() == alone.peak()
        # The rollout goes on after its first conversation.
        gate.end_conversation("g.0", is_complete=True)
        gate.record_length("g.0+1", 120)
        alone.grow("g.0", 20)
        assert forecast.peak() == alone.peak()
        assert len(forecast) == 1
        group.end("g.0", True)
        assert len(forecast) == 0
        gate.record_length("g.0+1", 300)  # a late one is not counted
        assert forecast.peak() == 0


async def test_conversations_are_admitted_by_the_prompt_that_siblings_share() -> None:
    gate = gate_of([1400])
    async with gate.group("a", 1, 0, is_single=False):
        gate.record_length("a.0", 10, num_shared=1000)
        with anyio.move_on_after(0.01) as waiting:
            async with gate.group("b", 1, 0, is_single=False):
                raise AssertionError("two prompts of 1,000 tokens do not fit")
        assert waiting.cancelled_caught
    async with gate.group("b", 1, 0, is_single=False):
        pass


async def test_source_is_asked_only_when_there_is_capacity() -> None:
    gate, requests = gate_of([600]), list[int]()
    end = anyio.Event()

    async def source() -> None:
        for index in range(3):
            await gate.wait_for_capacity(4)
            requests.append(index)
            tasks.start_soon(hold, gate, f"g{index}", [], end)
            await anyio.wait_all_tasks_blocked()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(source)
        await anyio.wait_all_tasks_blocked()
        assert requests == [0]
        end.set()
    assert requests == [0, 1, 2]


async def test_new_capacity_admits_groups_at_the_next_report() -> None:
    capacity = [600]
    gate, inside, end = gate_of(capacity), list[str](), anyio.Event()
    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(hold, gate, name, inside, end)
        await anyio.wait_all_tasks_blocked()
        assert inside == ["a"]
        capacity[0] = 4000
        gate.observe(0.0, 0, 0.0)
        await anyio.wait_all_tasks_blocked()
        assert inside == ["a", "b"]
        end.set()


async def test_two_groups_of_one_name_are_refused() -> None:
    gate = gate_of([4000])
    async with gate.group("a", 2, 10):
        with pytest.raises(ValueError, match="'a' is already in flight"):
            async with gate.group("a", 2, 10):
                pass


async def test_name_is_taken_while_its_group_waits_and_free_afterwards() -> None:
    gate, inside, end = gate_of([600]), list[str](), anyio.Event()
    async with anyio.create_task_group() as tasks:
        for name in "ab":
            tasks.start_soon(hold, gate, name, inside, end)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(ValueError, match="'b' is already in flight"):
            async with gate.group("b", 4, 50):
                pass
        tasks.cancel_scope.cancel()
    async with gate.group("b", 4, 50), anyio.create_task_group() as tasks:
        for index in range(4):  # all have ended, but the group has not
            gate.end_conversation(f"b.{index}", is_complete=True)
        with pytest.raises(ValueError, match="'b' is already in flight"):
            async with gate.group("b", 4, 50):
                pass


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "cancel", "end", "grow", "finish"]), st.integers(0, 5)),
        max_size=40,
    )
)
async def test_no_state_is_left_and_no_group_is_lost(
    script: list[tuple[str, int]],
) -> None:
    gate, inside = gate_of([1500]), list[str]()
    ends = [anyio.Event() for _ in range(6)]
    scopes: dict[int, anyio.CancelScope] = {}

    async def first(index: int) -> None:
        with anyio.CancelScope() as scope:
            scopes[index] = scope
            await hold(gate, f"g{index}", inside, ends[index])

    async with anyio.create_task_group() as tasks:
        for number, (action, index) in enumerate(script):
            if action == "start" and index not in scopes:
                tasks.start_soon(first, index)
                await anyio.lowlevel.checkpoint()
            elif action == "cancel" and index in scopes:
                scopes[index].cancel()
            elif action == "end":
                ends[index].set()
            elif action == "grow":
                gate.record_length(f"g{index}.{number % 4}", number * 10)
            elif action == "finish":
                gate.end_conversation(f"g{index}.{number % 4}", is_complete=True)
            if number % 3 == 0:
                await anyio.lowlevel.checkpoint()
        for end in ends:
            end.set()
    assert not gate.waits()
    assert not inside
    assert not gate._num_tokens
    assert gate._admission.num_in_flight == 0
    assert len(gate._admission.forecast) == 0
