from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.sandbox import ProtocolError
from agentloop.sandbox.protocol import HEADER, FrameReader, encode
from agentloop.sandbox.worker.wire import Job, pack_job, unpack_job


def test_frames_survive_any_chunking() -> None:
    messages = [{"id": n, "code": "é" * n} for n in range(50)]
    data = b"".join(map(encode, messages))
    for size in (1, 3, 7, 4096, len(data)):
        reader = FrameReader()
        observed = []
        for start in range(0, len(data), size):
            observed += reader.feed(data[start : start + size])
        assert observed == messages


def test_lone_surrogates_pass() -> None:
    frame = encode({"code": "\ud800"})
    assert json.loads(frame[HEADER.size :]) == {"code": "\ud800"}


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (HEADER.pack(1 << 31), "a frame of"),
        (HEADER.pack(1) + b"{", "not JSON"),
        (HEADER.pack(2) + b"[]", "not list"),
    ],
)
def test_nonsense_is_refused(data: bytes, problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        FrameReader().feed(data)


@given(
    code=st.text(st.characters()),
    stdin=st.binary(),
    timeout_s=st.floats(0, 3600),
    lasting=st.booleans(),
    native=st.booleans(),
    memory_bytes=st.integers(0, 1 << 50),
)
@settings(deadline=None)
def test_job_is_unpacked_as_it_was_packed(
    code: str, stdin: bytes, timeout_s: float, lasting: bool, native: bool, memory_bytes: int
) -> None:
    packed = pack_job(code, timeout_s, lasting, native, memory_bytes)
    job = Job(code, timeout_s, lasting, native, memory_bytes, stdin)
    assert unpack_job(packed + stdin) == job
