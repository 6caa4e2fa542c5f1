"""The real parts, started once for all tests that use them.

Where one is missing, a test says what to install; in CI (`CI` is set) that is a failure.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from anyio.from_thread import start_blocking_portal

from agentloop.inference.cpu import INSTALL_COMMAND
from agentloop.models import SMALL

_DOCKER = (
    "a Docker Engine: install docker.io and iptables (Debian), then start it: sudo dockerd. "
    "The image is made by mmdebstrap where no registry can be reached."
)
_missing: set[str] = set()


def need(what: str) -> None:
    """A real part is missing: fail in CI, else skip, and say so once more at the end."""
    _missing.add(what)
    if os.environ.get("CI"):
        pytest.fail(f"missing: {what}", pytrace=False)
    pytest.skip(f"missing: {what}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _missing:
        terminalreporter.section("NOT TESTED, because real parts are missing", red=True)
        for what in sorted(_missing):
            terminalreporter.line(f"* {what}")


@pytest.fixture(scope="session")
def docker_engine() -> None:
    """An engine answers."""
    if shutil.which("docker") is None:
        need(_DOCKER)
    answer = subprocess.run(["docker", "info"], capture_output=True, timeout=120, check=False)
    if answer.returncode != 0:
        need(_DOCKER)


@pytest.fixture(scope="session")
def sglang_installed() -> None:
    if importlib.util.find_spec("sglang") is None:
        need(f"SGLang: {INSTALL_COMMAND}")


@pytest.fixture(scope="session")
def sglang_url(sglang_installed: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One SGLang server with the small model, shared by the session. Leave it as it was."""
    from agentloop.inference.processes.supervise import ServerSettings, sglang_servers

    log_dir: Path = tmp_path_factory.mktemp("sglang")
    settings = ServerSettings(max_total_tokens=32_768)
    # In a loop of its own, so that no test's loop needs to outlive the test.
    with start_blocking_portal("asyncio") as portal:
        servers = sglang_servers(SMALL, settings, log_dir=log_dir, on_progress=print)
        with portal.wrap_async_context_manager(servers) as started:
            yield started[0].url
