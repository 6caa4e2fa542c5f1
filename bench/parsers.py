"""Compare our parsers of tool calls with SGLang's, on the same streams.

    python -m bench.parsers --turns 300
    python -m bench.parsers --cost            what a token costs ours; needs no SGLang

Random turns of one to three calls are written in the form of each family, and streamed twice: in
chunks of one to six tokens, and in one to four pieces that are split anywhere, as they come from a
server with `--stream-interval`, speculative decoding or much to do. Ours reads ids, SGLang's the
text of each chunk. Counted are the turns whose calls come out as they were written.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken

from agentloop.agent.chat_format import ChatFormat
from agentloop.agent.formats import FAMILIES, Family
from agentloop.agent.text_stream import TextStream
from agentloop.inference.sglang.parser_probe import read_calls
from agentloop.models import SMALL
from bench.call_forms import FORMS, Call

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "number": {"type": "integer"},
                    "flag": {"type": "boolean"},
                    "list": {"type": "array", "items": {"type": "integer"}},
                },
            },
        },
    }
    for name in ("search", "python_code")
]
TEXTS = (
    "print(37 * 48)",
    "for n in range(3):\n    print(f'{n}: {n**2}')",
    'She said "hello", and left.',
    '{"nested": [1, {"a": "b"}]}',
    "weather in Zürich ☀ 漢字",
    "a < b and b > c",
    "C:\\temp\\new",
    "",
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare parsers of tool calls.")
    parser.add_argument("--turns", type=int, default=300, help="turns per family")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cost", action="store_true", help="measure what a token costs ours")
    parser.add_argument("--rounds", type=int, default=15, help="of --cost, in turn")
    options = parser.parse_args()
    dice = random.Random(options.seed)
    chat = ChatFormat.load(SMALL)
    tags = {tag for family in FAMILIES for tag in (*family.all_tags, family.end_of_calls) if tag}
    chat.tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in sorted(tags)])
    made = {
        family.name: [_random_calls(dice, family) for _ in range(options.turns)]
        for family in FAMILIES
    }
    if options.cost:
        _print_costs(chat, made, options.rounds)
        return
    print("| format | ours | SGLang's, few tokens | SGLang's, few pieces | its parser |")
    print("|---|---|---|---|---|")
    for family in FAMILIES:
        chat.family, calls = family, made[family.name]
        turns = [_ids(chat, family, call) for call in calls]
        few_tokens = [_cut(ids, _every(dice, len(ids))) for ids in turns]
        few_pieces = [_cut(ids, _anywhere(dice, len(ids))) for ids in turns]
        ours = [*map(_is_ours_right, [chat] * len(turns) * 2, few_tokens + few_pieces, calls * 2)]
        texts = [[*_decode(chat, chunks)] for chunks in few_tokens]
        wholes = ["".join(pieces) for pieces in texts]
        pieces = [_cut(text, _anywhere(dice, len(text))) for text in wholes]
        shares = [sum(ours) / len(ours), _theirs(family, texts, calls)]
        shares.append(_theirs(family, pieces, calls))
        shown = " | ".join("none" if share is None else f"{share:.1%}" for share in shares)
        print(f"| `{family.name}` | {shown} | {family.sglang_parser} |", flush=True)


def _random_calls(dice: random.Random, family: Family) -> list[Call]:
    def random_call() -> Call:
        arguments: dict[str, Any] = {
            "text": dice.choice(TEXTS),
            "number": dice.randint(-5, 10**6),
            "flag": dice.random() < 0.5,
            "list": [dice.randint(0, 9) for _ in range(dice.randint(0, 3))],
        }
        kept = [key for key in arguments if dice.random() < 0.7]
        return dice.choice(["search", "python_code"]), {key: arguments[key] for key in kept}

    max_calls = 1 if FORMS[family.name].one_call else 3
    return [random_call() for _ in range(dice.randint(1, max_calls))]


def _ids(chat: ChatFormat, family: Family, calls: Sequence[Call]) -> list[int]:
    form = FORMS[family.name]
    text = f"{form.before}{form.text(calls)}"
    return list(chat.tokenizer.encode(text, add_special_tokens=False).ids)


def _every(dice: random.Random, length: int) -> list[int]:
    """Return where chunks of one to six tokens end."""
    edges = [0]
    while edges[-1] < length:
        edges.append(edges[-1] + dice.randint(1, 6))
    return edges[1:]


def _anywhere(dice: random.Random, length: int) -> list[int]:
    """Return where one to four pieces end."""
    return [*sorted(dice.randint(0, length) for _ in range(dice.randint(0, 3))), length]


def _cut(sequence: Any, ends: Sequence[int]) -> list[Any]:
    return [sequence[a:b] for a, b in itertools.pairwise([0, *ends]) if a < b]


def _is_ours_right(chat: ChatFormat, chunks: list[list[int]], calls: list[Call]) -> bool:
    stream = chat.family.calls(chat, TOOLS)
    decoded = [call for chunk in chunks for call in stream.feed(chunk)] + stream.finish()
    return [(call.name, call.arguments) for call in decoded] == calls


def _theirs(family: Family, texts: list[list[str]], made: list[list[Call]]) -> float | None:
    if not family.sglang_parser:
        return None
    decoded = read_calls(family.sglang_parser, texts, TOOLS)
    return sum(map(_same, decoded, made)) / len(made)


def _decode(chat: ChatFormat, chunks: Sequence[Sequence[int]]) -> list[str]:
    """Return the text of each chunk; a character is whole, as a server sends it."""
    stream = TextStream(chat)
    return [*map(stream.feed, chunks), stream.flush()]


def _same(decoded: list[tuple[str, Any]], calls: list[Call]) -> bool:
    return json.dumps(decoded, sort_keys=True) == json.dumps(calls, sort_keys=True)


def _print_costs(chat: ChatFormat, made: dict[str, list[list[Call]]], rounds: int) -> None:
    """Print CPU time per token, one token at a time: the best of rounds that take turns."""
    best: dict[tuple[str, str], float] = {}
    text = chat.encode("I think about it, and then I write a program. " * 50)
    for _ in range(rounds):
        for family in FAMILIES:
            chat.family = family
            turns = [_ids(chat, family, calls) for calls in made[family.name]]
            for kind, streams in (("text", [text]), ("calls", turns)):
                cost_us = min(best.get((family.name, kind), math.inf), _cost(chat, streams))
                best[family.name, kind] = cost_us
    print("| format | \u00b5s per token of text | of calls | of Hermes's |\n|---|---|---|---|")
    for family in FAMILIES:
        outside, inside = best[family.name, "text"], best[family.name, "calls"]
        ratio = inside / best["hermes", "calls"]
        print(f"| `{family.name}` | {outside:.2f} | {inside:.2f} | {ratio:.2f} |")


def _cost(chat: ChatFormat, streams: Sequence[Sequence[int]]) -> float:
    """Return the microseconds that a token of these streams costs."""
    started = time.process_time()
    for ids in streams:
        stream = chat.family.calls(chat, TOOLS)
        for token in ids:
            stream.feed([token])
        stream.finish()
    return (time.process_time() - started) / sum(map(len, streams)) * 1e6


if __name__ == "__main__":
    main()
