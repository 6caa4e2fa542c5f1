"""Loading a tokenizer, as far as the tests of chat formats do not."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from agentloop.agent.tokenizer import load_tokenizer
from agentloop.errors import ModelError

PROGRAM = """
import importlib.util
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else find_spec(name, *rest)
{}
"""
OURS = """
from agentloop.agent.tokenizer import load_tokenizer
from agentloop.models import SMALL
load_tokenizer(SMALL)
"""


@pytest.mark.timeout(60)  # imports transformers
@pytest.mark.parametrize(("program", "is_told"), [("import transformers", True), (OURS, False)])
@pytest.mark.full
def test_base_install_does_not_hear_that_there_is_no_torch(program: str, is_told: bool) -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program)],
        capture_output=True,
        text=True,
        check=True,
        env=env,
    )
    assert ("PyTorch was not found" in done.stderr) == is_told


@contextmanager
def hub(status: int, code: str) -> Iterator[tuple[str, list[str]]]:
    """Serve a hub that refuses all requests; yield its URL and the paths of the requests."""
    paths: list[str] = []

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            self.send_response(status)
            self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusal) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", paths
        finally:
            server.shutdown()


@pytest.mark.parametrize(
    ("status", "code", "problem"),
    [
        (404, "RepoNotFound", "the hub has no such model"),
        (503, "", "the hub cannot be asked: .*503"),
    ],
)
def test_unknown_model_name_costs_one_request_to_the_hub(
    status: int, code: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with hub(status, code) as (url, paths):
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        with pytest.raises(ModelError, match=f"model: 'Qwen/Qwne3-8B' is .*{problem}") as caught:
            load_tokenizer("Qwen/Qwne3-8B")
    assert [path for path in paths if "Qwne3" in path] == ["/api/models/Qwen/Qwne3-8B"]
    assert "set model to the folder" in str(caught.value)
    assert "\n" not in str(caught.value)
