"""The real parts, started once for all tests that use them.

Where one is missing, a test says what to install; in CI (`CI` is set) that is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import pytest

from agentloop.inference.cpu import INSTALL_COMMAND
from agentloop.inference.sglang.sampling import Sampling
from agentloop.runtime import Runtime, Settings
from agentloop.sandbox import PoolSettings
from agentloop.serving.access import ServeSettings
from agentloop.serving.app import AgentService, listening
from agentloop.serving.listen import bind
from tests.patience import patient
from tests.shared_server import shared_server

if TYPE_CHECKING:
    import openai

_DOCKER = (
    "a Docker Engine: install docker.io and iptables (Debian), then start it: sudo dockerd. "
    "The image is made by mmdebstrap where no registry can be reached."
)
_missing: set[str] = set()


def need(part: str) -> None:
    """A real part is missing: fail in CI, else skip, and say so once more at the end."""
    _missing.add(part)
    if os.environ.get("CI"):
        pytest.fail(f"missing: {part}", pytrace=False)
    pytest.skip(f"missing: {part}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _missing:
        terminalreporter.section("NOT TESTED, because real parts are missing", red=True)
        for kind in sorted(_missing):
            terminalreporter.line(f"* {kind}")


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """An engine answers."""
    if shutil.which("docker") is None:
        need(_DOCKER)
    answer = subprocess.run(
        ["docker", "info"], capture_output=True, timeout=patient(120), check=False
    )
    if answer.returncode != 0:
        need(_DOCKER)


@pytest.fixture(scope="session")
def sglang_installed() -> None:
    if importlib.util.find_spec("sglang") is None:
        need(f"SGLang: {INSTALL_COMMAND}")


@pytest.fixture(scope="session")
def sglang_url(sglang_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of an SGLang server with the small model, which all workers of pytest-xdist share.

    Leave its state as it is: other tests use it at the same time.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with shared_server(folder / "sglang") as url:
        yield url


@pytest.fixture(scope="module")
async def runtime(sglang_url: str) -> AsyncIterator[Runtime]:
    """A greedy runtime without containers."""
    settings = Settings(
        servers=[sglang_url],
        sandbox=PoolSettings(backend="process"),
        sampling=Sampling(temperature=0),
        serve=ServeSettings(port=0),
    )
    async with Runtime(settings) as runtime:
        yield runtime


@pytest.fixture(scope="module")
async def client(runtime: Runtime) -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client of that runtime."""
    import openai

    settings = runtime.settings
    with bind(settings.serve) as bound:
        async with (
            listening(AgentService(runtime, settings), bound) as url,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        ):
            yield client
