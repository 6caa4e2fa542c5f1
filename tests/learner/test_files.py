"""Folders that appear atomically: complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.learner.files import appear, fresh_partial


def names(folder: Path) -> set[str]:
    return {first.name for first in folder.iterdir()}


@pytest.mark.parametrize("durable", [False, True])
def test_folder_appears_and_is_replaced(tmp_path: Path, durable: bool) -> None:
    folder = tmp_path / "deep" / "7"
    for text in ("first", "second"):
        partial = fresh_partial(folder)
        (partial / "inner").mkdir()
        (partial / "inner" / text).write_text(text)
        assert not (folder / "inner" / text).exists()
        appear(partial, folder, durable=durable)
        assert names(folder / "inner") == {text}
    assert names(folder.parent) == {"7"}


def test_leftovers_of_a_crash_are_removed(tmp_path: Path) -> None:
    (fresh_partial(tmp_path / "7") / "half").touch()
    old = tmp_path / ".7.old"
    old.mkdir()
    (old / "stale").touch()
    partial = fresh_partial(tmp_path / "7")
    assert names(partial) == set()
    appear(partial, tmp_path / "7", durable=False)
    assert names(tmp_path) == {"7"}
