"""Kept ids and experts of tokens, as arrays and as text."""

from __future__ import annotations

from base64 import b64encode
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.token_records import MAX_KEPT_IDS, KeptIds, RoutedExperts

ROWS = st.lists(st.lists(st.integers(0, (1 << 31) - 1), max_size=5), max_size=20)


@given(ROWS)
def test_text_has_all_ids(rows: list[list[int]]) -> None:
    kept = KeptIds(rows)
    assert [[*row] for row in KeptIds.parse(str(kept))] == rows
    assert KeptIds.parse(str(kept)) == kept


def test_most_ids_of_a_token_fit() -> None:
    kept = KeptIds([range(MAX_KEPT_IDS)])
    assert KeptIds.parse(str(kept)) == kept
    assert len(str(kept)) < MAX_KEPT_IDS  # of ids that are near each other


def test_copy_does_not_grow() -> None:
    kept = KeptIds([[1, 2]])
    copied = kept.copy()
    kept.extend([[3]])
    assert copied == KeptIds([[1, 2]]) != kept


@pytest.mark.parametrize("text", ["", "?", "AAAA", str(KeptIds([[1, 2]]))[:-8]])
def test_damaged_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"kept ids|base64|padding"):
        KeptIds.parse(text)


EXPERTS = RoutedExperts(3, 2, bytes([0, 255, 7, 7, 1, 2]))


def sent(*experts: int) -> str:
    return b64encode(pack(f"<{len(experts)}i", *experts)).decode()


def test_experts_are_those_that_were_sent() -> None:
    assert RoutedExperts.decode(sent(*EXPERTS.ids), 3, 6) == EXPERTS
    assert EXPERTS.end == 6


def test_text_has_all_experts() -> None:
    assert RoutedExperts.parse(str(EXPERTS)) == EXPERTS


def test_experts_after_a_token_are_the_rest() -> None:
    assert EXPERTS.after(0) == EXPERTS.after(3) == EXPERTS
    assert EXPERTS.after(5) == RoutedExperts(5, 2, bytes([1, 2]))
    assert EXPERTS.after(6) == RoutedExperts(6, 2, b"")
    assert EXPERTS.after(8).end == 8


@pytest.mark.parametrize(
    "text", [sent(*range(5)), sent(), "?", sent(0, 0, 0, 0, 0, 256), sent(0, 0, 0, 0, 0, -1)]
)
def test_answer_that_has_no_experts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        RoutedExperts.decode(text, 3, 6)


@pytest.mark.parametrize(
    "text",
    ["", "3 2", "3 2 ?", "3 2 AAAA", "-1 2 AAA=", "0 0 AAA=", "x 2 AAA="],
)
def test_damaged_text_of_experts_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        RoutedExperts.parse(text)
