"""Pools refuse to start if calls would not be isolated, and doctor reports that."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentloop.sandbox import Pool, PoolSettings, SandboxUnavailable, process
from agentloop.sandbox.__main__ import main
from agentloop.sandbox.confine import why_refused
from agentloop.sandbox.container import LAYERS
from agentloop.sandbox.required_layers import NEEDED, missing_layers

pytestmark = pytest.mark.timeout(60)  # real workers are started

WEAK = {
    "process isolation": "no: this machine does not allow namespaces",
    "network": "no: calls have the network access of this machine",
    "file system": "no: calls can read all files that the user can read",
    "uid": "no: calls have the user's uid",
    "system calls": "no: libseccomp.so.2 is missing (install libseccomp2)",
}


def settings(**more: object) -> PoolSettings:
    return PoolSettings.model_validate({"workers": 1, "preload": [], **more})


@pytest.fixture
def local_workers_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Set the layers that every local worker reports; no engine listens."""
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setattr("agentloop.sandbox.engine.local_engine", lambda: f"unix://{tmp_path}/none")
    layers: dict[str, str] = {}
    source = process.CONFINE.read_text()
    real = process._memory_file

    def with_layers(spec: str) -> int:
        script = tmp_path / "confine.py"
        reported = '"layers": layers'
        assert reported in source
        script.write_text(source.replace(reported, f'"layers": {layers!r}'))
        return real(spec)

    monkeypatch.setattr("agentloop.sandbox.process._memory_file", with_layers)
    monkeypatch.setattr("agentloop.sandbox.process.CONFINE", tmp_path / "confine.py")
    return layers


@pytest.mark.parametrize("backend", ["auto", "process"])
@pytest.mark.parametrize("missing", NEEDED)
async def test_pool_without_a_wall_does_not_start_unless_told_to(
    local_workers_say: dict[str, str], missing: str, backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    local_workers_say |= dict.fromkeys(NEEDED, "none of your concern") | {missing: WEAK[missing]}
    with pytest.raises(SandboxUnavailable) as caught:
        async with Pool(settings(backend=backend)):
            pass
    assert f"({missing}: {WEAK[missing]})" in str(caught.value)
    assert "sandbox.allow_weak_isolation=true" in str(caught.value)
    assert not caplog.records  # said once
    async with Pool(settings(backend=backend, allow_weak_isolation=True)) as pool:
        assert (await pool.run("6 * 7", timeout_s=15)).result == "42"
        assert pool.stats()["layers"][missing] == WEAK[missing]


@given(st.dictionaries(st.sampled_from([*WEAK, "uid "]), st.text() | st.just("no: x")))
def test_missing_isolation_layers_are_found(layers: Mapping[str, str]) -> None:
    messages = missing_layers(layers)
    assert len(messages) == sum(
        text == "no" or (text.startswith("no") and not (text[2].isalnum() or text[2] == "_"))
        for name, text in layers.items()
        if name in NEEDED
    )
    assert missing_layers(LAYERS) == []
    assert missing_layers(WEAK) == [f"{name}: {WEAK[name]}" for name in NEEDED]


def test_doctor_says_it_in_words_and_by_its_status(
    local_workers_say: dict[str, str], capfd: pytest.CaptureFixture[str]
) -> None:
    local_workers_say |= WEAK
    assert main(["doctor"]) == 1
    stated = capfd.readouterr().out
    assert re.search(f"network +{WEAK['network']}\n", stated)
    assert (
        "By default, a pool does not start on this machine: calls would not be isolated" in stated
    )
    assert main(["doctor", "--json"]) == 1
    messages = json.loads(capfd.readouterr().out)
    assert (messages["isolated"], messages["backend"]) == (False, None)
    assert "allow_weak_isolation" in messages["reason"]
    assert messages["backends"]["local processes"].items() >= WEAK.items()
    local_workers_say |= dict.fromkeys(NEEDED, "yes")
    assert main(["doctor"]) == 0
    stated = capfd.readouterr().out
    assert "By default, a pool on this machine runs calls in local processes" in stated
    assert main(["doctor", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["backend"] == "process"


def test_setting_that_refuses_namespaces_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "user").mkdir()
    setting = tmp_path / "user" / "max_user_namespaces"
    setting.write_text("0\n")
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert why_refused("No space left", str(tmp_path)) == "user.max_user_namespaces=0"
    setting.write_text("1000\n")
    assert why_refused("No space left", str(tmp_path)) == "No space left"
    monkeypatch.setattr(os, "getuid", lambda: 0)
    assert "CAP_SYS_ADMIN" in why_refused("Operation not permitted")


BIND = """
import ctypes, os, sys
from agentloop.sandbox import confine
top, root, form = sys.argv[1:]
confine.check(confine.libc.unshare(confine.CLONE_NEWNS), "unshare")
confine.mount("none", "/", flags=confine.MS_REC | confine.MS_PRIVATE)
os.makedirs(f"{top}/a b/below")
confine.mount("tmpfs", f"{top}/a b", "tmpfs")
os.mkdir(f"{top}/a b/below")
confine.mount("tmpfs", f"{top}/a b/below", "tmpfs")
if form == "user":
    confine.check(confine.libc.unshare(confine.CLONE_NEWUSER | confine.CLONE_NEWNS), "unshare")
for number in (confine.MOUNT_SETATTR, -1):  # and as before Linux 5.12, which has no such call
    confine.MOUNT_SETATTR = number
    confine.bind(top, f"{root}/{number}")
    for folder, _, _ in os.walk(f"{root}/{number}{top}"):
        try:
            open(f"{folder}/f", "w")
            print("written", folder)
        except OSError as error:
            print(error.errno)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")
@pytest.mark.parametrize("form", ["root", "user"])
def test_mounts_below_a_read_only_directory_are_read_only(tmp_path: Path, form: str) -> None:
    roots = [str(tmp_path / "top"), str(tmp_path / "root")]
    for folder in roots:
        os.mkdir(folder)
    command = [sys.executable, "-c", BIND, *roots, form]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "unshare" in done.stderr:
        pytest.skip("this machine refuses namespaces")
    assert done.stdout.split() == 2 * 3 * [str(errno.EROFS)], done
