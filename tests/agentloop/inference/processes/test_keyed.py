"""SGLang gets its key, which may begin with a hyphen, where nobody else can read it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from agentloop.inference.processes.keyed import KEY_VARIABLE

ROOT = Path(__file__).parents[4]
STUB = """
import os, sys
print(sys.argv[1:], "-hush" in os.environ.values(), __name__)
print("hush" in open("/proc/self/cmdline").read())
"""


def test_key_is_an_argument_only_inside_the_process(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(STUB)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    command = [sys.executable, "-m", "agentloop.inference.processes.keyed", "--port", "1"]
    environment = os.environ | {KEY_VARIABLE: "-hush", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "['--port', '1', '--api-key=-hush'] False __main__",
        "False",
    ]
