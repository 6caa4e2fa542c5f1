"""Runs first in each Python process of a server on a CPU; SGLang spawns several.

It makes torchvision importable, the garbage collector run less often, and SGLang's processes share
one import of it. A process that does not import torchvision only pays for one more finder on
`sys.meta_path`.
"""

import gc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_libraries: list[object] = []  # a torch Library removes its operators when it is collected


class _BeforeTorchvision:
    """Finds torchvision, once, and declares the operators that its import needs."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            _declare_operators(os.path.dirname(spec.origin))
        return spec


def _declare_operators(package: str) -> None:
    import torch

    try:
        torch.ops.load_library(os.path.join(package, "_C.so"))
    except OSError:  # linked against CUDA, which is missing: nothing has declared its operators
        library = torch.library.Library("torchvision", "DEF")
        for schema in _SCHEMAS:
            library.define(schema)
        _libraries.append(library)


def _run_shadowed_sitecustomize() -> None:
    folder = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry) != folder]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def _fork_instead_of_spawn() -> None:
    """Let SGLang fork its processes, which have then imported it already.

    It asks for "spawn" because a process that uses CUDA must not be forked. Importing SGLang is
    nearly all that a small server does until it is ready, and each of its processes would do it.
    """
    import multiprocessing

    set_start_method = multiprocessing.set_start_method

    def set_fork_method(method: str | None, force: bool = False) -> None:
        set_start_method("fork" if method == "spawn" else method, force)

    multiprocessing.set_start_method = set_fork_method


# Importing SGLang creates a million long-lived objects: with the default thresholds, a sixth of
# the start-up time goes into garbage collection.
gc.set_threshold(100_000, 50, 100)
sys.meta_path.insert(0, _BeforeTorchvision())
if sys.platform == "linux":  # elsewhere, libraries do not survive a fork
    _fork_instead_of_spawn()
_run_shadowed_sitecustomize()
