"""Parts of computers that need no container: output, users, tars, walls."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.sandbox import ComputerLimits, Pool, PoolSettings, ProgramUnsupported
from agentloop.sandbox.computer import guest_files
from agentloop.sandbox.computer.changes import ADDED, CHANGED, read_layer
from agentloop.sandbox.computer.command import HeadAndTail
from agentloop.sandbox.computer.machine import (
    ComputerSpec,
    machine_config,
    read_computer_profile,
)
from agentloop.sandbox.computer.tars import pack_folder, unpack_folder
from tests.sandbox.conftest import BARE


@given(st.lists(st.binary(max_size=30)))
def test_head_and_tail_of_output(parts: list[bytes]) -> None:
    kept = HeadAndTail(20)
    for part in parts:
        kept.add(part)
    data = b"".join(parts)
    assert kept.num_bytes == len(data)
    assert kept.is_truncated == (len(data) > 40)
    if len(data) <= 40:
        assert kept.text == data.decode("utf-8", "replace")
    else:
        assert f"[{len(data) - 40} bytes omitted]" in kept.text


def test_walls_of_a_computer() -> None:
    spec = ComputerSpec("image", "none", ComputerLimits(memory_mib=64, processes=9, cpus=0.5))
    host: Any = machine_config(spec, PoolSettings(), Path("/a"), Path("/b"))["HostConfig"]
    assert host["Memory"] == host["MemorySwap"] == 64 << 20
    assert (host["PidsLimit"], host["NanoCpus"]) == (9, 500_000_000)
    assert host["NetworkMode"] == "none"
    assert host["CapDrop"] == ["ALL"]
    assert not {"SYS_ADMIN", "SYS_PTRACE", "MKNOD", "NET_ADMIN", "NET_RAW"} & set(host["CapAdd"])
    assert "no-new-privileges" in host["SecurityOpt"]
    assert all(mount["ReadOnly"] for mount in host["Mounts"])


@pytest.mark.parametrize(
    "name",
    ["io_uring_setup", "bpf", "keyctl", "unshare", "setns", "mount", "perf_event_open", "reboot"],
)
def test_system_calls_that_no_computer_has(name: str) -> None:
    profile = json.loads(read_computer_profile())
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"
    assert not any(name in row["names"] for row in profile["syscalls"])


def test_sockets_of_a_computer() -> None:
    rows = json.loads(read_computer_profile())["syscalls"]
    families = [row["args"][0]["value"] for row in rows if row["names"] == ["socket"]]
    assert families == [1, 2, 10, 16]


@pytest.mark.parametrize("field", ["memory_mib", "processes", "cpus", "disk_mib"])
def test_limits_are_checked(field: str) -> None:
    with pytest.raises(ValueError, match=field):
        ComputerLimits(**{field: 0})


def test_network_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="network: ''"):  # Docker's is its default one
        ComputerSpec("image", "", ComputerLimits())


def test_users_of_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "/etc/passwd": ["root:x:0:0::/root:", "me:x:7:8::/me:"],
        "/etc/group": ["g:x:9:me,you", "h:x:10:"],
    }
    monkeypatch.setattr(
        guest_files, "_entries", lambda path, _: [x.split(":") for x in files[path]]
    )
    assert guest_files.find_user("me") == (7, 8, [9], "/me", "me")
    assert guest_files.find_user("7:h") == (7, 10, [9], "/me", "me")
    assert guest_files.find_user("99:5") == (99, 5, [], "/", "99")
    with pytest.raises(OSError, match="no user 'nobody-here'"):
        guest_files.find_user("nobody-here")


def tar_of(*members: tarfile.TarInfo) -> io.BytesIO:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        for member in members:
            tar.addfile(member)
    data.seek(0)
    return data


def link(target: str, kind: bytes = tarfile.SYMTYPE) -> tarfile.TarInfo:
    member = tarfile.TarInfo("link")
    member.type, member.linkname = kind, target
    return member


@pytest.mark.parametrize(
    "member",
    [
        tarfile.TarInfo("../escaped"),
        link("/etc/passwd"),
        link("../../x"),
        link("/etc/passwd", tarfile.LNKTYPE),
        link("", tarfile.CHRTYPE),
    ],
)
def test_hostile_tars_are_refused(tmp_path: Path, member: tarfile.TarInfo) -> None:
    with pytest.raises((tarfile.FilterError, KeyError)):
        unpack_folder(tar_of(member), tmp_path / "inner")
    assert not (tmp_path / "escaped").exists()
    assert not any((tmp_path / "inner").iterdir())


def test_changes_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of links and directories in each other's place, nothing is written through a link."""
    outside = tmp_path / "outside"
    outside.mkdir()
    target = tmp_path / "target"
    target.mkdir()
    (target / "a").symlink_to(outside)
    (target / "b").mkdir()
    (target / "b" / "old").write_text("")
    source = tmp_path / "source"
    (source / "a").mkdir(parents=True)
    (source / "a" / "file").write_text("1")
    (source / "b").write_text("2")
    with io.BytesIO() as data:
        pack_folder(source, data)
        guest_files._extract(data, str(target))
    assert (target / "a" / "file").read_text() == "1"
    assert (target / "b").read_text() == "2"
    assert os.listdir(outside) == []


def test_changes_of_a_layer(tmp_path: Path) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    for path in ("lower/etc", "upper/etc/new", "upper/fresh"):
        (tmp_path / path).mkdir(parents=True)
    (lower / "etc" / "known").write_text("1")
    (upper / "etc" / "known").write_text("2")
    (upper / "fresh" / "file").write_text("3")
    assert read_layer(upper, [str(lower)]) == [
        ("/etc", CHANGED),
        ("/etc/known", CHANGED),
        ("/etc/new", ADDED),
        ("/fresh", ADDED),
        ("/fresh/file", ADDED),
    ]


def test_same_folders_make_the_same_tar(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("1")
    tars = []
    for seconds in (1, 2):
        os.utime(tmp_path / "file", (seconds, seconds))
        with io.BytesIO() as data:
            pack_folder(tmp_path, data, keeps_times=False)
            tars.append(data.getvalue())
    assert tars[0] == tars[1]


@pytest.mark.anyio
async def test_local_workers_have_no_computers() -> None:
    async with Pool(BARE) as pool:
        with pytest.raises(ProgramUnsupported, match="need a Docker Engine on this machine"):
            async with pool.computer():
                pass
