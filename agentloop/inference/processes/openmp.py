"""The OpenMP wait policy of the processes that we start.

By default, OpenMP threads spin while they wait for each other. On a busy machine a spinning thread
occupies the core that the thread it waits for needs, and a training step takes several times as
long.
"""

from __future__ import annotations

from collections.abc import Mapping

__all__ = ["wait_policy"]

_CHOICES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def wait_policy(environment: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables that make waiting OpenMP threads sleep.

    Empty if `environment` already sets a wait policy. They take effect only if they are set before
    the OpenMP runtime is loaded.
    """
    if any(name in environment for name in _CHOICES):
        return {}
    return {"OMP_WAIT_POLICY": "PASSIVE"}
