"""Install SGLang for this machine: `python -m agentloop.inference.install`.

With an accelerator, SGLang is installed as usual. Without one there are three steps, because
SGLang's own requirements include CUDA libraries and a PyTorch that depends on them: first the
packages that it imports on a CPU, then SGLang itself and triton without their requirements, then
torchvision into a folder that only the servers see.
Packages go into the environment of the running interpreter; if all are present, nothing is done.
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
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement

from agentloop.child_environment import for_own_pip
from agentloop.errors import ServerStartError
from agentloop.inference.cpu import PRIVATE, has_accelerator

_CPU = Path(__file__).parent / "cpu"
_SHOWN = ("Collecting", "Downloading", "Installing", "Successfully", "ERROR")
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True)
class Step:
    """A run of pip: requirements and options; `folder` is None for the environment itself."""

    requirements: list[Requirement]
    options: tuple[str, ...] = ()
    folder: Path | None = None

    def missing(self) -> list[str]:
        """Return the requirements that are not satisfied."""
        return [str(r) for r in self.requirements if not _is_satisfied(r, self.folder)]


def steps(*, accelerator: bool) -> list[Step]:
    """Return the steps of the installation, in order."""
    if accelerator:
        return [Step([Requirement("sglang==0.5.23")])]
    return [
        Step(_read(_CPU / "requirements.txt")),
        Step(_read(_CPU / "requirements-nodeps.txt"), ("--no-deps",)),
        Step(
            _read(_CPU / "requirements-private.txt"),
            ("--no-deps", "--upgrade", "--target", str(PRIVATE)),
            PRIVATE,
        ),
    ]


def missing(wanted: list[Step]) -> list[str]:
    """Return the requirements that this machine does not satisfy."""
    return [name for step in wanted for name in step.missing()]


def install(on_progress: Callable[[str], None] = print) -> None:
    """Install missing packages and report progress line by line.

    Raises:
        ServerStartError: There is no installer, no network, or no wheel for this machine and
            Python.
    """
    accelerator = has_accelerator()
    kind = "GPU" if accelerator else "CPU"
    wanted = steps(accelerator=accelerator)
    absent = missing(wanted)
    if not absent:
        on_progress(f"SGLang for the {kind} is already installed.")
        return
    on_progress(
        f"Installing SGLang for the {kind} into {sys.prefix}: {len(absent)} packages and their "
        "dependencies. This downloads several GB and takes some minutes, once."
    )
    installer = _installer()
    for number, step in enumerate(wanted, start=1):
        if step.missing():
            on_progress(f"Step {number} of {len(wanted)}")
            _run([*installer, *step.options, *map(str, step.requirements)], on_progress)
    importlib.invalidate_caches()
    if still_missing := missing(wanted):
        raise ServerStartError(
            f"the installation finished, but these packages are missing: {', '.join(still_missing)}"
        )
    on_progress(f"SGLang for the {kind} is installed.")


def _read(path: Path) -> list[Requirement]:
    lines = path.read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def _is_satisfied(requirement: Requirement, folder: Path | None) -> bool:
    try:
        version = _version(requirement.name, folder)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


def _version(name: str, folder: Path | None) -> str:
    if folder is None:
        return importlib.metadata.version(name)
    for distribution in importlib.metadata.distributions(name=name, path=[str(folder)]):
        return distribution.version
    raise importlib.metadata.PackageNotFoundError(name)


def _installer() -> list[str]:
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-m", "pip", "install", "--progress-bar", "off"]
    if uv := shutil.which("uv"):
        return [uv, "pip", "install", "--python", sys.executable]
    raise ServerStartError(
        f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip` and try again"
    )


def _run(command: list[str], on_progress: Callable[[str], None]) -> None:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=for_own_pip(),
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            tail.append(line.rstrip())
            if line.lstrip().startswith(_SHOWN):
                on_progress(line.strip()[:160])
    if process.returncode != 0:
        raise ServerStartError(_explain(command, process.returncode, list(tail)))


def _explain(command: list[str], returncode: int, tail: list[str]) -> str:
    output = "\n".join(tail)
    hint = ""
    if "No matching distribution" in output or "no matching distribution" in output:
        python = ".".join(map(str, sys.version_info[:3]))
        hint = (
            f"\nThe index has no wheel for Python {python} on {sys.platform}. "
            "The installation is tested with Python 3.11 to 3.13 on Linux x86-64."
        )
    return f"`{' '.join(command)}` failed (exit status {returncode}):\n{output}{hint}"


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
