"""The runtime's folder for the servers' logs. Whole runtimes are tested in tests/integration."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.errors import ServerError, ServerStartError
from agentloop.inference.processes.server_log import folder_kept_on_error


@pytest.mark.parametrize("in_group", [False, True])
def test_the_logs_are_kept_if_the_error_refers_to_one(in_group: bool) -> None:
    kept = folder_kept_on_error()
    folder = kept.__enter__()
    error: Exception = ServerStartError("it died", log_path=folder / "sglang-1.log")
    if in_group:
        error = ExceptionGroup("two", [ValueError(), error])
    kept.__exit__(type(error), error, None)
    assert folder.is_dir()
    folder.rmdir()


@pytest.mark.parametrize("elsewhere", [None, Path("/var/log/sglang.log")])
def test_the_logs_are_removed_otherwise(elsewhere: Path | None) -> None:
    with pytest.raises(ServerError), folder_kept_on_error() as folder:
        raise ServerError(f"it died, see {folder}", log_path=elsewhere)
    assert not folder.exists()
    with folder_kept_on_error() as folder:
        pass
    assert not folder.exists()
