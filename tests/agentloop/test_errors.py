"""Errors inside nested groups, and where they were raised."""

from __future__ import annotations

import json

import pytest

from agentloop.errors import (
    AgentLoopError,
    RequestError,
    ServerError,
    ServerUnavailable,
    culprit,
    place_of,
    summary_of,
)
from tests.fakes import Unprintable

BUG, DOWN, CUT = KeyError("a bug"), ServerError("down"), ServerUnavailable("cut")


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (BUG, BUG),
        (DOWN, DOWN),
        (ExceptionGroup("", [DOWN, BUG]), BUG),
        (ExceptionGroup("", [CUT, ExceptionGroup("", [DOWN, BUG])]), BUG),
        (ExceptionGroup("", [ExceptionGroup("", [CUT]), DOWN]), CUT),
    ],
)
def test_culprit_is_no_victim_if_there_is_another(raised: Exception, expected: Exception) -> None:
    assert culprit(raised, ServerError, RequestError) is expected


def test_place_of_an_error_is_in_the_users_code() -> None:
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("")  # raises in the standard library
    expected = f"test_errors.py:{caught.traceback[0].lineno + 1}"
    assert place_of(caught.value) == expected
    assert place_of(ExceptionGroup("", [ExceptionGroup("", [caught.value])])) == expected
    assert place_of(AgentLoopError("never raised")) == ""


@pytest.mark.parametrize(
    ("error", "summary"),
    [
        (ValueError("bad board:\n  #.#\n"), "ValueError: bad board: #.#"),
        (KeyError("board"), "KeyError: 'board'"),
        (TimeoutError(), "TimeoutError"),
        (Unprintable(), "Unprintable"),
        (
            ExceptionGroup("", [DOWN, ExceptionGroup("", [CUT, DOWN])]),
            "ExceptionGroup: down; cut",
        ),
    ],
)
def test_summary_of_an_error_is_one_line(error: Exception, summary: str) -> None:
    assert summary_of(error) == summary
