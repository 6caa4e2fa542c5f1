"""What `agentloop runs export` writes, loaded by others: transformers, and SGLang (one start)."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentloop.cli.runs.export import export
from agentloop.inference.processes.supervise import ServerSettings, sglang_servers
from agentloop.models import SMALL
from tests.commands import run_python
from tests.patience import patient

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

# In a process of its own: what transformers imports is not for this one's warnings filter.
LOAD = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

found = []
for folder in sys.argv[1:]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [{"role": "user", "content": "What is 37 times 48?"}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    with torch.no_grad():
        logits = model.float()(torch.tensor([ids])).logits[0, -1]
    greedy = int(logits.argmax())
    found.append({"ids": ids, "logits": logits.tolist(), "greedy": greedy,
                  "dtype": str(model.config.dtype)})
print(json.dumps(found))
"""


def loaded(*folders: Path) -> list[dict[str, Any]]:
    done = run_python(
        "-c", LOAD, *map(str, folders), env={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    )
    result: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, with the small model as its newest weights."""
    weights = tmp_path / "run" / "weights" / "7"
    shutil.copytree(SMALL, weights, ignore=shutil.ignore_patterns("README.md", "__pycache__"))
    sha256 = hashlib.sha256((weights / "model.safetensors").read_bytes()).hexdigest()
    manifest = {"version": "7", "sha256": {"model.safetensors": sha256}}
    (weights / "published.json").write_text(json.dumps(manifest))
    (tmp_path / "run" / "config.toml").write_text("")
    return tmp_path / "run"


async def test_transformers_and_sglang_load_it(
    run: Path, tmp_path: Path, sglang_installed: None
) -> None:
    export(run, tmp_path / "as published")
    export(run, tmp_path / "float32", dtype="float32")
    export(tmp_path / "float32", tmp_path / "bfloat16", dtype="bfloat16")
    names = ("as published", "float32", "bfloat16")
    source, *remaining = loaded(SMALL, *(tmp_path / name for name in names))
    dtypes = [second.pop("dtype") for second in remaining]
    assert dtypes == ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
    source.pop("dtype")
    assert remaining == [source] * 3
    settings = ServerSettings(device="cpu", max_total_tokens=2000, start_timeout_s=240)
    async with sglang_servers(
        tmp_path / "float32", settings, log_dir=tmp_path / "logs", on_progress=print
    ) as [server]:
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        question = {"role": "user", "content": "What is 37 times 48?"}
        async with httpx.AsyncClient(base_url=server.url, timeout=patient(120)) as client:
            body = {"input_ids": source["ids"], "sampling_params": sampling}
            answer = (await client.post("/generate", json=body)).json()
            chat = {"model": "it", "messages": [question], "max_tokens": 1}
            stated = (await client.post("/v1/chat/completions", json=chat)).json()
    assert answer["output_ids"] == [source["greedy"]]
    # Its own chat protocol found the template.
    assert stated["usage"]["prompt_tokens"] == len(source["ids"])
