"""docs/settings.md, which is made from the code."""

from __future__ import annotations

from tools.settings_reference import PATH, reference


def test_settings_reference_is_up_to_date() -> None:
    hint = "run `python -m tools.settings_reference` and review the difference"
    assert PATH.read_text("utf-8") == reference(), hint
