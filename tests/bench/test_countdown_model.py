"""The constructed weights, without a server: the head sees only the last token, and counts down."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from bench.countdown_model import EOS, FILLER, LONGEST, VOCAB_SIZE, config, countdown, save, weights


def test_each_token_is_followed_by_the_one_below() -> None:
    tensors = weights(num_layers=1)
    hidden = tensors["model.embed_tokens.weight"][1 : LONGEST + 1]
    hidden = hidden / np.sqrt((hidden**2).mean(axis=1, keepdims=True))  # the last norm
    logits = hidden @ tensors["lm_head.weight"].T
    assert (logits.argmax(axis=1) == np.arange(LONGEST)).all()
    first, second = np.sort(logits, axis=1)[:, ::-1][:, :2].T
    assert (first - second).min() > 4  # robust against rounding


def test_layers_leave_the_residual_stream_alone() -> None:
    tensors = weights(num_layers=3)
    adding = [name for name in tensors if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(adding) == 6
    assert not any(tensors[name].any() for name in adding)
    # But keys, values and queries are still computed and cached.
    assert all(tensors[f"model.layers.2.self_attn.{kind}_proj.weight"].any() for kind in "qkv")


def test_countdown_ends_with_the_end_token() -> None:
    assert countdown(3) == [2, 1, EOS]
    assert countdown(1) == [EOS]
    assert len(countdown(LONGEST)) == LONGEST


@pytest.mark.parametrize("length", [0, LONGEST + 1])
def test_other_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=str(length)):
        countdown(length)


def test_filler_starts_no_countdown_and_is_in_the_vocabulary() -> None:
    assert LONGEST not in FILLER
    assert max(FILLER) == VOCAB_SIZE - 1
    head = weights(num_layers=1)["lm_head.weight"]
    assert not head[LONGEST:].any()  # so it is never predicted


def test_folder_holds_what_its_config_says(tmp_path: Path) -> None:
    folder = save(tmp_path / "new" / "model", num_layers=2, context_length=512)
    content = json.loads((folder / "config.json").read_text())
    assert content == config(num_layers=2, context_length=512)
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].shape == (
        content["vocab_size"],
        content["hidden_size"],
    )
    assert tensors["lm_head.weight"].shape == (content["vocab_size"], content["hidden_size"])
    heads = content["num_attention_heads"] * content["head_dim"]
    assert tensors["model.layers.1.self_attn.o_proj.weight"].shape == (
        content["hidden_size"],
        heads,
    )
