"""The rollouts in flight, by their events."""

from __future__ import annotations

from agentloop.events import (
    ClientAwaited,
    Event,
    RolloutAbandoned,
    RolloutFinished,
    RolloutStarted,
    TurnStarted,
)


class InFlight:
    """Counts the rollouts in flight.

    A branch of a session is one while it is being answered, and not while its client is awaited.
    """

    def __init__(self) -> None:
        self._open: set[str] = set()
        self._awaits_client: set[str] = set()

    def on_event(self, event: Event) -> None:
        match event:
            case RolloutStarted():
                self._open.add(event.rollout_id)
                self._awaits_client.discard(event.rollout_id)
            case TurnStarted():
                self._awaits_client.discard(event.rollout_id)
            case ClientAwaited() if event.rollout_id in self._open:
                self._awaits_client.add(event.rollout_id)
            case RolloutFinished() | RolloutAbandoned():
                self._open.discard(event.rollout_id)
                self._awaits_client.discard(event.rollout_id)

    def __len__(self) -> int:
        return len(self._open) - len(self._awaits_client)
