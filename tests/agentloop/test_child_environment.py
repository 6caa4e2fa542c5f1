"""What child processes inherit: a test for each row of the table in docs/reliability.md."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agentloop.child_environment import for_our_python, for_own_pip, for_pip, for_system
from agentloop.sandbox.image import build

LAUNCHER = {
    "RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "8", "GROUP_RANK": "0", "ROLE_NAME": "default",
    "MASTER_ADDR": "other", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
INTERPRETER = {
    "PYTHONSTARTUP": "start.py",
    "PYTHONINSPECT": "1",
    "PYTHONWARNINGS": "error",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONOPTIMIZE": "2",
}


def test_our_python_keeps_paths_devices_and_threads() -> None:
    kept = {
        "PYTHONPATH": "/src", "PYTHONHOME": "/python", "LD_PRELOAD": "/lib/libjemalloc.so",
        "CUDA_VISIBLE_DEVICES": "2,3", "OMP_NUM_THREADS": "4", "HF_HOME": "/models",
        "HOME": "/home/somebody",
    }  # fmt: skip
    assert kept.items() <= for_our_python(kept).items()


@pytest.mark.parametrize("unwanted", [LAUNCHER, INTERPRETER])
def test_our_python_is_not_told(unwanted: dict[str, str]) -> None:
    assert not unwanted.keys() & for_our_python({**unwanted, "PATH": "/bin"}).keys()


@pytest.mark.parametrize(
    ("given", "expected"),
    [("", "localhost,127.0.0.1,::1"), ("intern,127.0.0.1", "intern,127.0.0.1,localhost,::1")],
)
def test_no_proxy_towards_loopback(given: str, expected: str) -> None:
    child = for_our_python({"http_proxy": "http://proxy", "no_proxy": given, "NO_PROXY": given})
    assert child["http_proxy"] == "http://proxy"
    assert child["no_proxy"] == child["NO_PROXY"] == expected


def test_temporary_folder_must_exist(tmp_path: Path) -> None:
    for child in (for_our_python, for_system, for_own_pip):
        assert child({"TMPDIR": str(tmp_path)})["TMPDIR"] == str(tmp_path)
        assert "TMPDIR" not in child({"TMPDIR": str(tmp_path / "missing")})


def test_system_programs_get_nothing_for_python_or_linker() -> None:
    unwanted = {
        "PYTHONPATH": "/src", "PYTHONHOME": "/python", "VIRTUAL_ENV": "/venv",
        "PIP_CONSTRAINT": "pins.txt", "UV_CONSTRAINT": "pins.txt", "LD_PRELOAD": "/missing.so",
        "LD_LIBRARY_PATH": "/conda/lib", "PERL5LIB": "/perl", "GIT_DIR": "/other/.git",
    }  # fmt: skip
    kept = {"PATH": "/bin", "HOME": "/root", "https_proxy": "http://proxy"}
    assert for_system({**unwanted, **kept}) == kept


def test_own_pip_keeps_constraints() -> None:
    inputs = {"PIP_CONSTRAINT": "pins.txt", "PIP_TARGET": "/x", "PIP_USER": "1", "PATH": "/bin"}
    assert for_own_pip(inputs) == {"PIP_CONSTRAINT": "pins.txt", "PATH": "/bin"}


@pytest.mark.timeout(60)
async def test_pip_keeps_only_ways_to_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pip.conf"
    file.write_text(
        "[global]\n"
        "index-url = https://mirror/simple\n"
        "extra-index-url =\n    https://one/simple\n    https://two/simple\n"
        "cert = /etc/mirror.pem\n"
        "proxy = http://proxy:3128\n"
        "constraint = pins.txt\n"
        "user = true\n"
        "[install]\n"
        "timeout = 7\n"
        "target = /elsewhere\n"
        "requirement = more.txt\n"
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    inputs = {
        "PIP_CONFIG_FILE": str(file),
        "PIP_CONSTRAINT": "other.txt",
        "PIP_BUILD_CONSTRAINT": "other.txt",
        "PIP_TIMEOUT": "9",
        "PIP_REQUIRE_VIRTUALENV": "1",
        "UV_CONSTRAINT": "other.txt",
    }
    for name, value in inputs.items():
        monkeypatch.setenv(name, value)
    child = for_pip(await build._configuration(build._find_pip()))
    assert child.pop("PIP_EXTRA_INDEX_URL").split() == ["https://one/simple", "https://two/simple"]
    assert "UV_CONSTRAINT" not in child
    assert child["PATH"] == os.environ["PATH"]
    assert {name: value for name, value in child.items() if name.startswith("PIP_")} == {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "https://mirror/simple",
        "PIP_CERT": "/etc/mirror.pem",
        "PIP_PROXY": "http://proxy:3128",
        "PIP_TIMEOUT": "9",
    }
