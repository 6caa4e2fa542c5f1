"""What SGLang needs to run without an accelerator.

`overlay/` goes in front of the server's module path and holds what its wheels lack there;
`requirements.txt` and `requirements-nodeps.txt` are what `install.py` installs.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

__all__ = ["INSTALL_COMMAND", "OVERLAY", "has_accelerator"]

OVERLAY = Path(__file__).parent / "overlay"
INSTALL_COMMAND = "python -m agentloop.inference.install"

_DEVICE_FILES = ("nvidia0", "kfd")  # NVIDIA, AMD


def has_accelerator(dev: Path = Path("/dev")) -> bool:
    """Whether this machine has a GPU that SGLang could use, without importing torch.

    `AGENTLOOP_ACCELERATOR=0` or `1` in the environment decides it outright. An empty
    `CUDA_VISIBLE_DEVICES` hides NVIDIA's devices. Whether the driver works is not checked.
    """
    said = os.environ.get("AGENTLOOP_ACCELERATOR")
    if said in ("0", "1"):
        return said == "1"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return (dev / "kfd").exists()
    return any((dev / name).exists() for name in _DEVICE_FILES) or _is_wsl_with_gpu(dev)


def _is_wsl_with_gpu(dev: Path) -> bool:
    return (dev / "dxg").exists() and shutil.which("nvidia-smi") is not None
