"""The documents are found from their index, and what they link to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("agentloop/**/*.md")]
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```", "", document.read_text("utf-8"), flags=re.DOTALL)
    missing = [link for link in LINK.findall(text) if not (document.parent / link).exists()]
    assert not missing


def test_the_index_lists_every_document() -> None:
    index = (ROOT / "docs/README.md").read_text("utf-8")
    unlisted = [
        path.name
        for path in ROOT.glob("docs/*.md")
        if path.name != "README.md" and f"({path.name})" not in index
    ]
    assert not unlisted
