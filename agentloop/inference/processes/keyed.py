"""`python -m agentloop.inference.processes.keyed ...`: SGLang's launch_server with an API key.

The key comes from the environment, since every user of a machine can read command lines.
"""

from __future__ import annotations

import os
import runpy
import sys

KEY_VARIABLE = "AGENTLOOP_SERVER_KEY"

if __name__ == "__main__":
    # As one word: a key may begin with a hyphen.
    sys.argv.append(f"--api-key={os.environ.pop(KEY_VARIABLE)}")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
