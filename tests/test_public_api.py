"""The public interface: its signatures are pinned, and its reference is that of the code."""

from __future__ import annotations

import inspect
import re

import pytest

from tools import api_reference

CLASSES = dict(api_reference.public_classes())
STALE = "run `python -m tools.api_reference` and review the difference"


def test_signatures_are_those_that_are_pinned() -> None:
    """A change of a public signature shows in the diff of tests/public_api.txt."""
    pinned = api_reference.SIGNATURES.read_text("utf-8").splitlines()
    assert api_reference.signatures().splitlines() == pinned, STALE


def test_reference_is_up_to_date() -> None:
    written = api_reference.REFERENCE.read_text("utf-8").splitlines()
    assert api_reference.reference().splitlines() == written, STALE


@pytest.mark.parametrize("name", CLASSES)
def test_classes_and_their_fields_are_described(name: str) -> None:
    cls = CLASSES[name]
    assert cls.__doc__
    assert [field for field, _, _, text in api_reference.fields(cls) if not text] == []


@pytest.mark.parametrize("name", CLASSES)
def test_arguments_that_are_described_exist(name: str) -> None:
    cls = CLASSES[name]
    for attribute, value in vars(cls).items():
        if not inspect.isfunction(value) or not value.__module__.startswith("agentloop"):
            continue
        section = (inspect.getdoc(value) or "").partition("Args:\n")[2]
        arguments = re.split(r"\n(?=\S)|\n\n", section)[0]
        described = re.findall(r"^ {4}(\w+):", arguments, re.M)
        unknown = set(described) - inspect.signature(value).parameters.keys()
        assert unknown == set(), f"{name}.{attribute}"
