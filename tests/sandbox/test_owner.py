"""Directories that show whether their owner lives, among those that others have made."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import pytest

from agentloop.sandbox.owner import PREFIX, UNLOCKED_S, is_only_owner, locked, own_tag, reap_dirs


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which owners make theirs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_one_owner_is_alone_until_it_leaves(folder: Path) -> None:
    with is_only_owner("pool") as is_alone:
        assert is_alone
        with is_only_owner("pool") as second, is_only_owner("lake") as another:
            assert not second
            assert another
    with is_only_owner("pool") as again:
        assert again
    assert not [*folder.iterdir()]


def test_what_a_dead_owner_has_left_keeps_nobody_out(folder: Path) -> None:
    (folder / f"{PREFIX}1-2-3-x.pool").mkdir()
    with is_only_owner("pool") as is_alone:
        assert is_alone


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to make another user's directory")
def test_another_user_keeps_nobody_out(folder: Path) -> None:
    path = folder / f"{PREFIX}{own_tag()}-x.pool"
    path.mkdir()
    os.chown(path, 23_456, 23_456)
    with locked(path), is_only_owner("pool") as is_alone:
        assert is_alone


def test_directories_of_dead_owners_are_removed(folder: Path) -> None:
    pid, start, space = own_tag().split("-")
    gone = [folder / f"{PREFIX}{pid}-{int(start) + 1}-{space}-x", folder / f"{PREFIX}1-1-1-gone"]
    kept = [folder / f"{PREFIX}{own_tag()}-x", folder / f"{PREFIX}1-1-1-held", folder / PREFIX]
    new = folder / f"{PREFIX}1-1-1-new"
    for path in (*gone, *kept, new):
        path.mkdir()
        if path is not new:
            os.utime(path, times=2 * (time.time() - 2 * UNLOCKED_S,))
    with locked(folder / f"{PREFIX}1-1-1-held"):  # of a pid namespace that is not ours
        reap_dirs()
    assert sorted(folder.iterdir()) == sorted([*kept, new])
