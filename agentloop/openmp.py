"""How the OpenMP threads of the processes that we start wait for each other.

By default a thread that waits for the others spins. On a machine with something else to do it so
keeps the core that the thread it waits for needs, and a training step takes several times as long.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["wait_policy"]

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_policy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what to add to a process's `environment` so that waiting threads sleep; nothing where
    the user has chosen how they wait. It counts only before the OpenMP runtime is loaded."""
    if any(name in environment for name in _CHOICES):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}
