"""Supervised training of the small model.

sample -> render -> ids and mask -> batches of similar length -> Muon. One process with a fixed
number of threads: the same seed gives the same weights on the same machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from tools.small_model.episodes import Episode, Message, sample
from tools.small_model.names import Names
from tools.small_model.qwen3 import Qwen3Config, Qwen3ForCausalLM
from tools.small_model.tokenizer import (
    ADDED,
    END,
    PAD,
    START,
    VOCAB_SIZE,
    build,
    render,
)

THREADS = 1  # faster than two on shared cores, and reproducible on any machine
MAX_LENGTH = 4096
_IGNORED = -100
_CUT = "\ue000"


@dataclass(frozen=True)
class SmallModelSettings:
    """Settings of the training.

    `batch_tokens` counts padding; samples longer than `max_tokens` are left out.
    """

    steps: int = 4000
    seed: int = 0
    learning_rate: float = 3e-3
    batch_tokens: int = 4096
    max_tokens: int = 1600
    pool: int = 512
    warmup: int = 50
    weight_decay: float = 0.05


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the training with a schedule of its own."""

    names: Names
    steps: int
    learning_rate: float


def stages(settings: SmallModelSettings) -> tuple[Stage, ...]:
    """Return the stages: four fifths on all skills, then a gentler fifth with names of every
    kind."""
    last = settings.steps // 5
    parts = (
        Stage(Names.PLAIN, settings.steps - last, settings.learning_rate),
        Stage(Names.WIDE, last, settings.learning_rate / 3),
    )
    return tuple(stage for stage in parts if stage.steps)


def architecture(tokenizer: Any) -> Any:
    """Return the configuration of a small Qwen3 with 0.85 million parameters."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=MAX_LENGTH,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
    )


def make_tokenizer(seed: int, num_episodes: int = 3000) -> Any:
    rng = Random(f"tokenizer {seed}")
    episodes = (sample(rng) for _ in range(num_episodes))
    return build((render(e.messages, e.tools) for e in episodes), MAX_LENGTH)


def token_ids(tokenizer: Any, episodes: Sequence[Episode], **options: Any) -> list[list[int]]:
    """Return the ids of the rendered episodes; `options` go to the template.

    Text of a user or a tool never becomes a tag's token, as in the runtime.
    """
    cut = [[_without_tags(message) for message in e.messages] for e in episodes]
    texts = [
        tokenizer.apply_chat_template(m, tools=e.tools or None, tokenize=False, **options)
        for m, e in zip(cut, episodes, strict=True)
    ]
    pieces = [text.split(_CUT) for text in texts]
    encoded = iter(tokenizer([piece for parts in pieces for piece in parts])["input_ids"])
    return [[token for _ in parts for token in next(encoded)] for parts in pieces]


def _without_tags(message: Message) -> Message:
    if message["role"] == "assistant":
        return message
    return {**message, "content": ADDED.sub(rf"<{_CUT}\g<rest>", message["content"])}


def encode(tokenizer: Any, episodes: list[Episode]) -> list[tuple[list[int], list[int]]]:
    """Return ids and labels [T] of each episode; labels are set on the tokens to be learned."""
    start, end = tokenizer.convert_tokens_to_ids([START, END])
    head = tokenizer.encode(f"{START}assistant\n<reason>")
    plain = head[:-1]
    encoded = []
    for episode, ids in zip(episodes, token_ids(tokenizer, episodes), strict=True):
        labels = [_IGNORED] * len(ids)
        trained = iter(episode.trained)
        for at in [i for i, token in enumerate(ids) if token == start]:
            if ids[at : at + len(plain)] == plain and next(trained):
                first, last = at + len(head), ids.index(end, at)
                labels[first : last + 1] = ids[first : last + 1]
        encoded.append((ids, labels))
    return encoded


def batches(
    tokenizer: Any, settings: SmallModelSettings, names: Names
) -> Iterator[tuple[Any, Any]]:
    """Yield batches endlessly: ids and labels [B, T], padded on the right."""
    rng = Random(f"episodes {settings.seed}{' wide' if names is Names.WIDE else ''}")
    pad = tokenizer.pad_token_id
    while True:
        pool = encode(tokenizer, [sample(rng, names) for _ in range(settings.pool)])
        pool = sorted(
            (p for p in pool if len(p[0]) <= settings.max_tokens), key=lambda p: len(p[0])
        )
        groups: list[list[tuple[list[int], list[int]]]] = [[]]
        for pair in pool:
            if len(pair[0]) * (len(groups[-1]) + 1) > settings.batch_tokens:
                groups.append([])
            groups[-1].append(pair)
        rng.shuffle(groups)
        for group in groups:
            width = len(group[-1][0])
            ids = [pair[0] + [pad] * (width - len(pair[0])) for pair in group]
            labels = [pair[1] + [_IGNORED] * (width - len(pair[1])) for pair in group]
            yield torch.tensor(ids), torch.tensor(labels)


def loss_of(model: Any, ids: Any, labels: Any) -> Any:
    """Return the mean cross-entropy over the labelled positions; only their logits are computed."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
    targets = labels[:, 1:]
    chosen = targets != _IGNORED
    logits = model.lm_head(hidden[:, :-1][chosen])
    return torch.nn.functional.cross_entropy(logits, targets[chosen])


def train(
    tokenizer: Any,
    settings: SmallModelSettings,
    progress: Callable[[int, float], None] = lambda *_: None,
) -> Any:
    """Return the trained model in float32. `progress` is called with each step and its loss."""
    torch.set_num_threads(THREADS)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(settings.seed)
    model = Qwen3ForCausalLM(architecture(tokenizer)).float().train()
    done = 0
    for stage in stages(settings):
        if (
            done
        ):  # start from the rounded weights, so that a stage can be repeated from shipped ones
            _round_to_bf16(model)
        for loss in _steps(model, tokenizer, settings, stage):
            done += 1
            progress(done, loss)
    return model.eval()


def _steps(
    model: Any, tokenizer: Any, settings: SmallModelSettings, stage: Stage
) -> Iterator[float]:
    optimizers = _optimizers(model, settings)
    stream = batches(tokenizer, settings, stage.names)
    for step in range(stage.steps):
        loss = loss_of(model, *next(stream))
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate * _schedule(step, stage.steps, settings.warmup)
            optimizer.step()
        yield loss.item()


def _round_to_bf16(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))


def _optimizers(model: Any, settings: SmallModelSettings) -> tuple[Any, Any]:
    """Return Muon for the inner matrices and AdamW for embeddings and norms.

    Muon learns to copy (names, digits) in about two thirds of the steps that AdamW alone takes.
    """
    inside = [p for name, p in model.named_parameters() if p.ndim > 1 and "embed" not in name]
    kept = {id(parameter) for parameter in inside}
    outside = [parameter for parameter in model.parameters() if id(parameter) not in kept]
    muon = torch.optim.Muon(
        inside,
        lr=settings.learning_rate,
        weight_decay=settings.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    adam = torch.optim.AdamW(
        outside, lr=settings.learning_rate, betas=(0.9, 0.98), weight_decay=0.0
    )
    return muon, adam


def _schedule(step: int, steps: int, warmup: int) -> float:
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))
