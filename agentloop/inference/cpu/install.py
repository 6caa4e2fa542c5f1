"""Install SGLang for a machine without an accelerator: `python -m agentloop.inference.cpu.install`.

SGLang's own requirements name CUDA libraries and a PyTorch that wants them. So there are two
steps: what it imports on a CPU, then SGLang itself and two more without their requirements.
Goes into the environment of the running interpreter; does nothing when all of it is there.
Not covered: building from source where there are no wheels (macOS, Windows).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from packaging.requirements import Requirement

from agentloop.errors import ServerStartError

__all__ = ["install", "missing"]

_HERE = Path(__file__).parent
_STEPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("requirements.txt", ()),
    ("requirements-nodeps.txt", ("--no-deps",)),
)
_SHOWN = ("Collecting", "Downloading", "Installing", "Successfully", "ERROR")
_TAIL_LINES = 15


def missing() -> list[str]:
    """The requirements that the running interpreter's environment does not satisfy."""
    return [str(r) for name, _ in _STEPS for r in _read(_HERE / name) if not _satisfied(r)]


def install(on_progress: Callable[[str], None] = print) -> None:
    """Install whatever is missing; says what it does, line by line.

    Raises:
        ServerStartError: no installer, no network, or no wheel for this machine and Python.
    """
    absent = missing()
    if not absent:
        on_progress("SGLang for the CPU is installed already.")
        return
    on_progress(
        f"Installing SGLang for the CPU into {sys.prefix}: {len(absent)} packages are missing. "
        "In full it is about 2.6 GB and five minutes, once."
    )
    installer = _installer()
    for step, (name, options) in enumerate(_STEPS, start=1):
        if any(not _satisfied(r) for r in _read(_HERE / name)):
            on_progress(f"Step {step} of {len(_STEPS)}: {name}")
            _run([*installer, *options, "-r", str(_HERE / name)], on_progress)
    importlib.invalidate_caches()
    if left := missing():
        raise ServerStartError(f"after the installation these are still missing: {', '.join(left)}")
    on_progress("SGLang for the CPU is installed.")


def _read(path: Path) -> Iterator[Requirement]:
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            yield Requirement(line)


def _satisfied(requirement: Requirement) -> bool:
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--progress-bar", "off"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ServerStartError(
        f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, then again"
    )


def _run(command: list[str], on_progress: Callable[[str], None]) -> None:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            if line.lstrip().startswith(_SHOWN):
                on_progress(line.strip()[:160])
    if process.returncode != 0:
        raise ServerStartError(_explain(command, process.returncode, list(tail)))


def _explain(command: list[str], returncode: int, tail: list[str]) -> str:
    said = "\n".join(tail)
    hint = ""
    if "No matching distribution" in said or "no matching distribution" in said:
        python = ".".join(map(str, sys.version_info[:3]))
        hint = (
            f"\nThe index has no wheel for Python {python} on {sys.platform}. "
            "The recipe is tested with Python 3.11 on Linux x86-64."
        )
    return f"`{' '.join(command)}` failed (exit status {returncode}):\n{said}{hint}"


def main() -> int:
    try:
        install()
    except ServerStartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
