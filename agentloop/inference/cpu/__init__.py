"""Support for SGLang on machines without an accelerator.

`overlay/` is put in front of the server's module path. It replaces parts that SGLang's wheels lack
on a CPU, and the attention, which is slow there (batched_attention.py). `PRIVATE` is a folder of
packages for the servers' processes alone. `install.py` installs the requirements files: into the
environment, without dependencies, and into `PRIVATE`.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

__all__ = ["INSTALL_COMMAND", "NO_ACCELERATOR", "OVERLAY", "PRIVATE", "has_accelerator"]

OVERLAY = Path(__file__).parent / "overlay"
# torchvision's wheels are built for CUDA. Installed in the environment itself, next to a PyTorch
# for the CPU, such a wheel breaks the import of every model in transformers.
PRIVATE = Path(sys.prefix) / "share" / "agentloop" / "sglang-cpu"
INSTALL_COMMAND = "python -m agentloop.inference.install"

_DEVICE_FILES = ("nvidia0", "kfd")  # NVIDIA, AMD
NO_ACCELERATOR = (
    "no GPU is visible here: check the driver, the container's devices and CUDA_VISIBLE_DEVICES "
    "(if there is one, set AGENTLOOP_ACCELERATOR=1)"
)


def has_accelerator(dev: Path = Path("/dev")) -> bool:
    """Return whether this machine has a GPU that SGLang could use, without importing torch.

    `AGENTLOOP_ACCELERATOR=0` or `1` in the environment overrides the detection. An empty
    `CUDA_VISIBLE_DEVICES` hides NVIDIA's devices. The driver is not checked.
    """
    override = os.environ.get("AGENTLOOP_ACCELERATOR")
    if override in ("0", "1"):
        return override == "1"
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return (dev / "kfd").exists()
    is_wsl_with_gpu = (dev / "dxg").exists() and shutil.which("nvidia-smi") is not None
    return is_wsl_with_gpu or any((dev / name).exists() for name in _DEVICE_FILES)
