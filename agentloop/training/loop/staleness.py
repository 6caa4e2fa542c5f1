"""Bound the staleness of groups: how many are admitted, and which the learner takes. Pure.

    admit ──> open ──finish──> finished ──take──> trained on ──weights live──> its slot is free
      ▲         └──discard────> (filtered out, and replaced)                        │
      └───────────────────────────────── slots ──────────────────────────────────────┘

A slot is taken at admission and freed when the weights trained on the group are live. There are
`batch_size` slots for each of `max_staleness + 1` versions. That bounds the average staleness, but
a slow group could still be overtaken by others, version after version. So batches are taken oldest
first, and a batch is taken only if every remaining group can still be trained on in time; otherwise
the learner waits.

The staleness of a group is the version it is trained on minus the version at its admission (that
of its oldest tokens). 0 is on-policy: rollouts and training alternate. The capacity is that of
AReaL (arXiv 2505.24298, eq. 3), here with a bound for each sample.
"""

from __future__ import annotations

from collections.abc import Iterable


class Slots:
    """The slots of groups, which are identified by number, in the order of admission.

    Batch `k` is trained on weights of version `k` and produces version `k + 1`.
    """

    def __init__(self, max_staleness: int, batch_size: int, *, version: int = 0) -> None:
        """
        Args:
            version: The version of the weights that are live.
        """
        if max_staleness < 0 or batch_size < 1:
            raise ValueError("max_staleness must be at least 0 and batch_size at least 1")
        self._max_staleness = max_staleness
        self._batch_size = batch_size
        self.live = version
        self.next_batch = version
        self._admitted: dict[int, int] = {}  # version at admission, of groups not yet taken
        self._finished: set[int] = set()

    def __len__(self) -> int:
        """Return the number of groups that no batch has taken."""
        return len(self._admitted)

    @property
    def num_free(self) -> int:
        """Number of groups that may be admitted now."""
        ahead = self.next_batch - self.live  # batches that still hold their slots
        return (self._max_staleness + 1 - ahead) * self._batch_size - len(self._admitted)

    @property
    def open(self) -> set[int]:
        """Groups that have not finished."""
        return self._admitted.keys() - self._finished

    def staleness(self, number: int) -> int:
        """Return the staleness that a group would have in the next batch."""
        return self.next_batch - self._admitted[number]

    def has_slot_for(self, version: int) -> bool:
        """Return whether a group of `version` can be admitted again and trained on in time.

        After a restart with other settings or fewer slots, not all saved groups may fit.
        """
        versions = [*self._admitted.values(), version]
        return (
            version <= self.live and self.num_free > 0 and self._in_time(versions, self.next_batch)
        )

    def admit(self, number: int, *, version: int | None = None, finished: bool = False) -> None:
        """Admit a group, or admit it again after a restart, with its original `version`.

        Raises:
            ValueError: There is no free slot, or the group is already admitted.
        """
        if number in self._admitted:
            raise ValueError(f"group {number} is already admitted")
        if self.num_free < 1:
            raise ValueError(f"no free slot for group {number}")
        self._admitted[number] = self.live if version is None else version
        if finished:
            self._finished.add(number)

    def finish(self, number: int) -> None:
        """Mark a group as finished, whether or not it can be trained on."""
        if number not in self._admitted or number in self._finished:
            raise ValueError(f"group {number} is not open")
        self._finished.add(number)

    def discard(self, number: int) -> None:
        """Free the slot of a group that will not be trained on."""
        del self._admitted[number]
        self._finished.discard(number)

    @property
    def has_batch(self) -> bool:
        """True if `take` would return a batch."""
        return self._next_batch() is not None

    def take(self) -> list[int] | None:
        """Return the next batch, oldest first, or None if other groups must finish first."""
        batch = self._next_batch()
        if batch is not None:
            for number in batch:
                self.discard(number)
            self.next_batch += 1
        return batch

    def learned_nothing(self) -> None:
        """Discard the last batch: it had no training signal, so no new version will follow.

        Raises:
            ValueError: No batch was taken since the version that is live.
        """
        if self.next_batch == self.live:
            raise ValueError("no batch is being trained on")
        self.next_batch -= 1

    def now_live(self, version: int) -> None:
        """Record that all servers have the weights of `version`; free the slots of earlier batches.

        Raises:
            ValueError: The version is older than the live one, or its batch was not taken.
        """
        if not self.live <= version <= self.next_batch:
            raise ValueError(f"version {version} is not between {self.live} and {self.next_batch}")
        self.live = version

    def _next_batch(self) -> list[int] | None:
        ready = sorted(self._finished, key=lambda number: (self._admitted[number], number))
        batch = ready[: self._batch_size]
        waiting = [self._admitted[number] for number in self._admitted.keys() - batch]
        is_complete = len(batch) == self._batch_size
        return batch if is_complete and self._in_time(waiting, self.next_batch + 1) else None

    def _in_time(self, versions: Iterable[int], first: int) -> bool:
        """Return whether batches from `first` on can take each group before it is too stale.

        This holds if, for each n, at most n batches' worth of groups are due within the next n
        batches.
        """
        due = sorted(version + self._max_staleness for version in versions)
        return all(place // self._batch_size <= last - first for place, last in enumerate(due))
