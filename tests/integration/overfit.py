"""Teach the small model some sequences by heart: `python -m tests.integration.overfit FOLDER`.

The folder has a tokenizer that may have more tokens than the model. The sequences come from
standard input, as JSON: lists of ids, and of whether each is sampled. The model is written into the
folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from agentloop.models import SMALL

MAX_STEPS = 200
ENOUGH = 0.3  # nats for the least likely token: greedy decoding writes it


def main(folder: Path) -> None:
    request = json.load(sys.stdin)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # with more, threads wait for each other on a busy machine
    model = AutoModelForCausalLM.from_pretrained(SMALL, dtype=torch.float32)
    model.resize_token_embeddings(request["vocab_size"], mean_resizing=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = [
        (torch.tensor([ids]), torch.tensor([sampled])) for ids, sampled in request["sequences"]
    ]
    for _ in range(MAX_STEPS):
        worst = 0.0
        for ids, sampled in batches:
            logits = model(ids).logits[0, :-1]
            losses = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none")
            of_sampled = losses[sampled[0, 1:]]
            worst = max(worst, of_sampled.max().item())
            of_sampled.mean().backward()
        if worst < ENOUGH:
            break
        optimizer.step()
        optimizer.zero_grad()
    print(f"at most {worst:.3f} nats per sampled token")
    model.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
