"""Frames of a token stream, however their bytes are split, and the chunks that they become."""

from __future__ import annotations

import itertools
from base64 import b64encode
from struct import pack
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentloop.errors import ServerUnavailable
from agentloop.inference.sglang import frames
from agentloop.inference.sglang.frames import (
    Chunk,
    ChunkReader,
    ErrorFrame,
    FrameDecoder,
    InvalidFrame,
)
from agentloop.token_records import RoutedExperts
from agentloop.trajectory import TurnEnd, VersionSpan

FAST = settings(max_examples=100, deadline=None)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(min(at, len(data)) for at in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(edges)]


payloads = st.lists(st.text("ab{}: é\\", min_size=1, max_size=10).map(str.encode), max_size=6)


@FAST
@given(payloads, st.sampled_from([b"\n", b"\r\n"]), st.lists(st.integers(0, 120), max_size=12))
def test_frames_are_decoded_however_the_bytes_are_split(
    sent: list[bytes], newline: bytes, cuts: list[int]
) -> None:
    stream = b"".join(b"data: " + payload + newline * 2 for payload in sent)
    decoder = FrameDecoder()
    assert [p for piece in cut(stream, cuts) for p in decoder.feed(piece)] == sent


def test_frame_of_several_lines_and_other_fields() -> None:
    stream = b": comment\n\nevent: x\nid: 3\ndata: one\ndata:two\n\ndata: three\n\ndata: unfinished"
    assert FrameDecoder().feed(stream) == [b"one\ntwo", b"three"]


def test_frame_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "_MAX_FRAME_BYTES", 1000)
    decoder = FrameDecoder()
    for _ in range(10):
        assert decoder.feed(b"x" * 100) == []
    with pytest.raises(ServerUnavailable, match="longer than 1000 bytes"):
        decoder.feed(b"x")


def test_large_frame_is_not_copied_again_for_each_piece() -> None:
    decoder = FrameDecoder()
    decoder.feed(b"data: " + b"x" * 1_000_000)
    before = decoder._rest
    decoder.feed(b"y")
    assert decoder._rest is before  # extended in place


def frame(
    *ids: int, upto: int, version: str = "v0", finish: dict[str, Any] | None = None, **meta: Any
) -> bytes:
    """Return an incremental frame with `ids`, after which `upto` tokens have been sampled."""
    body = {
        "output_ids": ids,
        "meta_info": {
            "weight_version": version,
            "completion_tokens": upto,
            "output_token_logprobs": [[-token / 10, token, None] for token in ids],
            "finish_reason": finish,
            **meta,
        },
    }
    return b"data: " + orjson.dumps(body) + b"\n\n"


def test_frames_that_arrive_together_become_one_chunk_per_version() -> None:
    chunks: list[Chunk] = []
    reader = ChunkReader(chunks.append)
    together = frame(1, upto=1) + frame(2, upto=2) + frame(3, upto=3, version="v1")
    assert not reader.feed(together)
    assert [(chunk.ids, chunk.version) for chunk in chunks] == [([1, 2], "v0"), ([3], "v1")]
    assert chunks[0].logprobs == [-0.1, -0.2]
    assert (reader.num_tokens, reader.ended) == (3, False)
    spans = [{"version": "v0", "start": 0, "end": 2}, {"version": "v1", "start": 2, "end": 4}]
    last = frame(4, upto=4, version="v1", finish={"type": "stop"}, weight_versions=spans)
    assert reader.feed(last + b"data: [DONE]\n\n")
    assert (chunks[-1].ids, chunks[-1].end) == ([4], TurnEnd.STOP)
    assert chunks[-1].versions == (VersionSpan("v0", 0, 2), VersionSpan("v1", 2, 4))
    assert (reader.num_tokens, reader.ended) == (4, True)


def test_stream_without_a_last_frame_has_not_ended() -> None:
    reader = ChunkReader(lambda chunk: None)
    assert not reader.feed(frame(1, upto=1) + b"data: [DONE]\n\n")
    assert not reader.ended


@pytest.mark.parametrize(
    "data",
    [
        b'{"error": {"message": "too long", "code": 400}}',
        b'{"output_ids": [7], "meta_info": {"weight_version": "v", "completion_tokens": 1, '
        b'"output_token_logprobs": [], "finish_reason": '
        b'{"type": "abort", "status_code": 400, "message": "too long"}}}',  # after a token
    ],
)
def test_error_frame_carries_its_status(data: bytes) -> None:
    with pytest.raises(ErrorFrame, match="too long") as caught:
        ChunkReader(lambda chunk: None).feed(b"data: " + data + b"\n\n")
    assert caught.value.status == 400


@pytest.mark.parametrize("number", ["null", "1e999", "NaN", "-Infinity", '"-0.5"', "[]"])
def test_log_probability_that_is_not_finite_is_refused(number: str) -> None:
    chunks: list[Chunk] = []
    reader = ChunkReader(chunks.append)
    reader.feed(frame(1, 2, upto=2))
    with pytest.raises(InvalidFrame):
        reader.feed(frame(3, upto=3).replace(b"[[-0.3,", b"[[" + number.encode() + b","))
    assert [(chunk.ids, chunk.logprobs) for chunk in chunks] == [([1, 2], [-0.1, -0.2])]


@pytest.mark.parametrize("id", [None, -1, 2.5, "3"])
def test_invalid_token_id_is_refused(id: Any) -> None:
    data = frame(3, upto=1).replace(
        b'"output_ids":[3]', b'"output_ids":[' + orjson.dumps(id) + b"]"
    )
    with pytest.raises(InvalidFrame, match="is no id of a token"):
        ChunkReader(lambda chunk: None).feed(data)


def test_alternatives_without_probability_are_left_out() -> None:
    chunks: list[Chunk] = []
    top = [[[-0.1, 3, None], [None, 4, None]]]
    ChunkReader(chunks.append).feed(frame(3, upto=1, output_top_logprobs=top))
    assert chunks[0].top_logprobs == [[(-0.1, 3)]]


def kept_frame(*tokens: tuple[int, float, list[int]], upto: int, **meta: Any) -> bytes:
    """Return a frame with tokens, each with its log-probability among its kept ids."""
    return frame(
        *(id for id, _, _ in tokens),
        upto=upto,
        output_token_sampling_mask=[kept for _, _, kept in tokens],
        output_token_sampling_logprobs=[logprob for _, logprob, _ in tokens],
        **meta,
    )


def test_kept_ids_come_with_log_probabilities_among_them() -> None:
    chunks: list[Chunk] = []
    reader = ChunkReader(chunks.append)
    all_so_far = kept_frame((3, -0.5, [3, 4]), (5, 0.0, [5]), upto=2)  # it does not stream deltas
    reader.feed(kept_frame((3, -0.5, [3, 4]), upto=1))
    reader.feed(all_so_far)
    reader.feed(kept_frame((6, -1.5, [7, 6, 8]), upto=3, finish={"type": "stop"}))
    assert [chunk.kept for chunk in chunks] == [[[3, 4]], [[5]], [[7, 6, 8]]]
    assert [chunk.logprobs for chunk in chunks] == [[-0.5], [0.0], [-1.5]]


def last_frame(kind: str = "stop", **meta: Any) -> bytes:
    return frame(3, 5, upto=2, finish={"type": kind}, prompt_tokens=4, **meta)


def test_last_chunk_has_the_experts_from_a_token_on() -> None:
    chunks: list[Chunk] = []
    experts = b64encode(pack("<6i", *range(6))).decode()
    ChunkReader(chunks.append, experts_from=2).feed(last_frame(routed_experts=experts))
    assert chunks[0].experts == RoutedExperts(2, 2, bytes(range(6)))
    ChunkReader(chunks.append, experts_from=2).feed(last_frame("abort"))
    assert chunks[1].experts is None


@pytest.mark.parametrize(
    ("meta", "message"),
    [({}, "needs --enable-return-routed-experts"), ({"routed_experts": "AAAA"}, "3 bytes of")],
)
def test_answer_without_the_experts_is_refused(meta: Any, message: str) -> None:
    with pytest.raises(InvalidFrame, match=message):
        ChunkReader(lambda chunk: None, experts_from=2).feed(last_frame(**meta))


@pytest.mark.parametrize(
    "kept", [[], [4, 5], [3, None], [3, 4.5], [3, "4"], [3, *range(4, 4100)], None]
)
def test_kept_ids_without_the_sampled_one_are_refused(kept: Any) -> None:
    with pytest.raises(InvalidFrame):
        ChunkReader(lambda chunk: None).feed(kept_frame((3, -0.5, kept), upto=1))


def test_missing_kept_ids_are_refused() -> None:
    data = kept_frame((3, -0.5, [3]), upto=1).replace(b"[[3]]", b"[]")
    with pytest.raises(InvalidFrame):
        ChunkReader(lambda chunk: None).feed(data)
