"""The kept ids of tokens, as arrays and as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.kept_ids import MAX_KEPT_IDS, KeptIds

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
