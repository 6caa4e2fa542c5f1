"""Makes transformers' models importable beside a torchvision that is built for another device.

SGLang's CPU recipe installs torchvision's CUDA build, which dies at import for want of two
operators; transformers imports it for pictures that nobody here looks at. Import this before any
model class.
"""

from __future__ import annotations

import torch

try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    _SCHEMAS = torch.library.Library("torchvision", "DEF")
    _SCHEMAS.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _SCHEMAS.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
