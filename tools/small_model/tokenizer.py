"""The byte-level BPE tokenizer of the small model.

Letters, single digits and everything else are split before merging, and no token merges a leading
space with a word. So a name always has the same tokens, which makes copying it easy for a model
this small. A line break is a token of its own, so that contents have the same tokens whether they
are encoded with the template's markup or apart from it. Does not need torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

VOCAB_SIZE = 512
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# Not "special" in the library's sense, so that decoding keeps them, as with Qwen3.
TAGS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<reason>",
    "</reason>",
    "<answer>",
    "</answer>",
)
_RESTS = "|".join(re.escape(name[1:]) for name in (PAD, START, END, *TAGS))
ADDED = re.compile(f"<(?P<rest>{_RESTS})")
_MARK = "\ue000"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")


def render(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """Render a dialogue with the chat template, without a tokenizer."""
    rendered, _ = render_jinja_template(
        [messages], tools=tools or None, chat_template=TEMPLATE.read_text(encoding="utf-8")
    )
    return str(rendered[0])


def build(texts: Iterable[str], max_length: int) -> Any:
    """Train a tokenizer of `VOCAB_SIZE` entries on `texts`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex("[A-Za-z]+|[0-9]|\n|[^A-Za-z0-9\n]+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    added = [AddedToken(name, special=True, normalized=False) for name in (PAD, START, END)]
    added += [AddedToken(name, special=False, normalized=False) for name in TAGS]
    make: Any = trainers.BpeTrainer  # untyped in the library
    trainer = make(
        vocab_size=VOCAB_SIZE,
        special_tokens=added,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # The trainer does not know added tokens: cut them out, or it would merge their letters.
    pieces = (piece for text in texts for piece in ADDED.sub(_MARK, text).split(_MARK) if piece)
    core.train_from_iterator(pieces, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=_keep_tags(core),
        pad_token=PAD,
        eos_token=END,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE.read_text(encoding="utf-8"),
    )


def _keep_tags(core: Tokenizer) -> Tokenizer:
    """Make the tags non-special again: the trainer makes every added token special."""
    settings = json.loads(core.to_str())
    for token in settings["added_tokens"]:
        token["special"] = token["content"] not in TAGS
    return Tokenizer.from_str(json.dumps(settings))


def save(tokenizer: Any, directory: Path) -> None:
    """Save tokenizer.json, its configuration and the template, under the most common class name."""
    tokenizer.save_pretrained(directory)
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def load(directory: Path) -> Any:
    return PreTrainedTokenizerFast.from_pretrained(directory)
