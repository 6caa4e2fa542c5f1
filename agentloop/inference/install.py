"""Install SGLang for this machine: `python -m agentloop.inference.install`.

With an accelerator: SGLang as it comes. Without one there are two steps, because SGLang's own
requirements name CUDA libraries and a PyTorch that wants them: what it imports on a CPU, then
SGLang itself and two more without their requirements.
Goes into the environment of the running interpreter; does nothing when all of it is there.
Not covered: building from source where there are no wheels (macOS, Windows).
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from pathlib import Path

from packaging.requirements import Requirement

from agentloop.errors import ServerStartError
from agentloop.inference.cpu import has_accelerator

__all__ = ["install", "missing", "steps"]

_CPU = Path(__file__).parent / "cpu"
Step = tuple[list[Requirement], tuple[str, ...]]  # with pip's options
_SHOWN = ("Collecting", "Downloading", "Installing", "Successfully", "ERROR")
_TAIL_LINES = 15


def steps(*, accelerator: bool) -> list[Step]:
    """What goes into the environment, in this order."""
    if accelerator:
        return [([Requirement("sglang==0.5.23")], ())]
    return [
        (_read(_CPU / "requirements.txt"), ()),
        (_read(_CPU / "requirements-nodeps.txt"), ("--no-deps",)),
    ]


def missing(wanted: list[Step]) -> list[str]:
    """The requirements that the running interpreter's environment does not satisfy."""
    return [str(r) for requirements, _ in wanted for r in requirements if not _satisfied(r)]


def install(on_progress: Callable[[str], None] = print) -> None:
    """Install whatever is missing; says what it does, line by line.

    Raises:
        ServerStartError: no installer, no network, or no wheel for this machine and Python.
    """
    accelerator = has_accelerator()
    kind = "GPU" if accelerator else "CPU"
    wanted = steps(accelerator=accelerator)
    absent = missing(wanted)
    if not absent:
        on_progress(f"SGLang for the {kind} is installed already.")
        return
    on_progress(
        f"Installing SGLang for the {kind} into {sys.prefix}: {len(absent)} packages and what "
        "they need, several GB, some minutes, once."
    )
    installer = _installer()
    for step, (requirements, options) in enumerate(wanted, start=1):
        if any(not _satisfied(r) for r in requirements):
            on_progress(f"Step {step} of {len(wanted)}")
            _run([*installer, *options, *map(str, requirements)], on_progress)
    importlib.invalidate_caches()
    if left := missing(wanted):
        raise ServerStartError(f"after the installation these are still missing: {', '.join(left)}")
    on_progress(f"SGLang for the {kind} is installed.")


def _read(path: Path) -> list[Requirement]:
    lines = path.read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


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


def main(arguments: list[str] | None = None) -> int:
    description = (__doc__ or "").split("\n\n", 1)[1]
    argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(arguments)
    try:
        install()
    except ServerStartError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
