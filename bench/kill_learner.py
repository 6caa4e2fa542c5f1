"""A learner for bench/kill.py, with the real protocol and files; the model is a chain of digests.

    step   digest = sha256(digest + sha256(the batch file's bytes)); the loss is derived from it

So two runs have the same losses exactly if they trained on the same batches in the same order, and
`learned.jsonl`, which is append-only, records the batches that led to any digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import socket
import struct
import sys
import time
from array import array
from pathlib import Path
from typing import Any

from agentloop.learner.files import appear, fresh_partial

__all__ = ["FIRST", "LOG", "PID", "PlayedLearner", "main"]

FIRST = "0" * 64  # the digest of the initial model
LOG = Path("logs/learned.jsonl")  # in the run's folder
PID = Path("logs/learner.pid")
_KEEP_CHECKPOINTS = 2
_MOST_S = 0.004


class PlayedLearner:
    def __init__(self, run: Path) -> None:
        self._log = run / LOG
        self._digest = FIRST
        self._num_updates = 0
        self._saved: str | None = None

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"op": "step", "batch": str(path)}:
                return self._step(Path(path).read_bytes())
            case {"op": "reset_optimizer"}:
                self._learn(b"reset", [])
                return {}
            case {"op": "publish", "folder": str(folder), "version": str(version)}:
                self._write(Path(folder), self.model(version))
                return {"version": version, "sha256": {}, "num_bytes": 0, "seconds": 0.0}
            case {"op": "save", "folder": str(folder), "state": state}:
                kept = {"state": state, "digest": self._digest, "num_updates": self._num_updates}
                self._write(Path(folder), {"rank-0.json": {}, "state.json": kept})
                _remove_older(Path(folder))
                self._saved = folder
                return {"folder": folder, **self._counters()}
            case {"op": "saved"}:
                return {"folder": self._saved, "writing": None, "failed": None}
            case {"op": "load", "folder": str(folder)}:
                kept = json.loads((Path(folder) / "state.json").read_bytes())
                self._digest, self._num_updates = kept["digest"], kept["num_updates"]
                return {"state": kept["state"], **self._counters()}
            case {"op": "close"}:
                return {}
        raise ValueError(f"unknown request: {request}")

    def model(self, version: str) -> dict[str, Any]:
        """Return the contents of the files of a published model."""
        return {"config.json": {}, "digest.json": self._digest}

    def _counters(self) -> dict[str, int]:
        return {"num_updates": self._num_updates, "num_skipped": 0, "warm_from": 0}

    def _step(self, batch: bytes) -> dict[str, Any]:
        _work()
        self._num_updates += 1
        self._learn(hashlib.sha256(batch).digest(), prompts_in(batch))
        _work()
        return {"loss": int(self._digest[:12], 16) / 16**12, "num_updates": self._num_updates}

    def _learn(self, addition: bytes, prompts: list[list[int]]) -> None:
        before = self._digest
        self._digest = hashlib.sha256(before.encode() + addition).hexdigest()
        line = {"before": before, "after": self._digest, "prompts": prompts}
        with self._log.open("ab", buffering=0) as file:  # a single write is atomic
            file.write(json.dumps(line).encode() + b"\n")

    def _write(self, folder: Path, files: dict[str, Any]) -> None:
        partial = fresh_partial(folder)
        for name, content in files.items():
            _work()
            (partial / name).write_text(json.dumps(content))
        appear(partial, folder, durable=False)


def prompts_in(batch: bytes) -> list[list[int]]:
    """Return the distinct pairs of the first two ids of the samples: group and task."""
    (length,) = struct.unpack("<Q", batch[:8])
    header, data = json.loads(batch[8 : 8 + length]), batch[8 + length :]

    def ints(name: str) -> array[int]:
        start, end = header[name]["data_offsets"]
        return array("i", data[start:end])

    ids, at, prompts = ints("ids"), 0, dict[tuple[int, ...], None]()
    for num in ints("lengths"):
        prompts[tuple(ids[at : at + 2])] = None
        at += num
    return [list(prompt) for prompt in prompts]


def _work() -> None:
    time.sleep(random.uniform(0, _MOST_S))


def _remove_older(folder: Path) -> None:
    complete = sorted(path.parent for path in folder.parent.glob("*/state.json"))
    for folder in complete[:-_KEEP_CHECKPOINTS]:
        shutil.rmtree(folder)


def main(kind: type[PlayedLearner] = PlayedLearner) -> None:
    run = Path(sys.argv[1]).parent.parent  # of logs/learner.json
    learner = kind(run)
    link = socket.socket(socket.AF_UNIX)
    link.connect(os.environ["AGENTLOOP_LEARNER_SOCKET"])
    (run / PID).write_text(str(os.getpid()))
    with link.makefile("rwb") as file:
        ready = {"ok": True, "ready": True, "num_ranks": 1, "device": "cpu"}
        ready |= {"num_parameters": 0, "num_trained": 0}
        file.write(json.dumps(ready).encode() + b"\n")
        file.flush()
        for line in file:
            request = json.loads(line)
            file.write(json.dumps({"ok": True, **learner.handle(request)}).encode() + b"\n")
            file.flush()
            if request["op"] == "close":
                break


if __name__ == "__main__":
    main()
