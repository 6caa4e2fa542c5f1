"""Pure: the health of a server and what it is allowed to do.

    HEALTHY ──failures──> SUSPECT ──more──> DEAD ──start──> RESTARTING ──answers──┐
       ▲  ▲                  │               │                                    │
       │  └────answers───────┘               └──────────answers─────┐             │
       │                                                            ▼             │
       └────────────── has the current weights ──────────────── STALE <───────────┘

    RETIRED is final and can be entered from any state: no new requests, running ones may end.

Failed requests and failed probes are counted separately, because a server whose requests fail while
it answers probes is as unhealthy as one that answers nothing. A success of one kind does not reset
the count of the other. A server that answers after it was DEAD is STALE: someone else may have
restarted it with its initial weights.
"""

from __future__ import annotations

from enum import StrEnum

_MAX_FAILURES = 3  # consecutive ones of a kind, after which a server is considered dead


class ServerState(StrEnum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"
    RETIRED = "retired"

    @property
    def takes_new(self) -> bool:
        """Return whether new trajectories may be sent here."""
        return self is ServerState.HEALTHY

    @property
    def takes_own(self) -> bool:
        """Return whether a trajectory may return here, to its part of the prefix cache."""
        return self in (ServerState.HEALTHY, ServerState.SUSPECT)

    @property
    def keeps_running(self) -> bool:
        """Return whether streams that run here are left alone."""
        return self not in (ServerState.DEAD, ServerState.RESTARTING)

    @property
    def takes_weights(self) -> bool:
        return self in (ServerState.HEALTHY, ServerState.SUSPECT, ServerState.STALE)


class Health:
    """State machine of one server.

    Every event returns the resulting state; an event that does not apply changes nothing. If
    weights have no versions (there is no training), every server counts as having the current ones.
    """

    def __init__(self) -> None:
        self.state = ServerState.HEALTHY
        self.num_request_failures = 0
        self.num_probe_failures = 0
        self.reason = ""

    def request_failed(self, reason: str) -> ServerState:
        """Record that a stream broke or could not begin, but not that the request was invalid."""
        if self.state is ServerState.RESTARTING:  # a request to the previous process
            return self.state
        self.num_request_failures += 1
        return self._record_failure(reason, self.num_request_failures >= _MAX_FAILURES)

    def request_succeeded(self) -> ServerState:
        """Record that a stream ended normally."""
        self.num_request_failures = 0
        return self.state if self.num_probe_failures else self._record_answer()

    def probe_failed(self, reason: str) -> ServerState:
        """Record that the server did not report ready in time; a starting server need not."""
        self.num_probe_failures += 1
        return self._record_failure(reason, self.num_probe_failures >= _MAX_FAILURES)

    def probe_succeeded(self, *, has_weights: bool) -> ServerState:
        """Record that the server is ready; `has_weights` says whether its weights are current.

        A successful probe does not prove that requests succeed: a suspect server gets another try,
        but keeps its count of failed requests, so that the next failure is enough.
        """
        self.num_probe_failures = 0
        if self.state in (ServerState.DEAD, ServerState.RESTARTING):
            self.state, self.reason = ServerState.STALE, "it came back with different weights"
        if self.state is ServerState.STALE:
            return self.weights_loaded() if has_weights else self.state
        if not has_weights and self.state is not ServerState.RETIRED:
            self.state, self.reason = ServerState.STALE, "it has different weights"
            return self.state
        return self._record_answer()

    def mark_exited(self, reason: str) -> ServerState:
        """Record that the process ended, also while restarting: the server is dead at once."""
        if self.state is not ServerState.RETIRED:
            self.state, self.reason = ServerState.DEAD, reason
        return self.state

    def restarting(self) -> ServerState:
        """Record that the server is being restarted; the counts of failures start again."""
        if self.state is ServerState.DEAD:
            self.state = ServerState.RESTARTING
            self.num_request_failures = self.num_probe_failures = 0
        return self.state

    def weights_missed(self, reason: str = "it lacks the current weights") -> ServerState:
        """Record that the server does not have the current weights."""
        if self.state in (ServerState.HEALTHY, ServerState.SUSPECT):
            self.state, self.reason = ServerState.STALE, reason
        return self.state

    def weights_loaded(self) -> ServerState:
        """Record that the server has the current weights."""
        if self.state is ServerState.STALE:
            self.state, self.reason = ServerState.HEALTHY, ""
        return self.state

    def retire(self) -> ServerState:
        """Retire the server for good."""
        self.state, self.reason = ServerState.RETIRED, "retired"
        return self.state

    def _record_failure(self, reason: str, too_often: bool) -> ServerState:
        if self.state in (ServerState.RETIRED, ServerState.RESTARTING):
            return self.state
        if too_often:
            self.state, self.reason = ServerState.DEAD, reason
        elif self.state is ServerState.HEALTHY:
            self.state, self.reason = ServerState.SUSPECT, reason
        return self.state

    def _record_answer(self) -> ServerState:
        if self.state is ServerState.SUSPECT:
            self.state, self.reason = ServerState.HEALTHY, ""
        return self.state
