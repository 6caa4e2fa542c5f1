"""Stands in for a package that SGLang imports on a GPU and does not need for what bench.gpu does.

`python -m bench.gpu carry` writes it under the name of each such package. Every submodule exists
but `norm`, for which SGLang's kernels have their own form, and every name in one is a class that
cannot be created.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any


class _Submodules(importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not name.startswith(f"{__name__}.") or name == f"{__name__}.norm":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        vars(module)["__getattr__"] = __getattr__


def __getattr__(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(self: object, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError(f"{__name__}.{name} was not carried along")

    return type(name, (), {"__init__": refuse})


sys.meta_path.append(_Submodules())
