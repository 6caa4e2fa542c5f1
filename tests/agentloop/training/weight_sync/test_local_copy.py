"""A node's copy has exactly the published files, however they reach it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentloop.errors import ServerError
from agentloop.models.differences import DIFFERENCE, write_difference
from agentloop.training.weight_sync.local_copy import LocalCopy

NAME = "model.safetensors"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def publish(folder: Path, content: bytes, base: Path | None = None) -> Path:
    """Write a folder as the learner does, also as a difference from `base`."""
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(content)
    (folder / "config.json").write_text(f'{{"version": "{folder.name}"}}')
    manifest = {"version": folder.name, "sha256": {NAME: sha256(content)}, "base": {}}
    if base is not None:
        assert write_difference(base / NAME, folder / NAME, folder / (NAME + DIFFERENCE))
        manifest["base"] = {NAME: sha256((base / NAME).read_bytes())}
    (folder / "published.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Versions 1 to 3, of which each is published also as a difference from the one before."""
    first = publish(tmp_path / "shared" / "1", bytes(2000))
    second = publish(tmp_path / "shared" / "2", bytes(1000) + b"ab" + bytes(998), first)
    publish(tmp_path / "shared" / "3", b"cd" + bytes(1998), second)
    return tmp_path / "shared"


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[LocalCopy]:
    with LocalCopy.within(tmp_path / "node") as copy:
        yield copy


def test_copy_follows_versions_by_their_differences(copy: LocalCopy, shared: Path) -> None:
    copy.update(shared / "1")
    for version in ("2", "3"):
        content = (shared / version / NAME).read_bytes()
        (shared / version / NAME).unlink()  # so that only the difference can be read
        local = copy.update(shared / version)
        assert (local / NAME).read_bytes() == content
        assert json.loads((local / "config.json").read_text()) == {"version": version}
        assert sorted(path.name for path in local.parent.iterdir()) == [version]
        assert not list(local.glob(f"*{DIFFERENCE}"))


@pytest.mark.parametrize("before", [None, "1"], ids=["new node", "missed a version"])
def test_copy_without_the_base_reads_whole_files(
    copy: LocalCopy, shared: Path, before: str | None
) -> None:
    if before is not None:
        copy.update(shared / before)
    local = copy.update(shared / "3")
    assert (local / NAME).read_bytes() == (shared / "3" / NAME).read_bytes()


def test_damaged_copy_is_replaced_by_the_whole_file(copy: LocalCopy, shared: Path) -> None:
    damaged = copy.update(shared / "1") / NAME
    damaged.write_bytes(b"zz" + damaged.read_bytes()[2:])
    local = copy.update(shared / "2")
    assert (local / NAME).read_bytes() == (shared / "2" / NAME).read_bytes()


def test_damaged_published_file_is_refused_and_the_copy_goes_on(
    copy: LocalCopy, shared: Path
) -> None:
    (shared / "1" / NAME).write_bytes(b"damaged")
    with pytest.raises(ServerError, match=r"model\.safetensors: differs from its SHA-256"):
        copy.update(shared / "1")
    assert copy.update(shared / "2").name == "2"


def test_unwritable_folder_names_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ServerError, match=r"weights\.local_folder: .*file"),
        LocalCopy.within(tmp_path / "file"),
    ):
        pass


def test_copies_of_killed_processes_are_removed(tmp_path: Path, shared: Path) -> None:
    program = (
        "import os, signal, sys, pathlib\n"
        "from agentloop.training.weight_sync.local_copy import LocalCopy\n"
        "with LocalCopy.within(pathlib.Path(sys.argv[1])) as copy:\n"
        "    copy.update(pathlib.Path(sys.argv[2]))\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    parent = tmp_path / "node"
    command = [sys.executable, "-c", program, str(parent), str(shared / "1")]
    with LocalCopy.within(parent) as living:
        living.update(shared / "1")
        assert subprocess.run(command, check=False).returncode < 0
        assert len(list(parent.iterdir())) == 2
        with LocalCopy.within(parent) as copy:
            assert len(list(parent.iterdir())) == 2
            assert copy.update(shared / "1").is_dir()
        assert (living.update(shared / "2") / NAME).is_file()
    assert not list(parent.iterdir())
