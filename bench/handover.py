"""How long new weights take to the servers, by disk and by group.

    python -m bench.handover [--layers 8] [--hidden 1024] [--servers 1] [--ranks 2] [--zero 3]

A model of random weights, in float32, with the small model's tokenizer; real SGLang servers and a
real learner. Each round hands over once by disk (in the temporary folder), once by disk in
/dev/shm, and once by group, in turn; the servers are idle. What is reported is the time from asking
the learner until the last server serves again, and of it what the servers took.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

from agentloop.inference.router import Router, RouterSettings
from agentloop.inference.sglang import SGLangServer, http_session
from agentloop.inference.supervise import ServerSettings, sglang_servers
from agentloop.models import SMALL
from agentloop.training.handover import WeightsSettings, hand_over, publisher
from agentloop.training.learner import RanksSettings, started
from agentloop.training.learner_settings import LearnerSettings

TIMEOUT_S = 300.0


def make_model(folder: Path, layers: int, hidden: int) -> None:
    """Configuration and tokenizer alone: the learner draws the weights."""
    shutil.copytree(SMALL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "layer_types": ["full_attention"] * layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": hidden // 128,
        "head_dim": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))


async def measure(options: argparse.Namespace, folder: Path, shm: Path) -> None:
    make_model(folder / "model", options.layers, options.hidden)
    learner_settings = LearnerSettings(
        model=folder / "model",
        init="random",
        zero_stage=options.zero,
        publish_dtype="float32",
        bucket_mib=options.bucket_mib,
    )
    ways = {
        "disk": WeightsSettings(),
        "disk, /dev/shm": WeightsSettings(folder=shm),
        "group": WeightsSettings(by="group"),
    }
    async with AsyncExitStack() as stack:
        learner, _ = await stack.enter_async_context(
            started(
                learner_settings.model_dump(mode="json"),
                RanksSettings(count=options.ranks),
                log_dir=folder / "logs",
                on_progress=print,
            )
        )
        first = folder / "first"
        said = await learner.ask("publish", timeout_s=TIMEOUT_S, folder=str(first), version="0")
        print(f"{said['num_bytes'] / 1e6:.0f} MB of weights")
        settings = ServerSettings(count=options.servers, max_total_tokens=4096)
        processes = await stack.enter_async_context(
            sglang_servers(first, settings, log_dir=folder / "logs", on_progress=print)
        )
        session = await stack.enter_async_context(http_session())
        servers = [SGLangServer(process.url, session) for process in processes]
        router = await stack.enter_async_context(Router.open(servers, RouterSettings()))
        publishers = {name: publisher(way, learner, folder / "run") for name, way in ways.items()}
        times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        checksums = set()
        for number in range(options.rounds):
            for name, way in publishers.items():
                begun = time.monotonic()
                published = await way.publish(f"{number} {name[-1]}", timeout_s=TIMEOUT_S)
                came = await hand_over(router, published, timeout_s=TIMEOUT_S)
                times[name].append((time.monotonic() - begun, came.seconds))
                checksums.add(came.checksum)
                await way.tidy()
        print(f"{len(checksums)} checksum(s)")
        for name, pairs in times.items():
            whole, load = zip(*pairs, strict=True)
            print(
                f"{name}: median {statistics.median(whole):.2f} s "
                f"({min(whole):.2f} to {max(whole):.2f}), of them {statistics.median(load):.2f} s "
                "while servers are stale"
            )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__)
    for name, value in (
        ("layers", 8), ("hidden", 1024), ("servers", 1), ("ranks", 2), ("zero", 3), ("rounds", 5),
        ("bucket-mib", 512),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        tempfile.TemporaryDirectory(dir="/dev/shm") as shm,
    ):
        anyio.run(measure, options, Path(folder), Path(shm))


if __name__ == "__main__":
    main()
