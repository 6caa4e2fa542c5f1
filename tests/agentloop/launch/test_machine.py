"""`agentloop doctor` without a model: what is missing, and how to get it."""

from __future__ import annotations

import json

import pytest

from agentloop.__main__ import main
from agentloop.launch.machine import Check, examine, report
from agentloop.sandbox import SandboxUnavailable
from agentloop.sandbox.errors import NoEngine
from agentloop.sandbox.image import image_tag


def checks(*lacks: str, image: bool | Exception = True, free_gb: float = 50.0) -> dict[str, Check]:
    checks = examine(
        installed=lambda name: name not in lacks,
        which=lambda name: None if name in lacks else f"/usr/bin/{name}",
        image=lambda: image,
        free_gb=lambda: free_gb,
    )
    return {check.name: check for check in checks}


def test_complete_machine_lacks_nothing() -> None:
    by_name = checks()
    assert all(check.is_there and not check.remedy for check in by_name.values())
    assert "MISSING" not in report([*by_name.values()])


def test_missing_part_says_how_to_get_it() -> None:
    assert checks("sglang")["SGLang"].remedy == "python -m agentloop.inference.install"
    assert "[train]" in checks("deepspeed")["extra train (lacks deepspeed)"].remedy
    assert checks(image=False)["Docker Engine"].is_there
    remedy = checks(image=False)[f"sandbox image {image_tag()}"].remedy
    assert "agentloop.sandbox.image build" in remedy
    assert not checks(free_gb=1.0)["disk space"].is_there


def test_engine_that_cannot_be_asked_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    nothing, forbidden = NoEngine("nothing listens there"), SandboxUnavailable("permission denied")
    missing, refused = (checks(image=error)["Docker Engine"] for error in (nothing, forbidden))
    assert missing.remedy.startswith("nothing listens there; start it, or install it: https://docs")
    assert (refused.remedy, refused.is_there) == ("permission denied", False)
    # Local processes take the place of an engine that is missing, and of no other.
    assert (missing.is_optional, refused.is_optional) == (True, False)
    monkeypatch.setenv("DOCKER_HOST", "tcp://127.0.0.1:1")
    assert not checks(image=nothing)["Docker Engine"].is_optional


def test_report_names_each_missing_part_with_its_remedy() -> None:
    text = report([*checks("sglang", "ray").values()])
    assert "MISSING  SGLang: " in text
    assert "optional extra ray (lacks ray): " in text
    assert text.index("ok       Docker Engine") < text.index("MISSING")


@pytest.mark.timeout(120)  # transformers is slow to import
def test_command_reports_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--json"])
    parts = json.loads(capsys.readouterr().out)
    lacks = [part for part in parts if not (part["is_there"] or part["is_optional"])]
    assert status == (1 if lacks else 0)
    assert {"SGLang", "Docker Engine", "disk space"} <= {part["name"] for part in parts}
