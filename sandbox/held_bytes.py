"""Accounting of the memory that the service holds for its clients."""

from __future__ import annotations

from collections.abc import Hashable


class HeldBytes:
    """Bytes held per owner, with a bound on their sum."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[Hashable, int] = {}
        self.total = 0

    def hold(self, owner: Hashable, num_bytes: int) -> bool:
        """Set the bytes held for an owner; return False, changing nothing, if over the bound."""
        more = num_bytes - self._of.get(owner, 0)
        if more > 0 and self.total + more > self._most:
            return False
        self._of[owner] = num_bytes
        self.total += more
        return True

    def free(self, owner: Hashable) -> None:
        self.total -= self._of.pop(owner, 0)
