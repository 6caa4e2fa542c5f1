"""Random schedules: bounded staleness, no lost slot, no deadlock."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.training.loop.staleness import Slots

LIMITS = st.integers(0, 4), st.integers(1, 5)


class Schedule:
    """A run that takes random possible actions and checks the counts."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.numbers = itertools.count()
        self.live_at_admission: dict[int, int] = {}
        self.ended: Counter[int] = Counter()
        self.batches: list[list[int]] = []
        self.staleness: list[int] = []

    def possible(self) -> list[str]:
        s = self.slots
        return [
            *(["admit"] if s.num_free > 0 else []),
            *(["finish", "give back"] if s.open else []),
            *(["live", "nothing"] if s.live < s.next_batch else []),
        ]

    def do(self, action: str, draw: int) -> None:
        s = self.slots
        if action == "admit":
            number = next(self.numbers)
            s.admit(number)
            self.live_at_admission[number] = s.live
        elif action == "live":
            s.now_live(s.live + 1)
        elif action == "nothing":
            s.learned_nothing()
        else:
            number = sorted(s.open)[draw % len(s.open)]
            if action == "finish":
                s.finish(number)
            else:
                s.discard(number)
                self.ended[number] += 1
        self.take()

    def take(self) -> None:
        trained_on = self.slots.next_batch
        if (batch := self.slots.take()) is not None:
            self.batches.append(batch)
            for number in batch:
                self.ended[number] += 1
                self.staleness.append(trained_on - self.live_at_admission[number])


@given(*LIMITS, st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=200))
@settings(max_examples=300)
def test_no_sample_is_too_stale_and_each_group_finishes_once(
    max_staleness: int, size: int, draws: list[tuple[int, int]]
) -> None:
    run = Schedule(Slots(max_staleness, size))
    for choice, number in draws:
        possible = run.possible()
        # Never: else the learner would wait for ever.
        assert possible
        run.do(possible[choice % len(possible)], number)
        assert run.slots.num_free >= 0
        assert run.slots.next_batch - run.slots.live <= max_staleness + 1
    # What is open finishes, in any order: then all that was admitted has ended, but for what is
    # too little for a batch.
    while run.slots.open or run.slots.live < run.slots.next_batch:
        run.do("live" if run.slots.live < run.slots.next_batch else "finish", 0)
    assert max(run.staleness, default=0) <= max_staleness
    assert set(run.ended.values()) <= {1}
    assert len(run.live_at_admission) - len(run.ended) == len(run.slots) < size
    assert all(len(batch) == size for batch in run.batches)


@given(st.integers(1, 5), st.data())
def test_without_staleness_rollouts_and_training_alternate(size: int, data: st.DataObject) -> None:
    slots = Slots(0, size)
    for version in range(3):
        mine = [version * size + index for index in range(size)]
        for number in mine:
            slots.admit(number)
        assert slots.num_free == 0
        for number in data.draw(st.permutations(mine)):
            assert slots.take() is None
            slots.finish(number)
        assert slots.take() == mine
        assert slots.num_free == 0  # until the new weights are live
        slots.now_live(version + 1)


def test_batch_waits_for_a_group_that_would_become_too_stale() -> None:
    slots = Slots(1, 2)
    for number in range(4):
        slots.admit(number)
    for number in (1, 2):
        slots.finish(number)
    assert slots.take() == [1, 2]  # 0 and 3 can still be in the next one
    slots.now_live(1)
    for number in (4, 5):
        slots.admit(number)
        slots.finish(number)
    assert slots.take() is None  # 0 and 3 must be in this one
    slots.finish(3)
    assert slots.take() is None
    slots.finish(0)
    assert slots.take() == [0, 3]


def test_batch_without_signal_produces_no_version() -> None:
    slots = Slots(0, 1)
    slots.admit(0)
    slots.finish(0)
    assert slots.take() == [0]
    assert slots.num_free == 0
    slots.learned_nothing()
    assert slots.num_free == 1
    with pytest.raises(ValueError, match="no batch"):
        slots.learned_nothing()


def test_group_keeps_its_version_over_a_restart() -> None:
    slots = Slots(1, 1, version=5)
    slots.admit(7, version=4, finished=True)
    assert slots.staleness(7) == 1
    assert slots.take() == [7]


def test_invalid_calls_raise() -> None:
    with pytest.raises(ValueError, match="at least"):
        Slots(-1, 1)
    slots = Slots(0, 1)
    slots.admit(0)
    with pytest.raises(ValueError, match="no free slot"):
        slots.admit(1)
    with pytest.raises(ValueError, match="already"):
        slots.admit(0)
    slots.finish(0)
    with pytest.raises(ValueError, match="not open"):
        slots.finish(0)
    with pytest.raises(ValueError, match="not between 0 and 0"):
        slots.now_live(1)
