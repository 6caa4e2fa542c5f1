"""Tests of the request for a group."""

from __future__ import annotations

import pickle
from dataclasses import replace

from agentloop.agent.rollout import Budget
from agentloop.environments.tasks.sources import Task
from agentloop.rollouts.request import GroupRequest, Purpose


def test_renamed_request_has_the_same_event() -> None:
    request = GroupRequest(Task("t", "?", "1"), "1", 2, Budget())
    replace(request, name="1-t").queued.set()
    assert request.queued.is_set()


def test_pickled_request_has_its_own_event() -> None:
    request = GroupRequest(Task("t", "?", "1"), "1", 2, Budget(max_turns=3), 4, Purpose.TRAIN)
    sent = pickle.loads(pickle.dumps(request))
    assert sent == request
    sent.queued.set()
    assert not request.queued.is_set()
