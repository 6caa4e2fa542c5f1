"""Parts of the runtime. Whole runtimes are tested in tests/integration."""

from __future__ import annotations

import threading
from pathlib import Path

import anyio
import pytest

from agentloop.agent.chat_format import ChatFormat
from agentloop.errors import ServerError, ServerStartError
from agentloop.inference.processes.server_log import folder_kept_on_error
from agentloop.models import SMALL
from agentloop.runtime import Runtime
from tests.patience import patient
from tests.support import FakeSGLang, eventually


@pytest.mark.parametrize("in_group", [False, True])
def test_logs_are_kept_if_the_error_refers_to_one(in_group: bool) -> None:
    kept = folder_kept_on_error()
    folder = kept.__enter__()
    error: Exception = ServerStartError("it died", log_path=folder / "sglang-1.log")
    if in_group:
        error = ExceptionGroup("two", [ValueError(), error])
    kept.__exit__(type(error), error, None)
    assert folder.is_dir()
    folder.rmdir()


@pytest.mark.parametrize("elsewhere", [None, Path("/var/log/sglang.log")])
def test_logs_are_removed_otherwise(elsewhere: Path | None) -> None:
    with pytest.raises(ServerError), folder_kept_on_error() as folder:
        raise ServerError(f"it died, see {folder}", log_path=elsewhere)
    assert not folder.exists()
    with folder_kept_on_error() as folder:
        pass
    assert not folder.exists()


@pytest.mark.parametrize(("setting", "name"), [("", "small"), ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B")])
async def test_served_name_is_the_folders_unless_it_is_set(setting: str, name: str) -> None:
    async with (
        FakeSGLang([]).serving() as server,
        Runtime(
            model=str(SMALL), served_model_name=setting, servers=[server.url], tools=[]
        ) as runtime,
    ):
        assert runtime.model_name == name


async def test_ctrl_c_does_not_wait_for_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command cancels its tasks at Ctrl-C, and threads must not keep its process."""
    loading: list[threading.Thread] = []
    answered = threading.Event()

    def load_slowly(*_: object) -> None:
        loading.append(threading.current_thread())
        answered.wait(patient(60))

    monkeypatch.setattr(ChatFormat, "load", load_slowly)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(Runtime()._load_chat, "owner/name")
        await eventually(lambda: bool(loading))
        tasks.cancel_scope.cancel()
    assert not answered.is_set()
    assert loading[0].is_alive()
    assert loading[0].daemon
    answered.set()
