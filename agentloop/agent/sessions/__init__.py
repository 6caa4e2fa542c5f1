"""Sessions: conversations that a client keeps, recorded as exact token ids.

A client of the HTTP service sends its whole history with each request. A session recognises the
turns that it has sampled in that history, and goes on from their exact ids.

    messages of a request ──history.py──> keys ──tree.py──> the longest known path
                                                                │ its ids + what is new
    Trajectory <── session.py: a branch <── a turn <── agent/rollout.py
"""

from __future__ import annotations

from agentloop.agent.sessions.registry import ModelSessions, ServedSessions, SessionSettings
from agentloop.agent.sessions.session import ModelSession, TurnRequest

__all__ = ["ModelSession", "ModelSessions", "ServedSessions", "SessionSettings", "TurnRequest"]
