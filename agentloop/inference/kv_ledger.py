"""Pure: how many tokens of each server's KV cache are spoken for.

A sequence holds its prompt and grows with every token that is streamed; it may hold a reserve for
the tokens to come, which its growth uses up. First form: shared prefixes are counted in full, and
a sequence that waits for a tool holds nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["KVLedger"]


@dataclass(slots=True)
class _Held:
    server: str
    num_tokens: int
    num_reserved: int


@dataclass(slots=True)
class _Server:
    capacity: int
    num_held: int = 0
    num_reserved: int = 0
    sequences: set[str] = field(default_factory=set)


class KVLedger:
    """Reserve, grow, release; every sum is kept as it changes."""

    def __init__(self) -> None:
        self._servers: dict[str, _Server] = {}
        self._held: dict[str, _Held] = {}

    def add_server(self, server: str, capacity: int) -> None:
        """`capacity` in tokens, as the server reports it."""
        self._servers[server] = _Server(capacity)

    def remove_server(self, server: str) -> None:
        """Forget a server and all that it held."""
        for sequence in self._servers.pop(server).sequences:
            del self._held[sequence]

    def room(self, server: str) -> int:
        """Tokens that are neither held nor reserved."""
        state = self._servers[server]
        return state.capacity - state.num_held - state.num_reserved

    def num_sequences(self, server: str) -> int:
        return len(self._servers[server].sequences)

    def num_held(self, server: str) -> int:
        return self._servers[server].num_held

    def fits(self, server: str, num_tokens: int, num_reserved: int) -> bool:
        """Whether it has room; an idle server takes whatever its cache can hold at all."""
        state = self._servers[server]
        if not state.sequences:
            return num_tokens < state.capacity
        return num_tokens + num_reserved <= self.room(server)

    def reserve(self, sequence: str, server: str, num_tokens: int, num_reserved: int) -> None:
        """`sequence` begins on `server` with a prompt of `num_tokens`."""
        if sequence in self._held:
            raise ValueError(f"{sequence} holds already")
        state = self._servers[server]
        state.num_held += num_tokens
        state.num_reserved += num_reserved
        state.sequences.add(sequence)
        self._held[sequence] = _Held(server, num_tokens, num_reserved)

    def grow(self, sequence: str, num_tokens: int) -> None:
        """Tokens were streamed; they come out of the reserve while it lasts."""
        held = self._held.get(sequence)
        if held is None:  # its server was removed
            return
        state = self._servers[held.server]
        from_reserve = min(num_tokens, held.num_reserved)
        held.num_tokens += num_tokens
        held.num_reserved -= from_reserve
        state.num_held += num_tokens
        state.num_reserved -= from_reserve

    def release(self, sequence: str) -> None:
        """`sequence` ended or moved; harmless where it holds nothing."""
        held = self._held.pop(sequence, None)
        if held is None:
            return
        state = self._servers[held.server]
        state.num_held -= held.num_tokens
        state.num_reserved -= held.num_reserved
        state.sequences.discard(sequence)
