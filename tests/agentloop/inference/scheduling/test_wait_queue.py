"""The order of waiting requests, none of which waits forever."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from agentloop.inference.scheduling.wait_queue import Stage, Waiting, WaitQueue


def waiting(name: str, order: int = 0, expected: int = 1, since_s: float = 0.0) -> Waiting[int]:
    return Waiting(name, order, expected, since_s, expected)


class Room(RuleBasedStateMachine):
    """Compares the queue with a plain list."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: WaitQueue[int] = WaitQueue(starvation_threshold_s=5.0, max_overtaken=3)
        self.plain: dict[str, Waiting[int]] = {}
        self.now = 0.0
        self.count = 0

    def in_order(self) -> list[Waiting[int]]:
        return sorted(
            self.plain.values(),
            key=lambda entry: (
                entry.stage,
                *(
                    (0, entry.expected + 10.0 * entry.since_s, 0.0)
                    if entry.stage is Stage.PAUSED
                    else (entry.order, -entry.expected, entry.since_s)
                ),
                entry.name,
            ),
        )

    @rule(order=st.integers(0, 3), size=st.integers(1, 20), stage=st.sampled_from(Stage))
    def enter(self, order: int, size: int, stage: Stage) -> None:
        self.count += 1
        entry = Waiting(f"w{self.count}", order, size, self.now, size, stage)
        self.queue.enter(entry)
        self.plain[entry.name] = entry

    @rule(number=st.integers(0, 20))
    def leave(self, number: int) -> None:
        name = f"w{number}"
        assert self.queue.leave(name) == (self.plain.pop(name, None) is not None)

    @rule(largest=st.integers(0, 20))
    def pause(self, largest: int) -> None:
        """Those that are larger lose their cached context."""
        self.queue.pause(lambda size: size <= largest)
        for name, entry in self.plain.items():
            if entry.stage is Stage.CACHED and entry.request > largest:
                self.plain[name] = replace(entry, stage=Stage.PAUSED)

    @rule(seconds=st.floats(0.1, 4.0), free=st.integers(0, 60))
    def place(self, seconds: float, free: int) -> None:
        self.now += seconds
        before = self.in_order()
        free_now = free
        gone: list[str] = []

        def try_to_place(entry: Waiting[int]) -> bool:
            nonlocal free_now
            if entry.request > free_now:
                return False
            free_now -= entry.request
            gone.append(entry.name)
            return True

        self.queue.place(self.now, try_to_place)
        for name in gone:
            del self.plain[name]
        assert free_now >= 0
        overtaken: list[Waiting[int]] = []
        for entry in before:
            if entry.name not in gone:
                overtaken.append(entry)
            else:
                assert len(overtaken) < 3
                assert all(self.now - entry.since_s < 5.0 for entry in overtaken)
        if before and before[0].request <= free:
            assert before[0].name in gone

    @invariant()
    def all_are_there_in_order(self) -> None:
        assert [entry.name for entry in self.queue] == [entry.name for entry in self.in_order()]
        assert len(self.queue) == len(self.plain)


TestRoom = pytest.mark.timeout(60)(Room.TestCase)
TestRoom.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_oldest_group_goes_first_and_its_longest_before_others() -> None:
    queue: WaitQueue[int] = WaitQueue()
    for entry in (
        waiting("young", 2, 9),
        waiting("short", 1, 3),
        waiting("long", 1, 7, since_s=1.0),
        waiting("late", 1, 3, since_s=2.0),
    ):
        queue.enter(entry)
    assert [entry.name for entry in queue] == ["long", "short", "late", "young"]
    with pytest.raises(ValueError, match="long is already waiting"):
        queue.enter(waiting("long"))
    queue.place(5.0, lambda waiting: True)
    assert not len(queue)


def test_cached_turns_go_before_paused_ones_and_those_before_new() -> None:
    queue: WaitQueue[int] = WaitQueue()
    for name, stage, expected in (
        ("new", Stage.NEW, 1),
        ("large", Stage.PAUSED, 9),
        ("small", Stage.PAUSED, 3),
        ("cached", Stage.CACHED, 5),
        ("moved", Stage.MOVED, 7),
    ):
        queue.enter(Waiting(name, 0, expected, 0.0, expected, stage))
    assert [entry.name for entry in queue] == ["moved", "cached", "small", "large", "new"]
    queue.pause(lambda expected: False)
    assert [entry.name for entry in queue] == ["moved", "small", "cached", "large", "new"]


def test_large_paused_turn_waits_only_for_small_ones_that_come_soon() -> None:
    queue: WaitQueue[int] = WaitQueue()
    for name, expected, since_s in (("large", 100, 0.0), ("soon", 3, 9.0), ("late", 3, 11.0)):
        queue.enter(Waiting(name, 0, expected, since_s, expected, Stage.PAUSED))
    assert [entry.name for entry in queue] == ["soon", "large", "late"]


@given(st.lists(st.integers(1, 5), min_size=5, max_size=40), st.integers(6, 10))
def test_large_request_is_overtaken_only_for_a_limited_time(small: list[int], big: int) -> None:
    """An endless stream of small requests never leaves 10 tokens free at once, until none may
    overtake."""
    queue: WaitQueue[int] = WaitQueue(starvation_threshold_s=10.0)
    queue.enter(waiting("big", 0, big, since_s=0.0))
    running: list[tuple[float, int]] = [(0.5, 5)]
    placed_s = None
    for second in range(100):
        queue.enter(waiting(f"small{second}", 1, small[second % len(small)], since_s=float(second)))
        running = [(end_s, size) for end_s, size in running if end_s > second]

        def try_to_place(entry: Waiting[int], second: int = second) -> bool:
            nonlocal running
            if entry.request + sum(size for _, size in running) > 10:
                return False
            running = [*running, (second + 2.5, entry.request)]
            return True

        queue.place(float(second), try_to_place)
        if placed_s is None and "big" not in {entry.name for entry in queue}:
            placed_s = second
    assert placed_s is not None
    assert placed_s <= 10 + 3
