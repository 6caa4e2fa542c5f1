"""Everything that a machine with one GPU can show, in parts that can be resumed.

    python -m bench.gpu                              all parts that this machine can run
    python -m bench.gpu --list                       the parts: limit, requirements, command
    python -m bench.gpu --only speed,zero            some of them
    python -m bench.gpu --device cpu --size tiny     proves that each part works, without a GPU
    python -m bench.gpu carry FOLDER                 what a machine without a network needs
    python -m bench.gpu --carried FOLDER             and the parts that run with it, there

Each part is a process of its own with a time limit of at most eight minutes, and needs no network.
A line is printed as it ends; its result is kept as DIR/PART.json (`--folder DIR`) and as a line of
DIR/results.jsonl, its output as DIR/PART.log. A second call runs only parts that have not
succeeded on this device and size; `--again` runs all. A part whose requirements are missing is
skipped, and the table names what is missing.

The model is Qwen3-0.6B with random weights, in bfloat16. The plain loop of `speed` keeps its
weights and AdamW's moments in bfloat16, the learner in float32, which takes more memory and time:
the comparison is in the plain loop's favour.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio

from bench import gpu_carry
from bench.command import parser_for, words

__all__ = ["PARTS", "Part", "main", "missing", "table"]

_MAX_LIMIT_S = 480.0
_GRACE_S = 20.0  # for a part's servers and ranks to end with it
_TAIL_LINES = 60
_PACKAGES = ("torch", "deepspeed", "transformers", "sglang", "flash-attn")


@dataclass(frozen=True)
class Part:
    """A measurement that runs in a process of its own.

    Attributes:
        function: MODULE:NAME of an async function that takes a `Setup` and returns rows.
        needs: Packages; also `cuda`, a GPU, and `gpus`, on GPUs at least two of them.
        limit_s: The time after which it is killed.
    """

    function: str
    needs: tuple[str, ...] = ("torch", "deepspeed")
    limit_s: float = _MAX_LIMIT_S


_SERVER = ("torch", "sglang")
_BOTH = (*_SERVER, "deepspeed")
PARTS: dict[str, Part] = {
    "attention": Part("bench.gpu_learner:attention", ("torch",), 240),
    "speed": Part("bench.gpu_learner:speed"),
    "siblings": Part("bench.gpu_learner:siblings"),
    "passes": Part("bench.gpu_learner:passes"),
    "zero": Part("bench.gpu_learner:zero"),
    "memory": Part("bench.gpu_learner:memory", ("torch", "deepspeed", "peft")),
    "offload": Part("bench.gpu_learner:offload"),
    "step": Part("bench.gpu_learner:step", limit_s=300),
    "head": Part("bench.gpu_learner:head", limit_s=300),
    "long": Part("bench.gpu_learner:long", limit_s=300),
    "serve": Part("bench.gpu_servers:serve", _SERVER),
    "killed": Part("bench.gpu_servers:kill_server", _SERVER),
    "release": Part("bench.gpu_servers:release", (*_SERVER, "torch_memory_saver", "cuda")),
    "disk": Part("bench.gpu_servers:disk", _BOTH),
    "broadcast": Part("bench.gpu_servers:broadcast", (*_BOTH, "gpus")),
    "pause": Part("bench.gpu_servers:pause", _BOTH),
    "train": Part("bench.gpu_servers:train", (*_BOTH, "matplotlib")),
}


def missing(part: Part, device: str) -> str | None:
    """Return why a part cannot run here, or None."""
    for need in part.needs:
        if need == "cuda":
            if device != "cuda":
                return "needs a GPU"
        elif need == "gpus":
            if device == "cuda" and _num_gpus() < 2:
                return "needs two GPUs: NCCL refuses two processes on one"
        elif importlib.util.find_spec(need) is None:
            return f"needs {need}, which is not installed"
    if device == "cuda" and not _num_gpus():
        return "torch sees no GPU"
    return None


def _num_gpus() -> int:
    if importlib.util.find_spec("torch") is None:
        return 0
    import torch

    return int(torch.cuda.device_count())


def _command(name: str, options: argparse.Namespace) -> list[str]:
    arguments = (
        "--device",
        options.device,
        "--size",
        options.size,
        "--folder",
        str(options.folder),
    )
    return [sys.executable, "-m", "bench.gpu", "--run", name, *arguments]


def _run_part(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run a part in a process; return its result."""
    part, file = PARTS[name], options.folder / f"{name}.json"
    identity = {"part": name, "device": options.device, "size": options.size}
    if reason := missing(part, options.device):
        return {**identity, "state": "skipped", "reason": reason}
    environment = dict(os.environ)
    if options.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    file.unlink(missing_ok=True)
    limit_s, started = min(part.limit_s, options.limit), time.monotonic()
    with (options.folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            _command(name, options),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            returncode = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            _end(process)
    duration = {"seconds": round(time.monotonic() - started, 1)}
    if returncode is None:
        return {
            **identity,
            **duration,
            "state": "failed",
            "reason": f"took over {limit_s:g} s",
        }
    if file.exists():
        result: dict[str, Any] = json.loads(file.read_text())
        return result | duration
    log_path = options.folder / f"{name}.log"
    lines = log_path.read_text(errors="replace").split("\n")
    last = next((line for line in reversed(lines) if re.search(r"\w", line)), "")
    reason = f"ended with {returncode}: {last} (see {log_path})"
    return {**identity, **duration, "state": "failed", "reason": reason}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part's process. Its servers and ranks have guardians, which end when it does."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
            return


def _run_here(name: str, options: argparse.Namespace) -> None:
    """Run a part in this process and write its result."""
    from bench.gpu_model import SIZES, PartFailed, Setup

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # such that nothing is left behind
    module, _, function = PARTS[name].function.partition(":")
    result: dict[str, Any] = {"part": name, "device": options.device, "size": options.size}
    with tempfile.TemporaryDirectory(prefix=f"bench-gpu-{name}-") as folder:
        setup = Setup(options.device, SIZES[options.size], Path(folder))
        result["machine"] = _machine(setup.device_name)
        try:
            rows = anyio.run(getattr(importlib.import_module(module), function), setup)
            result |= {"state": "done", "rows": rows}
        except PartFailed as error:
            result |= {"state": "failed", "reason": str(error)}
        except BaseException:
            _print_tails(Path(folder))
            raise
    partial = options.folder / f".{name}.json"
    partial.write_text(json.dumps(result, indent=1) + "\n")
    partial.replace(options.folder / f"{name}.json")


def _print_tails(folder: Path) -> None:
    """Print the ends of the logs of a part's servers and ranks, which go with its folder."""
    for path in sorted(folder.rglob("*.log*")):
        lines = path.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        print(f"--- {path.relative_to(folder)}", *lines, sep="\n", flush=True)


def _machine(device_name: str) -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return {"device": device_name, "python": platform.python_version(), **versions}


def _earlier(name: str, options: argparse.Namespace) -> dict[str, Any] | None:
    """Return the result of an earlier call, if it succeeded on the same device and size."""
    try:
        result: dict[str, Any] = json.loads((options.folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        return None
    same = all(result.get(key) == getattr(options, key) for key in ("device", "size"))
    return result if same and result.get("state") == "done" else None


def table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return all results as one table, in Markdown."""
    lines = ["| part | case | result |", "|---|---|---|"]
    lines += [
        f"| {result['part']} | {case} | {text} |"
        for result in results
        for case, text in _rows(result)
    ]
    return "\n".join(lines)


def _rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name of each case and its figures; of a part without a result, the reason."""
    if result["state"] != "done":
        yield result["state"], " ".join(str(result["reason"]).split())[:300]
        return
    for row in result["rows"]:
        yield row["case"], "; ".join(f"{key} {_cell(row[key])}" for key in row if key != "case")


def _line(result: Mapping[str, Any]) -> str:
    """Return a result as one line."""
    took = f"{result['seconds']:g} s" if "seconds" in result else "0 s"
    return f"{result['part']}, {took}: {' | '.join(map(': '.join, _rows(result)))}"


def _cell(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def _only(text: str) -> list[str]:
    names = words(text)
    if unknown := sorted(set(names) - set(PARTS)):
        raise argparse.ArgumentTypeError(f"no part {', '.join(unknown)}: {', '.join(PARTS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = parser_for("gpu", __doc__)
    parser.add_argument("--only", type=_only, default=list(PARTS), metavar="NAME,...")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("full", "tiny"), default="full")
    parser.add_argument("--folder", type=Path, default=Path("gpu-results"), help="of the results")
    parser.add_argument("--carried", type=Path, metavar="DIR", help="written by `carry`")
    parser.add_argument("--limit", type=float, default=_MAX_LIMIT_S, help="seconds for each part")
    parser.add_argument("--again", action="store_true", help="also run parts that have succeeded")
    parser.add_argument("--list", action="store_true", help="print the parts, run none")
    parser.add_argument("--run", choices=PARTS, help=argparse.SUPPRESS)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["carry"]:
        return gpu_carry.main(arguments[1:])
    options = _parser().parse_args(arguments)
    with ExitStack() as stack:
        if options.carried:
            site = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-gpu-site-"))
            gpu_carry.use(options.carried, Path(site))
        return _run(options)


def _run(options: argparse.Namespace) -> int:
    if options.list:
        for name in options.only:
            part = PARTS[name]
            print(f"{name}: at most {part.limit_s:g} s; {', '.join(part.needs)}")
            print(f"    {shlex.join(_command(name, options))}")
        return 0
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.run:
        _run_here(options.run, options)
        return 0
    results = []
    for name in options.only:
        result = None if options.again else _earlier(name, options)
        if result is None:
            print(f"{name} ...", file=sys.stderr, flush=True)
            result = _run_part(name, options)
            (options.folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
            with (options.folder / "results.jsonl").open("a") as lines:
                lines.write(json.dumps(result) + "\n")
            print(_line(result), flush=True)
        results.append(result)
    print(table(results))
    return 1 if any(result["state"] == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
