"""Accounting of the memory that the service holds for its clients."""

from __future__ import annotations

from collections.abc import Hashable

import anyio


class HeldBytes:
    """Bytes held per owner, with a bound on their sum."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._of: dict[Hashable, int] = {}
        self.total = 0
        self._freed = anyio.Event()

    def hold(self, owner: Hashable, num_bytes: int) -> bool:
        """Set the bytes held for an owner; return False, changing nothing, if over the bound."""
        num_more = num_bytes - self._of.get(owner, 0)
        if num_more > 0 and self.total + num_more > self._max_bytes:
            return False
        self._of[owner] = num_bytes
        self.total += num_more
        return True

    async def wait_to_hold(self, owner: Hashable, num_bytes: int) -> None:
        """Wait until so many bytes fit, or until nobody holds any, and hold them."""
        while not self.hold(owner, min(num_bytes, self._max_bytes)):
            await self._freed.wait()  # no deadline: the caller has one

    def hold_anyway(self, owner: Hashable, num_bytes: int) -> None:
        """Set the bytes held for an owner, which exist already, even if over the bound."""
        self.free(owner)
        self._of[owner] = num_bytes
        self.total += num_bytes

    def free(self, owner: Hashable) -> None:
        self.total -= self._of.pop(owner, 0)
        self._freed.set()
        self._freed = anyio.Event()
