"""`python -m agentloop.sandbox.serve` as its users meet it: the command, over real containers."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from agentloop.sandbox import Pool, PoolSettings
from agentloop.sandbox.container import LABEL
from tests.commands import run_python
from tests.integration.conftest import need
from tests.integration.test_openapi import TOKEN, schemathesis
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

FOREVER = "import time\nwhile True: time.sleep(1)"


@contextmanager
def command(*arguments: str, token: str = "") -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the URL of its one line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "agentloop.sandbox.serve", "port=0", "pool.workers=1", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"SANDBOX_TOKEN": token},
    )
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        assert line.startswith("sandbox is ready: http://127.0.0.1:"), line
        yield process, line.split()[3]
    finally:
        process.kill()
        process.wait(patient(60))
        process.stdout.close()


def containers(pid: int) -> list[str]:
    requests = ["docker", "ps", "-a", "--filter", f"label={LABEL}", "--format", "{{.Names}}"]
    names = subprocess.run(requests, capture_output=True, text=True, check=True).stdout.split()
    return [name for name in names if name.startswith(f"agentloop-sandbox-{pid}-")]


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signal_ends_it_and_leaves_nothing(docker_engine: None, number: int, status: int) -> None:
    with command("pool.backend=docker") as (process, url):
        with httpx.Client(base_url=url, trust_env=False, timeout=patient(60)) as http:
            body = {"calls": [{"code": "6 * 7"}, {"code": FOREVER, "timeout_s": 600}]}
            with http.stream("POST", "/v1/run/batch", json=body) as answer:
                assert '"result":"42"' in next(answer.iter_lines())
                http.post("/v1/sessions")
                assert containers(process.pid)
                process.send_signal(number)
                assert process.wait(patient(90)) == status
        assert containers(process.pid) == []


async def test_pool_survives_the_kill_of_a_host(docker_engine: None) -> None:
    with command("pool.backend=docker") as (process, first), command(token="") as (_, two):
        async with Pool(PoolSettings(hosts=[first, two])) as pool:
            results = []

            async def call(n: int) -> None:
                results.append(await pool.run(f"import time; time.sleep(0.05); {n}"))
                if n == 40:
                    process.kill()

            async with anyio.create_task_group() as group:
                for n in range(200):
                    group.start_soon(call, n)
            assert sorted(int(r.result or -1) for r in results) == list(range(200))
            assert {r.attempt for r in results} == {1, 2}
    async with Pool(PoolSettings(backend="docker", workers=1)):  # a start reaps what it finds
        assert containers(process.pid) == []


def test_schemathesis_finds_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        need("schemathesis: pip install --group real")
    many = ("pool.max_sessions=256", "code_judge_timeout_s=1", "pool.timeout_s=1")
    with command("pool.backend=process", *many, token=TOKEN) as (_, url):
        report = schemathesis(url, tmp_path)
    assert report["complete"]
    assert report["operations"]["tested"] == report["operations"]["total"] == 16
    assert not report["warnings"]["missing_deserializer"]


def test_invalid_settings_are_reported(docker_engine: None) -> None:
    with command() as (_, url):
        port = url.rpartition(":")[2]
        for wrong, says in [
            (f"port={port}", "cannot listen on"),
            ("pool.engines=unix:///nowhere", "no Docker Engine responds"),
            ("prot=1", "unrecognized arguments: --prot=1"),
        ]:
            done = run_python("-m", "agentloop.sandbox.serve", wrong, timeout_s=120, status=2)
            assert says in done.stderr
            assert "Traceback" not in done.stderr
