"""Pinned versions: of every tox environment, and nothing but versions."""

from __future__ import annotations

from configparser import ConfigParser

from tools.pin import ROOT, pins


def test_every_pinned_environment_has_its_constraints() -> None:
    tox = ConfigParser(interpolation=None)
    tox.read(ROOT / "tox.ini")
    environments = {section.partition(":")[2] for section in tox if section.startswith("testenv:")}
    # An environment that sets no variables of its own has PIP_CONSTRAINT of [testenv].
    pinned = {name for name in environments if "set_env" not in tox[f"testenv:{name}"]}
    listed = {name.strip() for name in tox["tox"]["env_list"].split(",")}
    files = {file.stem for file in (ROOT / "constraints").glob("*.txt")}
    assert sorted((pinned | (listed - environments) | {"package", "tox"}) - files) == []


def test_pins_are_versions_without_builds_and_folders() -> None:
    frozen = "torch==2.11.0+cpu\n-e /me/project\nanyio==4.16.0\nagentloop-rl==0.1.0\npip==26.3\n"
    assert pins(frozen) == "anyio==4.16.0\ntorch==2.11.0\n"
