"""Weight sync over a process group: real ranks send, plain torch processes receive."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.patience import patient

pytest.importorskip("deepspeed", reason="needs DeepSpeed: pip install 'agentloop-rl[train]'")

import torch
from safetensors.torch import load_file

from agentloop.learner.names import Conversion, named_tensors
from agentloop.learner.policy import Policy
from agentloop.learner.weights import split, trained_tensors
from agentloop.models import SMALL
from agentloop.training.learner_client.settings import LearnerSettings, OptimizerSettings
from agentloop.training.weight_sync.checksums import parts_of
from tests.learner.peer import receive
from tests.learner.ranks import Forked, Ranks, make_batch, started

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

LAYOUT = {"device": "cpu", "dtype": "float32", "num_ranks": 1, "num_kv_heads": 2}
SETTINGS = LearnerSettings(
    model=SMALL,
    micro_batch_tokens=57,
    publish_dtype="float32",
    bucket_mib=1,  # several buckets; the largest tensor has one of its own
    collective_timeout_s=60,
    optimizer=OptimizerSettings(lr=1e-2, warmup_steps=0),
    # The small model's tensors are so small that ZeRO 3 would not partition them.
    deepspeed={"zero_optimization": {"stage3_param_persistence_threshold": 0}},
)


@pytest.fixture(scope="module", params=[2, 3], ids=["zero2", "zero3"])
def learner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Ranks, Path]]:
    """Two ranks after a step, so that the weights differ from the model's own."""
    folder = tmp_path_factory.mktemp("broadcast")
    settings = SETTINGS.model_copy(update={"zero_stage": request.param})
    with started(folder, settings, 2) as ranks:
        make_batch(1).save(folder / "batch")
        assert ranks.ask("step", batch=folder / "batch")["num_updates"] == 1
        yield ranks, folder


class Peers:
    """Receiving processes; `outs` are the files that they write."""

    def __init__(self, folder: Path, num: int) -> None:
        self.processes: list[Forked] = []
        self.outs = [folder / f"received-{rank}" for rank in range(num)]


@contextmanager
def group(
    learner: tuple[Ranks, Path], name: str, num: int, timeout_s: float = 40
) -> Iterator[tuple[Peers, dict[str, Any]]]:
    """Form a group with `num` peers; yield them and the answer to the layout request."""
    ranks, folder = learner
    layout = ranks.ask("layout", out=folder / "layout.json")
    opened = ranks.ask("open", address="127.0.0.1", num_updates=layout["num_updates"])
    peers = Peers(folder, num)
    ours, theirs = socket.socketpair()
    ours.settimeout(100)
    try:
        with theirs:
            for rank, out in enumerate(peers.outs, 1):
                where = (opened["port"], rank, 1 + num, name, folder / "layout.json", out, theirs)
                log = folder / "peers.log"
                peers.processes.append(Forked(receive, *where, environment=os.environ, log=log))
        joined = ranks.ask(
            "join", name=name, world_size=1 + num, backend="gloo", within_s=timeout_s
        )
        assert joined["ok"], joined
        with ours, ours.makefile("rb") as lines:
            for _ in peers.processes:  # one may still be connecting to another
                assert lines.readline() == b"joined\n"
        yield peers, layout
    finally:
        ours.close()
        for process in peers.processes:
            process.kill()
            process.wait()


def send_all(ranks: Ranks, offer: dict[str, Any], **more: Any) -> list[dict[str, Any]]:
    number = offer["num_updates"]
    return [
        ranks.ask("send", bucket=index, num_updates=number, **more)
        for index in range(offer["num_buckets"])
    ]


def published(ranks: Ranks, folder: Path) -> dict[str, Any]:
    assert ranks.ask("publish", folder=folder / "published", version="1")["ok"]
    return load_file(folder / "published" / "model.safetensors")


@pytest.mark.gate
def test_received_weights_equal_published_ones(learner: tuple[Ranks, Path]) -> None:
    ranks, folder = learner
    expected = published(ranks, folder)
    with group(learner, "whole", 2) as (peers, layout):
        answers = send_all(ranks, layout, layout=LAYOUT)
        assert all(process.wait(patient(100)) == 0 for process in peers.processes)
        assert ranks.ask("leave")["ok"]
    assert layout["num_buckets"] > 2
    assert sum(first["num_bytes"] for first in answers) == layout["num_bytes"]
    for out in peers.outs:
        received = load_file(out)
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], expected[name]) for name in expected)
    sums = {name: first for answer in answers for name, first in answer["sums"].items()}
    parts = parts_of(expected)
    assert sums.keys() == parts.keys()
    for name, first in sums.items():
        data = b"".join(expected[part].numpy().tobytes() for part in parts[name])
        assert first == [hashlib.sha256(data).hexdigest()[:16]]


def test_peer_that_dies_breaks_the_group_and_not_the_learner(learner: tuple[Ranks, Path]) -> None:
    ranks = learner[0]
    with group(learner, "dying", 2) as (peers, layout):
        peers.processes[1].kill()
        peers.processes[1].wait()
        refused = next(first for first in send_all(ranks, layout) if not first["ok"])
        assert (refused["fatal"], "dying broke" in refused["error"]) == (False, True)
        ranks.ask("leave")
        assert peers.processes[0].wait(patient(100)) != 0, "peers waiting for the rest are told"
    goes_on(learner, "after-a-death")


def test_peer_that_freezes_breaks_the_group_in_time(learner: tuple[Ranks, Path]) -> None:
    ranks = learner[0]
    with group(learner, "freezing", 1, timeout_s=15) as (peers, layout):
        peers.processes[0].send_signal(signal.SIGSTOP)
        answers = send_all(ranks, layout)
        # Data that fits into the kernel's buffers counts as sent.
        assert not answers[-1]["ok"]
    goes_on(learner, "after-a-freeze")


def test_peer_that_does_not_come_is_not_waited_for(learner: tuple[Ranks, Path]) -> None:
    ranks = learner[0]
    assert ranks.ask("open", address="127.0.0.1", num_updates=1)["ok"]
    refused = ranks.ask("join", name="alone", world_size=2, backend="gloo", within_s=1)
    assert not refused["ok"]
    assert "the group alone could not be formed" in refused["error"]
    goes_on(learner, "after-nobody")


def goes_on(learner: tuple[Ranks, Path], name: str) -> None:
    """Check that another group receives everything."""
    ranks, folder = learner
    expected = published(ranks, folder)
    with group(learner, name, 1) as (peers, layout):
        assert all(answer["ok"] for answer in send_all(ranks, layout))
        assert peers.processes[0].wait(patient(100)) == 0
    received = load_file(peers.outs[0])
    assert all(torch.equal(received[key], expected[key]) for key in expected)


def test_requests_for_other_weights_and_invalid_requests_are_refused(
    learner: tuple[Ranks, Path],
) -> None:
    ranks = learner[0]
    cases: list[tuple[dict[str, Any], str]] = [
        ({"op": "open", "address": "127.0.0.1", "num_updates": 7}, "7 updates are gone"),
        ({"op": "open", "address": "192.0.2.1", "num_updates": 1},
         "weights.address: cannot listen"),
        ({"op": "send", "bucket": 0, "num_updates": 0}, "0 updates are gone"),
        ({"op": "send", "bucket": 99, "num_updates": 1}, "99 does not exist"),
        ({"op": "send", "bucket": 0, "num_updates": 1}, "no group"),
        ({"op": "send", "bucket": 0, "num_updates": 1, "layout": {"x": 1}}, "layout.x: "),
        ({"op": "join", "name": "x", "world_size": 2, "backend": "gloo", "within_s": 60},
         "learner.collective_timeout_s"),
        ({"op": "layout", "out": "/nowhere/at/all"}, "no folder"),
    ]  # fmt: skip
    for request, reason in cases:
        answer = ranks.ask(**request)
        assert not answer["ok"]
        assert reason in answer["error"]
        assert answer["fatal"] is False


def as_in_memory(model: torch.nn.Module) -> list[Conversion]:
    """Return conversions that change nothing."""
    return [
        Conversion((name,), {name: tensor.shape}, dict)
        for name, tensor in named_tensors(model).items()
    ]


def test_buckets_are_bounded_and_hold_everything_once() -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(n, 10, bias=n > 3) for n in (2, 3, 4, 50, 6)))
    bound = 4 * 64
    played = cast(Policy, SimpleNamespace(model=model, conversions=as_in_memory(model)))
    buckets = split(trained_tensors(played, torch.float32), bound)
    names = [first.name for bucket in buckets for first in bucket]
    assert names == [name for name, _ in model.named_parameters()]
    for bucket in buckets:
        size = sum(first.num_bytes for first in bucket)
        assert size <= bound or len(bucket) == 1


def test_offsets_in_a_bucket_are_aligned(tmp_path: Path) -> None:
    """SGLang refuses a tensor whose offset is not a multiple of its type's size."""
    from agentloop.learner.broadcast import Broadcaster

    model = torch.nn.Module()
    model.odd = torch.nn.Parameter(torch.zeros(3))
    model.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    model.other = torch.nn.Parameter(torch.zeros(5))
    played = SimpleNamespace(
        model=model,
        conversions=as_in_memory(model),
        num_updates=0,
        settings=SimpleNamespace(publish_dtype="bfloat16", bucket_mib=1, model=SMALL, config={}),
        world=SimpleNamespace(first=True, device=torch.device("cpu")),
    )
    made = Broadcaster(cast(Policy, played)).layout(tmp_path / "layout")
    requests = {"model_type": "qwen3", "num_attention_heads": 4, "num_key_value_heads": 2}
    assert made.model == {**requests, "dtype": "bfloat16"}
    assert (made.num_buckets, made.num_bytes) == (1, 32)
    assert (made.num_updates, made.backend) == (0, "gloo")
    (bucket,) = json.loads((tmp_path / "layout").read_text())
    assert bucket == {
        "names": ["count", "odd", "other"],
        "dtypes": ["int64", "bfloat16", "bfloat16"],
        "shapes": [[2], [3], [5]],
    }
