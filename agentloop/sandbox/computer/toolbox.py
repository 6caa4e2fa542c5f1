"""A Python interpreter to mount into computers, so that their images need none.

It is this process's own, with the loader and the libraries that it has loaded, and the few modules
of the standard library that the first process (guest.py) imports: about 30 MB. Started by its own
loader, it runs in any image of the same processor: also of another C library, or without any.
"""

from __future__ import annotations

import compileall
import json
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

INSIDE = "/run/agentloop/toolbox"
OURS = ("worker/kernel.py", "computer/guest_files.py", "computer/guest.py")
START = "import sys; sys.path.insert(0, {!r}); import agentloop.sandbox.computer.guest as guest; "
# What it imports, and the libraries that it loads, by the kernel's own list.
PROBE = """
import encodings.ascii, encodings.idna, encodings.latin_1, json, os
files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
print(json.dumps([[file for file in files if file], sorted(maps)]))
"""


def make_toolbox(folder: Path) -> None:
    """Copy the interpreter, and what the first process needs, into a new folder.

    Raises:
        OSError: this interpreter can't be copied.
    """
    ours = folder / "ours"
    for name in OURS:
        inner = ours / "agentloop" / "sandbox" / name
        inner.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(__file__).parents[1] / name, inner)
    compileall.compile_dir(ours, quiet=2)
    probe = [sys.executable, "-I", "-S", "-c", START.format(str(ours)) + PROBE]
    answer = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=60)
    if answer.returncode:
        raise OSError(f"this Python can't tell what it loads: {answer.stderr.strip()}")
    modules, maps = json.loads(answer.stdout)
    _copy_binaries(folder, [Path(path) for path in maps])
    _copy_library(folder, [Path(path) for path in modules])
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)


def _copy_binaries(folder: Path, paths: list[Path]) -> None:
    library, binaries = folder / "lib", folder / "bin"
    library.mkdir()
    binaries.mkdir()
    shutil.copy(Path(sys.executable).resolve(), binaries / "python3")
    for path in paths:
        name, _, version = path.name.partition(".so")
        if name.startswith("ld"):
            shutil.copy(path, binaries / "loader")
        elif version or path.suffix == ".so":
            shutil.copy(path, library / path.name)
            if version.count(".") > 1:  # others name it by the first number
                (library / f"{name}.so.{version.split('.')[1]}").symlink_to(path.name)
    if not (binaries / "loader").exists():
        raise OSError(f"{sys.executable} is not linked dynamically")


def _copy_library(folder: Path, modules: list[Path]) -> None:
    """Copy modules to where the interpreter finds them, with their bytecode."""
    base = Path(sys.base_prefix)
    library = Path(sysconfig.get_path("stdlib", vars={"base": str(base)}))
    target = folder / library.relative_to(base)
    (target / "lib-dynload").mkdir(parents=True)
    for path in {library / "os.py", *modules}:
        if path.is_relative_to(library):
            cached = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
            for source in (path, cached):
                inner = target / source.relative_to(library)
                if source.exists():
                    inner.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(source, inner)


def command(socket: str) -> list[str]:
    """Return the command of the first process, inside."""
    binaries = f"{INSIDE}/bin"
    return [
        *(f"{binaries}/loader", "--library-path", f"{INSIDE}/lib", f"{binaries}/python3"),
        *("-I", "-S", "-B", "-c", START.format(f"{INSIDE}/ours") + "guest.main()", socket),
    ]
