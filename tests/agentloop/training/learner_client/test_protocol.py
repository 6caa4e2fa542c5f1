"""The messages between trainer and learner: what one end encodes, the other one decodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.training.learner_client import protocol
from agentloop.training.learner_client.protocol import (
    Failure,
    LoadReply,
    MessageError,
    OpenReply,
    Reply,
    Request,
    SendRequest,
    StepReply,
    StepRequest,
    TrainingState,
    decode_reply,
    decode_request,
    encode,
)
from agentloop.training.weight_sync.layout import Layout
from tests.patience import patient

TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
STATES = st.builds(
    TrainingState, step=st.integers(0), version=st.integers(0), lineage=st.none() | TEXT
)


@settings(deadline=None)
@given(state=STATES, lr=st.none() | st.floats(0, 1, exclude_max=True))
def test_request_survives_the_wire(state: TrainingState, lr: float | None) -> None:
    request = StepRequest(batch=Path("/a/batch"), lr=lr, state=state)
    line = encode(request)
    assert line.count(b"\n") == 1
    assert decode_request(line) == request


@settings(deadline=None)
@given(state=STATES)
def test_reply_survives_the_wire(state: TrainingState) -> None:
    reply = LoadReply(state=state, num_updates=3, num_skipped=0, warm_from=1)
    assert decode_reply(encode(reply), LoadReply) == reply


def test_layout_is_rebuilt() -> None:
    request = SendRequest(bucket=0, num_updates=1, layout=Layout("cpu", "float32", 1, 2))
    assert decode_request(encode(request)) == request


def test_every_request_can_be_decoded_and_names_its_reply() -> None:
    kinds = {
        kind
        for kind in vars(protocol).values()
        if isinstance(kind, type) and issubclass(kind, Request) and kind.__name__.isidentifier()
    } - {Request}
    assert kinds == set(protocol._REQUESTS.values())
    for kind in kinds:
        base: Any = kind.__mro__[1]
        assert base.__pydantic_generic_metadata__["args"] == (kind.reply_type,)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("nonsense", "not a JSON object with an op: b'nonsense'"),
        ("[1]", "not a JSON object with an op"),
        ('{"folder": "x"}', "not a JSON object with an op"),
        ('{"op": "dance"}', "unknown op 'dance': expected one of step, "),
        ('{"op": ["step"]}', r"unknown op \['step'\]"),
        ('{"op": "step"}', "batch: Field required"),
        ('{"op": "step", "batch": "b", "rescu": "x"}', "rescu: unknown field"),
        ('{"op": "step", "batch": "b", "lr": "much"}', "lr: Input should be a valid number"),
        ('{"op": "step", "batch": "b", "lr": true}', "lr: Input should be a valid number"),
        ('{"op": "step", "batch": "b", "lr": 2}', "lr: Input should be less than 1"),
        ('{"op": "save", "folder": "x", "beside": 1}', "beside: Input should be a valid boolean"),
        ('{"op": "send", "bucket": 0, "num_updates": 1, "layout": {"sides": 3}}', "layout.sides"),
    ],
)
def test_invalid_request_is_named(line: str, message: str) -> None:
    with pytest.raises(MessageError, match=message):
        decode_request(line.encode())


def test_metrics_of_a_step_are_kept_by_name() -> None:
    line = b'{"ok": true, "loss": 0.5, "num_tokens": 12, "grad_norm": null, "lr": 0.001}\n'
    result = decode_reply(line, StepReply)
    assert isinstance(result, StepReply)
    assert result.loss == 0.5
    metrics: dict[str, Any] = {"loss": 0.5, "num_tokens": 12, "grad_norm": None, "lr": 0.001}
    assert result.metrics() == metrics
    assert json.loads(encode(StepReply(**metrics))) == {"ok": True, **metrics}


def test_failure_is_a_reply_to_any_request() -> None:
    failure = Failure(error="the disk is full")
    assert decode_reply(encode(failure), OpenReply) == failure


@pytest.mark.parametrize(
    ("line", "kind", "message"),
    [
        ('{"ok": true}', OpenReply, "port: Field required"),
        ('{"ok": true, "port": 1, "host": "x"}', OpenReply, "host: unknown field"),
        ('{"ok": true, "loss": 1, "why": "x"}', StepReply, "why"),
        ('{"ok": fal', Reply, "message: Invalid JSON"),
    ],
)
def test_invalid_reply_is_named(line: str, kind: type[Reply], message: str) -> None:
    with pytest.raises(MessageError, match=message):
        decode_reply(line.encode(), kind)


def test_protocol_is_light() -> None:
    code = (
        "import sys, agentloop.training.learner_client.protocol\n"
        "heavy = {'torch', 'numpy', 'transformers', 'aiohttp', 'anyio'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=patient(60))
