"""`python -m bench.gpu` as on a GPU: its flags by SGLang's parser, and what is carried along."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from agentloop.inference.processes.supervise import plan
from agentloop.models import SMALL
from bench import gpu_carry, gpu_servers
from bench.gpu_model import FULL, Setup
from tests.commands import run_python
from tests.patience import patient

pytestmark = [
    pytest.mark.real,
    pytest.mark.timeout(300),  # SGLang's import takes its time
    pytest.mark.usefixtures("sglang_installed"),
]

ROOT = Path(__file__).parents[2]
PARSE = """
import argparse, json, sys
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for arguments in json.loads(sys.argv[1]):
    found = parser.parse_args(arguments)
    print(json.dumps([found.mem_fraction_static, found.enable_memory_saver, found.dtype]))
"""


def test_sglang_takes_the_flags_of_a_gpu(tmp_path: Path) -> None:
    near = Setup("cuda", FULL, tmp_path)
    flags = [
        (),
        ("--skip-tokenizer-init", "--enable-memory-saver"),
        gpu_servers.handover_options(near).server_args,
    ]
    commands = []
    for more in flags:
        settings = gpu_servers.server_settings(near, *more)
        commands += [first.command for first in plan(SMALL, settings, log_dir=tmp_path)]
    (on_cpu,) = plan(
        SMALL, gpu_servers.server_settings(Setup("cpu", FULL, tmp_path)), log_dir=tmp_path
    )
    python, module, name, *_ = commands[0]
    assert (module, name) == ("-m", "sglang.launch_server")
    done = subprocess.run(
        [python, "-c", PARSE, json.dumps([command[3:] for command in commands])],
        env=on_cpu.environment,  # what SGLang needs in order to be imported without a GPU
        capture_output=True, text=True, timeout=patient(240), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    result = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert result == [
        [0.35, False, "bfloat16"],
        [0.35, True, "bfloat16"],
        [0.35, False, "bfloat16"],
    ]


@pytest.mark.gate
def test_carried_folder_is_used_as_on_a_machine_with_a_gpu(tmp_path: Path) -> None:
    """The same command, on a CPU: the folder has stand-ins, and SGLang is the installed one."""
    (tmp_path / "carried").mkdir()
    gpu_carry.pack([], tmp_path / "carried" / "site.zip", {})
    options = ("--device", "cpu", "--size", "tiny", "--carried", str(tmp_path / "carried"))
    done = run_python(
        "-m",
        "bench.gpu",
        *options,
        *("--only", "serve"),
        *("--folder", str(tmp_path / "out")),
        cwd=ROOT,
        status=None,
    )
    (line,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert json.loads(line)["state"] == "done", line
    assert done.stdout.startswith("serve, ")
    assert done.returncode == 0, done.stderr
