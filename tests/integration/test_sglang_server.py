"""The real SGLang, started and stopped by us. Two starts; what it answers is tested elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import httpx
import pytest

from agentloop.errors import ServerStartError
from agentloop.inference.install import install
from agentloop.inference.processes.supervise import ServerProcess, ServerSettings, sglang_servers
from agentloop.models import SMALL
from tests.patience import patient

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(600),  # a start takes a quarter of a minute on idle cores
    pytest.mark.skipif(sys.platform != "linux", reason="SGLang's wheels are for Linux"),
]

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(scope="module", autouse=True)
def _sglang() -> None:
    install()


@pytest.fixture
def model() -> Path:
    return SMALL


@pytest.fixture
def litter() -> Callable[[], set[Path]]:
    """Files in shared memory that are new and that no process maps."""
    before = set(SHARED_MEMORY.iterdir())

    def find() -> set[Path]:
        maps = []
        for path in Path("/proc").glob("[0-9]*/maps"):
            with suppress(OSError):
                maps.append(path.read_text(errors="replace"))
        inodes = {line.split()[4] for text in maps for line in text.splitlines() if "/shm/" in line}
        new = set(SHARED_MEMORY.iterdir()) - before
        remaining = set()
        for path in new:
            with suppress(FileNotFoundError):  # of another's, gone since
                if str(path.stat().st_ino) not in inodes:
                    remaining.add(path)
        return remaining

    return find


def _group(leader: int) -> list[int]:
    """Every process in the session that `leader` leads, and not a zombie."""
    result = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(session) == leader and state != "Z":
            result.append(int(stat.parent.name))
    return result


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:  # it has ended since
        return ""


async def _frames(url: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{url}/generate", json=body) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))


async def _check_stream(server: ServerProcess) -> None:
    num_frames = 0
    for num_tokens in (8, 64, 512, 4000):  # what it has not sent yet it sends as one frame
        sampling = {"max_new_tokens": num_tokens, "temperature": 0.0, "ignore_eos": True}
        body = {
            "input_ids": [1, 2, 3],
            "sampling_params": sampling,
            "stream": True,
            "return_logprob": True,
        }
        frames = [frame async for frame in _frames(server.url, body)]
        ids = [token for frame in frames for token in frame["output_ids"]]
        logprobs = [entry for f in frames for entry in f["meta_info"]["output_token_logprobs"]]
        assert len(ids) == num_tokens
        assert [entry[1] for entry in logprobs] == ids
        assert frames[-1]["meta_info"]["finish_reason"]["type"] == "length"
        num_frames = len(frames)
        if num_frames > 1:
            break
    assert num_frames > 1


async def test_real_server(model: Path, tmp_path: Path, litter: Callable[[], set[Path]]) -> None:
    settings = ServerSettings(device="cpu", max_total_tokens=5000, start_timeout_s=240)
    stated: list[str] = []
    async with sglang_servers(
        model, settings, log_dir=tmp_path / "logs", on_progress=stated.append
    ) as [server]:
        assert server.pid is not None
        async with httpx.AsyncClient(base_url=server.url, timeout=patient(120)) as client:
            info = (await client.get("/server_info")).json()
        assert info["version"] == "0.5.23"
        assert info["model_path"] == server.model_path
        assert info["device"] == "cpu"
        assert info["dtype"] == "float32"
        assert info["max_total_num_tokens"] == 5000
        assert info["disable_radix_cache"] is False
        await _check_stream(server)

        # A scheduler that is killed takes the server with it, and we are told.
        members = _group(server.pid)
        [scheduler] = [pid for pid in members if _name(pid).startswith("sglang::schedul")]
        os.kill(scheduler, signal.SIGKILL)
        with anyio.fail_after(patient(120)):
            reason = await server.wait_dead()
        assert "crashed with exit code -9" in reason.partition("Its command")[0]
        assert not server.alive
        assert _group(server.pid) == []
    assert "ready at" in stated[-1]
    assert not litter()


async def test_real_server_that_cannot_start(
    model: Path, tmp_path: Path, litter: Callable[[], set[Path]]
) -> None:
    broken = tmp_path / "broken"
    await anyio.to_thread.run_sync(shutil.copytree, model, broken)
    for weights in broken.glob("*.safetensors"):
        os.truncate(weights, 1000)  # found out late, with all of SGLang's processes up
    settings = ServerSettings(device="cpu", max_total_tokens=1000, start_timeout_s=240)
    with pytest.raises(ServerStartError) as caught:
        async with sglang_servers(broken, settings, log_dir=tmp_path, on_progress=lambda _: None):
            raise AssertionError("it cannot start")
    stated, _, tail = str(caught.value).partition("The end of its log")
    assert "SafetensorError: Error while deserializing header" in stated
    assert "out of memory" not in stated
    assert "--max-total-tokens 1000" in stated
    assert "load_weights" in tail
    assert "Ignore import error" not in tail
    assert not litter()
