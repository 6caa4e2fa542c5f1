"""What SGLang needs to run without an accelerator.

`overlay/` goes in front of the server's module path and holds what its wheels lack there. So does
`PRIVATE`, a folder of packages for the servers' processes alone. The requirements files are what
`install.py` installs: into the environment, without dependencies, and into `PRIVATE`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["INSTALL_COMMAND", "NO_ACCELERATOR", "OVERLAY", "PRIVATE", "has_accelerator"]

OVERLAY = Path(__file__).parent / "overlay"
# torchvision's wheels are built for CUDA. In the environment itself, beside a PyTorch for the CPU,
# such a wheel breaks the import of every model in transformers.
PRIVATE = Path(sys.prefix) / "share" / "agentloop" / "sglang-cpu"
INSTALL_COMMAND = "python -m agentloop.inference.install"

_DEVICE_FILES = ("nvidia0", "kfd")  # NVIDIA, AMD
NO_ACCELERATOR = (
    "no GPU is visible here: check the driver, the container's devices and CUDA_VISIBLE_DEVICES "
    "(AGENTLOOP_ACCELERATOR=1 says that there is one)"
)


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
