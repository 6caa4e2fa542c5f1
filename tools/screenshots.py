"""`python -m tools.screenshots`: take the page's pictures in docs/images/page again.

It trains the small model for some minutes, on this machine, and takes the pictures meanwhile: each
view in light and in dark mode, at the widths of a desktop, a tablet and a phone. Group and rollout
are the newest ones. With `--url` they are of a page that is running already. SGLang, the
learner, chromium and playwright must be installed.
"""

from __future__ import annotations

import argparse
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import httpx
from playwright.sync_api import Browser, sync_playwright

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
OUT = ROOT / "docs/images/page"
VIEWS = ["now", "servers", "rollouts", "groups", "curves", "sandbox", "ask"]
SIZES = {"desktop": (1440, 900), "tablet": (820, 1180), "phone": (390, 844)}
SETTLE_MS = 1500  # time to draw curves and canvases
# Warmer than usual, since the small model would nearly always give the same answer.
RUN = [
    "small",
    "run.name=pictures",
    "sampling.temperature=1.5",
    "loop.steps=40",
    "loop.max_staleness=1",
    "loop.evaluate_tasks=8",
]
NUM_STEPS = 6  # that the pictures show
WAIT_S = 900.0


def main(arguments: list[str] | None = None) -> int:
    """Take the pictures and return the exit status."""
    parser = argparse.ArgumentParser("python -m tools.screenshots", description=__doc__)
    parser.add_argument("--url", help="address of a page that is running, and stays so")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.url:
        take(options.url.rstrip("/"), options.out)
        return 0
    with tempfile.TemporaryDirectory() as folder, training(Path(folder)) as url:
        take(url, options.out)
    return 0


@contextmanager
def training(folder: Path) -> Iterator[str]:
    """Train until some steps are done and more are to come; yield the address of the run's page."""
    command = [sys.executable, "-m", "agentloop", "train", *RUN]
    log = folder / "train.log"
    with log.open("wb") as output:
        # In its own working directory, since pictures must not show paths of this machine.
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + WAIT_S
        while True:
            match = re.search(r"Watch it: (http://[^/\s]+)", log.read_text("utf-8"))
            if match and len(frame(match[1])["steps"]) > NUM_STEPS:
                break
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the run did not come so far:\n{log.read_text('utf-8')}")
            time.sleep(1)
        yield match[1]
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(120)
        finally:
            process.kill()


def frame(url: str) -> dict[str, Any]:
    """Return the state that the page shows."""
    state: dict[str, Any] = httpx.get(f"{url}/api/frame", timeout=60).json()
    return state


def views_of(url: str) -> dict[str, str]:
    """Return the views' addresses by the names of their pictures."""
    shown = frame(url)
    description = shown["about"]
    addresses = {name: f"#/{name}" for name in VIEWS}
    addresses["rollouts"] += "?state=done"  # with answers
    if not description.get("can_ask"):
        del addresses["ask"]
    if not description.get("has_sandbox"):
        del addresses["sandbox"]
    if not shown.get("servers"):
        del addresses["servers"]
    # A held-out task has a single rollout, and its group says little.
    groups = [row for row in shown["groups"] if row["kept"]]
    if groups:
        addresses["group"] = f"#/group/{groups[-1]['id']}"
        rows = [row for row in shown["rollouts"] if row["group"] == groups[-1]["id"]]
        rows.sort(key=lambda row: row["calls"])
        for row in rows[-1:]:
            addresses["rollout"] = f"#/rollout/{row['id']}"
    return addresses


def take(url: str, out: Path) -> None:
    """Take a picture of each view in each look."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        schemes: list[Literal["light", "dark"]] = ["light", "dark"]
        for scheme in schemes:
            for size in SIZES:
                _take_in(browser, url, out, scheme, size)
        browser.close()


def _take_in(
    browser: Browser, url: str, out: Path, scheme: Literal["light", "dark"], size: str
) -> None:
    width, height = SIZES[size]
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        reduced_motion="reduce",
    )
    page = context.new_page()
    for name, hash_ in views_of(url).items():
        page.goto(f"{url}/{'' if name == 'now' else hash_}")
        page.wait_for_timeout(SETTLE_MS)
        path = out / f"{name}-{size}-{scheme}.png"
        page.screenshot(path=path)
        print(path)
    context.close()


if __name__ == "__main__":
    sys.exit(main())
