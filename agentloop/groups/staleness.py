"""Pure: how many groups may be admitted, and which the learner takes, so that none is too stale.

    admit ──> open ──finish──> finished ──take──> trained on ──weights live──> its slot is free
      ▲         └──give_back──> (filtered out, and replaced)                        │
      └───────────────────────────────── room ──────────────────────────────────────┘

A slot is charged at admission and freed when the weights that were made with it are live. With
`batch_size` slots for each of `max_staleness + 1` versions, capacity is the bound on the average; a
group that takes long would still be overtaken by others, version after version. So a batch is
taken only if every other group can still be in time: the oldest come first, and a batch that would
leave one behind waits for it.

The staleness of a group is the version that it is trained on less the one that it was admitted
under (its oldest tokens'), so 0 is on-policy, and then everything goes in step. The counting is
that of AReaL (arXiv 2505.24298, eq. 3), made a bound for each sample.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Slots"]


class Slots:
    """Groups by their number, which is the order of their admission.

    Batch `k` is trained on weights of version `k`, and makes version `k + 1`.
    """

    def __init__(self, max_staleness: int, batch_size: int, *, version: int = 0) -> None:
        """`version` is the one that is live."""
        if max_staleness < 0 or batch_size < 1:
            raise ValueError("max_staleness is 0 at least, batch_size 1")
        self._max_staleness = max_staleness
        self._batch_size = batch_size
        self.live = version
        self.next_batch = version
        self._admitted: dict[int, int] = {}  # the version, of each that no batch has taken
        self._finished: set[int] = set()

    def __len__(self) -> int:
        """Groups that no batch has taken yet."""
        return len(self._admitted)

    @property
    def room(self) -> int:
        """How many more groups may be admitted now."""
        ahead = self.next_batch - self.live  # batches that hold their slots still
        return (self._max_staleness + 1 - ahead) * self._batch_size - len(self._admitted)

    @property
    def open(self) -> set[int]:
        """Groups that have not finished."""
        return self._admitted.keys() - self._finished

    def staleness(self, number: int) -> int:
        """Of a group that is not taken, if the next batch took it."""
        return self.next_batch - self._admitted[number]

    def has_room_for(self, version: int) -> bool:
        """Whether a group of that version may be there again, and none would be too stale: with
        other settings than before, or fewer slots, more may have been kept than can be in time."""
        there = [*self._admitted.values(), version]
        return version <= self.live and self.room > 0 and self._in_time(there, self.next_batch)

    def admit(self, number: int, *, version: int | None = None, finished: bool = False) -> None:
        """A group starts, or is there again after a restart: with its `version` of then.

        Raises:
            ValueError: there is no room, or it is there already.
        """
        if number in self._admitted:
            raise ValueError(f"group {number} is admitted already")
        if self.room < 1:
            raise ValueError(f"no room for group {number}")
        self._admitted[number] = self.live if version is None else version
        if finished:
            self._finished.add(number)

    def finish(self, number: int) -> None:
        """All of it is there, whether or not there is anything to learn from it."""
        if number not in self._admitted or number in self._finished:
            raise ValueError(f"group {number} is not open")
        self._finished.add(number)

    def give_back(self, number: int) -> None:
        """It will not be trained on: its slot is another's."""
        del self._admitted[number]
        self._finished.discard(number)

    def take(self) -> list[int] | None:
        """The next batch, oldest first; None where it has to wait for more, or for an old one."""
        ready = sorted(self._finished, key=self._age)
        batch = ready[: self._batch_size]
        rest = [self._admitted[number] for number in self._admitted.keys() - batch]
        if len(batch) < self._batch_size or not self._in_time(rest, self.next_batch + 1):
            return None
        for number in batch:
            self.give_back(number)
        self.next_batch += 1
        return batch

    def learned_nothing(self) -> None:
        """The batch that was taken last had nothing to learn from: there will be no version of it.

        Raises:
            ValueError: no batch was taken since the last version that is live.
        """
        if self.next_batch == self.live:
            raise ValueError("no batch is under way")
        self.next_batch -= 1

    def now_live(self, version: int) -> None:
        """Every server has the weights of that version: the slots of the batches before are free.

        Raises:
            ValueError: it is of a batch that was not taken, or older than what is live.
        """
        if not self.live <= version <= self.next_batch:
            raise ValueError(f"version {version} is not from {self.live} to {self.next_batch}")
        self.live = version

    def _age(self, number: int) -> tuple[int, int]:
        return self._admitted[number], number

    def _in_time(self, versions: Iterable[int], first: int) -> bool:
        """Whether batches of full size, from the `first` on, could take each before it is too
        stale: of those that are due in the next n batches there are no more than n batches hold."""
        due = sorted(version + self._max_staleness for version in versions)
        return all(place // self._batch_size <= last - first for place, last in enumerate(due))
