"""What every test shares. Async tests run on asyncio (`anyio_mode`)."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Generator
from pathlib import Path
from typing import Any

import anyio
import hypothesis
import pytest

from tests.leftovers import Leftovers
from tests.patience import patient

_TO_CLEAN_UP_S = 3.0

# Of any example: a machine may pause, which is no fault of the code's.
hypothesis.settings.register_profile(
    "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("patient")


# What is imported is here to stay: without this, looking for garbage in it takes a part of the
# collection's time, and a second or so of each test that calls gc.collect().
gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Leftovers())


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """asyncio on uvloop: what the commands run on."""
    return "asyncio", {"use_uvloop": True}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Set each test's limit, mark those that are async, and put the files whose tests may take
    longest first, so that no worker is left with one."""
    limits: dict[Path, float] = {}
    for item in items:
        limit_s = patient(_limit_s(item))
        item.add_marker(pytest.mark.timeout(limit_s), append=False)
        if _is_async(item):
            item.add_marker("anyio")
        limits[item.path] = max(limit_s, limits.get(item.path, 0))
    items.sort(key=lambda item: -limits[item.path])


def _is_async(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj)


def _limit_s(item: pytest.Item) -> float:
    """Return how long a test may take: what each may, or more where it says so."""
    least = float(item.config.getini("timeout"))
    return max([least, *(float(marker.args[0]) for marker in item.iter_markers("timeout"))])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: Any) -> Generator[None]:
    """An async test that hangs is cancelled shortly before its timeout: uvloop, while it waits,
    does not hear pytest-timeout's signal."""
    if _is_async(item):
        item.obj = _with_limit(item.obj, _limit_s(item) - _TO_CLEAN_UP_S)
    return (yield)


def _with_limit(test: Any, limit_s: float) -> Any:
    @functools.wraps(test)
    async def with_limit(*args: Any, **kwargs: Any) -> None:
        with anyio.fail_after(limit_s):
            await test(*args, **kwargs)

    return with_limit
