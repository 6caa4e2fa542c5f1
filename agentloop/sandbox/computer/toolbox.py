"""A Python interpreter to mount into computers, so that their images need none.

It is this process's own, with the loader and the libraries that it has loaded, and the few modules
of the standard library that the first process (guest.py) imports: about 15 MB. Started by its own
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

from agentloop.sandbox.worker import kernel

INSIDE = "/run/agentloop/toolbox"
GUEST = "agentloop.sandbox.computer.guest"
MAIN = f"import sys; sys.path.insert(0, '{INSIDE}/ours'); from {GUEST} import main; main()"
# What it imports, and the libraries that it loads, by the kernel's own list.
PROBE = """
import json, sys
sys.path[:0] = sys.argv[1:]
sys.dont_write_bytecode = True
import os, importlib.util
spec = importlib.util.spec_from_file_location("agentloop.sandbox.worker.kernel", sys.argv[2])
module = importlib.util.module_from_spec(spec)
sys.modules["agentloop.sandbox.worker.kernel"] = module
spec.loader.exec_module(module)
exec(compile(open(sys.argv[1]).read(), "guest", "exec"), {"__name__": "guest"})
import tarfile, encodings.idna, encodings.latin_1, encodings.ascii
files = [getattr(m, "__file__", None) for m in list(sys.modules.values())]
maps = {line.split(None, 5)[5].strip() for line in open("/proc/self/maps") if "/" in line}
print(json.dumps([[f for f in files if f], sorted(maps)]))
"""


def make_toolbox(folder: Path) -> None:
    """Copy the interpreter, and what the first process needs, into a new folder.

    Raises:
        OSError: this interpreter can't be copied.
    """
    guest = Path(__file__).with_name("guest.py")
    probe = [sys.executable, "-I", "-S", "-c", PROBE, str(guest), str(kernel.__file__)]
    answer = subprocess.run(probe, capture_output=True, text=True, check=False, timeout=60)
    if answer.returncode:
        raise OSError(f"this Python can't tell what it loads: {answer.stderr.strip()}")
    modules, maps = json.loads(answer.stdout)
    (folder / "lib").mkdir(parents=True)
    (folder / "bin").mkdir()
    executable = Path(sys.executable).resolve()
    loader = ""
    for path in map(Path, maps):
        if ".so" in path.name and path.exists():
            shutil.copy(path, folder / "lib" / path.name)
            name, _, version = path.name.partition(".so.")
            if "." in version:  # others name it by the first number
                (folder / "lib" / f"{name}.so.{version.split('.')[0]}").symlink_to(path.name)
            if path.name.startswith(("ld-", "ld.")):
                loader = path.name
    if not loader:
        raise OSError(f"{executable} is not linked dynamically")
    (folder / "lib" / loader).rename(folder / "bin" / "loader")
    (folder / "bin" / "loader").chmod(0o755)
    shutil.copy(executable, folder / "bin" / "python3")
    base = Path(sys.base_prefix)
    library = Path(sysconfig.get_path("stdlib", vars={"base": str(base)}))
    target = folder / library.relative_to(base)
    (target / "lib-dynload").mkdir(parents=True)
    for path in {library / "os.py", *map(Path, modules)}:
        if path.is_relative_to(library):
            inner = target / path.relative_to(library)
            inner.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, inner)
            cached = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
            if cached.exists():
                (inner.parent / "__pycache__").mkdir(exist_ok=True)
                shutil.copy2(cached, inner.parent / "__pycache__")
    for source, name in ((guest, "computer/guest.py"), (Path(kernel.__file__), "worker/kernel.py")):
        ours = folder / "ours" / "agentloop" / "sandbox" / name
        ours.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, ours)
    compileall.compile_dir(folder / "ours", quiet=2)
    for path in (folder, *folder.rglob("*")):
        path.chmod(0o755 if path.is_dir() or path.parent.name == "bin" else 0o644)


def command(socket: str) -> list[str]:
    """Return the command of the first process, inside."""
    binaries = f"{INSIDE}/bin"
    return [
        *(f"{binaries}/loader", "--library-path", f"{INSIDE}/lib", f"{binaries}/python3"),
        *("-I", "-S", "-B", "-c", MAIN, socket),
    ]
