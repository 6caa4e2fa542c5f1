"""The quick starts as their readers have them: files to write, commands to run, a folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What tox has installed already, what runs until it is stopped, and what takes minutes: training,
# and what is done with the trained model (test_train.py).
_LEFT_OUT = re.compile(
    r"pip install|python3 -m venv|\. \.venv|python -m agentloop\.inference\.install"
    r"|agentloop serve|agentloop runs view|agentloop train (?!.*--dry-run)|.*runs/latest"
    r"|.*models/Qwen3"
)
_TIMEOUT_S = 400
URL = "http://127.0.0.1:8000"


class QuickStart:
    """A page of docs/quickstart, in a folder of its own."""

    def __init__(self, name: str, folder: Path) -> None:
        self.text = (ROOT / "docs/quickstart" / name).read_text("utf-8")
        self.folder = folder
        for part in ("docs", "examples"):  # the repository's folder, as far as pages name it
            (folder / part).symlink_to(ROOT / part)

    def write_files(self) -> None:
        """Write the files that the page shows, each after its name."""
        shown = re.findall(r"`([\w.]+)`:\n\n```\w+\n(.*?)^```", self.text, re.M | re.S)
        for name, text in shown:
            (self.folder / name).write_text(text, "utf-8")

    def commands(self) -> list[str]:
        """Return the page's commands."""
        blocks = re.findall(r"^```sh\n(.*?)^```", self.text, re.M | re.S)
        return "".join(blocks).replace("\\\n", " ").splitlines()

    def run(
        self, environment: Mapping[str, str] | None = None, *, url: str = URL, only: str = ""
    ) -> str:
        """Run commands one after the other, in one shell, and return what they print.

        Args:
            environment: settings of all of them, except of plans.
            url: of the service that the page tells to start.
            only: run those that contain it; by default, those that can be run here in seconds.
        """
        environment = environment or {}
        lines = [f"{line}\n" for line in self.commands() if only in line]
        lines = [line for line in lines if only or not _LEFT_OUT.match(line)]
        assert lines
        unset = " ".join(f"-u {name}" for name in environment)
        script = "".join(
            f"env {unset} {first}" if "--dry-run" in first else first for first in lines
        )
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        ended = subprocess.run(
            ["bash", "-euxc", script.replace(URL, url)],
            cwd=self.folder,
            env={**os.environ, **environment, "PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout
