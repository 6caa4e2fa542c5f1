"""Interpretation of a server's log."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentloop.inference.processes.server_log import ServerLog


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "server.log"


@pytest.mark.parametrize(
    ("text", "status", "expected"),
    [
        ("", 3, ["ended with exit status 3."]),
        ("", 139, ["was killed by SIGSEGV."]),
        ("", 255, ["ended with exit status 255."]),
        ("", 137,
         ["was killed by SIGKILL.", "If nobody killed it, the machine ran out of memory."]),
        ("ValueError: no\n[2026-01-01] kill_process_tree called: 1", 137,
         ["gave up.", "ValueError: no"]),
        (
            "ValueError: first\n  ValueError: indented\ntorch.OutOfMemoryError: CUDA out of memory",
            1,
            [
                "ended with exit status 1.",
                "torch.OutOfMemoryError: CUDA out of memory",
                "There is not enough GPU memory: lower `max_total_tokens`.",
            ],
        ),
        (
            "ModuleNotFoundError: No module named 'einops'",
            1,
            [
                "ended with exit status 1.",
                "ModuleNotFoundError: No module named 'einops'",
                "A package that SGLang imports is missing: "
                "`python -m agentloop.inference.install`.",
            ],
        ),
        ("[2026-01-01] Responses disabled (ModuleNotFoundError: No module named 'harmony')", 137,
         ["was killed by SIGKILL.", "If nobody killed it, the machine ran out of memory."]),
        (
            "[2026-01-01] Subprocess scheduler_0 (pid=4) crashed with exit code -9. Cleanup",
            137,
            [
                "was killed by SIGKILL.",
                "Subprocess scheduler_0 (pid=4) crashed with exit code -9. Cleanup",
                "If nobody killed it, the machine ran out of memory.",
            ],
        ),
    ],
)  # fmt: skip
def test_ending(path: Path, text: str, status: int, expected: list[str]) -> None:
    path.write_text(text)
    assert ServerLog(path).ending(status).splitlines() == expected


def test_stages(path: Path) -> None:
    log = ServerLog(path)
    stages = []
    with path.open("w") as out:
        for line in (
            "",
            "Load weight begin. avail mem=1",
            "KV Cache is allocated",
            "Uvicorn running",
        ):
            print(line, file=out, flush=True)
            stages.append(log.stage())
    assert stages == [
        "importing SGLang",
        "loading the weights",
        "allocating the KV cache",
        "answering",
    ]


def test_tail_of_a_log_that_is_large_binary_or_missing(path: Path) -> None:
    assert "cannot be read" in ServerLog(path).tail()
    path.write_bytes(b"\xff\xfe" * 1_000_000 + b"\nlast line")
    tail = ServerLog(path).tail()
    assert tail.endswith("  last line")
    assert len(tail) < 1_000
