"""A model that counts down: the length of its reply is encoded in its prompt, unknown to servers.

Token k is followed by token k - 1, and token 0 ends the reply. So a prompt that ends with k is
answered with exactly k known tokens, while a server knows only `max_new_tokens`. Everything else is
a real Qwen3: keys, values and attention are computed and cached. The weights are constructed, not
trained: the contributions of attention and MLP to the residual stream are multiplied by zero, so
that the last token's embedding reaches the head, whose row k - 1 is the embedding of k. Random
directions in 256 dimensions are nearly orthogonal: the right logit is 16, any other below 8.

Tokens above `LONGEST` fill the rest of a prompt and predict nothing. Greedy sampling only. There is
no tokenizer: serve it with `--skip-tokenizer-init`.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

EOS = 0
LONGEST = 1535  # maximum number of tokens of a reply
VOCAB_SIZE = 2048
FILLER = range(LONGEST + 1, VOCAB_SIZE)  # ids without meaning

_HIDDEN = 256
_HEADS = 4
_KV_HEADS = 2
_HEAD_DIM = 32
_INTERMEDIATE = 64  # small, because the MLP contributes nothing
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": _HIDDEN,
    "intermediate_size": _INTERMEDIATE,
    "num_hidden_layers": 1,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16_384,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "dtype": "float32",
}


def countdown(length: int) -> list[int]:
    """Return the reply to a prompt that ends with the id `length`, of 1 to `LONGEST`."""
    return list(range(length - 1, -1, -1))


def save(folder: Path) -> Path:
    """Write config and weights (about 4 MB) into a new folder, and return it."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    save_file(_weights(), folder / "model.safetensors", {"format": "pt"})
    return folder


def _weights() -> dict[str, np.ndarray]:
    """Return float32 tensors by their names in a checkpoint of transformers; rows are outputs."""
    rng = np.random.default_rng(0)

    def random(rows: int, columns: int) -> np.ndarray:
        return rng.standard_normal((rows, columns), dtype=np.float32) / np.float32(columns**0.5)

    embeddings = random(VOCAB_SIZE, _HIDDEN)
    embeddings /= np.linalg.norm(embeddings, axis=1, keepdims=True)
    head = np.zeros_like(embeddings)
    head[:LONGEST] = embeddings[1 : LONGEST + 1]
    queries, keys = _HEADS * _HEAD_DIM, _KV_HEADS * _HEAD_DIM
    layer = {
        "input_layernorm.weight": np.ones(_HIDDEN, np.float32),
        "post_attention_layernorm.weight": np.ones(_HIDDEN, np.float32),
        "self_attn.q_norm.weight": np.ones(_HEAD_DIM, np.float32),
        "self_attn.k_norm.weight": np.ones(_HEAD_DIM, np.float32),
        "self_attn.q_proj.weight": random(queries, _HIDDEN),
        "self_attn.k_proj.weight": random(keys, _HIDDEN),
        "self_attn.v_proj.weight": random(keys, _HIDDEN),
        "self_attn.o_proj.weight": np.zeros((_HIDDEN, queries), np.float32),
        "mlp.gate_proj.weight": random(_INTERMEDIATE, _HIDDEN),
        "mlp.up_proj.weight": random(_INTERMEDIATE, _HIDDEN),
        "mlp.down_proj.weight": np.zeros((_HIDDEN, _INTERMEDIATE), np.float32),
    }
    return {
        "model.embed_tokens.weight": embeddings,
        "model.norm.weight": np.ones(_HIDDEN, np.float32),
        "lm_head.weight": head,
        **{f"model.layers.0.{name}": tensor for name, tensor in layer.items()},
    }
