"""The exported file: self-contained, closed to other content, and safe for any text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.observe import one_file as module
from agentloop.observe.one_file import one_file

WEB = Path(module.__file__).with_name("web")
HOSTILE = [
    "</script><script>alert(1)</script>", "</SCRIPT >", "<!--<script>", "]]></body></html>",
    "\u2028\u2029\x00\x7f", "\ud800",
]  # fmt: skip


class Page(HTMLParser):
    """Parse the file as a browser does: scripts, style sheets and other elements."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._open: tuple[str, dict[str, str | None]] | None = None
        self._pieces: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open, self._pieces = (tag, dict(attrs)), []

    def handle_data(self, data: str) -> None:
        self._pieces.append(data)

    def handle_endtag(self, tag: str) -> None:
        if self._open is not None and self._open[0] == tag:
            self.texts.append((*self._open, "".join(self._pieces)))
            self._open = None

    def of(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, text) for name, attributes, text in self.texts if name == tag]

    @property
    def data(self) -> Any:
        (text,) = [text for attributes, text in self.of("script") if attributes.get("id") == "run"]
        return json.loads(text)

    @property
    def policy(self) -> dict[str, list[str]]:
        (content,) = [
            attributes["content"] or ""
            for tag, attributes in self.elements
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        ]
        return {name: sources for name, *sources in map(str.split, content.split(";"))}


def hash_of(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def test_file_loads_nothing_from_elsewhere() -> None:
    page = Page(one_file({"api/frame": {}}))
    for tag, attributes in page.elements:
        for name in ("src", "href"):
            target = attributes.get(name) or ""
            assert not target or target.startswith(("#", "data:")), (tag, attributes)


def test_all_scripts_and_style_sheets_are_included() -> None:
    html = (WEB / "index.html").read_text("utf-8")
    wanted = re.findall(r'(?:src|href)="page/([^"]+)"', html)
    page = Page(one_file({}))
    texts = [text for tag in ("script", "style") for _, text in page.of(tag)]
    assert len(wanted) > 10
    for name in wanted:
        assert (WEB / name).read_text("utf-8") in texts, name


def test_theme_script_runs_first_and_the_others_last() -> None:
    html = one_file({"api/frame": {}})
    theme = (WEB / "theme.js").read_text("utf-8")
    assert html.index(theme) < html.index("</head>")
    assert html.index('<script id="run"') < html.index((WEB / "base.js").read_text("utf-8"))


def test_policy_allows_only_the_files_own_content() -> None:
    html = one_file({"api/frame": {}})
    page = Page(html)
    policy = page.policy
    assert policy["default-src"] == ["'none'"]
    assert "connect-src" not in policy
    run = [text for attributes, text in page.of("script") if "id" not in attributes]
    assert policy["script-src"] == sorted(map(hash_of, run), key=policy["script-src"].index)
    assert policy["style-src"] == [hash_of(text) for _, text in page.of("style")]
    assert not any("style" in attributes for _, attributes in page.elements)
    assert html.index("Content-Security-Policy") < html.index("<script")


@pytest.mark.parametrize("text", HOSTILE)
def test_text_of_a_model_cannot_become_markup(text: str) -> None:
    plain = Page(one_file({"api/frame": {}}))
    shown = {"api/rollouts/1": {"pieces": [text], "n": 2**70}, text: text}
    page = Page(one_file(shown))
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.data == shown


TEXTS = st.text(st.sampled_from("<>/!-scriptySCRIPT[]&\"'\\\u2028\x00 é\U0001f600"), max_size=40)


@settings(max_examples=20)  # each is a whole page
@given(st.dictionaries(TEXTS, st.lists(TEXTS, max_size=5), max_size=3))
def test_any_text_is_preserved(bodies: dict[str, list[str]]) -> None:
    assert Page(one_file(bodies)).data == bodies
