"""`.venv/bin/python -m tools.pin`: write constraints/, the versions that tox installs.

    newest versions that pyproject.toml permits ──tox──> .tox/ENV ──> constraints/ENV.txt

Every environment is made anew. Run the tests (`tox run -m full`) before you commit the difference.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

__all__ = ["main", "pins"]

ROOT = Path(__file__).parents[1]
# CUDA builds of torch want another triton, which agentloop.inference.install then replaces.
_NOT_PINNED = {"agentloop-rl", "pip", "triton"}
# The files' names, each with its tox environment and what tox is asked to do there.
_INSTALLED = (
    *("lint", "types", "docs", "adapters", "verifiers-v1", "clients"),
    *("unit", "py312", "py313"),
)
_WITH_COMMANDS = ("integration",)  # it installs more before its tests


def pins(frozen: str) -> str:
    """Return constraints that pin what `pip freeze` printed.

    Builds of a version for some hardware (`+cpu`) are the same version. Not covered: packages
    from a folder or a URL.
    """
    versions = dict(line.split("+")[0].split("==") for line in frozen.splitlines() if "==" in line)
    return "".join(
        f"{name}=={versions[name]}\n" for name in sorted(versions) if name not in _NOT_PINNED
    )


def main() -> None:
    tox = [sys.executable, "-m", "tox", "run", "--recreate", "-e"]
    newest = {**os.environ, "AGENTLOOP_CONSTRAINT": os.devnull}
    subprocess.run([*tox, ",".join(_INSTALLED), "--notest"], cwd=ROOT, env=newest, check=True)
    only_installed = [*tox, ",".join(_WITH_COMMANDS), "--", "--version"]
    subprocess.run(only_installed, cwd=ROOT, env=newest, check=True)
    folder = ROOT / "constraints"
    folder.mkdir(exist_ok=True)
    homes = {name: ROOT / ".tox" / name for name in (*_INSTALLED, *_WITH_COMMANDS)}
    homes |= {"package": ROOT / ".tox" / ".pkg", "tox": Path(sys.prefix)}
    for name, home in homes.items():
        freeze = [sys.executable, "-m", "uv", "pip", "freeze", "--python", str(home)]
        frozen = subprocess.run(freeze, capture_output=True, text=True, check=True).stdout
        (folder / f"{name}.txt").write_text(pins(frozen))


if __name__ == "__main__":
    main()
