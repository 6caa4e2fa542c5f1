"""Errors inside nested groups: which of them is raised."""

from __future__ import annotations

import pytest

from agentloop.errors import RequestError, ServerError, ServerUnavailable, culprit

BUG, DOWN, CUT = KeyError("a bug"), ServerError("down"), ServerUnavailable("cut off")


@pytest.mark.parametrize(
    ("raised", "found"),
    [
        (BUG, BUG),
        (DOWN, DOWN),
        (ExceptionGroup("", [DOWN, BUG]), BUG),
        (ExceptionGroup("", [CUT, ExceptionGroup("", [DOWN, BUG])]), BUG),
        (ExceptionGroup("", [ExceptionGroup("", [CUT]), DOWN]), CUT),
    ],
)
def test_the_culprit_is_no_victim_if_there_is_another(raised: Exception, found: Exception) -> None:
    assert culprit(raised, ServerError, RequestError) is found
