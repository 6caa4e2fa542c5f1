"""Programs in other languages than Python, as calls.

    source ──> a call that compiles it, and writes the program out ──┐
       └── where there is nothing to compile ────────────────────────┴──> a call that becomes it

A call begins as Python and replaces itself with the program, so that limits, counts and cleanup are
those of any call. A compiled program is executed from memory, since nothing can be in the directory
of calls.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from agentloop.sandbox.results import CallError, CallResult, CallStatus
from agentloop.sandbox.settings import MAX_KEPT_BYTES, OutputLimits

Language: TypeAlias = Literal["python", "bash", "cpp", "javascript"]

COMPILE_ERROR = "CompileError"
MAX_REASON_CHARS = 4096
COMPILE_TIMEOUT_S, PROBE_TIMEOUT_S = 30.0, 30.0
COMPILE_OUTPUT = OutputLimits(2 * MAX_KEPT_BYTES, MAX_KEPT_BYTES)
# What Python ignores, and a program expects as it is by default.
AS_USUAL = """
import os, signal, sys
for name in ("SIGPIPE", "SIGXFSZ"):
    signal.signal(getattr(signal, name), signal.SIG_DFL)
"""
INTERPRET = (
    AS_USUAL
    + """
with open({file!r}, "w", encoding="utf-8", errors="replace") as file:
    file.write({source!r})
os.execvp({command!r}, [{command!r}, {file!r}])
"""
)
COMPILE = (
    AS_USUAL
    + """
import base64, subprocess, zlib
with open({file!r}, "w", encoding="utf-8", errors="replace") as file:
    file.write({source!r})
command = [{command!r}, "-O2", "-pthread", {file!r}, "-o", "program"]
ended = subprocess.run(command, env=dict(os.environ, TMPDIR="."), stdout=2)
if ended.returncode:
    sys.exit(1)
with open("program", "rb") as file:
    sys.stdout.write(base64.b64encode(zlib.compress(file.read(), 1)).decode())
"""
)
EXECUTE = (
    AS_USUAL
    + """
import base64, zlib
program = os.memfd_create("program", os.MFD_CLOEXEC)
with open(program, "wb", closefd=False) as file:
    file.write(zlib.decompress(base64.b64decode({program!r})))
os.execve(program, ["program"], os.environ)
"""
)


@dataclass(frozen=True)
class LanguageTools:
    """The command that runs programs of a language, or compiles them.

    Attributes:
        file: name of a source.
        package: Debian's name of what has the command.
    """

    command: str
    file: str
    compiles: bool
    package: str

    @property
    def probe(self) -> str:
        return f"import shutil\nprint(shutil.which({self.command!r}) is not None)"

    def first_call(self, source: str) -> str:
        """Return Python that becomes the program, or writes out the compiled one."""
        template = COMPILE if self.compiles else INTERPRET
        return template.format(source=source, file=self.file, command=self.command)


TOOLS: dict[str, LanguageTools] = {
    "bash": LanguageTools("bash", "main.sh", compiles=False, package="bash"),
    "cpp": LanguageTools("g++", "main.cpp", compiles=True, package="g++"),
    "javascript": LanguageTools("node", "main.js", compiles=False, package="nodejs"),
}


def second_call(compiled: CallResult) -> str | CallResult:
    """Return Python that becomes the program; or, where there is none, how the call ended."""
    compiled = checked(compiled)
    if compiled.status.is_unscorable:
        return compiled
    if compiled.ok and not compiled.truncated:
        try:
            base64.b64decode(compiled.stdout, validate=True)
        except ValueError:  # something else was written
            pass
        else:
            return EXECUTE.format(program=compiled.stdout)
    reason = compiled.stderr
    if compiled.truncated:
        reason = f"the program, or what the compiler says of it, is longer than {MAX_KEPT_BYTES}"
    status = CallStatus.ERROR if compiled.ok else compiled.status
    error = CallError(COMPILE_ERROR, reason[:MAX_REASON_CHARS])
    return replace(compiled, status=status, stdout="", stdout_bytes=0, error=error, exit_code=1)


def checked(result: CallResult) -> CallResult:
    """Return a result of which an exception in Python, which is ours, is not the program's."""
    if result.error is None or result.error.line is None:
        return result
    reason = f"the program was not begun: {result.error.type}: {result.error.message}"
    failed = CallResult.failed(result.id, CallStatus.SANDBOX_ERROR, reason)
    return replace(
        failed, queue_s=result.queue_s, worker_id=result.worker_id, attempt=result.attempt
    )
