"""`python -m tools.release`: check that what would be published can be installed, and works.

    the repository ──build──> sdist ──build──> wheel
                                └── each alone in an empty environment of each Python ──> commands

`--whole` installs SGLang and the learner's packages beside the wheel as well, asks the service and
the chat a question, and trains for a step: gigabytes, unless pip's configuration names an index
with CPU builds of PyTorch. uv provides environments, and Pythons that this machine lacks.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
_QUESTION = "What is 37 times 48?"
_TIMEOUT_S = 1800.0
_COMMANDS = (
    ("--version",),
    ("--help",),
    ("train", "shop", "--dry-run"),
    ("runs", "view", "--sample", "--export", "sample.html"),
)


def main(arguments: list[str] | None = None) -> int:
    """Build and try the distributions; return the exit status."""
    parser = argparse.ArgumentParser("python -m tools.release", description=__doc__)
    parser.add_argument(
        "--python", action="append", help=f"version or path (default: {', '.join(PYTHONS)})"
    )
    parser.add_argument("--whole", action="store_true", help="serve, chat and train, too")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        dist = Path(folder, "dist")
        _run("uv", "build", "--quiet", "--out-dir", dist, cwd=ROOT)
        files = sorted([*dist.glob("*.whl"), *dist.glob("*.tar.gz")])
        _run("uv", "tool", "run", "twine", "check", "--strict", *files)
        for number, (python, file) in enumerate(product(options.python or PYTHONS, files)):
            whole = options.whole and file.suffix == ".whl"
            try_out(file, Path(folder, str(number)), python, whole=whole)
            print(f"{file.name} on Python {python}: works", flush=True)
    return 0


def try_out(file: Path, home: Path, python: str, *, whole: bool) -> None:
    """Install a distribution in a new environment and run its commands in an empty folder."""
    _run("uv", "venv", "--quiet", "--seed", "--python", python, home)
    pip = (home / "bin/python", "-m", "pip", "install", "--quiet")
    _run(*pip, file)
    work = home / "work"
    work.mkdir()
    agentloop = home / "bin/agentloop"
    for command in _COMMANDS:
        _run(agentloop, *command, cwd=work, allowed={0, 2} if "--dry-run" in command else {0})
    # What a bare machine lacks is no error of the distribution.
    _run(agentloop, "doctor", cwd=work, allowed={0, 1})
    if not whole:
        return
    _run(home / "bin/python", "-m", "agentloop.inference.install")
    _run(*pip, f"{file}[train]")
    _serve_until_answered(agentloop, work)
    said = _run(agentloop, "chat", _QUESTION, cwd=work)
    assert "1776" in said, said
    _run(agentloop, "train", "small", "loop.steps=1", "loop.evaluate_tasks=4", cwd=work)


def _serve_until_answered(agentloop: Path, work: Path) -> None:
    command = [str(agentloop), "serve", "--ask", _QUESTION, "serve.port=0"]
    process = subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert any("\\boxed{1776}" in line for line in process.stdout)  # the wait ends with it
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def _run(
    *command: str | Path,
    cwd: Path | None = None,
    allowed: frozenset[int] | set[int] = frozenset({0}),
) -> str:
    """Run a command and return what it printed; without this repository on its path.

    Raises:
        SystemExit: its exit status is none of these.
    """
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if done.returncode not in allowed:
        raise SystemExit(f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
