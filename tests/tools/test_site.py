"""The documentation's site: its pages, its navigation, and what is found wrong with it."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

import pytest

from tools.site import ROOT, navigation, pages, problems


def test_links_lead_to_pages_of_the_site() -> None:
    texts, images = pages(ROOT)
    dead = [
        (place, link)
        for place, text in texts.items()
        if not re.search(r"\.\w+\.md$", place)  # the text of a program
        for link in re.findall(r"\]\((?!\w+:|#)([^)#]+)", re.sub(r"(?s)^ *```.*?^ *```$", "", text))
        if posixpath.normpath(posixpath.join(posixpath.dirname(place), link))
        not in {*texts, *images}
    ]
    assert dead == []


def test_program_is_shown_as_it_is() -> None:
    texts, _ = pages(ROOT)
    assert (ROOT / "agentloop/environments/examples/own_tool.py").read_text() in texts[
        "repository/agentloop/environments/examples/own_tool.py.md"
    ]


def test_bar_in_a_table_needs_no_backslash() -> None:
    texts, _ = pages(ROOT)
    assert "\\|" in (ROOT / "docs/models.md").read_text()
    assert "\\|" not in texts["models.md"] + texts["guides/your-model.md"]


def test_navigation_has_every_document() -> None:
    texts, _ = pages(ROOT)
    sections = navigation(texts["README.md"])
    assert next(iter(sections)) == "Quick starts"
    listed = {page for section in sections.values() for page in section}
    docs = ROOT / "docs"
    documents = {path.relative_to(docs).as_posix() for path in docs.rglob("*.md")}
    assert documents - listed == {"README.md"}


def page(body: str, head: str = "") -> str:
    return f"<html><head>{head}</head><body><h1 id=top>A page</h1>{body}</body></html>"


@pytest.mark.parametrize(
    ("head", "body", "problem"),
    [
        ("", '<a href="b.html#top">b</a> <a href="#top">a</a> <a href="https://a.org">c</a>', ""),
        ("", '<a href="c.html">c</a>', "a.html: c.html leads nowhere"),
        ("", '<a href="b.html#end">b</a>', "a.html: b.html#end: the page has no such anchor"),
        ("", '<img src="https://a.org/b.png">', "a.html: loads https://a.org/b.png"),
        ("", '<script src="//a.org/b.js"></script>', "a.html: loads //a.org/b.js"),
        ("", '<script src="b.js"></script>', "a.html: b.js leads nowhere"),
        ('<link rel="stylesheet" href="http://a.org/b.css">', "",
         "a.html: loads http://a.org/b.css"),
        ('<link rel="canonical" href="http://a.org/">', "", ""),
    ],
)  # fmt: skip
def test_problems_of_a_page_are_found(tmp_path: Path, head: str, body: str, problem: str) -> None:
    (tmp_path / "a.html").write_text(page(body, head))
    (tmp_path / "b.html").write_text(page(""))
    assert problems(tmp_path) == ([problem] if problem else [])


def test_fonts_of_another_host_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.css").write_text("@import 'https://a.org/b.css'; p { background: url(c.png) }")
    assert problems(tmp_path) == ["a.css: loads https://a.org/b.css"]
