"""What the service holds in memory for its clients, counted."""

from __future__ import annotations

from collections.abc import Hashable


class HeldBytes:
    """Bytes by their owner, and a bound on all of them together."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[Hashable, int] = {}
        self.total = 0

    def hold(self, owner: Hashable, num_bytes: int) -> bool:
        """Say how much an owner has now. False, and nothing changes, where more would be held than
        may be."""
        more = num_bytes - self._of.get(owner, 0)
        if more > 0 and self.total + more > self._most:
            return False
        self._of[owner] = num_bytes
        self.total += more
        return True

    def free(self, owner: Hashable) -> None:
        self.total -= self._of.pop(owner, 0)
