"""`python -m tools.site`: build the documentation site, build/site/html.

    docs/ and what it links to ──pages──> build/site/source ──Zensical──> build/site/html

Nothing is written twice. The site has the Markdown that is read on GitHub; its navigation is the
index, docs/README.md; files outside of docs/ that are linked to, such as examples, become pages
that show them. The build fails if a link or an anchor leads nowhere, or if a page would load
anything from another host.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["main", "navigation", "pages", "problems"]

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "site"
_WORKER = Path(__file__).with_name("iframe-worker.js")
_INDEX = "README.md"
_IMAGES = (".png", ".svg")
_LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh", ".jinja": "jinja"}
_LINK = re.compile(r"(?<=\]\()(?!\w+:)[^)#\s]+")
_ROW = re.compile(r"^\|.*?\]\(([^)#]+\.md)\)", re.M)
_CELL = re.compile(r"(?m)(?<=[| ])`[^`\n]*\\\|[^`\n]*`(?=.*\|$)")
_BLOCK = re.compile(r"^ *```.*?^ *```$", re.M | re.S)

# Without site_url the site works wherever it is put, also without a web server. The Markdown is
# what GitHub understands, and nothing more.
_CONFIG = """\
[project]
site_name = "agentloop"
docs_dir = "source"
site_dir = "html"
nav = [
  %s
]

[project.theme]
font = false
features = [
  "content.code.copy",
  "navigation.footer",
  "navigation.tabs",
  "navigation.top",
  "search.highlight",
  "toc.follow",
]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"
toggle.icon = "lucide/sun"
toggle.name = "Switch to dark mode"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
toggle.icon = "lucide/moon"
toggle.name = "Switch to light mode"

# Opened as a file, a page may start no worker, as the search does. This stands in place of the
# script of another host that `offline` would add.
[[project.extra.polyfills]]
path = "assets/iframe-worker.js"
type = "text/javascript"
async = false
defer = false

[project.plugins.offline]

[project.plugins.search]

[project.markdown_extensions.sane_lists]

[project.markdown_extensions.tables]

[project.markdown_extensions.toc]
permalink = true
slugify = { object = "pymdownx.slugs.slugify", kwds = { case = "lower" } }

[project.markdown_extensions.pymdownx.betterem]

[project.markdown_extensions.pymdownx.highlight]

[project.markdown_extensions.pymdownx.superfences]
"""


def main() -> int:
    """Build the site and return the exit status."""
    shutil.rmtree(BUILD, ignore_errors=True)
    source, html = BUILD / "source", BUILD / "html"
    texts, files = pages(ROOT)
    files[f"assets/{_WORKER.name}"] = _WORKER
    for path in (*texts, *files):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        (source / path).write_text(text, "utf-8")
    for path, file in files.items():
        shutil.copyfile(file, source / path)
    config = BUILD / "zensical.toml"
    config.write_text(_CONFIG % ",\n  ".join(_nav(texts[_INDEX])), "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    if status := subprocess.run(command, check=False).returncode:
        return status
    broken = problems(html)
    for problem in broken:
        print(problem, file=sys.stderr)
    print(f"{html.relative_to(ROOT)}: {len(texts)} pages, {len(broken)} problems")
    return 1 if broken else 0


def pages(root: Path) -> tuple[dict[str, str], dict[str, Path]]:
    """Return the site's pages as Markdown, and its images, by their paths in the site.

    These are the documents in docs/, and all that links lead to from there.
    """
    waiting = sorted((root / "docs").rglob("*.md"))
    reached = set(waiting)
    texts: dict[str, str] = {}
    images: dict[str, Path] = {}

    def link_from(file: Path, link: str) -> str:
        target = Path(os.path.normpath(file.parent / link))
        if not target.exists():
            return link  # `problems` reports it
        if (target / _INDEX).exists():
            target /= _INDEX
        if target not in reached:
            reached.add(target)
            waiting.append(target)
        return os.path.relpath(_place(root, target), _place(root, file).parent)

    while waiting:
        file = waiting.pop()
        place = _place(root, file).as_posix()
        if file.suffix in _IMAGES:
            images[place] = file
        elif file.suffix == ".md" or file.is_dir():
            text = _files_in(root, file) if file.is_dir() else file.read_text("utf-8")
            # Links of a folder's page are relative to the folder.
            base = file / _INDEX if file.is_dir() else file
            texts[place] = _adapt(text, partial(link_from, base))
        else:
            texts[place] = _text_of(root, file)
    return texts, images


def _place(root: Path, file: Path) -> Path:
    """Return the path in the site of a file or folder of the repository."""
    path = file.relative_to(root)
    place = Path(*path.parts[1:]) if path.parts[0] == "docs" else Path("repository", path)
    if file.is_dir():
        return place / _INDEX
    return place if file.suffix in (".md", *_IMAGES) else place.with_name(f"{place.name}.md")


def _files_in(root: Path, folder: Path) -> str:
    """Return the page of a folder, which lists its programs and settings and shows its images."""
    names = sorted(path.name for path in folder.iterdir() if path.suffix in _LANGUAGES)
    images = sorted(path.name for path in folder.iterdir() if path.suffix in _IMAGES)
    shown = "\n\n".join(f"![{name}]({name})" for name in images)
    return f"# {folder.relative_to(root)}\n\n" + "\n".join(
        [*(f"- [{name}]({name})" for name in names), shown, ""]
    )


def _text_of(root: Path, file: Path) -> str:
    language = _LANGUAGES.get(file.suffix, "")
    return f"# {file.relative_to(root)}\n\n````{language}\n{file.read_text('utf-8')}````\n"


def _adapt(text: str, link_to: Callable[[str], str]) -> str:
    """Return a document as the site needs it; blocks of code stay as they are."""
    parts, start = [], 0
    for block in _BLOCK.finditer(text):
        parts += [_outside(text[start : block.start()], link_to), block[0]]
        start = block.end()
    return "".join([*parts, _outside(text[start:], link_to)])


def _outside(text: str, link_to: Callable[[str], str]) -> str:
    # Only on GitHub does the code in a table need a backslash before a bar.
    text = _CELL.sub(lambda code: code[0].replace("\\|", "|"), text)
    return _LINK.sub(lambda link: link_to(link[0]), text)


def navigation(index: str) -> dict[str, list[str]]:
    """Return the pages that each section of the index lists in its tables, in their order."""
    sections: dict[str, list[str]] = {}
    for section in re.split(r"^## ", index, flags=re.M)[1:]:
        title, _, body = section.partition("\n")
        if rows := list(dict.fromkeys(_ROW.findall(body))):
            sections[title.strip()] = rows
    return sections


def _nav(index: str) -> Iterator[str]:
    """Yield the navigation as TOML."""
    yield json.dumps(_INDEX)
    for title, paths in navigation(index).items():
        yield f"{{ {json.dumps(title)} = {json.dumps(paths)} }}"


def problems(site: Path) -> list[str]:
    """Return what is wrong with the pages of a built site: dead links, and what is not local."""
    pages_by_path = {path.resolve(): _Page(path) for path in sorted(site.rglob("*.html"))}
    wrong = []
    for path, page in pages_by_path.items():
        where = path.relative_to(site.resolve())
        wrong += [f"{where}: loads {url}" for url in page.loaded if _is_remote(url)]
        if where.name == "404.html":  # its links are from the site's root, wherever that is
            continue
        for url in page.links:
            target, anchor = _target(path, url)
            if not target.is_file():
                wrong.append(f"{where}: {url} leads nowhere")
            elif anchor and target in pages_by_path and anchor not in pages_by_path[target].ids:
                wrong.append(f"{where}: {url}: the page has no such anchor")
    for css in site.rglob("*.css"):
        loaded = re.findall(r"(?:url\(|@import\s*)[\"']?([^\"')\s;]+)", css.read_text("utf-8"))
        wrong += [f"{css.relative_to(site)}: loads {url}" for url in loaded if _is_remote(url)]
    return wrong


class _Page(HTMLParser):
    """The anchors and the links of a page.

    Attributes:
        ids: anchors of the page.
        links: addresses within the site that its links lead to, and files of it that it loads.
        loaded: addresses that a browser loads with it.
    """

    _LOADING = (("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"))
    _ONLY_NAMED = ("canonical", "next", "prev", "alternate", "author", "license")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.ids |= {named.get("id", ""), named.get("name", "") if tag == "a" else ""} - {""}
        loaded = [
            named[source] for kind, source in self._LOADING if tag == kind and source in named
        ]
        if tag == "link" and named.get("rel") not in self._ONLY_NAMED:
            loaded.append(named["href"])
        followed = [named["href"]] if tag == "a" and named.get("href") else []
        self.loaded += loaded
        local = (url for url in (*followed, *loaded) if not urlsplit(url).scheme)
        self.links += [url for url in local if not urlsplit(url).netloc]


def _is_remote(url: str) -> bool:
    parts = urlsplit(url)
    return bool(parts.netloc) or parts.scheme in ("http", "https")


def _target(page: Path, url: str) -> tuple[Path, str]:
    """Return the file and the anchor that a link of a page leads to."""
    parts = urlsplit(url)
    path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    return (path / "index.html" if path.is_dir() else path), unquote(parts.fragment)


if __name__ == "__main__":
    sys.exit(main())
