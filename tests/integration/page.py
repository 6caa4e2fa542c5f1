"""A browser for the page's tests: whatever the console says against it, and any request elsewhere,
is a failure of the test."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from axe_playwright_python.base import AXE_FILE_PATH
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from tests.integration.conftest import need

_CHROMIUM = "a browser: install chromium (Debian)"
_AXE = AXE_FILE_PATH.read_text("utf-8")
_WAIT_MS = 60_000  # also of `expect`, which else waits for 5 s, whatever the context says
# The page's own security policy forbids scripts of others: axe runs in a world of its own.
_RUN_AXE = "axe.run(document, {resultTypes: ['violations']})"


@contextmanager
def browser() -> Iterator[Browser]:
    """The system's Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        need(_CHROMIUM)
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-dev-shm-usage"], timeout=_WAIT_MS
        )
        expect.set_options(timeout=_WAIT_MS)
        try:
            yield launched
        finally:
            launched.close()


@dataclass
class Seen:
    """What a page did that it must not."""

    origin: str
    wrong: list[str] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)  # parts of what a test provokes

    def check(self) -> None:
        remaining = [
            first for first in self.wrong if not any(part in first for part in self.expected)
        ]
        assert not remaining, remaining

    def watch(self, page: Page) -> None:
        page.on("console", lambda message: self._said(message.type, message.text))
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("request", lambda request: self._asked(request.url))

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.wrong.append(f"console {kind}: {text}")

    def _asked(self, url: str) -> None:
        parts = urlsplit(url)
        is_here = f"{parts.scheme}://{parts.netloc}" == self.origin
        if parts.scheme not in ("data", "blob") and not is_here:
            self.wrong.append(f"request to {url}")


@contextmanager
def looking(
    at: Browser, url: str, *, dark: bool = False, width: int = 1280, **options: Any
) -> Iterator[tuple[Page, Seen]]:
    """A page of its own, on which nothing is left to be waited for by time."""
    parts = urlsplit(url)
    context: BrowserContext = at.new_context(
        viewport={"width": width, "height": 800},
        color_scheme="dark" if dark else "light",
        reduced_motion="reduce",
        **options,
    )
    context.set_default_timeout(_WAIT_MS)
    observed = Seen(f"{parts.scheme}://{parts.netloc}")
    try:
        page = context.new_page()
        observed.watch(page)
        page.goto(url)
        yield page, observed
    finally:
        context.close()
    observed.check()


def violations(page: Page) -> list[str]:
    """Of WCAG and of good practice, as axe finds them."""
    page.evaluate(_AXE + "\n;null")
    result = page.evaluate(_RUN_AXE)
    return [
        f"{first['id']}: {first['help']}: {[node['target'] for node in first['nodes']][:3]}"
        for first in result["violations"]
    ]
