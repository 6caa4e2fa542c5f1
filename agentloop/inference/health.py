"""Pure: how well a server is, and what it may do.

    HEALTHY ──failures──> SUSPECT ──more──> DEAD ──start──> RESTARTING ──answers──┐
       ▲  ▲                  │               │                                    │
       │  └────answers───────┘               └──────────answers─────┐             │
       │                                                            ▼             │
       └────────────── has the current weights ──────────────── STALE <───────────┘

    RETIRED is the end, from anywhere: it takes nothing new and what runs there ends.

Failed requests and failed probes are counted apart, since they mean different things: a server
whose requests break while it answers probes is as ill as one that answers nothing. A success of
one kind says nothing about the other. After a time as DEAD a server is STALE when it answers: it
may have been restarted by others, with the weights of its start.
"""

from __future__ import annotations

from enum import StrEnum

import pydantic

__all__ = ["Health", "HealthSettings", "ServerState"]


class ServerState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"

    @property
    def takes_new(self) -> bool:
        """Whether a trajectory may come here that was not here before."""
        return self is ServerState.HEALTHY

    @property
    def takes_own(self) -> bool:
        """Whether a trajectory may come back, to what the cache holds of it."""
        return self in (ServerState.HEALTHY, ServerState.SUSPECT)

    @property
    def keeps_running(self) -> bool:
        """Whether a stream that runs there is left alone."""
        return self not in (ServerState.DEAD, ServerState.RESTARTING)

    @property
    def takes_weights(self) -> bool:
        return self in (ServerState.HEALTHY, ServerState.SUSPECT, ServerState.STALE)


class HealthSettings(pydantic.BaseModel):
    """When a server that fails is given up."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True)

    max_request_failures: int = pydantic.Field(
        3, ge=1, description="Requests that break in a row until the server counts as dead."
    )
    max_probe_failures: int = pydantic.Field(
        3, ge=1, description="Probes that fail in a row until the server counts as dead."
    )


class Health:
    """One server's. Every event returns the state after it; one that does not apply changes none.

    Without versions of weights (nobody trains) every answer has the current ones.
    """

    def __init__(self, settings: HealthSettings | None = None) -> None:
        self._settings = settings or HealthSettings()
        self.state = ServerState.HEALTHY
        self.num_request_failures = 0
        self.num_probe_failures = 0
        self.reason = ""

    def request_failed(self, reason: str) -> ServerState:
        """A stream broke, or could not begin. Not: the request itself was at fault."""
        if self.state is ServerState.RESTARTING:  # one of its last life
            return self.state
        self.num_request_failures += 1
        return self._failed(
            reason, self.num_request_failures >= self._settings.max_request_failures
        )

    def request_succeeded(self) -> ServerState:
        """A stream ended as it should."""
        self.num_request_failures = 0
        return self.state if self.num_probe_failures else self._answered()

    def probe_failed(self, reason: str) -> ServerState:
        """It did not say in time that it is ready. One that is being started need not yet."""
        self.num_probe_failures += 1
        return self._failed(reason, self.num_probe_failures >= self._settings.max_probe_failures)

    def probe_succeeded(self, *, has_weights: bool) -> ServerState:
        """It says that it is ready, and which weights it has was looked at.

        A probe that succeeds cannot prove that requests do: a server that is ill because of them
        is given another try, and their count goes on, so that the next one that fails is enough.
        """
        self.num_probe_failures = 0
        if self.state in (ServerState.DEAD, ServerState.RESTARTING):
            self.state, self.reason = ServerState.STALE, "it is back with other weights"
        if self.state is ServerState.STALE:
            return self.weights_loaded() if has_weights else self.state
        if not has_weights and self.state is not ServerState.RETIRED:
            self.state, self.reason = ServerState.STALE, "it has other weights"
            return self.state
        return self._answered()

    def exited(self, reason: str) -> ServerState:
        """Its process ended: no need to count. Also of one that was being started again."""
        if self.state is not ServerState.RETIRED:
            self.state, self.reason = ServerState.DEAD, reason
        return self.state

    def restarting(self) -> ServerState:
        """Somebody starts it again: a new process, of which nothing is known."""
        if self.state is ServerState.DEAD:
            self.state = ServerState.RESTARTING
            self.num_request_failures = self.num_probe_failures = 0
        return self.state

    def weights_missed(self) -> ServerState:
        """An update went by without it."""
        if self.state in (ServerState.HEALTHY, ServerState.SUSPECT):
            self.state, self.reason = ServerState.STALE, "it missed an update of the weights"
        return self.state

    def weights_loaded(self) -> ServerState:
        """It has the current ones."""
        if self.state is ServerState.STALE:
            self.state, self.reason = ServerState.HEALTHY, ""
        return self.state

    def retire(self) -> ServerState:
        """It is to leave for good."""
        self.state, self.reason = ServerState.RETIRED, "retired"
        return self.state

    def _failed(self, reason: str, too_often: bool) -> ServerState:
        if self.state in (ServerState.RETIRED, ServerState.RESTARTING):
            return self.state
        if too_often:
            self.state, self.reason = ServerState.DEAD, reason
        elif self.state is ServerState.HEALTHY:
            self.state, self.reason = ServerState.SUSPECT, reason
        return self.state

    def _answered(self) -> ServerState:
        if self.state is ServerState.SUSPECT:
            self.state, self.reason = ServerState.HEALTHY, ""
        return self.state
