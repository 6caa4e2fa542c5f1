"""Makes each forward step of a real SGLang server last at least as long as on a modelled device.

Four servers that share two cores do not compare as four GPUs do: an idle one gives its core to the
others. With this module, a step that is computed sooner sleeps until the modelled device would be
done; scheduler, cache and HTTP are all real, and an idle server gives nothing away. Steps that take
longer are counted, and `bench.live_router` reports them.

It runs in the servers' processes: `environment` puts a `sitecustomize` on their PYTHONPATH that
calls `install`. SGLang's own files stay unchanged. Imports nothing but the standard library.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["Pace", "environment", "install"]

_VARIABLE = "AGENTLOOP_BENCH_PACE"
_TARGET = "sglang.srt.model_executor.model_runner"
_WRITE_EVERY_S = 0.5
_HIDDEN_S = 0.005  # host work between steps that a GPU hides, because the scheduler runs ahead


@dataclass(frozen=True, slots=True)
class Pace:
    """The modelled device, in seconds, with the meanings of `bench.server_model.ServerParams`."""

    prefill_s: float
    prefill_s_per_token: float
    step_s: float
    step_s_per_sequence: float
    step_s_per_token: float  # of context, over the batch

    def extend_s(self, num_tokens: int) -> float:
        return self.prefill_s + self.prefill_s_per_token * num_tokens

    def decode_s(self, num_sequences: int, num_context: int) -> float:
        return (
            self.step_s
            + self.step_s_per_sequence * num_sequences
            + self.step_s_per_token * num_context
        )


def environment(pace: Pace, folder: Path) -> dict[str, str]:
    """Return the servers' environment variables; write the hook into `folder`, which must exist.

    Each server process that runs steps writes `PID.json` there: steps, late ones, seconds late.
    """
    (folder / "sitecustomize.py").write_text("import bench.pace\n\nbench.pace.install()\n")
    root = Path(__file__).resolve().parent.parent
    return {
        "PYTHONPATH": os.pathsep.join([str(folder), str(root)]),
        _VARIABLE: json.dumps({"pace": asdict(pace), "folder": str(folder)}),
    }


def install() -> None:
    """Wait, in a server's process, for the module that runs the steps, and wrap its function."""
    if configured := os.environ.get(_VARIABLE):
        settings = json.loads(configured)
        sys.meta_path.insert(0, _Finder(Pace(**settings["pace"]), Path(settings["folder"])))


class _Finder:
    """Finds the module, once, and wraps `ModelRunner.forward` after its import."""

    def __init__(self, pace: Pace, folder: Path) -> None:
        self._pace = pace
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            runner = module.ModelRunner
            runner.forward = with_pace(runner.forward, self._pace, self._folder)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def with_pace(forward: Callable[..., Any], pace: Pace, folder: Path) -> Callable[..., Any]:
    """Return `forward`, slowed down to the modelled device."""
    steps = late = 0
    late_s = busy_s = written_s = ended = 0.0

    def run(runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal steps, late, late_s, busy_s, written_s, ended
        started = max(ended, time.perf_counter() - _HIDDEN_S)
        if batch.forward_mode.is_decode():
            due_s = pace.decode_s(batch.batch_size, int(batch.seq_lens_cpu.sum()))
        elif batch.forward_mode.is_extend():
            due_s = pace.extend_s(batch.extend_num_tokens)
        else:
            due_s = 0.0
        result = forward(runner, batch, *args, **kwargs)
        rest_s = due_s - (time.perf_counter() - started)
        steps += 1
        busy_s += due_s
        if rest_s > 0:
            time.sleep(rest_s)
        elif due_s:
            late += 1
            late_s -= rest_s
        ended = time.perf_counter()
        if started > written_s + _WRITE_EVERY_S:
            written_s = started
            counters = {"steps": steps, "late": late, "late_s": late_s, "busy_s": busy_s}
            (folder / f"{os.getpid()}.json").write_text(json.dumps(counters))
        return result

    return run
