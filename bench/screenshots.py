"""Takes screenshots of every view of the page, showing a real run.

    agentloop train docs/recipes/laptop.toml                       and during the run, or later
    agentloop runs view runs/latest                                     (or agentloop serve)
    python -m bench.screenshots --url http://127.0.0.1:8000 --out docs/images/page

Each view in light and dark mode at 1280 pixels, and in light mode at a phone's width. The group and
the rollout are the newest ones.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

import httpx
from playwright.sync_api import Browser, sync_playwright

VIEWS = ["now", "servers", "rollouts", "groups", "curves", "sandbox", "ask"]
LOOKS = [("light", 1280), ("dark", 1280), ("light", 360)]
SETTLE_MS = 1500  # time to draw curves and canvases


def views_of(url: str) -> dict[str, str]:
    """Return the views' addresses by the names of their screenshots."""
    frame = httpx.get(f"{url}/api/frame", timeout=60).json()
    about = frame["about"]
    found = {name: f"#/{name}" for name in VIEWS}
    if not about.get("can_ask"):
        del found["ask"]
    if not about.get("has_sandbox"):
        del found["sandbox"]
    if not frame.get("servers"):
        del found["servers"]
    done = [row for row in frame["rollouts"] if row["state"] == "done" and row["calls"]]
    if done:
        found["rollout"] = f"#/rollout/{done[-1]['id']}"
    groups = [one for one in frame["groups"] if one["state"] == "done"]
    if groups:
        found["group"] = f"#/group/{groups[-1]['id']}"
    return found


def take(browser: Browser, url: str, out: Path) -> None:
    for scheme, width in LOOKS:
        context = browser.new_context(
            viewport={"width": width, "height": 800 if width > 500 else 740},
            color_scheme="dark" if scheme == "dark" else "light",
            reduced_motion="reduce",
        )
        page = context.new_page()
        for name, hash_ in views_of(url).items():
            page.goto(f"{url}/{'' if name == 'now' else hash_}")
            page.wait_for_timeout(SETTLE_MS)
            path = out / f"{name}-{scheme if width > 500 else 'phone'}.png"
            page.screenshot(path=path)
            print(path)
        context.close()


def main() -> int:
    parser = argparse.ArgumentParser("python -m bench.screenshots", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--out", type=Path, default=Path("docs/images/page"))
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox"]
        )
        take(browser, args.url.rstrip("/"), args.out)
        browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
