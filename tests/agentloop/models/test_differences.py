"""Differences of files give exactly the new file, or are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import agentloop.models.differences as differences
from agentloop.models.differences import apply_difference, write_difference

WORDS = st.lists(st.integers(0, 65535), min_size=1, max_size=40)


@given(WORDS, st.data(), st.sampled_from([2, 6, 1 << 20]))
def test_applied_difference_gives_the_new_file(
    tmp_path_factory: pytest.TempPathFactory, words: list[int], choices: st.DataObject, chunk: int
) -> None:
    folder = tmp_path_factory.mktemp("files")
    old, new, difference, made = (folder / name for name in ("old", "new", "difference", "made"))
    changed = [choices.draw(st.just(word) | st.integers(0, 65535)) for word in words]
    for path, values in ((old, words), (new, changed)):
        path.write_bytes(np.array(values, np.uint16).tobytes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(differences, "_CHUNK_BYTES", chunk)
        patch.setattr(differences, "_MAX_SHARE", 1000)
        assert write_difference(old, new, difference)
        sha256 = apply_difference(old, difference, made)
    assert made.read_bytes() == new.read_bytes()
    assert sha256 == hashlib.sha256(new.read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("old", "new"),
    [(b"12", b"1234"), (b"123", b"124"), (bytes(1000), np.random.default_rng(0).bytes(1000))],
    ids=["other size", "odd size", "all differs"],
)
def test_difference_that_gains_nothing_is_not_written(
    tmp_path: Path, old: bytes, new: bytes
) -> None:
    (tmp_path / "old").write_bytes(old)
    (tmp_path / "new").write_bytes(new)
    assert not write_difference(tmp_path / "old", tmp_path / "new", tmp_path / "difference")
    assert not (tmp_path / "difference").exists()


@pytest.mark.parametrize("keep", [0, 5, 12])
def test_cut_difference_is_refused(tmp_path: Path, keep: int) -> None:
    old, new, difference = (tmp_path / name for name in ("old", "new", "difference"))
    old.write_bytes(bytes(1000))
    new.write_bytes(bytes(500) + b"12" + bytes(498))
    assert write_difference(old, new, difference)
    difference.write_bytes(difference.read_bytes()[:keep])
    with pytest.raises(ValueError, match="difference"):
        apply_difference(old, difference, tmp_path / "made")
