"""The environment variables that each kind of child process gets.

Whatever runs us, such as tox, a shell or a launcher, sets variables that are meant for itself or
for us. What a child inherits is decided here; docs/reliability.md has the table.

    for_our_python    SGLang servers, the learner's ranks, reward functions, sandbox hosts: our
                      interpreter and packages
    for_own_pip       pip, which installs packages into our environment
    for_pip           pip, which fetches packages for another one: only its ways to reach an index
    for_system        programs of the operating system, such as mmdebstrap and git
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["for_our_python", "for_own_pip", "for_pip", "for_system", "wait_policy"]

_WAIT_POLICIES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# What torchrun and other launchers tell their own ranks.
_RANK_OF_LAUNCHER = re.compile(
    r"(GROUP_|ROLE_)?(RANK|WORLD_SIZE|NAME)|LOCAL_(RANK|WORLD_SIZE|SIZE)|GROUP_WORLD_SIZE"
    r"|MASTER_(ADDR|PORT)|TORCHELASTIC_.*"
)
# Changes what an interpreter does, rather than where it finds its files.
_FOR_ONE_INTERPRETER = re.compile(
    r"PYTHON(STARTUP|INSPECT|BREAKPOINT|WARNINGS|DEVMODE|OPTIMIZE|DONTWRITEBYTECODE)"
)
_NOT_FOR_SYSTEM = re.compile(r"(PYTHON|PIP_|UV_|LD_|DYLD_|PERL|GIT_).*|VIRTUAL_ENV")
# Settings of pip about where packages come from, and how they are reached.
_INDEX_SETTINGS = frozenset(
    {
        *("index-url", "extra-index-url", "no-index", "find-links", "trusted-host"),
        *("cert", "client-cert", "proxy", "keyring-provider", "use-feature", "use-deprecated"),
        *("timeout", "default-timeout", "retries", "cache-dir", "no-cache-dir"),
    }
)
# pip's sections, later ones first in line; `:env:` are the variables that are set.
_SECTIONS = ("global", "install", ":env:")
_SETTING = re.compile(r"^([^.=]+)\.([^=]+)=(.*)$")


def for_our_python(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a child that runs our interpreter with our packages.

    It is ours, without what a launcher told us about our rank and without what changes how an
    interpreter works. Proxies are not used for loopback: the child may reach its own
    ports. A temporary folder that does not exist is left out.

    Args:
        environment: the environment to start from; by default ours.
    """
    environment = os.environ if environment is None else environment
    child = {
        name: value
        for name, value in environment.items()
        if not _RANK_OF_LAUNCHER.fullmatch(name) and not _FOR_ONE_INTERPRETER.fullmatch(name)
    }
    for name in ("NO_PROXY", "no_proxy"):
        hosts = [host for host in child.get(name, "").split(",") if host.strip()]
        child[name] = ",".join([*hosts, *(host for host in _LOOPBACK if host not in hosts)])
    return _without_missing_folders(child)


def for_system(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a program of the operating system, with its own libraries.

    It is ours, without what is for Python, its installers, the dynamic linker, Perl (in which
    mmdebstrap is written) and git.

    Args:
        environment: the environment to start from; by default ours.
    """
    environment = os.environ if environment is None else environment
    return _without_missing_folders(
        {name: value for name, value in environment.items() if not _NOT_FOR_SYSTEM.fullmatch(name)}
    )


def for_own_pip(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a pip that installs into ours, where also our constraints hold.

    Args:
        environment: the environment to start from; by default ours.
    """
    environment = os.environ if environment is None else environment
    elsewhere = {f"PIP_{name}" for name in ("PREFIX", "REQUIREMENT", "ROOT", "TARGET", "USER")}
    return _without_missing_folders(
        {name: value for name, value in environment.items() if name not in elsewhere}
    )


def for_pip(configuration: str, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment of a pip that fetches packages for another Python than ours.

    Mirrors, proxies, certificates and the cache hold as pip is configured. Constraints,
    requirements, and places to install to do not: they were meant for another installation.

    Args:
        configuration: what `pip config list` printed.
        environment: the environment to start from; by default ours.
    """
    environment = os.environ if environment is None else environment
    child = {
        name: value
        for name, value in environment.items()
        if not name.startswith(("PIP_", "UV_", "LD_"))
        and not _FOR_ONE_INTERPRETER.fullmatch(name)
        and name != "VIRTUAL_ENV"
    }
    child["PIP_CONFIG_FILE"] = os.devnull
    for name, value in _index_settings(configuration.splitlines()).items():
        child[f"PIP_{name.upper().replace('-', '_')}"] = value
    return _without_missing_folders(child)


def wait_policy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables that make waiting OpenMP threads sleep; empty if a policy is set already.

    By default, OpenMP threads spin while they wait for each other. On a busy machine a spinning
    thread occupies the core that the thread it waits for needs, and a training step takes several
    times as long. The variables take effect only if they are set before OpenMP is loaded.
    """
    if any(name in environment for name in _WAIT_POLICIES):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}


def _index_settings(lines: Sequence[str]) -> dict[str, str]:
    """Return the settings that hold for an installation and say how an index is reached."""
    by_section: dict[str, dict[str, str]] = {section: {} for section in _SECTIONS}
    for line in lines:
        match = _SETTING.match(line)
        if match and match[1] in by_section and match[2] in _INDEX_SETTINGS:
            by_section[match[1]][match[2]] = str(ast.literal_eval(match[3]))
    return {name: text for section in _SECTIONS for name, text in by_section[section].items()}


def _without_missing_folders(child: dict[str, str]) -> dict[str, str]:
    """Leave out temporary folders that do not exist: programs then take the system's."""
    for name in ("TMPDIR", "TEMP", "TMP"):
        if name in child and not Path(child[name]).is_dir():
            del child[name]
    return child
